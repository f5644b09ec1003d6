"""Train one run of a trial, and record how it ends."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.device import failures
from kbatch.device.machine import read_environment
from kbatch.device.memory import workers_on_device
from kbatch.errors import PolicyUnsupported
from kbatch.library_internals import keep_build_config
from kbatch.records.notes import Note
from kbatch.records.training_run import ExecutionRecord, seconds_to_target
from kbatch.search.files import CHECKPOINT_NAME, TrialFiles, is_short
from kbatch.search.plan import most_in_memory
from kbatch.search.timed_fit import RunSettings, SharedInput, TimedFit, check_history
from kbatch.training.data.training_data import FitCall
from kbatch.training.dtype_policy import dtype_policy_scope, skips_all_updates
from kbatch.training.learning_rate import peak_learning_rate, weight_shapes
from kbatch.training.model import ModelFacts, inner_optimizers, is_compiled, user_step
from kbatch.training.state import assign, copies_of, seed_of, seeded


class ShortRun:
    """A training run that ended early, with the state that another call of `fit` continues."""

    def __init__(self, timed: TimedFit, begun: ExecutionRecord, callbacks: list[Any]):
        self.timed, self.begun, self.callbacks = timed, begun, callbacks
        self.model: Any = timed.model
        self._values = copies_of(self._variables())
        self.size_bytes = sum(value.nbytes for value in self._values)
        self._totals = timed.meter.totals()
        objective = timed.settings.objective
        values = [epoch.finite(objective.name) for epoch in timed.clock.epochs]
        #: Best value of the objective, with a sign so that larger is better.
        self.value = max((objective.sign * v for v in values if v is not None), default=-math.inf)

    def restore(self, settings: RunSettings) -> None:
        """Restore weights, optimizer and counts as they were when the run ended."""
        assign(self._variables(), self._values)
        self.timed.meter.set_totals(self._totals)
        self.timed.continue_with(settings)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]


class Trained(NamedTuple):
    """How a training run ended: its results, or an error."""

    record: ExecutionRecord
    results: Any = None  # The result of `fit`, with measured metrics.
    error: BaseException | None = None
    step_ran_out: bool = False  # Whether memory may have run out in a train step.
    runs_again: bool = False  # Whether to repeat it with smaller micro-batches or in float32.
    short: ShortRun | None = None  # A short run that can be continued.
    share: float = 0.0  # Epochs that this call trained, over the epochs of a complete run.


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
    """Train a model, and write a record of its end, also if it fails.

    Args:
        model: A compiled model, as the plan has changed it.
        hp: The hyperparameters of the trial.
        call: The arguments of `fit`.
        settings: The settings of the run.
        files: The files of the trial.
        fit: The `fit` of the HyperModel, which calls `model.fit`.
        shared: The data and the meter that all runs share.
        scaling: How the settings of the model were scaled with the batch size.
        short: A short run of the same model to continue. Default: None.
    """
    number, known_run = settings.number, files.run(settings.number)
    # The record of a short run stays until the run that continues or repeats it has ended.
    short_record = known_run if known_run and is_short(known_run) else None
    if short is not None:
        timed, begun = short.timed, dataclasses.replace(short.begun, place=settings.asked.place)
    else:
        timed = TimedFit(model, settings, shared=shared, scaling=scaling)
        spans = known_run.spans if known_run else ()
        begun = dataclasses.replace(_begun(model, settings), spans=spans)
        if short_record is not None:
            repeated = short_record.epochs_repeated + len(short_record.epochs)
            begun = dataclasses.replace(begun, epochs_repeated=repeated)
    done = len(timed.clock.epochs)
    record = functools.partial(_record, begun, timed)
    for callback in call.callbacks:
        if hasattr(callback, "follow_trial"):  # A `LivePlot`.
            so_far = functools.partial(record, "running")
            callback.follow_trial(files, number=number, so_far=so_far)
    if short_record is None:
        files.write(number, record("running"))
    try:
        # Layers that the first batch builds draw their weights here, not in `build`.
        seeds = seeded(seed_of(settings.seed, 1))
        with seeds, dtype_policy_scope(begun.dtype_policy), timed:
            results = fit(hp, model, *call.arguments, **call.keywords)
        check_history(results)
        results = _with_measures(results, timed, files)
        reported = files.reported(results)
        if files.of_kbatch_tuner:
            known = files.record() if (files.folder / CHECKPOINT_NAME).exists() else None
            best = known and known.best_objective_value()
            timed.best_epoch.write_weights(model, files.folder, best)
            keep_build_config(files.tuner, files.trial_id, model)
        outcomes = timed.best_epoch.outcomes(reported)
        timed.notes.extend(timed.best_epoch.notes())
    except BaseException as error:  # An interruption is recorded, too.
        status, failure = failures.failure_status(error), failures.failure_text(error)
        if status == "failed" and settings.plan is not None and settings.plan.reason == "whole":
            failure = (
                f"The model or its loss takes only batches of {settings.batch_size} rows: write "
                "`keras.ops.shape(x)[0]` there instead of a number, give data functions `lambda n: "
                "dataset.batch(n, drop_remainder=True)`, or choose batch sizes that divide the "
                f"numbers of training and validation rows. Received: {failure}"
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
    """Return the record of a training run before its first step."""
    facts, here = ModelFacts(model), read_environment()
    optimizer = next(iter(inner_optimizers(model)), None)  # None if a custom `fit` compiles later.
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


def _with_measures(results: Any, timed: TimedFit, files: TrialFiles) -> Any:
    """Add the metrics that kbatch measures to the result of `fit`, if keras-tuner needs them."""
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
            # keras-tuner needs one value of each metric, here of the last epoch.
            last = {name: values[-1] for name, values in results.history.items()} | figures
            return last | {files.objective.name: files.tuner.oracle.objective.get_value(last)}
    return figures | usage_metrics | results if isinstance(results, dict) else results


def _record(
    begun: ExecutionRecord, timed: TimedFit, status: str, failure: str | None = None
) -> ExecutionRecord:
    """Return the record of a training run so far."""
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
    # A custom step may make no update or several updates for a batch.
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
