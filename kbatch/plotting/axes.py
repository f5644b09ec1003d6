"""The batch axis and logarithmic axes, labelled with plain numbers."""

import itertools
import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kbatch.plotting.canvas import label_room, width_share

_MOST_TICKS = 12
# What may be labelled in each decade of an axis that spans less than so many times its low end:
# over many decades a label for each third of one could not be read.
_LABELS = (
    (4, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (10, (1, 2, 3, 4, 6, 8)),
    (1e3, (1, 2, 5)),
    (math.inf, (1,)),
)
_FEWER = ((1, 2, 5), (1, 3), (1,))
# Less than a factor of two may hold no such number: there plain steps are labelled.
_MOST_STEPS = 4


def batch_axis(ax: Axes, batch_sizes: Iterable[int], label: str) -> None:
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
    """Pick the batch sizes that get a tick: all, or as many as can be read."""
    sizes = sorted(set(batch_sizes))
    distance = math.log2(sizes[-1] / sizes[0]) / most
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log2(size / ticks[-1]) >= distance:
            ticks.append(size)
    return ticks


def rate_and_time_axes(upper: Axes, lower: Axes, timed: str) -> None:
    """Label the y axes of throughput and, on a logarithmic scale below, of what is timed."""
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    lower.set_ylabel(f"Time of a {timed}\n(ms)")


def plain_log_labels(axis: Axis) -> None:
    """Label an axis that is logarithmic already."""
    low, high = sorted(axis.get_view_interval())
    most = next(subs for span, subs in _LABELS if high < span * low)
    fewer = (subs for subs in (most, *_FEWER) if len(subs) <= len(most))
    single: list[float] = []
    for locator in (
        # Beyond nine decades every second one is labelled.
        *(LogLocator(subs=subs, numticks=9) for subs in fewer),
        *(LogLocator(numticks=count) for count in range(_MOST_STEPS, 1, -1)),
        *(MaxNLocator(nbins=count) for count in range(_MOST_STEPS, 0, -1)),
    ):
        places = [float(place) for place in locator.tick_values(low, high) if low <= place <= high]
        # Two at least, to compare; where they have no room, one.
        if len(places) > 1 and _fit(axis, places):
            axis.set_major_locator(locator)
            break
        single = max(single, places, key=len)
    else:
        axis.set_major_locator(FixedLocator(single[-1:]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _fit(axis: Axis, places: Sequence[float]) -> bool:
    """Return whether labels have room side by side; one above the other they always have."""
    if not isinstance(axis, XAxis):
        return True
    low, high = sorted(axis.get_view_interval())
    room = label_room(axis.axes) / math.log(high / low)
    # Between two labels one and a half characters stay free.
    return all(
        room * math.log(right / left) >= 1.5 + (len(_plain(left)) + len(_plain(right))) / 2
        for left, right in itertools.pairwise(places)
    )


def _plain(value: float) -> str:
    # With an exponent otherwise.
    return f"{value:,.0f}" if value >= 1e5 else f"{value:,g}"
