"""Labels of points, as many as can stand beside each other."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.reporting.figures.canvas import SMALL_PT, halo

_CHARACTER_EM = 0.62
_LINE_EM = 1.25
_GAP_PT = 5.0
# Half the width of a mark.
_MARK_PT = 4.0


class Label(NamedTuple):
    """A label and where it may stand.

    Attributes:
        place: The point, in the units of the data.
        text: What it says.
        sides: Sides of the point, in order of preference, each -1, 0 or 1 to the right and up.
        color: Its colour.
        bold: Whether it is bold.
        short: What it says where that finds no place, an empty text for nothing.
    """

    place: tuple[float, float]
    text: str
    sides: tuple[tuple[int, int], ...]
    color: str
    bold: bool = False
    short: str = ""


def place_labels(
    panel: Axes,
    labels: Sequence[Label],
    marks: Sequence[tuple[float, float]],
    *,
    inside: bool = False,
) -> list[str]:
    """Writes labels where they cover neither each other nor a mark, the first ones first.

    Args:
        panel: The Axes, whose limits are set.
        labels: The labels, the most important first.
        marks: Points that must stay free, in the units of the data.
        inside: Whether a label that would leave the Axes finds no place.

    Returns:
        The texts that found no place.
    """
    taken = [_box(panel, mark, (0, 0), 0.0, 2 * _MARK_PT, 2 * _MARK_PT) for mark in marks]
    left: list[str] = []
    for label in labels:
        for text, side in itertools.product(filter(None, (label.text, label.short)), label.sides):
            width = len(text) * SMALL_PT * _CHARACTER_EM
            box = _box(panel, label.place, side, _GAP_PT, width, SMALL_PT * _LINE_EM)
            if inside and not _inside(panel, box):
                continue
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                _write(panel, label._replace(text=text), side)
                break
        else:
            left.append(label.text)
    return left


def _box(
    panel: Axes,
    place: tuple[float, float],
    side: tuple[int, int],
    gap: float,
    width: float,
    height: float,
) -> tuple[float, float, float, float]:
    """Gives left, bottom, right and top, in points; before the layout they are about right."""
    shares = panel.transAxes.inverted().transform(panel.transData.transform(place))
    width_pt, height_pt = _size_pt(panel)
    x = shares[0] * width_pt + side[0] * (gap + width / 2)
    y = shares[1] * height_pt + side[1] * (gap + height / 2)
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _size_pt(panel: Axes) -> tuple[float, float]:
    """Gives width and height of Axes, in points."""
    figure = panel.get_figure(root=True)
    size = (1.0, 1.0) if figure is None else (figure.get_figwidth(), figure.get_figheight())
    box = panel.get_position()
    return 72 * size[0] * box.width, 72 * size[1] * box.height


def _inside(panel: Axes, box: tuple[float, float, float, float]) -> bool:
    width_pt, height_pt = _size_pt(panel)
    return box[0] >= 0 and box[1] >= 0 and box[2] <= width_pt and box[3] <= height_pt


def _overlap(
    first: tuple[float, float, float, float], second: tuple[float, float, float, float]
) -> bool:
    apart = first[0] >= second[2] or second[0] >= first[2]
    return not (apart or first[1] >= second[3] or second[1] >= first[3])


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
    )
