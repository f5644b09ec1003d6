"""The experiment that tells whether the input pipeline or the train step limits training."""

import dataclasses
import math
import numbers
import time
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.device.environment import read_environment
from kbatch.document.numbers import percent, readable, setting
from kbatch.input_pipeline.blocks import InputPass, read_pass
from kbatch.input_pipeline.changes import (
    cached_pipeline,
    fill_cache,
    pipeline_changes,
    worker_changes,
)
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.input_pipeline.remedies import (
    Remedies,
    array_costs,
    not_tried,
    try_changes,
    with_change,
)
from kbatch.input_pipeline.rounds import WarmStep, measure_rounds, warm_step
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.batch_source import BatchSource, batch_source
from kbatch.training.model import check_compiled
from kbatch.training.state import kept_seeds
from kbatch.training.train_step import borrowed_step, held_on_device, rows_of, takes_int64

_REMEDIES_SHARE = 0.5
# Below this share of waiting no change to the pipeline is worth a measurement.
_LITTLE_WAITING = 0.05
# Shares of the time for the pipeline as it is: to fill its cache, for one long reading, which lasts
# longer where it is uneven, and what is left to the rounds in any case.
_FILL_SHARE, _LEAST_SHARE, _MOST_SHARE, _ROUNDS_SHARE = 0.3, 0.12, 0.3, 0.4
_PROCESSES_START_S = 10.0
_TIMELINE_S, _GPU_S = 1.0, 5.0
# A measurement that took this much longer than it was given says so.
_MUCH_LONGER = 1.5
# A measurement starts the pipeline about so often: where that takes less it is not the cause.
_SLOW_STARTS = 10


def profile_input_pipeline(
    model: "keras.Model | keras_tuner.HyperModel | BuildFunction",
    dataset: Any,
    *,
    batch_size: int | None = None,
    budget_s: float = 20.0,
    remedies: bool = True,
    cache_bytes: int = 2**30,
) -> InputPipelineProfile:
    """Measure whether the input pipeline or the train step limits training.

    The pipeline is read once for long. Then the pipeline alone, the train step alone on batches
    held on the device, and both together take turns in shuffled rounds. Where training waits for
    data, changes to the pipeline are tried against it, each by itself. The model gets its weights,
    the state of its optimizers and its metrics back, and random numbers go on where they were; the
    data are read from their start each time and stay as they are.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> profile.verdict
    'input-bound'
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        model: A compiled model, or what builds one: a function with or without `hp`, or a
            `keras_tuner.HyperModel`.
        dataset: What `fit` would get: a `tf.data.Dataset`, a `PyDataset`, arrays as `x`, `(x, y)`
            or `(x, y, sample_weight)`, or a function `batch_size -> tf.data.Dataset`.
        batch_size: Examples in a batch; None for those the dataset has, 32 for arrays.
        budget_s: Seconds to spend. Three rounds are made in any case, each of which starts the
            pipeline twice: where its first batch takes seconds, as with a large shuffle buffer,
            it takes about ten starts, and a note says how long. Not counted are tracing the
            model, a second for the timeline and, with a GPU, five more to see how busy it is.
        remedies: Whether to try changes to the pipeline.
        cache_bytes: Bytes of memory that a cache may take when it is tried.

    Returns:
        The rates with their intervals, the verdict and what was tried.

    Raises:
        TypeError: If there is no model.
        ValueError: If the model is not compiled, or a budget is not positive.
        InputError: If the data can be read once only, are empty, raise an error or do not fit the
            model; it says what to give.
    """
    _check_budgets(budget_s, cache_bytes)
    with kept_seeds():
        trained = model_builder(model)()
        check_compiled(trained)
        source = batch_source(dataset, trained, batch_size=batch_size)
        limits = _Limits(budget_s, cache_bytes, remedies and source.kind != "arrays")
        return _measured(trained, source, limits)


class _Limits(NamedTuple):
    budget_s: float
    cache_bytes: int
    remedies: bool

    @property
    def base_s(self) -> float:
        """Seconds for the pipeline as it is."""
        return self.budget_s * (1 - _REMEDIES_SHARE if self.remedies else 1)


def _measured(model: keras.Model, source: BatchSource, limits: _Limits) -> InputPipelineProfile:
    began_s, base_s = time.perf_counter(), limits.base_s
    cache_notes = fill_cache(source, base_s * _FILL_SHARE)
    reading = read_pass(source, least_s=base_s * _LEAST_SHARE, most_s=base_s * _MOST_SHARE)
    wide = takes_int64(model)
    batches = [held_on_device(batch, widen=wide) for batch in reading.batches]
    spent_s = time.perf_counter() - began_s
    tried = Remedies((), ())
    with borrowed_step(model, batches[0]) as step:
        warm = warm_step(step, batches)
        began_s = time.perf_counter()
        rounds_s = max(base_s - spent_s, base_s * _ROUNDS_SHARE)
        rounds = measure_rounds(source, warm, reading=reading, budget_s=rounds_s)
        profile = InputPipelineProfile(
            **rounds._replace(
                notes=(*cache_notes, *_executions_note(model), *rounds.notes)
            )._asdict(),
            source=source.kind,
            batch_size=rows_of(batches[0]),
            remedies=(),
            untried=(),
            costs=array_costs(source.given, rows_of(batches[0])) if source.kind == "arrays" else (),
            dtype_policy=model.dtype_policy.name,
            budget_s=limits.budget_s,
            environment=read_environment(),
        )
        spent_s += time.perf_counter() - began_s - _uncounted_s(profile)
        began_s = time.perf_counter()
        if limits.remedies:
            left_s = limits.budget_s - max(base_s, spent_s)
            tried = _remedies(profile, source, warm, reading=reading, limits=limits, left_s=left_s)
    spent_s += time.perf_counter() - began_s
    notes = (*profile.notes, *_time_note(spent_s, profile))
    return dataclasses.replace(profile, remedies=tried.tried, untried=tried.untried, notes=notes)


def _executions_note(model: Any) -> tuple[str, ...]:
    if model.steps_per_execution == 1:
        return ()
    return (
        f"`fit` runs {model.steps_per_execution} steps of this model in one execution "
        "(`steps_per_execution`); here each was started by itself. So the train step is faster in "
        "`fit` than here, and training may wait longer for data.",
    )


def _time_note(spent_s: float, profile: InputPipelineProfile) -> tuple[str, ...]:
    if spent_s <= _MUCH_LONGER * profile.budget_s:
        return ()
    first_batch_s = max(profile.first_batch_s, default=0.0)
    slow = _SLOW_STARTS * first_batch_s > profile.budget_s
    starts = (
        f", each starts the pipeline again, and a first batch came after up to "
        f"{readable(first_batch_s, 2)} s"
    )
    return (
        f"It took {readable(spent_s, 2)} s instead of {setting(profile.budget_s)}: three rounds "
        f"are made in any case{starts if slow else ''}.",
    )


def _uncounted_s(profile: InputPipelineProfile) -> float:
    """Seconds that the rounds took beside what they were given."""
    return _TIMELINE_S + (0.0 if profile.together.gpu_busy_share is None else _GPU_S)


def _remedies(
    profile: InputPipelineProfile,
    source: BatchSource,
    warm: WarmStep,
    *,
    reading: InputPass,
    limits: _Limits,
    left_s: float,
) -> Remedies:
    """Try the changes where training waits for data, and describe why not where it does not."""
    waiting, end_s = profile.wait_share or 0.0, time.perf_counter() + left_s
    in_vain = waiting < _LITTLE_WAITING
    if source.kind == "PyDataset":
        timeout_s = None if in_vain else max(_PROCESSES_START_S, left_s)
        changes = worker_changes(source.given, timeout_s=timeout_s)
    else:
        changes = pipeline_changes(source.given)
    if in_vain:
        reason = f"training waits for data {percent(waiting)} of its time: there is little to gain"
        return Remedies((), not_tried(changes, reason))
    if source.kind == "tf.data.Dataset":
        cached = cached_pipeline(
            source.given, budget_bytes=limits.cache_bytes, budget_s=left_s * _FILL_SHARE
        )
        changes = with_change(changes, cached)
    return try_changes(
        changes,
        source,
        warm=warm,
        reading=reading,
        even=profile.is_even,
        budget_s=max(0.0, end_s - time.perf_counter()),
    )


def _check_budgets(budget_s: float, cache_bytes: int) -> None:
    known = all(
        isinstance(value, numbers.Real) and not isinstance(value, bool)
        for value in (budget_s, cache_bytes)
    )
    if not known or not (math.isfinite(budget_s) and budget_s > 0) or cache_bytes < 0:
        raise ValueError(
            "`budget_s` must be a positive number of seconds and `cache_bytes` at least 0. "
            f"Received: budget_s={budget_s!r}, cache_bytes={cache_bytes!r}."
        )
