"""The figure of an input pipeline: steps of training, and the measured rates."""

import textwrap
from typing import Any

from matplotlib.axes import Axes

from kbatch.input_pipeline.result import PIPELINE, STEP, TOGETHER, InputPipelineProfile
from kbatch.page.document import Figure
from kbatch.page.numbers import format_number, percent, pluralize, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, INK, MUTED, series_style

_HEIGHT_IN = 3.8
_MOST_CHANGES = 3
# In a narrow figure the names of bars are wrapped.
_NAME_CHARACTERS, _NARROW_NAME_CHARACTERS = 80, 14
_COMPUTING, _PIPELINE, _CHANGED = (series_style(i)[0] for i in range(3))


def plot_input_pipeline(
    profile: InputPipelineProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot when training waits and computes, and the rates with their intervals.

    The figure shows at most three changes to the pipeline, the ones with the largest clear gains.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: An `InputPipelineProfile`.
        ax: Matplotlib axes. Two panels take its place. If None, a new figure.
        caption: Boolean, whether to write a caption below a new figure. Default: True.

    Returns:
        The axes of the upper panel.

    Raises:
        ValueError: If `ax` has no figure.
    """
    upper, lower = canvas.panels(ax, _HEIGHT_IN, (1, 3), share_x=False)
    share = "" if profile.wait_share is None else percent(profile.wait_share)
    for panel in (upper, lower):
        panel.grid(visible=False, axis="y")
        canvas.vertical_grid(panel)
    narrow = canvas.width_share(upper) < 1
    canvas.write_title(upper, f"Input pipeline: {profile.verdict}", rows_below=1)
    waiting = f"■ waiting{'' if narrow else ' for data'}{share and f' ({share})'}"
    style: dict[str, Any] = {"fontsize": canvas.TEXT_PT, "xycoords": upper.transAxes}
    draw.text(upper, waiting, (0, 1), (0, 7), ha="left", color=ALARM, **style)
    draw.text(upper, "■ computing", (1, 1), (0, 7), ha="right", color=_COMPUTING, **style)
    spans = profile.timeline
    waited = [(1e3 * span.begin_s, 1e3 * span.wait_s) for span in spans]
    computed = [(1e3 * (s.begin_s + s.wait_s), 1e3 * s.compute_s) for s in spans]
    upper.broken_barh(computed, (0, 1), color=_COMPUTING, linewidth=0)
    upper.broken_barh(waited, (0, 1), color=ALARM, linewidth=0)
    upper.set_xlim(0, max((begin + duration for begin, duration in computed), default=1.0))
    upper.set_ylim(0, 1)
    upper.set_yticks([])
    upper.xaxis.set_major_formatter("{x:,g}")
    upper.set_xlabel("Time (ms)")
    wrapped = narrow and not canvas.is_low(upper)
    _draw_bars(lower, profile, _NARROW_NAME_CHARACTERS if wrapped else _NAME_CHARACTERS)
    rounds = pluralize(len(profile.step.durations_s), "round")
    facts = [*where_measured(profile.environment), profile.dtype_policy]
    facts += [f"batch size {profile.batch_size:,}", rounds]
    notes, caption = ("Bars: 95 % interval of throughput.", profile.answer), caption and ax is None
    of = "training steps over time, and of throughputs"
    canvas.write_caption((upper, lower), *notes, of=of, facts=facts, caption=caption)
    return upper


def figures_of(profile: InputPipelineProfile) -> tuple[Figure, ...]:
    title = "Training step by step, and the rates behind the verdict"
    return (Figure.of(plot_input_pipeline, profile, title, _HEIGHT_IN),)


def _draw_bars(panel: Axes, profile: InputPipelineProfile, characters: int) -> None:
    gains = [change.title for change in profile.best_first if change.is_clear_gain]
    colors = {PIPELINE: _PIPELINE, STEP: _COMPUTING, TOGETHER: MUTED}
    speeds, labels, farthest = profile.speeds(), [], 0.0
    for name in filter(speeds.__contains__, (*colors, *gains[:_MOST_CHANGES])):
        row, rate = len(labels), speeds[name]
        label = name if name in colors else f"with {name}"
        labels.append(textwrap.fill(label, characters, break_long_words=False))
        panel.barh(row, rate.value, height=0.62, color=colors.get(name, _CHANGED))
        top = rate.ends[1] if rate.ends else rate.value
        if rate.ends:
            panel.hlines(row, *rate.ends, color=INK, linewidth=1.4)
        value = format_number(rate.value)
        draw.text(panel, value, (top, row), (4, 0), ha="left", fontsize=canvas.TEXT_PT)
        farthest = max(farthest, top)
    panel.set_yticks(range(len(labels)), labels)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.14 * farthest or 1.0)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("Throughput (samples/s)")
