import itertools

import numpy as np
import pytest

from kbatch.throughput.result import choose_micro_batch

SIZES = (8, 16, 32, 64)


def rounds(values):
    return dict(enumerate(values))


def steady(seconds, count=5):
    """Times of a quiet machine: half a percent up and down."""
    return rounds(seconds * (1 + 0.005 * (-1) ** number) for number in range(count))


def test_of_all_orders_the_largest_within_two_percent_of_the_fastest_is_chosen():
    for speeds in itertools.product((1.0, 1.01, 1.3), repeat=4):
        times_s = {size: steady(speed) for size, speed in zip(SIZES, speeds, strict=True)}
        least = min(speeds)
        expected = max(s for s, t in zip(SIZES, speeds, strict=True) if t <= 1.02 * least)
        size, gain = choose_micro_batch(times_s)
        assert size == expected
        if expected == SIZES[-1]:
            assert gain is None
        else:
            exact = speeds[-1] / speeds[SIZES.index(expected)]
            assert gain.value == pytest.approx(exact, rel=1e-9)
            assert gain.value > 1.02


def test_the_order_in_which_sizes_were_timed_does_not_matter():
    times_s = {8: steady(1.0), 16: steady(2.0), 32: steady(1.005), 64: steady(1.5)}
    for order in itertools.permutations(times_s):
        assert choose_micro_batch({size: times_s[size] for size in order})[0] == 32


def test_the_unit_of_time_does_not_matter():
    times_s = {8: steady(1.0), 16: steady(0.7), 32: steady(0.9)}
    scaled = {s: {n: 1e-3 * t for n, t in each.items()} for s, each in times_s.items()}
    (one, gain), (other, same) = choose_micro_batch(times_s), choose_micro_batch(scaled)
    assert one == other
    assert gain.value == pytest.approx(same.value)


def test_a_machine_that_drifts_slows_all_alike():
    drift = (1.0, 3.0, 0.5, 2.0, 1.0)
    times_s = {8: rounds(drift), 16: rounds(1.2 * d for d in drift)}
    size, gain = choose_micro_batch(times_s)
    assert size == 8
    assert gain.value == pytest.approx(1.2)


def test_what_noise_hides_is_a_tie():
    noisy = rounds([1.0, 2.0, 0.7, 1.6, 1.1])
    assert choose_micro_batch({8: steady(1.0), 16: noisy})[0] == 16


@pytest.mark.parametrize("common", [1, 2])
def test_with_too_few_rounds_in_common_nothing_is_slower(common):
    times_s = {8: rounds([1.0] * common), 16: rounds([3.0] * 5)}
    assert choose_micro_batch(times_s)[0] == 16


def test_sizes_are_compared_in_the_rounds_that_all_have():
    # The larger one left early, before the machine got slower.
    small = {number: 1.0 if number < 4 else 9.0 for number in range(9)}
    large = dict.fromkeys(range(4), 2.0)
    size, gain = choose_micro_batch({8: small, 16: large})
    assert (size, gain.value, gain.n) == (8, 2.0, 4)


def test_a_size_alone_is_the_choice():
    assert choose_micro_batch({4: {0: 1.0}}) == (4, None)


def test_of_sizes_that_are_alike_the_largest_is_nearly_always_chosen():
    rng = np.random.default_rng(0)
    chosen = [
        choose_micro_batch({size: rounds(np.exp(rng.normal(0, 0.05, 9))) for size in SIZES})[0]
        for _ in range(400)
    ]
    assert chosen.count(64) > 0.9 * len(chosen)


@pytest.mark.parametrize(
    "times_s", [{}, {8: {}}, {8: {0: 1.0}, 16: {}}, {8: {0: 1.0}, 16: {1: 1.0}}]
)
def test_sizes_without_a_common_round_are_refused(times_s):
    with pytest.raises(ValueError, match=r"at least one round that all have.*Received: rounds="):
        choose_micro_batch(times_s)
