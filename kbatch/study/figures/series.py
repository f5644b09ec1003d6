"""Series of trials: those that differ in the batch size alone, in one colour and marker."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import TrialNames

MOST_SERIES = 6
# Series stand side by side at a batch size, at most this far apart in powers of two, and
# together at most this share of the distance between batch sizes.
_DODGE = 0.12
_WIDTH = 0.25


class Series(NamedTuple):
    """Trials that are drawn alike.

    Attributes:
        label: What they have in common beside the batch size.
        trial_ids: keras-tuner's identifiers.
        joined: Whether a line may join them: it needs one trial a batch size.
    """

    label: str
    trial_ids: tuple[str, ...]
    joined: bool


def trial_series(trials: Sequence[TrialRecord], names: TrialNames) -> tuple[Series, ...]:
    """Groups trials by their hyperparameters, or by policy where that gives too many series.

    Args:
        trials: The trials of a study.
        names: What tells them apart.

    Returns:
        The series, ordered by their settings.
    """
    ordered = sorted(trials, key=names.order)
    by_settings = _groups(ordered, lambda trial: ", ".join(names.settings(trial)))
    if len(by_settings) <= MOST_SERIES:
        return tuple(_series(label, group, alike=True) for label, group in by_settings.items())
    by_policy = _groups(ordered, lambda trial: trial.dtype_policy)
    return tuple(
        _series(label, group, alike=not names.hyperparameters) for label, group in by_policy.items()
    )


def places(trials: Sequence[TrialRecord], series: Sequence[Series]) -> dict[str, float]:
    """Places trials on the batch axis, those of different series side by side.

    Args:
        trials: The trials of a study.
        series: Their series.

    Returns:
        The place of each trial by its identifier, in examples.
    """
    sizes = sorted({trial.batch_size for trial in trials})
    gaps = [math.log2(high / low) for low, high in itertools.pairwise(sizes)]
    distance = min(_DODGE, _WIDTH * min(gaps, default=1) / len(series))
    offsets = {
        trial_id: distance * (index - (len(series) - 1) / 2)
        for index, one in enumerate(series)
        for trial_id in one.trial_ids
    }
    return {trial.trial_id: trial.batch_size * 2 ** offsets[trial.trial_id] for trial in trials}


def _groups(
    trials: Sequence[TrialRecord], label: Callable[[TrialRecord], str]
) -> dict[str, list[TrialRecord]]:
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(label(trial), []).append(trial)
    return groups


def _series(label: str, trials: list[TrialRecord], *, alike: bool) -> Series:
    sizes = [trial.batch_size for trial in trials if trial.status == "completed"]
    joined = alike and len(set(sizes)) == len(sizes)
    return Series(label, tuple(trial.trial_id for trial in trials), joined)
