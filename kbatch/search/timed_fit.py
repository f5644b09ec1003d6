"""Replace `model.fit` of a trial: set the batch size and other settings, and time the training."""

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.batch_sizes import is_integer
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.errors import InputError
from kbatch.library_internals import cache_file, inputs_of_dataset, without_retracing_advice
from kbatch.records.notes import Note
from kbatch.records.training_run import AskedRun, Budget, Plan, Target
from kbatch.search.best_epoch import BestEpoch, check_epoch_end, metrics_of_parts
from kbatch.search.plan import planned_steps
from kbatch.study.trial import Objective
from kbatch.training.callbacks import (
    BudgetCallback,
    StopAtTarget,
    TensorBoardScalars,
    TrainingClock,
    joint_budget,
    watch_rates,
)
from kbatch.training.data.batches import Batches, InputMeter, InputReading
from kbatch.training.data.forms import is_dataset
from kbatch.training.data.training_data import FitCall, TrainingData, check_labels
from kbatch.training.dtype_policy import check_loss_is_scaled
from kbatch.training.learning_rate import scale_late_layers
from kbatch.training.model import (
    can_validate,
    installed_step,
    is_compiled,
    replica_count,
    user_step,
    waiting_for_data,
)
from kbatch.training.state import seed_of
from kbatch.training.steps_per_execution import (
    ExecutionSteps,
    GraphCount,
    Steps,
    Training,
    check_epoch,
    set_steps,
    whole_steps,
)


class RunSettings(NamedTuple):
    """The settings of one training run."""

    number: int  # Number of the run in its trial, from 0.
    seed: int | None  # Seed of weights and shuffling. If None, they are random.
    batch_size: int  # Examples of one optimizer update.
    micro_batch_size: int | None  # Examples that go through a device at once. If unknown, None.
    validation_batch_size: int  # Examples of a validation batch.
    largest_batch_size: int  # Largest batch size of the search.
    metrics: tuple[str, ...]  # Metrics that each epoch must have.
    to_target: bool  # Whether the objective is `seconds_to_target`, which requires a target.
    objective: Objective
    objective_parts: tuple[Objective, ...]  # Parts of an objective that is a sum, else empty.
    steps_per_execution: Steps = 1  # The argument of the search, such as "auto".
    loss_is_sum: bool = False  # Whether the loss sums over rows, so that logs need its mean.
    plan: Plan | None = None  # If None, the model trains as it was written.
    notes: tuple[Note, ...] = ()  # Notes on the settings, such as the paths of callbacks.
    asked: AskedRun = AskedRun()  # How long the run is.


class SharedInput:
    """Holds the data and the meter that the training runs of a search share."""

    def __init__(self):
        self._data: TrainingData | None = None
        self._meter: InputMeter | None = None
        self._checked: tuple[TrainingData | None, Note | None] = (None, None)

    def data(self, data: TrainingData) -> TrainingData:
        """Return the data of the last call, with what was read of them, if these are the same."""
        if self._data is None or not self._data.is_same(data):
            self._data = data
        return self._data

    def check_split(self, data: TrainingData) -> Note | None:
        """Return a note if the labels are sorted by class. Check the same data only once."""
        if data is not self._checked[0]:
            self._checked = data, data.check_split()
        return self._checked[1]

    def meter(self) -> InputMeter:
        """Return the meter of all runs, whose graph is traced once, after setting it to 0."""
        self._meter = self._meter or InputMeter()
        self._meter.reset()
        return self._meter

    def __reduce__(self):
        return SharedInput, ()  # Tensors cannot be sent to another process.


class StepMeter(InputMeter):
    """Counts the batches and examples of a model on several replicas by its train steps.

    A distribution strategy reads batches before the steps need them, and one more to build the
    model, so the input does not show what the model has trained on. Each step counts as one full
    batch, except the last step of an epoch with a known number of examples.
    """

    def __init__(self, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._batches = self._examples = self._last = 0
        self._epoch = self._left = math.inf  # Examples of an epoch, and those not trained on yet.

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        self._epoch = math.inf if examples is None else examples
        return super().attach(dataset)

    def begin_epoch(self) -> None:
        self._left = self._epoch

    def end_step(self) -> None:
        self._last = int(min(self._batch_size, self._left))
        self._left -= self._last
        self._batches += 1
        self._examples += self._last

    def read(self) -> InputReading:
        seen = super().read()
        counts = self._batches, self._examples, seen.largest_batch
        return InputReading(*counts, None, float(self._last), seen.order)


class TimedFit:
    """Replaces `model.fit` within its context: sets the batch size and times the training."""

    def __init__(
        self,
        model: Any,
        settings: RunSettings,
        *,
        shared: SharedInput | None = None,
        scaling: LearningRateScaling | None = None,
    ):
        self.model, self.settings, self.scaling = model, settings, scaling
        self._fit = type(model).fit.__get__(model)
        self._shared = shared or SharedInput()
        self._fits = 0  # Calls of `fit` so far.
        self._exit = contextlib.ExitStack()
        self._has_replicas = replica_count(model) > 1
        size = settings.batch_size
        self.meter: Any = StepMeter(size) if self._has_replicas else self._shared.meter()
        self.clock = TrainingClock(self.meter, every_shape_compiles=is_compiled(model))
        self.best_epoch = BestEpoch(settings.objective, settings.objective_parts)
        self.monitor: GpuMonitor | None = None
        self.total_s = 0.0
        self.spans: list[tuple[float, ...]] = []  # Spans of all calls of `fit`.
        self.notes: list[Note] = []
        self.rate_callbacks: dict[str, None] = {}  # Names of callbacks that set the learning rate.
        self.averages_validated = False  # Whether moving averages of the weights were validated.
        self.budget: Budget | None = None
        self.target: Target | None = None
        self._built_steps = int(getattr(model, "steps_per_execution", 1))
        # The first call of `fit` sets the following.
        self.steps_per_execution: int | None = None
        self.epochs_asked: int | None = None  # Epochs of all calls.
        self.steps_per_epoch: int | None = None
        self.data: tuple[str, ...] = ()  # `TrainingData.arguments()`.
        self.order: str | None = None  # Order of the rows in the first epoch, if it is known.
        self.length: Literal["complete", "short", "stopped_early"] = "complete"
        self._continued_epochs = 0  # Epochs of the short run that is continued.
        self._history: Mapping[str, list[Any]] = {}  # Metrics of those epochs.

    def __enter__(self) -> "TimedFit":
        self.model.fit = self
        return self

    def __exit__(self, *error: object) -> None:
        del self.model.fit
        if self.model.steps_per_execution != self._built_steps:
            set_steps(self.model, self._built_steps)
        self._exit.close()

    def __call__(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the model. The arguments are those of `keras.Model.fit`."""
        settings, arguments, model = self.settings, FitCall(args, kwargs), self.model
        sizes = ("batch_size", "validation_batch_size")
        for name in sizes:
            if arguments.named[name] not in (None, size := getattr(settings, name)):
                raise InputError(
                    f"The search sets `{name}`: leave it out of `search` and `fit`, and give the "
                    "sizes to try as `batch_sizes` of `BatchSizeTuner`. "
                    f"Received: {name}={arguments.named[name]} in a trial with {name}={size}."
                )
        data = self._shared.data(arguments.data)
        check_labels(model, data.y)
        call = arguments.without("callbacks", *sizes, "validation_steps")
        if (step := installed_step(model)) is not None:
            # If no rows can be read, `fit` builds the model, or says what is missing.
            with contextlib.suppress(InputError), model.distribute_strategy.scope():
                data.build(model, settings.batch_size)
            if step.full_rows is not None:
                step.full_rows.assign(settings.batch_size)
        epochs, initial_epoch = call["epochs"], call["initial_epoch"]
        steps_per_epoch = call["steps_per_epoch"]
        # With other numbers, Keras would end at once, as if the training had completed.
        counts = (epochs, initial_epoch, 1 if steps_per_epoch is None else steps_per_epoch)
        if not (all(map(is_integer, counts)) and 0 <= initial_epoch < epochs and counts[2] >= 1):
            raise InputError(
                "The arguments must be integers with 0 <= initial_epoch < epochs, and "
                "`steps_per_epoch` must be at least 1 or None. Received: epochs="
                f"{epochs!r}, initial_epoch={initial_epoch!r}, steps_per_epoch={steps_per_epoch!r}."
            )
        batches = data.batches(
            settings.batch_size,
            model,
            largest_batch_size=settings.largest_batch_size,
            validation_batch_size=settings.validation_batch_size,
            validation_steps=arguments.named["validation_steps"],
            # Each call of `fit` has another order of the rows, unless it continues a short run.
            seed=seed_of(settings.seed, 0 if self._continued_epochs else self._fits, initial_epoch),
            first_epoch=self._continued_epochs,
            # A batch on several replicas must not have rows of two epochs.
            endless=not (self._has_replicas or steps_per_epoch),
            # A later call of `fit` in a run continues with the `PyDataset` of the earlier one.
            fresh=not (self._fits or self._continued_epochs),
            whole=settings.plan is not None and settings.plan.reason == "whole",
        )
        if not self._fits:
            if data.not_copied:
                self.notes.append(Note.of("data_not_copied", error=data.not_copied))
            if split := self._shared.check_split(data):
                self.notes.append(split)
        if batches.validation_data is not None and not can_validate(model):
            raise InputError(
                "Validation of a model with its own `train_step` requires a `test_step`, or a "
                "`call` and a compiled loss: add one, or leave out `validation_data`. "
                f"Received: model of class {type(model).__name__}."
            )
        never_ends = batches.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if never_ends and not (steps_per_epoch or batches.epoch_steps):
            raise InputError(
                "The dataset must end: leave out `.repeat()`, or give `steps_per_epoch`. "
                "Received: a dataset of infinite cardinality."
            )
        most = steps_per_epoch and steps_per_epoch * epochs * settings.largest_batch_size
        _fill_caches(batches.dataset, most)
        if is_dataset(batches.validation_data):
            _fill_caches(batches.validation_data, None)
        if self.monitor is None:
            self.monitor = self._exit.enter_context(GpuMonitor())
        self._fits += 1
        if self._continued_epochs:
            call["initial_epoch"] = self._continued_epochs
        else:
            self.epochs_asked = (self.epochs_asked or 0) + epochs - initial_epoch
        self.steps_per_epoch, self.data = steps_per_epoch, data.arguments()
        return self._train(batches, call, arguments.callbacks)

    def can_continue(self, callbacks: list[Any]) -> bool:
        """Return whether a later call of `fit` can continue as if training had not ended.

        It cannot if the end of `fit` changes some state: callbacks with hooks for the begin or end
        of training may reset theirs, averages replace the weights, and cut data start again.
        """
        optimizer: Any = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        stock = keras.callbacks.Callback
        acts = any(
            getattr(getattr(callback, hook), "__func__", None) is not getattr(stock, hook)
            for callback in callbacks
            if not hasattr(callback, "follow_trial")
            for hook in ("on_train_begin", "on_train_end")
        )
        stateful = optimizer is None or optimizer.use_ema or user_step(self.model) is not None
        return not (stateful or acts or self._has_replicas or self.steps_per_epoch)

    def continue_with(self, settings: RunSettings) -> None:
        """Make the next call of `fit` train the missing epochs."""
        self.settings, self.length, self.monitor = settings, "complete", None
        self._continued_epochs = len(self.clock.epochs)

    def _train(
        self, batches: Batches, call: dict[str, Any], callbacks: list[Any]
    ) -> keras.callbacks.History:
        """Call the model's `fit` with the callbacks of the user and of the search."""
        self.scaling = scale_late_layers(self.model, batches.dataset, self.scaling)
        check_loss_is_scaled(self.model)
        budgets = [callback for callback in callbacks if isinstance(callback, BudgetCallback)]
        self.budget = joint_budget(budgets)
        for callback in budgets:
            callback.count_by(self.clock)
        targets = [callback.target for callback in callbacks if isinstance(callback, StopAtTarget)]
        if len(targets) > 1 or (self.settings.to_target and not targets):
            needed = "one `StopAtTarget` only" if targets else "a `StopAtTarget` for this objective"
            raise InputError(
                f"`callbacks` must hold {needed}: give `callbacks="
                f"[kbatch.StopAtTarget(monitor, value)]`. Received: {len(targets)} such callbacks."
            )
        self.target = targets[0] if targets else None
        size, meter = self.settings.batch_size, self.meter
        by_function = keras.callbacks.LambdaCallback
        scalars = [
            TensorBoardScalars(callback, size)
            for callback in callbacks
            if isinstance(callback, keras.callbacks.TensorBoard)
        ]
        if self.settings.loss_is_sum:
            by_row = by_function(on_epoch_end=lambda _, logs: logs.update(loss=logs["loss"] / size))
            callbacks = [by_row, *callbacks]
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)
        self.averages_validated |= swaps
        best, stock = self.best_epoch, keras.callbacks.Callback.on_test_end
        best.batches = batches.validation_batches
        best.full_rows = batches.validation_batch_size
        hooks = (getattr(callback.on_test_end, "__func__", None) for callback in callbacks)
        keep_weights = any(hook is not stock for hook in hooks)
        end_validation = functools.partial(best.end_validation, keep_weights=keep_weights)
        metrics = () if call["validation_freq"] != 1 else self.settings.metrics
        expected = {"batch_size": size, "metrics": metrics}
        check = functools.partial(check_epoch_end, self.model, meter, **expected)
        end_early = by_function(on_epoch_end=functools.partial(self._end_early, call["epochs"]))
        first = [self.clock, by_function(on_test_end=end_validation)]
        first += watch_rates(self.model, callbacks, self.rate_callbacks)
        first += self._set_steps(batches, call, callbacks)
        last = [best, by_function(on_epoch_end=check), self.clock.last, end_early]
        began_at, began_s = time.time(), time.perf_counter()
        trained_s = self.clock.train_s or 0.0
        try:
            waits = waiting_for_data(self.model, batches.dataset)
            with warnings.catch_warnings(), without_retracing_advice(), waits:
                datasets = filter(is_dataset, (batches.dataset, batches.validation_data))
                if any(d.cardinality() == tf.data.UNKNOWN_CARDINALITY for d in datasets):
                    # The length of rebatched data is unknown, so each epoch ends with the data.
                    warnings.filterwarnings("ignore", message="Your input ran out of data")
                if self._fits == 1:
                    self.order = batches.order
                meter.see_order = batches.of_dataset
                if batches.epoch_steps is not None:
                    call["steps_per_epoch"] = batches.epoch_steps
                history = self._fit(
                    _for_trackers(meter.attach(batches.dataset, batches.examples), size),
                    validation_data=batches.validation_data,
                    validation_batch_size=batches.validation_batch_size,
                    callbacks=[*first, *scalars, *last],
                    shuffle=False,  # The dataset is already shuffled. Keras warns if this is True.
                    **call,
                )
        finally:
            all_s = time.perf_counter() - began_s
            self.total_s += all_s
            self.spans.append((began_at, (self.clock.train_s or 0.0) - trained_s, all_s))
        check_history(history, of_model=True)
        if names := metrics_of_parts(self.model, size):
            self.notes.append(Note.of("metrics_of_parts", names=", ".join(names)))
        if self._continued_epochs:
            history.epoch = [*range(len(self.clock.epochs))]
            for name, values in history.history.items():
                history.history[name] = [*self._history.get(name, ()), *values]
        if (throughput := self.clock.throughput) is not None:
            history.history["samples_per_second"] = [throughput.value] * len(history.epoch)
        self._history = history.history
        return history

    def _end_early(self, epochs: int, epoch: int, logs: Any) -> None:
        """End a short run after its epochs, and a run that can no longer be the best."""
        asked, objective = self.settings.asked, self.settings.objective
        if epoch + 1 == epochs or self.model.stop_training:
            return
        if epoch + 1 == asked.epochs:
            self.length = "short"
        elif epoch < len(asked.least):
            values = [record.finite(objective.name) for record in self.clock.epochs]
            curve = [objective.sign * value for value in values if value is not None]
            if len(curve) == len(values) and max(curve) < asked.least[epoch]:
                self.length = "stopped_early"
        self.model.stop_training = self.length != "complete"

    def _set_steps(
        self, batches: Batches, call: dict[str, Any], callbacks: list[Any]
    ) -> list[keras.callbacks.Callback]:
        """Set the steps per execution, and return a callback that changes them if needed."""
        settings, model = self.settings, self.model
        if settings.plan is None:  # The model trains as it was written.
            self.steps_per_execution = int(model.steps_per_execution)
            return []
        cardinality = int(batches.dataset.cardinality())
        steps_per_epoch, examples = call["steps_per_epoch"], batches.examples
        epoch_steps = steps_per_epoch or batches.epoch_steps or cardinality
        if epoch_steps < 0:
            epoch_steps = examples and -(-examples // settings.batch_size)
        # Check the largest batch size, so that the first trial refuses what a later one would.
        fewest = epoch_steps
        if examples and not steps_per_epoch:
            fewest = -(-examples // settings.largest_batch_size)
        check_epoch(settings.steps_per_execution, fewest)
        training = Training(
            batch_size=settings.batch_size,
            epoch_steps=epoch_steps,
            epochs=call["epochs"] - call["initial_epoch"],
            budget=self.budget,
            callbacks=callbacks,
        )
        steps, notes = planned_steps(settings.steps_per_execution, settings.plan, model, training)
        self.steps_per_execution = whole_steps(steps, steps_per_epoch, cardinality)
        self.notes.extend(notes)
        validation = batches.validation_batches or 0
        counted = isinstance(model.steps_per_execution, GraphCount)
        one_step = self.steps_per_execution == 1 and model.steps_per_execution == 1
        if one_step and not (counted and validation):
            return []
        set_steps(model, self.steps_per_execution)
        endless = batches.epoch_steps is not None
        return [ExecutionSteps(training, self.clock, endless=endless, validation=validation)]


def _fill_caches(dataset: Any, most: int | None) -> None:
    """Fill the caches of a dataset before training, so that the first trial is not slower.

    `most` is the number of examples that training reads. If None, it reads all. Caches stay empty
    if training does not read them to the end.
    """
    stages = [dataset]
    while stages:
        stage = stages.pop()
        reads_all = most is None or 0 <= int(stage.cardinality()) <= most
        if cache_file(stage) is not None and reads_all:
            # `skip` reads the elements in C++. If the number has more than 32 bits, it skips none.
            for _ in stage.skip(2**31 - 1):
                pass
        if "Take" not in type(stage).__name__:  # `take` may not read its inputs to the end.
            stages += inputs_of_dataset(stage)


def _for_trackers(dataset: Any, batch_size: int) -> Any:
    """Make MLflow's autolog, which patches `fit`, log the batch size but not read the dataset."""

    def refuse() -> Any:  # MLflow would compute a digest of all batches, which may never end.
        raise TypeError("kbatch turned off MLflow's dataset logging, which reads all data.")

    dataset.batch_size, dataset.as_numpy_iterator = batch_size, refuse
    return dataset


def check_history(results: Any, *, of_model: bool = False) -> None:
    """Raise InputError if the history of a custom `fit` has no list of values for a metric."""
    is_history = isinstance(results, keras.callbacks.History)
    history = results.history if is_history else {}
    numbers = {name: v for name, v in history.items() if not hasattr(v, "__len__")}
    if numbers or (of_model and not is_history):
        raise InputError(
            "A model's custom `fit` must return the `History` of Keras's `fit`, which has a list "
            "for each metric. `HyperModel.fit` may also return a dict of numbers. "
            f"Received: {numbers or results!r}."
        )
