"""What the figures of an inference profile show, computed before anything is drawn."""

from typing import NamedTuple

import numpy as np

from kbatch.document.numbers import counted, listed, percent, readable
from kbatch.document.section import clocks_text, where_measured
from kbatch.inference.answers import InferenceAnswer
from kbatch.inference.profile import InferenceProfile

BATCH_LABEL = "Batch size (examples per call)"
# A line looks curved on logarithmic axes.
_LINE_POINTS = 60


class TimedPoint(NamedTuple):
    """One batch size of a series."""

    batch_size: int
    time_ms: float  # Of a batch.
    time_bounds: tuple[float, float] | None  # Its 95 % interval.

    @property
    def samples_per_second(self) -> float:
        """Throughput, in examples per second."""
        return 1000 * self.batch_size / self.time_ms

    @property
    def rate_bounds(self) -> tuple[float, float] | None:
        """Throughput at the ends of the interval, None if it has none."""
        if self.time_bounds is None:
            return None
        low_ms, high_ms = self.time_bounds
        return 1000 * self.batch_size / high_ms, 1000 * self.batch_size / low_ms


class TimedSeries(NamedTuple):
    """One call path under one policy."""

    label: str
    call_path: str
    dtype_policy: str
    points: tuple[TimedPoint, ...]
    failed: tuple[int, ...]  # Batch sizes that ran out of memory.
    # The fitted time of a batch, in milliseconds, along the axis; empty where no line holds.
    line: tuple[tuple[float, float], ...]


class TargetMark(NamedTuple):
    """A latency target that was checked, and what was found."""

    latency_ms: float
    words: str


class InferenceInfo(NamedTuple):
    """What the figures show: all call paths and policies that were timed."""

    name: str
    series: tuple[TimedSeries, ...]
    answers: tuple[tuple[str, InferenceAnswer], ...]  # Of the first series.
    targets: tuple[TargetMark, ...]
    conditions: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending, those that ran out of memory included."""
        sizes = {p.batch_size for s in self.series for p in s.points}
        return tuple(sorted(sizes.union(*(s.failed for s in self.series))))


def inference_info(profile: InferenceProfile) -> InferenceInfo:
    """Compute what the figures of a profile show."""
    series = (_series(profile, path, policy) for path, policy in profile.series)
    timed = tuple(one for one in series if one.points)
    if not timed:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller batch sizes "
            f"or longer. Received: {len(profile.timings)} settings, none measured."
        )
    answers = []
    for name in ("knee", "efficient", "fastest"):
        try:
            answers.append((name, getattr(profile, name)))
        except ValueError:  # The measurements do not tell it.
            continue
    return InferenceInfo(
        profile.model_name,
        timed,
        tuple(answers),
        _targets(profile),
        conditions_line(profile, bars=any(p.time_bounds for one in timed for p in one.points)),
    )


def conditions_line(profile: InferenceProfile, *, bars: bool = False) -> str:
    """Write where and how often it was measured, parts separated by a middle dot."""
    parts = where_measured(profile.environment)
    rounds = [len(t.block_medians_s) for t in profile.timings if t.measured]
    if rounds:
        low, high = min(rounds), max(rounds)
        number = counted(low, "round") if low == high else f"{low:,} to {counted(high, 'round')}"
        explained = ", bars: 95 % interval of the median" if bars else ""
        parts.append(f"{number} a point{explained}")
    if profile.noise_floor is not None:
        parts.append(f"noise floor {percent(profile.noise_floor)}")
    return " · ".join(filter(None, (*parts, inference_clocks(profile))))


def inference_clocks(profile: InferenceProfile) -> str:
    """Say between which GPU clocks batches were timed, where they are far apart."""
    return clocks_text(
        (f"{t.batch_size:,} ({t.call_path}, {t.dtype_policy})", t.sm_clock_mhz)
        for t in profile.timings
        if t.measured
    )


def inference_alt_text(info: InferenceInfo) -> str:
    """Describe throughput and time by batch size in sentences, for those who do not see them."""
    sizes = info.batch_sizes
    sentences = [
        f"Charts over batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic axis, for "
        f"{listed(one.label for one in info.series)}."
    ]
    for one in info.series:
        best = max(one.points, key=lambda point: point.samples_per_second)
        sentences.append(
            f"{one.label}: at most {readable(best.samples_per_second)} samples/s, at batch size "
            f"{best.batch_size:,}, which takes {readable(best.time_ms)} ms."
        )
    for name, answer in info.answers:
        unmeasured = ", which was not measured" if answer.extrapolated else ""
        sentences.append(f"Marked as {name}: {answer.batch_size:,}{unmeasured}.")
    return " ".join(sentences)


def _series(profile: InferenceProfile, path: str, policy: str) -> TimedSeries:
    timings = [t for t in profile.timings if (t.call_path, t.dtype_policy) == (path, policy)]
    points = []
    for timing in timings:
        if timing.batch_time_s is not None:
            interval = timing.batch_time_interval_s
            bounds = (1000 * interval.low, 1000 * interval.high) if interval else None
            points.append(TimedPoint(timing.batch_size, 1000 * timing.batch_time_s, bounds))
    return TimedSeries(
        f"{path}, {policy}" if len({p for _, p in profile.series}) > 1 else path,
        path,
        policy,
        tuple(points),
        tuple(t.batch_size for t in timings if t.outcome == "out_of_memory"),
        _line(profile.select(call_path=path, dtype_policy=policy)),
    )


def _line(profile: InferenceProfile) -> tuple[tuple[float, float], ...]:
    """Return the fitted line from the smallest to the largest size that was timed."""
    try:
        latency = profile.latency
    except ValueError:  # Too little was timed.
        return ()
    if not latency.follows_line:
        return ()
    smallest, largest = latency.curve.batch_sizes[[0, -1]]
    places = np.geomspace(smallest, largest, _LINE_POINTS)
    return tuple((float(size), 1000 * latency.latency_s(size)) for size in places)


def _targets(profile: InferenceProfile) -> tuple[TargetMark, ...]:
    found: dict[tuple[float, float], str] = {}
    for check in profile.checks:
        asked = (check.latency_ms, check.quantile)
        name = f"p{100 * check.quantile:g} within {check.latency_ms:g} ms"
        found.setdefault(asked, f"{name}: no size verified")
        if check.best:
            found[asked] = f"{name}: batch size {check.batch_size:,}"
    return tuple(TargetMark(latency_ms, words) for (latency_ms, _), words in found.items())
