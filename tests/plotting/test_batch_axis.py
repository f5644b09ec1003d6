import itertools
import math

import pytest
from matplotlib.figure import Figure

from kbatch.plotting.axes import batch_axis, batch_ticks


@pytest.mark.parametrize(
    "sizes", [[64], [1, 2], [16, 32, 64], range(10, 101, 5), range(1, 2000), [30, 31, 32]]
)
def test_ticks_are_batch_sizes_far_enough_apart_to_read(sizes):
    ticks = batch_ticks(sizes)
    assert ticks == sorted(set(ticks) & set(sizes))
    assert ticks[0] == min(sizes)
    assert len(ticks) <= 13
    span = math.log2(max(sizes) / min(sizes))
    gaps = [math.log2(b / a) for a, b in itertools.pairwise(ticks)]
    assert all(gap >= span / 12 for gap in gaps)


def test_the_axis_is_logarithmic_to_base_two_with_plain_integers():
    ax = Figure().add_subplot()
    batch_axis(ax, [1024, 16, 128], "Batch size")
    assert ax.get_xscale() == "log"
    assert ax.xaxis.get_transform().base == 2
    assert [text.get_text() for text in ax.get_xticklabels()] == ["16", "128", "1024"]
    low, high = ax.get_xlim()
    assert 0 < low < 16 < 1024 < high
