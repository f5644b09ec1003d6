"""A logarithmic axis labelled with plain numbers, more of each decade the fewer there are."""

import math

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# What is labelled in each decade of an axis that spans less than so many times its low end.
_LABELS = ((10, (1, 2, 3, 4, 6, 8)), (1e3, (1, 2, 5)), (math.inf, (1,)))
# The same for few labels.
_FEW_SPAN = 40


def plain_log_labels(axis: Axis, *, few: bool = False) -> None:
    """Labels an axis that is logarithmic already.

    Args:
        axis: The x or y axis of Axes.
        few: Whether there is little room: thousands are written as k, and from a factor of 40 on
            only powers of ten.
    """
    low, high = sorted(axis.get_view_interval())
    # Over many decades a label for each third of one could not be read.
    subs = next(subs for span, subs in _LABELS if high < span * low)
    if few:
        subs = (1, 2, 5) if high < _FEW_SPAN * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
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
