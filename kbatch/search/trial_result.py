"""What keras-tuner is told of a trial: figures that its record holds."""

from typing import NamedTuple

from kbatch.records.target import COST_NAMES
from kbatch.study.trial import TrialRecord


class TrialResult(NamedTuple):
    """The result of a trial that completed.

    Attributes:
        metrics: Metrics of the best epoch, the throughput and the costs of a target, the means over
            executions.
        step: Number of the best epoch, from 0, the mean over executions.
    """

    metrics: dict[str, float]
    step: int


def trial_result(record: TrialRecord | None) -> TrialResult | str:
    """Gives the result of a trial.

    Args:
        record: The record of the trial, None if there is none.

    Returns:
        Its result, or why it has none.
    """
    if record is None:
        return "Nothing was recorded."
    if record.status != "completed":
        return record.failure or f"The trial ended as {record.status}."
    if record.objective_value is None:
        if record.objective.name in COST_NAMES:
            return f"The target was never met, so {record.objective.name} is not known."
        return f"The objective {record.objective.name} was not finite or not measured."
    measured = {"samples_per_second": record.samples_per_second}
    measured |= {name: record.cost(name) for name in COST_NAMES}
    known = {name: float(value) for name, value in measured.items() if value is not None}
    return TrialResult(record.metrics | known, _best_step(record))


def _best_step(record: TrialRecord) -> int:
    name, direction = record.objective.name, record.objective.direction
    best = (execution.best_epoch(name, direction) for execution in record.executions)
    return int(sum(epoch.epoch for epoch in best if epoch) / len(record.executions))
