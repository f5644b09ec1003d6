import itertools

import numpy as np
import pytest

from kbatch.throughput.result import TimedUpdate, choose_micro_batch

SIZES = (8, 16, 32, 64)


def way(size, seconds, *, rounds=None):
    """A size whose examples take so many seconds in each round."""
    seconds = tuple(seconds)
    return TimedUpdate(
        size, size, tuple(rounds or range(len(seconds))), tuple(size * s for s in seconds)
    )


def steady(size, seconds, count=5):
    """Times of a quiet machine: half a percent up and down."""
    return way(size, (seconds * (1 + 0.005 * (-1) ** number) for number in range(count)))


def chosen(*ways):
    found, gain = choose_micro_batch(ways)
    return found.micro_batch_size, gain


def test_of_all_orders_the_largest_within_two_percent_of_the_fastest_is_chosen():
    for speeds in itertools.product((1.0, 1.01, 1.3), repeat=4):
        size, gain = chosen(*itertools.starmap(steady, zip(SIZES, speeds, strict=True)))
        least = min(speeds)
        assert size == max(s for s, t in zip(SIZES, speeds, strict=True) if t <= 1.02 * least)
        if size == SIZES[-1]:
            assert gain is None
        else:
            exact = speeds[-1] / speeds[SIZES.index(size)]
            assert gain.value == pytest.approx(exact, rel=1e-9)
            assert gain.value > 1.02


def test_a_machine_that_drifts_slows_all_alike():
    drift = (1.0, 3.0, 0.5, 2.0, 1.0)
    size, gain = chosen(way(8, drift), way(16, (1.2 * d for d in drift)))
    assert (size, gain.value) == (8, pytest.approx(1.2))


def test_what_noise_hides_is_a_tie_and_so_is_what_few_rounds_show():
    assert chosen(steady(8, 1.0), way(16, [1.0, 2.0, 0.7, 1.6, 1.1]))[0] == 16
    for common in (1, 2):
        assert chosen(way(8, [1.0] * common), way(16, [3.0] * 5))[0] == 16


def test_sizes_are_compared_in_the_rounds_that_all_have():
    # The larger one left early, before the machine got slower.
    small = way(8, (1.0 if number < 4 else 9.0 for number in range(9)))
    size, gain = chosen(small, way(16, [2.0] * 4))
    assert (size, gain.value, gain.n) == (8, 2.0, 4)
    assert chosen(way(4, [1.0])) == (4, None)
    for none in ([], [way(8, [])], [way(8, [1.0]), way(16, [1.0], rounds=[1])]):
        with pytest.raises(ValueError, match=r"at least one round that all have.*Received: "):
            choose_micro_batch(none)


def test_of_sizes_that_are_alike_the_largest_is_nearly_always_chosen():
    rng = np.random.default_rng(0)
    found = [
        chosen(*(way(size, np.exp(rng.normal(0, 0.05, 9)).tolist()) for size in SIZES))[0]
        for _ in range(400)
    ]
    assert found.count(64) > 0.9 * len(found)
