"""Powers of two, and the checks of batch sizes."""

import numpy as np
import pytest

from kbatch.analysis.batch_sizes import check_batch_sizes, powers_of_two


@pytest.mark.parametrize("low", [1, 3, 16])
@pytest.mark.parametrize("high", [32, 33, 1000])
def test_powers_of_two_between_the_bounds(low, high):
    assert powers_of_two(low, high) == tuple(2**k for k in range(20) if low <= 2**k <= high)


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ((0, 8), ValueError, "positive.*low=0"),
        ((9, 15), ValueError, "low=9, high=15"),
        ((16, 8), ValueError, "low=16, high=8"),
        ((1.0, 8), TypeError, r"integer.*low=1\.0"),
        ((1, None), TypeError, "integer.*high=None"),
        ((True, 8), TypeError, "integer.*low=True"),
        ((np.array([4]), 8), TypeError, "integer.*low=array"),
    ],
)
def test_powers_of_two_refuses_bad_bounds(bounds, error, words):
    with pytest.raises(error, match=words):
        powers_of_two(*bounds)


@pytest.mark.parametrize("sizes", [range(16, 33, 16), np.array([16, 32]), iter([16, 32])])
def test_check_batch_sizes_returns_python_integers(sizes):
    checked = check_batch_sizes(sizes)
    assert checked == (16, 32)
    assert [type(size) for size in checked] == [int, int]


@pytest.mark.parametrize(
    ("sizes", "error", "word"),
    [
        ([], ValueError, "ascending"),
        ([0, 8], ValueError, "positive"),
        ([8, 8], ValueError, "duplicates"),
        ([16, 8], ValueError, "ascending"),
        ([8.0, 16], TypeError, "integers"),
        ([True, 8], TypeError, "integers"),
        ("8, 16", TypeError, "positive integers"),
        (None, TypeError, "positive integers"),
    ],
)
def test_check_batch_sizes_refuses_bad_sizes(sizes, error, word):
    with pytest.raises(error, match=f"{word}.*Received: batch_sizes="):
        check_batch_sizes(sizes)
