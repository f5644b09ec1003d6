"""kbatch answers which batch size a Keras model should use, and why.

Every name is imported when it is first used, so `import kbatch` is fast and a report never
starts TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOME_OF = {
    "BatchSizeHyperModel": "kbatch.tuning.hypermodel",
    "BatchSizeTuner": "kbatch.tuning.tuner",
    "ExampleBudget": "kbatch.training.budgets",
    "GpuMonitor": "kbatch.instruments.gpu_monitor",
    "InferenceProfile": "kbatch.records.inference",
    "InputPipelineProfile": "kbatch.records.input_pipeline",
    "LivePlot": "kbatch.tuning.live_plot",
    "MaxBatchSizeResult": "kbatch.records.max_batch",
    "OutOfMemoryError": "kbatch.training.errors",
    "Recommendation": "kbatch.records.recommendation",
    "StopAtTarget": "kbatch.training.stop_at_target",
    "Study": "kbatch.records.study",
    "TimeBudget": "kbatch.training.budgets",
    "TrainingProfile": "kbatch.records.training_profile",
    "UpdateBudget": "kbatch.training.budgets",
    "accumulate_gradients": "kbatch.training.accumulation",
    "analysis": "kbatch.analysis",
    "find_max_batch_size": "kbatch.profiling.max_batch",
    "load_study": "kbatch.records.loading",
    "plot_goodput": "kbatch.reporting.figures.goodput",
    "plot_gpu_timeline": "kbatch.reporting.figures.gpu_timeline",
    "plot_inference_memory": "kbatch.reporting.figures.inference_memory",
    "plot_inference_noise": "kbatch.reporting.figures.inference_noise",
    "plot_inference_operating_curve": "kbatch.reporting.figures.inference_operating_curve",
    "plot_inference_paths": "kbatch.reporting.figures.inference_paths",
    "plot_inference_tails": "kbatch.reporting.figures.inference_tails",
    "plot_inference_throughput": "kbatch.reporting.figures.inference_throughput",
    "plot_input_pipeline": "kbatch.reporting.figures.input_pipeline",
    "plot_learning_curves": "kbatch.reporting.figures.learning_curves",
    "plot_limits": "kbatch.reporting.figures.limits",
    "plot_memory": "kbatch.reporting.figures.memory",
    "plot_noise_scale": "kbatch.reporting.figures.noise_scale",
    "plot_pareto": "kbatch.reporting.figures.pareto",
    "plot_ranking": "kbatch.reporting.figures.ranking",
    "plot_time_to_target": "kbatch.reporting.figures.time_to_target",
    "plot_training_profile": "kbatch.reporting.figures.training_profile",
    "plot_trials": "kbatch.reporting.figures.trials",
    "powers_of_two": "kbatch.analysis.batch_sizes",
    "profile_inference": "kbatch.profiling.inference",
    "profile_input_pipeline": "kbatch.profiling.input_pipeline",
    "profile_training": "kbatch.profiling.training",
    "quiet_start": "kbatch.instruments.quiet_start",
    "recommend": "kbatch.tuning.recommend",
    "scale_learning_rate": "kbatch.analysis.learning_rates",
    "write_report": "kbatch.reporting.report",
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
    "recommend",
    "scale_learning_rate",
    "write_report",
]

if TYPE_CHECKING:
    from kbatch import analysis
    from kbatch.analysis.batch_sizes import powers_of_two
    from kbatch.analysis.learning_rates import scale_learning_rate
    from kbatch.instruments.gpu_monitor import GpuMonitor
    from kbatch.instruments.quiet_start import quiet_start
    from kbatch.profiling.inference import profile_inference
    from kbatch.profiling.input_pipeline import profile_input_pipeline
    from kbatch.profiling.max_batch import find_max_batch_size
    from kbatch.profiling.training import profile_training
    from kbatch.records.inference import InferenceProfile
    from kbatch.records.input_pipeline import InputPipelineProfile
    from kbatch.records.loading import load_study
    from kbatch.records.max_batch import MaxBatchSizeResult
    from kbatch.records.recommendation import Recommendation
    from kbatch.records.study import Study
    from kbatch.records.training_profile import TrainingProfile
    from kbatch.reporting.figures.goodput import plot_goodput
    from kbatch.reporting.figures.gpu_timeline import plot_gpu_timeline
    from kbatch.reporting.figures.inference_memory import plot_inference_memory
    from kbatch.reporting.figures.inference_noise import plot_inference_noise
    from kbatch.reporting.figures.inference_operating_curve import plot_inference_operating_curve
    from kbatch.reporting.figures.inference_paths import plot_inference_paths
    from kbatch.reporting.figures.inference_tails import plot_inference_tails
    from kbatch.reporting.figures.inference_throughput import plot_inference_throughput
    from kbatch.reporting.figures.input_pipeline import plot_input_pipeline
    from kbatch.reporting.figures.learning_curves import plot_learning_curves
    from kbatch.reporting.figures.limits import plot_limits
    from kbatch.reporting.figures.memory import plot_memory
    from kbatch.reporting.figures.noise_scale import plot_noise_scale
    from kbatch.reporting.figures.pareto import plot_pareto
    from kbatch.reporting.figures.ranking import plot_ranking
    from kbatch.reporting.figures.time_to_target import plot_time_to_target
    from kbatch.reporting.figures.training_profile import plot_training_profile
    from kbatch.reporting.figures.trials import plot_trials
    from kbatch.reporting.report import write_report
    from kbatch.training.accumulation import accumulate_gradients
    from kbatch.training.budgets import ExampleBudget, TimeBudget, UpdateBudget
    from kbatch.training.errors import OutOfMemoryError
    from kbatch.training.stop_at_target import StopAtTarget
    from kbatch.tuning.hypermodel import BatchSizeHyperModel
    from kbatch.tuning.live_plot import LivePlot
    from kbatch.tuning.recommend import recommend
    from kbatch.tuning.tuner import BatchSizeTuner


def __getattr__(name: str):
    """Imports a public name on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kbatch' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF[name])
    value = home if name == "analysis" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
