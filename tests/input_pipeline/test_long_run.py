import itertools

import numpy as np
import pytest

from kbatch.input_pipeline.rates import long_run


def chunked(*, pause_s, burst, batch_s, read_s):
    """Arrivals of batches that come in chunks, each after a pause."""
    now_s, found = 0.0, []
    while now_s < read_s:
        for place in range(burst):
            now_s += batch_s + (pause_s if place == 0 else 0.0)
            found.append(now_s)
    return [one for one in found if one <= read_s]


def read(arrivals_s, *, rows=8, epochs=None):
    return long_run([rows] * len(arrivals_s), arrivals_s, epochs=epochs or [0] * len(arrivals_s))


def test_the_bounds_hold_the_rate_of_periodic_chunks():
    for pause_s, burst, periods in itertools.product(
        (0.2, 1.0), (5, 50), (2.3, 3.0, 3.7, 5.5, 20.2)
    ):
        period_s = pause_s + burst * 0.002
        truth = 8 * burst / period_s
        found = read(
            chunked(pause_s=pause_s, burst=burst, batch_s=0.002, read_s=periods * period_s)
        )
        low, high = found.bounds
        assert low <= truth * 1.001
        assert high >= truth * 0.999
        if found.basis == "whole chunks":
            assert low == high == pytest.approx(truth)
        else:
            assert periods < 4


def test_a_single_pause_is_counted_once_or_not_at_all():
    found = read([1.0, 1.1, 1.2, 1.3])
    assert found.basis == "part of the data"
    assert found.bounds == pytest.approx((32 / 1.3, 24 / 0.3))


def test_even_batches_have_one_rate_whatever_the_start():
    assert read([0.1 * i for i in range(1, 30)]).bounds == pytest.approx((80, 80))
    slow_start = [3 + 0.1 * i for i in range(30)]
    low, high = read(slow_start).bounds
    assert high == pytest.approx(80)
    assert low == pytest.approx(240 / 5.9)


def test_whole_epochs_count_with_their_start():
    # A buffer is filled for a second, then five batches come at once.
    arrivals_s = [epoch + 1 + 0.001 * i for epoch in range(3) for i in range(5)]
    epochs = [epoch for epoch in range(3) for _ in range(5)]
    found = read(arrivals_s[:12], epochs=epochs[:12])
    assert found.basis == "whole epochs"
    assert found.examples == 80
    assert found.bounds == pytest.approx((40, 40))


def test_ragged_batches_are_counted_by_their_examples():
    found = long_run([8, 8, 4, 8, 8, 4, 8], [1, 2, 3, 4, 5, 6, 7], epochs=[0, 0, 0, 1, 1, 1, 2])
    assert found.bounds == pytest.approx((40 / 6, 40 / 6))


def test_bounds_are_in_order_on_random_arrivals():
    rng = np.random.default_rng(0)
    for _ in range(200):
        arrivals_s = np.cumsum(rng.lognormal(0, 2, rng.integers(2, 40)))
        rows = rng.integers(1, 9, len(arrivals_s))
        found = long_run(rows, arrivals_s, epochs=[0] * len(arrivals_s))
        low, high = found.bounds
        assert 0 < low <= high
