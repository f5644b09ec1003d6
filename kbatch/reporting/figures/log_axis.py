"""A logarithmic axis labelled with plain numbers at 1, 2 and 5."""

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator


def plain_log_labels(axis: Axis, *, few: bool = False) -> None:
    """Labels an axis that is logarithmic already.

    Args:
        axis: The x or y axis of Axes.
        few: Whether there is little room: thousands are written as k, and from a factor of 40 on
            only powers of ten.
    """
    low, high = sorted(axis.get_view_interval())
    # Over many decades a label for each third of one could not be read.
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < (40 if few else 1e3) * low else (1,))
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: _short(value) if few else f"{value:,g}")
    )


def _short(value: float) -> str:
    """Writes 20,000 as 20k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
