"""What an update of each batch size takes, by a throughput sweep, and what trials took in all."""

import contextlib
import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.line_fit import fit_step_time
from kbatch.analysis.next_size import FinishedRun, SizeCosts, forecast_updates
from kbatch.errors import InputError
from kbatch.records.training_run import COST_NAMES, Target, cost_to_target
from kbatch.study.study import GoodputRecord
from kbatch.study.trial import Objective, TrialRecord, device_kinds
from kbatch.throughput.record import TrainingPoint
from kbatch.throughput.update_timing import StepConfig, TrainingSweep
from kbatch.timing.rounds import TimingPlan
from kbatch.training.data.forms import FitData
from kbatch.training.data.model_inputs import refusals_told
from kbatch.training.data.sample_rows import DataEnded, Samples, Source, batch_of, build_on
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.model import uninstall_step
from kbatch.training.train_step import micro_batch_steps

_SIGNATURE = inspect.signature(keras.Model.fit)
_SECONDS_A_SIZE = 0.25
# The part of a run's epochs whose median is what the run held in the end.
_LAST_PART = 4


def sweep_throughput(
    tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> GoodputRecord:
    """Time an update of each batch size of a tuner's hypermodel, in interleaved rounds."""
    # Sizes that run out of memory or data, and those above them, get the seconds of the line
    # through the others.
    began_s = time.perf_counter()
    try:
        call = _SIGNATURE.bind(None, *arguments, **keywords).arguments
    except TypeError as error:
        raise InputError(
            'With `strategy="goodput"` give `search` what `keras.Model.fit` takes: train steps of '
            f"its data are timed first. Received: {error}."
        ) from error
    data = FitData(**{name: call[name] for name in FitData._fields if name in call})
    hypermodel, hp = tuner.hypermodel, tuner.oracle.get_space().copy()
    sizes, given = hypermodel.batch_sizes, hypermodel.micro_batch_size
    hp.values["batch_size"] = sizes[0]
    model = hypermodel.build(hp)
    # The step of a trial measures its moments too, which takes longer to trace.
    uninstall_step(model)
    source = Samples().source(data, model)
    with dtype_policy_scope(model.dtype_policy.name):
        build_on(model, source)
        with refusals_told(lambda: model, source):
            if given == "auto":
                project = Path(tuner.project_dir)
                cache = hypermodel._micro_batch(hp, model, directory=project).cache(source)
                most, whole_only = cache.max_fitting(), cache.trains_whole_only()
                first = [_setting(size, size) for size in sizes if size <= most]
            else:
                most, whole_only = None, False
                first = [_setting(size, given or size) for size in sizes]
            timed = _timed(model, source, sizes, first, most=most, whole_only=whole_only)
    times_s = {size: statistics.median(point.step_times_s) for size, point in timed.items()}
    missing = tuple(size for size in sizes if size not in times_s)
    if missing and len(timed) < 2:
        raise InputError(
            'With `strategy="goodput"` the data must fill two batch sizes at least, and these must '
            f"fit in memory: give a `micro_batch_size`. Received: {len(timed)} of "
            f"{len(sizes)} could be timed."
        )
    if missing:
        floor_s = max(times_s.values())  # A larger batch is no faster.
        pairs = [(size, time_s) for size, point in timed.items() for time_s in point.step_times_s]
        line = fit_step_time([size for size, _ in pairs], [seconds for _, seconds in pairs])
        times_s |= {size: max(line.step_time_s(size), floor_s) for size in missing}
    return GoodputRecord(
        batch_sizes=sizes,
        update_times_s=tuple(times_s[size] for size in sizes),
        extrapolated=missing,
        sweep_s=time.perf_counter() - began_s,
        sm_clocks_mhz=tuple(timed[size].sm_clock_mhz if size in timed else None for size in sizes),
    )


def _timed(
    model: Any,
    source: Source,
    sizes: Sequence[int],
    first: Sequence[StepConfig],
    *,
    most: int | None,
    whole_only: bool,
) -> dict[int, TrainingPoint]:
    """Return what was timed of an update of each size, in the fastest way that was tried."""
    # `first` is timed in any case. Where the most that fit are known, larger sizes are timed in
    # parts of these and, unless parts train otherwise, of the size that is fastest whole.
    timing = TimingPlan(
        time_budget_s=_SECONDS_A_SIZE * len(sizes),
        needed_calls=8,
        block_s=0.02,
        rounds_beyond=4,
        # Parts of a batch have a graph of their own, whose tracing takes the time of the rounds.
        first_calls_count=most is None,
    )
    with micro_batch_steps(model) as steps:
        sweep = TrainingSweep(steps, lambda size: batch_of(source, model, size), timing)
        _warm_up(sweep, first)
        in_parts: list[StepConfig] = []
        if most is not None:
            whole = {way.batch_size: one.call_s for way, one in sweep.rounds.warm_ups.items()}
            parts = {most}
            if whole and not whole_only:
                parts.add(max(whole, key=lambda size: size / whole[size]))
            ways = (
                _setting(size, equal_parts(size, part))
                for part in sorted(parts)
                for size in sizes
                if size > part
            )
            in_parts = list(dict.fromkeys(ways))
            _warm_up(sweep, in_parts)
        for _ in sweep.each_round():
            pass
        points = [sweep.point(way) for way in (*first, *in_parts)]
    slowest_first = sorted(
        (point for point in points if point.measured),
        key=lambda point: -statistics.median(point.step_times_s),
    )
    return {point.batch_size: point for point in slowest_first}


def _setting(batch_size: int, micro_batch_size: int) -> StepConfig:
    return StepConfig(batch_size, min(micro_batch_size, batch_size))


def _warm_up(sweep: TrainingSweep, settings: Sequence[StepConfig]) -> None:
    with contextlib.suppress(DataEnded):  # A trial of that size says so.
        for setting in settings:
            if sweep.warm_up(setting) is None:
                break  # A larger one would run out of memory too.


def runs_of(
    trials: Sequence[TrialRecord], objective: Objective, costs: SizeCosts
) -> list[FinishedRun]:
    """Return what each trial took to the target; on another device than the first, at its costs."""
    pilot = next((t for t in trials if t.status == "completed"), None)
    target = None
    if pilot is not None and objective.name in COST_NAMES:
        target = pilot.target
    elif pilot is not None:
        # For runs of equal time it is what the first trial held in the end: the size that is there
        # first has the most time left.
        epochs = pilot.executions[0].epochs
        values = [v for e in epochs if (v := e.finite(objective.name)) is not None]
        if values:
            held = statistics.median(values[-max(1, len(values) // _LAST_PART) :])
            target = Target(objective.name, held, objective.direction)
    part = COST_NAMES.get(objective.name, COST_NAMES["seconds_to_target"])
    runs = []
    for trial in trials:
        found = [target and cost_to_target(target, run.epochs) for run in trial.executions]
        met = [one for one in found if one is not None]
        cost, updates, scale = None, None, trial.noise_scale
        # One that failed, diverged or ran out of memory says nothing of its size's speed.
        if trial.status == "completed" and len(met) < len(found):
            updates = statistics.fmean(run.updates or 0 for run in trial.executions) or None
        elif trial.status == "completed":
            updates = statistics.fmean(one.updates for one in met)
            cost = statistics.fmean(getattr(one, part) for one in met)
            if pilot and len(device_kinds([pilot, trial])) > 1:
                cost = costs.start_cost + updates * costs.update_costs[trial.batch_size]
        run = FinishedRun(
            trial.batch_size,
            cost,
            updates,
            noise_scale=scale and scale.value,
            noise_at_least=scale and scale.at_least,
        )
        runs.append(run)
    return runs


def costs_of(
    sweep: GoodputRecord, trials: Sequence[TrialRecord], *, objective: Objective
) -> SizeCosts:
    """Return what updates cost: the sweep's seconds, and those that the first trial took above."""
    if objective.name == "updates_to_target":
        return SizeCosts(dict.fromkeys(sweep.batch_sizes, 1.0))
    if objective.name == "examples_to_target":
        return SizeCosts({size: float(size) for size in sweep.batch_sizes})
    times_s = dict(zip(sweep.batch_sizes, sweep.update_times_s, strict=True))
    for trial in trials:
        if trial.samples_per_second and trial.batch_size in times_s:
            real_s, swept_s = trial.batch_size / trial.samples_per_second, times_s[trial.batch_size]
            beside_s, factor = max(0.0, real_s - swept_s), min(1.0, real_s / swept_s)
            times_s = {size: factor * seconds + beside_s for size, seconds in times_s.items()}
            return SizeCosts(times_s, trial.mean(lambda e: e.first_step_s) or 0.0)
    return SizeCosts(times_s)


def expected_runs(
    costs: SizeCosts, runs: Sequence[FinishedRun], pending: Sequence[int]
) -> list[FinishedRun]:
    """Return what is expected of the sizes that run, in the order in which they began."""
    known, found = list(runs), []
    for size in pending:
        forecast = forecast_updates(costs, known)
        if known and forecast is None:
            break
        # Only ratios of costs matter: a pilot that runs counts as a run of one update.
        updates = forecast.updates[size] if forecast else 1.0
        cost = costs.start_cost + updates * costs.update_costs[size]
        found.append(FinishedRun(size, cost=cost, updates=updates))
        if not runs:  # Those beside the pilot follow from it.
            known = found[:1]
    return found
