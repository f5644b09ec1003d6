"""One training run of a trial: `fit` with a batch size set and a clock, and the record of it."""

import contextlib
import dataclasses
import difflib
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
from kbatch.search.best_epoch import BestEpoch
from kbatch.search.files import CHECKPOINT_NAME, TrialFiles
from kbatch.search.plan import most_in_memory, planned_steps
from kbatch.study.trial import Objective
from kbatch.training.callbacks import (
    BudgetCallback,
    StopAtTarget,
    TensorBoardScalars,
    TrainingClock,
    joint_budget,
    numbers_of,
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
    """What is set for one training run."""

    number: int  # Of the run in its trial, from 0.
    seed: int | None  # Of weights and shuffling.
    batch_size: int  # Examples of one optimizer update.
    micro_batch_size: int | None  # Examples that go through a device at once; None if unknown.
    validation_batch_size: int  # Examples of a validation batch.
    largest_batch_size: int  # Of the search.
    metrics: tuple[str, ...]  # That each epoch must have.
    to_target: bool  # Whether the cost of a target is the objective, so that there must be one.
    objective: Objective  # What the search optimises.
    objective_parts: tuple[Objective, ...]  # Several that are one sum; empty for a single one.
    steps_per_execution: Steps = 1  # As asked for.
    loss_is_sum: bool = False  # Whether the loss is to be divided by the size of its batch.
    plan: Plan | None = None  # None if the model trains as it was written.
    notes: tuple[Note, ...] = ()  # On the settings, such as where callbacks write.
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
        values = [one.finite(objective.name) for one in timed.clock.epochs]
        #: The best of the objective; larger is better.
        self.value = max((objective.sign * v for v in values if v is not None), default=-math.inf)

    def restore(self, settings: RunSettings) -> None:
        """Put weights, optimizer and counts back as they were when the run ended."""
        assign(self._variables(), self._values)
        self.timed.meter.set_totals(self._totals)
        self.timed.continue_with(settings)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]


class Trained(NamedTuple):
    """How a training run ended: with results, or with an error."""

    record: ExecutionRecord
    results: Any = None  # What `fit` returned, and what was measured.
    error: BaseException | None = None
    step_ran_out: bool = False  # Whether memory may have run out in a train step.
    runs_again: bool = False  # Whether the plan has smaller micro-batches or float32 since.
    short: ShortRun | None = None  # What continues a short run; None if nothing can.
    share: float = 0.0  # Epochs that were trained now, over all that `fit` was asked for.


class SharedInput:
    """What the training runs of a search share of their data: what was read, and one meter."""

    def __init__(self):
        self._data: TrainingData | None = None
        self._meter: InputMeter | None = None
        self._checked: TrainingData | None = None
        self._split_note: Note | None = None

    def data(self, given: TrainingData) -> TrainingData:
        """Return data with what was read of them before, if the last ones were the same."""
        if self._data is None or not self._data.is_same(given):
            self._data = given
        return self._data

    def check_split(self, data: TrainingData) -> Note | None:
        """Say once if labels are sorted by class."""
        if data is not self._checked:
            self._checked, self._split_note = data, data.check_split()
        return self._split_note

    def meter(self) -> InputMeter:
        """Return the meter of all runs, traced once, which begins to count again."""
        self._meter = self._meter or InputMeter()
        self._meter.reset()
        return self._meter

    def __reduce__(self):
        return SharedInput, ()  # No tensor travels to another process.


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
    """Train a model and write a record of how it ended, also if it fails.

    Args:
        model: The built model.
        hp: The hyperparameters of the trial.
        call: The arguments of `fit`.
        settings: What is set for this run.
        files: Where the record is written.
        fit: The `fit` of a HyperModel, which calls `model.fit`.
        shared: What the runs of the search share.
        scaling: What the model was scaled by.
        short: The short run of this model that is continued.
    """
    number = settings.number
    if short is not None:
        timed, begun = short.timed, dataclasses.replace(short.begun, place=settings.asked.place)
    else:
        timed = TimedFit(model, settings, shared=shared, scaling=scaling)
        begun = _begun(model, settings)
    done = len(timed.clock.epochs)
    # The record of a short run stays until the run that continues or repeats it has ended.
    waiting = files.short_run(number)
    if short is None:
        begun = dataclasses.replace(begun, spans=files.spans_before(number))
    if waiting is not None and short is None:
        repeated = waiting.epochs_repeated + len(waiting.epochs)
        begun = dataclasses.replace(begun, epochs_repeated=repeated)
    record = functools.partial(_record, begun, timed)
    for callback in call.callbacks:
        if hasattr(callback, "follow_trial"):  # A `LivePlot`, without the modules that draw it.
            so_far = functools.partial(record, "running")
            callback.follow_trial(files, number=number, so_far=so_far)
    if waiting is None:
        files.write(number, record("running"))
    try:
        # Layers that are built by their first batch draw their weights here, and not in `build`.
        seeds = seeded(seed_of(settings.seed, 1))
        with seeds, dtype_policy_scope(begun.dtype_policy), timed:
            results = fit(hp, model, *call.arguments, **call.keywords)
        results = _with_measures(results, timed, files)
        reported = files.reported(results)
        if files.of_kbatch_tuner:
            known = files.record() if (files.folder / CHECKPOINT_NAME).exists() else None
            best = known and known.best_objective_value
            timed.best_epoch.write_weights(model, files.folder, best)
            keep_build_config(files.tuner, files.trial_id, model)
        outcomes = timed.best_epoch.outcomes(reported)
        timed.notes.extend(timed.best_epoch.notes())
    except BaseException as error:  # Also an interruption: each end has a record.
        status, failure = failures.failure_status(error), failures.failure_text(error)
        if status == "failed" and settings.plan is not None and settings.plan.reason == "whole":
            failure = _of_whole_batches(settings.batch_size, failure)
        ended = record(status, failure)
        ended = dataclasses.replace(ended, traceback=failures.failure_traceback(error))
        if waiting is None or ended.status != "interrupted":
            files.write(number, ended)
        ran_out = failures.smaller_may_run(error)
        # Not in validation, and not in a callback.
        return Trained(ended, None, error, ran_out and timed.clock.in_step)
    ended = dataclasses.replace(
        record("completed"), reported=reported, outcomes=outcomes, dead=timed.best_epoch.is_dead()
    )
    if ended.diverged:
        dead = "the outputs of all validation examples were equal, or some were not finite"
        what = dead if ended.dead else "the loss became NaN or infinite"
        text = f"{what}: lower the learning rate"
        ended = dataclasses.replace(ended, status="failed", failure=text)
    files.write(number, ended)
    can_continue = ended.length == "short" and timed.can_continue(call.callbacks)
    short = ShortRun(timed, begun, call.callbacks) if can_continue else None
    share = (len(ended.epochs) - done) / (ended.epochs_asked or 1)
    return Trained(ended, results, short=short, share=share)


def _begun(model: Any, settings: RunSettings) -> ExecutionRecord:
    """Describe a training run that begins."""
    facts, here = ModelFacts(model), read_environment()
    # None if a `fit` of the user's own compiles the model.
    optimizer = next(iter(inner_optimizers(model)), None)
    plan, size = settings.plan, settings.micro_batch_size
    notes = settings.notes
    if facts.dtype_policy in ("bfloat16", "float16"):
        notes += (Note.of("updates_rounded", policy=facts.dtype_policy),)
    return ExecutionRecord(
        status="running",
        seed=settings.seed,
        batch_size=settings.batch_size,
        micro_batch_size=size,
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
    """Add what was measured to what `fit` returned, if keras-tuner is to have it."""
    clock, target, monitor = timed.clock, timed.target, timed.monitor
    throughput, usage, wanted = clock.throughput, monitor and monitor.usage, files.measured_names
    if "samples_per_second" in wanted and throughput is None:
        raise keras_tuner.errors.FailedTrialError(
            "There were too few steps to measure samples/s, which is the objective: train "
            "for more epochs, or leave out the largest batch sizes. "
            f"Received: {clock.reading.batches} steps with "
            f"batch_size={timed.settings.batch_size}."
        )
    if clock.epochs and not clock.updates and skips_all_updates(timed.model):
        raise PolicyUnsupported(
            "no update: the gradients of every batch overflowed in float16. Scale the loss and "
            'the inputs down, or give `dtype_policy="float32"`'
        )
    figures = {} if throughput is None else {"samples_per_second": throughput.value}
    if target is not None:
        seconds = seconds_to_target(target, clock.epochs)
        # The least of no value is infinite: keras-tuner ranks a trial that never met it last.
        figures["seconds_to_target"] = math.inf if seconds is None else seconds
    taken = usage.metrics(clock.reading.examples) if usage else {}
    if isinstance(results, keras.callbacks.History):
        results.history |= {name: [value] * len(results.epoch) for name, value in taken.items()}
        if wanted:
            # The other metrics are those of the last epoch. Several objectives are one sum.
            found = {name: values[-1] for name, values in results.history.items()} | figures
            return found | {files.objective.name: files.tuner.oracle.objective.get_value(found)}
    return figures | taken | results if isinstance(results, dict) else results


def _record(
    begun: ExecutionRecord, timed: "TimedFit", status: str, failure: str | None = None
) -> ExecutionRecord:
    """Describe a training run as far as it has come."""
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
        scaling=timed.scaling,  # Layers may have been built since it began.
    )
    if clock.first_step_s is None:
        notes += [Note.of("nothing_timed")] if status == "completed" else []
        return dataclasses.replace(record, notes=tuple(notes))
    notes += timed.notes
    ruled, seen = begun.learning_rate, clock.first_learning_rate
    if ruled is not None and seen is not None and not math.isclose(ruled, seen, rel_tol=1e-5):
        names = ", ".join(timed.rate_callbacks)
        by = f"a callback ({names})" if names else "`HyperModel.fit` or the tuner's `optimizer`"
        notes.append(Note.of("first_learning_rate", used=seen, built=ruled, by=by))
    reading, (examples, durations_s) = clock.reading, clock.windows
    if not examples and status != "running" and timed.length == "complete":
        notes.append(Note.of("too_short_to_time"))
    counted = updates = sum(epoch.updates for epoch in clock.epochs)
    with contextlib.suppress(Exception):  # A lost device does not say what it has counted.
        updates = clock.updates
    overflowed = None
    # A step of the user's own may make none or several updates of a batch.
    if begun.loss_scaled and user_step(timed.model) is None:
        overflowed = max(0, sum(epoch.batches or 0 for epoch in clock.epochs) - counted)
    return dataclasses.replace(
        record,
        learning_rate=seen,
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
    """Stands in for `model.fit` within its context: sets the batch size and times the training."""

    def __init__(
        self,
        model: Any,
        settings: RunSettings,
        *,
        shared: SharedInput | None = None,
        scaling: LearningRateScaling | None = None,
    ):
        self.model, self.settings = model, settings
        self.scaling = scaling  # What the model was scaled by.
        self._fit = type(model).fit.__get__(model)
        self._shared = shared or SharedInput()
        self._fits = 0
        self._open = contextlib.ExitStack()
        self._several = replica_count(model) > 1
        self.meter: Any = StepMeter(settings.batch_size) if self._several else self._shared.meter()
        self.clock = TrainingClock(self.meter, every_shape_compiles=is_compiled(model))
        self.best_epoch = BestEpoch(settings.objective, settings.objective_parts)
        self.monitor: GpuMonitor | None = None
        self.total_s = 0.0
        self.spans: list[tuple[float, ...]] = []  # Of all calls of `fit`.
        self.notes: list[Note] = []
        self.rate_callbacks: dict[str, None] = {}  # Names of those that set the learning rate.
        self.averages_validated = False  # Moving averages of the weights.
        self.budget: Budget | None = None
        self.target: Target | None = None
        self._built_steps = int(getattr(model, "steps_per_execution", 1))
        # None before the first training.
        self.steps_per_execution: int | None = None
        self.epochs_asked: int | None = None  # Of all calls.
        self.steps_per_epoch: int | None = None
        self.data: tuple[str, ...] = ()  # Its form, and the further arguments of `fit`.
        self.order: str | None = None  # Of the first epoch, if that is known without data.
        self.length: Literal["complete", "short", "stopped_early"] = "complete"
        self._done = 0  # Epochs of the short run that is continued.
        self._history: Mapping[str, list[Any]] = {}  # Of those epochs.

    def __enter__(self) -> "TimedFit":
        self.model.fit = self
        return self

    def __exit__(self, *error: object) -> None:
        del self.model.fit
        if self.model.steps_per_execution != self._built_steps:
            set_steps(self.model, self._built_steps)
        self._open.close()

    def __call__(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the model; takes what `keras.Model.fit` takes."""
        settings = self.settings
        given = FitCall(args, kwargs)
        sizes = {
            "batch_size": settings.batch_size,
            "validation_batch_size": settings.validation_batch_size,
        }
        for name, size in sizes.items():
            asked = given.named[name]
            if asked not in (None, size):
                raise InputError(
                    f"The search sets `{name}` itself: leave it out of `search` and `fit`, and "
                    "give the sizes to try as `batch_sizes` of `BatchSizeTuner`. "
                    f"Received: {name}={asked} in a trial of {size}."
                )
        data = self._shared.data(given.data)
        check_labels(self.model, data.y)
        call = given.without("callbacks", *sizes, "validation_steps")
        if (step := installed_step(self.model)) is not None:
            # Without rows to build it with, `fit` builds the model, or says what is missing.
            with contextlib.suppress(InputError), self.model.distribute_strategy.scope():
                data.build(self.model, settings.batch_size)
            if step.full_rows is not None:
                step.full_rows.assign(settings.batch_size)
        epochs, initial_epoch, given_steps = (
            call[name] for name in ("epochs", "initial_epoch", "steps_per_epoch")
        )
        _check_epochs(epochs, initial_epoch, given_steps)
        batches = data.batches(
            settings.batch_size,
            self.model,
            largest_batch_size=settings.largest_batch_size,
            validation_batch_size=settings.validation_batch_size,
            validation_steps=given.named["validation_steps"],
            # Each fit draws orders of its own, unless it continues a short run.
            seed=seed_of(settings.seed, 0 if self._done else self._fits, initial_epoch),
            first_epoch=self._done,
            # A batch that replicas share must not have rows of two epochs.
            endless=not (self._several or given_steps),
            # A later `fit` of the run continues with the state that the earlier one left.
            fresh=not (self._fits or self._done),
            whole=settings.plan is not None and settings.plan.reason == "whole",
        )
        if data.not_copied and not self._fits:
            self.notes.append(Note.of("data_not_copied", error=data.not_copied))
        if not self._fits and (split := self._shared.check_split(data)):
            self.notes.append(split)
        if batches.validation_data is not None and not can_validate(self.model):
            raise InputError(
                "A model with its own `train_step` needs a `test_step`, or a `call` and a compiled "
                "loss, to be validated: add one, or leave out `validation_data`. "
                f"Received: model of class {type(self.model).__name__}."
            )
        never_ends = batches.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if never_ends and not (given_steps or batches.epoch_steps):
            raise InputError(
                "The dataset never ends: leave out `.repeat()`, or give `steps_per_epoch`. "
                "Received: a dataset of infinite cardinality."
            )
        most = given_steps and given_steps * epochs * settings.largest_batch_size
        fill_caches(batches.dataset, most)
        if is_dataset(batches.validation_data):
            fill_caches(batches.validation_data, None)
        if self.monitor is None:
            self.monitor = self._open.enter_context(GpuMonitor())
        self._fits += 1
        if self._done:
            call["initial_epoch"] = self._done
        else:
            self.epochs_asked = (self.epochs_asked or 0) + epochs - initial_epoch
        self.steps_per_epoch, self.data = given_steps, data.arguments()
        return self._train(batches, call, given.callbacks)

    def can_continue(self, callbacks: list[Any]) -> bool:
        """Return whether a later call of `fit` can continue as if training had not ended.

        Nothing else may have state. A callback that acts at the start or at the end of training may
        reset its state, averages of weights replace the weights at the end, and data that
        `steps_per_epoch` cuts start again.
        """
        optimizer: Any = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        plain = optimizer is not None and not optimizer.use_ema and not self._several
        stock = keras.callbacks.Callback
        theirs = [one for one in callbacks if not hasattr(one, "follow_trial")]
        hooks = ("on_train_begin", "on_train_end")
        resets = any(
            getattr(getattr(one, name), "__func__", None) is not getattr(stock, name)
            for one in theirs
            for name in hooks
        )
        return plain and user_step(self.model) is None and not resets and not self.steps_per_epoch

    def continue_with(self, settings: RunSettings) -> None:
        """Let the next call of `fit` train the epochs that are missing."""
        self.settings, self.length, self.monitor = settings, "complete", None
        self._done = len(self.clock.epochs)

    def _train(
        self, batches: Batches, call: dict[str, Any], theirs: list[Any]
    ) -> keras.callbacks.History:
        self.scaling = scale_late_layers(self.model, batches.dataset, self.scaling)
        check_loss_is_scaled(self.model)
        self._find_end(theirs)
        size, meter = self.settings.batch_size, self.meter
        scalars = [
            TensorBoardScalars(callback, size)
            for callback in theirs
            if isinstance(callback, keras.callbacks.TensorBoard)
        ]
        if self.settings.loss_is_sum:
            callback = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda _, logs: logs.update(loss=logs["loss"] / size)
            )
            theirs = [callback, *theirs]
        expected = () if call["validation_freq"] != 1 else self.settings.metrics
        swaps = any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in theirs)
        self.averages_validated |= swaps
        best, stock = self.best_epoch, keras.callbacks.Callback.on_test_end
        best.batches = batches.validation_batches
        best.full_rows = batches.validation_batch_size
        end = functools.partial(
            best.end_validation,
            keep_weights=any(
                getattr(one.on_test_end, "__func__", None) is not stock for one in theirs
            ),
        )
        first = keras.callbacks.LambdaCallback(on_test_end=end)
        check = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs: _check_epoch_end(
                self.model, logs, batch_size=size, seen=meter.read().largest_batch, metrics=expected
            )
        )
        end_early = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: self._end_early(epoch, call["epochs"])
        )
        # A step begins after the last one.
        last = [best, check, self.clock.last, end_early]
        own = [self.clock, first, *watch_rates(self.model, theirs, self.rate_callbacks)]
        own += self._set_steps(batches, call, theirs)
        began_at, started_s = time.time(), time.perf_counter()
        trained_s = self.clock.train_s or 0.0
        try:
            waits = waiting_for_data(self.model, batches.dataset)
            with warnings.catch_warnings(), without_retracing_advice(), waits:
                datasets = [batches.dataset, batches.validation_data]
                datasets = [d for d in datasets if is_dataset(d)]
                if any(d.cardinality() == tf.data.UNKNOWN_CARDINALITY for d in datasets):
                    # An epoch ends with the data: the length of what is rebatched is not known.
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
                    callbacks=[*own, *scalars, *last],
                    shuffle=False,  # The dataset is shuffled; Keras warns about anything else.
                    **call,
                )
        finally:
            all_s = time.perf_counter() - started_s
            self.total_s += all_s
            self.spans.append((began_at, (self.clock.train_s or 0.0) - trained_s, all_s))
        # Metrics whose function needs all rows become means over micro-batches.
        if coupled := _metrics_of_parts(self.model, size):
            self.notes.append(Note.of("metrics_of_parts", names=", ".join(coupled)))
        if self._done:
            history.epoch = [*range(len(self.clock.epochs))]
            for name, values in history.history.items():
                history.history[name] = [*self._history.get(name, ()), *values]
        if (throughput := self.clock.throughput) is not None:
            history.history["samples_per_second"] = [throughput.value] * len(history.epoch)
        self._history = history.history
        return history

    def _end_early(self, epoch: int, epochs: int) -> None:
        """End a short run after its epochs, and any run that is too far behind."""
        asked, objective = self.settings.asked, self.settings.objective
        if epoch + 1 == epochs or self.model.stop_training:
            return
        if epoch + 1 == asked.epochs:
            self.length = "short"
        elif epoch < len(asked.least):
            values = [one.finite(objective.name) for one in self.clock.epochs]
            curve = [objective.sign * value for value in values if value is not None]
            if len(curve) == len(values) and max(curve) < asked.least[epoch]:
                self.length = "stopped_early"
        self.model.stop_training = self.length != "complete"

    def _set_steps(
        self, batches: Batches, call: dict[str, Any], callbacks: list[Any]
    ) -> list[keras.callbacks.Callback]:
        """Set how many steps an execution runs; return what ends the last one in time."""
        settings, budget, model = self.settings, self.budget, self.model
        if settings.plan is None:  # It trains as it was written.
            self.steps_per_execution = int(model.steps_per_execution)
            return []
        found = batches.epoch_steps or int(batches.dataset.cardinality())
        given, examples = call["steps_per_epoch"], batches.examples
        rows = settings.batch_size if found < 0 else None
        epoch_steps = given or (found if rows is None else examples and -(-examples // rows))
        # Of the search the fewest, so that it ends before the first trial.
        fewest = epoch_steps
        if examples and not given:
            fewest = -(-examples // settings.largest_batch_size)
        check_epoch(settings.steps_per_execution, fewest)
        training = Training(
            batch_size=settings.batch_size,
            epoch_steps=epoch_steps,
            epochs=call["epochs"] - call["initial_epoch"],
            budget=budget,
            callbacks=callbacks,
        )
        steps, notes = planned_steps(settings.steps_per_execution, settings.plan, model, training)
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
        if len(targets) > 1 or (self.settings.to_target and not targets):
            raise InputError(
                "An objective such as `seconds_to_target`, and training itself, have one target: "
                "give `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
                f"Received: {len(targets)} of them."
            )
        self.target = targets[0] if targets else None


def _for_trackers(dataset: Any, batch_size: int) -> Any:
    """Let MLflow's autolog, which patches `fit`, name the batch size and not read the dataset."""

    def refuse() -> Any:  # MLflow would take a digest of all batches, and this one may be endless.
        raise TypeError("The batches of a search are not read for a digest.")

    dataset.batch_size, dataset.as_numpy_iterator = batch_size, refuse
    return dataset


def _of_whole_batches(batch_size: int, failure: str) -> str:
    return (
        f"The model or its loss takes batches of {batch_size} rows only (axis 0): leave out sizes "
        "that do not divide the numbers of training and validation examples, give functions "
        "`lambda n: dataset.batch(n, drop_remainder=True)` as data, or read the size by "
        f"`keras.ops.shape(x)[0]`. Received: {failure}"
    )


def _check_epochs(epochs: Any, initial_epoch: Any, steps: Any) -> None:
    """Check that training makes an update at least: Keras ends at once, as if it had completed."""
    whole = all(map(is_integer, (epochs, initial_epoch, 1 if steps is None else steps)))
    if not whole or not 0 <= initial_epoch < epochs or (steps is not None and steps < 1):
        raise InputError(
            "`epochs` must be an integer of at least 1 and above `initial_epoch`, and "
            "`steps_per_epoch` None or at least 1. Received: "
            f"epochs={epochs!r}, initial_epoch={initial_epoch!r}, steps_per_epoch={steps!r}."
        )


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
