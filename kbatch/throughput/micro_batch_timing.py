"""The timing of one batch cut into micro-batches of several sizes, against the whole batch."""

import dataclasses
import statistics
from collections.abc import Collection
from typing import Any

import keras

from kbatch.device.gpu_monitor import NEVER_S, GpuMonitor
from kbatch.throughput.choice import micro_batch_candidates, sizes_to_leave
from kbatch.throughput.training_profile_record import TrainingPoint
from kbatch.throughput.training_sweep import StepSetting, TrainingSweep
from kbatch.timing.timing_plan import TimingPlan
from kbatch.training.borrowed_step import rows_of
from kbatch.training.micro_batch_steps import micro_batch_steps

# Most of the time is left over where the choice is settled sooner.
TIMING = TimingPlan(
    time_budget_s=12.0,
    needed_calls=1,
    block_s=0.03,
    precision=0.0,
    rounds_beyond=23,
    first_calls_count=False,
)
# Share of the time after which no more sizes are warmed up.
_SHARE_TO_WARM_UP = 0.4
# Sizes this many times slower than the fastest when they are warm are not timed.
_HOPELESS = 1.25
_SLOWER = "far slower than others when it was warmed up"
_LEFT = "slower than another in the first rounds"


def time_micro_batches(
    model: keras.Model,
    batch: Any,
    *,
    largest: int,
    moments_every: int,
    timing: TimingPlan = TIMING,
) -> tuple[TrainingPoint, ...]:
    """Times steps on a batch, whole and as micro-batches of half as many examples each time.

    It goes down from the largest size and ends when two in a row are far slower than the fastest
    so far: under XLA, where each size is compiled, the first that is slower. The sizes take turns;
    after the first rounds the largest and the fastest of the others go on by themselves.

    Args:
        model: A built, compiled model, which stays as it is.
        batch: Inputs, targets and perhaps sample weights of an update, on the device.
        largest: Most examples that fit at once.
        moments_every: As in `accumulate_gradients`.
        timing: How long to time.

    Returns:
        One point a size that was run, ascending. One that left the rounds to others has a reason
        beside its times.

    Raises:
        InputError: If the model is spread over several replicas.
    """
    batch_size = rows_of(batch)
    with micro_batch_steps(model, moments_every=moments_every) as steps:
        sweep = TrainingSweep(steps, lambda _: batch, timing)
        settings = [
            StepSetting(size, batch_size) for size in micro_batch_candidates(batch_size, largest)
        ]
        run = _warmed_up(sweep, settings, compiled=bool(model.jit_compile))
        left = _duel(sweep)
        points = [sweep.point(setting, not_run=_SLOWER) for setting in sorted(run)]
        return tuple(
            dataclasses.replace(point, reason=_LEFT) if point.micro_batch_size in left else point
            for point in points
        )


def _duel(sweep: TrainingSweep) -> set[int]:
    """Times the sizes in rounds; returns those that left them to others."""
    left: set[int] = set()

    def leaving(live: Collection[StepSetting]) -> list[StepSetting]:
        times_s = {
            setting.micro_batch_size: {
                block.round: statistics.median(block.durations_s)
                for block in sweep.rounds.blocks[setting]
            }
            for setting in live
        }
        gone = sizes_to_leave(times_s)
        if len(gone) < len(live):
            left.update(gone)
        return [setting for setting in live if setting.micro_batch_size in gone]

    with GpuMonitor(interval_s=NEVER_S) as monitor:
        sweep.rounds.run(leaving=leaving, clock_mhz=monitor.sample_clock_mhz)
    return left


def _warmed_up(
    sweep: TrainingSweep, settings: list[StepSetting], *, compiled: bool
) -> list[StepSetting]:
    """Warms sizes up in descending order, and takes those out that are far slower."""
    times_s: dict[StepSetting, float] = {}
    tried: list[StepSetting] = []
    slower_in_a_row = 0
    for setting in settings:
        tried.append(setting)
        # The sizes below the whole batch share one graph, unless XLA compiles it.
        traced = not compiled and len(tried) > (2 if settings[0].whole else 1)
        warm_up = sweep.warm_up(setting, traced=traced)
        if warm_up is None:
            continue
        times_s[setting] = warm_up.call_s
        behind = warm_up.call_s > (1.0 if compiled else _HOPELESS) * min(times_s.values())
        slower_in_a_row = slower_in_a_row + 1 if behind else 0
        if slower_in_a_row == (1 if compiled else 2) or sweep.late(_SHARE_TO_WARM_UP):
            break
    fastest_s = min(times_s.values(), default=0.0)
    for setting, time_s in times_s.items():
        if time_s > _HOPELESS * fastest_s and setting != settings[0]:
            sweep.rounds.withdraw(setting)
    return tried
