"""Measure whether the input pipeline or the train step limits training."""

import dataclasses
import glob
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.device.machine import read_environment
from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    InputPass,
    block_length,
    borrowed_step,
    fitting_data,
    rate_of,
    read_by_workers,
    read_pass,
    reading_block,
    step_block,
)
from kbatch.input_pipeline.changes import (
    FILL_SHARE,
    all_stages,
    fill_cache,
    python_note,
    try_changes,
)
from kbatch.input_pipeline.result import InputPipelineProfile
from kbatch.library_internals import ArrayDataAdapter, cache_file, dataset_of_grain
from kbatch.progress import MeasuringProgress
from kbatch.records.notes import Note
from kbatch.timing import check_seconds, interleaved
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.forms import (
    arrays_of,
    batches_of,
    gives_batches,
    held_on_device,
    is_batched,
    is_dataset,
    rows_of,
    spec_of,
)
from kbatch.training.model import check_compiled
from kbatch.training.state import kept_seeds
from kbatch.training.step_call import StepCall

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
    time_budget_s: float = 20.0,
    remedies: bool = True,
    cache_bytes: int = 2**30,
    verbose: int | str = "auto",
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
        dataset: What `fit` would get: a `tf.data.Dataset`, a `PyDataset` (read by threads, as many
            as it has workers), arrays as `x`, `(x, y)` or `(x, y, sample_weight)`, or a function
            `batch_size -> tf.data.Dataset`.
        batch_size: Examples in a batch; None for those the dataset has, 32 for arrays.
        time_budget_s: Seconds for the whole call. At least three rounds are made, which need about
            ten starts of the pipeline, so a slow start takes longer.
        remedies: Whether to try changes to the pipeline.
        cache_bytes: Bytes of memory that a cache may take when it is tried.
        verbose: As in `find_max_batch_size`; the bar shows how much of the time is spent.

    Raises:
        TypeError: If there is no model.
        ValueError: If the model is not compiled, or a budget is not positive.
        InputError: If the data can be read once only, are empty, raise an error or do not fit the
            model; it says what to give.
    """
    check_seconds(time_budget_s=time_budget_s)
    if not cache_bytes >= 0:
        raise ValueError(f"`cache_bytes` must be at least 0. Received: cache_bytes={cache_bytes}.")
    progress = MeasuringProgress("input pipeline", verbose, time_budget_s=time_budget_s)
    began_s = time.perf_counter()
    remedies = remedies and gives_batches(dataset)
    base_s = time_budget_s * (1 - _CHANGES_SHARE if remedies else 1)
    base_ends_s, ends_s = began_s + base_s, began_s + time_budget_s
    with progress, kept_seeds():
        trained = model_builder(model)()
        check_compiled(trained)
        source = pipeline_of(dataset, trained, batch_size=batch_size)
        progress.say("reading the pipeline alone")
        unfilled = fill_cache(source, base_s * FILL_SHARE)
        reading = read_pass(source, least_s=base_s * _LEAST_SHARE, most_s=base_s * _MOST_SHARE)
        reading = reading._replace(batches=tuple(map(held_on_device, reading.batches)))
        with borrowed_step(trained, reading.batches[0]) as step:
            progress.say("training on some of its batches")
            reading = _warmed_up(reading, step)
            progress.say("measuring pipeline, train step and both together")
            now_s = time.perf_counter()
            # At least a part of the time, but not more than all of it.
            rounds_s = max(base_ends_s - now_s, min(_ROUNDS_SHARE * base_s, ends_s - now_s), 0.0)
            profile = _measured(reading, step, trained, rounds_s=rounds_s, ends_s=ends_s)
            if remedies and (profile.wait_share or 0.0) >= _LITTLE_WAITING:
                progress.say("trying changes to the pipeline")
                changes = try_changes(
                    dataset,
                    reading,
                    step,
                    even=profile.is_even,
                    cache_bytes=cache_bytes,
                    budget_s=ends_s - time.perf_counter(),
                )
                profile = dataclasses.replace(profile, changes=changes)
    cache = None if unfilled is None else Note.of("input_cache_unfilled", reason=unfilled)
    noted = tuple(note for note in (cache, python_note(source)) if note is not None)
    return dataclasses.replace(profile, noted=noted, time_budget_s=time_budget_s)


_KERAS_BATCH_SIZE = 32


def pipeline_of(data: Any, model: keras.Model, *, batch_size: int | None) -> tf.data.Dataset:
    """Return batches of what a person would give to `fit`."""
    size = None if batch_size is None else check_size(batch_size, "batch_size")
    data = dataset_of_grain(data)
    if not gives_batches(data) and hasattr(data, "__next__"):
        raise InputError(
            "The data must be readable from the start again and again, and an iterator is used up "
            "by reading it: give what it was made from, such as "
            "`tf.data.Dataset.from_generator(function, output_signature=...)` with the function "
            f"that makes the generator. Received: a {type(data).__name__}."
        )
    if isinstance(data, keras.utils.PyDataset):
        if size is not None:
            raise InputError(
                "A `PyDataset` makes its own batches: leave out `batch_size`. "
                f"Received: batch_size={size}."
            )
        return read_by_workers(data, data.workers)
    if not gives_batches(data):
        parts = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        if not 1 <= len(parts) <= 3 or parts[0] is None:
            raise InputError(
                "Arrays are `x`, `(x, y)` or `(x, y, sample_weight)`. "
                f"Received: a {type(data).__name__} of {len(parts)}."
            )
        arrays_of(*parts)
        whole = ArrayDataAdapter(*parts, batch_size=size or _KERAS_BATCH_SIZE, shuffle=True)
        return whole.get_tf_dataset()
    if size is not None:
        data = batches_of(data, model, size)
    elif not is_dataset(data):
        raise InputError(
            "A data function is called with the batch size: give `batch_size`. "
            f"Received: a function {getattr(data, '__name__', data)!r}, batch_size=None."
        )
    elif not is_batched(spec_of(data), model):
        raise InputError(
            "The dataset gives single examples: end it with `.batch(batch_size)`, or give "
            f"`batch_size`. Received: element_spec={data.element_spec}."
        )
    _check_file_caches(data)
    return data


def _check_file_caches(dataset: Any) -> None:
    """Refuse a file cache that is not complete: reading a part of it would leave it locked."""
    for stage in all_stages(dataset):
        name = cache_file(stage)
        if name and not glob.glob(f"{glob.escape(name)}*.index"):
            raise InputError(
                "The dataset's file cache is not complete, and measuring would leave half of it "
                "behind: read the dataset once (`for _ in dataset: pass`), then measure. "
                f"Received: a dataset with cache({name!r})."
            )


def _warmed_up(reading: InputPass, step: StepCall) -> InputPass:
    """Train on each batch twice: the first time compiles, the second is timed."""
    with fitting_data():
        for batch in reading.batches:
            step(batch)
        began_s = time.perf_counter()
        for batch in reading.batches:
            step(batch)
    seconds = (time.perf_counter() - began_s) / len(reading.batches)
    return reading._replace(step_s=seconds)


_CONTENDERS, _STARTED = 3, 2
# A pause of the machine in a second reading as short as the first would count as one of the data.
_MOST_AGAIN = 2
# Training lasts so long at least where it is measured once more after the rounds.
_LEAST_S = 0.1
# Batches that the rounds train on and those that were read may differ by this factor.
_ALIKE = 1.1


def _measured(
    reading: InputPass, step: StepCall, model: keras.Model, *, rounds_s: float, ends_s: float
) -> InputPipelineProfile:
    """Time the rounds; where a long reading had another rate, train for as long as it took."""
    source, record = reading.source, None
    starts_s = _STARTED * reading.record.first_batch_s
    length = block_length(rounds_s, contenders=_CONTENDERS, starts_s=starts_s)
    alone, training = reading.counted(length), reading.counted(length, trains=True)
    contenders: dict[str, Callable[[], Block]] = {
        "pipeline": lambda: reading_block(source, alone),
        "step": lambda: step_block(step, reading.batches, length),
        "together": lambda: reading_block(source, training, step),
    }
    end_s = time.perf_counter() + rounds_s
    if alone.counting != "epochs" and end_s + reading.duration_s > ends_s:
        end_s -= reading.duration_s  # For a second reading.
    found = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of(results) for name, results in found.items()}
    pipeline, block = rates["pipeline"].samples_per_second, found["together"][-1]
    # Where the rounds count whole epochs too, there is nothing that they could not see.
    if alone.counting != "epochs":
        record = reading.record
        if not record.agrees_with(pipeline):
            # The first reading may have met cold files, or a pause of the machine.
            once_s = min(reading.duration_s, max(0.0, ends_s - time.perf_counter()))
            record = read_pass(source, least_s=once_s, most_s=_MOST_AGAIN * once_s).record
        if not record.agrees_with(pipeline):
            whole_s = min(record.duration_s, max(_LEAST_S, ends_s - time.perf_counter()))
            block = reading_block(source, BlockLength(0.0, whole_s, whole_s, "start"), step)
            waited_s = sum(span.wait_s for span in block.spans)
            record = dataclasses.replace(record, wait_share=waited_s / block.duration_s)
    # Rounds train on the first batches of the data, which may be smaller than the others.
    trained = fmean(block.batch_numbers for block in found["together"])
    like_those_read = _ALIKE * trained >= reading.batch_numbers
    return InputPipelineProfile(
        batch_size=rows_of(reading.batches[0]),
        **rates,
        timeline=tuple(span for span in block.spans if span.begin_s < _TIMELINE_S),
        changes=(),
        noted=(),
        dtype_policy=model.dtype_policy.name,
        time_budget_s=rounds_s,
        environment=read_environment(),
        long_run=record,
        together_comparable=alone.counting == training.counting and like_those_read,
    )
