"""The figures of an inference profile: what each shows, and its drawing."""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import calls_for_quantile, median_interval
from kbatch.inference.profile import InferenceAnswer, InferenceProfile
from kbatch.inference.record import TimingRecord
from kbatch.memory.result import peaks_under
from kbatch.memory.search import GUARD_SHARE, MemoryFit, fit_memory
from kbatch.page.environment import where_measured
from kbatch.page.numbers import count_range, format_number, join_words, memory_text, percent
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, plain_log_labels, rate_and_time_axes
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style

_BATCH_LABEL = "Batch size (examples per call)"
# A line looks curved on logarithmic axes.
_LINE_POINTS = 60
# Rounds of one size are spread over this much of an octave to each side.
_STRIP = 0.28
# Rounds beyond so many times what this share of them keeps to are marked at the edge: one round
# beside a neighbour would flatten all others.
_FAR, _MOST_ROUNDS = 2.0, 0.9
# Where these stand, and the end of the axis, which leaves room for the label of the band.
_EDGE, _ROOM = 1.2, 1.25


class TimedSeries(NamedTuple):
    label: str
    points: tuple[TimingRecord, ...]  # Those that were timed.
    times_ms: list[float]  # Of a batch, at each point.
    rates: list[float]  # Examples per second, at each point.
    failed: tuple[int, ...]  # Batch sizes that ran out of memory.
    line_s: tuple[tuple[float, float], ...]  # Fitted seconds along the axis, if a line holds.


class InferenceInfo(NamedTuple):
    series: tuple[TimedSeries, ...]
    answers: tuple[tuple[str, InferenceAnswer], ...]  # Of the first series.
    targets: tuple[tuple[float, str], ...]  # Latencies in ms that were checked, what was found.
    conditions: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        sizes = {p.batch_size for s in self.series for p in s.points}
        return tuple(sorted(sizes.union(*(s.failed for s in self.series))))


def inference_info(profile: InferenceProfile) -> InferenceInfo:
    several = len({policy for _, policy in profile.series}) > 1
    series = []
    for path, policy in profile.series:
        selected = profile.select(call_path=path, dtype_policy=policy)
        if timed := selected.answering:
            one = TimedSeries(
                f"{path}, {policy}" if several else path,
                timed,
                [1000 * (t.batch_time_s or 0.0) for t in timed],
                [t.samples_per_second or 0.0 for t in timed],
                tuple(t.batch_size for t in selected.timings if t.outcome == "out_of_memory"),
                _line(selected),
            )
            series.append(one)
    if not series:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller batch sizes "
            f"or longer. Received: {len(profile.timings)} settings, none measured."
        )
    answers = []
    for name in ("knee", "efficient", "fastest"):
        with contextlib.suppress(ValueError):  # The measurements do not tell it.
            answers.append((name, getattr(profile, name)))
    targets: dict[tuple[float, float], str] = {}
    for check in profile.checks:
        asked = (check.latency_ms, check.quantile)
        name = f"p{100 * check.quantile:g} within {check.latency_ms:g} ms"
        targets.setdefault(asked, f"{name}: no size verified")
        if check.best:
            targets[asked] = f"{name}: batch size {check.batch_size:,}"
    bars = any(point.batch_time_interval_s for one in series for point in one.points)
    return InferenceInfo(
        tuple(series),
        tuple(answers),
        tuple((latency_ms, words) for (latency_ms, _), words in targets.items()),
        conditions_line(profile, bars=bars),
    )


def _line(profile: InferenceProfile) -> tuple[tuple[float, float], ...]:
    with contextlib.suppress(ValueError):  # Too little was timed.
        latency = profile.latency
        if latency.follows_line:
            smallest, largest = latency.curve.batch_sizes[[0, -1]]
            places = np.geomspace(smallest, largest, _LINE_POINTS)
            return tuple((float(size), latency.latency_s(size)) for size in places)
    return ()


def conditions_line(profile: InferenceProfile, *, bars: bool = False) -> str:
    """Write where and how often it was measured, parts separated by a middle dot."""
    parts = where_measured(profile.environment)
    rounds = [len(t.block_medians_s) for t in profile.timings if t.measured]
    if rounds:
        explained = ", bars: 95 % interval of the median" if bars else ""
        parts.append(f"{count_range(rounds, 'round')} a point{explained}")
    if profile.noise_floor is not None:
        parts.append(f"noise floor {percent(profile.noise_floor)}")
    return " · ".join(parts)


def inference_alt_text(info: InferenceInfo) -> str:
    sizes = info.batch_sizes
    sentences = [
        f"Charts over batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic axis, for "
        f"{join_words(one.label for one in info.series)}."
    ]
    for one in info.series:
        best = int(np.argmax(one.rates))
        sentences.append(
            f"{one.label}: at most {format_number(one.rates[best])} samples/s, at batch size "
            f"{one.points[best].batch_size:,}, which takes {format_number(one.times_ms[best])} ms."
        )
    for name, answer in info.answers:
        unmeasured = ", which was not measured" if answer.extrapolated else ""
        sentences.append(f"Marked as {name}: {answer.batch_size:,}{unmeasured}.")
    return " ".join(sentences)


def _panel(profile: InferenceProfile, name: str, ax: Axes | None, sizes: Iterable[int]) -> Axes:
    """Make the panel of a figure whose numbers stand in the table of timings."""
    title, height_in, _ = FIGURES[name]
    (panel,) = canvas.panels(ax, height_in)
    series = join_words(f"{path} under {policy}" for path, policy in profile.series)
    panel.set_label(f"A chart: {title.lower()}, for {series}. Its numbers are in the table.")
    batch_axis(panel, sizes, _BATCH_LABEL)
    return panel


def plot_inference_throughput(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s above and the time of a batch below, by batch size.

    Lines are the fit t(b) = (b + n_half) / r_inf where it holds; elsewhere they join the points.
    Latency targets that were checked are drawn in the lower panel. Batch sizes that the first call
    path answers (knee, efficient, fastest) are marked, sizes that ran out of memory stand at the
    bottom edge.

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on, whose place two panels take; a new figure if None.

    Raises:
        ValueError: If nothing was timed.
    """
    info = inference_info(profile)
    upper, lower = canvas.panels(ax, FIGURES["throughput"][1], (1, 1))
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
    canvas.write_title(upper, profile.model_name, columns=4)
    named = ((name, answer.batch_size, not answer.extrapolated) for name, answer in info.answers)
    draw.answers(upper, named, info.batch_sizes[0], info.batch_sizes[-1])
    canvas.write_caption(lower, info.conditions)
    return upper


def plot_inference_operating_curve(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s against the time of a batch; each point is a batch size.

    Going right along a curve buys throughput with latency; where it turns flat, nothing is
    bought. Targets that were checked are vertical lines. The arguments are those of
    `plot_inference_throughput`, as for the figures below; a `ValueError` says that nothing was
    timed.
    """
    info = inference_info(profile)
    (panel,) = canvas.panels(ax, FIGURES["operating_curve"][1])
    panel.set_label(inference_alt_text(info))
    panel.set_xscale("log")
    canvas.vertical_grid(panel)
    for index, one in enumerate(info.series):
        draw.series(panel, index, one.times_ms, one.rates, label=one.label)
        named = list(zip(one.points, one.times_ms, one.rates, strict=True))
        color = series_style(index).color if index else MUTED
        # Sizes of the others are about the same: named all, none could be read.
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
    canvas.write_title(panel, profile.model_name, columns=4)
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

    def by_round(point: TimingRecord) -> dict[int, float]:
        return dict(zip(point.block_rounds, point.batch_times_s, strict=True))

    of_first, ratios = {point.batch_size: by_round(point) for point in first.points}, []
    for label, point in ((other.label, point) for other in others for point in other.points):
        times_s, size = of_first.get(point.batch_size, {}), point.batch_size
        found = [times_s[i] / time_s for i, time_s in by_round(point).items() if i in times_s]
        if found:
            median, bounds = float(np.median(found)), draw.ends(median_interval(found))
            ratios.append(PathRatio(label, size, median, bounds))
    if not ratios:
        raise ValueError(
            "A figure of call paths needs two of them, or two policies, timed at one batch size: "
            'profile with `call_paths=("compiled", "xla")`, say. '
            f"Received: {len(others) + 1} timed."
        )
    return tuple(ratios)


def plot_inference_paths(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot how many times as fast as the first call path each other one is, by batch size.

    Raises:
        ValueError: If there are no other call paths or policies, with what to measure.
    """
    info, ratios = inference_info(profile), path_ratios(profile)
    panel = _panel(profile, "paths", ax, [ratio.batch_size for ratio in ratios])
    first, *others = info.series
    # A ratio between two ticks cannot be read off: the last one of each series is written.
    last, sides = [], ((0, 1), (0, -1), (-1, 1), (-1, -1))
    for index, other in enumerate(others, start=1):
        shown = [ratio for ratio in ratios if ratio.label == other.label]
        if shown:
            _, sizes, values, bounds = zip(*shown, strict=True)
            draw.series(panel, index, sizes, values, label=other.label, bounds=bounds)
            place, color = (sizes[-1], values[-1]), series_style(index).color
            last.append(draw.Label(place, format_number(values[-1]), sides, color))
    panel.axhline(1, color=MUTED, linewidth=1.0, linestyle="--")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    draw.place_labels(panel, last, [(p.batch_size, p.times_as_fast) for p in ratios])
    panel.set_ylabel(f"Times as fast as\n{first.label}")
    canvas.write_title(panel, profile.model_name, columns=4, fewest=1)
    canvas.write_caption(panel, info.conditions)
    return panel


class MemorySeries(NamedTuple):
    label: str
    peak_bytes: dict[int, int]  # By batch size, where it was measured.
    failed: tuple[int, ...]  # Sizes that ran out of memory.
    guarded: tuple[int, ...]  # Sizes that were not run, since they were expected to.
    fit: MemoryFit | None
    largest_expected: int | None  # To stay below 80 % of the limit; None if not known.


def memory_series(profile: InferenceProfile) -> tuple[MemorySeries, ...]:
    series = []
    for policy in dict.fromkeys(m.dtype_policy for m in profile.memory):
        records = [m for m in profile.memory if m.dtype_policy == policy]
        known = peaks_under(policy, records)
        fit = fit_memory(known)
        largest, most_bytes = 0, GUARD_SHARE * (profile.memory_limit_bytes or 0)
        # Less than a byte an example is rounding, not growth.
        if fit is not None and fit.bytes_per_example >= 1:
            largest = int(max(0.0, fit.largest_within(most_bytes)))
            # What was seen counts more than the line.
            largest = min([largest, *(size - 1 for size in known if known[size] > most_bytes)])
        failed = tuple(m.batch_size for m in records if m.outcome == "out_of_memory")
        guarded = tuple(m.batch_size for m in records if m.guarded)
        series.append(MemorySeries(policy, known, failed, guarded, fit, largest or None))
    if not any(one.peak_bytes for one in series):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    return tuple(series)


def plot_inference_memory(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot the peak memory by batch size, the fitted line and the limit.

    Raises:
        ValueError: If no memory was measured.
    """
    found = memory_series(profile)
    sizes = {size for one in found for size in (*one.peak_bytes, *one.failed, *one.guarded)}
    panel = _panel(profile, "memory", ax, sizes)
    notes = [conditions_line(profile)]
    for index, one in enumerate(found):
        if one.fit is not None:
            places = np.geomspace(min(sizes), max(sizes), _LINE_POINTS)
            values = one.fit.fixed_bytes + places * one.fit.bytes_per_example
            shown, color = values > 0, series_style(index).color
            panel.plot(places[shown], values[shown], color=color, linewidth=1.0, linestyle=":")
        known, peaks = list(one.peak_bytes), list(one.peak_bytes.values())
        draw.series(panel, index, known, peaks, label=one.label, joined=False)
        for size in one.failed:
            draw.missing(panel, size, words="out of memory")
        if (size := one.largest_expected) is not None:
            notes.append(f"{one.label}: batches up to {size:,} are expected to stay below 80 %")
    if (limit_bytes := profile.memory_limit_bytes) is not None:
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}")
        guard_bytes, words = GUARD_SHARE * limit_bytes, "80 %: nothing expected above is run"
        draw.limit(panel, guard_bytes, words, color=MUTED, below=True)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory, weights included")
    canvas.write_title(panel, profile.model_name, columns=4)
    canvas.write_caption(panel, *notes)
    return panel


def tail_bounds(profile: InferenceProfile) -> dict[tuple[int, float], float | None]:
    """Bound the latency in seconds, by batch size and quantile, for the first path and policy."""
    timings = [timing for timing in profile.answering if not timing.bulk]
    if not timings:
        raise ValueError(
            "Tails need single calls of batches, and the first call path has none: select another "
            f"one (`profile.select`). Received: series={profile.series}."
        )
    quantiles = sorted({0.5, 0.95, 0.99, profile.quantile})
    return {(t.batch_size, q): t.latency_bound(q) for q in quantiles for t in timings}


def plot_inference_tails(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot upper bounds of the latency's quantiles by batch size, for the first call path.

    A quantile is shown where enough calls were made; elsewhere the figure says how many it lacks.

    Raises:
        ValueError: If there are no single calls.
    """
    bounds, notes = tail_bounds(profile), []
    panel = _panel(profile, "tails", ax, [size for size, _ in bounds])
    for index, quantile in enumerate(dict.fromkeys(quantile for _, quantile in bounds)):
        of = {size: bound for (size, q), bound in bounds.items() if q == quantile}
        known_ms = {size: 1000 * bound for size, bound in of.items() if bound is not None}
        needed, calls = calls_for_quantile(quantile), {t.batch_size: t for t in profile.answering}
        missing = {
            size: needed - len(calls[size].latencies_s) for size in of if size not in known_ms
        }
        label = f"p{100 * quantile:g}"
        if known_ms:
            draw.series(panel, index, list(known_ms), list(known_ms.values()), label=label)
        if missing:
            sizes, most = join_words(f"{size:,}" for size in missing), max(missing.values())
            notes.append(f"{label} at batch size {sizes} needs up to {most:,} more calls.")
    panel.set_yscale("log")
    plain_log_labels(panel.yaxis)
    panel.set_ylabel("Latency, upper 95 % bound\nof the quantile (ms)")
    title = f"{profile.model_name}: {', '.join(profile.series[0])}"
    canvas.write_title(panel, title, columns=4, fewest=1)
    if not panel.lines:
        canvas.write_message(panel, "n/a (too few calls for any quantile)")
    canvas.write_caption(panel, conditions_line(profile), *notes)
    return panel


def noise_deviations(profile: InferenceProfile) -> dict[int, np.ndarray]:
    """Compute each round's distance from the median of its size, as a share of it, in order."""
    times = {t.batch_size: np.asarray(t.block_medians_s) for t in profile.answering}
    if not times:
        raise ValueError(
            "The first call path has no time, so no noise either: select another one "
            f"(`profile.select`). Received: series={profile.series}."
        )
    return {size: values / np.median(values) - 1 for size, values in times.items()}


def noise_reach(distances: np.ndarray, floor: float | None) -> float:
    farthest, usual = np.max(distances), _FAR * np.quantile(distances, _MOST_ROUNDS)
    return max(floor or 0.0, float(usual if 0 < usual < farthest else farthest)) or 0.01


def plot_inference_noise(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot each round's distance from the median of its batch size, in order of time.

    The band is the noise floor of the A/A test: smaller differences of two settings mean nothing.
    A few rounds far beyond the others are triangles at the edge; the caption names the farthest.

    Raises:
        ValueError: If nothing was timed on the first call path.
    """
    deviations, floor = noise_deviations(profile), profile.noise_floor
    panel = _panel(profile, "noise", ax, deviations)
    distances = np.abs(np.concatenate([*deviations.values()]))
    reach = noise_reach(distances, floor)
    panel.set_ylim(-_ROOM * reach, _ROOM * reach)
    panel.axhline(0, color=MUTED, linewidth=0.8)
    if floor is not None:
        panel.axhspan(-floor, floor, color=MUTED, alpha=0.15, linewidth=0)
        words, edge = f"noise floor {percent(floor)}", panel.get_yaxis_transform()
        draw.text(panel, words, (0.99, floor), (0, 2), ha="right", va="bottom", xycoords=edge)
    plain = {"linestyle": "none", "markeredgewidth": 0}
    dots = plain | {"markersize": 3.5, "color": series_style(0).color, "alpha": 0.6}
    far = plain | {"markersize": 6, "color": ALARM}
    for size, values in deviations.items():
        places = size * 2 ** np.linspace(-_STRIP, _STRIP, len(values))
        up, down = values > reach, values < -reach
        for marker, shown, look in (("o", ~(up | down), dots), ("^", up, far), ("v", down, far)):
            if shown.any():
                clipped = np.clip(values[shown], -_EDGE * reach, _EDGE * reach)
                panel.plot(places[shown], clipped, marker=marker, **look)
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f} %" if value else "0 %")
    panel.set_ylabel("Distance of a round\nfrom the median")
    canvas.write_title(panel, f"{profile.model_name}: {', '.join(profile.series[0])}")
    note, beyond = "", int(np.sum(distances > reach))
    if beyond:
        each = [(value, size) for size, values in deviations.items() for value in values]
        farthest, size = max(each, key=lambda one: abs(one[0]))
        note = (
            f"{beyond:,} {'round lies' if beyond == 1 else 'rounds lie'} beyond the axis "
            f"(triangles), the farthest at {100 * farthest:+.0f} %, batch size {size:,}"
        )
    canvas.write_caption(panel, conditions_line(profile), note)
    return panel


# Title, height in inches, and what computes the data and raises `ValueError` where a profile has
# none, by the name behind `plot_inference_`.
FIGURES = {
    "throughput": ("Throughput and time of a batch", 5.4, inference_info),
    "operating_curve": ("Throughput against the time of a batch", 3.8, inference_info),
    "tails": ("Tails of the latency", 3.8, tail_bounds),
    "paths": ("Call paths against the first one", 3.8, path_ratios),
    "memory": ("Memory by batch size", 3.8, memory_series),
    "noise": ("Scatter of the rounds", 2.8, noise_deviations),
}
