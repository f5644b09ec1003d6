import random

import pytest

from kbatch.plotting.canvas import detached_axes
from kbatch.plotting.draw import Label, place_labels


def panel():
    axes = detached_axes(4.0)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    return axes


def boxes(axes):
    axes.figure.draw_without_rendering()
    # Places are computed before the layout: a pixel or two of slack.
    return [text.get_window_extent().padded(-2.0) for text in axes.texts]


@pytest.mark.parametrize("count", [1, 30, 100])
def test_labels_cover_neither_each_other_nor_a_mark(count):
    rng = random.Random(count)
    places = [(rng.uniform(0, 100), rng.uniform(0, 100)) for _ in range(count)]
    axes = panel()
    labels = [Label(place, f"{n:,}", ((1, 1), (-1, -1)), "black") for n, place in enumerate(places)]
    place_labels(axes, labels, places)
    found = boxes(axes)
    assert 0.8 * count < len(found) <= count
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])
    marks = axes.transData.transform(places)
    assert not any(box.contains(*mark) for box in found for mark in marks)
