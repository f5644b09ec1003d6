"""Labels of points, as many as can stand beside each other."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from kbatch.plotting import draw
from kbatch.plotting.canvas import SMALL_PT, figure_of

_CHARACTER_EM = 0.62
_LINE_EM = 1.25
_GAP_PT = 5.0
# Half the width of a mark.
_MARK_PT = 4.0


class Label(NamedTuple):
    """A label of a point, and where it may stand."""

    place: tuple[float, float]  # In the units of the data.
    text: str
    # Sides of the point in order of preference, each -1, 0 or 1 to the right and up.
    sides: tuple[tuple[int, int], ...]
    color: str
    bold: bool = False
    short: str = ""  # What it says where the text finds no place.


def place_labels(
    panel: Axes, labels: Sequence[Label], marks: Sequence[tuple[float, float]]
) -> list[str]:
    """Write labels in the panel where they cover neither each other nor a mark.

    The first ones have the choice; what finds no place is returned.
    """
    box = panel.get_position()
    panel_pt = 72 * figure_of(panel).get_size_inches() * (box.width, box.height)
    # Places in the Axes, in points; before the layout they are about right.
    to_shares = panel.transData + panel.transAxes.inverted()
    data = np.asarray([*marks, *(label.place for label in labels)], float).reshape(-1, 2)
    places_pt = to_shares.transform(data) * panel_pt
    taken = places_pt[:, None] + np.array([[[-_MARK_PT] * 2, [_MARK_PT] * 2]])
    count, left = len(marks), []
    for label, place_pt in zip(labels, places_pt[len(marks) :], strict=True):
        for text, side in itertools.product(filter(None, (label.text, label.short)), label.sides):
            size_pt = SMALL_PT * np.array((len(text) * _CHARACTER_EM, _LINE_EM))
            middle_pt = place_pt + side * (_GAP_PT + size_pt / 2)
            low, high = middle_pt - size_pt / 2, middle_pt + size_pt / 2
            inside = np.all(low >= 0) and np.all(high <= panel_pt)
            if inside and not Bbox([low, high]).count_overlaps(taken[:count]):
                taken[count] = low, high
                count += 1
                draw.text(
                    panel,
                    text,
                    label.place,
                    (side[0] * _GAP_PT, side[1] * _GAP_PT),
                    ha={-1: "right", 0: "center", 1: "left"}[side[0]],
                    va={-1: "top", 0: "center", 1: "bottom"}[side[1]],
                    color=label.color,
                    bold=label.bold,
                    size=SMALL_PT,
                )
                break
        else:
            left.append(label.text)
    return left
