"""Measure whether the input pipeline or the train step limits training."""

import dataclasses
import glob
import time
from collections.abc import Callable, Sequence
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
    data_must_fit_model,
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
from kbatch.training.data import forms
from kbatch.training.model import check_compiled
from kbatch.training.state import kept_seeds
from kbatch.training.step_call import StepCall

_CHANGES_SHARE = 0.5
# kbatch tries changes if training waits for data for at least this share of its time.
_LITTLE_WAITING = 0.05
# Shares of the time before the changes: least and most for the long reading, least for the rounds.
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

    kbatch reads the pipeline once for a long time. Then it times the pipeline alone, the train step
    alone on batches that are on the device, and both together, in shuffled rounds. If training
    waits for data, kbatch tries changes to the pipeline, one at a time. It restores the state of
    the model and of Keras's random numbers, and it does not change the data.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> profile.verdict
    'input-bound'
    >>> profile.plot().figure.savefig("input.png")

    Args:
        model: A compiled model, a function with or without `hp` that builds one, or a
            `keras_tuner.HyperModel`.
        dataset: The data for `fit`: a `tf.data.Dataset`, a `PyDataset` (read by threads, one for
            each of its workers), arrays as `x`, `(x, y)` or `(x, y, sample_weight)`, or a function
            `batch_size -> tf.data.Dataset`.
        batch_size: Integer, examples in a batch. Default: the batch size of the dataset, or 32 for
            arrays.
        time_budget_s: Float, seconds for the whole call. kbatch makes at least three rounds, which
            start the pipeline about ten times. A slow start can exceed the budget. Default: 20.
        remedies: Boolean, whether to try changes to the pipeline. Default: True.
        cache_bytes: Integer, most bytes of memory for a cache that is tried. Default: 1 GiB.
        verbose: As in `find_max_batch_size`. The bar shows how much of the time is spent.

    Returns:
        An `InputPipelineProfile`.

    Raises:
        TypeError: If `model` is not a model or a build function.
        ValueError: If the model is not compiled, or a budget is not positive.
        InputError: If the data can be read only once, are empty, raise an error, or do not match
            the model. The message says what to give.
    """
    check_seconds(time_budget_s=time_budget_s)
    if not cache_bytes >= 0:
        raise ValueError(f"`cache_bytes` must be at least 0. Received: cache_bytes={cache_bytes}.")
    progress = MeasuringProgress("input pipeline", verbose, time_budget_s=time_budget_s)
    began_s = time.perf_counter()
    remedies = remedies and forms.gives_batches(dataset)
    base_s = time_budget_s * (1 - _CHANGES_SHARE if remedies else 1)
    base_ends_s, ends_s = began_s + base_s, began_s + time_budget_s
    with progress, kept_seeds():
        trained = model_builder(model)()
        check_compiled(trained)
        source = pipeline_of(dataset, trained, batch_size=batch_size)
        progress.say("reading the pipeline alone")
        unfilled = fill_cache(source, base_s * FILL_SHARE)
        reading = read_pass(source, least_s=base_s * _LEAST_SHARE, most_s=base_s * _MOST_SHARE)
        reading = reading._replace(batches=tuple(map(forms.held_on_device, reading.batches)))
        with borrowed_step(trained, reading.batches[0]) as step:
            progress.say("training on some of its batches")
            reading = reading._replace(step_s=_step_s(step, reading.batches))
            progress.say("measuring pipeline, train step and both together")
            now_s = time.perf_counter()
            rounds_s = max(base_ends_s - now_s, min(_ROUNDS_SHARE * base_s, ends_s - now_s), 0.0)
            profile = _measure(reading, step, trained, rounds_s=rounds_s, ends_s=ends_s)
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
    """Return the batches of any data that `fit` takes."""
    size = None if batch_size is None else check_size(batch_size, "batch_size")
    data = dataset_of_grain(data)
    if not forms.gives_batches(data) and hasattr(data, "__next__"):
        raise InputError(
            "The data must be readable more than once, but this is an iterator: give "
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
    if not forms.gives_batches(data):
        parts = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        if not 1 <= len(parts) <= 3 or parts[0] is None:
            raise InputError(
                "Arrays must be `x`, `(x, y)` or `(x, y, sample_weight)`. "
                f"Received: a {type(data).__name__} of {len(parts)}."
            )
        forms.arrays_of(*parts)
        adapter = ArrayDataAdapter(*parts, batch_size=size or _KERAS_BATCH_SIZE, shuffle=True)
        return adapter.get_tf_dataset()
    if size is not None:
        data = forms.batches_of(data, model, size)
    elif not forms.is_dataset(data):
        raise InputError(
            "A data function needs a batch size: give `batch_size`. "
            f"Received: a function {getattr(data, '__name__', data)!r}, batch_size=None."
        )
    elif not forms.is_batched(forms.spec_of(data), model):
        raise InputError(
            "The dataset must give batches: end it with `.batch(batch_size)`, or give "
            f"`batch_size`. Received: element_spec={data.element_spec}."
        )
    for stage in all_stages(data):
        # Reading only a part of the data would leave a file cache locked.
        name = cache_file(stage)
        if name and not glob.glob(f"{glob.escape(name)}*.index"):
            raise InputError(
                "The file cache of the dataset must be complete: read the dataset once "
                "(`for _ in dataset: pass`) before you measure it. "
                f"Received: a dataset with cache({name!r})."
            )
    return data


def _step_s(step: StepCall, batches: Sequence[Any]) -> float:
    """Return the seconds of a step on these batches, after a first step that compiles."""
    with data_must_fit_model():
        for batch in batches:
            step(batch)
        began_s = time.perf_counter()
        for batch in batches:
            step(batch)
    return (time.perf_counter() - began_s) / len(batches)


# Blocks in a round, and blocks in a round that start the pipeline.
_CONTENDERS, _STARTS = 3, 2
# A second reading is at most this many times as long as the first. A longer reading shows whether a
# pause came from the machine or from the data.
_SECOND_READING = 2
# If the long reading has another rate than the rounds, training is timed for at least this long.
_LEAST_S = 0.1
# Rounds are comparable with the long reading if their batch sizes differ by at most this factor.
_SIZE_RATIO = 1.1


def _measure(
    reading: InputPass, step: StepCall, model: keras.Model, *, rounds_s: float, ends_s: float
) -> InputPipelineProfile:
    """Time the rounds. If the long reading had another rate, train for as long as it took."""
    source, record = reading.source, None
    starts_s = _STARTS * reading.record.first_batch_s
    length = block_length(rounds_s, contenders=_CONTENDERS, starts_s=starts_s)
    alone, training = reading.counted(length), reading.counted(length, trains=True)
    contenders: dict[str, Callable[[], Block]] = {
        "pipeline": lambda: reading_block(source, alone),
        "step": lambda: step_block(step, reading.batches, length),
        "together": lambda: reading_block(source, training, step),
    }
    end_s = time.perf_counter() + rounds_s
    if alone.counting != "epochs" and end_s + reading.duration_s > ends_s:
        end_s -= reading.duration_s  # Time for a second reading.
    blocks = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of(results) for name, results in blocks.items()}
    pipeline, training_block = rates["pipeline"].samples_per_second, blocks["together"][-1]
    if alone.counting != "epochs":  # Otherwise the rounds see all of the data.
        record = reading.record
        if not record.agrees_with(pipeline):
            # The files may not have been in memory, or the machine was busy.
            once_s = min(reading.duration_s, max(0.0, ends_s - time.perf_counter()))
            record = read_pass(source, least_s=once_s, most_s=_SECOND_READING * once_s).record
        if not record.agrees_with(pipeline):
            long_s = min(record.duration_s, max(_LEAST_S, ends_s - time.perf_counter()))
            length = BlockLength(0.0, long_s, long_s, "start")
            training_block = reading_block(source, length, step)
            waited_s = sum(span.wait_s for span in training_block.spans)
            wait_share = waited_s / training_block.duration_s
            record = dataclasses.replace(record, wait_share=wait_share)
    # Rounds train on the first batches of the data, which may be smaller than later ones.
    batch_values = fmean(block.batch_values for block in blocks["together"])
    is_comparable = _SIZE_RATIO * batch_values >= reading.batch_values
    return InputPipelineProfile(
        batch_size=forms.rows_of(reading.batches[0]),
        **rates,
        timeline=tuple(span for span in training_block.spans if span.begin_s < _TIMELINE_S),
        changes=(),
        noted=(),
        dtype_policy=model.dtype_policy.name,
        time_budget_s=rounds_s,
        environment=read_environment(),
        long_run=record,
        together_comparable=alone.counting == training.counting and is_comparable,
    )
