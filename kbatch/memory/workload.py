"""What a memory probe runs: train steps or predictions of one batch size."""

import dataclasses
import gc
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import MEMORY_ERRORS, device_is_lost, ran_out_of_memory
from kbatch.device.memory import DeviceMemory, FreeMemory, host_limit_bytes
from kbatch.errors import InputError, WorkerDied
from kbatch.page.numbers import memory_text
from kbatch.records.notes import Note
from kbatch.training.accumulation import Accumulation
from kbatch.training.data.forms import rows_of
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.model import check_trainable, optimizers_of, uninstall_step, user_step

# Slots appear after the first step, and later steps peak higher than early ones.
_STEPS = 5
# No step is begun where those after the first have taken so long: a processor without float16 units
# would take minutes.
_MOST_S = 10.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data, which can go to another process."""

    build: Callable[[], keras.Model]  # Returns the compiled model.
    data: TrainingData
    dtype_policy: str  # Global policy under which it is built.
    training: bool = True  # Whether to run train steps, or predictions.
    accumulate_below: int = 0  # Smaller batches run as micro-batches of one of so many.
    moments_every: int = 0  # As in `Accumulation`.
    replicas: int = 1  # Replicas that share each batch; all sizes are those of one of them.

    def start(self) -> "Run":
        memory = DeviceMemory()  # What is held before the model is built does not count.
        with dtype_policy_scope(self.dtype_policy):
            model = self.build()
            if not self.training:
                return Run(self, model, memory)
            check_trainable(model)
            # Unless the model computes its loss in a way of its own.
            own = user_step(model) or type(model).compute_loss is not keras.Model.compute_loss
            known = self.data.some_rows(model)
            if known is not None and model.loss is not None and not own:
                _, targets, _ = keras.utils.unpack_x_y_sample_weight(known.rows)
                if targets is None:
                    raise InputError(
                        "Training needs targets for the loss that the model was compiled with: "
                        f"give `y`. Received: y=None, loss={model.loss!r}."
                    )
            with model.distribute_strategy.scope():
                self.data.build(model)
        return Run(self, model, memory)


class WorkloadFacts(NamedTuple):
    """What is known of a workload before it runs."""

    device: str
    limit_bytes: int  # Memory that it may take.
    training: bool
    dtype_policy: str
    variables_bytes: int
    held_bytes: int  # Before it runs: in a process with other models, theirs too.
    examples: int | None  # Of its data, None if unknown.
    notes: tuple[Note, ...]


class Reading(NamedTuple):
    # Most bytes at once, without the first step where that has its own; None if memory ran out.
    peak_bytes: int | None
    rows: int  # Examples that the batch really had.
    duration_s: float = 0.0
    free: FreeMemory | None = None  # When memory ran out, if the allocator reported it.
    died: WorkerDied | None = None  # How the worker process ended of it, if it did.
    lost: bool = False  # Whether nothing more may run in the process that ran it.
    first_step_bytes: int | None = None  # That of the first step, which also compiles and tries.

    def bytes_below(self, limit_bytes: float) -> int | None:
        """Return the bytes that decide: those of later steps, if the first one fits too."""
        peak, first = self.peak_bytes, self.first_step_bytes
        return max(peak, first) if peak and first and first > limit_bytes else peak


class Run:
    """A workload and the memory that it takes, in the process that runs it."""

    def __init__(self, workload: Workload, model: keras.Model, memory: DeviceMemory):
        self.model: Any = model
        self.memory = memory
        self.training = workload.training
        self._workload = workload
        # That of a model which accumulates already: it is measured so.
        self._train_step = vars(model).get("train_step")
        # Train steps with what Keras compiled of them, by micro-batch size; None for the whole.
        self._compiled: dict[int | None, tuple[Any, Any]] = {}
        self.data = workload.data
        known = self.data.some_rows(model)
        self.examples = known and known.examples
        self.note = known and known.note  # What a reader must know of the data.
        self._row_bytes: int | None = None

    def variables_bytes(self) -> int:
        """Return the bytes of the weights and, in training, of the optimizer's slots."""
        variables = list(self.model.variables)
        if self.training:
            optimizer = self.model.optimizer
            if not optimizer.built and user_step(self.model) is None:
                with self.model.distribute_strategy.scope():
                    optimizer.build(self.model.trainable_variables)
            variables += [slot for one in optimizers_of(self.model) for slot in one.variables]
        return sum(tf.as_dtype(v.dtype).size * int(tf.reduce_prod(v.shape)) for v in variables)

    def batch(self, rows: int) -> Any:
        return self.data.sample(rows, self.model)

    def left_out_bytes(self, batch_size: int) -> int:
        """Return the bytes of the inputs that a real batch has beside those that `run` uses."""
        if batch_size >= self._workload.accumulate_below:
            return 0
        if self._row_bytes is None:
            leaves = keras.tree.flatten(next(iter(self._batches(1))))
            self._row_bytes = sum(np.asarray(leaf).nbytes for leaf in leaves if leaf is not None)
        return self._row_bytes * (self._workload.accumulate_below - self._rows(batch_size))

    def facts(self, memory_limit_bytes: int | None) -> WorkloadFacts:
        memory, notes = self.memory, []
        limit_bytes = memory_limit_bytes or memory.limit_bytes or host_limit_bytes()
        if self.note is not None:
            notes.append(self.note)
        if memory_limit_bytes is None and (found := memory.held_by_others()) is not None:
            free, total = map(memory_text, found)
            notes.append(Note.of("gpu_shared", free=free, total=total))
        return WorkloadFacts(
            device=memory.device,
            limit_bytes=min(limit_bytes, memory.limit_bytes or limit_bytes),
            training=self.training,
            dtype_policy=self.model.dtype_policy.name,
            variables_bytes=self.variables_bytes(),
            held_bytes=max(memory.held_bytes, self.variables_bytes()),
            examples=self.examples,
            notes=tuple(notes),
        )

    def read(self, batch_size: int, smaller_worked: bool) -> Reading:
        """Measure one batch size; `smaller_worked` says what an error may mean."""
        memory = self.memory
        gc.collect()
        memory.reset()
        started_s = time.perf_counter()
        peaks: list[int] = []

        def keep_peak() -> None:
            # A CPU's plain allocator does not count small blocks: what is held for sure is less.
            held = max(memory.peak_bytes, self.variables_bytes(), 1)
            peaks.append(held + self.left_out_bytes(batch_size))
            memory.reset()

        rows, peak, lost = batch_size, None, False
        try:
            rows = self.run(batch_size, keep_peak)
            keep_peak()
            peak = peaks[-1]
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=smaller_worked):
                raise
            # XLA on a CPU frees the weights that it was to update where it runs out. They stay in
            # use, and whatever is allocated next is written over them.
            on_cpu = memory.device == "CPU:0"
            freed = on_cpu and self.training and bool(self.model.jit_compile)
            lost = device_is_lost(error) or freed
        seconds, first = time.perf_counter() - started_s, peaks[0] if len(peaks) > 1 else None
        return Reading(peak, rows, seconds, lost=lost, first_step_bytes=first)

    def run(self, batch_size: int, after_first: Callable[[], None]) -> int:
        """Run one batch size; return its rows, which are fewer where the data have no more."""
        rows, replicas = self._rows(batch_size), self._workload.replicas
        batches, given = self._batches(rows * replicas), rows
        if self.data.is_function:
            given = _rows_of_first(batches) // replicas
        if not given:  # A data function may drop its remainder, and so give no batch.
            given = sum(1 for _ in self._batches(1).take(rows * replicas)) // replicas
            batches = self._batches(max(1, given) * replicas)
            if given in (0, rows) or not _rows_of_first(batches):
                raise InputError(
                    "The data function returned no batch: give it more examples than the largest "
                    f"batch size, or a smaller `max_batch_size`. Received: {given} examples for "
                    f"batch_size={rows}."
                )
        if self.training:
            self._set_train_step(batch_size)
        batches = batches.repeat().take(_STEPS).prefetch(tf.data.AUTOTUNE)
        steps, kind = _Steps(after_first), type(self.model)
        # Not an instance's own `fit`, which may be timed by who measures, or that of a tracker.
        if self.training:
            fit = inspect.unwrap(kind.fit)
            fit(self.model, batches, verbose=0, shuffle=False, callbacks=[steps])
        else:
            kind.predict(self.model, batches, verbose=0, callbacks=[steps])
        return min(given, batch_size)

    def _set_train_step(self, batch_size: int) -> None:
        """Make the model train in parts of this size, by what was compiled for them before."""
        size = batch_size if batch_size < self._workload.accumulate_below else None
        if size not in self._compiled:
            as_given = size is None and vars(self.model).get("train_step") is self._train_step
            if not as_given:
                uninstall_step(self.model)
            if size is not None:
                # Two micro-batches are an accumulated batch: more of them need no more memory.
                Accumulation(size, None, self._workload.moments_every).apply(self.model)
            elif not as_given and self._train_step is not None:
                self.model.train_step = self._train_step
            self.model.make_train_function(force=not as_given)  # What was traced before is kept.
            self._compiled[size] = vars(self.model).get("train_step"), self.model.train_function
        step, self.model.train_function = self._compiled[size]
        vars(self.model).pop("train_step", None)
        if step is not None:
            self.model.train_step = step

    def _rows(self, batch_size: int) -> int:
        most = self._workload.accumulate_below
        return max(batch_size, min(2 * batch_size, most))

    def _batches(self, rows: int) -> tf.data.Dataset:
        return self.data.repeated(rows, self.model)


def _rows_of_first(batches: tf.data.Dataset) -> int:
    # The batch is let go of: it would count as memory.
    return sum(rows_of(batch) for batch in batches.take(1))


class _Steps(keras.callbacks.Callback):
    """Calls after the first step, which is traced, and ends the run where later ones are slow."""

    def __init__(self, after_first: Callable[[], None]):
        super().__init__()
        self._after_first = after_first
        self._count, self._first_s = 0, 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        if self._count == 1:
            self._after_first()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self._count += 1
        if self._count == 1:
            self._first_s = time.perf_counter()
        elif batch + 1 < _STEPS and time.perf_counter() - self._first_s > _MOST_S:
            model: Any = self.model
            model.stop_training = True

    on_predict_batch_begin, on_predict_batch_end = on_train_batch_begin, on_train_batch_end
