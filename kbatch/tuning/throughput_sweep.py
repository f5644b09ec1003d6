"""What an update of each batch size takes, timed before a search trains anything."""

import contextlib
import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kbatch.analysis.step_time import fit_step_time
from kbatch.profiling.loads import DataEnded, Source, batch_of, build_on
from kbatch.profiling.timing_rounds import TimingPlan
from kbatch.profiling.training_sweep import StepSetting, TrainingSweep
from kbatch.records.goodput import GoodputRecord
from kbatch.training.data import FitData
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.errors import InputError
from kbatch.training.micro_batch_steps import micro_batch_steps
from kbatch.tuning.search_data import SearchData

_SIGNATURE = inspect.signature(keras.Model.fit)
_SECONDS_A_SIZE = 0.25
_PLAN = {"needed_calls": 8, "block_s": 0.02, "rounds_beyond": 4}


def sweep_throughput(
    hypermodel: Any, space: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> GoodputRecord:
    """Times an update of each batch size of a hypermodel, in interleaved rounds.

    One model takes all sizes in turn, and is thrown away. Sizes that run out of memory or data, and
    those above them, get the seconds of the line through the others.

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
    # The step of a trial measures its moments too, which takes longer to trace.
    vars(model).pop("train_step", None)
    source = SearchData().source(data, model)
    with dtype_policy_scope(model.dtype_policy.name):
        build_on(model, source)
        timed = _timed(model, source, _settings(sizes, hypermodel.micro_batch_size))
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


def _settings(sizes: Sequence[int], most: int | str | None) -> list[StepSetting]:
    """Gives the steps of each size: accumulated where a micro-batch size is given."""
    return [StepSetting(min(size, most) if isinstance(most, int) else size, size) for size in sizes]


def _timed(model: Any, source: Source, settings: Sequence[StepSetting]) -> dict[int, list[float]]:
    timing = TimingPlan(time_budget_s=_SECONDS_A_SIZE * len(settings), **_PLAN)
    with micro_batch_steps(model) as steps:
        sweep = TrainingSweep(steps, lambda size: batch_of(source, model, size), timing)
        with contextlib.suppress(DataEnded):  # A trial of that size says so.
            for setting in settings:
                if sweep.warm_up(setting) is None:
                    break  # A larger one would run out of memory too.
        sweep.rounds.run()
        points = [sweep.point(setting) for setting in settings]
    return {point.batch_size: list(point.step_times_s) for point in points if point.measured}


def _extrapolated(timed: Mapping[int, list[float]], missing: Sequence[int]) -> dict[int, float]:
    pairs = [(size, seconds) for size, times in timed.items() for seconds in times]
    if len(timed) < 2:
        raise InputError(
            'With `strategy="goodput"` the data must fill two batch sizes at least, and these must '
            f"fit in memory: give a `micro_batch_size`. Received: {len(timed)} of "
            f"{len(timed) + len(missing)} could be timed."
        )
    line = fit_step_time([size for size, _ in pairs], [seconds for _, seconds in pairs])
    return {size: max(line.step_time_s(size), max(map(min, timed.values()))) for size in missing}
