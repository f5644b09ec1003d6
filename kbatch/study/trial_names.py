"""Names of the trials: the batch size, with what else tells a trial from the others."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.document.number_text import setting
from kbatch.study.trial import TrialRecord

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
        """Lists what a trial has beside its batch size, such as `("units=8", "float32")`."""
        values = ((name, trial.hyperparameters.get(name)) for name in self.hyperparameters)
        own = (f"{name}={value_text(value)}" for name, value in values)
        return (*own, *((trial.dtype_policy,) if self.several_policies else ()))

    def name(self, trial: TrialRecord) -> str:
        """Names a trial, such as `"64 (units=8)"`."""
        settings = ", ".join(self.settings(trial))
        return f"{trial.batch_size:,} ({settings})" if settings else f"{trial.batch_size:,}"

    def order(self, trial: TrialRecord) -> tuple[tuple[int, float, str], ...]:
        """Gives a key that sorts trials by their settings: numbers by value, then texts."""
        values = [trial.hyperparameters.get(name) for name in self.hyperparameters]
        return (*(_rank(value) for value in values), _rank(trial.dtype_policy))


def trial_names(trials: Iterable[TrialRecord]) -> TrialNames:
    """Finds what tells the trials of a study apart beside the batch size."""
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
    """Writes a hyperparameter's value."""
    return setting(value) if isinstance(value, float) else str(value)


def _rank(value: bool | int | float | str | None) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0, "") if value is None else (1, 0, value)
