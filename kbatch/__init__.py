"""kbatch finds the batch size and the learning rate to train a Keras model with, and says why.

A name is imported when it is first used. Therefore `import kbatch` is fast, and writing a report
does not start TensorFlow.
"""

import importlib

__version__ = "0.3.0"

# The public names and the modules that define them; `__init__.pyi` says the same to type checkers.
_HOME_OF = {
    "analysis": "kbatch.analysis",
    "powers_of_two": "kbatch.analysis.batch_sizes",
    "scale_learning_rate": "kbatch.analysis.learning_rate",
    "quiet_start": "kbatch.cli.arguments",
    "GpuMonitor": "kbatch.device.gpu_monitor",
    "OutOfMemoryError": "kbatch.errors",
    "plot_inference_memory": "kbatch.inference.figures",
    "plot_inference_operating_curve": "kbatch.inference.figures",
    "plot_inference_throughput": "kbatch.inference.figures",
    "profile_inference": "kbatch.inference.measure",
    "InferenceProfile": "kbatch.inference.result",
    "plot_input_pipeline": "kbatch.input_pipeline.figure",
    "profile_input_pipeline": "kbatch.input_pipeline.measure",
    "InputPipelineProfile": "kbatch.input_pipeline.result",
    "plot_memory": "kbatch.memory.figure",
    "find_max_batch_size": "kbatch.memory.find",
    "MaxBatchSizeResult": "kbatch.memory.result",
    "plot_limits": "kbatch.recommendation.figure",
    "recommend": "kbatch.recommendation.measure",
    "Recommendation": "kbatch.recommendation.result",
    "write_report": "kbatch.report",
    "ray_executor": "kbatch.search.executors",
    "BatchSizeHyperModel": "kbatch.search.hypermodel",
    "LivePlot": "kbatch.search.live_plot",
    "BatchSizeTuner": "kbatch.search.tuner",
    "Comparison": "kbatch.study.comparison",
    "compare": "kbatch.study.comparison",
    "plot_gpu_timeline": "kbatch.study.figures.timelines",
    "plot_noise_scale": "kbatch.study.figures.efficiency",
    "plot_learning_curves": "kbatch.study.figures.quality",
    "plot_learning_rates": "kbatch.study.figures.quality",
    "plot_pareto": "kbatch.study.figures.quality",
    "plot_search": "kbatch.study.figures.timelines",
    "plot_time_to_target": "kbatch.study.figures.efficiency",
    "plot_trials": "kbatch.study.figures.trials",
    "Study": "kbatch.study.study",
    "load_study": "kbatch.study.study",
    "plot_training_profile": "kbatch.throughput.figure",
    "profile_training": "kbatch.throughput.measure",
    "TrainingProfile": "kbatch.throughput.result",
    "accumulate_gradients": "kbatch.training.accumulation",
    "StopAtTarget": "kbatch.training.callbacks",
    "TimeBudget": "kbatch.training.callbacks",
    "UpdateBudget": "kbatch.training.callbacks",
    "training_dataset": "kbatch.training.data.training_data",
}
__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kbatch' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF[name])
    # `kbatch.analysis` is a module, not a name in one.
    globals()[name] = value = home if home.__name__ == f"kbatch.{name}" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    """List the public names, including those that are not yet imported."""
    return sorted({*globals(), *__all__})
