"""The recommendation: the limits of the batch size are measured, and the size follows from them."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import keras
import keras_tuner
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.binding_limit import INPUT, MEMORY, NOISE, SATURATION
from kbatch.analysis.learning_rates import check_rule
from kbatch.analysis.max_batch_search import check_window
from kbatch.instruments.device_memory import check_memory_limit
from kbatch.instruments.environment import read_environment
from kbatch.profiling.loads import Source, build_on
from kbatch.profiling.max_batch import data_source
from kbatch.profiling.user_model import BuildFunction, model_builder
from kbatch.records.recommendation import OTHER_SIZES, Recommendation
from kbatch.records.recommendation_defaults import BASE_BATCH_SIZE, BUDGET_S
from kbatch.training.data import FitData, is_dataset, tensors_of
from kbatch.training.errors import InputError
from kbatch.training.learning_rate import Schedule, current_learning_rate
from kbatch.training.replica_meter import replica_count
from kbatch.training.sample_rows import SampleElements, SampleRows
from kbatch.training.seeds import check_seed
from kbatch.training.trainable_model import check_model
from kbatch.tuning.ledger import Ledger
from kbatch.tuning.limit_measurements import (
    InputFound,
    measure_input,
    measure_noise,
    measure_updates,
    pilot_notes,
)
from kbatch.tuning.memory_measurement import MemoryFound, measure_memory
from kbatch.tuning.recommendation_task import Task
from kbatch.tuning.size_trainings import train_sizes

_SMALLEST, _LARGEST = 8, 2048
# `fit` is timed at the largest size that may be best, and at this part of it.
_APART = 8


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
    """Recommends a batch size, a micro-batch size and a learning rate, and says why.

    Four limits are measured: how many examples fit in memory at once, from how many on the device
    is saturated, beyond how many the gradient noise wastes them, and what the input pipeline
    delivers. A pilot tells the noise and a loss to come to; the sizes that promise to be there
    sooner are trained to it too while the budget lasts. The answer is the one that is there first,
    by its updates and by what an update takes in `fit`; the record says how sure that is.

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
        y: Targets of arrays.
        batch_sizes: Sizes to choose from, ascending; None for the powers of two from 8 to 2,048
            that the data fill.
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
        budget_s: Seconds to spend, in parts: 10 % on memory, 25 % on step times, 25 % at most on
            the pilot, 10 % on the data, 30 % at most on other sizes. Where batches are slow, the
            search in memory takes up to 60 s or as much as this, whichever is less. Starting
            processes and building graphs are not counted.
        seed: Seed of weights and order in the pilot and at other sizes, None for one that is
            drawn and recorded.
        on_progress: Receives a line before each measurement.

    Returns:
        The recommendation. What could not be told is None in it, with the reason in `unknown`.

    Raises:
        InputError: If the data cannot be batched, do not fit the model, or have fewer than two
            examples.
        OutOfMemoryError: If the weights or one example do not fit; it names the bytes needed and
            the limit.
        TypeError: If `build` cannot build, or a size is no integer.
        ValueError: If the model is not compiled, or an argument cannot be used.
    """
    task = Task(
        build=model_builder(build),
        is_given=isinstance(build, keras.Model),
        data=FitData(x, y, validation_data=validation_data),
        source=data_source(x, y),
        base_batch_size=check_size(base_batch_size, "base_batch_size"),
        epochs=None if epochs is None else check_size(epochs, "epochs"),
        memory_limit_bytes=check_memory_limit(memory_limit_bytes),
        memory_window=check_window(memory_window),
        budget_s=_check_budget(budget_s),
        seed=_drawn(check_seed(seed)),
    )
    if learning_rate_scaling != "auto":
        check_rule(learning_rate_scaling, "learning_rate_scaling")
    asked = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    if not (is_dataset(x) or callable(x)):
        tensors_of(task.data)  # Rows that do not fit each other are told at once.
    if isinstance(task.source, SampleRows):
        _sizes(asked, task.source.examples)  # A dataset tells its examples to a model only.
    return _measured(task, asked, learning_rate_scaling, Ledger(on_progress))


def _measured(
    task: Task, asked: tuple[int, ...] | None, scaling: str | None, ledger: Ledger
) -> Recommendation:
    smallest, largest = (asked[0], asked[-1]) if asked else (_SMALLEST, _LARGEST)
    # First of all: nothing has taken a GPU yet.
    memory = ledger.run(MEMORY, lambda: measure_memory(task, smallest=smallest, largest=largest))
    model = _checked(task.build(), task.source)
    found = _limits(task, model, memory=memory, asked=asked, scaling=scaling, ledger=ledger)
    checks, ended = ledger.run(
        OTHER_SIZES, lambda: train_sizes(task, found, budget_s=task.part_s(OTHER_SIZES))
    )
    reasons = {MEMORY: memory.reason, OTHER_SIZES: ended}
    return dataclasses.replace(
        found,
        checks=checks,
        unknown=ledger.unknown | {name: why for name, why in reasons.items() if why},
        durations_s=ledger.durations_s,
    )


def _limits(
    task: Task,
    model: keras.Model,
    *,
    memory: MemoryFound,
    asked: tuple[int, ...] | None,
    scaling: str | None,
    ledger: Ledger,
) -> Recommendation:
    """Measures the other limits; no size but the pilot's is trained yet."""
    examples = _examples(task.source, model)
    sizes = _sizes(asked, examples)
    updates = ledger.run(
        SATURATION, lambda: measure_updates(task, model, batch_sizes=sizes, fits=memory.fits)
    )
    if updates.reason is not None:
        ledger.unknown[SATURATION] = updates.reason
    pilot = ledger.try_run(NOISE, lambda: measure_noise(task, timings=updates.timings))
    found = Recommendation(
        model_name=model.name,
        **_optimizer_facts(model),
        dtype_policy=model.dtype_policy.name,
        base_batch_size=task.base_batch_size,
        learning_rate_rule=_rule(model) if scaling == "auto" else scaling,
        examples=examples,
        timings=updates.timings,
        memory=memory.result,
        pilot=pilot,
        pipeline=None,
        unknown={},
        durations_s={},
        budget_s=task.budget_s,
        notes=(*updates.notes, *(pilot_notes(task, model) if pilot else ())),
        environment=read_environment(),
    )
    apart = sizes_to_time(found)
    data = ledger.try_run(INPUT, lambda: measure_input(task, model, batch_sizes=apart))
    return found if data is None else _with_data(found, data)


def _with_data(found: Recommendation, data: InputFound) -> Recommendation:
    return dataclasses.replace(found, pipeline=data.pipeline, fit_times=data.fit_times)


def _checked(model: keras.Model, source: Source) -> keras.Model:
    check_model(model)
    if replica_count(model) > 1:
        raise InputError(
            "Limits are measured on one device: build the model outside of `strategy.scope()`. "
            f"Received: a model on {replica_count(model)} replicas."
        )
    build_on(model, source)
    return model


def _examples(source: Source, model: keras.Model) -> int | None:
    if isinstance(source, SampleElements):
        source = source.rows(model)
    return source.examples if isinstance(source, SampleRows) else None


def _sizes(asked: tuple[int, ...] | None, examples: int | None) -> tuple[int, ...]:
    """Gives the batch sizes to choose from."""
    if asked is None:
        largest = min(_LARGEST, examples or _LARGEST)
        return powers_of_two(1 if largest < _SMALLEST else _SMALLEST, largest)
    if examples is not None and asked[-1] > examples:
        raise InputError(
            "A batch cannot be larger than the data set: leave the sizes above "
            f"{examples} out of `batch_sizes`. Received: batch_sizes={asked}."
        )
    return asked


def sizes_to_time(recommendation: Recommendation) -> tuple[int, ...]:
    """Gives two batch sizes to time `fit` at, the larger one near where it matters.

    Args:
        recommendation: What was measured; `fit` runs no larger batch whole than that did.
    """
    choice, base = recommendation.choice, recommendation.base_batch_size
    whole = {update.batch_size for update in recommendation.updates if not update.accumulated}
    sizes = sorted(whole) or [base]
    near = min(choice.largest, _APART * base) if choice else base
    largest = max([size for size in sizes if size <= near], default=sizes[0])
    return (largest // _APART, largest) if largest >= _APART else (largest,)


def _rule(model: Any) -> str:
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return "linear" if isinstance(inner, keras.optimizers.SGD) else "sqrt"


def _optimizer_facts(model: Any) -> dict[str, Any]:
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {
        "optimizer": type(inner).__name__,
        "base_learning_rate": current_learning_rate(model.optimizer),
        "scheduled": isinstance(inner._learning_rate, Schedule),
    }


def _drawn(seed: int | None) -> int:
    """Draws a seed where none is given: the pilot and the other sizes hold out the same part."""
    return int(np.random.default_rng().integers(2**31)) if seed is None else seed


def _check_budget(budget_s: float) -> float:
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise ValueError(
            f"`budget_s` must be a positive number of seconds. Received: budget_s={budget_s}."
        )
    return budget_s
