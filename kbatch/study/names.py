"""Names of trials, of how they ended, and of metrics on axes."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.document.numbers import setting
from kbatch.records.training_run import COST_NAMES
from kbatch.study.trial import Objective, TrialRecord

# Hyperparameters that every figure and table shows anyway.
_OWN = ("batch_size", "dtype_policy")


class TrialNames(NamedTuple):
    """What tells the trials of a study apart beside the batch size.

    Attributes:
        hyperparameters: Names of the user's hyperparameters that differ between trials.
        several_policies: Whether the dtype policy differs.
    """

    hyperparameters: tuple[str, ...]
    several_policies: bool

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
    """Find what tells the trials of a study apart beside the batch size."""
    trials = tuple(trials)
    names = dict.fromkeys(name for trial in trials for name in trial.hyperparameters)
    return TrialNames(
        hyperparameters=tuple(
            name
            for name in names
            if name not in _OWN
            and not name.startswith("tuner/")
            and len({trial.hyperparameters.get(name) for trial in trials}) > 1
        ),
        several_policies=len({trial.dtype_policy for trial in trials}) > 1,
    )


def value_text(value: bool | int | float | str | None) -> str:
    """Write a hyperparameter's value."""
    return setting(value) if isinstance(value, float) else str(value)


def _rank(value: bool | int | float | str | None) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0, "") if value is None else (1, 0, value)


STATUS_WORDS = {
    "completed": "completed",
    "out_of_memory": "out of memory",
    "failed": "failed",
    "running": "running",
    "interrupted": "interrupted",
}


def outcome(trial: TrialRecord) -> str:
    """Word how a trial ended: its status, or that the training diverged."""
    return "diverged" if diverged(trial) else STATUS_WORDS[trial.status]


def diverged(trial: TrialRecord) -> bool:
    """Whether a trial failed because its loss did not stay finite."""
    return trial.status == "failed" and any(e.diverged for e in trial.executions)


def metric_words(name: str) -> str:
    """Spells out a metric's name.

    >>> metric_words("val_accuracy")
    'validation accuracy'
    """
    validated = name.startswith("val_")
    words = name.removeprefix("val_").replace("_", " ")
    if name == "samples_per_second":
        return "throughput"
    if name in COST_NAMES:
        return words
    return f"validation {words}" if validated else f"training {words}"


def is_fraction(name: str) -> bool:
    """Whether a metric lies between 0 and 1 by its meaning, as an accuracy does."""
    return "acc" in name


def metric_axis_label(metric: Objective) -> str:
    """Label an axis with a metric, its range or unit, and the direction that is better."""
    words = metric_words(metric.name)
    better = "higher is better" if metric.direction == "max" else "lower is better"
    fraction = "0 to 1, " if is_fraction(metric.name) else ""
    return f"{words[0].upper()}{words[1:]}\n({fraction}{better})"
