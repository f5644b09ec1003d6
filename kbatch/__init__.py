"""kbatch answers which batch size a Keras model should use, and why.

Every name is imported when it is first used, so `import kbatch` is fast and a report never
starts TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME_OF = {
    "BatchSizeHyperModel": "kbatch.tuning.hypermodel",
    "BatchSizeTuner": "kbatch.tuning.tuner",
    "ExampleBudget": "kbatch.training.budgets",
    "GpuMonitor": "kbatch.instruments.gpu_monitor",
    "InputPipelineProfile": "kbatch.records.input_pipeline",
    "MaxBatchSizeResult": "kbatch.records.max_batch",
    "OutOfMemoryError": "kbatch.training.errors",
    "StopAtTarget": "kbatch.training.stop_at_target",
    "Study": "kbatch.records.study",
    "TimeBudget": "kbatch.training.budgets",
    "UpdateBudget": "kbatch.training.budgets",
    "accumulate_gradients": "kbatch.training.accumulation",
    "analysis": "kbatch.analysis",
    "find_max_batch_size": "kbatch.profiling.max_batch",
    "load_study": "kbatch.records.loading",
    "plot_input_pipeline": "kbatch.reporting.figures.input_pipeline",
    "plot_trials": "kbatch.reporting.figures.trials",
    "powers_of_two": "kbatch.analysis.batch_sizes",
    "profile_input_pipeline": "kbatch.profiling.input_pipeline",
    "scale_learning_rate": "kbatch.analysis.learning_rates",
    "write_report": "kbatch.reporting.report",
}

__all__ = [
    "BatchSizeHyperModel",
    "BatchSizeTuner",
    "ExampleBudget",
    "GpuMonitor",
    "InputPipelineProfile",
    "MaxBatchSizeResult",
    "OutOfMemoryError",
    "StopAtTarget",
    "Study",
    "TimeBudget",
    "UpdateBudget",
    "accumulate_gradients",
    "analysis",
    "find_max_batch_size",
    "load_study",
    "plot_input_pipeline",
    "plot_trials",
    "powers_of_two",
    "profile_input_pipeline",
    "scale_learning_rate",
    "write_report",
]

if TYPE_CHECKING:
    from kbatch import analysis
    from kbatch.analysis.batch_sizes import powers_of_two
    from kbatch.analysis.learning_rates import scale_learning_rate
    from kbatch.instruments.gpu_monitor import GpuMonitor
    from kbatch.profiling.input_pipeline import profile_input_pipeline
    from kbatch.profiling.max_batch import find_max_batch_size
    from kbatch.records.input_pipeline import InputPipelineProfile
    from kbatch.records.loading import load_study
    from kbatch.records.max_batch import MaxBatchSizeResult
    from kbatch.records.study import Study
    from kbatch.reporting.figures.input_pipeline import plot_input_pipeline
    from kbatch.reporting.figures.trials import plot_trials
    from kbatch.reporting.report import write_report
    from kbatch.training.accumulation import accumulate_gradients
    from kbatch.training.budgets import ExampleBudget, TimeBudget, UpdateBudget
    from kbatch.training.errors import OutOfMemoryError
    from kbatch.training.stop_at_target import StopAtTarget
    from kbatch.tuning.hypermodel import BatchSizeHyperModel
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
