"""A caveat, and which numbers it concerns."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kbatch.document.number_text import listed
from kbatch.study.trial import TrialRecord


class Caveat(NamedTuple):
    """What limits the conclusions from a study.

    Attributes:
        label: The same in a few words, for a caption.
        text: A sentence or two.
        columns: Names of the table's columns whose numbers it concerns, none where it concerns
            what is not there.
        trial_ids: The trials whose numbers it concerns, none for all of them.
    """

    label: str
    text: str
    columns: tuple[str, ...] = ()
    trial_ids: tuple[str, ...] = ()


class Concerned(NamedTuple):
    """The trials that a caveat concerns.

    Attributes:
        sizes: Their batch sizes in words.
        trial_ids: keras-tuner's identifiers.
    """

    sizes: str
    trial_ids: tuple[str, ...]


def concerned(
    trials: Iterable[TrialRecord], holds: Callable[[TrialRecord], bool]
) -> Concerned | None:
    """Finds the trials of which something holds, None where there are none."""
    found = [trial for trial in trials if holds(trial)]
    if not found:
        return None
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in found)
    plural = "batch sizes" if len(sizes) > 1 else "batch size"
    return Concerned(f"{plural} {listed(sizes)}", tuple(trial.trial_id for trial in found))
