"""The best epochs of a training run: weights, and what validation showed by blocks of examples."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kbatch.analysis.intervals import pseudo_values
from kbatch.analysis.run_table import best_epochs, fifth_of
from kbatch.library_internals import metrics_by_name
from kbatch.records.notes import Note
from kbatch.records.training_run import NoOutcomes, Outcomes
from kbatch.search.files import write_checkpoint
from kbatch.search.validation_outcomes import BlockSums, Validated
from kbatch.study.trial import Objective
from kbatch.training.callbacks import numbers_of
from kbatch.training.model import replica_count
from kbatch.training.state import kept_variables

# Relative, of the metric that Keras reports and that of the sums.
_CLOSE = 1e-4
# With fewer, the spread over blocks says too little.
_FEWEST_BLOCKS = 4
# The sums of blocks that are kept in any case: 16 MiB.
_MOST_NUMBERS = 2**22
_MOST_HASHED = 2**16  # Numbers of each weight, for a fingerprint of all.


class BestEpoch(keras.callbacks.Callback):
    """Keeps the weights of the best epoch in memory, and the block sums of the best epochs."""

    # It stands after all callbacks that change the logs, and begins a validation after they did.

    def __init__(self, objective: Objective, parts: Sequence[Objective] = ()):
        super().__init__()
        self.batches: int | None = None  # Of a validation; None where unknown.
        self.full_rows = 0  # Examples of a full validation batch.
        self.initial_weights: str | None = None  # Fingerprint.
        self._objective, self._parts = objective, parts  # It may be the sum of several.
        # The objective, or where that is no metric of an epoch, an accuracy or loss of validation.
        self._metric: Objective | None = None
        self._best: dict[str, Any] = {}
        self._values: list[float] = []  # Of the metric, at the end of each epoch.
        self._sums: BlockSums | None = None
        # Of the last validation: its weights, where callbacks may change them, and its sums.
        self._weights: list[tuple[Any, np.ndarray]] | None = None
        self._validated: Validated | NoOutcomes | None = None
        # Of the first one that counts, with which the others must agree.
        self._first: Validated | None = None
        # Of the epochs that may be among the best, by their places in `_values`: sums of blocks.
        self._blocks: dict[int, np.ndarray] = {}
        self._dead: set[int] = set()  # Places of epochs whose outputs were of no use.
        self._validated_last = -1  # Place of the last epoch that was validated.
        self._asked = 0  # Epochs of all calls of `fit` so far, the current one included.
        self._reason: NoOutcomes | None = None  # Why there are no outcomes, by code.

    def on_train_begin(self, logs: Any = None):
        """Take a fingerprint of the weights, and let validation keep the sums of the metric."""
        model: Any = self.model
        self._asked = len(self._values) + ((self.params or {}).get("epochs") or 0)
        if self.initial_weights is None and model.weights:
            found = hashlib.blake2b(digest_size=8)
            for weight in model.weights:
                flat: Any = keras.ops.reshape(weight, [-1])
                found.update(np.array(flat[:_MOST_HASHED]).tobytes())
            self.initial_weights = found.hexdigest()
        metric = self._objective.or_quality([f"val_{name}" for name in metrics_by_name(model)])
        if self._parts:
            self._reason = "several_objectives"
        elif replica_count(model) > 1:
            self._reason = "several_devices"
        elif metric is not None:
            self._sums = BlockSums.of(model, metric.name.removeprefix("val_"))

    def on_test_begin(self, logs: Any = None):
        if self._sums is not None:
            self._sums.begin(self.batches, self.full_rows)

    def end_validation(self, logs: Any = None, *, keep_weights: bool) -> None:
        """Read what validation summed up, and keep weights before callbacks change them."""
        # They may have swapped them in to validate.
        if self._sums is not None:
            self._validated = self._sums.read()
        if keep_weights:
            self._weights = self._copied()

    def _copied(self) -> list[tuple[Any, np.ndarray]]:
        model: Any = self.model
        return [(one, np.array(one)) for one in model.weights]

    def on_epoch_end(self, epoch: int, logs: Any = None):
        weights, self._weights = self._weights, None
        validated, self._validated = self._validated, None
        logs = numbers_of(logs)
        if self._parts and all(part.name in logs for part in self._parts):
            values = [-part.sign * logs[part.name] for part in self._parts]
            logs[self._objective.name] = float(sum(values))
        # It is chosen at the first epoch that was validated, unless the objective comes later.
        names = [n for n in logs if n.startswith("val_") or n == self._objective.name]
        found = self._objective.or_quality(names)
        if self._metric is None or (self._metric != found == self._objective):
            self._metric, self._best, self._values, self._dead = found, {}, [], set()
        if self._metric is None:
            return
        value = logs.get(self._metric.name, np.nan)
        self._values.append(value)
        if validated is not None:
            self._validated_last = len(self._values) - 1
            if self._sums is not None and self._sums.is_dead():
                self._dead.add(self._validated_last)
        if validated is not None and math.isfinite(value):
            self._reason = self._reason or self._add(validated, value)
        if self._metric.is_better(value, self._best.get("value")):
            self._best = {"value": value, "weights": weights or self._copied()}

    def _add(self, validated: Validated | NoOutcomes, value: float) -> NoOutcomes | None:
        """Take what an epoch's validation summed up; return the code of a reason to take none."""
        if isinstance(validated, str):
            return validated
        summed, sums, metric = validated.sums, self._sums, self._metric
        if sums is None or metric is None or metric.name != f"val_{sums.name}":
            return "no_metric"
        # A callback or a step of the user's own may report something else.
        if not math.isclose(sums.metric(summed.sum(0)), value, rel_tol=_CLOSE, abs_tol=1e-7):
            return "no_metric"
        if len(summed) < _FEWEST_BLOCKS:
            return "few_blocks"
        if self._first is None:
            self._first = validated
        elif validated[1:] != self._first[1:]:
            return "shuffled"
        self._blocks[len(self._values) - 1] = summed.astype(np.float32)
        if len(self._blocks) > max(fifth_of(self._asked), _MOST_NUMBERS // summed.size):
            del self._blocks[min(self._blocks, key=lambda k: metric.sign * self._values[k])]
        return None

    def is_dead(self) -> bool:
        """Return whether the outputs were of no use at the end, or in an epoch that is judged."""
        return not self._dead.isdisjoint({self._validated_last, *self._best_places()})

    def notes(self) -> tuple[Note, ...]:
        """Return what a reader of the metric must know."""
        summed = next(iter(self._blocks.values()), None)
        if self._sums is None or summed is None:
            return ()
        return self._sums.notes(summed.sum(0, dtype=float))

    def write_weights(self, model: Any, folder: Path, best_before: float | None) -> None:
        """Write the best epoch if no earlier execution is better; the last without an objective."""
        if self.model is None:  # No `fit` was timed.
            return
        if self._metric != self._objective:
            write_checkpoint(model, folder)
        elif self._best and self._objective.is_better(self._best["value"], best_before):
            with kept_variables(model):
                for variable, weight in self._best["weights"]:
                    variable.assign(weight)
                write_checkpoint(model, folder)

    def outcomes(self, reported: Mapping[str, float]) -> Outcomes:
        """Return the metric by blocks of validation examples, or why it is unknown."""
        name, self._best = self._metric.name if self._metric else None, {}
        reason, own = self._reason, reported.get(name or "")
        # A `fit` of the user's own may compute the objective itself.
        if own is not None and not any(math.isclose(own, v, rel_tol=_CLOSE) for v in self._values):
            reason = reason or "no_metric"
        if name is None:
            reason = "no_validation"
        elif not self._parts and not name.startswith("val_"):
            reason = "of_training"
        places = [place for place in self._best_places() if place in self._blocks]
        blocks = [] if reason else [self._blocks[place].astype(float) for place in places]
        if not blocks or self._first is None or self._sums is None:
            return Outcomes(metric=name, reason=reason or "not_finite")
        values = np.mean([pseudo_values(one, self._sums.metric) for one in blocks], axis=0)
        if not np.isfinite(values).all():
            return Outcomes(metric=name, reason="not_finite")
        _, examples, key, rarest, lacking = self._first
        if rarest is None and all((one == one.round()).all() for one in blocks):
            rarest = sum(examples)  # Sums of what is right or wrong.
        return Outcomes(
            metric=name,
            examples=sum(examples),
            block_examples=examples[0],
            key=key,
            values=tuple(values.tolist()),
            step=None if rarest is None else 1 / max(1, rarest),
            lacking_blocks=lacking,
        )

    def _best_places(self) -> list[int]:
        larger = self._metric is not None and self._metric.direction == "max"
        return best_epochs(self._values, larger_is_better=larger)
