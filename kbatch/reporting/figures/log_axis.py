"""A logarithmic axis labelled with plain numbers at 1, 2 and 5."""

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator


def plain_log_labels(axis: Axis) -> None:
    """Labels an axis that is logarithmic already.

    Args:
        axis: The x or y axis of Axes.
    """
    low, high = sorted(axis.get_view_interval())
    # Over many decades a label for each third of one could not be read.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
