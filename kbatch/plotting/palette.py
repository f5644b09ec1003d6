"""Colours and markers that stay apart for every kind of colour vision.

The colours of series are those of Okabe and Ito (2008), "Color universal design", with
grey for black; every series has a marker of its own as well, so that a figure also works in
black and white.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

INK = "#24292f"
MUTED = "#59636e"
GRID = "#d9dee3"
PAPER = "#ffffff"
ALARM = "#d55e00"
# Vermilion, dark enough for small text on paper.
ALARM_TEXT = "#a84300"


class SeriesStyle(NamedTuple):
    """How one series is drawn: its colour, and matplotlib's marker."""

    color: str
    marker: str


_SERIES = (
    SeriesStyle("#0072b2", "o"),
    SeriesStyle("#e69f00", "s"),
    SeriesStyle("#009e73", "^"),
    SeriesStyle("#cc79a7", "D"),
    SeriesStyle("#56b4e9", "v"),
    # Black would be lost on a dark page.
    SeriesStyle("#767676", "P"),
)


def series_style(index: int) -> SeriesStyle:
    """Return the style of the n-th series; past the sixth they repeat."""
    return _SERIES[index % len(_SERIES)]


def ordered_color(share: float) -> tuple[float, float, float]:
    """Return the colour of a quantity with an order, such as the batch size."""
    # A piece of viridis (van der Walt and Smith 2015), whose lightness falls evenly for every kind
    # of colour vision; its yellow end would be lost on paper.
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["viridis"](0.82 * (1 - share))
    return float(red), float(green), float(blue)


def size_color(batch_size: int, sizes: Sequence[int]) -> tuple[float, float, float]:
    """Return the colour of a batch size by its place among those shown, on a log axis."""
    smallest, largest = sizes[0], sizes[-1]
    if smallest == largest:
        return ordered_color(1.0)
    return ordered_color(math.log(batch_size / smallest) / math.log(largest / smallest))
