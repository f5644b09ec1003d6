"""The figure of what limits the batch size."""

import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from kbatch.page.numbers import where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import ALARM, ALARM_TEXT, INK, MUTED, series_style

if TYPE_CHECKING:
    from kbatch.recommendation.result import Recommendation

HEIGHT_IN = 5.2
_ROW_CHARACTERS = 90
_SHORTEST_OCTAVES = 2
# Limits further out than this many times the largest size that was timed are given in words alone.
_WIDEST = 4
# The curves: what an example is worth is that over its worth at the smallest size, and progress
# that over the best size's.
THROUGHPUT, WORTH, PROGRESS = "samples/s", "worth of an example", "progress a second"

# By batch size: a value, and its 95 % interval where there is one.
Curve = dict[int, tuple[float, tuple[float, float] | None]]


def limit_curves(found: "Recommendation") -> dict[str, Curve]:
    """Return throughput, worth of an example and progress, each as a share of its largest."""
    noise, speeds = found.noise_scale, {size: size / s for size, s in found.times_s.items()}
    most, smallest = max(speeds.values(), default=1.0), min(speeds, default=1)
    curves: dict[str, Curve] = {
        THROUGHPUT: {size: (speed / most, None) for size, speed in speeds.items()}
    }
    if noise.value is None or not speeds:
        return curves

    def worth(scale: float, size: int) -> float:
        return (scale + smallest) / (scale + size) if scale < math.inf else 1.0

    low, high = noise.low or 0.0, math.inf if noise.high is None else noise.high
    worths = {size: worth(noise.value, size) for size in speeds}
    progress = {size: min(speed, found.input_rate) * worths[size] for size, speed in speeds.items()}
    return curves | {
        WORTH: {size: (one, (worth(low, size), worth(high, size))) for size, one in worths.items()},
        PROGRESS: {size: (one / max(progress.values()), None) for size, one in progress.items()},
    }


def plot_limits(recommendation: "Recommendation", ax: Axes | None = None) -> Axes:
    """Plot throughput, worth of an example and progress by batch size, above the four limits.

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        recommendation: What `kbatch.recommend` returned.
        ax: Axes whose place the two panels take; a new figure if None. The upper one is returned,
            whose label describes the figure in sentences.
    """
    found, curves = recommendation, limit_curves(recommendation)
    title = "Batch size: cannot tell"
    if found.batch_size is not None:
        title = f"Start with batch size {found.batch_size:,}: {' or '.join(found.binding)} binds"
    # In a narrow figure what a limit says takes two lines.
    wide = ax is None or canvas.width_share(ax) == 1
    upper, lower = canvas.panels(ax, HEIGHT_IN, (4, 3 if wide else 7))
    # The axis holds the sizes that were timed, and powers of two around the limits.
    sizes = set(curves[THROUGHPUT]) or {1}
    begins = [limit.begins for limit in found.limits if limit.begins]
    places = [end for one in begins for end in (one.value, *(one.ends or ())) if end]
    within = [end for end in places if 1 <= end <= _WIDEST * max(sizes)]
    sizes |= {2 ** (math.ceil(end) - 1).bit_length() for end in within}
    if len(sizes) == 1:
        sizes.add(min(sizes) * 2**_SHORTEST_OCTAVES)
    batch_axis(lower, sorted(sizes), "Batch size (examples)")
    for index, (label, curve) in enumerate(curves.items() if curves[THROUGHPUT] else ()):
        values, intervals = zip(*curve.values(), strict=True)
        color, marker = series_style(index)
        draw.band(upper, list(curve), intervals, color)
        draw.points(upper, list(curve), values, color, marker, size=5, line="-", label=label)
    upper.set_ylim(0, 1.06)
    upper.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    upper.set_ylabel("Share of the largest")
    canvas.write_title(upper, title, columns=3, fewest=1)
    _draw_limits(lower, found)
    if found.batch_size is not None:
        for panel in (upper, lower):
            ends = found.batch_sizes[0], found.batch_sizes[-1]
            panel.axvspan(*ends, color=MUTED, alpha=0.12, linewidth=0, zorder=0.5)
            panel.axvline(found.batch_size, color=INK, linewidth=1.2, linestyle="--", zorder=1.5)
    parts = [found.model_name, found.optimizer, found.dtype_policy]
    parts += where_measured(found.environment)
    if (pilot := found.pilot) is not None:
        parts.append(f"pilot of {sum(pilot.updates):,} updates at batch size {pilot.batch_size:,}")
    canvas.write_caption(
        (upper, lower), " · ".join([*parts, "band and bars: 95 % intervals; grey: sizes to search"])
    )
    return upper


def _draw_limits(panel: Axes, found: "Recommendation") -> None:
    low, high = panel.get_xlim()
    for place, limit in enumerate(found.limits):
        color = ALARM if found.binding == (limit.name,) else MUTED
        if limit.begins is not None:
            size, ends = limit.begins.value, limit.begins.ends
            end = high if size is None else min(max(size, low), high)
            bar = {"height": 0.34, "color": color, "alpha": 0.35, "linewidth": 0}
            panel.barh(place, end - low, left=low, **bar)
            if size is not None and low <= size <= high:
                panel.vlines(size, place - 0.22, place + 0.22, color=color, linewidth=2)
            if ends and max(ends[0], low) < min(ends[1], high):
                inside = max(ends[0], low), min(ends[1], high)
                panel.hlines(place, *inside, color=color, linewidth=1.6)
        width = round(canvas.width_share(panel) * _ROW_CHARACTERS)
        wrapped, edge = textwrap.fill(limit.words, width), panel.get_yaxis_transform()
        draw.text(panel, wrapped, (0.01, place), (0, -7), ha="left", va="top", xycoords=edge)
    panel.set_ylim(len(found.limits) - 0.25, -0.6)
    names = [limit.name.capitalize().replace(" ", "\n") for limit in found.limits]
    panel.set_yticks(range(len(found.limits)), names)
    panel.grid(visible=False, axis="y")
    for tick, limit in zip(panel.get_yticklabels(), found.limits, strict=True):
        if found.binding == (limit.name,):
            tick.set(color=ALARM_TEXT, fontweight="bold")
