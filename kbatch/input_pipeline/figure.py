"""The figure of some steps of training, and of the rates behind the verdict."""

import textwrap

from matplotlib.axes import Axes

from kbatch.input_pipeline.result import PIPELINE, STEP, TOGETHER, InputPipelineProfile
from kbatch.page.document import Figure
from kbatch.page.numbers import format_number, percent, pluralize, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, INK, MUTED, series_style

_HEIGHT_IN = 3.8
_MOST_CHANGES = 3
# In a narrow figure names of bars take two lines.
_NAME_CHARACTERS, _NARROW_NAME_CHARACTERS = 80, 14
_COMPUTING, _PIPELINE, _CHANGED = (series_style(i)[0] for i in range(3))


def plot_input_pipeline(
    profile: InputPipelineProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot steps of training, waiting and computing, and the rates with their intervals.

    Of changes to the pipeline the best three clear gains are shown.

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: What was measured.
        ax: Axes whose place the two panels take. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.
    """
    upper, lower = canvas.panels(ax, _HEIGHT_IN, (1, 3), share_x=False)
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
    _draw_bars(lower, profile, _NARROW_NAME_CHARACTERS if narrow else _NAME_CHARACTERS)
    rounds = pluralize(len(profile.step.durations_s), "round")
    facts = [*where_measured(profile.environment), profile.dtype_policy]
    facts += [f"batch size {profile.batch_size:,}", rounds]
    notes, caption = ("Bars: 95 % interval.", profile.answer), caption and ax is None
    canvas.write_caption((upper, lower), *notes, facts=facts, caption=caption)
    return upper


def figures_of(profile: InputPipelineProfile) -> tuple[Figure, ...]:
    """Return the figure of some steps of training and of the rates."""
    title = "Training step by step, and the rates behind the verdict"
    return (Figure.of(plot_input_pipeline, profile, title, _HEIGHT_IN),)


def _draw_bars(panel: Axes, profile: InputPipelineProfile, characters: int) -> None:
    gained = [one for one in profile.best_first if one.is_clear_gain][:_MOST_CHANGES]
    colors = {PIPELINE: _PIPELINE, STEP: _COMPUTING, TOGETHER: MUTED}
    colors |= dict.fromkeys((one.title for one in gained), _CHANGED)
    speeds = profile.speeds()
    labels = {
        name: name if name in (PIPELINE, STEP, TOGETHER) else f"with {name}" for name in colors
    }
    bars = [
        (textwrap.fill(labels[name], characters, break_long_words=False), speeds[name], color)
        for name, color in colors.items()
        if name in speeds
    ]
    farthest = 0.0
    for place, (_, rate, color) in enumerate(bars):
        panel.barh(place, rate.value, height=0.62, color=color)
        top = rate.ends[1] if rate.ends else rate.value
        if rate.ends:
            panel.hlines(place, *rate.ends, color=INK, linewidth=1.4)
        value = format_number(rate.value)
        draw.text(panel, value, (top, place), (4, 0), ha="left", size=canvas.TEXT_PT)
        farthest = max(farthest, top)
    panel.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.14 * farthest or 1.0)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("Throughput (samples/s)")
