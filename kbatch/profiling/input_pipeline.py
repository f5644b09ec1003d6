"""The experiment that tells whether the input pipeline or the train step limits training."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import keras_tuner

from kbatch.instruments.environment import read_environment
from kbatch.profiling.array_costs import array_costs
from kbatch.profiling.input_blocks import (
    MOST_ROUNDS,
    Block,
    block_length,
    pipeline_block,
    rate_of,
    step_block,
    training_block,
)
from kbatch.profiling.input_remedies import Remedies, not_tried, try_changes, with_change
from kbatch.profiling.interleaved import interleaved
from kbatch.profiling.pipeline_cache import cached_pipeline
from kbatch.profiling.pipeline_changes import pipeline_changes
from kbatch.profiling.pipeline_stages import kind_of, stages_of
from kbatch.profiling.user_model import BuildFunction, as_hypermodel
from kbatch.profiling.worker_changes import worker_changes
from kbatch.records.input_pipeline import InputPipelineProfile
from kbatch.reporting.number_text import percent
from kbatch.training.batch_source import BatchSource, batch_source, source_of_dataset
from kbatch.training.batch_stream import BatchStream, first_batch
from kbatch.training.borrowed_step import (
    BorrowedStep,
    borrowed_step,
    first_rows,
    held_on_device,
    rows_of,
)

_CONTENDERS = 4
_REMEDIES_SHARE = 0.5
_TIMELINE_S = 1.0
_SMALLER = 4
# Below this share of waiting no change to the pipeline is worth a measurement.
_LITTLE_WAITING = 0.05


def profile_input_pipeline(
    model: "keras.Model | keras_tuner.HyperModel | BuildFunction",
    dataset: Any,
    *,
    batch_size: int | None = None,
    budget_s: float = 20.0,
    remedies: bool = True,
    cache_bytes: int = 2**30,
) -> InputPipelineProfile:
    """Measures whether the input pipeline or the train step limits training.

    The pipeline alone, the train step alone on a batch held on the device, and both together take
    turns in shuffled rounds. Where training waits for data, changes to the pipeline are tried
    against it, each by itself. The model gets its weights, optimizer state and metrics back; the
    data are read from their start in each round and stay as they are.

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
        budget_s: Seconds to spend. Three rounds are made in any case, and filling the model's
            first graph is not counted.
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
    trained = _compiled(model)
    source = batch_source(dataset, trained, batch_size)
    taken, first_batch_s = first_batch(source)
    batch = held_on_device(taken)
    base_s = budget_s * (1 - _REMEDIES_SHARE if remedies else 1)
    with borrowed_step(trained, batch) as step:
        cache_note = _fill_cache(source, base_s / 2)
        profile = _measured(source, step, batch, base_s=base_s, first_batch_s=first_batch_s)
        tried = Remedies((), ())
        if remedies and source.kind != "arrays":
            tried = _remedies(profile, source, step, budget_s - base_s, cache_bytes)
    return dataclasses.replace(
        profile,
        remedies=tried.tried,
        untried=tried.untried,
        costs=array_costs(source.given, rows_of(batch)) if source.kind == "arrays" else (),
        notes=(*cache_note, *profile.notes),
        dtype_policy=trained.dtype_policy.name,
        budget_s=budget_s,
    )


def _measured(
    source: BatchSource, step: BorrowedStep, batch: Any, *, base_s: float, first_batch_s: float
) -> InputPipelineProfile:
    """Makes the rounds, and then one block of training for the timeline."""
    smaller = first_rows(batch, max(1, rows_of(batch) // _SMALLER))
    for warm in (batch, batch, smaller, smaller):
        step(warm)
    length = block_length(base_s, contenders=_CONTENDERS, first_batch_s=first_batch_s)
    timeline_length = length._replace(measure_s=_TIMELINE_S, longest_s=_TIMELINE_S)
    contenders: dict[str, Callable[[], Block]] = {
        "pipeline": lambda: pipeline_block(source, length),
        "step": lambda: step_block(step, batch, length),
        "together": lambda: training_block(source, step, length),
    }
    if rows_of(smaller) < rows_of(batch):
        contenders["smaller step"] = lambda: step_block(step, smaller, length)
    began_s = time.perf_counter()
    found = interleaved(contenders, until_s=began_s + base_s, most_rounds=MOST_ROUNDS)
    timeline = training_block(source, step, timeline_length)
    rates = {name: rate_of(blocks) for name, blocks in found.items()}
    starts_s = [block.first_batch_s for block in found["pipeline"]]
    return InputPipelineProfile(
        source=source.kind,
        batch_size=rows_of(batch),
        pipeline=rates["pipeline"],
        step=rates["step"],
        together=rates["together"],
        smaller_size=rows_of(smaller) if "smaller step" in rates else None,
        smaller_step=rates.get("smaller step"),
        first_batch_s=tuple(s for s in starts_s if s is not None),
        timeline=timeline.spans,
        remedies=(),
        untried=(),
        costs=(),
        notes=_rounds_note(len(starts_s), base_s),
        dtype_policy="",
        budget_s=base_s,
        environment=read_environment(),
    )


def _remedies(
    profile: InputPipelineProfile,
    source: BatchSource,
    step: BorrowedStep,
    budget_s: float,
    cache_bytes: int,
) -> Remedies:
    """Tries the changes where training waits for data, and says why not where it does not."""
    if source.kind == "PyDataset":
        changes = worker_changes(source.given, timeout_s=max(10.0, budget_s))
    else:
        changes = pipeline_changes(source.given)
    waiting = profile.wait_share or 0.0
    if waiting < _LITTLE_WAITING:
        reason = f"training waits for data {percent(waiting)} of its time: there is little to gain"
        return Remedies((), not_tried(changes, reason))
    if source.kind == "tf.data.Dataset":
        cached = cached_pipeline(source.given, budget_bytes=cache_bytes, budget_s=budget_s / 4)
        changes = with_change(changes, cached)
    return try_changes(changes, source, step, budget_s)


def _fill_cache(source: BatchSource, budget_s: float) -> tuple[str, ...]:
    """Makes the pass that fills the pipeline's own cache in memory, and says what that means."""
    if source.kind != "tf.data.Dataset":
        return ()
    caches = [stage for stage in stages_of(source.given) if kind_of(stage) == "Cache"]
    if not caches:
        return ()
    began_s = time.perf_counter()
    with BatchStream(source_of_dataset(caches[0]), read_before=True) as stream:
        while stream.epochs == 0:
            if time.perf_counter() - began_s > budget_s:
                return (
                    f"The pipeline's cache was not full after {budget_s:.0f} s: the rates are "
                    "those of the first epoch, which fills it. Later epochs may be faster.",
                )
            stream.next()
    return (
        "The pipeline has a cache, and a pass over the data filled it first: the rates are those "
        "of the epochs after the first one.",
    )


def _rounds_note(rounds: int, base_s: float) -> tuple[str, ...]:
    if rounds == MOST_ROUNDS:
        return ()
    return (
        f"{rounds} of {MOST_ROUNDS} rounds were made in {base_s:.0f} s: a larger `budget_s` gives "
        "narrower intervals.",
    )


def _compiled(given: Any) -> Any:
    model: Any = given
    if not callable(given) and not isinstance(given, keras_tuner.HyperModel):
        raise TypeError(
            "`model` must be a compiled `keras.Model` or a function that builds one. "
            f"Received: model={given!r}."
        )
    if not isinstance(given, keras.Model):
        hypermodel: Any = given
        model = as_hypermodel(hypermodel).build(keras_tuner.HyperParameters())
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a compiled `keras.Model`: does the build function end with "
            f"`return model`? Received: {model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "The model must be compiled: call `model.compile(optimizer, loss)` first. "
            f"Received: model={model.name!r}."
        )
    return model


def _check_budgets(budget_s: float, cache_bytes: int) -> None:
    if not (math.isfinite(budget_s) and budget_s > 0) or cache_bytes < 0:
        raise ValueError(
            "`budget_s` must be a positive number of seconds and `cache_bytes` at least 0. "
            f"Received: budget_s={budget_s}, cache_bytes={cache_bytes}."
        )
