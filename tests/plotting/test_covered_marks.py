"""Thousands of marks, which are pixels in a vector file: as shapes they are heavy and slow."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from kbatch.plotting import draw
from kbatch.plotting.canvas import detached_axes
from kbatch.plotting.saving import figure_bytes, svg_address


def drawn(count):
    """Draw so many marks with bars, some of them beside each other."""
    panel, values = detached_axes(3), np.random.default_rng(0).random(count)
    bounds = [(v - 0.1, v + 0.1) for v in values]
    draw.series(panel, 0, range(count), list(values), label="a", bounds=bounds, joined=False)
    return panel


@pytest.mark.parametrize(("count", "pixels"), [(500, False), (501, True)])
def test_many_marks_of_a_series_and_their_bars_are_pixels(count, pixels):
    panel = drawn(count)
    (line,), (bars,) = panel.lines, panel.collections
    assert (line.get_rasterized(), bars.get_rasterized()) == (pixels, pixels)
    assert len(line.get_xdata()) == len(bars.get_segments()) == count
    assert (b"<image" in figure_bytes(panel, ".svg")) is pixels


def test_a_file_of_ten_thousand_marks_stays_small_and_its_pixels_come_along_in_a_page():
    panel = drawn(10_000)
    assert len(figure_bytes(panel, ".svg")) < 1_000_000
    page = base64.b64decode(svg_address(panel).partition(",")[2]).decode()
    found = re.search(r'href="data:image/png;base64,\s*([^"]+)"[^>]* width="([\d.]+)"', page)
    pixels = Image.open(io.BytesIO(base64.b64decode(found[1]))).width
    # As sharp as a PNG file.
    assert pixels == pytest.approx(float(found[2]) * 200 / 72, abs=1)
