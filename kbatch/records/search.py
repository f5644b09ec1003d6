"""What holds for all trials of a search: settings, facts, plan, and plain epochs after it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kbatch.records import json_codec
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note

RECORD_NAME = "kbatch.json"
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
    #: What was given and decides the results; "optimizer.epsilon" is a part of "optimizer".
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Those that the model was built with which the facts describe.
    hyperparameters: Mapping[str, bool | int | float | str | None] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        for name in _READ_SETTINGS.keys() & self.settings.keys():
            json_codec.decode(_READ_SETTINGS[name], self.settings[name])

    def difference(
        self, settings: Mapping[str, Any], facts: Mapping[str, str] | None = None
    ) -> str | None:
        """Return how another search differs, None if it does not; more batch sizes extend this."""
        differences = []
        for name, here in settings.items():
            there: Any = self.settings.get(name)
            extends = name == "batch_sizes" and set(there or ()) <= set(here)
            if there != here and not extends:
                differences.append(f"{name}: {there} there, {here} here")
        if facts and self.facts:
            names = dict.fromkeys((*self.facts, *facts))
            differing = [name for name in names if self.facts.get(name) != facts.get(name)]
            for name in differing:
                if name.rpartition(".")[0] not in differing:  # Another optimizer has other parts.
                    then, now = self.facts.get(name, "none"), facts.get(name, "none")
                    differences.append(f"{name}: {then} then, {now} now")
        return "; ".join(differences) or None


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
