"""The figures of an inference profile: by batch size, rate against time, and memory."""

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.inference.result import InferenceProfile, TimingRecord
from kbatch.page.document import Figure
from kbatch.page.numbers import count_range, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, ALARM_TEXT, MUTED, series_style
from kbatch.throughput.figure import check_timed, draw_sweep, height_in, time_name

_BATCH_LABEL = "Batch size (examples per call)"


def plot_inference_throughput(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot samples/s above and the time of a batch below, by batch size.

    Lines are the fit t(b) = (b + n_half) / r_inf where it holds; elsewhere they join the points.
    With a latency target the lower panel shows the quantile that has to keep to it, and the median
    as a thin line, and the size for the target is marked. Without one, the sizes that the first
    call path answers (efficient, knee, fastest) are marked. Sizes that ran out of memory stand at
    the bottom edge.

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: A profile, from `profile_inference`.
        ax: Axes to draw on, whose place two panels take. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If nothing was timed.
    """
    answers, quantile = profile.answers, None
    if profile.target_ms is not None:
        found, quantile = profile.target_answer, profile.quantile
        answers = {} if found is None else {"take" if found.verified else "probably": found}
    return draw_sweep(
        ax,
        _timed(profile),
        label=_BATCH_LABEL,
        targets_ms=_targets(profile),
        answers=[
            (name, found.batch_size, not found.extrapolated) for name, found in answers.items()
        ],
        quantile=quantile,
        title="Throughput and time of a batch",
        facts=_facts(profile),
        caption=caption,
    )


def plot_inference_operating_curve(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot samples/s against the time of a batch; each point is a batch size.

    Going right along a curve buys throughput with latency; where it turns flat, nothing is
    bought. The latency target is a vertical line, and with it the time is the quantile that has to
    keep to it. The arguments are those of `plot_inference_throughput`; a `ValueError` says that
    nothing was timed.
    """
    timed, rounds, named = _timed(profile), [], []
    (panel,) = canvas.panels(ax, height_in(1))
    panel.set_xscale("log")
    canvas.vertical_grid(panel)
    for index, (label, rows) in enumerate(timed.items()):
        measured = [row for row in rows if row.measured]
        if (quantile := profile.target_ms and profile.quantile) is not None:
            measured = [row for row in measured if row.latencies_s]
        places = [(1e3 * _time_s(row, quantile), row.batch_size / row.median_s) for row in measured]
        draw.series(panel, index, [(ms, Estimate(rate)) for ms, rate in places], label=label)
        color = series_style(index)[0] if index else MUTED
        # Sizes of the others are about the same: of these the largest is named.
        least = measured[-1].batch_size if index else 1
        named += [
            (place, f"{row.batch_size:,}" if row.batch_size >= least else "", color)
            for row, place in zip(measured, places, strict=True)
        ]
        rounds += [len(row.times_s) for row in measured]
    targets = _targets(profile)
    for target_ms, _ in targets:
        panel.axvline(target_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
    draw.names_above(panel, targets, panel.get_xlim(), color=ALARM_TEXT)
    draw.label_points(panel, named[::-1])
    panel.yaxis.set_major_formatter("{x:,.0f}")
    draw.plain_log_labels(panel.xaxis)
    panel.set_xlabel(f"{time_name(profile.target_ms and profile.quantile)} of a batch (ms)")
    panel.set_ylabel("Throughput (samples/s)")
    canvas.write_title(panel, "Throughput against the time of a batch", columns=4)
    facts = [*_facts(profile), f"{count_range(rounds, 'round')} a point"]
    canvas.write_caption([panel], facts=facts, caption=caption and ax is None)
    return panel


def plot_inference_memory(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot the peak memory by batch size, the fitted line and the limit.

    Raises:
        ValueError: If no memory was measured.
    """
    if not any(record.peak_bytes for record in profile.memory):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    return draw_sweep(
        ax,
        {},
        profile.memory,
        profile.memory_limit_bytes,
        label=_BATCH_LABEL,
        title="Peak memory of predictions by batch size",
        facts=_facts(profile),
        caption=caption,
    )


def figures_of(profile: InferenceProfile) -> tuple[Figure, ...]:
    """Return throughput and time by batch size, one against the other, and memory."""
    found = []
    if any(timing.measured for timing in profile.timings):
        title = "Throughput and time of a batch"
        found.append(Figure.of(plot_inference_throughput, profile, title, height_in(2)))
        title = "Rate against time"
        found.append(Figure.of(plot_inference_operating_curve, profile, title, height_in(1)))
    if any(record.peak_bytes for record in profile.memory):
        title = "Memory by batch size"
        found.append(Figure.of(plot_inference_memory, profile, title, height_in(1)))
    return tuple(found)


def _timed(profile: InferenceProfile) -> dict[str, list[TimingRecord]]:
    """Return the rows of each call path and policy that was timed, by its name in a legend."""
    check_timed(profile.timings)
    several, found = len({policy for _, policy in profile.series}) > 1, {}
    for row in profile.timings:
        name = f"{row.call_path}, {row.dtype_policy}" if several else row.call_path
        found.setdefault(name, []).append(row)
    return {name: rows for name, rows in found.items() if any(row.measured for row in rows)}


def _time_s(row: TimingRecord, quantile: float | None) -> float:
    return row.median_s if quantile is None else float(np.quantile(row.latencies_s, quantile))


def _facts(profile: InferenceProfile) -> list[str]:
    return [*where_measured(profile.environment), profile.model_name]


def _targets(profile: InferenceProfile) -> list[tuple[float, str]]:
    """Return the latency target in ms and what was found for it, none without a target."""
    if profile.target_ms is None:
        return []
    found = "no batch size"
    if (answer := profile.target_answer) is not None:
        found = f"batch size {answer.batch_size:,}{'' if answer.verified else ', not verified'}"
    within = f"p{100 * profile.quantile:g} within {profile.target_ms:g} ms"
    return [(profile.target_ms, f"{within}: {found}")]
