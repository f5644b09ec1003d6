import numpy as np
import pytest

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two


@pytest.mark.parametrize("low", [1, 3, 16])
@pytest.mark.parametrize("high", [32, 33, 1000])
def test_powers_of_two_are_those_between_the_bounds(low, high):
    assert powers_of_two(low, high) == tuple(2**k for k in range(20) if low <= 2**k <= high)


@pytest.mark.parametrize(("low", "high"), [(0, 8), (9, 15), (16, 8)])
def test_bounds_without_a_power_of_two_are_refused(low, high):
    with pytest.raises(ValueError, match=f"low={low}, high={high}"):
        powers_of_two(low, high)


@pytest.mark.parametrize("bounds", [(1.0, 8), (1, None), (True, 8)])
def test_bounds_that_are_no_integers_are_refused(bounds):
    with pytest.raises(TypeError, match=r"must be an integer, in examples\. Received: (low|high)="):
        powers_of_two(*bounds)


@pytest.mark.parametrize("check", [lambda n: check_batch_sizes((n,)), lambda n: check_size(n, "n")])
def test_a_size_beyond_all_counters_is_refused(check):
    check(2**53)
    with pytest.raises(ValueError, match=r"at most 2\*\*53.*Received: .*9007199254740993"):
        check(2**53 + 1)


@pytest.mark.parametrize(
    "sizes",
    [
        range(16, 33, 16),
        np.array([16, 32]),
        iter([16, 32]),
    ],
)
def test_every_form_of_ascending_integers_gives_python_integers(sizes):
    checked = check_batch_sizes(sizes)
    assert checked == (16, 32)
    assert [type(size) for size in checked] == [int, int]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([], ValueError, "is empty"),
        ([0, 8], ValueError, "positive"),
        ([8, 8], ValueError, "repeats"),
        ([16, 8], ValueError, "ascending"),
        ([8.0, 16], TypeError, "integers"),
        (["8"], TypeError, "integers"),
        ([True, 8], TypeError, "integers"),
        ("8, 16", TypeError, "sequence of integers"),
        (None, TypeError, "sequence of integers"),
    ],
)
def test_bad_batch_sizes_say_what_to_give_and_what_came(sizes, error, message):
    with pytest.raises(error, match=f"{message}.*Received: batch_sizes="):
        check_batch_sizes(sizes)
