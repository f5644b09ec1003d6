"""The latency of a model fitted to what was timed at several batch sizes."""

import math
from collections.abc import Sequence

import numpy as np

from kbatch.analysis.latency import Latency, fit_latency
from kbatch.analysis.lines import fit_line
from kbatch.analysis.quantile_bounds import calls_for_quantile
from kbatch.analysis.slow_rounds import calm_values
from kbatch.inference.record import TargetCheck, TimingRecord

# Groups of calls that each give a quantile of their own, which shows its noise.
_MOST_GROUPS = 8


def fit_timings(timings: Sequence[TimingRecord]) -> Latency:
    """Fits the time of a batch to the blocks of one call path and policy.

    Blocks that a neighbour on the machine slowed are left out where they can be told apart, so
    that the fit, and the batch sizes that follow from it, are those of the model.

    Args:
        timings: What was measured of it, by batch size.

    Raises:
        ValueError: If too little was measured.
    """
    kept = calm_values([t.batch_times_s for t in timings])
    calm = [(t.batch_size, time_s) for t, one in zip(timings, kept, strict=True) for time_s in one]
    if len(calm) < 3 or len(timings) < 2:
        raise ValueError(
            "A fit needs two measured batch sizes with three blocks in all: measure longer, or "
            f"fewer call paths and policies at once. Received: {len(timings)} sizes with "
            f"{len(calm)} blocks."
        )
    return fit_latency([size for size, _ in calm], [time_s for _, time_s in calm])


def disturbed_share(timings: Sequence[TimingRecord]) -> float:
    """Gives the share of the blocks that `fit_timings` leaves out."""
    blocks = sum(len(t.batch_times_s) for t in timings)
    calm = sum(map(len, calm_values([t.batch_times_s for t in timings])))
    return 1 - calm / blocks if blocks else 0.0


def round_noise(timings: Sequence[TimingRecord]) -> float | None:
    """Tells how far blocks of one size scatter, disturbed ones included.

    Returns:
        The relative standard deviation; None where too little was measured.
    """
    pairs = [(t.batch_size, value) for t in timings for value in t.batch_times_s]
    if len(pairs) < 3 or len(timings) < 2:
        return None
    return fit_line([size for size, _ in pairs], [value for _, value in pairs]).departure.noise


def fit_quantile(
    timings: Sequence[TimingRecord], quantile: float, *, checks: Sequence[TargetCheck] = ()
) -> Latency:
    """Fits a quantile of the latency to the single calls of one call path and policy.

    Only sizes with enough calls take part. Their calls are cut into groups in order of time,
    each long enough to show the quantile, and each gives one value.

    Args:
        timings: What was measured of it, by batch size.
        quantile: Which quantile, in (0, 1).
        checks: Fresh calls of it for targets; they tell of sizes above those with enough calls.

    Raises:
        ValueError: If fewer than two sizes have the calls that it needs, with how many are
            missing; or the path is bulk prediction, where no batch is timed by itself.
    """
    if timings and timings[0].bulk:
        raise ValueError(
            "Bulk prediction times all batches together: the latency of one is not known. "
            'Measure another call path, such as "predict_on_batch". '
            f"Received: call path {timings[0].call_path!r}."
        )
    bounds = {t.batch_size: t.latency_bound(quantile) for t in timings}
    known = {t.batch_size: t.latencies_s for t in timings if not bounds[t.batch_size].missing_calls}
    known |= _of_checks(checks, quantile, above=max(known, default=0))
    if len(known) < 2:
        missing = {size: bound.missing_calls for size, bound in bounds.items()}
        raise ValueError(
            f"The {quantile:g} quantile needs {calls_for_quantile(quantile)} calls at two "
            f"batch sizes or more: measure with `quantile={quantile:g}` and more time. "
            f"Received: missing calls by batch size {missing}."
        )
    pairs = [
        (size, value)
        for size, latencies_s in known.items()
        for value in _group_quantiles(latencies_s, quantile)
    ]
    # With the calls that the quantile needs there are two groups of each size or more.
    return fit_latency([size for size, _ in pairs], [value for _, value in pairs])


def _of_checks(
    checks: Sequence[TargetCheck], quantile: float, *, above: int
) -> dict[int, tuple[float, ...]]:
    """Gives the fresh calls of sizes above one that are enough for a quantile."""
    needed = calls_for_quantile(quantile)
    return {
        check.batch_size: check.latencies_s
        for check in checks
        if check.batch_size > above and len(check.latencies_s) >= needed
    }


def _group_quantiles(latencies_s: Sequence[float], quantile: float) -> list[float]:
    shortest = math.ceil(1 / min(quantile, 1 - quantile))
    groups = max(1, min(_MOST_GROUPS, len(latencies_s) // shortest))
    parts = np.array_split(np.asarray(latencies_s), groups)
    return [float(np.quantile(part, quantile)) for part in parts]
