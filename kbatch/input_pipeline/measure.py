"""Measure whether the input pipeline or the train step limits training."""

import dataclasses
import functools
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import keras
import keras_tuner

from kbatch.device.environment import read_environment
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    InputPass,
    PreparedInput,
    block_length,
    rate_of,
    read_pass,
    reading_block,
    step_block,
)
from kbatch.input_pipeline.borrowed_step import BorrowedStep, borrowed_step, fitting_data
from kbatch.input_pipeline.changes import FILL_SHARE, fill_cache, try_changes
from kbatch.input_pipeline.rates import LongRun
from kbatch.input_pipeline.result import InputPipelineProfile, RateRecord, StepSpan
from kbatch.records.notes import Note
from kbatch.timing.rounds import check_seconds, interleaved
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.batch_source import BatchSource, batch_source
from kbatch.training.data.forms import first_rows, rows_of
from kbatch.training.data.training_data import held_on_device
from kbatch.training.model import check_compiled
from kbatch.training.state import kept_seeds

_CHANGES_SHARE = 0.5
# Below this share of waiting no change to the pipeline is worth a measurement.
_LITTLE_WAITING = 0.05
# Shares of the time for the pipeline as it is: for one long reading, which lasts longer where it is
# uneven, and what is left to the rounds in any case.
_LEAST_SHARE, _MOST_SHARE, _ROUNDS_SHARE = 0.12, 0.3, 0.4
_TIMELINE_S = 1.0


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
    data, changes to the pipeline are tried against it, each by itself. The model, the random
    numbers and the data stay as they are.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> profile.verdict
    'input-bound'
    >>> profile.plot().figure.savefig("input.png")

    Args:
        model: A compiled model, or what builds one: a function with or without `hp`, or a
            `keras_tuner.HyperModel`.
        dataset: What `fit` would get: a `tf.data.Dataset`, a `PyDataset`, arrays as `x`, `(x, y)`
            or `(x, y, sample_weight)`, or a function `batch_size -> tf.data.Dataset`.
        batch_size: Examples in a batch; None for those the dataset has, 32 for arrays.
        budget_s: Seconds to spend, beside tracing the model and a second for the timeline. Three
            rounds are made in any case, which takes about ten starts of the pipeline; where these
            are slow, it takes longer.
        remedies: Whether to try changes to the pipeline.
        cache_bytes: Bytes of memory that a cache may take when it is tried.

    Raises:
        TypeError: If there is no model.
        ValueError: If the model is not compiled, or a budget is not positive.
        InputError: If the data can be read once only, are empty, raise an error or do not fit the
            model; it says what to give.
    """
    check_seconds(budget_s=budget_s)
    if not cache_bytes >= 0:
        raise ValueError(f"`cache_bytes` must be at least 0. Received: cache_bytes={cache_bytes}.")
    with kept_seeds():
        trained = model_builder(model)()
        check_compiled(trained)
        source = batch_source(dataset, trained, batch_size=batch_size)
        remedies = remedies and source.kind != "arrays"
        base_s = budget_s * (1 - _CHANGES_SHARE if remedies else 1)
        began_s = time.perf_counter()
        unfilled = fill_cache(source, base_s * FILL_SHARE)
        reading = read_pass(source, least_s=base_s * _LEAST_SHARE, most_s=base_s * _MOST_SHARE)
        batches = tuple(map(held_on_device, reading.batches))
        spent_s = time.perf_counter() - began_s
        with borrowed_step(trained, batches[0]) as step:
            prepared = _prepared(source, reading, step, batches)
            began_s = time.perf_counter()
            rounds_s = max(base_s - spent_s, base_s * _ROUNDS_SHARE)
            profile = _measured(prepared, trained, rounds_s=rounds_s, budget_s=budget_s)
            spent_s += time.perf_counter() - began_s - _TIMELINE_S
            if remedies and (profile.wait_share or 0.0) >= _LITTLE_WAITING:
                changes = try_changes(
                    prepared,
                    even=profile.is_even,
                    cache_bytes=cache_bytes,
                    budget_s=budget_s - max(base_s, spent_s),
                )
                profile = dataclasses.replace(profile, changes=changes)
    noted = [*profile.noted]
    if trained.steps_per_execution != 1:
        noted.append(Note.of("input_one_step", steps=int(trained.steps_per_execution)))
    if unfilled is not None:
        noted.append(Note.of("input_cache_unfilled", reason=unfilled))
    return dataclasses.replace(profile, noted=tuple(noted))


# Smaller batches of the train step: with the batch itself three sizes, so that a line can be
# seen not to fit.
_PARTS = (4, 16)
# A block of a smaller step lasts this share of the others: only the crossing rests on it.
_SMALLER_SHARE = 0.5
_CONTENDERS, _STARTED = 3, 2
# A pause of the machine in a second reading as short as the first would count as one of the data.
_MOST_AGAIN = 2
# Batches that the rounds train on and those that were read may differ by this factor, and batches
# may grow by this one.
_ALIKE, _GROWN = 1.1, 1.3


def _prepared(
    source: BatchSource, reading: InputPass, step: BorrowedStep, batches: tuple[Any, ...]
) -> PreparedInput:
    """Train on each shape twice; smaller batches that the model does not take are left out."""
    with fitting_data():
        for batch in batches:
            step(batch)
        began_s = time.perf_counter()
        for batch in batches:
            step(batch)
        step_s = (time.perf_counter() - began_s) / len(batches)
    whole, smaller = rows_of(batches[0]), {}
    for rows in sorted({max(1, whole // part) for part in _PARTS} - {whole}, reverse=True):
        part = first_rows(batches[0], rows)
        try:
            with fitting_data():
                step(part)
                step(part)
        except InputError:
            continue
        smaller[rows] = part
    return PreparedInput(source, reading, step, batches, smaller, step_s)


def _measured(
    prepared: PreparedInput, model: keras.Model, *, rounds_s: float, budget_s: float
) -> InputPipelineProfile:
    """Make the rounds, then a block of training for the timeline, and read a GPU."""
    source, reading, smaller = prepared.source, prepared.reading, prepared.smaller
    length = block_length(
        rounds_s,
        contenders=_CONTENDERS + _SMALLER_SHARE * len(smaller),
        starts_s=_STARTED * reading.record.first_batch_s,
    )
    settle_s, measure_s, longest_s = (_SMALLER_SHARE * seconds for seconds in length[:3])
    shorter = BlockLength(settle_s, measure_s, longest_s)
    alone, training = reading.counted(length), reading.counted(length, step_s=prepared.step_s)
    step = prepared.step
    contenders: dict[str, Callable[[], Block]] = {
        "pipeline": lambda: reading_block(source, alone),
        "step": lambda: step_block(step, prepared.batches, length),
        "together": lambda: reading_block(source, training, step),
    }
    for rows, part in smaller.items():
        contenders[str(rows)] = functools.partial(step_block, step, (part,), shorter)
    end_s = time.perf_counter() + rounds_s
    found = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of(results) for name, results in found.items()}
    record = None
    # Where the rounds count whole epochs too, there is nothing that they could not see.
    if alone.counting != "epochs":
        record = reading.record
        if not record.agrees_with(rates["pipeline"].samples_per_second):
            # The first reading may have met cold files.
            once_s = reading.duration_s
            record = read_pass(source, least_s=once_s, most_s=_MOST_AGAIN * once_s).record
    timeline, record, busy = _timeline(prepared, rates["pipeline"], record, budget_s=rounds_s)
    # Rounds train on the first batches of the data, which may be unlike the others.
    numbers_trained = fmean(block.batch_numbers for block in found["together"])
    size_ratio = numbers_trained / reading.batch_numbers if reading.batch_numbers else 1.0
    counted_alike = alone.counting == training.counting
    alike = 1 / _ALIKE <= size_ratio <= _ALIKE and 1 / _GROWN < reading.growth < _GROWN
    unlike = {"grown": reading.growth, "trained": size_ratio}
    return InputPipelineProfile(
        source=source.kind,
        batch_size=prepared.batch_size,
        pipeline=rates["pipeline"],
        step=rates["step"],
        together=rates["together"],
        smaller_sizes=tuple(smaller),
        smaller_steps=tuple(rates[str(rows)] for rows in smaller),
        timeline=timeline,
        gpu_busy_share=busy,
        changes=(),
        noted=() if alike else (Note.of("input_batches_differ", **unlike),),
        dtype_policy=model.dtype_policy.name,
        budget_s=budget_s,
        environment=read_environment(),
        long_run=record,
        together_comparable=counted_alike and size_ratio > 1 / _ALIKE,
    )


def _timeline(
    prepared: PreparedInput, pipeline: RateRecord, record: LongRun | None, *, budget_s: float
) -> tuple[tuple[StepSpan, ...], LongRun | None, float | None]:
    """Train for a second, or as long as was read where the rounds saw another rate."""
    shown_s = min(_TIMELINE_S, budget_s)
    length = BlockLength(0.0, shown_s, shown_s)
    even = record is None or record.agrees_with(pipeline.samples_per_second)
    if record is not None and not even:
        whole_s = max(shown_s, record.duration_s)
        length = BlockLength(0.0, whole_s, whole_s, "start")
    block, busy = gpu_busy(
        functools.partial(reading_block, prepared.source, step=prepared.step), length
    )
    shown = tuple(span for span in block.spans if span.begin_s < shown_s)
    if record is not None and not even:
        waited_s = sum(span.wait_s for span in block.spans)
        record = dataclasses.replace(record, training_s=block.duration_s, training_wait_s=waited_s)
    return shown, record, busy


# NVML's utilization is that of its last sampling window, of a sixth to a whole second depending on
# the GPU (NVML API reference, nvmlUtilization_t): training is watched for longer.
WINDOW_S = 1.0
_READ_S = 0.5


def gpu_busy(
    train: Callable[[BlockLength], Block],
    length: BlockLength,
    *,
    monitor: Callable[[], GpuMonitor] = GpuMonitor,
) -> tuple[Block, float | None]:
    """Train for a block, and read which share of it the first GPU is busy."""
    with monitor() as watch:
        if watch.unavailable is None:
            seconds = max(length.measure_s, WINDOW_S + _READ_S)
            length = length._replace(measure_s=seconds, longest_s=seconds)
        block = train(length)
    # Only readings whose window lies within the block, past the pipeline's start.
    start_s = (block.first_batch_s or 0.0) + WINDOW_S
    samples = [s for s in watch.gpus[0].samples if s.time_s >= start_s] if watch.gpus else []
    busy = [s.utilization for s in samples if s.utilization is not None]
    return block, fmean(busy) if busy else None
