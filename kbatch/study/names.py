"""The names, conditions and values of a study's trials, as its texts and figures write them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kbatch.analysis.rate_search import FACTOR_NAME
from kbatch.page import numbers
from kbatch.page.environment import UNKNOWN_DEVICE, versions_text
from kbatch.records.notes import Note
from kbatch.records.record import EnvironmentRecord
from kbatch.records.training_run import COST_NAMES, Budget, ExecutionRecord
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds

MOST_NAMED = 5


class TrialNames(NamedTuple):
    """What tells the trials of a study apart beside the batch size."""

    hyperparameters: tuple[str, ...]  # Those of the user that differ between trials.
    several_policies: bool  # Whether the dtype policy differs.

    def settings(self, trial: TrialRecord) -> tuple[str, ...]:
        """List what a trial has beside its batch size, such as `("units=8", "float32")`."""
        values = ((name, trial.hyperparameters.get(name)) for name in self.hyperparameters)
        own = (f"{name}={value_text(value)}" for name, value in values)
        return (*own, *((trial.dtype_policy,) if self.several_policies else ()))

    def name(self, trial: TrialRecord) -> str:
        """Name a trial, such as `"64 (units=8)"`."""
        settings = ", ".join(self.settings(trial))
        return f"{trial.batch_size:,} ({settings})" if settings else f"{trial.batch_size:,}"

    def order(self, trial: TrialRecord) -> tuple[tuple[int, float, str], ...]:
        """Return a key that sorts trials by their settings: numbers by value, then texts."""
        values = [trial.hyperparameters.get(name) for name in self.hyperparameters]
        return (*(_rank(value) for value in values), _rank(trial.dtype_policy))


def trial_names(trials: Iterable[TrialRecord]) -> TrialNames:
    trials = tuple(trials)
    names = dict.fromkeys(name for trial in trials for name in trial.hyperparameters)
    return TrialNames(
        hyperparameters=tuple(
            name
            for name in names
            if name not in (*OWN_COLUMNS, FACTOR_NAME)  # The rate itself has a column.
            and not name.startswith("tuner/")
            and len({trial.hyperparameters.get(name) for trial in trials}) > 1
        ),
        several_policies=len({trial.dtype_policy for trial in trials}) > 1,
    )


def value_text(value: bool | int | float | str | None) -> str:
    return numbers.setting(value) if isinstance(value, float) else str(value)


def decay_text(value: float) -> str:
    """Write a decay or momentum, near 1 by two digits of its distance: 0.9995 is not 0.999."""
    distance = 1 - value
    near = 0 < distance < 0.01
    return f"{1 - float(f'{distance:.2g}'):.10g}" if near else numbers.setting(value)


def _rank(value: bool | int | float | str | None) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0, "") if value is None else (1, 0, value)


def missing_text(missing: int) -> str:
    """Say that trials of a study are missing, an empty text where none is."""
    return Note.of("trials_missing", count=missing) if missing else ""


def at_most(names: Sequence[str]) -> list[str]:
    """Return the first five names, and how many there are more."""
    more = len(names) - MOST_NAMED
    return [*names[:MOST_NAMED], *([f"{more:,} more"] if more > 0 else [])]


def outcome(trial: TrialRecord) -> str:
    """Word how a trial ended: its status, or that the training diverged."""
    return "diverged" if diverged(trial) else trial.status.replace("_", " ")


def diverged(trial: TrialRecord) -> bool:
    """Return whether a trial failed because its loss did not stay finite."""
    return trial.status == "failed" and any(e.diverged for e in trial.executions)


def metric_words(name: str) -> str:
    """Spell out a metric's name, such as "validation accuracy" for `val_accuracy`."""
    words = name.removeprefix("val_").replace("_", " ")
    if name == "samples_per_second":
        return "throughput"
    if name in COST_NAMES:
        return words
    return f"{'validation' if name.startswith('val_') else 'training'} {words}"


def is_fraction(name: str) -> bool:
    return "acc" in name


class Conditions(NamedTuple):
    """What was compared, and where."""

    device: str | None  # None if it was not recorded.
    versions: tuple[str, ...]  # Of TensorFlow and Keras, such as `"TensorFlow 2.21.0"`.
    policies: tuple[str, ...]  # Dtype policies that were active.
    trials: int
    executions: tuple[int, int]  # Fewest and most of a trial.
    # Fewest and most epochs of an execution that completed, and training examples of a first
    # epoch; None if none completed.
    epochs: tuple[int, int] | None
    examples: tuple[int, int] | None
    # What ended the executions that completed, where it was not the number of epochs.
    ends: tuple[str, ...] = ()


def conditions_of(
    trials: Sequence[TrialRecord], environment: EnvironmentRecord | None
) -> Conditions:
    """Gather the conditions of at least one trial."""
    completed = [e for t in trials for e in t.executions if e.status == "completed"]
    timed, kinds = [e for e in completed if e.epochs], device_kinds(trials)

    def bounds(values: list[int]) -> tuple[int, int]:
        return min(values), max(values)

    return Conditions(
        device=" and ".join(kinds) if len(kinds) > 1 else environment and environment.device,
        versions=tuple(versions_text(environment)),
        policies=tuple(dict.fromkeys(t.dtype_policy for t in trials)),
        trials=len(trials),
        executions=bounds([len(t.executions) for t in trials]),
        epochs=bounds([len(e.epochs) for e in timed]) if timed else None,
        examples=bounds([e.epochs[0].examples for e in timed]) if timed else None,
        ends=tuple(dict.fromkeys(filter(None, map(end_text, timed)))),
    )


def caption(conditions: Conditions) -> str:
    """Write the conditions as one line, parts separated by a middle dot."""
    parts = [
        conditions.device or UNKNOWN_DEVICE,
        *conditions.versions,
        ", ".join(conditions.policies),
        f"{numbers.pluralize(conditions.trials, 'trial')}, "
        f"{numbers.count_range(conditions.executions, 'execution')} each",
        f"budget: {budget_text(conditions)} each" if conditions.epochs else "",
    ]
    return " · ".join(filter(None, parts))


def budget_text(conditions: Conditions) -> str:
    """Describe how long the executions trained; they need to have completed."""
    epochs = numbers.count_range(conditions.epochs, "epoch") if conditions.epochs else "no epoch"
    if conditions.ends:
        return f"{' or '.join(conditions.ends)} ({epochs})"
    if conditions.examples is None:
        return epochs
    return f"{epochs} of {numbers.count_range(conditions.examples, 'example')}"


def end_text(execution: ExecutionRecord) -> str:
    """Describe what ends an execution, an empty text where it is the number of epochs."""
    budget, target, limits = execution.budget or Budget(), execution.target, []
    if budget.train_s is not None:
        limits.append(f"{numbers.setting(budget.train_s)} s of training")
    if budget.updates is not None:
        limits.append(numbers.pluralize(budget.updates, "update"))
    if budget.examples is not None:
        limits.append(numbers.pluralize(budget.examples, "example"))
    if target is None:
        return " or ".join(limits)
    sign = "≥" if target.direction == "max" else "≤"
    until = f"until {target.metric} {sign} {numbers.setting(target.value)}"
    return f"{until}, at most {' or '.join(limits)}" if limits else until
