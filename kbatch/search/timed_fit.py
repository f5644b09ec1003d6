"""`model.fit` for one execution of a trial: one batch size, one clock, checked by epoch."""

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from kbatch.device.memory import DeviceMemory
from kbatch.errors import InputError
from kbatch.records.notes import RunNote
from kbatch.records.training_run import Budget, Target
from kbatch.training.callbacks import BudgetCallback, StopAtTarget, joint_budget
from kbatch.training.clock import InputMeter, ReplicaMeter, TrainingClock, replica_count
from kbatch.training.data.forms import Batches, FitData, in_batches
from kbatch.training.learning_rate import scale_late_layers
from kbatch.training.model import waiting_for_data
from kbatch.training.state import seed_of

_SIGNATURE = inspect.signature(keras.Model.fit)


class TimedFit:
    """Stands in for `model.fit`: sets the batch size and times the training.

    It stands at the model's own border, so that a `HyperModel.fit` of the user's may prepare
    the data as it likes before it calls `model.fit`.

    Args:
        model: The model to train.
        batch_size: Examples in a training batch.
        largest_batch_size: Largest batch size of the search, which the data must fill once.
        validation_batch_size: Examples in a validation batch.
        seed: Seed of the shuffling, or None.
        metrics: Metrics that each epoch must have.
        to_target: Whether the cost of a target is asked for, so that there must be one.
        prepare: Called with the data and the other arguments before the data are batched; returns
            the most examples that a validation batch may have, None for `validation_batch_size`.
        callbacks_of: Gives the callbacks to train with for those of a call and the model.

    Attributes:
        clock: The clock of the run.
        total_s: Seconds in `fit`, in all.
        notes: What a reader of the figures must know.
        budget: What the callbacks let training spend, None without such a callback.
        target: Where a callback ends training, None without such a callback.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        batch_size: int,
        largest_batch_size: int,
        validation_batch_size: int,
        seed: int | None,
        metrics: tuple[str, ...] = (),
        to_target: bool = False,
        prepare: Callable[[FitData, Mapping[str, Any]], int | None] | None = None,
        callbacks_of: Callable[[list[Any], keras.Model], list[Any]] | None = None,
    ):
        self._model = model
        self._fit = type(model).fit.__get__(model)
        self._batch_size = batch_size
        self._largest_batch_size = largest_batch_size
        self._validation_batch_size = validation_batch_size
        self._seed = seed
        self._metrics = metrics
        self._to_target = to_target
        self._prepare = prepare
        self._callbacks_of = callbacks_of
        self._fits = 0
        self._meter = ReplicaMeter(model) if replica_count(model) > 1 else InputMeter()
        self.clock = TrainingClock(self._meter, every_shape_compiles=bool(model.jit_compile))
        self.total_s = 0.0
        self.notes: list[RunNote] = []
        self.budget: Budget | None = None
        self.target: Target | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the model; takes what `keras.Model.fit` takes."""
        call = _SIGNATURE.bind(self._model, *args, **kwargs).arguments
        del call["self"]
        self._check_size("batch_size", self._batch_size, call.pop("batch_size", None))
        self._check_size(
            "validation_batch_size",
            self._validation_batch_size,
            call.pop("validation_batch_size", None),
        )
        data = FitData(**{name: call.pop(name) for name in FitData._fields if name in call})
        if self._prepare is not None:
            most = self._prepare(data, call)
            if most is not None:
                self._validation_batch_size = min(self._validation_batch_size, most)
        initial_epoch = call.get("initial_epoch", 0)
        _check_epochs(call.get("epochs", 1), initial_epoch, call.get("steps_per_epoch"))
        batches = in_batches(
            data,
            self._model,
            batch_size=self._batch_size,
            largest_batch_size=self._largest_batch_size,
            validation_batch_size=self._validation_batch_size,
            # Each fit draws orders of its own, also where it goes on from an epoch.
            seed=seed_of(self._seed, self._fits, initial_epoch),
        )
        _check_end(batches.dataset, call)
        if initial_epoch:
            self.notes.append(RunNote.of("resumed", epoch=initial_epoch))
        self._fits += 1
        return self._train(batches, call)

    def _train(self, batches: Batches, call: dict[str, Any]) -> keras.callbacks.History:
        expected = () if call.get("validation_freq", 1) != 1 else self._metrics
        check = EpochCheck(self._batch_size, expected, self._meter)
        scale_late_layers(self._model, batches.dataset)
        theirs = keras.tree.flatten(call.pop("callbacks", None) or [])
        if self._callbacks_of is not None:
            theirs = self._callbacks_of(theirs, self._model)
        self._find_end(theirs)
        scalars = [
            TensorBoardScalars(callback, batch_size=self._batch_size)
            for callback in theirs
            if isinstance(callback, keras.callbacks.TensorBoard)
        ]
        started_s = time.perf_counter()
        try:
            with (
                _without_end_of_data_warning(batches),
                waiting_for_data(self._model, batches.dataset),
                self._counted(batches.dataset) as dataset,
            ):
                history = self._fit(
                    dataset,
                    validation_data=batches.validation_data,
                    validation_batch_size=self._validation_batch_size,
                    callbacks=[self.clock, *theirs, *scalars, check, *self._last],
                    shuffle=False,  # The dataset is shuffled; Keras warns about anything else.
                    **call,
                )
        finally:
            self.total_s += time.perf_counter() - started_s
        if coupled := sorted(batch_metrics(self._model)):
            self.notes.append(RunNote.of("metrics_of_parts", names=", ".join(coupled)))
        self._add_throughput(history)
        return history

    @contextlib.contextmanager
    def _counted(self, dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
        if isinstance(self._meter, ReplicaMeter):
            with self._meter.counting():
                yield dataset
        else:
            yield self._meter.attach(dataset)

    @property
    def _last(self) -> list[keras.callbacks.Callback]:
        """The callbacks after which a step begins."""
        stamps = [self._meter.stamp] if isinstance(self._meter, ReplicaMeter) else []
        return [self.clock.last, *stamps]

    def _find_end(self, callbacks: list[Any]) -> None:
        """Note what ends training beside the number of epochs, and let it count by the clock."""
        budgets = [callback for callback in callbacks if isinstance(callback, BudgetCallback)]
        self.budget = joint_budget(budgets)
        for callback in budgets:
            callback.count_by(self.clock)
        targets = [callback.target for callback in callbacks if isinstance(callback, StopAtTarget)]
        self.target = targets[0] if targets else None
        self._check_target(len(targets))

    def _check_target(self, targets: int) -> None:
        if targets > 1 or (self._to_target and not targets):
            raise InputError(
                "An objective such as `seconds_to_target`, and training itself, have one target: "
                "give `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
                f"Received: {targets} of them."
            )

    def _check_size(self, name: str, size: int, asked: int | None) -> None:
        if asked not in (None, size):
            raise InputError(
                f"`{name}` is set by `BatchSizeHyperModel`: leave it out of `search` and `fit`, "
                f"or give it there. Received: {name}={asked} in a trial of {size}."
            )

    def _add_throughput(self, history: keras.callbacks.History) -> None:
        throughput = self.clock.throughput
        if throughput is not None:
            history.history["samples_per_second"] = [throughput.mean] * len(history.epoch)


@contextlib.contextmanager
def _without_end_of_data_warning(batches: Batches) -> Iterator[None]:
    """Silences Keras where an epoch ends with the data: rebatched, its length is not known."""
    datasets = [d for d in batches if isinstance(d, tf.data.Dataset)]
    with warnings.catch_warnings():
        if any(dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY for dataset in datasets):
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _check_epochs(epochs: Any, initial_epoch: Any, steps: Any) -> None:
    """Check that training makes an update at least: Keras ends at once, as if it had completed."""
    given = [epochs, initial_epoch, *([] if steps is None else [steps])]
    whole = all(hasattr(one, "__index__") and not isinstance(one, bool) for one in given)
    if not whole or not 0 <= initial_epoch < epochs or (steps is not None and steps < 1):
        raise InputError(
            "`epochs` must be an integer of at least 1 and above `initial_epoch`, and "
            "`steps_per_epoch` None or at least 1. Received: "
            f"epochs={epochs!r}, initial_epoch={initial_epoch!r}, steps_per_epoch={steps!r}."
        )


def _check_end(dataset: tf.data.Dataset, call: dict[str, Any]) -> None:
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY and not call.get("steps_per_epoch"):
        raise InputError(
            "The dataset never ends: leave out `.repeat()`, or give `steps_per_epoch`. "
            "Received: a dataset of infinite cardinality."
        )


def batch_metrics(model: Any) -> set[str]:
    """Name the metrics that become means over micro-batches: their function needs all rows."""
    step = getattr(vars(model).get("train_step"), "__self__", None)
    return getattr(step, "batch_metrics", set())


class EpochCheck(keras.callbacks.Callback):
    """Ends training when an epoch shows that it is not what was asked for.

    Args:
        batch_size: Examples that the largest batch must have.
        metrics: Metrics that the epoch must have.
        meter: Counts what reaches the train step.
    """

    def __init__(self, batch_size: int, metrics: tuple[str, ...], meter: InputMeter | ReplicaMeter):
        super().__init__()
        self._batch_size = batch_size
        self._metrics = metrics
        self._meter = meter

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Compare the batches that arrived and the metrics with those expected."""
        seen = self._meter.read().largest_batch
        if seen != self._batch_size:
            raise InputError(
                f"The largest batch of an epoch had {seen} examples: leave the sizes above the "
                "training set out of `batch_sizes`, and let a data function batch by the size it "
                f"is called with. Received: batch_size={self._batch_size}."
            )
        coupled = sorted(set(self._metrics) & batch_metrics(self.model))
        if coupled:
            raise InputError(
                f"The objective {coupled[0]!r} is a function of all rows of a batch together, and "
                "this batch was cut: its value would be a mean over micro-batches. Choose "
                f"'val_{coupled[0]}', which nothing cuts, give `micro_batch_size=None`, or write "
                "the metric as a `keras.metrics.Metric` that sums over rows. "
                f"Received: objective={coupled[0]!r}."
            )
        missing = [name for name in self._metrics if name not in (logs or {})]
        if missing:
            raise InputError(
                f"The objective {missing[0]!r} is not among the metrics: give `validation_data` "
                "or `validation_split` for one that starts with val_, compile the model with it, "
                f"or choose another objective. Received: metrics {sorted(logs or {})}."
            )


RUN_NAME = "kbatch"


class TensorBoardScalars(keras.callbacks.Callback):
    """Writes throughput, memory, noise scale and sizes where a TensorBoard callback writes.

    They are a run of their own below its folder: TensorBoard reads one file a run at a time, and
    takes every run below the hyperparameters of a trial for its metrics.

    Args:
        board: The TensorBoard callback.
        batch_size: Examples of one optimizer update.
    """

    def __init__(self, board: keras.callbacks.TensorBoard, *, batch_size: int):
        super().__init__()
        self._board = board
        self._batch_size = batch_size
        self._memory = DeviceMemory()
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None):
        """Open the file, in the folder that keras-tuner gave the trial."""
        self._memory.reset()
        folder = Path(self._board.log_dir) / RUN_NAME
        self._writer = tf.summary.create_file_writer(str(folder))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Write the scalars of the epoch."""
        with self._writer.as_default(step=epoch):
            for name, value in self._scalars(logs or {}).items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def on_train_end(self, logs: Any = None):
        """Close the file."""
        self._writer.close()

    def _scalars(self, logs: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {
            "batch_size": self._batch_size,
            "micro_batch_size": self._micro_batch_size,
            **self._memory_scalar(),
        }
        if "samples_per_second" in logs:
            found["samples_per_second"] = logs["samples_per_second"]
        variance, norm = logs.get("gradient_variance", 0), logs.get("gradient_squared_norm", 0)
        # Means over the epoch, divided last; noise may outweigh what there is to see.
        if variance > 0 and norm > 0:
            found["noise_scale"] = float(variance) / float(norm)
        return {name: float(value) for name, value in found.items()}

    @property
    def _micro_batch_size(self) -> int:
        step = getattr(vars(self.model).get("train_step"), "__self__", None)
        return getattr(step, "micro_batch_size", None) or self._batch_size

    def _memory_scalar(self) -> dict[str, int]:
        if self._memory.device == "CPU:0":  # Its allocator counts large blocks only.
            return {"host_memory_bytes": psutil.Process().memory_info().rss}
        return {"peak_memory_bytes": self._memory.peak_bytes}
