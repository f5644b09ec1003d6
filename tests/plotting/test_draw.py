"""Ticks of batch sizes and of logarithmic axes, and figures with thousands of marks."""

import base64
import io
import itertools
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from kbatch.analysis.intervals import Estimate
from kbatch.plotting import draw
from kbatch.plotting.canvas import detached_axes, figure_bytes, panels, svg_address, write_title
from kbatch.plotting.draw import batch_axis, batch_ticks, plain_log_labels


@pytest.mark.parametrize(
    "sizes", [[64], [1, 2], [16, 32, 64], range(10, 101, 5), range(1, 2000), [30, 31, 32]]
)
def test_batch_ticks(sizes):
    ticks = batch_ticks(sizes)
    assert ticks == sorted(set(ticks) & set(sizes))
    assert ticks[0] == min(sizes)
    assert len(ticks) <= 13
    span = math.log2(max(sizes) / min(sizes))
    gaps = [math.log2(b / a) for a, b in itertools.pairwise(ticks)]
    assert all(gap >= span / 12 for gap in gaps)


def test_batch_axis():
    ax = Figure().add_subplot()
    batch_axis(ax, [1024, 16, 128], "Batch size")
    assert ax.get_xscale() == "log"
    assert ax.xaxis.get_transform().base == 2
    assert [text.get_text() for text in ax.get_xticklabels()] == ["16", "128", "1,024"]
    low, high = ax.get_xlim()
    assert 0 < low < 16 < 1024 < high


def test_removed_axes_are_refused():
    (ax := Figure().add_subplot()).remove()
    for use in (lambda: panels(ax, 3.0), lambda: figure_bytes(ax, ".png")):
        with pytest.raises(ValueError, match="other Axes"):
            use()


def test_write_title_orders_the_legend_by_rows():
    panel = detached_axes(3)
    for name in (names := [f"{2**n}" for n in range(8)]):
        panel.plot([1], [1], label=name)
    write_title(panel, "Title", columns=7)
    panel.figure.draw_without_rendering()
    texts = panel.get_legend().get_texts()
    boxes = {text.get_text(): text.get_window_extent() for text in texts}
    assert sorted(boxes, key=lambda name: (-round(boxes[name].y0), boxes[name].x0)) == names
    assert boxes["8"].y0 == boxes["1"].y0 > boxes["16"].y0  # Two rows of four.


MARGINS_IN = 1.0


def labels(width_in, low, span):
    """Return the labels of an x axis of this width, with their boxes."""
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
def test_plain_log_labels_do_not_overlap(low, span, width_in):
    found = labels(width_in, low, span)
    assert len(found) >= 2
    for (left, first), (right, second) in itertools.pairwise(found):
        assert first.x1 < second.x0, f"{left} touches {right}"


def test_series_with_many_marks_is_rasterized():
    panel, values = detached_axes(3), np.random.default_rng(0).random(3_000).tolist()
    rows = [(place, Estimate(v, v - 0.1, v + 0.1)) for place, v in enumerate(values)]
    draw.series(panel, 0, rows, label="a")
    assert len(figure_bytes(panel, ".svg")) < 600_000
    page = base64.b64decode(svg_address(panel).partition(",")[2]).decode()
    found = re.search(r'href="data:image/png;base64,\s*([^"]+)"[^>]* width="([\d.]+)"', page)
    pixels = Image.open(io.BytesIO(base64.b64decode(found[1]))).width
    # The resolution of a PNG file.
    assert pixels == pytest.approx(float(found[2]) * 200 / 72, abs=1)


def test_follows_within_a_fifth():
    assert draw.follows(lambda size: 2.0 * size, {1: 2.2, 8: 15.0})
    assert not draw.follows(lambda size: 2.0 * size, {1: 3.0, 8: 16.0})
