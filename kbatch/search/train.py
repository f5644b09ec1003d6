"""One training run of a trial: `fit` with a batch size set and a clock, and the record of it."""

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import is_integer
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.device import failures
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.device.machine import read_environment
from kbatch.device.memory import workers_on_device
from kbatch.errors import InputError, PolicyUnsupported
from kbatch.library_internals import keep_build_config, without_retracing_advice
from kbatch.records.notes import Note
from kbatch.records.training_run import (
    AskedRun,
    Budget,
    ExecutionRecord,
    Plan,
    Target,
    seconds_to_target,
)
from kbatch.search.best_epoch import BestEpoch, check_epoch_end, metrics_of_parts
from kbatch.search.files import CHECKPOINT_NAME, TrialFiles
from kbatch.search.plan import most_in_memory, planned_steps
from kbatch.study.trial import Objective
from kbatch.training.callbacks import (
    BudgetCallback,
    StopAtTarget,
    TensorBoardScalars,
    TrainingClock,
    joint_budget,
    watch_rates,
)
from kbatch.training.data.batches import Batches, InputMeter, StepMeter, fill_caches
from kbatch.training.data.forms import is_dataset
from kbatch.training.data.training_data import FitCall, TrainingData, check_labels
from kbatch.training.dtype_policy import check_loss_is_scaled, dtype_policy_scope, skips_all_updates
from kbatch.training.learning_rate import peak_learning_rate, scale_late_layers, weight_shapes
from kbatch.training.model import (
    ModelFacts,
    can_validate,
    inner_optimizers,
    installed_step,
    is_compiled,
    replica_count,
    user_step,
    waiting_for_data,
)
from kbatch.training.state import assign, copies_of, seed_of, seeded
from kbatch.training.steps_per_execution import (
    EndInTime,
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
    seed: int | None  # Seed of weights and shuffling.
    batch_size: int  # Examples of one optimizer update.
    micro_batch_size: int | None  # Examples that go through a device at once. If unknown, None.
    validation_batch_size: int  # Examples of a validation batch.
    largest_batch_size: int  # Largest batch size of the search.
    metrics: tuple[str, ...]  # Metrics that each epoch must have.
    to_target: bool  # Whether the objective is the cost of a target, so that a target is required.
    objective: Objective
    objective_parts: tuple[Objective, ...]  # Parts of an objective that is a sum, else empty.
    steps_per_execution: Steps = 1  # As asked for.
    loss_is_sum: bool = False  # Whether the loss is to be divided by the size of its batch.
    plan: Plan | None = None  # If None, the model trains as it was written.
    notes: tuple[Note, ...] = ()  # Notes on the settings, such as the paths of callbacks.
    asked: AskedRun = AskedRun()  # When the run ends before its last epoch.


class ShortRun:
    """A training run that ended early, with everything that another call of `fit` continues."""

    def __init__(self, timed: "TimedFit", begun: ExecutionRecord, callbacks: list[Any]):
        self.timed, self.begun, self.callbacks = timed, begun, callbacks
        self.model: Any = timed.model
        self._values = copies_of(self._variables())
        self.size_bytes = sum(value.nbytes for value in self._values)
        self._totals = timed.meter.totals()
        objective = timed.settings.objective
        values = [epoch.finite(objective.name) for epoch in timed.clock.epochs]
        #: Best value of the objective. Larger is better.
        self.value = max((objective.sign * v for v in values if v is not None), default=-math.inf)

    def restore(self, settings: RunSettings) -> None:
        """Restore weights, optimizer and counts as they were when the run ended."""
        assign(self._variables(), self._values)
        self.timed.meter.set_totals(self._totals)
        self.timed.continue_with(settings)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]


class Trained(NamedTuple):
    """The end of a training run: its results, or an error."""

    record: ExecutionRecord
    results: Any = None  # The result of `fit`, with measured metrics.
    error: BaseException | None = None
    step_ran_out: bool = False  # Whether memory may have run out in a train step.
    runs_again: bool = False  # Whether the plan now has smaller micro-batches or float32.
    short: ShortRun | None = None  # Continues a short run, if that is possible.
    share: float = 0.0  # Epochs that were trained now, over all epochs that `fit` was asked for.


class SharedInput:
    """The data that the training runs of a search share, and one meter for all runs."""

    def __init__(self):
        self._data: TrainingData | None = None
        self._meter: InputMeter | None = None
        self._checked: tuple[TrainingData | None, Note | None] = (None, None)

    def data(self, data: TrainingData) -> TrainingData:
        """Return the data of the last call, with all that was read of them, if they are equal."""
        if self._data is None or not self._data.is_same(data):
            self._data = data
        return self._data

    def check_split(self, data: TrainingData) -> Note | None:
        """Return a note if the labels are sorted by class. The same data are checked once."""
        if data is not self._checked[0]:
            self._checked = data, data.check_split()
        return self._checked[1]

    def meter(self) -> InputMeter:
        """Return the meter of all runs, which is traced once, with its counts at 0."""
        self._meter = self._meter or InputMeter()
        self._meter.reset()
        return self._meter

    def __reduce__(self):
        return SharedInput, ()  # Tensors cannot be sent to another process.


def train(
    model: Any,
    hp: Any,
    call: FitCall,
    settings: RunSettings,
    files: TrialFiles,
    *,
    fit: Callable[..., Any],
    shared: SharedInput,
    scaling: LearningRateScaling | None,
    short: ShortRun | None = None,
) -> Trained:
    """Train a model and write a record of its end, also if it fails.

    `fit` is the `fit` of a HyperModel, which calls `model.fit`. If `short` is given, the training
    continues this short run of the model.
    """
    number = settings.number
    # The record of a short run stays until the run that continues or repeats it has ended.
    short_record = files.short_run(number)
    if short is not None:
        timed, begun = short.timed, dataclasses.replace(short.begun, place=settings.asked.place)
    else:
        timed = TimedFit(model, settings, shared=shared, scaling=scaling)
        begun = dataclasses.replace(_begun(model, settings), spans=files.spans_before(number))
        if short_record is not None:
            repeated = short_record.epochs_repeated + len(short_record.epochs)
            begun = dataclasses.replace(begun, epochs_repeated=repeated)
    done = len(timed.clock.epochs)
    record = functools.partial(_record, begun, timed)
    for callback in call.callbacks:
        if hasattr(callback, "follow_trial"):  # A `LivePlot`, whose module imports figures.
            so_far = functools.partial(record, "running")
            callback.follow_trial(files, number=number, so_far=so_far)
    if short_record is None:
        files.write(number, record("running"))
    try:
        # Layers that are built by their first batch draw their weights here, not in `build`.
        seeds = seeded(seed_of(settings.seed, 1))
        with seeds, dtype_policy_scope(begun.dtype_policy), timed:
            results = fit(hp, model, *call.arguments, **call.keywords)
        _check_history(results)
        results = _with_measures(results, timed, files)
        reported = files.reported(results)
        if files.of_kbatch_tuner:
            known = files.record() if (files.folder / CHECKPOINT_NAME).exists() else None
            best = known and known.best_objective_value
            timed.best_epoch.write_weights(model, files.folder, best)
            keep_build_config(files.tuner, files.trial_id, model)
        outcomes = timed.best_epoch.outcomes(reported)
        timed.notes.extend(timed.best_epoch.notes())
    except BaseException as error:  # Also an interruption, because each end has a record.
        status, failure = failures.failure_status(error), failures.failure_text(error)
        if status == "failed" and settings.plan is not None and settings.plan.reason == "whole":
            failure = (
                f"The model or its loss takes only batches of {settings.batch_size} rows (axis 0): "
                "leave out sizes for which the last batch of training or validation is smaller, "
                "give functions `lambda n: dataset.batch(n, drop_remainder=True)` as data, or "
                f"read the size by `keras.ops.shape(x)[0]`. Received: {failure}"
            )
        traceback = failures.failure_traceback(error)
        ended = dataclasses.replace(record(status, failure), traceback=traceback)
        if short_record is None or ended.status != "interrupted":
            files.write(number, ended)
        # Memory may also run out in validation or in a callback.
        step_ran_out = failures.smaller_may_run(error) and timed.clock.in_step
        return Trained(ended, None, error, step_ran_out)
    ended = dataclasses.replace(
        record("completed"), reported=reported, outcomes=outcomes, dead=timed.best_epoch.is_dead()
    )
    if ended.diverged:
        dead = "the outputs of all validation examples were equal, or some were not finite"
        cause = dead if ended.dead else "the loss became NaN or infinite"
        failure = f"{cause}: lower the learning rate"
        ended = dataclasses.replace(ended, status="failed", failure=failure)
    files.write(number, ended)
    can_continue = ended.length == "short" and timed.can_continue(call.callbacks)
    short = ShortRun(timed, begun, call.callbacks) if can_continue else None
    share = (len(ended.epochs) - done) / (ended.epochs_asked or 1)
    return Trained(ended, results, short=short, share=share)


def _begun(model: Any, settings: RunSettings) -> ExecutionRecord:
    """Return the record of a training run that begins."""
    facts, here = ModelFacts(model), read_environment()
    optimizer = next(iter(inner_optimizers(model)), None)  # A custom `fit` may compile later.
    plan, notes = settings.plan, settings.notes
    if facts.dtype_policy in ("bfloat16", "float16"):
        notes += (Note.of("updates_rounded", policy=facts.dtype_policy),)
    return ExecutionRecord(
        status="running",
        seed=settings.seed,
        batch_size=settings.batch_size,
        micro_batch_size=settings.micro_batch_size,
        dtype_policy=facts.dtype_policy,
        optimizer=optimizer and type(optimizer).__name__,
        loss_scaled=facts.loss_scaled,
        learning_rate=peak_learning_rate(optimizer),
        jit_compile=is_compiled(model),
        notes=notes,
        plan=plan and plan.number,
        most_in_memory=plan and most_in_memory(plan),
        workers_on_device=workers_on_device(),
        device=here.device.replace("CPU", here.cpu),
        replicas=facts.replicas,
        place=settings.asked.place,
    )


def _with_measures(results: Any, timed: "TimedFit", files: TrialFiles) -> Any:
    """Add measured metrics to the result of `fit`, if keras-tuner needs them."""
    clock, monitor, wanted = timed.clock, timed.monitor, files.measured_names
    if "samples_per_second" in wanted and clock.throughput is None:
        raise keras_tuner.errors.FailedTrialError(
            "The objective samples/s cannot be measured in so few steps: train for more epochs, "
            "or leave out the largest batch sizes. "
            f"Received: {clock.reading.batches} steps with "
            f"batch_size={timed.settings.batch_size}."
        )
    if clock.epochs and not clock.updates and skips_all_updates(timed.model):
        raise PolicyUnsupported(
            "no update was made, because the gradients of every batch overflowed in float16. Scale "
            'the loss and the inputs down, or give `dtype_policy="float32"`'
        )
    figures = {} if clock.throughput is None else {"samples_per_second": clock.throughput.value}
    if timed.target is not None:
        seconds = seconds_to_target(timed.target, clock.epochs)
        # keras-tuner ranks a trial with infinite seconds last.
        figures["seconds_to_target"] = math.inf if seconds is None else seconds
    usage = monitor and monitor.usage
    usage_metrics = usage.metrics(clock.reading.examples) if usage else {}
    if isinstance(results, keras.callbacks.History):
        count = len(results.epoch)
        results.history |= {name: [value] * count for name, value in usage_metrics.items()}
        if wanted:
            # The other metrics are from the last epoch. Several objectives are one sum.
            last = {name: values[-1] for name, values in results.history.items()} | figures
            return last | {files.objective.name: files.tuner.oracle.objective.get_value(last)}
    return figures | usage_metrics | results if isinstance(results, dict) else results


def _record(
    begun: ExecutionRecord, timed: "TimedFit", status: str, failure: str | None = None
) -> ExecutionRecord:
    """Return the record of a training run up to now."""
    clock, notes = timed.clock, [*begun.notes]
    record = dataclasses.replace(
        begun,
        status=status,
        failure=failure,
        spans=(*begun.spans, *timed.spans),
        usage=timed.monitor and timed.monitor.usage,
        length=timed.length,
        budget=timed.budget,
        target=timed.target,
        steps_per_execution=timed.steps_per_execution,
        epochs_asked=timed.epochs_asked,
        steps_per_epoch=timed.steps_per_epoch,
        scaling=timed.scaling,  # `fit` may have built and scaled more layers.
    )
    if clock.first_step_s is None:
        notes += [Note.of("nothing_timed")] if status == "completed" else []
        return dataclasses.replace(record, notes=tuple(notes))
    notes += timed.notes
    built, used = begun.learning_rate, clock.first_learning_rate
    if built is not None and used is not None and not math.isclose(built, used, rel_tol=1e-5):
        names = ", ".join(timed.rate_callbacks)
        by = f"a callback ({names})" if names else "`HyperModel.fit` or the tuner's `optimizer`"
        notes.append(Note.of("first_learning_rate", used=used, built=built, by=by))
    reading, (examples, durations_s) = clock.reading, clock.windows
    if not examples and status != "running" and timed.length == "complete":
        notes.append(Note.of("too_short_to_time"))
    in_epochs = updates = sum(epoch.updates for epoch in clock.epochs)
    with contextlib.suppress(Exception):  # The counter of a lost device cannot be read.
        updates = clock.updates
    overflowed = None
    # A custom step may make no update or several updates of a batch.
    if begun.loss_scaled and user_step(timed.model) is None:
        overflowed = max(0, sum(epoch.batches or 0 for epoch in clock.epochs) - in_epochs)
    return dataclasses.replace(
        record,
        learning_rate=used,
        batch_size_seen=reading.largest_batch or None,
        window_examples=tuple(examples),
        window_durations_s=tuple(durations_s),
        first_step_s=clock.first_step_s,
        examples_seen=reading.examples,
        batches=reading.batches,
        updates=updates,
        overflowed_updates=overflowed,
        train_s=clock.train_s,
        data_wait_s=reading.wait_s,
        total_s=timed.total_s,
        epochs=tuple(clock.epochs),
        notes=tuple(notes),
        averages_validated=timed.averages_validated,
        rate_callbacks=tuple(timed.rate_callbacks),
        initial_weights=timed.best_epoch.initial_weights,
        weight_shapes=weight_shapes(timed.model),
        first_order=timed.order or timed.meter.read().order,
        data=timed.data,
    )


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
        # The following are None before the first training.
        self.steps_per_execution: int | None = None
        self.epochs_asked: int | None = None  # Epochs of all calls.
        self.steps_per_epoch: int | None = None
        self.data: tuple[str, ...] = ()  # Form of the data, and the further arguments of `fit`.
        self.order: str | None = None  # Order of the first epoch, if the seed decides it.
        self.length: Literal["complete", "short", "stopped_early"] = "complete"
        self._done = 0  # Epochs of the short run that is continued.
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
        sizes = {
            "batch_size": settings.batch_size,
            "validation_batch_size": settings.validation_batch_size,
        }
        for name, size in sizes.items():
            if arguments.named[name] not in (None, size):
                raise InputError(
                    f"The search sets `{name}`: leave it out of `search` and `fit`, and give the "
                    "sizes to try as `batch_sizes` of `BatchSizeTuner`. "
                    f"Received: {name}={arguments.named[name]} in a trial of {size}."
                )
        data = self._shared.data(arguments.data)
        check_labels(model, data.y)
        call = arguments.without("callbacks", *sizes, "validation_steps")
        if (step := installed_step(model)) is not None:
            # If no rows can be read to build the model, `fit` builds it, or says what is missing.
            with contextlib.suppress(InputError), model.distribute_strategy.scope():
                data.build(model, settings.batch_size)
            if step.full_rows is not None:
                step.full_rows.assign(settings.batch_size)
        epochs, initial_epoch, steps_per_epoch = (
            call[name] for name in ("epochs", "initial_epoch", "steps_per_epoch")
        )
        # Keras would end at once, as if the training had completed.
        counts = (epochs, initial_epoch, 1 if steps_per_epoch is None else steps_per_epoch)
        if not (all(map(is_integer, counts)) and 0 <= initial_epoch < epochs and counts[2] >= 1):
            raise InputError(
                "`epochs` must be an integer of at least 1 and above `initial_epoch`, and "
                "`steps_per_epoch` must be None or at least 1. Received: epochs="
                f"{epochs!r}, initial_epoch={initial_epoch!r}, steps_per_epoch={steps_per_epoch!r}."
            )
        batches = data.batches(
            settings.batch_size,
            model,
            largest_batch_size=settings.largest_batch_size,
            validation_batch_size=settings.validation_batch_size,
            validation_steps=arguments.named["validation_steps"],
            # Each call of `fit` has its own order of the rows, unless it continues a short run.
            seed=seed_of(settings.seed, 0 if self._done else self._fits, initial_epoch),
            first_epoch=self._done,
            # A batch that replicas share must not have rows of two epochs.
            endless=not (self._has_replicas or steps_per_epoch),
            # A later `fit` of the run continues with the state that the earlier one left.
            fresh=not (self._fits or self._done),
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
        fill_caches(batches.dataset, most)
        if is_dataset(batches.validation_data):
            fill_caches(batches.validation_data, None)
        if self.monitor is None:
            self.monitor = self._exit.enter_context(GpuMonitor())
        self._fits += 1
        if self._done:
            call["initial_epoch"] = self._done
        else:
            self.epochs_asked = (self.epochs_asked or 0) + epochs - initial_epoch
        self.steps_per_epoch, self.data = steps_per_epoch, data.arguments()
        return self._train(batches, call, arguments.callbacks)

    def can_continue(self, callbacks: list[Any]) -> bool:
        """Return whether a later call of `fit` can continue as if training had not ended.

        Nothing outside the model may have state. A callback that acts at the start or at the end of
        training may reset its state, averages of weights replace the weights at the end, and data
        that `steps_per_epoch` cuts start again.
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
        """Let the next call of `fit` train the missing epochs."""
        self.settings, self.length, self.monitor = settings, "complete", None
        self._done = len(self.clock.epochs)

    def _train(
        self, batches: Batches, call: dict[str, Any], callbacks: list[Any]
    ) -> keras.callbacks.History:
        """Call the model's `fit` with the callbacks of the user, of the clock and of the search."""
        self.scaling = scale_late_layers(self.model, batches.dataset, self.scaling)
        check_loss_is_scaled(self.model)
        budgets = [callback for callback in callbacks if isinstance(callback, BudgetCallback)]
        self.budget = joint_budget(budgets)
        for callback in budgets:
            callback.count_by(self.clock)
        targets = [callback.target for callback in callbacks if isinstance(callback, StopAtTarget)]
        if len(targets) > 1 or (self.settings.to_target and not targets):
            needed = "at most one" if targets else "for the objective `seconds_to_target` a"
            raise InputError(
                f"`callbacks` must hold {needed} `StopAtTarget`: give `callbacks="
                f"[kbatch.StopAtTarget(monitor, value)]`. Received: {len(targets)} of them."
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
        end_early = functools.partial(self._end_early, call["epochs"])
        first = [self.clock, by_function(on_test_end=end_validation)]
        first += watch_rates(self.model, callbacks, self.rate_callbacks)
        first += self._set_steps(batches, call, callbacks)
        # `clock.last` starts the time of the next step.
        last = [
            best,
            by_function(on_epoch_end=check),
            self.clock.last,
            by_function(on_epoch_end=end_early),
        ]
        began_at, began_s = time.time(), time.perf_counter()
        trained_s = self.clock.train_s or 0.0
        try:
            waits = waiting_for_data(self.model, batches.dataset)
            with warnings.catch_warnings(), without_retracing_advice(), waits:
                datasets = filter(is_dataset, (batches.dataset, batches.validation_data))
                if any(d.cardinality() == tf.data.UNKNOWN_CARDINALITY for d in datasets):
                    # An epoch ends with the data: the length of rebatched data is unknown.
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
                    shuffle=False,  # The dataset is shuffled. Keras warns about other values.
                    **call,
                )
        finally:
            all_s = time.perf_counter() - began_s
            self.total_s += all_s
            self.spans.append((began_at, (self.clock.train_s or 0.0) - trained_s, all_s))
        _check_history(history, of_model=True)
        if names := metrics_of_parts(self.model, size):
            self.notes.append(Note.of("metrics_of_parts", names=", ".join(names)))
        if self._done:
            history.epoch = [*range(len(self.clock.epochs))]
            for name, values in history.history.items():
                history.history[name] = [*self._history.get(name, ()), *values]
        if (throughput := self.clock.throughput) is not None:
            history.history["samples_per_second"] = [throughput.value] * len(history.epoch)
        self._history = history.history
        return history

    def _end_early(self, epochs: int, epoch: int, logs: Any) -> None:
        """End a short run after its epochs, and any run that is too far behind."""
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
        """Set the steps per execution, and return the callback that ends the last one in time."""
        settings, model = self.settings, self.model
        if settings.plan is None:  # The model trains as it was written.
            self.steps_per_execution = int(model.steps_per_execution)
            return []
        cardinality = int(batches.dataset.cardinality())
        steps_per_epoch, examples = call["steps_per_epoch"], batches.examples
        epoch_steps = steps_per_epoch or batches.epoch_steps or cardinality
        if epoch_steps < 0:
            epoch_steps = examples and -(-examples // settings.batch_size)
        # The search is refused before its first trial, so the size with the fewest steps decides.
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
        return [EndInTime(training, self.clock, endless=endless, validation=validation)]


def _for_trackers(dataset: Any, batch_size: int) -> Any:
    """Let MLflow's autolog, which patches `fit`, name the batch size and not read the dataset."""

    def refuse() -> Any:  # MLflow would compute a digest of all batches, which may never end.
        raise TypeError("kbatch turns off dataset logging, which would read all training data.")

    dataset.batch_size, dataset.as_numpy_iterator = batch_size, refuse
    return dataset


def _check_history(results: Any, *, of_model: bool = False) -> None:
    """Check that a history of a custom `fit` has a list of values for each metric."""
    is_history = isinstance(results, keras.callbacks.History)
    history = results.history if is_history else {}
    numbers = {name: v for name, v in history.items() if not hasattr(v, "__len__")}
    if numbers or (of_model and not is_history):
        raise InputError(
            "A custom `fit` must return the history of Keras's `fit`, which has a list for each "
            "metric with one value per epoch. `HyperModel.fit` may also return a dict of numbers. "
            f"Received: {numbers or results!r}."
        )
