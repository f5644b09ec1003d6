"""The figures of an inference profile: by batch size, rate against time, and memory."""

import contextlib
import functools
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.rows import MEASURED, OUT_OF_MEMORY
from kbatch.memory.result import peaks_under
from kbatch.memory.search import GUARD_SHARE, fit_memory
from kbatch.page.content import Figure
from kbatch.page.environment import where_measured
from kbatch.page.numbers import count_range, format_number, join_words, memory_text
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, plain_log_labels, rate_and_time_axes
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style

if TYPE_CHECKING:
    from kbatch.inference.result import InferenceProfile

_BATCH_LABEL = "Batch size (examples per call)"
_TALL_IN, _LOW_IN = 5.4, 3.8
# A line looks curved on logarithmic axes.
_LINE_POINTS = 60


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
        rows, line_s = [timing.row for timing in part.answering], _line_s(part)
        draw.rates_and_times(upper, lower, index, rows, label=label, line_s=line_s)
        for timing in part.timings:
            if timing.outcome == OUT_OF_MEMORY:
                draw.missing(lower, timing.batch_size, words="out of memory")
    for target_ms, words in _targets(profile):
        draw.limit(lower, target_ms, words)
    rate_and_time_axes(upper, lower, "batch")
    canvas.write_title(upper, profile.model_name, columns=4)
    answers = profile.answers
    named = ((name, found.batch_size, not found.extrapolated) for name, found in answers.items())
    draw.answers(upper, named, min(shown), max(shown))
    canvas.write_caption(lower, f"{_conditions(profile)}, bars: 95 % interval of the median")
    upper.set_label(_described(profile, "throughput and time of a batch over batch size"))
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
        rows = [timing.row for timing in part.answering]
        points = [(1e3 * r.value, r.size / r.value, r.size) for r in rows if r.value is not None]
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
    canvas.write_title(panel, profile.model_name, columns=4)
    canvas.write_caption(panel, _conditions(profile))
    panel.set_label(_described(profile, "throughput against the time of a batch"))
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
    sizes = [record.batch_size for record in profile.memory]
    (panel,) = canvas.panels(ax, _LOW_IN)
    batch_axis(panel, sizes, _BATCH_LABEL)
    for index, (policy, known) in enumerate(peaks.items()):
        if (fit := fit_memory(known)) is not None:
            places = np.geomspace(min(sizes), max(sizes), _LINE_POINTS)
            values = fit.fixed_bytes + places * fit.bytes_per_example
            shown, color = values > 0, series_style(index).color
            panel.plot(places[shown], values[shown], color=color, linewidth=1.0, linestyle=":")
        draw.series(panel, index, list(known), list(known.values()), label=policy, joined=False)
    for record in profile.memory:
        if record.outcome == "out_of_memory":
            draw.missing(panel, record.batch_size, words="out of memory")
    if (limit_bytes := profile.memory_limit_bytes) is not None:
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}")
        guard_bytes, words = GUARD_SHARE * limit_bytes, "80 %: nothing expected above is run"
        draw.limit(panel, guard_bytes, words, color=MUTED, below=True)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory, weights included")
    canvas.write_title(panel, profile.model_name, columns=4)
    canvas.write_caption(panel, _conditions(profile))
    panel.set_label(
        f"A chart of peak memory over batch size, {min(sizes):,} to {max(sizes):,}, for "
        f"{join_words(policies)}. Its numbers are in the table."
    )
    return panel


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


def _line_s(profile: "InferenceProfile") -> tuple[tuple[float, float], ...]:
    """Return fitted seconds along the axis, none where no line holds."""
    with contextlib.suppress(ValueError):  # Too little was timed.
        latency = profile.latency
        if latency.follows_line:
            smallest, largest = latency.curve.batch_sizes[[0, -1]]
            places = np.geomspace(smallest, largest, _LINE_POINTS)
            return tuple((float(size), latency.latency_s(size)) for size in places)
    return ()


def _targets(profile: "InferenceProfile") -> list[tuple[float, str]]:
    """Return the latency target in ms and what was found for it, none without a target."""
    if profile.target_ms is None:
        return []
    found = "no size verified"
    if profile.verified is not None:
        found = f"batch size {profile.verified.batch_size:,}"
    within = f"p{100 * profile.quantile:g} within {profile.target_ms:g} ms"
    return [(profile.target_ms, f"{within}: {found}")]


def _conditions(profile: "InferenceProfile") -> str:
    """Write where and how often it was measured, parts separated by a middle dot."""
    parts = where_measured(profile.environment)
    rounds = [len(t.block_medians_s) for t in profile.timings if t.measured]
    if rounds:
        parts.append(f"{count_range(rounds, 'round')} a point")
    return " · ".join(parts)


def _described(profile: "InferenceProfile", what: str) -> str:
    """Describe a figure for those who do not see it."""
    sentences = [f"A chart of {what}, for {join_words(_timed(profile))}."]
    for label, part in _timed(profile).items():
        rows = [timing.row for timing in part.answering]
        rate, size = max((row.rate.value, row.size) for row in rows if row.rate is not None)
        sentences.append(
            f"{label}: at most {format_number(rate)} samples/s, at batch size {size:,}."
        )
    for name, answer in profile.answers.items():
        unmeasured = ", which was not measured" if answer.extrapolated else ""
        sentences.append(f"Marked as {name}: {answer.batch_size:,}{unmeasured}.")
    sentences += [f"Marked: {words}." for _, words in _targets(profile)]
    return " ".join(sentences)


def figures_of(profile: "InferenceProfile") -> tuple[Figure, ...]:
    """Return the figures for which a profile has data, undrawn."""
    timed = any(timing.measured for timing in profile.timings)
    probed = any(record.peak_bytes for record in profile.memory)
    figures = (
        (
            timed,
            "throughput",
            "Throughput and time of a batch",
            _TALL_IN,
            plot_inference_throughput,
        ),
        (timed, "operating-curve", "Rate against time", _LOW_IN, plot_inference_operating_curve),
        (probed, "memory", "Memory by batch size", _LOW_IN, plot_inference_memory),
    )
    return tuple(
        Figure(
            f"inference-{name}",
            title,
            height_in,
            functools.partial(plot, profile),
            "alone" if height_in == _TALL_IN else "small",
        )
        for known, name, title, height_in, plot in figures
        if known
    )
