"""The figure of an input pipeline: a second of training, and the rates behind the verdict."""

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from mpl_toolkits.axes_grid1 import make_axes_locatable

from kbatch.document.numbers import counted, percent, readable
from kbatch.document.section import where_measured
from kbatch.input_pipeline.record import InputPipelineProfile, RateRecord
from kbatch.input_pipeline.report import headline
from kbatch.plotting.canvas import (
    SMALL_PT,
    TEXT_PT,
    halo,
    new_axes,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import ALARM, GRID, INK, MUTED, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SECOND = 1.0
_MOST_REMEDIES = 3


class Segment(NamedTuple):
    """A stretch of the timeline.

    Attributes:
        begin_ms: Milliseconds from the start of the timeline.
        duration_ms: Milliseconds it lasts.
    """

    begin_ms: float
    duration_ms: float


class RateBar(NamedTuple):
    """One bar.

    Attributes:
        label: What was measured.
        rate: Examples per second.
        low: Lower end of its 95 % interval, None if it has none.
        high: Upper end of its 95 % interval, None if it has none.
        is_change: Whether it is training with a changed pipeline.
    """

    label: str
    rate: float
    low: float | None
    high: float | None
    is_change: bool


class InputPipelineInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: The verdict and what it means.
        waiting: Stretches in which training waits for data.
        computing: Stretches in which it computes.
        wait_share: Share of the rounds' time spent waiting, None if not measured.
        bars: Rates, the pipeline alone first.
        conditions: Device, versions, batch size and rounds in a line.
    """

    title: str
    waiting: tuple[Segment, ...]
    computing: tuple[Segment, ...]
    wait_share: float | None
    bars: tuple[RateBar, ...]
    conditions: str


def input_pipeline_info(profile: InputPipelineProfile) -> InputPipelineInfo:
    """Compute what the figure of an input pipeline shows.

    Changes to the pipeline are shown where their gain is clear, the best three of them.
    """
    spans = [span for span in profile.timeline if span.begin_s < _SECOND]
    waiting = [Segment(1e3 * span.begin_s, 1e3 * span.wait_s) for span in spans]
    computing = [
        Segment(1e3 * (span.begin_s + span.wait_s), 1e3 * span.compute_s) for span in spans
    ]
    gained = [remedy for remedy in profile.best_first if remedy.is_clear_gain][:_MOST_REMEDIES]
    bars = [
        _bar("pipeline alone", profile.pipeline),
        _bar("train step alone", profile.step),
        _bar("both together", profile.together),
        *(_bar(f"with {r.name}", r.changed, is_change=True) for r in gained),
    ]
    return InputPipelineInfo(
        title=f"{profile.verdict}: {headline(profile)}",
        waiting=tuple(waiting),
        computing=tuple(computing),
        wait_share=profile.wait_share,
        bars=tuple(bar for bar in bars if bar is not None),
        conditions=_conditions(profile),
    )


def alt_text(info: InputPipelineInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    bars = ", ".join(f"{bar.label} {readable(bar.rate)}" for bar in info.bars)
    steps = counted(len(info.computing), "step")
    share = "" if info.wait_share is None else f", {percent(info.wait_share)} of it waiting"
    return (
        f"A timeline of {steps} of training{share}, above bars of samples per second: {bars}. "
        f"The verdict is {info.title}"
    )


def _bar(label: str, rate: RateRecord, *, is_change: bool = False) -> RateBar | None:
    estimate = rate.samples_per_second
    if estimate is None:
        return None
    interval = estimate.interval
    low, high = (interval.low, interval.high) if interval else (None, None)
    return RateBar(label, estimate.value, low, high, is_change)


def _conditions(profile: InputPipelineProfile) -> str:
    rounds = counted(len(profile.step.durations_s), "round")
    parts = [
        *where_measured(profile.environment),
        profile.dtype_policy,
        f"batch size {profile.batch_size:,}",
        f"{rounds}, bars: 95 % interval",
    ]
    return " · ".join(parts)


HEIGHT_IN = 4.2
_TITLE_CHARACTERS = 58
# Names of bars take a larger part of a narrow figure than the numbers of other axes.
_NARROWER = 1.3
# In a narrow figure they take two lines.
_NAME_CHARACTERS = 14
_COMPUTING = series_style(0).color
_PIPELINE = series_style(1).color
_CHANGED = series_style(2).color


def plot_input_pipeline(profile: "InputPipelineProfile", ax: "Axes | None" = None) -> "Axes":
    """Plot a second of training, waiting and computing, and the rates with their intervals.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: What was measured.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the timeline.
    """
    info = input_pipeline_info(profile)
    upper, lower = _panels(new_axes(HEIGHT_IN) if ax is None else ax)
    for panel in (upper, lower):
        tidy(panel)
        panel.grid(visible=False, axis="y")
        panel.grid(visible=True, axis="x", color=GRID, linewidth=0.6)
    title, rest = info.title, ""
    if width_share(upper) < 1:
        # A long title would take the place of the panels.
        title, _, rest = title.partition("; ")
    _draw_timeline(upper, info, title)
    _draw_bars(lower, info)
    rest = rest[:1].upper() + rest[1:]
    write_caption(lower, *filter(None, (rest and f"{rest.rstrip('.')}.", info.conditions)))
    return upper


def _panels(ax: "Axes") -> "tuple[Axes, Axes]":
    """Split Axes in a flat panel and a high one below it, each with an x axis of its own."""
    place = ax.get_subplotspec()
    if place is None:
        return ax, make_axes_locatable(ax).append_axes("bottom", "200%", pad=0.6)
    rows = place.subgridspec(2, 1, height_ratios=(1, 3), hspace=0.12)
    ax.set_subplotspec(rows[0])
    return ax, ax.figure.add_subplot(rows[1])


def _draw_timeline(panel: "Axes", info: InputPipelineInfo, title: str) -> None:
    panel.broken_barh(_spans(info.computing), (0, 1), color=_COMPUTING, linewidth=0)
    panel.broken_barh(_spans(info.waiting), (0, 1), color=ALARM, linewidth=0)
    share = "" if info.wait_share is None else f" ({percent(info.wait_share)})"
    room = width_share(panel)
    waiting = "waiting for data" if room == 1 else "waiting"
    panel.set_title(
        textwrap.fill(title, int(_TITLE_CHARACTERS * room**_NARROWER)),
        loc="left",
        fontsize=TEXT_PT + 0.5,
        color=INK,
        fontweight="bold",
        pad=18,
        parse_math=False,
    )
    for x, side, color, words in (
        (0, "left", ALARM, f"■ {waiting}{share}"),
        (1, "right", _COMPUTING, "■ computing"),
    ):
        panel.annotate(
            words,
            (x, 1),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            ha=side,
            fontsize=SMALL_PT + 0.5,
            color=color,
        )
    ends = [s.begin_ms + s.duration_ms for s in info.computing]
    panel.set_xlim(0, max(ends, default=1.0))
    panel.set_ylim(0, 1)
    panel.set_yticks([])
    panel.set_xlabel("Time (ms)")


def _draw_bars(panel: "Axes", info: InputPipelineInfo) -> None:
    places = range(len(info.bars))
    colors = [_bar_color(bar) for bar in info.bars]
    panel.barh(places, [bar.rate for bar in info.bars], height=0.62, color=colors)
    for place, bar in zip(places, info.bars, strict=True):
        if bar.low is not None and bar.high is not None:
            panel.hlines(place, bar.low, bar.high, color=INK, linewidth=1.4)
        panel.annotate(
            readable(bar.rate),
            (bar.high if bar.high is not None else bar.rate, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL_PT + 0.5,
            color=INK,
            path_effects=halo(),
        )
    characters = _NAME_CHARACTERS if width_share(panel) < 1 else 80
    names = [textwrap.fill(bar.label, characters, break_long_words=False) for bar in info.bars]
    panel.set_yticks(list(places), names)
    panel.invert_yaxis()
    most = max((bar.high or bar.rate for bar in info.bars), default=1.0)
    panel.set_xlim(0, 1.14 * most)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_xlabel("Throughput (samples/s)")


def _bar_color(bar: RateBar) -> str:
    if bar.is_change:
        return _CHANGED
    return {"pipeline alone": _PIPELINE, "train step alone": _COMPUTING}.get(bar.label, MUTED)


def _spans(segments: tuple[Segment, ...]) -> list[tuple[float, float]]:
    return [(s.begin_ms, s.duration_ms) for s in segments]
