"""How the batches of one trial are cut: for memory, or for the moments of their gradients."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from kbatch.errors import InputError
from kbatch.records.notes import RunNote
from kbatch.records.training_run import Budget
from kbatch.search.auto_micro_batch import AutoMicroBatch, TrainingLeft
from kbatch.search.data import SearchData
from kbatch.training.accumulation import (
    accumulate_gradients,
    accumulation_of,
    measure_moments,
    sum_sparse_gradients,
)
from kbatch.training.accumulation.accumulate import check_text, coupled_parts
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.accumulation.whole_batch_moments import uncut_note, uncut_part
from kbatch.training.callbacks import BudgetCallback, joint_budget
from kbatch.training.clock import replica_count
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import SampleElements, SampleRows, Source, build_on
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.state import KeptState


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
        self.notes: tuple[RunNote, ...] = ()
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
        before: tuple[RunNote, ...] = ()
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

    def _accumulate(self, size: int, source: Source) -> RunNote | None:
        self._build(source)
        note = self._checks.difference(self._model, source, most=size, directory=self._directory)
        known = accumulation_of(self._model)
        if known is None or known.micro_batch_size != size:
            accumulate_gradients(self._model, size, moments_every=self._moments_every)
        if note is not None and not coupled_parts(self._model):  # Of these that has warned.
            warnings.warn(note, stacklevel=2)
        return note

    def _measure(self, size: int, source: Source) -> RunNote | None:
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


class TrialMicroBatch:
    """Finds the micro-batch size when the data are known, and halves it when it was too large.

    Args:
        auto: Finds sizes, and remembers them.
        model: The model of the trial.
        build: Builds it again.
        cut: What it is made to train in micro-batches by.
        batch_size: Examples of one optimizer update.
        directory: Where results are kept, or None.
        trainings_left: How many trainings the search has left that fewer examples at once may
            speed up.

    Attributes:
        size: Examples that go through a device at once; None before it is known.
        most_in_memory: Most examples that fit, None where more were not found not to.
        search_s: Seconds that the search took, or None.
        notes: What a reader of the figures must know.
        cut: Makes the model train in micro-batches.
    """

    def __init__(
        self,
        auto: AutoMicroBatch,
        model: keras.Model,
        build: Callable[[], keras.Model],
        cut: TrialCut,
        *,
        batch_size: int,
        directory: Path | None,
        trainings_left: float = 1,
    ):
        self.size: int | None = None
        self.most_in_memory: int | None = None
        self.search_s: float | None = None
        self.notes: list[RunNote] = []
        self._auto = auto
        self._model = model
        self._build = build
        self._batch_size = batch_size
        # A batch is shared by the replicas of a strategy.
        self._rows = -(-batch_size // replica_count(model))
        self.cut = cut
        self._data = FitData()
        self._directory = directory
        self._trainings_left = trainings_left
        self._key, self._most = "", batch_size
        self._state: KeptState | None = None

    def prepare(self, data: FitData, call: Mapping[str, Any]) -> int:
        """Find the size, the first time, and make the model accumulate."""
        if self.size is None:
            source = self._auto.data.source(data, self._model)
            model: Any = self._model
            with model.distribute_strategy.scope():
                build_on(self._model, source)
                self._state = KeptState(self._model)
            found = self._auto.find(
                self._model,
                self._build,
                source=source,
                directory=self._directory,
                rows=self._rows,
                left=self._left(source, call),
            )
            if call.get("verbose", True) and found.search_s:
                print(f"micro-batch size: {' '.join(found.notes)}", flush=True)
            self._key, self._most, self.size = found.key, found.most, found.size
            self.most_in_memory = found.most if found.memory_bound else None
            self.search_s = found.search_s
            self.notes.extend(found.notes)
        self._data = data
        self.cut.apply(self.size, data)
        return self._most

    def most_at_once(self, source: Source) -> int:
        """Find the most examples that fit at once."""
        return self._auto.most(self._model, self._build, source=source, directory=self._directory)

    def trains_whole_only(self, source: Source) -> bool:
        """Return whether speed must not cut a batch: in parts it may train another model."""
        return bool(self._auto.checks.difference(self._model, source, directory=self._directory))

    def shrink(self) -> bool:
        """Halve the size and put the model back as it was before training."""
        before = self.size
        if before is None or self._state is None:
            return False  # Memory ran out before training: a smaller one is no cure.
        smaller = self._auto.halve(self._key, before, self._directory)
        if smaller is None:
            return False
        self._state.restore()
        self.size = self._most = self.most_in_memory = smaller
        self.cut.apply(smaller, self._data)
        self.notes.append(RunNote.of("memory_ran_out", before=before, after=smaller))
        return True

    def _left(self, source: Source, call: Mapping[str, Any]) -> TrainingLeft:
        """Forecast the trainings that are left, as if they went on to their last epoch."""
        known = source.rows(self._model) if isinstance(source, SampleElements) else source
        examples = known.examples if isinstance(known, SampleRows) else None
        if call.get("steps_per_epoch"):
            examples = call["steps_per_epoch"] * self._batch_size
        callbacks = keras.tree.flatten(call.get("callbacks") or [])
        budget = joint_budget([c for c in callbacks if isinstance(c, BudgetCallback)]) or Budget()
        by_updates = None if budget.updates is None else budget.updates * self._batch_size
        epochs = call.get("epochs", 1) - call.get("initial_epoch", 0)
        ends = (examples and examples * epochs, by_updates, budget.examples)
        most = min((end for end in ends if end is not None), default=None)
        count, train_s = self._trainings_left, budget.train_s
        return TrainingLeft(most and most * count, train_s and train_s * count)
