"""The figures of an inference profile: what each shows, and its drawing."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import median_interval
from kbatch.document.numbers import (
    count_range,
    format_number,
    join_words,
    memory_text,
    percent,
    pluralize,
)
from kbatch.document.section import clocks_text, where_measured
from kbatch.inference.profile import InferenceAnswer, InferenceProfile
from kbatch.inference.record import TimingRecord
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, plain_log_labels, rate_and_time_axes
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style

# By the name behind `plot_inference_`.
HEIGHTS_IN = {
    "throughput": 5.4,
    "operating_curve": 3.8,
    "tails": 3.8,
    "paths": 3.8,
    "memory": 3.8,
    "noise": 2.8,
}
TITLES = {
    "throughput": "Throughput and time of a batch",
    "operating_curve": "Throughput against the time of a batch",
    "tails": "Tails of the latency",
    "paths": "Call paths against the first one",
    "memory": "Memory by batch size",
    "noise": "Scatter of the rounds",
}
_BATCH_LABEL = "Batch size (examples per call)"
# A line looks curved on logarithmic axes.
_LINE_POINTS = 60


class TimedSeries(NamedTuple):
    """One call path under one policy."""

    label: str
    call_path: str
    dtype_policy: str
    points: tuple[TimingRecord, ...]  # Those that were timed.
    failed: tuple[int, ...]  # Batch sizes that ran out of memory.
    # The fitted time of a batch, in seconds, along the axis; empty where no line holds.
    line_s: tuple[tuple[float, float], ...]

    @property
    def times_ms(self) -> list[float]:
        """The time of a batch at each point."""
        return [1000 * (point.batch_time_s or 0.0) for point in self.points]

    @property
    def rates(self) -> list[float]:
        """The throughput at each point, in examples per second."""
        return [point.samples_per_second or 0.0 for point in self.points]


class InferenceInfo(NamedTuple):
    """What the figures show: all call paths and policies that were timed."""

    name: str
    series: tuple[TimedSeries, ...]
    answers: tuple[tuple[str, InferenceAnswer], ...]  # Of the first series.
    targets: tuple[tuple[float, str], ...]  # Latencies in ms that were checked, what was found.
    conditions: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending, those that ran out of memory included."""
        sizes = {p.batch_size for s in self.series for p in s.points}
        return tuple(sorted(sizes.union(*(s.failed for s in self.series))))


def inference_info(profile: InferenceProfile) -> InferenceInfo:
    """Compute what the figures of a profile show."""
    several = len({policy for _, policy in profile.series}) > 1
    series = []
    for path, policy in profile.series:
        timings = [t for t in profile.timings if (t.call_path, t.dtype_policy) == (path, policy)]
        timed = tuple(t for t in timings if t.measured)
        failed = tuple(t.batch_size for t in timings if t.outcome == "out_of_memory")
        label = f"{path}, {policy}" if several else path
        if timed:
            line = _line(profile.select(call_path=path, dtype_policy=policy))
            series.append(TimedSeries(label, path, policy, timed, failed, line))
    if not series:
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
    targets: dict[tuple[float, float], str] = {}
    for check in profile.checks:
        asked = (check.latency_ms, check.quantile)
        name = f"p{100 * check.quantile:g} within {check.latency_ms:g} ms"
        targets.setdefault(asked, f"{name}: no size verified")
        if check.best:
            targets[asked] = f"{name}: batch size {check.batch_size:,}"
    return InferenceInfo(
        profile.model_name,
        tuple(series),
        tuple(answers),
        tuple((latency_ms, words) for (latency_ms, _), words in targets.items()),
        conditions_line(
            profile, bars=any(p.batch_time_interval_s for one in series for p in one.points)
        ),
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
    return tuple((float(size), latency.latency_s(size)) for size in places)


def conditions_line(profile: InferenceProfile, *, bars: bool = False) -> str:
    """Write where and how often it was measured, parts separated by a middle dot."""
    parts = where_measured(profile.environment)
    rounds = [len(t.block_medians_s) for t in profile.timings if t.measured]
    if rounds:
        explained = ", bars: 95 % interval of the median" if bars else ""
        parts.append(f"{count_range(rounds, 'round')} a point{explained}")
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
        f"{join_words(one.label for one in info.series)}."
    ]
    for one in info.series:
        rate, time_ms, size = max(
            zip(one.rates, one.times_ms, (p.batch_size for p in one.points), strict=True)
        )
        sentences.append(
            f"{one.label}: at most {format_number(rate)} samples/s, at batch size {size:,}, which "
            f"takes {format_number(time_ms)} ms."
        )
    for name, answer in info.answers:
        unmeasured = ", which was not measured" if answer.extrapolated else ""
        sentences.append(f"Marked as {name}: {answer.batch_size:,}{unmeasured}.")
    return " ".join(sentences)


def _brief_alt_text(profile: InferenceProfile, name: str) -> str:
    """Describe a figure whose numbers stand in the table of timings."""
    series = join_words(f"{path} under {policy}" for path, policy in profile.series)
    return f"A chart: {TITLES[name].lower()}, for {series}. The table of timings has the numbers."


def plot_inference_throughput(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s above and the time of a batch below, by batch size.

    Lines are the fit t(b) = (b + n_half) / r_inf where it holds; elsewhere they join the points.
    Latency targets that were checked are drawn in the lower panel. Batch sizes that the first call
    path answers (knee, efficient, fastest) are marked, sizes that ran out of memory stand at the
    bottom edge.

    Example:

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the upper panel; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If nothing was timed.
    """
    info = inference_info(profile)
    upper, lower = canvas.panels(ax, HEIGHTS_IN["throughput"], (1, 1))
    upper.set_label(inference_alt_text(info))
    batch_axis(lower, info.batch_sizes, _BATCH_LABEL)
    for index, one in enumerate(info.series):
        timings = [
            draw.Timing(p.batch_size, p.batch_size, p.batch_time_s or 0.0, p.batch_time_interval_s)
            for p in one.points
        ]
        draw.rates_and_times(upper, lower, index, timings, label=one.label, line_s=one.line_s)
        for size in one.failed:
            draw.missing(lower, size, words="out of memory")
    for latency_ms, found in info.targets:
        draw.limit(lower, latency_ms, found)
    rate_and_time_axes(upper, lower, "batch")
    canvas.write_title(upper, info.name, columns=4)
    named = ((name, answer.batch_size, not answer.extrapolated) for name, answer in info.answers)
    draw.answers(upper, named, info.batch_sizes[0], info.batch_sizes[-1])
    canvas.write_caption(lower, info.conditions)
    return upper


def plot_inference_operating_curve(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s against the time of a batch; each point is a batch size.

    Going right along a curve buys throughput with latency; where it turns flat, nothing is
    bought. Targets that were checked are vertical lines.

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If nothing was timed.
    """
    info = inference_info(profile)
    (panel,) = canvas.panels(ax, HEIGHTS_IN["operating_curve"])
    panel.set_label(inference_alt_text(info))
    panel.set_xscale("log")
    canvas.vertical_grid(panel)
    for index, one in enumerate(info.series):
        draw.series(panel, index, one.times_ms, one.rates, label=one.label)
        named = list(zip(one.points, one.times_ms, one.rates, strict=True))
        color = series_style(index).color if index else MUTED
        # The sizes of the others are about the same: only their ends are named, or none could be
        # read.
        for point, time_ms, rate in named[-1:] if index else named:
            words = f"{point.batch_size:,}"
            draw.text(panel, words, (time_ms, rate), (0, 6), va="baseline", color=color)
    for latency_ms, _ in info.targets:
        panel.axvline(latency_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
    draw.names_above(panel, info.targets, panel.get_xlim(), color=ALARM_TEXT)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    plain_log_labels(panel.xaxis)
    panel.set_xlabel("Time of a batch (ms)")
    panel.set_ylabel("Throughput (samples/s)")
    canvas.write_title(panel, info.name, columns=4)
    canvas.write_caption(panel, conditions_line(profile))
    return panel


class PathRatio(NamedTuple):
    """How fast one series is at one batch size, measured in the same rounds as the first."""

    label: str
    batch_size: int
    times_as_fast: float  # Median over the rounds.
    bounds: tuple[float, float] | None  # Its 95 % interval, None from fewer than six rounds.


def path_ratios(profile: InferenceProfile) -> tuple[PathRatio, ...]:
    """Compare every series with the first, round by round."""
    first, *others = inference_info(profile).series
    reference = {timing.batch_size: timing for timing in first.points}
    ratios = []
    for other in others:
        for point in other.points:
            one = reference.get(point.batch_size)
            pairs = zip(one.block_rounds, one.batch_times_s, strict=True) if one else ()
            theirs = dict(zip(point.block_rounds, point.batch_times_s, strict=True))
            found = [time_s / theirs[number] for number, time_s in pairs if number in theirs]
            if found:
                bounds = draw.ends(median_interval(found))
                median = statistics.median(found)
                ratios.append(PathRatio(other.label, point.batch_size, median, bounds))
    if not ratios:
        raise ValueError(
            "A figure of call paths needs two of them, or two policies, timed at one batch size: "
            'profile with `call_paths=("compiled", "xla")`, say. '
            f"Received: {len(others) + 1} timed."
        )
    return tuple(ratios)


# Height of a number beside a point, as a share of the panel's.
_LABEL_SHARE = 0.055


def label_places(ratios: Sequence[PathRatio], apart: float) -> tuple[tuple[PathRatio, float], ...]:
    """Find where the numbers of the last points stand, one above the other."""
    last = {ratio.label: ratio for ratio in ratios}.values()
    places: list[tuple[PathRatio, float]] = []
    for ratio in sorted(last, key=lambda one: (one.batch_size, one.times_as_fast)):
        place = ratio.times_as_fast
        if places and places[-1][0].batch_size == ratio.batch_size:
            place = max(place, places[-1][1] * 2**apart)
        places.append((ratio, place))
    return tuple(places)


def plot_inference_paths(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot how many times as fast as the first call path each other one is, by batch size.

    Args:
        profile: A profile with several call paths or policies.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If there is nothing to compare, with what to measure.
    """
    info, ratios = inference_info(profile), path_ratios(profile)
    (panel,) = canvas.panels(ax, HEIGHTS_IN["paths"])
    panel.set_label(_brief_alt_text(profile, "paths"))
    batch_axis(panel, [ratio.batch_size for ratio in ratios], _BATCH_LABEL)
    labels = [one.label for one in info.series]
    for index, label in enumerate(labels[1:], start=1):
        shown = [ratio for ratio in ratios if ratio.label == label]
        sizes, values = [p.batch_size for p in shown], [p.times_as_fast for p in shown]
        draw.series(panel, index, sizes, values, label=label, bounds=[p.bounds for p in shown])
    panel.axhline(1, color=MUTED, linewidth=1.0, linestyle="--")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    low, high = np.log2(panel.get_ylim())
    for ratio, place in label_places(ratios, _LABEL_SHARE * (high - low)):
        # A ratio between two ticks cannot be read off.
        color = series_style(labels.index(ratio.label)).color
        words = format_number(ratio.times_as_fast)
        draw.text(panel, words, (ratio.batch_size, place), (7, 0), ha="left", color=color)
    panel.set_ylabel(f"Times as fast as\n{labels[0]}")
    canvas.write_title(panel, info.name, columns=4, fewest=1)
    canvas.write_caption(panel, info.conditions)
    return panel


# The share of the limit beyond which no batch is run.
_GUARD_SHARE = 0.80
_CURVE_POINTS = 200


class MemorySeries(NamedTuple):
    """The memory under one policy."""

    label: str
    peak_bytes: dict[int, int]  # By the batch sizes that were measured.
    failed: tuple[int, ...]  # Sizes that ran out of memory.
    guarded: tuple[int, ...]  # Sizes that were not run, since they were expected to.
    fit: MemoryFit | None
    # To stay below 80 % of the limit; None where memory does not grow or is not known.
    largest_expected: int | None


def memory_series(profile: InferenceProfile) -> tuple[MemorySeries, ...]:
    """Compute the memory under each policy."""
    series = []
    for policy in dict.fromkeys(m.dtype_policy for m in profile.memory):
        records = [m for m in profile.memory if m.dtype_policy == policy]
        known = {m.batch_size: m.peak_bytes for m in records if m.peak_bytes is not None}
        fit = fit_memory({size: float(peak) for size, peak in known.items()})
        largest, limit_bytes = 0, profile.memory_limit_bytes
        # Less than a byte an example is rounding, not growth.
        if fit is not None and limit_bytes is not None and fit.bytes_per_example >= 1:
            largest = int((_GUARD_SHARE * limit_bytes - fit.fixed_bytes) / fit.bytes_per_example)
        failed = tuple(m.batch_size for m in records if m.outcome == "out_of_memory")
        guarded = tuple(m.batch_size for m in records if m.guarded)
        expected = largest if largest >= 1 else None
        series.append(MemorySeries(policy, known, failed, guarded, fit, expected))
    if not any(one.peak_bytes for one in series):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    return tuple(series)


def plot_inference_memory(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot the peak memory by batch size, the fitted line and the limit.

    Args:
        profile: A profile whose memory was measured.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If no memory was measured.
    """
    found = memory_series(profile)
    (panel,) = canvas.panels(ax, HEIGHTS_IN["memory"])
    panel.set_label(_brief_alt_text(profile, "memory"))
    sizes = {size for one in found for size in (*one.peak_bytes, *one.failed, *one.guarded)}
    batch_axis(panel, sizes, _BATCH_LABEL)
    notes = [conditions_line(profile)]
    for index, one in enumerate(found):
        if one.fit is not None:
            places = np.geomspace(min(sizes), max(sizes), _CURVE_POINTS)
            values = one.fit.fixed_bytes + places * one.fit.bytes_per_example
            shown, color = values > 0, series_style(index).color
            panel.plot(places[shown], values[shown], color=color, linewidth=1.0, linestyle=":")
        known, peaks = list(one.peak_bytes), list(one.peak_bytes.values())
        draw.series(panel, index, known, peaks, label=one.label, joined=False)
        for size in one.failed:
            draw.missing(panel, size, words="out of memory")
        if one.largest_expected is not None:
            largest = f"batches up to {one.largest_expected:,}"
            notes.append(f"{one.label}: {largest} are expected to stay below 80 %")
    if (limit_bytes := profile.memory_limit_bytes) is not None:
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}")
        guard_bytes, words = _GUARD_SHARE * limit_bytes, "80 %: nothing above is run"
        draw.limit(panel, guard_bytes, words, color=MUTED, below=True)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory, weights included")
    canvas.write_title(panel, profile.model_name, columns=4)
    canvas.write_caption(panel, *notes)
    return panel


QUANTILES = (0.5, 0.95, 0.99)


class TailPoint(NamedTuple):
    """A quantile of the latency at one batch size."""

    batch_size: int
    quantile: float
    bound_ms: float | None  # Its upper 95 % bound, None with too few calls.
    missing_calls: int  # How many more it needs.


def tail_points(profile: InferenceProfile) -> tuple[TailPoint, ...]:
    """Compute the bounds for the first call path and policy."""
    timings = [timing for timing in profile.answering if not timing.bulk]
    if not timings:
        raise ValueError(
            "Tails need single calls of batches, and the first call path has none: select another "
            f"one (`profile.select`). Received: series={profile.series}."
        )
    points = []
    for timing in timings:
        for quantile in sorted({*QUANTILES, profile.quantile}):
            bound = timing.latency_bound(quantile)
            bound_ms = None if bound.value is None else 1000 * bound.value
            points.append(TailPoint(timing.batch_size, quantile, bound_ms, bound.missing_calls))
    return tuple(points)


def plot_inference_tails(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot upper bounds of the latency's quantiles by batch size, for the first call path.

    A quantile is shown only where enough calls were made; elsewhere the figure says how many more
    it needs.

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If there are no single calls.
    """
    points = tail_points(profile)
    (panel,) = canvas.panels(ax, HEIGHTS_IN["tails"])
    panel.set_label(_brief_alt_text(profile, "tails"))
    batch_axis(panel, [point.batch_size for point in points], _BATCH_LABEL)
    for index, quantile in enumerate(sorted({point.quantile for point in points})):
        bounds = {p.batch_size: p.bound_ms for p in points if p.quantile == quantile}
        known = {size: bound_ms for size, bound_ms in bounds.items() if bound_ms is not None}
        if known:
            label = f"p{100 * quantile:g}"
            draw.series(panel, index, list(known), list(known.values()), label=label)
    panel.set_yscale("log")
    plain_log_labels(panel.yaxis)
    panel.set_ylabel("Latency, upper 95 % bound\nof the quantile (ms)")
    path, policy = profile.series[0]
    canvas.write_title(panel, f"{profile.model_name}: {path}, {policy}", columns=4, fewest=1)
    if not panel.lines:
        canvas.write_message(panel, "n/a (too few calls for any quantile)")
    canvas.write_caption(panel, conditions_line(profile), *missing_notes(points))
    return panel


def missing_notes(points: tuple[TailPoint, ...]) -> tuple[str, ...]:
    """Describe which quantiles need more calls, and how many at most."""
    notes = []
    for quantile in sorted({point.quantile for point in points}):
        missing = [p for p in points if p.quantile == quantile and p.missing_calls]
        if missing:
            sizes = join_words(f"{p.batch_size:,}" for p in missing)
            most = max(p.missing_calls for p in missing)
            notes.append(
                f"p{100 * quantile:g} at batch size {sizes} needs up to {most:,} more calls."
            )
    return tuple(notes)


# Rounds of one size are spread over this much of an octave.
_STRIP = 0.28
# Room above the farthest round, for the label of the band.
_ROOM = 1.25
# Rounds beyond so many times what this share of them keeps to are marked at the edge: one round
# beside a neighbour would flatten all others.
_FAR, _MOST_ROUNDS = 2.0, 0.9
_EDGE = 0.96
# Of rounds that are all alike.
_LEAST_REACH = 0.01


class NoisePoint(NamedTuple):
    """One round of one batch size."""

    batch_size: int
    place: float  # Where it is drawn on the batch axis.
    deviation: float  # Distance from the median of its size, as a share of it.


def noise_points(profile: InferenceProfile) -> tuple[NoisePoint, ...]:
    """Compute the deviations of the rounds, for the first call path and policy."""
    points = []
    for timing in profile.answering:
        size, median = timing.batch_size, statistics.median(timing.block_medians_s)
        last = max(1, len(timing.block_medians_s) - 1)
        for i, value in enumerate(timing.block_medians_s):
            place = size * 2 ** (_STRIP * (2 * i / last - 1))
            points.append(NoisePoint(size, place, value / median - 1))
    if not points:
        raise ValueError(
            "The first call path has no time, so no noise either: select another one "
            f"(`profile.select`). Received: series={profile.series}."
        )
    return tuple(points)


def noise_reach(points: Sequence[NoisePoint], floor: float | None) -> float:
    """Return how far the axis reaches to each side."""
    distances = [abs(point.deviation) for point in points]
    farthest = max(distances)
    usual = _FAR * float(np.quantile(distances, _MOST_ROUNDS))
    return max(floor or 0.0, usual if 0 < usual < farthest else farthest) or _LEAST_REACH


def plot_inference_noise(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot each round's distance from the median of its batch size, in order of time.

    The band is the noise floor of the A/A test: smaller differences of two settings mean nothing.
    A few rounds that lie far beyond the others are triangles at the edge, and the caption
    names the farthest.

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure.

    Raises:
        ValueError: If nothing was timed on the first call path.
    """
    points = noise_points(profile)
    (panel,) = canvas.panels(ax, HEIGHTS_IN["noise"])
    panel.set_label(_brief_alt_text(profile, "noise"))
    batch_axis(panel, [point.batch_size for point in points], _BATCH_LABEL)
    floor = profile.noise_floor
    reach = noise_reach(points, floor)
    panel.set_ylim(-_ROOM * reach, _ROOM * reach)
    panel.axhline(0, color=MUTED, linewidth=0.8)
    if floor is not None:
        panel.axhspan(-floor, floor, color=MUTED, alpha=0.15, linewidth=0)
        place, edge = (0.99, floor), panel.get_yaxis_transform()
        words = f"noise floor {percent(floor)}"
        draw.text(panel, words, place, (0, 2), ha="right", va="bottom", xycoords=edge)
    plain = {"linestyle": "none", "markeredgewidth": 0}
    within = [(p.place, p.deviation) for p in points if abs(p.deviation) <= reach]
    style = {"marker": "o", "markersize": 3.5, "color": series_style(0).color, "alpha": 0.6}
    panel.plot(*zip(*within, strict=True), **plain, **style)
    beyond = [point for point in points if abs(point.deviation) > reach]
    for point in beyond:
        edge = math.copysign(_EDGE * _ROOM * reach, point.deviation)
        marker = "^" if point.deviation > 0 else "v"
        panel.plot([point.place], [edge], marker=marker, markersize=6, color=ALARM, **plain)
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f} %" if value else "0 %")
    panel.set_ylabel("Distance of a round\nfrom the median")
    path, policy = profile.series[0]
    canvas.write_title(panel, f"{profile.model_name}: {path}, {policy}")
    note = ""
    if beyond:
        farthest = max(beyond, key=lambda point: abs(point.deviation))
        note = (
            f"{pluralize(len(beyond), 'round')} {'lies' if len(beyond) == 1 else 'lie'} beyond the "
            f"axis (triangles), the farthest at {100 * farthest.deviation:+.0f} %, batch size "
            f"{farthest.batch_size:,}"
        )
    canvas.write_caption(panel, conditions_line(profile), note)
    return panel
