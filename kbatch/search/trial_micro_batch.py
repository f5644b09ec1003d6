"""The micro-batch size of one execution of a trial: given or found, set in its model, halved."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from kbatch.errors import InputError
from kbatch.records.notes import RunNote
from kbatch.records.training_run import Budget
from kbatch.search import auto_micro_batch
from kbatch.training import accumulation
from kbatch.training.callbacks import BudgetCallback, joint_budget
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import SampleRows, Source, build_on, rows_for
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import replica_count, uninstall_step, user_step
from kbatch.training.state import KeptState


@dataclasses.dataclass(eq=False)
class TrialMicroBatch:
    search: auto_micro_batch.SearchMicroBatches
    model: Any
    build: Callable[[], keras.Model]  # Builds it again, also in another process.
    batch_size: int
    size: int | None  # Examples that go through a device at once; None before it is found.
    directory: Path | None
    trainings_left: float = 1  # That smaller micro-batches may speed up.
    most_in_memory: int | None = None  # None where the end of memory was not met.
    search_s: float | None = None  # None where the size was given.

    def __post_init__(self):
        self.is_auto = self.size is None
        # A batch is shared by the replicas of a strategy.
        self._rows = -(-self.batch_size // replica_count(self.model))
        self._most: int | None = None
        self._data = FitData()
        self._cache: auto_micro_batch.MicroBatchCache | None = None
        self._state: KeptState | None = None
        # The size and the model that the train step was last set for.
        self._applied: tuple[int, str] | None = None
        self._found_notes: list[RunNote] = []
        self._cut_notes: list[RunNote] = []

    @property
    def notes(self) -> tuple[RunNote, ...]:
        """What a reader of the figures must know."""
        return tuple(dict.fromkeys((*self._cut_notes, *self._found_notes)))

    @property
    def can_shrink(self) -> bool:
        """Whether the size was found, so that half of it may fit where memory ran out."""
        return self._state is not None and self.size is not None and self.size > 1

    def prepare(self, data: FitData, call: Mapping[str, Any]) -> int | None:
        """Make the model train with the size; return the most that fit at once, where known."""
        how = accumulation.accumulation_by_user(self.model)
        if how is not None:
            self.size = min(how.micro_batch_size, self._rows)
        elif self.size not in (None, self._rows) and user_step(self.model) is not None:
            self._found_notes.append(RunNote.of("own_step_whole", size=self.size))
            self.size = self._rows
        if self.size is None:
            source = self.search.data.source(data, self.model)
            with self.model.distribute_strategy.scope():
                build_on(self.model, source)
                self._state = KeptState(self.model)
            self._cache = self.cache(source)
            found = self._cache.fastest(self._rows, self._left(source, call))
            if call.get("verbose", True) and found.search_s:
                print(f"micro-batch size: {' '.join(found.notes)}", flush=True)
            self.size, self._most, self.search_s = found.size, found.most, found.search_s
            self.most_in_memory = found.most if found.memory_bound else None
            self._found_notes.extend(found.notes)
        self._data = data
        self._apply(self.size, data)
        return self._most

    def cache(self, source: Source) -> auto_micro_batch.MicroBatchCache:
        return auto_micro_batch.MicroBatchCache(
            self.search, self.model, self.build, source, self.directory
        )

    def shrink(self) -> None:
        """Halve the size and put the model back as it was before training."""
        assert self._cache is not None and self._state is not None and self.size is not None
        before, self.size = self.size, self._cache.halve(self.size)
        self._most = self.most_in_memory = self.size
        self._state.restore()
        self._apply(self.size, self._data)
        self._found_notes.append(RunNote.of("memory_ran_out", before=before, after=self.size))

    def _left(self, source: Source, call: Mapping[str, Any]) -> auto_micro_batch.TrainingLeft:
        """Forecast the trainings that are left, as if they went on to their last epoch."""
        known = rows_for(source, self.model)
        examples = known.examples if isinstance(known, SampleRows) else None
        if call.get("steps_per_epoch"):
            examples = call["steps_per_epoch"] * self.batch_size
        callbacks = keras.tree.flatten(call.get("callbacks") or [])
        budget = joint_budget([c for c in callbacks if isinstance(c, BudgetCallback)]) or Budget()
        by_updates = None if budget.updates is None else budget.updates * self.batch_size
        epochs = call.get("epochs", 1) - call.get("initial_epoch", 0)
        ends = (examples and examples * epochs, by_updates, budget.examples)
        most = min((end for end in ends if end is not None), default=None)
        count, train_s = self.trainings_left, budget.train_s
        return auto_micro_batch.TrainingLeft(most and most * count, train_s and train_s * count)

    def _apply(self, size: int, data: FitData) -> None:
        """Set the train step for batches that go through in parts of `size` examples."""
        model = self.model
        # A `fit` of the user's may unfreeze layers or compile again between two trainings: what was
        # seen of the model before then says nothing.
        if self._applied is not None:
            if self._applied == (size, model_fingerprint(model)):
                return
            if self._applied[0] != size:
                self._cut_notes.clear()  # The trial starts again.
            if accumulation.accumulation_by_user(model) is None:
                uninstall_step(model)
                accumulation.sum_sparse_gradients(model)
        if (note := self._cut(size, data)) is not None:
            self._cut_notes.append(note)
        self._applied = size, model_fingerprint(model)

    def _cut(self, size: int, data: FitData) -> RunNote | None:
        """Let the model accumulate, and say where that may differ from the whole batch."""
        model, checks, directory = self.model, self.search.checks, self.directory
        how = accumulation.accumulation_by_user(model)
        if size == self._rows or (how is not None and how.exact):
            return None
        try:
            source = self.search.data.source(data, model)
        except InputError:
            # `fit` refuses most such data by itself, and says what is missing.
            return RunNote.of("parts_not_compared", found="no rows can be taken out of its data")
        with model.distribute_strategy.scope():
            build_on(model, source)
        check = checks.find(model, source, most=size, directory=directory)
        known = accumulation.accumulation_of(model)
        if known is None or known.micro_batch_size != size:
            how = accumulation.Accumulation(size, moments_every=auto_micro_batch.MOMENTS_EVERY)
            how.apply(model)
        if check.note is not None:
            warnings.warn(check.note, stacklevel=2)
        return check.note
