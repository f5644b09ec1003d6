"""Recommendations for tests: a device and a gradient noise scale of one's choice."""

import dataclasses

import numpy as np
from input_profile_factory import make_profile
from records_factory import make_environment

from kbatch.memory.record import MaxBatchSizeResult, ProbeRecord
from kbatch.recommendation.choice import decide, trained_runs
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, PilotStretch, SizeCheck
from kbatch.recommendation.record import Recommendation
from kbatch.throughput.record import TimedRounds

SIZES = tuple(2**k for k in range(3, 11))
PER_EXAMPLE_S = 1e-5
# Ten rounds that scatter by a percent.
SPREAD = 1 + 0.01 * np.array([0, 1, -1, 0.5, -0.5, 0.2, -0.2, 0.8, -0.8, 0])


def make_timings(n_half=100.0, *, fits=SIZES[-1], sizes=SIZES):
    """Steps of a device that reaches half its peak at `n_half`; what does not fit is in parts."""

    def timed(size, micro):
        times = size / micro * PER_EXAMPLE_S * (n_half + micro) * SPREAD
        return TimedRounds(size, micro, tuple(range(len(SPREAD))), tuple(times.tolist()))

    parts = [timed(b, fits) for b in sizes if fits < b < sizes[-1]]
    whole = [timed(b, b) for b in sizes if b <= fits]
    halves = [timed(b, b // 2) for b in sizes if 16 <= b <= fits and b < sizes[-1]]
    return (*whole, *parts, *halves, timed(sizes[-1], min(64, fits)))


def make_fit_times(n_half=100.0, input_rate=1e6, *, epoch_s=0.0, sizes=(32, 256)):
    """Epochs in which each update waits for what a pipeline of this rate has not made yet."""

    def timed(size):
        step_s = PER_EXAMPLE_S * (n_half + size)
        fit_s = max(step_s, size / input_rate)
        kinds = (tuple((s * SPREAD).tolist()) for s in (step_s, fit_s, epoch_s))
        return FitTime(size, *kinds, epoch_batches=1437 // size)

    return tuple(timed(size) for size in sizes)


def make_check(batch_size, updates, ended_by="target"):
    return SizeCheck(batch_size, batch_size, 0.002, updates, 0.2, 3.0, ended_by)


def make_checks(noise_scale, timings=(), sizes=SIZES):
    """Trainings at every timed size but the pilot's, whose updates follow the noise scale."""
    timed = {one.batch_size for one in timings} or set(sizes)
    needed = {b: 525 * (1 + noise_scale / b) / (1 + noise_scale / 32) for b in timed - {32}}
    return tuple(make_check(size, max(1, round(needed[size]))) for size in sorted(needed))


def make_memory(max_batch_size=1437, *, limit_bytes=8 * 2**30):
    probe = ProbeRecord(max_batch_size, limit_bytes // 2, "fits", 1.0)
    return MaxBatchSizeResult(
        max_batch_size,
        "reached the data set",
        False,
        limit_bytes,
        (0.8, 0.9),
        True,
        "CPU:0",
        "float32",
        10_000,
        (probe,),
    )


def make_pilot(noise_scale=200.0, *, scatter=0.05, stretches=40, held_out=True, **changed):
    """A pilot whose losses have gone 98 % of their way at half of it."""
    rng = np.random.default_rng(0)
    made = tuple(
        PilotStretch(
            updates=25,
            loss=0.1 + 2 * 0.02 ** (2 * i / stretches),
            held_out_loss=0.2 + 2 * 0.02 ** (2 * i / stretches) if held_out else None,
            gradient_variance=noise_scale * float(1 + scatter * rng.normal()),
            gradient_squared_norm=float(1 + scatter * rng.normal()),
        )
        for i in range(stretches)
    )
    fields = {
        "batch_size": 32,
        "micro_batch_size": 8,
        "learning_rate": 0.001,
        "stretches": made,
        "duration_s": 21.0,
        "ended_by": "progress",
        "seed": 0,
    }
    return PilotRecord(**(fields | changed))


def make_recommendation(
    *, n_half=100.0, noise_scale=200.0, input_rate=1e6, short_s=None, older=False, **changed
):
    """A recommendation with the answer that follows; `older` as in a file that keeps none."""
    fields = {
        "model_name": "digits",
        "optimizer": "Adam",
        "dtype_policy": "float32",
        "base_batch_size": 32,
        "base_learning_rate": 0.001,
        "scheduled": False,
        "learning_rate_rule": "sqrt",
        "examples": 1437,
        "timings": make_timings(n_half),
        "memory": make_memory(),
        "pilot": make_pilot(noise_scale),
        "pipeline": make_profile(batch_size=256, pipeline=input_rate, step=50_000, together=48_000),
        "fit_times": make_fit_times(n_half, input_rate),
        "unknown": {},
        "durations_s": {"memory": 12.0, "throughput": 20.0, "pilot": 21.0, "input": 5.0},
        "budget_s": 60.0,
        "notes": (),
        "environment": make_environment(),
    }
    pilot = (fields | changed)["pilot"]
    if "checks" not in changed and not older and pilot is not None and pilot.missing is None:
        fields["checks"] = make_checks(noise_scale, (fields | changed)["timings"])
    made = Recommendation(**(fields | changed))
    return made if older or "decision" in changed else decided(made, short_s=short_s)


def decided(made, *, short_s=None):
    found = trained_runs(
        made.timings, in_fit=made.in_fit.line, pilot=made.pilot, checks=made.checks
    )
    answer = decide(
        found,
        base_batch_size=made.base_batch_size,
        rule=made.learning_rate_rule,
        missing=made.pilot.missing if made.pilot else None,
        budget_s=made.budget_s,
        short_s=short_s,
    )
    return dataclasses.replace(made, decision=answer)
