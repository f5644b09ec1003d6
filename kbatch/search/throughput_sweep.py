"""What an update of each batch size takes, timed before a search trains anything."""

import contextlib
import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.line_fit import fit_step_time
from kbatch.errors import InputError
from kbatch.search.data import SearchData
from kbatch.study.study import GoodputRecord
from kbatch.throughput.update_timing import StepSetting, TrainingSweep
from kbatch.timing.rounds import TimingPlan
from kbatch.training.data.forms import FitData
from kbatch.training.data.model_inputs import REFUSALS, refusal_text
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of, build_on
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.train_step import micro_batch_steps

_SIGNATURE = inspect.signature(keras.Model.fit)
_SECONDS_A_SIZE = 0.25
_PLAN = {"needed_calls": 8, "block_s": 0.02, "rounds_beyond": 4}


def sweep_throughput(
    hypermodel: Any,
    space: Any,
    *,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    directory: Path | None,
) -> GoodputRecord:
    """Time an update of each batch size of a hypermodel, in interleaved rounds.

    One model takes all sizes in turn, and is thrown away. Under "auto" no more examples go through
    at once than were found to fit. Sizes larger than the one that is fastest as a whole are timed
    in micro-batches too, and the faster way counts; of a model that trains differently on parts of
    a batch, only what does not fit is cut. Sizes that run out of memory or data, and those above
    them, get the seconds of the line through the others.
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
        try:
            auto = hypermodel.micro_batch(hp, model, directory=directory)
            most = None if auto is None else auto.most_at_once(source)
            whole_only = auto is not None and auto.trains_whole_only(source)
            ways = _Ways(sizes, hypermodel.micro_batch_size, most, whole_only)
            timed = _timed(model, source, ways)
        except (ValueError, TypeError, *REFUSALS) as error:
            told = refusal_text(error, model=lambda: model, source=source)
            if told is None:
                raise
            raise InputError(told) from error
    times_s = {size: _median(seconds) for size, seconds in timed.items()}
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


class _Ways(NamedTuple):
    """How the sizes go through the device.

    Attributes:
        sizes: Batch sizes, in examples.
        micro_batch_size: That which was given, `"auto"`, or None.
        most: Most examples that fit at once, found under "auto"; None else.
        whole_only: Whether the model trains differently on parts: only what does not fit is cut.
    """

    sizes: tuple[int, ...]
    micro_batch_size: int | str | None
    most: int | None
    whole_only: bool

    @property
    def first(self) -> list[StepSetting]:
        """What is timed in any case."""
        given = self.micro_batch_size
        if isinstance(given, int):
            return [StepSetting(min(size, given), size) for size in self.sizes]
        return [StepSetting(size, size) for size in self.sizes if size <= (self.most or size)]

    def in_parts(self, whole: Mapping[int, float]) -> list[StepSetting]:
        """Return sizes in parts: of the fastest whole size, and of the most that fit."""
        if self.most is None:
            return []
        parts = {self.most}
        if whole and not self.whole_only:
            parts.add(max(whole, key=lambda size: size / whole[size]))
        settings = [
            StepSetting(equal_parts(size, part), size)
            for part in sorted(parts)
            for size in self.sizes
            if size > part
        ]
        return list(dict.fromkeys(settings))


def _timed(model: Any, source: Source, ways: _Ways) -> dict[int, list[float]]:
    """Return the seconds of an update of each size, in the faster way of those that were timed."""
    # Parts of a batch have a graph of their own, whose tracing would take the time of the rounds.
    timing = TimingPlan(
        time_budget_s=_SECONDS_A_SIZE * len(ways.sizes),
        first_calls_count=ways.most is None,
        **_PLAN,
    )
    with micro_batch_steps(model) as steps:
        sweep = TrainingSweep(steps, lambda size: batch_of(source, model, size), timing)
        _warm_up(sweep, ways.first)
        whole = {way.batch_size: found.call_s for way, found in sweep.rounds.warm_ups.items()}
        parts = ways.in_parts(whole)
        _warm_up(sweep, parts)
        sweep.rounds.run()
        points = [sweep.point(way) for way in (*ways.first, *parts)]
    timed: dict[int, list[float]] = {}
    for point in points:
        if point.measured:
            seconds = list(point.step_times_s)
            timed[point.batch_size] = min(
                timed.get(point.batch_size, seconds), seconds, key=_median
            )
    return timed


def _warm_up(sweep: TrainingSweep, settings: Sequence[StepSetting]) -> None:
    with contextlib.suppress(DataEnded):  # A trial of that size says so.
        for setting in settings:
            if sweep.warm_up(setting) is None:
                break  # A larger one would run out of memory too.


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def _extrapolated(timed: Mapping[int, list[float]], missing: Sequence[int]) -> dict[int, float]:
    pairs = [(size, seconds) for size, times in timed.items() for seconds in times]
    if len(timed) < 2:
        raise InputError(
            'With `strategy="goodput"` the data must fill two batch sizes at least, and these must '
            f"fit in memory: give a `micro_batch_size`. Received: {len(timed)} of "
            f"{len(timed) + len(missing)} could be timed."
        )
    floor_s = max(map(_median, timed.values()))  # A larger batch is no faster.
    line = fit_step_time([size for size, _ in pairs], [seconds for _, seconds in pairs])
    return {size: max(line.step_time_s(size), floor_s) for size in missing}
