import numpy as np
import pytest

from kbatch.recommendation.limits import TimedUpdate, TimeInFit, update_time_s

SIZES = (1, 16, 32, 100, 256, 1000)


def test_the_line_goes_through_both_times():
    line = TimeInFit({256: 4e-3, 32: 1e-3})
    assert (line.time_s(32), line.time_s(256)) == pytest.approx((1e-3, 4e-3))
    assert line.time_s(144) == pytest.approx(2.5e-3)


def test_a_line_is_met_wherever_its_parts_are_positive():
    line = TimeInFit({b: 1e-3 + 1e-5 * b for b in (32, 256)})
    times = [line.time_s(size) for size in SIZES]
    np.testing.assert_allclose(times, [1e-3 + 1e-5 * size for size in SIZES])


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        # One size tells of no fixed part.
        ({10: 0.1}, {1: 0.01, 10: 0.1, 40: 0.4}),
        # A larger batch that took no longer has no cost an example.
        ({10: 0.1, 20: 0.09}, {1: 0.1, 10: 0.1, 15: 0.095, 20: 0.09, 40: 0.09}),
        # Twice the examples in more than twice the time have no fixed part.
        ({10: 0.1, 20: 0.3}, {1: 0.01, 10: 0.1, 20: 0.3, 40: 0.7}),
    ],
)
def test_no_part_is_below_0(times_s, expected):
    line = TimeInFit(times_s)
    assert {size: line.time_s(size) for size in expected} == pytest.approx(expected)


def test_slower_measurements_never_give_a_shorter_time_between_them():
    fast, slow = (
        TimeInFit({32: 1e-3, 256: 4e-3}),
        TimeInFit({32: 3e-3, 256: 4.1e-3}),
    )
    for size in range(32, 257):
        assert fast.time_s(size) <= slow.time_s(size)


def test_parts_of_a_batch_take_their_own_time_and_what_fit_adds():
    beside = TimeInFit({32: 1e-4, 256: 1e-4})
    line = TimeInFit({32: 1e-3, 256: 8e-3}, beside=beside, example_s=1e-6)
    assert update_time_s(TimedUpdate(256, 256, 7e-3), line) == pytest.approx(8e-3)
    assert update_time_s(TimedUpdate(256, 32, 4e-3), line) == pytest.approx(4.1e-3)
    # No update is faster than its data.
    slow = TimeInFit({32: 1e-3, 256: 8e-3}, beside=beside, example_s=1e-4)
    for micro in (256, 32):
        assert update_time_s(TimedUpdate(256, micro, 4e-3), slow) == pytest.approx(25.6e-3)
    # Where what is added is not known the whole batch's time is the least.
    plain = TimeInFit({32: 1e-3, 256: 8e-3})
    assert update_time_s(TimedUpdate(256, 32, 4e-3), plain) == pytest.approx(8e-3)
