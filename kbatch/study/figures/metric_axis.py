"""Axes of a metric and of throughput, with their labels and units."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kbatch.plotting.canvas import TEXT_PT, label_room
from kbatch.plotting.log_axis import plain_log_labels
from kbatch.study.metric_names import is_fraction, metric_axis_label
from kbatch.study.trial import Objective

# From this ratio on, small values would lie in one heap on a linear axis.
_LOG_FROM = 12
# Steps between labels, as matplotlib picks them.
_STEPS = (1, 2, 2.5, 5, 10)
_MOST_STEPS = 9
# Between two labels, in characters.
_GAP = 1.5


def quality_axis(panel: Axes, metric: Objective, values: Sequence[float]) -> None:
    """Labels the y axis with a metric; an accuracy has no tick outside 0 to 1.

    Args:
        panel: The Axes, with all that belongs on it.
        metric: The metric.
        values: What is shown of it.
    """
    panel.set_ylabel(metric_axis_label(metric), parse_math=False)
    if is_fraction(metric.name) and values and max(values) <= 1:
        low, high = panel.get_ylim()
        ticks = [tick for tick in panel.get_yticks() if max(low, -1e-9) <= tick <= 1 + 1e-9]
        panel.set_yticks([tick for tick in ticks if tick <= high])
        panel.set_ylim(low, high)


def throughput_x_axis(panel: Axes, rates: Sequence[float]) -> None:
    """Makes the x axis one of throughput: from zero, or logarithmic over more than a decade.

    Args:
        panel: The Axes.
        rates: What is shown, in examples per second.
    """
    panel.set_xlabel("Throughput (samples/s)", fontsize=TEXT_PT)
    if max(rates) > _LOG_FROM * min(rates):
        panel.set_xscale("log")
        panel.set_xlim(min(rates) / 1.3, max(rates) * 1.5)
        plain_log_labels(panel.xaxis)
    else:
        # A ratio scale: from zero, twice as far is twice as fast.
        panel.set_xlim(0, 1.12 * max(rates))
        steps = label_room(panel) / (len(f"{max(rates):,.0f}") + _GAP)
        panel.xaxis.set_major_locator(
            MaxNLocator(nbins=max(1, min(_MOST_STEPS, int(steps))), steps=_STEPS)
        )
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
