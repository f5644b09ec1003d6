"""The recommendation: the limits of the batch size are measured, and the size follows from them."""

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import keras
import keras_tuner
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.learning_rate import check_rule
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit, gpu_visible
from kbatch.errors import InputError
from kbatch.library_internals import rate_of
from kbatch.memory.find import data_source
from kbatch.memory.search import check_window
from kbatch.recommendation import BASE_BATCH_SIZE, BUDGET_S
from kbatch.recommendation.choice import decide, trained_runs
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION
from kbatch.recommendation.measure import (
    MOST_SPENT,
    BudgetClock,
    Ledger,
    MemoryFound,
    Task,
    measure_input,
    measure_memory,
    measure_noise,
    measure_updates,
    pilot_notes,
    train_sizes,
)
from kbatch.recommendation.pilot_record import fit_lines
from kbatch.recommendation.record import Recommendation
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.clock import replica_count
from kbatch.training.data.forms import FitData, arrays_of, is_dataset
from kbatch.training.data.sample_rows import SampleElements, SampleRows
from kbatch.training.learning_rate import Schedule, current_learning_rate
from kbatch.training.state import check_seed, inner_optimizers, kept_state

_SMALLEST, _LARGEST = 8, 2048
# Of the budget, where memory is measured last; and seconds that its process may take to start.
_MEMORY_SHARE, _WORKER_S = 0.2, 20.0


def recommend(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    base_batch_size: int = BASE_BATCH_SIZE,
    learning_rate_scaling: Literal["auto", "linear", "sqrt"] | None = "auto",
    validation_data: Any = None,
    epochs: int | None = None,
    memory_limit_bytes: int | None = None,
    memory_window: tuple[float, float] = (0.80, 0.90),
    budget_s: float = BUDGET_S,
    seed: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Recommend a batch size, a micro-batch size and a learning rate, and say why.

    Four limits are measured: how many examples fit in memory at once, from how many on the device
    is saturated, beyond how many the gradient noise wastes them, and what the input pipeline
    delivers. A pilot at the base batch size sets a target loss; the sizes that may reach it sooner
    are trained to it too while the budget lasts. The answer is the size with the least expected
    time, updates times the time of an update in `fit`, of those that reached the loss; it may be
    the base size. Sizes that were not trained and may be faster are named beside it.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> print(recommendation)  # a page: the answer, why, and how sure
    >>> recommendation.batch_size, recommendation.micro_batch_size, recommendation.learning_rate
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        build: A function that returns a compiled model, without argument or with keras-tuner's
            `hp` (its defaults are taken), a `HyperModel`, or a compiled model, which stays as it
            is.
        x: Inputs: arrays of shape (examples, ...), a `tf.data.Dataset`, batched or not, or a
            function `batch_size -> tf.data.Dataset`.
        y: Targets of arrays. A dataset may have sample weights too: (x, y, sample_weight).
        batch_sizes: Sizes to choose from beside `base_batch_size`, ascending; None for the powers
            of two from 8 to 2,048 that the data fill.
        base_batch_size: Batch size that the model's learning rate suits; the pilot trains at it.
        learning_rate_scaling: How the learning rate follows the batch size: `"linear"`, `"sqrt"`,
            None (it does not), or `"auto"` for linear under SGD and sqrt under any other
            optimizer.
        validation_data: What `fit` takes. The pilot ends when the loss on it no longer falls. None
            to hold out a fifth of arrays; a dataset without it is trained on for the time given.
        epochs: Most passes over the data in the pilot; None for no limit but time.
        memory_limit_bytes: Memory that may be taken. None for what TensorFlow has of the GPU, on a
            CPU half of what the host and its control group leave.
        memory_window: Lower and upper share of that limit which a batch may fill.
        budget_s: Seconds for the whole call, starting processes and building graphs included;
            each measurement receives a part of what is left. From 20 s on the call ends within
            1.5 times the budget.
        seed: Seed of weights and order in the pilot and at other sizes, None for one that is
            drawn and recorded.
        on_progress: Receives a line before each measurement.

    Returns:
        The recommendation. What is not known is None in it, with the reason in `unknown`.

    Raises:
        InputError: If the data cannot be batched, do not fit the model, or have fewer than two
            examples.
        OutOfMemoryError: If the weights or one example do not fit; it names the bytes needed and
            the limit.
        TypeError: If `build` cannot build, or a size is no integer.
        ValueError: If the model is not compiled, or an argument cannot be used.
    """
    given_seed = check_seed(seed)
    real = isinstance(budget_s, numbers.Real) and not isinstance(budget_s, bool)
    if not (real and 0 < budget_s < math.inf):
        raise ValueError(
            f"`budget_s` must be a positive number of seconds. Received: budget_s={budget_s!r}."
        )
    task = Task(
        build=model_builder(build),
        is_given=isinstance(build, keras.Model),
        data=FitData(x, y, validation_data=validation_data),
        source=data_source(x, y),
        base_batch_size=check_size(base_batch_size, "base_batch_size"),
        epochs=None if epochs is None else check_size(epochs, "epochs", unit=""),
        memory_limit_bytes=check_memory_limit(memory_limit_bytes),
        memory_window=check_window(memory_window),
        clock=BudgetClock(budget_s),
        checks=PartsChecks(),
        # Drawn where none is given: all sizes hold out the same part.
        seed=int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed,
    )
    if learning_rate_scaling != "auto":
        check_rule(learning_rate_scaling, "learning_rate_scaling")
    asked = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    if not (is_dataset(x) or callable(x)):
        arrays_of(task.data)  # Rows that do not fit each other are refused at once.
    if isinstance(task.source, SampleRows):
        _sizes(asked, task.source.examples)  # A dataset tells its examples to a model only.
    return _measured(task, asked, learning_rate_scaling, Ledger(on_progress))


def _sizes(asked: tuple[int, ...] | None, examples: int | None) -> tuple[int, ...]:
    """Return the batch sizes to choose from."""
    if asked is None:
        largest = min(_LARGEST, examples or _LARGEST)
        return powers_of_two(1 if largest < _SMALLEST else _SMALLEST, largest)
    if examples is not None and asked[-1] > examples:
        raise InputError(
            "A batch cannot be larger than the data set: leave the sizes above "
            f"{examples} out of `batch_sizes`. Received: batch_sizes={asked}."
        )
    return asked


def _measured(
    task: Task, asked: tuple[int, ...] | None, scaling: str | None, ledger: Ledger
) -> Recommendation:
    largest, clock, base = asked[-1] if asked else _LARGEST, task.clock, task.base_batch_size
    # A GPU has to be free for the worker process, and a limit that was asked for comes first. Else
    # it is last: on a CPU the time of an update ends the sizes long before memory does.
    memory = None
    if gpu_visible() or task.memory_limit_bytes is not None:
        memory = ledger.run(MEMORY, lambda: measure_memory(task, largest=largest))
    else:
        clock.reserved_s = _MEMORY_SHARE * clock.budget_s
    with task.refusals_told():
        model: Any = task.load.start().model
        if replica_count(model) > 1:
            raise InputError(
                "Limits are measured on one device: build the model outside of "
                f"`strategy.scope()`. Received: a model on {replica_count(model)} replicas."
            )
        source = task.source
        rows = source.rows(model) if isinstance(source, SampleElements) else source
        examples = rows.examples if isinstance(rows, SampleRows) else None
        sizes = _sizes(asked, examples)
        if examples == 1:
            raise InputError("The data have one example: give more rows. Received: 1 example.")
        if examples is None or base <= examples:
            sizes = tuple(sorted({*sizes, base}))  # The pilot trains at it.
        pilot = ledger.try_run(NOISE, lambda: measure_noise(task))
        pipeline, fit_times = None, ()
        with kept_state(model):
            sum_sparse_gradients(model)  # As the sizes are trained.
            model.make_train_function()  # All that is timed shares its graphs.
            fits = memory and memory.fits
            updates = ledger.run(
                SATURATION, lambda: measure_updates(task, model, batch_sizes=sizes, fits=fits)
            )
            timings = updates.timings
            if timings:
                measured = ledger.try_run(
                    INPUT, lambda: measure_input(task, model, timings=timings)
                )
                pipeline, fit_times = measured or (None, ())
    optimizer = inner_optimizers(model)[0]
    rule = scaling
    if scaling == "auto":
        rule = "linear" if isinstance(optimizer, keras.optimizers.SGD) else "sqrt"
    in_fit = fit_lines(fit_times, pipeline).line
    runs = ledger.run(
        OTHER_SIZES, lambda: train_sizes(task, pilot, timings=timings, in_fit=in_fit, rule=rule)
    )
    clock.reserved_s, checks = 0.0, runs.checks
    if memory is None and not clock.holds(_WORKER_S, share=MOST_SPENT):
        reason = "its process takes long to start: give a larger `budget_s`"
        memory = MemoryFound(None, None, reason)
    elif memory is None:
        memory = ledger.run(MEMORY, lambda: measure_memory(task, largest=largest))
    if memory.result is not None:  # What fitted for want of others may be above the limit.
        most = memory.result.max_batch_size
        timings = tuple(timed for timed in timings if timed.micro_batch_size <= most)
        checks = tuple(check for check in checks if check.micro_batch_size <= most)
    reasons = {MEMORY: memory.reason, SATURATION: updates.reason, OTHER_SIZES: runs.ended}
    return Recommendation(
        model_name=model.name,
        optimizer=type(optimizer).__name__,
        dtype_policy=model.dtype_policy.name,
        base_batch_size=base,
        base_learning_rate=current_learning_rate(optimizer),
        scheduled=isinstance(rate_of(optimizer), Schedule),
        learning_rate_rule=rule,
        examples=examples,
        timings=timings,
        memory=memory.result,
        pilot=pilot,
        pipeline=pipeline,
        unknown=ledger.unknown | {name: why for name, why in reasons.items() if why},
        durations_s=ledger.durations_s,
        budget_s=clock.budget_s,
        notes=(*memory.notes, *updates.notes, *(pilot_notes(task, model, pilot) if pilot else ())),
        environment=read_environment(),
        checks=checks,
        fit_times=fit_times,
        decision=decide(
            trained_runs(timings, in_fit=in_fit, pilot=pilot, checks=checks),
            base_batch_size=base,
            rule=rule,
            missing=pilot.missing if pilot else None,
            budget_s=clock.budget_s,
            short_s=runs.short_s,
        ),
    )
