"""What an update of each batch size takes, timed before a search trains anything."""

import functools
import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch.analysis.step_time import fit_step_time
from kbatch.instruments.failures import failure_status
from kbatch.profiling.loads import Source
from kbatch.profiling.timing_rounds import TimingPlan, TimingRounds
from kbatch.records.goodput import GoodputRecord
from kbatch.training.accumulation import accumulate_gradients
from kbatch.training.borrowed_step import borrowed_step, held_on_device
from kbatch.training.data import FitData, called_for
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.errors import InputError
from kbatch.training.sample_rows import SampleElements, SampleRows
from kbatch.tuning.search_data import SearchData

_SIGNATURE = inspect.signature(keras.Model.fit)
_SECONDS_A_SIZE = 0.25
_PLAN = {"needed_calls": 8, "block_s": 0.02, "rounds_beyond": 4}


def sweep_throughput(
    hypermodel: Any, space: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> GoodputRecord:
    """Times an update of each batch size of a hypermodel, in interleaved rounds.

    One model takes all sizes in turn, and is thrown away. Sizes that run out of memory, and those
    above them, get the seconds of the line through the others.

    Args:
        hypermodel: The `BatchSizeHyperModel`.
        space: Its hyperparameters, whose defaults are taken.
        arguments: Positional arguments of the search.
        keywords: Its keyword arguments.

    Returns:
        The sizes with their seconds.

    Raises:
        InputError: If the data are not found among the arguments, or fewer than three sizes could
            be timed of those that fit.
    """
    began_s = time.perf_counter()
    sizes = hypermodel.batch_sizes
    data = _data(arguments, keywords)
    hp = space.copy()
    hp.values["batch_size"] = sizes[0]
    model = hypermodel.build(hp)
    with dtype_policy_scope(model.dtype_policy.name):
        timed = _timed(_plain(model, hypermodel), data, sizes)
    times_s = {size: statistics.median(seconds) for size, seconds in timed.items()}
    missing = tuple(size for size in sizes if size not in times_s)
    if missing:
        times_s |= _extrapolated(timed, missing)
    return GoodputRecord(
        batch_sizes=sizes,
        update_times_s=tuple(times_s[size] for size in sizes),
        extrapolated=missing,
        sweep_s=time.perf_counter() - began_s,
    )


def _data(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> FitData:
    try:
        call = _SIGNATURE.bind(None, *arguments, **keywords).arguments
    except TypeError as error:
        raise InputError(
            'With `strategy="goodput"` give `search` what `keras.Model.fit` takes: train steps of '
            f"its data are timed first. Received: {error}."
        ) from error
    return FitData(**{name: call[name] for name in FitData._fields if name in call})


def _plain(model: Any, hypermodel: Any) -> Any:
    """Gives a model its stock step, or the accumulating one where a micro-batch size is given."""
    vars(model).pop("train_step", None)
    model.train_function = None
    size = hypermodel.micro_batch_size
    if isinstance(size, int) and size < hypermodel.batch_sizes[-1]:
        accumulate_gradients(model, size)
    return model


def _timed(model: Any, data: FitData, sizes: Sequence[int]) -> dict[int, list[float]]:
    source = SearchData().source(data, model)
    rows = source.rows(model) if isinstance(source, SampleElements) else source
    rounds: TimingRounds[int] = TimingRounds(
        TimingPlan(time_budget_s=_SECONDS_A_SIZE * len(sizes), **_PLAN),
        seed=0,
        is_result=lambda error: failure_status(error) == "out_of_memory",
    )
    with borrowed_step(model, _batch(rows, model, sizes[0])) as step:
        for size in sizes:
            if rounds.admit(size, functools.partial(step, _batch(rows, model, size))) is None:
                break  # A larger one would run out of memory too.
        rounds.run()
    return {
        size: [statistics.median(block.durations_s) for block in blocks]
        for size, blocks in rounds.blocks.items()
        if blocks and size not in rounds.failures
    }


def _batch(rows: Source, model: Any, size: int) -> Any:
    if isinstance(rows, SampleRows):
        dataset: tf.data.Dataset = rows.batches(size)
    elif isinstance(rows, SampleElements):
        dataset = rows.rows(model).batches(size)
    else:
        dataset = called_for(rows, model, size)
    return held_on_device(next(iter(dataset)))


def _extrapolated(timed: Mapping[int, list[float]], missing: Sequence[int]) -> dict[int, float]:
    pairs = [(size, seconds) for size, times in timed.items() for seconds in times]
    if len(timed) < 2:
        raise InputError(
            'With `strategy="goodput"` at least two batch sizes must fit in memory: give a '
            f"`micro_batch_size`. Received: {len(timed)} of {len(timed) + len(missing)} could be "
            "timed."
        )
    line = fit_step_time([size for size, _ in pairs], [seconds for _, seconds in pairs])
    return {size: max(line.step_time_s(size), max(map(min, timed.values()))) for size in missing}
