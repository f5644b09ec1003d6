"""kbatch answers which batch size a Keras model should use, and why.

Every name is imported when it is first used, so `import kbatch` is fast and a report never
starts TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOME_OF = {
    "BatchSizeHyperModel": "kbatch.search.hypermodel",
    "BatchSizeTuner": "kbatch.search.tuner",
    "ExampleBudget": "kbatch.training.callbacks",
    "GpuMonitor": "kbatch.device.gpu_monitor",
    "InferenceProfile": "kbatch.inference.profile",
    "InputPipelineProfile": "kbatch.input_pipeline.record",
    "LivePlot": "kbatch.search.live_plot",
    "MaxBatchSizeResult": "kbatch.memory.record",
    "OutOfMemoryError": "kbatch.errors",
    "Recommendation": "kbatch.recommendation.record",
    "StopAtTarget": "kbatch.training.callbacks",
    "Study": "kbatch.study.study",
    "TimeBudget": "kbatch.training.callbacks",
    "TrainingProfile": "kbatch.throughput.record",
    "UpdateBudget": "kbatch.training.callbacks",
    "accumulate_gradients": "kbatch.training.accumulation",
    "analysis": "kbatch.analysis",
    "find_max_batch_size": "kbatch.memory.find",
    "load_study": "kbatch.study.study",
    "plot_goodput": "kbatch.study.figures.goodput",
    "plot_gpu_timeline": "kbatch.study.figures.gpu_timeline",
    "plot_inference_memory": "kbatch.inference.figures",
    "plot_inference_noise": "kbatch.inference.figures",
    "plot_inference_operating_curve": "kbatch.inference.figures",
    "plot_inference_paths": "kbatch.inference.figures",
    "plot_inference_tails": "kbatch.inference.figures",
    "plot_inference_throughput": "kbatch.inference.figures",
    "plot_input_pipeline": "kbatch.input_pipeline.report",
    "plot_learning_curves": "kbatch.study.figures.learning_curves",
    "plot_limits": "kbatch.recommendation.figure",
    "plot_memory": "kbatch.memory.report",
    "plot_noise_scale": "kbatch.study.figures.noise_scale",
    "plot_pareto": "kbatch.study.figures.pareto",
    "plot_ranking": "kbatch.study.figures.ranking",
    "plot_time_to_target": "kbatch.study.figures.time_to_target",
    "plot_training_profile": "kbatch.throughput.report",
    "plot_trials": "kbatch.study.figures.trials",
    "powers_of_two": "kbatch.analysis.batch_sizes",
    "profile_inference": "kbatch.inference.measure",
    "profile_input_pipeline": "kbatch.input_pipeline.measure",
    "profile_training": "kbatch.throughput.measure",
    "quiet_start": "kbatch.device.quiet_start",
    "ray_executor": "kbatch.search.executors",
    "recommend": "kbatch.recommendation.measure",
    "scale_learning_rate": "kbatch.analysis.learning_rate",
    "write_report": "kbatch.report.pages",
}

__all__ = [
    "BatchSizeHyperModel",
    "BatchSizeTuner",
    "ExampleBudget",
    "GpuMonitor",
    "InferenceProfile",
    "InputPipelineProfile",
    "LivePlot",
    "MaxBatchSizeResult",
    "OutOfMemoryError",
    "Recommendation",
    "StopAtTarget",
    "Study",
    "TimeBudget",
    "TrainingProfile",
    "UpdateBudget",
    "accumulate_gradients",
    "analysis",
    "find_max_batch_size",
    "load_study",
    "plot_goodput",
    "plot_gpu_timeline",
    "plot_inference_memory",
    "plot_inference_noise",
    "plot_inference_operating_curve",
    "plot_inference_paths",
    "plot_inference_tails",
    "plot_inference_throughput",
    "plot_input_pipeline",
    "plot_learning_curves",
    "plot_limits",
    "plot_memory",
    "plot_noise_scale",
    "plot_pareto",
    "plot_ranking",
    "plot_time_to_target",
    "plot_training_profile",
    "plot_trials",
    "powers_of_two",
    "profile_inference",
    "profile_input_pipeline",
    "profile_training",
    "quiet_start",
    "ray_executor",
    "recommend",
    "scale_learning_rate",
    "write_report",
]

if TYPE_CHECKING:
    from kbatch import analysis
    from kbatch.analysis.batch_sizes import powers_of_two
    from kbatch.analysis.learning_rate import scale_learning_rate
    from kbatch.device.gpu_monitor import GpuMonitor
    from kbatch.device.quiet_start import quiet_start
    from kbatch.errors import OutOfMemoryError
    from kbatch.inference.figures import (
        plot_inference_memory,
        plot_inference_noise,
        plot_inference_operating_curve,
        plot_inference_paths,
        plot_inference_tails,
        plot_inference_throughput,
    )
    from kbatch.inference.measure import profile_inference
    from kbatch.inference.profile import InferenceProfile
    from kbatch.input_pipeline.measure import profile_input_pipeline
    from kbatch.input_pipeline.record import InputPipelineProfile
    from kbatch.input_pipeline.report import plot_input_pipeline
    from kbatch.memory.find import find_max_batch_size
    from kbatch.memory.record import MaxBatchSizeResult
    from kbatch.memory.report import plot_memory
    from kbatch.recommendation.figure import plot_limits
    from kbatch.recommendation.measure import recommend
    from kbatch.recommendation.record import Recommendation
    from kbatch.report.pages import write_report
    from kbatch.search.executors import ray_executor
    from kbatch.search.hypermodel import BatchSizeHyperModel
    from kbatch.search.live_plot import LivePlot
    from kbatch.search.tuner import BatchSizeTuner
    from kbatch.study.figures.goodput import plot_goodput
    from kbatch.study.figures.gpu_timeline import plot_gpu_timeline
    from kbatch.study.figures.learning_curves import plot_learning_curves
    from kbatch.study.figures.noise_scale import plot_noise_scale
    from kbatch.study.figures.pareto import plot_pareto
    from kbatch.study.figures.ranking import plot_ranking
    from kbatch.study.figures.time_to_target import plot_time_to_target
    from kbatch.study.figures.trials import plot_trials
    from kbatch.study.study import Study, load_study
    from kbatch.throughput.measure import profile_training
    from kbatch.throughput.record import TrainingProfile
    from kbatch.throughput.report import plot_training_profile
    from kbatch.training.accumulation import accumulate_gradients
    from kbatch.training.callbacks import ExampleBudget, StopAtTarget, TimeBudget, UpdateBudget


def __getattr__(name: str):
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kbatch' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF[name])
    value = home if name == "analysis" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
