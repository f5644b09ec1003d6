"""What holds for all trials of a search: settings, identity, plan, and plain epochs after it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kbatch.records import json_codec
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note

RECORD_NAME = "kbatch.json"
IDENTITY_NAME = "kbatch-search.json"
PLAN_NAME = "kbatch-plan.json"
PLAIN_NAME = "kbatch-plain-epochs.json"
SETTINGS_REMEDY = (
    "It holds the settings of the search, and no result: delete it, and run the same script with "
    "the same arguments, which keeps the trials."
)
# What a decision or a search that goes on takes from a file; other settings are shown.
_READ_SETTINGS: Mapping[str, Any] = {
    "batch_sizes": tuple[int, ...],
    "base_batch_size": int,
    "validation_batch_size": int,
    "max_executions": int,
    "tolerance": float,
    "confidence": float,
    "strategy": str,
    "search_learning_rate": bool,
}


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """What holds for all trials of a search."""

    settings: Mapping[str, object]  # Of the hypermodel, and what its tuner decides by.
    environment: EnvironmentRecord

    def __post_init__(self):
        for name in _READ_SETTINGS.keys() & self.settings.keys():
            json_codec.decode(_READ_SETTINGS[name], self.settings[name])

    def difference(self, settings: Mapping[str, Any]) -> str | None:
        """Return how other settings differ, None if they do not; more batch sizes extend these."""
        differing = []
        for name, here in settings.items():
            there: Any = self.settings.get(name)
            extends = name == "batch_sizes" and set(there or ()) <= set(here)
            if there != here and not extends:
                differing.append(f"{name}: {there} there, {here} here")
        return "; ".join(differing) or None


@dataclasses.dataclass(frozen=True)
class SearchIdentity:
    """What decides the results of a search, written once when it begins."""

    facts: Mapping[str, str]  # What was given; "optimizer.epsilon" is a part of "optimizer".
    hyperparameters: Mapping[str, bool | int | float | str | None]  # That the model was built with.

    def difference(self, present: "SearchIdentity") -> str | None:
        """Return how the present search differs from this one, None where it does not."""
        names = [*self.facts, *(name for name in present.facts if name not in self.facts)]
        differing = [n for n in names if self.facts.get(n) != present.facts.get(n)]
        # Another optimizer has other parts.
        told = [n for n in differing if n.rpartition(".")[0] not in differing]
        pairs = [(n, self.facts.get(n, "none"), present.facts.get(n, "none")) for n in told]
        return "; ".join(f"{n}: {then} then, {now} now" for n, then, now in pairs) or None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all executions of a search have in common, as it was found before the first of them."""

    number: int  #: From 1; each change makes a further plan, and executions name theirs.
    dtype_policy: str | None  #: Policy of all trials; None where it is a hyperparameter.
    #: Most examples that go through a device at once; None for whole batches of any size.
    micro_batch_size: int | None
    #: Why it is that size: cut as "given", or "cut" to fit; whole, since the largest "fits" or the
    #: model cannot be cut, which has its "own step" or was "compiled late".
    reason: str
    largest_batch_size: int  #: For which the micro-batch was found.
    model: str  #: Fingerprint of the model that it was made with.
    #: Whether cut batches were seen to train as whole ones do; None where none is cut.
    parts_equal: bool | None = None
    parts_note: Note | None = None  #: What differs there; None where nothing does.
    notes: tuple[Note, ...] = ()  #: What a reader of all executions must know of it.
    #: Seconds of a train step by itself and of each example in it; None where none was timed.
    step_s: tuple[float, float] | None = None
    duration_s: float = 0.0  #: Seconds that making it took.


@dataclasses.dataclass(frozen=True)
class PlainEpochs:
    """One epoch by plain `fit` with the settings of some trials, measured in turns.

    They are of the base size, of the one that was named, and of sizes that the executions did not
    tell apart in time.
    """

    batch_sizes: tuple[int, ...]  #: Ascending.
    epoch_s: tuple[float, ...]  #: Seconds of an epoch of each, without tracing.
    examples: int  #: Examples of these epochs.
