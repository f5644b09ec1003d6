"""Rows of the study's table, one mapping a trial or an execution."""

from collections.abc import Callable, Mapping, Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.records.execution import ExecutionRecord
from kbatch.records.target import COST_NAMES
from kbatch.study.trial import TrialRecord

# Hyperparameters that stand in columns of their own.
_OWN = ("batch_size", "dtype_policy")
_USAGE: Mapping[str, Callable[[ExecutionRecord], float | None]] = {
    "joules_to_target": lambda e: e.joules_to_target,
    "joules_per_sample": lambda e: e.joules_per_sample,
    "gpu_energy_j": lambda e: e.usage and e.usage.gpu_energy_j,
    "gpu_power_w": lambda e: e.usage and e.usage.gpu_power_w,
    "gpu_utilization": lambda e: e.usage and e.usage.gpu_utilization,
    "cpu_cores_busy": lambda e: e.usage and e.usage.cpu_cores_busy,
    "resident_bytes": lambda e: e.usage and e.usage.resident_bytes,
}


def trial_rows(trials: Sequence[TrialRecord]) -> list[dict[str, object]]:
    """Makes one row a trial, averaged over its executions."""
    taken = _metric_names(trials)
    return [_extended(_trial_row(trial), trial, trial.metrics, taken) for trial in trials]


def execution_rows(trials: Sequence[TrialRecord]) -> list[dict[str, object]]:
    """Makes one row an execution."""
    taken = _metric_names(trials)
    return [
        _extended(_execution_row(trial, index, execution), trial, _metrics(trial, execution), taken)
        for trial in trials
        for index, execution in enumerate(trial.executions)
    ]


def _metrics(trial: TrialRecord, execution: ExecutionRecord) -> dict[str, float]:
    return execution.best_metrics(trial.objective.name, trial.objective.direction)


def _trial_row(trial: TrialRecord) -> dict[str, object]:
    first = trial.executions[0]
    return {
        "trial_id": trial.trial_id,
        "status": trial.status,
        "batch_size": trial.batch_size,
        "micro_batch_size": trial.micro_batch_size,
        "accumulation_steps": trial.accumulation_steps,
        "batch_size_seen": first.batch_size_seen,
        "dtype_policy": trial.dtype_policy,
        "optimizer": first.optimizer,
        "learning_rate": trial.learning_rate,
        "samples_per_second": trial.samples_per_second,
        **_interval_columns(trial.samples_per_second_interval),
        "window_samples_per_second": trial.window_samples_per_second,
        "first_step_s": trial.mean(lambda e: e.first_step_s),
        "data_wait_share": trial.mean(lambda e: e.data_wait_share),
        "train_s": trial.mean(lambda e: e.train_s),
        "total_s": trial.mean(lambda e: e.total_s),
        "examples_seen": trial.mean(lambda e: e.examples_seen),
        "updates": trial.mean(lambda e: e.updates),
        **{name: trial.cost(name) for name in COST_NAMES},
        **_noise_columns(trial.noise_scale),
        **{name: trial.mean(quantity) for name, quantity in _USAGE.items()},
        "epochs": trial.mean(lambda e: len(e.epochs)),
        "executions": len(trial.executions),
        "failure": trial.failure,
    }


def _execution_row(trial: TrialRecord, index: int, execution: ExecutionRecord) -> dict[str, object]:
    return {
        "trial_id": trial.trial_id,
        "execution": index,
        "seed": execution.seed,
        "status": execution.status,
        "batch_size": execution.batch_size,
        "micro_batch_size": execution.micro_batch_size,
        "accumulation_steps": execution.accumulation_steps,
        "batch_size_seen": execution.batch_size_seen,
        "dtype_policy": execution.dtype_policy,
        "optimizer": execution.optimizer,
        "learning_rate": execution.learning_rate,
        "samples_per_second": execution.samples_per_second,
        **_interval_columns(execution.samples_per_second_interval),
        "window_samples_per_second": execution.window_samples_per_second,
        "first_step_s": execution.first_step_s,
        "data_wait_share": execution.data_wait_share,
        "train_s": execution.train_s,
        "total_s": execution.total_s,
        "examples_seen": execution.examples_seen,
        "updates": execution.updates,
        **{name: execution.cost(name) for name in COST_NAMES},
        **_noise_columns(execution.noise_scale),
        **{name: quantity(execution) for name, quantity in _USAGE.items()},
        "epochs": len(execution.epochs),
        "failure": execution.failure,
    }


def _interval_columns(interval: Interval | None) -> dict[str, float | None]:
    return {
        "samples_per_second_low": interval and interval.low,
        "samples_per_second_high": interval and interval.high,
    }


def _noise_columns(scale: NoiseScale | None) -> dict[str, float | None]:
    """Gives the noise scale; an unresolved one has a lower bound alone."""
    return {
        "noise_scale": scale and scale.value,
        "noise_scale_low": scale and scale.at_least,
        "noise_scale_high": scale and scale.interval and scale.interval.high,
    }


def _extended(
    row: dict[str, object], trial: TrialRecord, metrics: Mapping[str, object], taken: set[str]
) -> dict[str, object]:
    """Adds metrics and hyperparameters without covering a column of any trial."""
    row |= {name: value for name, value in metrics.items() if name not in row}
    for name, value in trial.hyperparameters.items():
        if name not in _OWN:
            row[f"hp/{name}" if name in row or name in taken else name] = value
    return row


def _metric_names(trials: Sequence[TrialRecord]) -> set[str]:
    return {name for trial in trials for name in trial.metrics}
