"""The figure of some steps of training, and of the rates behind the verdict."""

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from kbatch.page.numbers import format_number, percent, pluralize, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, INK, MUTED, series_style

if TYPE_CHECKING:
    from kbatch.input_pipeline.result import InputPipelineProfile

HEIGHT_IN = 4.2
_MOST_CHANGES = 3
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
    waiting: tuple[tuple[float, float], ...]  # Training waits: begin and duration in ms.
    computing: tuple[tuple[float, float], ...]
    bars: tuple[RateBar, ...]


def input_pipeline_info(profile: "InputPipelineProfile") -> InputPipelineInfo:
    """Compute what the figure shows: of changes to the pipeline the best three clear gains."""
    spans = profile.timeline
    gained = [one for one in profile.best_first if one.is_clear_gain][:_MOST_CHANGES]
    rates = [
        ("pipeline alone", profile.pipeline, _PIPELINE),
        ("train step alone", profile.step, _COMPUTING),
        ("both together", profile.together, MUTED),
        *((f"with {one.name}", one.changed, _CHANGED) for one in gained),
    ]
    return InputPipelineInfo(
        waiting=tuple((1e3 * s.begin_s, 1e3 * s.wait_s) for s in spans),
        computing=tuple((1e3 * (s.begin_s + s.wait_s), 1e3 * s.compute_s) for s in spans),
        bars=tuple(
            RateBar(label, rate.value, rate.ends, color)
            for label, record, color in rates
            if record is not None and (rate := record.samples_per_second) is not None
        ),
    )


def plot_input_pipeline(profile: "InputPipelineProfile", ax: Axes | None = None) -> Axes:
    """Plot steps of training, waiting and computing, and the rates with their intervals.

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: What was measured.
        ax: Axes whose place the two panels take; a new figure if None.
    """
    info = input_pipeline_info(profile)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 3), share_x=False)
    share = "" if profile.wait_share is None else percent(profile.wait_share)
    for panel in (upper, lower):
        panel.grid(visible=False, axis="y")
        canvas.vertical_grid(panel)
    narrow = canvas.width_share(upper) < 1
    canvas.write_title(upper, f"Input pipeline: {profile.verdict}", rows_below=1)
    waiting = f"■ waiting{'' if narrow else ' for data'}{share and f' ({share})'}"
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
    rounds = f"{pluralize(len(profile.step.durations_s), 'round')}, bars: 95 % interval"
    facts = [profile.dtype_policy, f"batch size {profile.batch_size:,}", rounds]
    conditions = " · ".join([*where_measured(profile.environment), *facts])
    canvas.write_caption((upper, lower), profile.answer, conditions)
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
