"""Labels of points, as many as can stand beside each other."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.plotting.canvas import SMALL_PT, halo

_CHARACTER_EM = 0.62
_LINE_EM = 1.25
_GAP_PT = 5.0
# Half the width of a mark.
_MARK_PT = 4.0
# Left, bottom, right and top, in points.
_Box = tuple[float, float, float, float]


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
    panel: Axes,
    labels: Sequence[Label],
    marks: Sequence[tuple[float, float]],
    *,
    inside: bool = False,
) -> list[str]:
    """Write labels where they cover neither each other nor a mark, the first ones first."""
    width_pt, height_pt = _size_pt(panel)
    taken = _Boxes(len(marks) + len(labels))
    for x, y in _points(panel, marks):
        taken.add((x - _MARK_PT, y - _MARK_PT, x + _MARK_PT, y + _MARK_PT))
    left: list[str] = []
    places = _points(panel, [label.place for label in labels])
    for label, place in zip(labels, places, strict=True):
        for text, side in itertools.product(filter(None, (label.text, label.short)), label.sides):
            box = _box(place, side, len(text) * SMALL_PT * _CHARACTER_EM, SMALL_PT * _LINE_EM)
            outside = min(box) < 0 or box[2] > width_pt or box[3] > height_pt
            if not (inside and outside) and taken.leave_free(box):
                taken.add(box)
                _write(panel, label._replace(text=text), side)
                break
        else:
            left.append(label.text)
    return left


class _Boxes:
    """The boxes that are taken; thousands are compared at once."""

    def __init__(self, most: int):
        self._sides = np.empty((4, most))
        self._count = 0

    def add(self, box: _Box) -> None:
        self._sides[:, self._count] = box
        self._count += 1

    def leave_free(self, box: _Box) -> bool:
        left, bottom, right, top = self._sides[:, : self._count]
        beside = (box[0] >= right) | (left >= box[2])
        return bool(np.all(beside | (box[1] >= top) | (bottom >= box[3])))


def _points(panel: Axes, places: Sequence[tuple[float, float]]) -> np.ndarray:
    """Place points of the data in the Axes, in points; before the layout they are about right."""
    if not places:
        return np.empty((0, 2))
    to_shares = panel.transData + panel.transAxes.inverted()
    return to_shares.transform(np.asarray(places, float)) * _size_pt(panel)


def _box(place: np.ndarray, side: tuple[int, int], width: float, height: float) -> _Box:
    x = place[0] + side[0] * (_GAP_PT + width / 2)
    y = place[1] + side[1] * (_GAP_PT + height / 2)
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _size_pt(panel: Axes) -> tuple[float, float]:
    """Return width and height of Axes, in points."""
    figure, box = panel.get_figure(root=True), panel.get_position()
    width_in, height_in = (1.0, 1.0) if figure is None else figure.get_size_inches()
    return 72 * float(width_in) * box.width, 72 * float(height_in) * box.height


def _write(panel: Axes, label: Label, side: tuple[int, int]) -> None:
    panel.annotate(
        label.text,
        label.place,
        xytext=(side[0] * _GAP_PT, side[1] * _GAP_PT),
        textcoords="offset points",
        ha={-1: "right", 0: "center", 1: "left"}[side[0]],
        va={-1: "top", 0: "center", 1: "bottom"}[side[1]],
        fontsize=SMALL_PT,
        fontweight="bold" if label.bold else "normal",
        color=label.color,
        path_effects=halo(),
        parse_math=False,
    )
