"""The conditions behind a study's numbers, and their spreads."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES, Interval
from kbatch.document.numbers import counted, setting
from kbatch.document.section import UNKNOWN_DEVICE, clocks_text, versions_text
from kbatch.records.training_run import Budget, ExecutionRecord
from kbatch.study.names import is_fraction
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord


class Conditions(NamedTuple):
    """What was compared, and where.

    Attributes:
        device: The device in a few words, None if it was not recorded.
        versions: Versions of TensorFlow and Keras, such as `"TensorFlow 2.21.0"`.
        policies: Dtype policies that were active.
        trials: Trials in the study.
        executions: Fewest and most executions of a trial.
        epochs: Fewest and most epochs of an execution that completed, None if none did.
        examples: Fewest and most training examples of a first epoch, None if none completed.
        ends: What ended the executions that completed, in words, where it was not the number of
            epochs.
        clocks: Between which GPU clocks the trials ran, in words, where they are far apart.
    """

    device: str | None
    versions: tuple[str, ...]
    policies: tuple[str, ...]
    trials: int
    executions: tuple[int, int]
    epochs: tuple[int, int] | None
    examples: tuple[int, int] | None
    ends: tuple[str, ...] = ()
    clocks: str = ""


def conditions_of(study: Study) -> Conditions:
    """Gather the conditions of a study with at least one trial."""
    environment = study.search.environment if study.search else None
    completed = [e for t in study.trials for e in t.executions if e.status == "completed"]
    timed = [e for e in completed if e.epochs]
    examples = [e.epochs[0].examples for e in timed]
    return Conditions(
        device=environment.device if environment else None,
        versions=tuple(versions_text(environment)),
        policies=tuple(dict.fromkeys(t.dtype_policy for t in study.trials)),
        trials=len(study.trials),
        executions=_bounds(len(t.executions) for t in study.trials),
        epochs=_bounds(len(e.epochs) for e in timed) if timed else None,
        examples=_bounds(examples) if examples else None,
        ends=tuple(dict.fromkeys(filter(None, (end_text(e) for e in timed)))),
        clocks=clocks_text(
            (
                f"{trial.batch_size:,}",
                trial.mean(lambda e: None if e.usage is None else e.usage.sm_clock_mhz),
            )
            for trial in study.trials
            if trial.status == "completed"
        ),
    )


def caption(conditions: Conditions) -> str:
    """Write the conditions as one line, parts separated by a middle dot."""
    parts = [
        conditions.device or UNKNOWN_DEVICE,
        *conditions.versions,
        ", ".join(conditions.policies),
        f"{counted(conditions.trials, 'trial')}, {executions_text(conditions)}",
    ]
    if conditions.epochs:
        parts.append(f"budget: {budget_text(conditions)} each")
    return " · ".join([*parts, conditions.clocks] if conditions.clocks else parts)


def executions_text(conditions: Conditions) -> str:
    """Describe how often each trial was executed."""
    return f"{_range_text(conditions.executions, 'execution')} each"


def budget_text(conditions: Conditions) -> str:
    """Describe how long the executions trained; they need to have completed."""
    epochs = epochs_text(conditions.epochs) if conditions.epochs else "no epoch"
    if conditions.ends:
        return f"{' or '.join(conditions.ends)} ({epochs})"
    if conditions.examples is None:
        return epochs
    return f"{epochs} of {examples_text(conditions.examples)}"


def end_text(execution: ExecutionRecord) -> str:
    """Describe what ends an execution, an empty text where it is the number of epochs."""
    budget, target = execution.budget, execution.target
    limits = [] if budget is None else _limits(budget)
    if target is None:
        return " or ".join(limits)
    sign = "≥" if target.direction == "max" else "≤"
    until = f"until {target.metric} {sign} {setting(target.value)}"
    return f"{until}, at most {' or '.join(limits)}" if limits else until


def _limits(budget: Budget) -> list[str]:
    texts = []
    if budget.train_s is not None:
        texts.append(f"{setting(budget.train_s)} s of training")
    if budget.updates is not None:
        texts.append(counted(budget.updates, "update"))
    if budget.examples is not None:
        texts.append(counted(budget.examples, "example"))
    return texts


def examples_text(examples: tuple[int, int]) -> str:
    """Describe how many examples an epoch trains on."""
    return _range_text(examples, "example")


def epochs_text(epochs: tuple[int, int]) -> str:
    """Describe how many epochs the executions had."""
    return _range_text(epochs, "epoch")


def _range_text(bounds: tuple[int, int], noun: str) -> str:
    low, high = bounds
    return counted(low, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def _bounds(values: Iterable[int]) -> tuple[int, int]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


class Spreads(NamedTuple):
    """Which spreads there are among trials.

    Attributes:
        intervals: Whether a trial has executions enough for a 95 % interval.
        pairs: Whether a trial has several executions, but too few for an interval.
        single: Whether a trial has one execution.
        quartiles: Whether a trial of one execution has quartiles over its timing windows.
    """

    intervals: bool
    pairs: bool
    single: bool
    quartiles: bool


def spreads(trials: Iterable[TrialRecord]) -> Spreads:
    """Find which spreads the trials have that completed."""
    completed = [trial for trial in trials if trial.status == "completed"]
    counts = {len(trial.executions) for trial in completed}
    single = [trial for trial in completed if len(trial.executions) == 1]
    return Spreads(
        intervals=any(count >= FEWEST_VALUES for count in counts),
        pairs=any(1 < count < FEWEST_VALUES for count in counts),
        single=bool(single),
        quartiles=any(trial.samples_per_second_interval for trial in single),
    )


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
    """Return the throughput of a trial in examples per second, None if it was not measured."""
    return estimate(trial.samples_per_second, trial.samples_per_second_interval)


def metric_estimate(trial: TrialRecord, name: str) -> Estimate | None:
    """Return a metric of a trial at its best epoch, None if it was not measured."""
    value, interval = trial.metrics.get(name), trial.metric_interval(name)
    return estimate(value, _within_range(name, value, interval))


def objective_estimate(trial: TrialRecord) -> Estimate | None:
    """Return the objective of a trial, None if it was not measured."""
    value = trial.objective_value
    return estimate(value, _within_range(trial.objective.name, value, trial.objective_interval))


def estimate(value: float | None, interval: Interval | None) -> Estimate | None:
    """Join a value and its interval, None without a value."""
    if value is None:
        return None
    return Estimate(value, interval and interval.low, interval and interval.high)


def bars_text(study: Study) -> str:
    """Describe what the bars of throughput and of metrics are; empty where there are none."""
    found = spreads(study.trials)
    if found.intervals:
        return "Bars: 95 % interval of the mean over executions."
    if found.quartiles:
        return "Bars of throughput: quartiles of the timing windows of one execution."
    return ""


def _within_range(name: str, value: float | None, interval: Interval | None) -> Interval | None:
    """Cut the interval of an accuracy where accuracies end."""
    if value is None or interval is None or not is_fraction(name) or not 0 <= value <= 1:
        return interval
    return Interval(max(0.0, interval.low), min(1.0, interval.high))
