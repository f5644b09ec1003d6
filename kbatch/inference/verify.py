"""The largest batch within a latency target, verified by fresh calls."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from kbatch.analysis.scaling_curve import batch_size_within
from kbatch.inference.answers import TargetTooLow, round_noise
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import TargetCheck
from kbatch.inference.sweep import InferenceSweep, Setting
from kbatch.inference.target_search import TargetTry, best_try, search_latency_target

# Calls that tell whether one batch is far above a target.
_FEW_CALLS = 10
# How much slower than typical 5 % of normally scattered rounds are, in standard deviations.
_SLOW_ROUND = 1.645
_LEAST_DRIFT = 0.2
# As long as a size is timed in the sweep: 59 short calls would be over within a fluke.
_LEAST_CHECK_S = 0.3


def check_reachable(
    sweep: InferenceSweep, setting: Setting, *, target_ms: float, quantile: float
) -> None:
    """Check that one example is not far above a target, before all is measured."""
    median_ms = _median_ms(sweep, setting)
    if median_ms is None or median_ms <= target_ms:
        return
    one = setting._replace(batch_size=1)
    if one != setting:
        if sweep.admit(one) is None:
            return
        median_ms = _median_ms(sweep, one)
        sweep.rounds.withdraw(one)  # Not one of the sizes to sweep.
    if median_ms is not None and median_ms > target_ms:
        raise TargetTooLow(target_ms, quantile, 1, median_ms)


def verify_target(
    profile: InferenceProfile,
    sweep: InferenceSweep,
    *,
    target_ms: float,
    time_budget_s: float,
    say: Callable[[str], None],
) -> InferenceProfile:
    """Look for the largest batch within a target and add the checks to the profile."""
    (path, policy), quantile = profile.series[0], profile.quantile
    measured = list(profile.answering)
    if not measured:
        note = "The latency target was not looked for: nothing was timed."
        return dataclasses.replace(profile, notes=(*profile.notes, note))

    def call(batch_size: int, calls: int) -> Sequence[float]:
        setting = Setting(path, policy, batch_size)
        latencies_s = None
        if setting in sweep.rounds.warm_ups or sweep.admit(setting) is not None:
            latencies_s = sweep.rounds.fresh_calls(setting, calls, least_s=_LEAST_CHECK_S)
        if latencies_s is None:
            say(f"checked batch {batch_size}: memory ran out")
            return [math.inf] * calls  # No target is kept to.
        say(f"checked batch {batch_size}: {1000 * max(latencies_s):.3g} ms at most")
        return latencies_s

    drift = expected_drift(round_noise(measured))
    tries = search_latency_target(
        call,
        _guess(profile, quantile),
        target_s=target_ms / 1000,
        quantile=quantile,
        largest=sweep.largest_allowed(path, policy),
        drift=drift,
        earlier=sweep.stretches(path, policy),
        more_time=lambda: sweep.rounds.spent_s < time_budget_s,
    )
    best = best_try(tries)
    checks = tuple(
        TargetCheck(
            path,
            policy,
            t.batch_size,
            target_ms,
            quantile,
            tuple(latency_s for latency_s in t.latencies_s if math.isfinite(latency_s)),
            best=t is best,
            drift=drift,
            confidence=t.confidence,
            calls_a_hiccup=t.calls_a_hiccup,
            missing_calls=t.missing_calls,
        )
        for t in tries
    )
    notes = () if best is not None else (_none_kept(tries, target_ms, quantile),)
    return dataclasses.replace(profile, checks=checks, notes=(*profile.notes, *notes))


def expected_drift(noise: float | None) -> float:
    """Return how much slower later calls may be than those that verify an answer.

    The calls of a check are over within about a second, and know nothing of the minute after.
    How far the rounds of the sweep scatter tells what a machine does between two moments; at least
    20 %, since a short sweep may have seen a calm one.
    """
    return max(_LEAST_DRIFT, _SLOW_ROUND * (noise or 0.0))


def _median_ms(sweep: InferenceSweep, setting: Setting) -> float | None:
    """Time a few calls; None where memory ran out, which the rounds will tell."""
    latencies_s = sweep.rounds.fresh_calls(setting, _FEW_CALLS)
    return None if latencies_s is None else 1000 * statistics.median(latencies_s)


def _guess(profile: InferenceProfile, quantile: float) -> Callable[[float], int | None]:
    """Invert the fit of the quantile, or of the medians, or take the time as proportional."""
    latency = None
    for fit in (lambda: profile.latency_quantile(quantile), lambda: profile.latency):
        try:
            latency = fit()
            break
        except ValueError:  # Calls or blocks are too few for it, as fresh calls will tell.
            continue
    if latency is None:
        rate = profile.answering[0].samples_per_second or 1.0
        return lambda latency_s: max(1, int(rate * latency_s))

    def guess(latency_s: float) -> int | None:
        longest_s, largest = float(latency.curve.latencies_s[-1]), latency.curve.batch_sizes[-1]
        if not latency.follows_line and latency_s > longest_s:
            # The curve ends here; on a plateau the time grows with the size.
            return int(largest * latency_s / longest_s)
        found = batch_size_within(latency, latency_s=latency_s).batch_size
        if found is None:
            # The smallest measured size is above the target: smaller ones in proportion, which is
            # too many where a call has a fixed part, as fresh calls will show.
            return int(latency.curve.batch_sizes[0] * latency_s / latency.curve.latencies_s[0])
        return found

    return guess


def _none_kept(tries: Sequence[TargetTry], target_ms: float, quantile: float) -> str:
    sizes = ", ".join(str(one.batch_size) for one in tries)
    note = (
        f"No batch size was verified to keep to {target_ms:g} ms at the {quantile:g} quantile. "
        f"Checked: {sizes}."
    )
    unsure = [one for one in tries if one.missing_calls is not None]
    if unsure:
        one = max(unsure, key=lambda found: found.batch_size)
        note += (
            f" Batch size {one.batch_size:,} may keep to it, but about {one.missing_calls:,} more "
            "calls are needed to be sure: the machine slowed some calls, whatever their size. "
            "Measure on a quieter machine."
        )
    return note
