"""The experiment that tells whether the input pipeline or the train step limits training."""

import math
from typing import Any

import keras
import keras_tuner

from kbatch.instruments.environment import read_environment
from kbatch.profiling.array_costs import array_costs
from kbatch.profiling.input_remedies import Remedies, not_tried, try_changes, with_change
from kbatch.profiling.input_rounds import measure_rounds
from kbatch.profiling.pipeline_cache import cached_pipeline, fill_cache
from kbatch.profiling.pipeline_changes import pipeline_changes
from kbatch.profiling.user_model import BuildFunction, model_builder
from kbatch.profiling.worker_changes import worker_changes
from kbatch.records.input_pipeline import InputPipelineProfile
from kbatch.reporting.number_text import percent
from kbatch.training.batch_source import BatchSource, batch_source
from kbatch.training.batch_stream import first_batches
from kbatch.training.borrowed_step import BorrowedStep, borrowed_step, held_on_device, rows_of
from kbatch.training.trainable_model import check_compiled

_REMEDIES_SHARE = 0.5
# Below this share of waiting no change to the pipeline is worth a measurement.
_LITTLE_WAITING = 0.05
# Batches that the train step alone takes turns with.
_HELD = 4
_PROCESSES_START_S = 10.0


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

    The pipeline alone, the train step alone on batches held on the device, and both together take
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
        budget_s: Seconds to spend. Three rounds are made in any case. Not counted are tracing the
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
    trained = model_builder(model)()
    check_compiled(trained)
    source = batch_source(dataset, trained, batch_size)
    base_s = budget_s * (1 - _REMEDIES_SHARE if remedies else 1)
    taken, first_batch_s = first_batches(source, most=_HELD, most_s=base_s / 10)
    batches = [held_on_device(batch) for batch in taken]
    batch = batches[0]
    with borrowed_step(trained, batch) as step:
        cache_note = fill_cache(source, base_s / 2)
        rounds = measure_rounds(source, step, batches, budget_s=base_s, first_batch_s=first_batch_s)
        tried = Remedies((), ())
        if remedies and source.kind != "arrays":
            waiting = rounds.together.wait_share or 0.0
            tried = _remedies(waiting, source, step, budget_s - base_s, cache_bytes)
    measured = rounds._replace(notes=(*cache_note, *rounds.notes))
    return InputPipelineProfile(
        **measured._asdict(),
        source=source.kind,
        batch_size=rows_of(batch),
        remedies=tried.tried,
        untried=tried.untried,
        costs=array_costs(source.given, rows_of(batch)) if source.kind == "arrays" else (),
        dtype_policy=trained.dtype_policy.name,
        budget_s=budget_s,
        environment=read_environment(),
    )


def _remedies(
    waiting: float,
    source: BatchSource,
    step: BorrowedStep,
    budget_s: float,
    cache_bytes: int,
) -> Remedies:
    """Tries the changes where training waits for data, and says why not where it does not."""
    in_vain = waiting < _LITTLE_WAITING
    if source.kind == "PyDataset":
        timeout_s = None if in_vain else max(_PROCESSES_START_S, budget_s)
        changes = worker_changes(source.given, timeout_s=timeout_s)
    else:
        changes = pipeline_changes(source.given)
    if in_vain:
        reason = f"training waits for data {percent(waiting)} of its time: there is little to gain"
        return Remedies((), not_tried(changes, reason))
    if source.kind == "tf.data.Dataset":
        cached = cached_pipeline(source.given, budget_bytes=cache_bytes, budget_s=budget_s / 4)
        changes = with_change(changes, cached)
    return try_changes(changes, source, step, budget_s)


def _check_budgets(budget_s: float, cache_bytes: int) -> None:
    if not (math.isfinite(budget_s) and budget_s > 0) or cache_bytes < 0:
        raise ValueError(
            "`budget_s` must be a positive number of seconds and `cache_bytes` at least 0. "
            f"Received: budget_s={budget_s}, cache_bytes={cache_bytes}."
        )
