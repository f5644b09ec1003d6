"""What a memory probe runs: train steps or predictions of one batch size."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.accumulation import accumulate_gradients
from kbatch.training.clock import InputMeter
from kbatch.training.data.forms import called_for
from kbatch.training.data.sample_rows import SampleElements, SampleRows, Source, batch_of, build_on
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.model import check_model
from kbatch.training.train_step import rows_of

# Slots appear after the first step, and later steps peak higher than early ones.
STEPS = 5
# No step is begun where those after the first have taken so long: a processor without float16 units
# would take minutes.
_MOST_S = 10.0


class Run(Protocol):
    """A load in the process that measures it.

    Attributes:
        model: The model that it runs.
        examples: Examples of the data set, None where it does not tell.
        note: What a reader must know of the data, or None.
        training: Whether it runs train steps.
        step_s: Seconds of a train step of the last run after its first, None where none was timed.
        stopped_after: Train steps after which the last run ended since they were slow, or None.
    """

    model: keras.Model
    training: bool
    examples: int | None
    note: str | None
    step_s: float | None
    stopped_after: int | None

    @property
    def variables_bytes(self) -> int:
        """Bytes of the weights and, in training, of the optimizer's slots."""
        ...

    def left_out_bytes(self, batch_size: int) -> int:
        """Bytes of the inputs that a real batch has beside those that `run` uses."""
        ...

    def run(self, batch_size: int, after_first: Callable[[], None]) -> int:
        """Run one batch size and return how many examples the batch really had."""
        ...

    def batch(self, rows: int) -> Any:
        """Return a batch of as many examples, on the device."""
        ...


@dataclasses.dataclass(frozen=True)
class Load:
    """A model and its data, which can go to another process.

    Attributes:
        build: Returns the compiled model.
        source: Its data.
        dtype_policy: Global policy under which it is built.
        training: Whether to run train steps, or predictions.
        accumulate_below: Batches below this size are run as micro-batches of an accumulated
            batch; 0 for never.
        moments_every: As in `accumulate_gradients`.
        replicas: Replicas of the model among which a strategy shares each batch; all sizes are
            those of one of them.
    """

    build: Callable[[], keras.Model]
    source: Source
    dtype_policy: str
    training: bool = True
    accumulate_below: int = 0
    moments_every: int = 0
    replicas: int = 1

    def start(self) -> Run:
        """Build the model."""
        with dtype_policy_scope(self.dtype_policy):
            model = self.build()
            if self.training:
                check_model(model)
                _check_targets(model, self.source)
                with model.distribute_strategy.scope():
                    build_on(model, self.source)
        return _Run(self, model)


def _check_targets(model: keras.Model, source: Source) -> None:
    """Check that a loss has targets, unless the model computes it in a way of its own."""
    target: Any = model
    if not isinstance(source, SampleRows) or target.loss is None:
        return
    own = type(target).compute_loss is not keras.Model.compute_loss
    rows = source.rows
    if not own and isinstance(rows, tuple) and len(rows) == 1:
        raise InputError(
            "Training needs targets for the loss that the model was compiled with: give `y`. "
            f"Received: y=None, loss={target.loss!r}."
        )


class _Run:
    def __init__(self, load: Load, model: keras.Model):
        self.model = model
        self.training = load.training
        self._load = load
        # That of a model which accumulates already: it is measured so.
        self._train_step = vars(model).get("train_step")
        # Train steps with what Keras compiled of them, by micro-batch size; None for the whole.
        self._compiled: dict[int | None, tuple[Any, Any]] = {}
        source = load.source
        self._source = source.rows(model) if isinstance(source, SampleElements) else source
        known = isinstance(self._source, SampleRows)
        self._row_bytes: int | None = None
        self.examples = self._source.examples if known else None
        self.note = self._source.note if known else None
        self.step_s: float | None = None
        self.stopped_after: int | None = None

    @property
    def variables_bytes(self) -> int:
        target: Any = self.model
        variables = list(target.variables)
        if self._load.training:
            if not target.optimizer.built:
                with target.distribute_strategy.scope():
                    target.optimizer.build(target.trainable_variables)
            variables += target.optimizer.variables
        return sum(tf.as_dtype(v.dtype).size * int(tf.reduce_prod(v.shape)) for v in variables)

    def left_out_bytes(self, batch_size: int) -> int:
        if batch_size >= self._load.accumulate_below:
            return 0
        if self._row_bytes is None:
            batch = next(iter(self._batches(1)))
            leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
            self._row_bytes = sum(np.asarray(leaf).nbytes for leaf in leaves)
        return self._row_bytes * (self._load.accumulate_below - self._rows(batch_size))

    def run(self, batch_size: int, after_first: Callable[[], None]) -> int:
        target: Any = self.model
        rows = self._rows(batch_size)
        if self._load.training:
            self._set_train_step(batch_size)
        replicas = self._load.replicas
        batches = self._batches(rows * replicas)
        given = rows * replicas
        if not isinstance(self._source, SampleRows):
            given = _first_rows(batches)
        if not given:
            return self._too_few_rows(batch_size)
        meter = InputMeter()
        batches = batches.repeat().take(STEPS).prefetch(tf.data.AUTOTUNE)
        if replicas == 1:  # A strategy takes batches ahead of the steps.
            batches = meter.attach(batches)
        # Not an instance's own `fit`, which may be timed by who measures.
        self.step_s = self.stopped_after = None
        steps = _Steps(after_first)
        if self._load.training:
            type(target).fit(target, batches, epochs=1, verbose=0, shuffle=False, callbacks=[steps])
            self.step_s, self.stopped_after = steps.step_s, steps.stopped_after
        else:
            type(target).predict(target, batches, verbose=0, callbacks=[steps])
        seen = meter.read().largest_batch if replicas == 1 else given // replicas
        return batch_size if seen == rows else min(seen, batch_size)

    def batch(self, rows: int) -> Any:
        return batch_of(self._source, self.model, rows)

    def _set_train_step(self, batch_size: int) -> None:
        """Make the model train in parts of this size, by what was compiled for them before."""
        target: Any = self.model
        size = batch_size if batch_size < self._load.accumulate_below else None
        if size not in self._compiled:
            vars(target).pop("train_step", None)
            if size is not None:
                # Two micro-batches are an accumulated batch: more of them need no more memory.
                accumulate_gradients(target, size, moments_every=self._load.moments_every)
            elif self._train_step is not None:
                target.train_step = self._train_step
            target.make_train_function(force=True)
            self._compiled[size] = vars(target).get("train_step"), target.train_function
        step, target.train_function = self._compiled[size]
        vars(target).pop("train_step", None)
        if step is not None:
            target.train_step = step

    def _too_few_rows(self, batch_size: int) -> int:
        """Count what a data function has that drops its remainder, and so gave no batch."""
        replicas = self._load.replicas
        count = sum(1 for _ in self._batches(1).take(batch_size * replicas)) // replicas
        if 0 < count < batch_size:
            return count
        raise InputError(
            "The data function returned no batch: give it more examples than the largest batch "
            f"size, or a smaller `max_batch_size`. Received: {count} examples for "
            f"batch_size={self._rows(batch_size)}."
        )

    def _rows(self, batch_size: int) -> int:
        return max(batch_size, min(2 * batch_size, self._load.accumulate_below))

    def _batches(self, rows: int) -> tf.data.Dataset:
        if isinstance(self._source, SampleRows):
            return self._source.batches(rows)
        return called_for(self._source, self.model, rows)


class _Steps(keras.callbacks.Callback):
    """Times the steps after the first, which is traced, and ends the run where they are slow.

    An epoch ends when the device has.
    """

    def __init__(self, after_first: Callable[[], None]):
        super().__init__()
        self.step_s: float | None = None
        self._after_first = after_first
        self.stopped_after: int | None = None
        self._steps = 0
        self._first_s = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        if self._steps == 1:
            self._after_first()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self._steps += 1
        if self._steps == 1:
            self._first_s = time.perf_counter()
        elif batch + 1 < STEPS and time.perf_counter() - self._first_s > _MOST_S:
            model: Any = self.model
            model.stop_training = True
            self.stopped_after = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None):
        if self._steps > 1:
            self.step_s = (time.perf_counter() - self._first_s) / (self._steps - 1)

    on_predict_batch_begin, on_predict_batch_end = on_train_batch_begin, on_train_batch_end


def _first_rows(batches: tf.data.Dataset) -> int:
    """Count the rows of the first batch, which is let go of: it would count as memory."""
    batch = next(iter(batches), None)
    return 0 if batch is None else rows_of(batch)
