"""Values with their spread, as figures show them."""

from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.study.metric_names import is_fraction
from kbatch.study.spreads import spreads
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord


class Estimate(NamedTuple):
    """A value with its spread.

    Attributes:
        value: The value.
        low: Lower end of its interval, None if it has none; not below 0 for an accuracy.
        high: Upper end of its interval, None if it has none; not above 1 for an accuracy.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def bar(self) -> tuple[float, float] | None:
        """Both ends of the interval, None if it has none."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def throughput_estimate(trial: TrialRecord) -> Estimate | None:
    """Gives the throughput of a trial in examples per second, None if it was not measured."""
    return estimate(trial.samples_per_second, trial.samples_per_second_interval)


def metric_estimate(trial: TrialRecord, name: str) -> Estimate | None:
    """Gives a metric of a trial at its best epoch, None if it was not measured."""
    value, interval = trial.metrics.get(name), trial.metric_interval(name)
    return estimate(value, _within_range(name, value, interval))


def objective_estimate(trial: TrialRecord) -> Estimate | None:
    """Gives the objective of a trial, None if it was not measured."""
    value = trial.objective_value
    return estimate(value, _within_range(trial.objective.name, value, trial.objective_interval))


def estimate(value: float | None, interval: Interval | None) -> Estimate | None:
    """Joins a value and its interval, None without a value."""
    if value is None:
        return None
    return Estimate(value, interval and interval.low, interval and interval.high)


def bars_text(study: Study) -> str:
    """Says what the bars of throughput and of metrics are, an empty text where there are none."""
    found = spreads(study.trials)
    if found.intervals:
        return "Bars: 95 % interval of the mean over executions."
    if found.quartiles:
        return "Bars of throughput: quartiles of the timing windows of one execution."
    return ""


def _within_range(name: str, value: float | None, interval: Interval | None) -> Interval | None:
    """Cuts the interval of an accuracy where accuracies end."""
    if value is None or interval is None or not is_fraction(name) or not 0 <= value <= 1:
        return interval
    return Interval(max(0.0, interval.low), min(1.0, interval.high))
