"""Names of trials, of how they ended, and of metrics on axes; and a few of their values as text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import format_number, in_brackets, join_words, setting
from kbatch.records.training_run import COST_NAMES
from kbatch.study.trial import OWN_COLUMNS, Objective, TrialRecord

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
    """Find what tells the trials of a study apart beside the batch size."""
    trials = tuple(trials)
    names = dict.fromkeys(name for trial in trials for name in trial.hyperparameters)
    return TrialNames(
        hyperparameters=tuple(
            name
            for name in names
            if name not in OWN_COLUMNS
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
    """Return whether a metric lies between 0 and 1 by its meaning, as an accuracy does."""
    return "acc" in name


def metric_axis_label(metric: Objective) -> str:
    """Label an axis with a metric, its range or unit, and the direction that is better."""
    words = metric_words(metric.name)
    better = "higher is better" if metric.direction == "max" else "lower is better"
    fraction = "0 to 1, " if is_fraction(metric.name) else ""
    return f"{words[0].upper()}{words[1:]}\n({fraction}{better})"


def noise_scale_text(scale: NoiseScale) -> str:
    """Write a noise scale with its interval, or what is known of an unresolved one."""
    if scale.value is not None and scale.interval is not None:
        return f"{format_number(scale.value, 2)}{in_brackets(scale.interval, 2)}"
    if scale.at_least:
        return f"n/a (unresolved: at least {format_number(scale.at_least, 2)})"
    return "n/a (unresolved)"


# Settings that follow the batch size besides the learning rate, as text.
SETTING_NAMES = {
    "beta_2": "`beta_2`",
    "weight_decay": "weight decay",
    "batch_norm_momentum": "BatchNormalization's momentum",
}


def followed_value(scaling: LearningRateScaling, name: str) -> str:
    """Format one of the settings that follow, empty where it is not known."""
    if name == "batch_norm_momentum":
        momenta = scaling.batch_norm_momenta
        return join_words(map(setting, momenta)) if momenta else ""
    value = scaling.beta_2 if name == "beta_2" else scaling.weight_decay
    return "" if value is None else setting(value)
