"""The workload of a memory probe: train steps or predictions of one batch size."""

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

# The optimizer creates its variables in the first step, so later steps need more memory.
_STEPS = 5
# No further step starts after this time, because float16 on some CPUs would take minutes.
_MOST_S = 10.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data, which can be sent to another process."""

    build: Callable[[], keras.Model]  # Returns the compiled model.
    data: TrainingData
    dtype_policy: str  # Global policy under which the model is built.
    training: bool = True  # If False, predictions run instead of train steps.
    accumulate_below: int = 0  # A smaller size is a micro-batch of a batch with this size.
    moments_every: int = 0  # As in `Accumulation`.
    replicas: int = 1  # Replicas that share each batch. Sizes are per replica.

    def start(self) -> "Run":
        memory = DeviceMemory()  # Before the model is built: memory in use by then does not count.
        with dtype_policy_scope(self.dtype_policy):
            model = self.build()
            if not self.training:
                return Run(self, model, memory)
            check_trainable(model)
            own_loss = user_step(model) or type(model).compute_loss is not keras.Model.compute_loss
            sample = self.data.some_rows(model)
            if sample is not None and model.loss is not None and not own_loss:
                _, targets, _ = keras.utils.unpack_x_y_sample_weight(sample.rows)
                if targets is None:
                    raise InputError(
                        "Training needs targets for the loss that the model was compiled with: "
                        f"give `y`. Received: y=None, loss={model.loss!r}."
                    )
            with model.distribute_strategy.scope():
                self.data.build(model)
        return Run(self, model, memory)


class WorkloadFacts(NamedTuple):
    """Facts about a workload that are known before it runs."""

    device: str
    limit_bytes: int  # Memory that it may use.
    training: bool
    dtype_policy: str
    variables_bytes: int
    held_bytes: int  # Bytes in use before it runs, including other models of the process.
    examples: int | None  # Number of examples in the data, None if unknown.
    notes: tuple[Note, ...]


class Reading(NamedTuple):
    """A measurement of the memory of one batch size."""

    # Peak of the steps after the first if that was measured, else of all; None if memory ran out.
    peak_bytes: int | None
    rows: int  # Examples in the batch, which the data may limit.
    duration_s: float = 0.0
    free: FreeMemory | None = None  # Free memory when it ran out, if the allocator reported it.
    died: WorkerDied | None = None  # The error if the worker process ended.
    lost: bool = False  # Whether nothing more can run in the process.
    # Peak of the first step, which also compiles and autotunes; None if it was not measured.
    first_step_bytes: int | None = None
    later_s: float = 0.0  # Seconds of the steps after the first.

    def expected_s(self, rows: int) -> float:
        """Return the seconds that a measurement of more rows is expected to take."""
        return self.duration_s + self.later_s * (rows / self.rows - 1)

    def bytes_below(self, limit_bytes: float) -> int | None:
        """Return the peak of later steps, or of the first step if that exceeds the limit."""
        peak, first = self.peak_bytes, self.first_step_bytes
        return max(peak, first) if peak and first and first > limit_bytes else peak


class Run:
    """Runs a workload in this process and measures its memory."""

    def __init__(self, workload: Workload, model: keras.Model, memory: DeviceMemory):
        self.model: Any = model
        self.memory = memory
        self.training = workload.training
        self._workload = workload
        # A model that already accumulates gradients is measured with its own step.
        self._train_step = vars(model).get("train_step")
        # Train step and Keras's compiled function, by micro-batch size. A whole batch has key None.
        self._compiled: dict[int | None, tuple[Any, Any]] = {}
        self.data = workload.data
        sample = self.data.some_rows(model)
        self.examples = sample and sample.examples
        self.note = sample and sample.note
        self._row_bytes: int | None = None

    def variables_bytes(self) -> int:
        """Return the bytes of the model's variables and, in training, of the optimizer's."""
        variables = list(self.model.variables)
        if self.training:
            optimizer = self.model.optimizer
            if not optimizer.built and user_step(self.model) is None:
                with self.model.distribute_strategy.scope():
                    optimizer.build(self.model.trainable_variables)
            for optimizer in optimizers_of(self.model):
                variables += optimizer.variables
        return sum(tf.as_dtype(v.dtype).size * int(tf.reduce_prod(v.shape)) for v in variables)

    def batch(self, rows: int) -> Any:
        return self.data.sample(rows, self.model)

    def left_out_bytes(self, batch_size: int) -> int:
        """Return the bytes of inputs that a real batch has and the batch of `run` does not have.

        A probe of a micro-batch runs two micro-batches, and a real batch may have more of them.
        """
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
        if memory_limit_bytes is None and (shared := memory.held_by_others()) is not None:
            free, total = map(memory_text, shared)
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
        """Measure one batch size.

        `smaller_worked` says whether a smaller size ran, so that a vague error means out of memory.
        """
        memory = self.memory
        gc.collect()
        memory.reset()
        started_s = time.perf_counter()
        peaks, ends_s = list[int](), list[float]()

        def keep_peak() -> None:
            ends_s.append(time.perf_counter())
            # A CPU's allocator does not count small blocks, so the peak may miss the variables.
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
            # If XLA on a CPU runs out of memory, it has freed the weights that it was to update,
            # although the model still uses them.
            on_cpu = memory.device == "CPU:0"
            freed = on_cpu and self.training and bool(self.model.jit_compile)
            lost = device_is_lost(error) or freed
        seconds, first = time.perf_counter() - started_s, peaks[0] if len(peaks) > 1 else None
        later_s = ends_s[-1] - ends_s[0] if ends_s else 0.0
        return Reading(peak, rows, seconds, lost=lost, first_step_bytes=first, later_s=later_s)

    def run(self, batch_size: int, after_first: Callable[[], None]) -> int:
        """Run one batch size and return its rows, which may be fewer if the data has no more."""
        rows, replicas = self._rows(batch_size), self._workload.replicas
        batches, available = self._batches(rows * replicas), rows
        if self.data.is_function:
            available = _rows_of_first(batches) // replicas
        if not available:  # A function that drops the remainder may return no batch.
            available = sum(1 for _ in self._batches(1).take(rows * replicas)) // replicas
            batches = self._batches(max(1, available) * replicas)
            if available in (0, rows) or not _rows_of_first(batches):
                raise InputError(
                    "The data function returned no batch: use at least as many examples as the "
                    "largest batch size, or give a smaller `max_batch_size`. "
                    f"Received: {available} examples for batch_size={rows}."
                )
        if self.training:
            self._set_train_step(batch_size)
        batches = batches.repeat().take(_STEPS).prefetch(tf.data.AUTOTUNE)
        steps, kind = _Steps(after_first), type(self.model)
        # The class's `fit`, unwrapped: kbatch or a tracker may have replaced it to time training.
        if self.training:
            fit = inspect.unwrap(kind.fit)
            fit(self.model, batches, verbose=0, shuffle=False, callbacks=[steps])
        else:
            kind.predict(self.model, batches, verbose=0, callbacks=[steps])
        return min(available, batch_size)

    def _set_train_step(self, batch_size: int) -> None:
        """Set the train step of a micro-batch size. If it ran before, use its compiled function."""
        size = batch_size if batch_size < self._workload.accumulate_below else None
        if size not in self._compiled:
            as_given = size is None and vars(self.model).get("train_step") is self._train_step
            if not as_given:
                uninstall_step(self.model)
            if size is not None:
                # Two micro-batches need as much memory as more of them.
                Accumulation(size, None, self._workload.moments_every).apply(self.model)
            elif not as_given and self._train_step is not None:
                self.model.train_step = self._train_step
            self.model.make_train_function(force=not as_given)
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
    # The batch is freed at once. Otherwise it would count as memory of the run.
    return sum(rows_of(batch) for batch in batches.take(1))


class _Steps(keras.callbacks.Callback):
    """Calls `after_first` when the traced first step ends, and stops the run if steps are slow."""

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
