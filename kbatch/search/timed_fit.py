"""`model.fit` for one execution of a trial: one batch size, one clock, checked by epoch."""

import contextlib
import difflib
import functools
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import psutil
import tensorflow as tf

from kbatch.analysis.batch_sizes import is_integer
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.analysis.noise_scale import MOMENT_METRICS
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.device.memory import DeviceMemory
from kbatch.errors import InputError
from kbatch.library_internals import cache_file, inputs_of_dataset
from kbatch.records.notes import Note
from kbatch.records.training_run import Budget, Target
from kbatch.search.best_epoch import BestEpoch
from kbatch.search.plan import SearchPlan
from kbatch.study.trial import Objective
from kbatch.training.callbacks import (
    BudgetCallback,
    StopAtTarget,
    TrainingClock,
    joint_budget,
    numbers_of,
)
from kbatch.training.data.batches import StepMeter
from kbatch.training.data.forms import is_dataset
from kbatch.training.data.training_data import Batches, FitCall, TrainingData, check_labels
from kbatch.training.dtype_policy import check_loss_is_scaled
from kbatch.training.learning_rate import scale_late_layers
from kbatch.training.model import can_validate, installed_step, replica_count, waiting_for_data
from kbatch.training.state import kept_variables, seed_of
from kbatch.training.steps_per_execution import (
    EndInTime,
    GraphCount,
    Training,
    check_epoch,
    set_steps,
    whole_steps,
)


class ExecutionSettings(NamedTuple):
    number: int  # Of the execution in its trial, from 0.
    seed: int | None  # Of weights and shuffling.
    batch_size: int  # Examples of one optimizer update.
    validation_batch_size: int  # At most, where less fits at once.
    metrics: tuple[str, ...]  # That each epoch must have.
    to_target: bool  # Whether the cost of a target is the objective, so that there must be one.
    objective: Objective  # What the search optimises.
    objective_parts: tuple[Objective, ...]  # Several that are one sum; empty for a single one.
    notes: tuple[Note, ...]  # On the settings, such as where callbacks write.
    search: SearchPlan  # What all executions have in common.


class TimedFit:
    """Stands in for `model.fit` within its context: sets the batch size and times the training."""

    def __init__(
        self,
        model: keras.Model,
        settings: ExecutionSettings,
        *,
        scaling: LearningRateScaling | None = None,
        # Called with the data before batching; returns the most that fit at once, where known.
        prepare: Callable[[TrainingData], int | None] | None = None,
    ):
        self._model: Any = model
        self._settings = settings
        self.scaling = scaling  # What the model was scaled by.
        self._fit = type(model).fit.__get__(model)
        self._validation_batch_size = settings.validation_batch_size
        self._prepare = prepare
        self._fits = 0
        self._open = contextlib.ExitStack()
        self._several = replica_count(model) > 1
        self._meter = StepMeter(settings.batch_size) if self._several else settings.search.meter()
        self.clock = TrainingClock(self._meter, every_shape_compiles=bool(model.jit_compile))
        self.best_epoch = BestEpoch(settings.objective, settings.objective_parts)
        # What training takes, the making of the plan left out.
        self.monitor: GpuMonitor | None = None
        self.total_s = 0.0
        self.notes: list[Note] = []
        self.averages_validated = False  # Moving averages of the weights.
        self.budget: Budget | None = None
        self.target: Target | None = None
        self._built_steps = int(getattr(model, "steps_per_execution", 1))
        # None before the first training.
        self.steps_per_execution: int | None = None
        self.epochs_asked: int | None = None  # Of all calls.
        self.steps_per_epoch: int | None = None
        self._order: str | None = None  # Of the first epoch, where that is known without data.

    def __enter__(self) -> "TimedFit":
        self._model.fit = self
        return self

    def __exit__(self, *error: object) -> None:
        del self._model.fit
        if self._model.steps_per_execution != self._built_steps:
            set_steps(self._model, self._built_steps)
        self._open.close()

    def __call__(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the model; takes what `keras.Model.fit` takes."""
        settings = self._settings
        given = FitCall(args, kwargs)
        sizes = {
            "batch_size": settings.batch_size,
            "validation_batch_size": self._validation_batch_size,
        }
        for name, size in sizes.items():
            asked = given.named[name]
            if asked not in (None, size):
                raise InputError(
                    f"The search sets `{name}` itself: leave it out of `search` and `fit`, and "
                    "give the sizes to try as `batch_sizes` of `BatchSizeTuner`. "
                    f"Received: {name}={asked} in a trial of {size}."
                )
        data = settings.search.data(given.data)
        check_labels(self._model, data.y)
        call = given.without("callbacks", *sizes, "validation_steps")
        most = None if self._prepare is None else self._prepare(data)
        if most is not None:
            self._validation_batch_size = min(self._validation_batch_size, most)
        epochs, initial_epoch, given_steps = (
            call[name] for name in ("epochs", "initial_epoch", "steps_per_epoch")
        )
        _check_epochs(epochs, initial_epoch, given_steps)
        batches = data.batches(
            settings.batch_size,
            self._model,
            largest_batch_size=settings.search.batch_sizes[-1],
            validation_batch_size=self._validation_batch_size,
            validation_steps=given.named["validation_steps"],
            # Each fit draws orders of its own, also where it goes on from an epoch.
            seed=seed_of(settings.seed, self._fits, initial_epoch),
            # A batch that replicas share must not have rows of two epochs.
            endless=not (self._several or given_steps),
        )
        if batches.validation_data is not None and not can_validate(self._model):
            raise InputError(
                "A model with its own `train_step` needs a `test_step`, or a `call` and a compiled "
                "loss, to be validated: add one, or leave out `validation_data`. "
                f"Received: model of class {type(self._model).__name__}."
            )
        never_ends = batches.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if never_ends and not (given_steps or batches.epoch_steps):
            raise InputError(
                "The dataset never ends: leave out `.repeat()`, or give `steps_per_epoch`. "
                "Received: a dataset of infinite cardinality."
            )
        most = given_steps and given_steps * epochs * settings.search.batch_sizes[-1]
        _fill_caches(batches.dataset, most)
        if is_dataset(batches.validation_data):
            _fill_caches(batches.validation_data, None)
        if self.monitor is None:
            self.monitor = self._open.enter_context(GpuMonitor())
        self._fits += 1
        self.epochs_asked = (self.epochs_asked or 0) + epochs - initial_epoch
        self.steps_per_epoch = given_steps
        return self._train(batches, call, given.callbacks)

    @property
    def first_order(self) -> str | None:
        """Fingerprint of the order of the first epoch, None where it is unknown."""
        return self._order or self._meter.order

    def _train(
        self, batches: Batches, call: dict[str, Any], theirs: list[Any]
    ) -> keras.callbacks.History:
        self.scaling = scale_late_layers(self._model, batches.dataset, self.scaling)
        check_loss_is_scaled(self._model)
        self._find_end(theirs)
        size, meter = self._settings.batch_size, self._meter
        scalars = [
            _TensorBoardScalars(callback, size)
            for callback in theirs
            if isinstance(callback, keras.callbacks.TensorBoard)
        ]
        ranked = (*self._settings.metrics, self.target and self.target.metric)
        if "loss" in ranked and _is_sum(self._model, batches.dataset):
            callback = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda _, logs: logs.update(loss=logs["loss"] / size)
            )
            theirs = [callback, *theirs]
        expected = () if call["validation_freq"] != 1 else self._settings.metrics
        swaps = any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in theirs)
        self.averages_validated |= swaps
        best, stock = self.best_epoch, keras.callbacks.Callback.on_test_end
        best.batches = batches.validation_batches
        end = functools.partial(
            best.end_validation,
            keep_weights=any(
                getattr(one.on_test_end, "__func__", None) is not stock for one in theirs
            ),
        )
        first = keras.callbacks.LambdaCallback(on_test_end=end)
        check = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs: _check_epoch_end(
                self._model,
                logs,
                batch_size=size,
                seen=meter.read().largest_batch,
                metrics=expected,
            )
        )
        last = [best, check, self.clock.last]  # A step begins after the last one.
        own = [self.clock, first, *theirs, *self._set_steps(batches, call, theirs)]
        started_s = time.perf_counter()
        try:
            with warnings.catch_warnings(), waiting_for_data(self._model, batches.dataset):
                datasets = [batches.dataset, batches.validation_data]
                datasets = [d for d in datasets if is_dataset(d)]
                if any(d.cardinality() == tf.data.UNKNOWN_CARDINALITY for d in datasets):
                    # An epoch ends with the data: the length of what is rebatched is not known.
                    warnings.filterwarnings("ignore", message="Your input ran out of data")
                if self._fits == 1:
                    self._order = batches.order
                meter.see_order = batches.of_dataset
                if batches.epoch_steps is not None:
                    call["steps_per_epoch"] = batches.epoch_steps
                history = self._fit(
                    meter.attach(batches.dataset, batches.examples),
                    validation_data=batches.validation_data,
                    validation_batch_size=batches.validation_batch_size,
                    callbacks=[*own, *scalars, *last],
                    shuffle=False,  # The dataset is shuffled; Keras warns about anything else.
                    **call,
                )
        finally:
            self.total_s += time.perf_counter() - started_s
        # Metrics whose function needs all rows become means over micro-batches.
        if coupled := _metrics_of_parts(self._model, size):
            self.notes.append(Note.of("metrics_of_parts", names=", ".join(coupled)))
        if (throughput := self.clock.throughput) is not None:
            history.history["samples_per_second"] = [throughput.value] * len(history.epoch)
        return history

    def _set_steps(
        self, batches: Batches, call: dict[str, Any], callbacks: list[Any]
    ) -> list[keras.callbacks.Callback]:
        """Set how many steps an execution runs; return what ends the last one in time."""
        settings, budget, model = self._settings, self.budget, self._model
        found = batches.epoch_steps or int(batches.dataset.cardinality())
        given, examples = call["steps_per_epoch"], batches.examples
        rows = settings.batch_size if found < 0 else None
        epoch_steps = given or (found if rows is None else examples and -(-examples // rows))
        # Of the search the fewest, so that it ends before the first trial.
        fewest = epoch_steps
        if examples and not given:
            fewest = -(-examples // settings.search.batch_sizes[-1])
        check_epoch(settings.search.steps_per_execution, fewest)
        training = Training(
            batch_size=settings.batch_size,
            epoch_steps=epoch_steps,
            epochs=call["epochs"] - call["initial_epoch"],
            budget=budget,
            callbacks=callbacks,
        )
        steps, notes = settings.search.steps(model, training)
        self.steps_per_execution = whole_steps(steps, given, int(batches.dataset.cardinality()))
        self.notes.extend(notes)
        validation = batches.validation_batches or 0
        counted = isinstance(model.steps_per_execution, GraphCount)
        one = self.steps_per_execution == 1 and model.steps_per_execution == 1
        if one and not (counted and validation):
            return []
        set_steps(model, self.steps_per_execution)
        endless = batches.epoch_steps is not None
        return [EndInTime(training, self.clock, endless=endless, validation=validation)]

    def _find_end(self, callbacks: list[Any]) -> None:
        """Note what ends training beside the number of epochs, and let it count by the clock."""
        budgets = [callback for callback in callbacks if isinstance(callback, BudgetCallback)]
        self.budget = joint_budget(budgets)
        for callback in budgets:
            callback.count_by(self.clock)
        targets = [callback.target for callback in callbacks if isinstance(callback, StopAtTarget)]
        if len(targets) > 1 or (self._settings.to_target and not targets):
            raise InputError(
                "An objective such as `seconds_to_target`, and training itself, have one target: "
                "give `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
                f"Received: {len(targets)} of them."
            )
        self.target = targets[0] if targets else None


def _check_epochs(epochs: Any, initial_epoch: Any, steps: Any) -> None:
    """Check that training makes an update at least: Keras ends at once, as if it had completed."""
    whole = all(map(is_integer, (epochs, initial_epoch, 1 if steps is None else steps)))
    if not whole or not 0 <= initial_epoch < epochs or (steps is not None and steps < 1):
        raise InputError(
            "`epochs` must be an integer of at least 1 and above `initial_epoch`, and "
            "`steps_per_epoch` None or at least 1. Received: "
            f"epochs={epochs!r}, initial_epoch={initial_epoch!r}, steps_per_epoch={steps!r}."
        )


def _fill_caches(dataset: Any, most: int | None) -> None:
    """Fill the caches that training reads to their end, of at most so many examples."""
    # The first trial would pay for all others, and seem to be slow. Where each epoch ends with the
    # data, `most` is None. A full cache takes some microseconds an element.
    waiting = [dataset]
    while waiting:
        stage = waiting.pop()
        known = most is None or 0 <= int(stage.cardinality()) <= most
        if cache_file(stage) is not None and known:
            # All are skipped, in C++; of a number beyond 32 bits none would be.
            for _ in stage.skip(2**31 - 1):
                pass
        if "Take" not in type(stage).__name__:  # It leaves a rest.
            waiting += inputs_of_dataset(stage)


def _is_sum(model: Any, dataset: tf.data.Dataset) -> bool:
    """Return whether the loss of the same rows grows in proportion to the size of their batch."""
    if type(model).train_step is not keras.Model.train_step or replica_count(model) > 1:
        return False
    rows = tf.data.Dataset.from_tensors(next(iter(dataset.unbatch().batch(8)))).unbatch()
    with kept_variables(model):
        found = [model.evaluate(rows.batch(n), verbose=0, return_dict=True) for n in (2, 4, 8)]
    quarters, halves, whole = (one.get("loss", 0.0) for one in found)
    # By differences, which a penalty on weights leaves as they are.
    grows = abs(whole - halves) > 1e-3 * abs(whole)
    return grows and math.isclose(whole - halves, 2 * (halves - quarters), rel_tol=1e-2)


def _metrics_of_parts(model: Any, batch_size: int) -> list[str]:
    """List the metrics that are means over micro-batches where batches have this size."""
    step: Any = installed_step(model)
    names: set[str] = getattr(step, "batch_metrics", set())
    cut = names and step.how.micro_batch_size * replica_count(model) < batch_size
    return sorted(names) if cut else []


def _check_epoch_end(
    model: Any, logs: Any, *, batch_size: int, seen: int, metrics: tuple[str, ...]
) -> None:
    """Check that the batches and metrics of an epoch are what was asked for."""
    if seen != batch_size:
        raise InputError(
            f"The largest batch of an epoch had {seen} examples: leave the sizes above the "
            "training set out of `batch_sizes`, and let a data function batch by the size it "
            f"is called with. Received: batch_size={batch_size}."
        )
    if coupled := [name for name in _metrics_of_parts(model, batch_size) if name in metrics]:
        raise InputError(
            f"The objective {coupled[0]!r} is a function of all rows of a batch together, and "
            "this batch was cut: its value would be a mean over micro-batches. Choose "
            f"'val_{coupled[0]}', which nothing cuts, give `micro_batch_size=None`, or write "
            "the metric as a `keras.metrics.Metric` that sums over rows. "
            f"Received: objective={coupled[0]!r}."
        )
    numbers = numbers_of(logs)
    if missing := [name for name in metrics if name not in numbers]:
        near = difflib.get_close_matches(missing[0], numbers, n=1)
        advice = f"did you mean {near[0]!r}" if near else "compile the model with it"
        if missing[0].startswith("val_") and not any(n.startswith("val_") for n in numbers):
            advice = "give `validation_data` or `validation_split`"
        raise InputError(
            f"Training reports no metric {missing[0]!r} that is one number: {advice}. "
            f"Received: metrics {sorted(numbers)}."
        )


class _TensorBoardScalars(keras.callbacks.Callback):
    """Writes throughput, memory, noise scale and sizes where a TensorBoard callback writes."""

    # They are a run of their own below its folder: TensorBoard reads one file a run at a time, and
    # takes every run below the hyperparameters of a trial for its metrics.

    def __init__(self, board: keras.callbacks.TensorBoard, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._writer: Any = tf.summary.create_file_writer(str(Path(board.log_dir) / "kbatch"))
        self._memory = DeviceMemory()
        self._memory.reset()

    def on_epoch_end(self, epoch: int, logs: Any = None):
        how: Any = getattr(installed_step(self.model), "how", None)
        size = self._batch_size
        found = {"batch_size": size, "micro_batch_size": how.micro_batch_size if how else size}
        if self._memory.device == "CPU:0":  # Its allocator counts large blocks only.
            found["host_memory_bytes"] = psutil.Process().memory_info().rss
        else:
            found["peak_memory_bytes"] = self._memory.peak_bytes
        if "samples_per_second" in logs:
            found["samples_per_second"] = logs["samples_per_second"]
        variance, norm = (logs.get(name, 0) for name in MOMENT_METRICS)
        # Means over the epoch, divided last; noise may outweigh what there is to see.
        if variance > 0 and norm > 0:
            found["noise_scale"] = variance / norm
        with self._writer.as_default(step=epoch):
            for name, value in found.items():
                tf.summary.scalar(name, float(value))
        self._writer.flush()

    def on_train_end(self, logs: Any = None):
        self._writer.close()
