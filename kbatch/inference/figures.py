"""The figures of an inference profile."""

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.inference.result import InferenceProfile, TimingRecord
from kbatch.page.document import Figure
from kbatch.page.numbers import count_range, memory_text, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, ALARM_TEXT, MUTED
from kbatch.throughput.figure import FEW_CALLS, check_timed, draw_sweep, height_in, time_name

_BATCH_LABEL = "Batch size (examples per call)"
_THROUGHPUT = "samples/s: batch size / median time"


def plot_inference_throughput(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot throughput (upper panel) and the time of a batch (lower panel) by batch size.

    The throughput is the batch size over the median time of a call, with one call at a time.
    A line is the fit t(b) = (b + n_half) / r_inf: r_inf is the largest throughput, and a batch of
    n_half examples reaches half of it. If the fit does not hold, the line joins the points. Without
    a latency target, the sizes `efficient`, `knee` and `fastest` are marked. With a target, the
    size for the target is marked. The lower panel then shows the quantile of the calls that must
    meet the target, and the median as a thin line. Sizes that ran out of memory are at the bottom.

    Example:

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: An `InferenceProfile`.
        ax: Matplotlib axes. Two panels take its place. If None, a new figure.
        caption: Boolean, whether to write a caption below a new figure. Default: True.

    Returns:
        The axes of the upper panel.

    Raises:
        ValueError: If nothing was timed.
    """
    answers, quantile = profile.answers, None
    if profile.target_ms is not None:
        answer, quantile = profile.target_answer, profile.quantile
        answers = {} if answer is None else {"take" if answer.verified else "probably": answer}
    return draw_sweep(
        ax,
        _timed(profile),
        label=_BATCH_LABEL,
        targets_ms=_targets(profile),
        answers=[
            (name, answer.batch_size, not answer.extrapolated) for name, answer in answers.items()
        ],
        quantile=quantile,
        title="Throughput and time of a batch",
        result=profile.answer,
        facts=[*_facts(profile), _THROUGHPUT],
        caption=caption,
    )


def plot_inference_operating_curve(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot throughput against the time of a batch. Each point is a batch size.

    A larger batch has a higher throughput and a longer latency, until the curve gets flat. The time
    is the median of the calls. If there is a latency target, it is a vertical line, and the time is
    the quantile of the calls that must meet the target.

    Example:

    >>> kbatch.plot_inference_operating_curve(profile).figure.savefig("operating-curve.png")

    Args:
        profile: An `InferenceProfile`.
        ax: Matplotlib axes to draw on. If None, a new figure.
        caption: Boolean, whether to write a caption below a new figure. Default: True.

    Returns:
        The axes.

    Raises:
        ValueError: If nothing was timed.
    """
    timed, rounds, named = _timed(profile), [], []
    notes = {"Numbers: batch sizes.": None}
    (panel,) = canvas.panels(ax, height_in(1))
    panel.set_xscale("log")
    canvas.vertical_grid(panel)
    for index, (label, rows) in enumerate(timed.items()):
        measured = [row for row in rows if row.measured]
        if (quantile := profile.target_ms and profile.quantile) is not None:
            measured = [row for row in measured if row.latencies_s]
        places = [(1e3 * _time_s(row, quantile), row.batch_size / row.median_s) for row in measured]
        known = zip(measured, places, strict=True)
        few = [place for row, place in known if quantile and row.missing_calls(quantile)]
        estimates = [(ms, Estimate(rate)) for ms, rate in places]
        draw.series(panel, index, estimates, label=label, hollow=few)
        notes |= dict.fromkeys([FEW_CALLS] * bool(few))
        # The first curve has a label at each size, the others only at the largest size.
        least = measured[-1].batch_size if index else 1
        named += [
            (place, f"{row.batch_size:,}" if row.batch_size >= least else "", MUTED)
            for row, place in zip(measured, places, strict=True)
        ]
        rounds += [len(row.times_s) for row in measured]
    targets = _targets(profile)
    for target_ms, _ in targets:
        panel.axvline(target_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.6)
    draw.names_above(panel, targets, panel.get_xlim(), color=ALARM_TEXT)
    draw.label_points(panel, named[::-1])
    panel.yaxis.set_major_formatter("{x:,.0f}")
    draw.plain_log_labels(panel.xaxis)
    panel.set_xlabel(f"{time_name(profile.target_ms and profile.quantile)} of a batch (ms)")
    panel.set_ylabel("Throughput (samples/s)")
    canvas.write_title(panel, "Throughput against the time of a batch", columns=4)
    facts = [*_facts(profile), _THROUGHPUT, f"{count_range(rounds, 'round')} per point"]
    texts = {"result": profile.answer, "caption": caption and ax is None}
    canvas.write_caption([panel], *notes, facts=facts, **texts)
    return panel


def plot_inference_memory(
    profile: InferenceProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot the peak memory by batch size, the fitted line and the limit.

    Example:

    >>> kbatch.plot_inference_memory(profile).figure.savefig("memory.png")

    Args:
        profile: An `InferenceProfile`.
        ax: Matplotlib axes to draw on. If None, a new figure.
        caption: Boolean, whether to write a caption below a new figure. Default: True.

    Returns:
        The axes.

    Raises:
        ValueError: If no memory was measured.
    """
    known = {record.batch_size: record.peak_bytes for record in profile.memory if record.peak_bytes}
    if not known:
        raise ValueError(
            "No memory was measured: call `profile_inference` with `measure_memory=True`. "
            f"Received: {len(profile.memory)} sizes, none measured."
        )
    return draw_sweep(
        ax,
        {},
        profile.memory,
        profile.memory_limit_bytes,
        label=_BATCH_LABEL,
        title="Peak memory of predictions by batch size",
        result=f"Batch size {max(known):,} needs {memory_text(known[max(known)])}.",
        facts=_facts(profile),
        caption=caption,
    )


def figures_of(profile: InferenceProfile) -> tuple[Figure, ...]:
    """Return the figures that the profile has measurements for."""
    figures = []
    if any(timing.measured for timing in profile.timings):
        title = "Throughput and time of a batch"
        figures.append(Figure.of(plot_inference_throughput, profile, title, height_in(2)))
        title = "Throughput against time"
        figures.append(Figure.of(plot_inference_operating_curve, profile, title, height_in(1)))
    if any(record.peak_bytes for record in profile.memory):
        title = "Memory by batch size"
        figures.append(Figure.of(plot_inference_memory, profile, title, height_in(1)))
    return tuple(figures)


def _timed(profile: InferenceProfile) -> dict[str, list[TimingRecord]]:
    """Return the timings of each call path and policy, by its name in a legend."""
    check_timed(profile.timings)
    several, timed = len({policy for _, policy in profile.series}) > 1, {}
    for row in profile.timings:
        name = f"{row.call_path}, {row.dtype_policy}" if several else row.call_path
        timed.setdefault(name, []).append(row)
    return {name: rows for name, rows in timed.items() if any(row.measured for row in rows)}


def _time_s(row: TimingRecord, quantile: float | None) -> float:
    return row.median_s if quantile is None else float(np.quantile(row.latencies_s, quantile))


def _facts(profile: InferenceProfile) -> list[str]:
    return [*where_measured(profile.environment), profile.model_name]


def _targets(profile: InferenceProfile) -> list[tuple[float, str]]:
    """Return the latency target in ms with its label, if there is a target."""
    if profile.target_ms is None:
        return []
    size = "no batch size"
    if (answer := profile.target_answer) is not None:
        size = f"batch size {answer.batch_size:,}{'' if answer.verified else ', not verified'}"
    goal = f"p{100 * profile.quantile:g} within {profile.target_ms:g} ms"
    return [(profile.target_ms, f"{goal}: {size}")]
