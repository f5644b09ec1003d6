"""The batch axis: powers of two at equal distances, labelled with plain integers."""

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kbatch.plotting.canvas import width_share

_MOST_TICKS = 12


def batch_axis(ax: Axes, batch_sizes: Iterable[int], label: str) -> None:
    """Makes the x axis a batch axis.

    Args:
        ax: The lowest Axes of those that share it.
        batch_sizes: Batch sizes that are shown, in examples.
        label: Label of the axis.
    """
    sizes = sorted(set(batch_sizes))
    most = round(_MOST_TICKS * width_share(ax))
    margin = 2 ** max(0.35, 0.05 * math.log2(sizes[-1] / sizes[0]))
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(batch_ticks(sizes, most)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{round(size):d}"))
    ax.set_xlabel(label)


def batch_ticks(batch_sizes: Iterable[int], most: int = _MOST_TICKS) -> list[int]:
    """Picks the batch sizes that get a tick: all, or as many as can be read.

    Args:
        batch_sizes: Batch sizes in examples.
        most: Equal distances that the axis is long.

    Returns:
        Ascending sizes, the smallest among them.
    """
    sizes = sorted(set(batch_sizes))
    distance = math.log2(sizes[-1] / sizes[0]) / most
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log2(size / ticks[-1]) >= distance:
            ticks.append(size)
    return ticks
