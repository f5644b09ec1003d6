"""The figures of an inference profile: by batch size, rate against time, and memory."""

import contextlib
import functools
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from kbatch.analysis.scaling_curve import MEASURED, OUT_OF_MEMORY
from kbatch.memory.figure import draw_peaks
from kbatch.memory.result import peaks_under
from kbatch.page.numbers import count_range, where_measured
from kbatch.page.result import Figure
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, ALARM_TEXT, MUTED, series_style
from kbatch.plotting.draw import batch_axis, plain_log_labels, rate_and_time_axes

if TYPE_CHECKING:
    from kbatch.inference.result import InferenceProfile

_BATCH_LABEL = "Batch size (examples per call)"
_TALL_IN, _LOW_IN = 5.4, 3.8


def plot_inference_throughput(profile: "InferenceProfile", ax: Axes | None = None) -> Axes:
    """Plot samples/s above and the time of a batch below, by batch size.

    Lines are the fit t(b) = (b + n_half) / r_inf where it holds; elsewhere they join the points.
    A latency target is drawn in the lower panel. Batch sizes that the first call path answers
    (knee, efficient, fastest) are marked, sizes that ran out of memory stand at the bottom edge.

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on, whose place two panels take; a new figure if None.

    Raises:
        ValueError: If nothing was timed.
    """
    timed = _timed(profile)
    upper, lower = canvas.panels(ax, _TALL_IN, (1, 1))
    shown = [t.batch_size for t in profile.timings if t.outcome in (MEASURED, OUT_OF_MEMORY)]
    batch_axis(lower, shown, _BATCH_LABEL)
    for index, (label, part) in enumerate(timed.items()):
        line_s = []
        with contextlib.suppress(ValueError):  # Too little was timed.
            line_s = part.latency.drawn
        draw.rates_and_times(upper, lower, index, part.answering, label=label, line_s=line_s)
        for timing in part.timings:
            if timing.outcome == OUT_OF_MEMORY:
                draw.missing(lower, timing.batch_size, words="out of memory")
    for target_ms, words in _targets(profile):
        draw.limit(lower, target_ms, words)
    rate_and_time_axes(upper, lower, "batch")
    answers = profile.answers.items()
    named = [(name, found.batch_size, not found.extrapolated) for name, found in answers]
    draw.answers(upper, named, min(shown), max(shown))
    bars = f"{_rounds(profile)}, bars: 95 % interval of the median"
    _write_texts(profile, (upper, lower), bars)
    return upper


def plot_inference_operating_curve(profile: "InferenceProfile", ax: Axes | None = None) -> Axes:
    """Plot samples/s against the time of a batch; each point is a batch size.

    Going right along a curve buys throughput with latency; where it turns flat, nothing is
    bought. The latency target is a vertical line. The arguments are those of
    `plot_inference_throughput`; a `ValueError` says that nothing was timed.
    """
    timed = _timed(profile)
    (panel,) = canvas.panels(ax, _LOW_IN)
    panel.set_xscale("log")
    canvas.vertical_grid(panel)
    for index, (label, part) in enumerate(timed.items()):
        points = [
            (1e3 * one.median_s, one.batch_size / one.median_s, one.batch_size)
            for one in part.answering
        ]
        times_ms, rates, _ = zip(*points, strict=True)
        draw.series(panel, index, times_ms, rates, label=label)
        color = series_style(index).color if index else MUTED
        # Sizes of the others are about the same: named all, none could be read.
        for time_ms, rate, size in points[-1:] if index else points:
            draw.text(panel, f"{size:,}", (time_ms, rate), (0, 6), va="baseline", color=color)
    for target_ms, _ in _targets(profile):
        panel.axvline(target_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
    draw.names_above(panel, _targets(profile), panel.get_xlim(), color=ALARM_TEXT)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    plain_log_labels(panel.xaxis)
    panel.set_xlabel("Time of a batch (ms)")
    panel.set_ylabel("Throughput (samples/s)")
    _write_texts(profile, (panel,), _rounds(profile))
    return panel


def plot_inference_memory(profile: "InferenceProfile", ax: Axes | None = None) -> Axes:
    """Plot the peak memory by batch size, the fitted line and the limit.

    Raises:
        ValueError: If no memory was measured.
    """
    policies = dict.fromkeys(record.dtype_policy for record in profile.memory)
    peaks = {policy: peaks_under(policy, profile.memory) for policy in policies}
    if not any(peaks.values()):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    (panel,) = canvas.panels(ax, _LOW_IN)
    batch_axis(panel, [record.batch_size for record in profile.memory], _BATCH_LABEL)
    lines = draw_peaks(panel, peaks, profile.memory_limit_bytes)
    for record in profile.memory:
        if record.outcome == "out_of_memory":
            draw.missing(panel, record.batch_size, words="out of memory")
    _write_texts(profile, (panel,), lines)
    return panel


def figures_of(profile: "InferenceProfile") -> tuple[Figure, ...]:
    """Return the figures for which a profile has data, undrawn."""
    found = []
    if any(timing.measured for timing in profile.timings):
        plot = functools.partial(plot_inference_throughput, profile)
        title = "Throughput and time of a batch"
        found.append(Figure("inference-throughput", title, _TALL_IN, plot))
        plot = functools.partial(plot_inference_operating_curve, profile)
        found.append(Figure("inference-operating-curve", "Rate against time", _LOW_IN, plot))
    if any(record.peak_bytes for record in profile.memory):
        plot = functools.partial(plot_inference_memory, profile)
        found.append(Figure("inference-memory", "Memory by batch size", _LOW_IN, plot))
    return tuple(found)


def _timed(profile: "InferenceProfile") -> "dict[str, InferenceProfile]":
    """Return the part of each call path and policy that was timed, by its name in a legend."""
    several = len({policy for _, policy in profile.series}) > 1
    parts = {
        f"{path}, {policy}" if several else path: profile.select(
            call_path=path, dtype_policy=policy
        )
        for path, policy in profile.series
    }
    timed = {label: part for label, part in parts.items() if part.answering}
    if not timed:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller batch sizes "
            f"or longer. Received: {len(profile.timings)} settings, none measured."
        )
    return timed


def _targets(profile: "InferenceProfile") -> list[tuple[float, str]]:
    """Return the latency target in ms and what was found for it, none without a target."""
    if profile.target_ms is None:
        return []
    found = "no size verified"
    if profile.verified is not None:
        found = f"batch size {profile.verified.batch_size:,}"
    within = f"p{100 * profile.quantile:g} within {profile.target_ms:g} ms"
    return [(profile.target_ms, f"{within}: {found}")]


def _rounds(profile: "InferenceProfile") -> str:
    measured = (timing for timing in profile.timings if timing.measured)
    return f"{count_range((len(t.times_s) for t in measured), 'round')} a point"


def _write_texts(profile: "InferenceProfile", panels: tuple[Axes, ...], words: str) -> None:
    canvas.write_title(panels[0], profile.model_name, columns=4)
    parts = [*where_measured(profile.environment), words]
    canvas.write_caption(panels, " · ".join(filter(None, parts)))
