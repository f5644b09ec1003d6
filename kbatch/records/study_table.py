"""Rows of the study's table, one mapping a trial or an execution."""

from collections.abc import Iterable

from kbatch.analysis.intervals import Interval
from kbatch.records.execution import ExecutionRecord
from kbatch.records.trial import TrialRecord

# Hyperparameters that stand in columns of their own.
_OWN = ("batch_size", "dtype_policy")


def trial_rows(trials: Iterable[TrialRecord]) -> list[dict[str, object]]:
    """Makes one row a trial, averaged over its executions."""
    return [_trial_row(trial) for trial in trials]


def execution_rows(trials: Iterable[TrialRecord]) -> list[dict[str, object]]:
    """Makes one row an execution."""
    return [
        _execution_row(trial, index, execution)
        for trial in trials
        for index, execution in enumerate(trial.executions)
    ]


def _trial_row(trial: TrialRecord) -> dict[str, object]:
    first = trial.executions[0]
    row = {
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
        "first_step_s": trial.mean(lambda e: e.first_step_s),
        "data_wait_share": trial.mean(lambda e: e.data_wait_share),
        "train_s": trial.mean(lambda e: e.train_s),
        "total_s": trial.mean(lambda e: e.total_s),
        "examples_seen": trial.mean(lambda e: e.examples_seen),
        "updates": trial.mean(lambda e: e.updates),
        "epochs": trial.mean(lambda e: len(e.epochs)),
        "executions": len(trial.executions),
        "failure": trial.failure,
    }
    return _extended(row, trial, trial.metrics)


def _execution_row(trial: TrialRecord, index: int, execution: ExecutionRecord) -> dict[str, object]:
    throughput = execution.throughput
    best = execution.best_epoch(trial.objective.name, trial.objective.direction)
    row = {
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
        "samples_per_second": throughput and throughput.median,
        **_interval_columns(execution.throughput_quartiles),
        "first_step_s": execution.first_step_s,
        "data_wait_share": execution.data_wait_share,
        "train_s": execution.train_s,
        "total_s": execution.total_s,
        "examples_seen": execution.examples_seen,
        "updates": execution.updates,
        "epochs": len(execution.epochs),
        "failure": execution.failure,
    }
    return _extended(row, trial, best.metrics if best else {})


def _interval_columns(interval: Interval | None) -> dict[str, float | None]:
    return {
        "samples_per_second_low": interval and interval.low,
        "samples_per_second_high": interval and interval.high,
    }


def _extended(row, trial: TrialRecord, metrics) -> dict[str, object]:
    """Adds metrics and hyperparameters without covering a column."""
    row |= {name: value for name, value in metrics.items() if name not in row}
    for name, value in trial.hyperparameters.items():
        if name not in _OWN:
            row[f"hp/{name}" if name in row else name] = value
    return row
