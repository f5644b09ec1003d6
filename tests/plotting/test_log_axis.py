import itertools

import pytest
from matplotlib.figure import Figure

from kbatch.plotting.axes import plain_log_labels

MARGINS_IN = 1.0


def labels(width_in, low, span):
    """The labels of an x axis so wide, with the boxes that they take."""
    figure = Figure(figsize=(width_in + MARGINS_IN, 2))
    share = width_in / (width_in + MARGINS_IN)
    axes = figure.add_axes(((1 - share) / 2, 0.4, share, 0.5))
    axes.set_xscale("log")
    axes.set_xlim(low, low * span)
    plain_log_labels(axes.xaxis)
    axes.tick_params(labelsize=9)
    figure.draw_without_rendering()
    ticks = [t for t in axes.xaxis.get_major_ticks() if low <= t.get_loc() <= low * span]
    return [(tick.label1.get_text(), tick.label1.get_window_extent()) for tick in ticks]


@pytest.mark.parametrize("width_in", [2.5, 6])
@pytest.mark.parametrize(
    ("low", "span"), [(1360, 2.2), (1360, 3.5), (0.3, 8), (3, 40), (900, 40), (1, 1e6)]
)
def test_labels_stand_apart_and_there_are_two_to_compare(low, span, width_in):
    found = labels(width_in, low, span)
    assert len(found) >= 2
    for (left, first), (right, second) in itertools.pairwise(found):
        assert first.x1 < second.x0, f"{left} touches {right}"
