"""How the batches of one trial are cut: for memory, or for the moments of their gradients."""

import warnings
from pathlib import Path
from typing import Any

import keras

from kbatch.errors import InputError
from kbatch.search.data import SearchData
from kbatch.training.accumulation import (
    accumulate_gradients,
    accumulation_of,
    measure_moments,
    sum_sparse_gradients,
)
from kbatch.training.accumulation.batch_coupling import check_text, coupled_parts
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.accumulation.whole_batch_moments import uncut_note, uncut_part
from kbatch.training.data.data import FitData
from kbatch.training.data.data_source import Source, build_on
from kbatch.training.fingerprint import model_fingerprint


class TrialCut:
    """Makes a model accumulate where its batches are larger than what goes through at once.

    Where they are not, every n-th batch is halved to measure its moments, if halves were seen to
    train as the whole does.

    Args:
        model: The compiled model of the trial.
        checks: Compare parts with the whole.
        data: Takes rows of the data of the search.
        rows: Examples that a device has of a batch.
        moments_every: As in `accumulate_gradients`.
        summed: Whether sparse gradients are added up before the optimizer sees them.
        directory: Where checks are kept for later runs of the search, or None.

    Attributes:
        notes: What a reader of the figures must know of it.
    """

    def __init__(
        self,
        model: keras.Model,
        checks: PartsChecks,
        data: SearchData,
        *,
        rows: int,
        moments_every: int,
        summed: bool,
        directory: Path | None,
    ):
        self.notes: tuple[str, ...] = ()
        self._model = model
        self._checks = checks
        self._data = data
        self._rows = rows
        self._moments_every = moments_every
        self._summed = summed
        self._directory = directory
        # The size and the model that were cut for last.
        self._applied: tuple[int, str] | None = None

    def apply(self, size: int, data: FitData) -> None:
        """Make the model train with batches that go through in parts of `size` examples.

        A `fit` of the user's may unfreeze layers, or compile the model again, between two
        trainings: what was seen of it before then says nothing.
        """
        before: tuple[str, ...] = ()
        if self._applied is not None:
            if self._applied == (size, model_fingerprint(self._model)):
                return
            # With another size the trial starts again.
            before = self.notes if self._applied[0] == size else ()
            target: Any = self._model
            vars(target).pop("train_step", None)
            target.train_function = None
            if self._summed:
                sum_sparse_gradients(self._model)
        self._apply(size, data)
        self.notes = tuple(dict.fromkeys((*before, *self.notes)))
        self._applied = size, model_fingerprint(self._model)

    def _apply(self, size: int, data: FitData) -> None:
        self.notes = ()
        part = None if size < self._rows else uncut_part(self._model)
        if part is not None:
            self.notes = (uncut_note(f"{part} may need the whole batch at once"),)
            return
        try:
            source = self._data.source(data, self._model)
        except InputError:
            # `fit` refuses most such data by itself, and says what is missing.
            self.notes = (uncut_note("no rows can be taken out of its data"),)
            return
        cut = self._accumulate if size < self._rows else self._measure
        note = cut(size, source)
        self.notes = (note,) if note else ()

    def _accumulate(self, size: int, source: Source) -> str | None:
        self._build(source)
        note = self._checks.difference(self._model, source, most=size, directory=self._directory)
        known = accumulation_of(self._model)
        if known is None or known.micro_batch_size != size:
            accumulate_gradients(self._model, size, moments_every=self._moments_every)
        if note is not None and not coupled_parts(self._model):  # Of these that has warned.
            warnings.warn(note, stacklevel=2)
        return note

    def _measure(self, size: int, source: Source) -> str | None:
        self._build(source)
        check = self._checks.find(self._model, source, most=size, directory=self._directory)
        if not check.equal:
            why = check_text(check)
            return uncut_note(f"halves of a batch may not train as the whole does, as {why}")
        measure_moments(self._model, every=self._moments_every)
        return None

    def _build(self, source: Source) -> None:
        with self._model.distribute_strategy.scope():
            build_on(self._model, source)
