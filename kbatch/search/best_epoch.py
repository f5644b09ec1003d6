"""Check the end of each epoch, and keep the best weights and the metric by validation blocks."""

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kbatch.analysis.intervals import pseudo_values
from kbatch.analysis.run_table import best_epochs, fifth_of
from kbatch.errors import InputError
from kbatch.library_internals import metrics_by_name
from kbatch.page.numbers import format_number
from kbatch.records.notes import Note
from kbatch.records.training_run import NoOutcomes, Outcomes
from kbatch.search.files import write_checkpoint
from kbatch.search.validation_outcomes import BlockSums, Validated
from kbatch.study.trial import Objective
from kbatch.training.callbacks import numbers_of
from kbatch.training.metrics import is_accuracy, metric_words
from kbatch.training.model import installed_step, replica_count
from kbatch.training.state import kept_variables

_CLOSE = 1e-4  # Relative difference up to which Keras's value equals the value from block sums.
_FEWEST_BLOCKS = 4  # With fewer blocks, their spread is too uncertain.
# Block sums are kept for at least a fifth of the epochs, and for more up to this many numbers.
_MOST_KEPT = 2**22
_MOST_HASHED = 2**16  # Numbers of each weight that a fingerprint includes.
# A note compares the accuracy with the share of the most common class, if this share is as large.
_COMMON_SHARE = 0.8


class BestEpoch(keras.callbacks.Callback):
    """Keeps the weights of the best epoch, and the validation metric by blocks of examples.

    It must come after the user's callbacks, which may change the logs.
    """

    def __init__(self, objective: Objective, parts: Sequence[Objective] = ()):
        super().__init__()
        self.batches: int | None = None  # Batches of a validation. If unknown, None.
        self.full_rows = 0  # Examples of a full validation batch.
        self.initial_weights: str | None = None  # A fingerprint.
        self._objective, self._parts = objective, parts  # The objective may be a sum of parts.
        # The objective, or a validation accuracy or loss if the logs do not have the objective.
        self._metric: Objective | None = None
        self._best: dict[str, Any] = {}  # The value and the weights of the best epoch.
        self._values: list[float] = []  # Values of the metric at the end of each epoch.
        self._sums: BlockSums | None = None
        # The last validation: the weights, if callbacks may change them afterwards, and the sums.
        self._weights: list[tuple[Any, np.ndarray]] | None = None
        self._validated: Validated | NoOutcomes | None = None
        # The first validation. All later ones must have the same examples in the same order.
        self._first: Validated | None = None
        # Block sums of the best epochs so far, by their places in `_values`.
        self._blocks: dict[int, np.ndarray] = {}
        self._dead_epochs: set[int] = set()  # Places of epochs with constant or infinite outputs.
        self._validated_last = -1  # Place of the last epoch that was validated.
        self._epochs_asked = 0  # Epochs of all calls of `fit` so far, including the current one.
        self._reason: NoOutcomes | None = None  # A code for why there are no outcomes.

    def on_train_begin(self, logs: Any = None):
        """Take a fingerprint of the weights, and make validation keep the sums of the metric."""
        model: Any = self.model
        self._epochs_asked = len(self._values) + ((self.params or {}).get("epochs") or 0)
        if self.initial_weights is None and model.weights:
            digest = hashlib.blake2b(digest_size=8)
            for weight in model.weights:
                flat: Any = keras.ops.reshape(weight, [-1])
                digest.update(np.array(flat[:_MOST_HASHED]).tobytes())
            self.initial_weights = digest.hexdigest()
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
        """Read the sums of a validation, and copy the weights before callbacks change them."""
        if self._sums is not None:
            self._validated = self._sums.read()
        if keep_weights:
            self._weights = self._copied()

    def _copied(self) -> list[tuple[Any, np.ndarray]]:
        model: Any = self.model
        return [(weight, np.array(weight)) for weight in model.weights]

    def on_epoch_end(self, epoch: int, logs: Any = None):
        weights, self._weights = self._weights, None
        validated, self._validated = self._validated, None
        logs = numbers_of(logs)
        if self._parts and all(part.name in logs for part in self._parts):
            values = [-part.sign * logs[part.name] for part in self._parts]
            logs[self._objective.name] = float(sum(values))
        # The first validated epoch decides on the metric, unless a later one has the objective.
        names = [n for n in logs if n.startswith("val_") or n == self._objective.name]
        metric = self._objective.or_quality(names)
        if self._metric is None or (self._metric != metric == self._objective):
            self._metric, self._best, self._values, self._dead_epochs = metric, {}, [], set()
        if self._metric is None:
            return
        value = logs.get(self._metric.name, np.nan)
        self._values.append(value)
        if validated is not None:
            self._validated_last = len(self._values) - 1
            if self._sums is not None and self._sums.is_dead():
                self._dead_epochs.add(self._validated_last)
        if validated is not None and math.isfinite(value):
            self._reason = self._reason or self._add(validated, value)
        if self._metric.is_better(value, self._best.get("value")):
            self._best = {"value": value, "weights": weights or self._copied()}

    def _add(self, validated: Validated | NoOutcomes, value: float) -> NoOutcomes | None:
        """Keep the block sums of an epoch, or return a code for why they cannot be used."""
        if isinstance(validated, str):
            return validated
        block_sums, sums, metric = validated.sums, self._sums, self._metric
        if sums is None or metric is None or metric.name != f"val_{sums.name}":
            return "no_metric"
        # A callback or a custom step may have logged another value.
        if not math.isclose(sums.metric(block_sums.sum(0)), value, rel_tol=_CLOSE, abs_tol=1e-7):
            return "no_metric"
        if len(block_sums) < _FEWEST_BLOCKS:
            return "few_blocks"
        if self._first is None:
            self._first = validated
        elif validated[1:] != self._first[1:]:
            return "shuffled"
        self._blocks[len(self._values) - 1] = block_sums.astype(np.float32)
        if len(self._blocks) > max(fifth_of(self._epochs_asked), _MOST_KEPT // block_sums.size):
            del self._blocks[min(self._blocks, key=lambda k: metric.sign * self._values[k])]
        return None

    def is_dead(self) -> bool:
        """Return whether outputs were constant or not finite in the last epoch or a best epoch."""
        return not self._dead_epochs.isdisjoint({self._validated_last, *self._best_places()})

    def notes(self) -> tuple[Note, ...]:
        """Return notes that warn of a misleading metric."""
        block_sums = next(iter(self._blocks.values()), None)
        if self._sums is None or block_sums is None or self._metric is None:
            return ()
        notes = self._sums.notes(block_sums.sum(0, dtype=float))
        share, name = self._first and self._first.most_common, self._metric.name
        value = float(np.mean([self._values[place] for place in self._best_places()]))
        if share and share >= _COMMON_SHARE and is_accuracy(name) and value <= share * (1 + 1e-6):
            shown = {"value": format_number(value, 4), "share": format_number(share, 4)}
            notes += (Note.of("most_common_class", words=metric_words(name), **shown),)
        return notes

    def write_weights(self, model: Any, folder: Path, best_before: float | None) -> None:
        """Write the weights of the best epoch, or of the last epoch without an objective."""
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
        """Return the metric by blocks of validation examples, or a code for why it is unknown."""
        name, self._best = self._metric.name if self._metric else None, {}
        reason, value = self._reason, reported.get(name or "")
        # A custom `fit` may compute the objective itself.
        if value is not None and not any(np.isclose(value, self._values, rtol=_CLOSE, atol=0)):
            reason = reason or "no_metric"
        if name is None:
            reason = "no_validation"
        elif not self._parts and not name.startswith("val_"):
            reason = "of_training"
        places = [place for place in self._best_places() if place in self._blocks]
        blocks = [] if reason else [self._blocks[place].astype(float) for place in places]
        if not blocks or self._first is None or self._sums is None:
            return Outcomes(metric=name, reason=reason or "not_finite")
        values = np.mean([pseudo_values(sums, self._sums.metric) for sums in blocks], axis=0)
        if not np.isfinite(values).all():
            return Outcomes(metric=name, reason="not_finite")
        _, examples, key, rarest, lacking_blocks, _ = self._first
        if rarest is None and all((sums == sums.round()).all() for sums in blocks):
            rarest = sum(examples)  # Each example is right or wrong.
        return Outcomes(
            metric=name,
            examples=sum(examples),
            block_examples=examples[0],
            key=key,
            values=tuple(values.tolist()),
            step=None if rarest is None else 1 / max(1, rarest),
            lacking_blocks=lacking_blocks,
        )

    def _best_places(self) -> list[int]:
        larger = self._metric is not None and self._metric.direction == "max"
        return best_epochs(self._values, larger_is_better=larger)


def check_epoch_end(
    model: Any, meter: Any, epoch: int, logs: Any, *, batch_size: int, metrics: tuple[str, ...]
) -> None:
    """Raise InputError if an epoch had other batches or metrics than the search asks for."""
    largest = meter.read().largest_batch
    if largest != batch_size:
        raise InputError(
            f"The data must have batches of {batch_size} examples: leave out `batch_sizes` above "
            "the number of training examples. A data function must use the size that it is given. "
            f"Received: batch_size={batch_size}, and at most {largest} examples in a batch."
        )
    cut = metrics_of_parts(model, batch_size)
    if objectives := [name for name in cut if name in metrics]:
        name = objectives[0]
        raise InputError(
            f"The objective {name!r} needs all rows of a batch, but kbatch cuts batches into "
            f"micro-batches: choose 'val_{name}', give `micro_batch_size=None`, or write the "
            f"metric as a `keras.metrics.Metric`. Received: objective={name!r}."
        )
    numbers = numbers_of(logs)
    if missing := [name for name in metrics if name not in numbers]:
        near = difflib.get_close_matches(missing[0], numbers, n=1)
        advice = f"{f'give {near[0]!r}, or ' if near else ''}compile the model with it"
        if missing[0].startswith("val_") and not any(n.startswith("val_") for n in numbers):
            advice = "give `validation_data` or `validation_split`"
        raise InputError(
            f"The objective {missing[0]!r} must be a metric that training logs as one number: "
            f"{advice}. Received: metrics {sorted(numbers)}."
        )


def metrics_of_parts(model: Any, batch_size: int) -> list[str]:
    """List the metrics that need all rows of a batch, and are averaged over micro-batches."""
    step: Any = installed_step(model)
    names: set[str] = getattr(step, "batch_metrics", set())
    cut = names and step.accumulation.micro_batch_size * replica_count(model) < batch_size
    return sorted(names) if cut else []
