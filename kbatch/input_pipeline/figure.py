"""The figure of an input pipeline: a second of training, and the rates behind the verdict."""

import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import format_number, percent, pluralize
from kbatch.document.section import where_measured
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.input_pipeline.report import headline
from kbatch.plotting import canvas, draw
from kbatch.plotting.palette import ALARM, INK, MUTED, series_style

HEIGHT_IN = 4.2
_SECOND = 1.0
_MOST_REMEDIES = 3
# In a narrow figure names of bars take two lines.
_NAME_CHARACTERS, _NARROW_NAME_CHARACTERS = 80, 14
_COMPUTING, _PIPELINE, _CHANGED = (series_style(i).color for i in range(3))


class RateBar(NamedTuple):
    """One bar, in examples per second."""

    label: str  # What was measured.
    rate: float
    bounds: tuple[float, float] | None  # Its 95 % interval.
    color: str


class InputPipelineInfo(NamedTuple):
    """What the figure shows."""

    title: str  # The verdict and what it means.
    # Stretches in which training waits for data, and computes: begin and duration in milliseconds.
    waiting: tuple[tuple[float, float], ...]
    computing: tuple[tuple[float, float], ...]
    wait_share: float | None  # Of the rounds' time, None if not measured.
    bars: tuple[RateBar, ...]
    conditions: str


def input_pipeline_info(profile: InputPipelineProfile) -> InputPipelineInfo:
    """Compute what the figure shows: of changes to the pipeline the best three clear gains."""
    spans = [span for span in profile.timeline if span.begin_s < _SECOND]
    gained = [remedy for remedy in profile.best_first if remedy.is_clear_gain][:_MOST_REMEDIES]
    rates = [
        ("pipeline alone", profile.pipeline, _PIPELINE),
        ("train step alone", profile.step, _COMPUTING),
        ("both together", profile.together, MUTED),
        *((f"with {remedy.name}", remedy.changed, _CHANGED) for remedy in gained),
    ]
    conditions = (
        *where_measured(profile.environment),
        profile.dtype_policy,
        f"batch size {profile.batch_size:,}",
        f"{pluralize(len(profile.step.durations_s), 'round')}, bars: 95 % interval",
    )
    return InputPipelineInfo(
        title=f"{profile.verdict}: {headline(profile)}",
        waiting=tuple((1e3 * s.begin_s, 1e3 * s.wait_s) for s in spans),
        computing=tuple((1e3 * (s.begin_s + s.wait_s), 1e3 * s.compute_s) for s in spans),
        wait_share=profile.wait_share,
        bars=tuple(
            RateBar(label, rate.value, draw.ends(rate.interval), color)
            for label, record, color in rates
            if (rate := record.samples_per_second) is not None
        ),
        conditions=" · ".join(conditions),
    )


def alt_text(info: InputPipelineInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    bars = ", ".join(f"{bar.label} {format_number(bar.rate)}" for bar in info.bars)
    steps = pluralize(len(info.computing), "step")
    share = "" if info.wait_share is None else f", {percent(info.wait_share)} of it waiting"
    return (
        f"A timeline of {steps} of training{share}, above bars of samples per second: {bars}. "
        f"The verdict is {info.title}"
    )


def plot_input_pipeline(profile: InputPipelineProfile, ax: Axes | None = None) -> Axes:
    """Plot a second of training, waiting and computing, and the rates with their intervals.

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: What was measured.
        ax: Axes whose place the two panels take; a new figure if None.
    """
    info = input_pipeline_info(profile)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 3), share_x=False)
    upper.set_label(alt_text(info))
    for panel in (upper, lower):
        panel.grid(visible=False, axis="y")
        canvas.vertical_grid(panel)
    title, rest, narrow = info.title, "", canvas.width_share(upper) < 1
    if narrow:
        # A long title would take the place of the panels.
        title, _, rest = title.partition("; ")
        rest = rest and f"{rest[:1].upper()}{rest[1:].rstrip('.')}."
    canvas.write_title(upper, title, rows_below=1, characters=len(title))
    share = "" if info.wait_share is None else f" ({percent(info.wait_share)})"
    waiting = f"■ waiting{'' if narrow else ' for data'}{share}"
    size, where = canvas.TEXT_PT, upper.transAxes
    for words, x, side, color in (
        (waiting, 0, "left", ALARM),
        ("■ computing", 1, "right", _COMPUTING),
    ):
        draw.text(upper, words, (x, 1), (0, 7), ha=side, color=color, size=size, xycoords=where)
    upper.broken_barh(info.computing, (0, 1), color=_COMPUTING, linewidth=0)
    upper.broken_barh(info.waiting, (0, 1), color=ALARM, linewidth=0)
    upper.set_xlim(0, max((begin + duration for begin, duration in info.computing), default=1.0))
    upper.set_ylim(0, 1)
    upper.set_yticks([])
    upper.set_xlabel("Time (ms)")
    _draw_bars(lower, info, _NARROW_NAME_CHARACTERS if narrow else _NAME_CHARACTERS)
    canvas.write_caption(lower, rest, info.conditions)
    return upper


def _draw_bars(panel: Axes, info: InputPipelineInfo, characters: int) -> None:
    places, rates = range(len(info.bars)), [bar.rate for bar in info.bars]
    panel.barh(places, rates, height=0.62, color=[bar.color for bar in info.bars])
    tops = [bar.bounds[1] if bar.bounds else bar.rate for bar in info.bars]
    for place, bar, top in zip(places, info.bars, tops, strict=True):
        if bar.bounds:
            panel.hlines(place, *bar.bounds, color=INK, linewidth=1.4)
        draw.text(
            panel, format_number(bar.rate), (top, place), (4, 0), ha="left", size=canvas.TEXT_PT
        )
    names = [textwrap.fill(bar.label, characters, break_long_words=False) for bar in info.bars]
    panel.set_yticks(list(places), names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.14 * max(tops, default=1.0))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("Throughput (samples/s)")
