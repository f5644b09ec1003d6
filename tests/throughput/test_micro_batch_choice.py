import itertools

import numpy as np
import pytest

from kbatch.throughput.choice import choose_micro_batch, sizes_to_leave

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
        found = choose_micro_batch(times_s)
        assert found.micro_batch_size == expected
        assert found.fastest == max(s for s, t in zip(SIZES, speeds, strict=True) if t == least)
        assert found.fastest <= expected
        if expected == SIZES[-1]:
            assert found.gain is None
        else:
            exact = speeds[-1] / speeds[SIZES.index(expected)]
            assert found.gain.value == pytest.approx(exact, rel=1e-9)
            assert found.gain.value > 1.02


def test_the_order_in_which_sizes_were_timed_does_not_matter():
    times_s = {8: steady(1.0), 16: steady(2.0), 32: steady(1.005), 64: steady(1.5)}
    for order in itertools.permutations(times_s):
        assert choose_micro_batch({size: times_s[size] for size in order}).micro_batch_size == 32


def test_the_unit_of_time_does_not_matter():
    times_s = {8: steady(1.0), 16: steady(0.7), 32: steady(0.9)}
    scaled = {s: {n: 1e-3 * t for n, t in each.items()} for s, each in times_s.items()}
    one, other = choose_micro_batch(times_s), choose_micro_batch(scaled)
    assert (one.micro_batch_size, one.fastest) == (other.micro_batch_size, other.fastest)
    assert one.gain.value == pytest.approx(other.gain.value)


def test_a_machine_that_drifts_slows_all_alike():
    drift = (1.0, 3.0, 0.5, 2.0, 1.0)
    times_s = {8: rounds(drift), 16: rounds(1.2 * d for d in drift)}
    found = choose_micro_batch(times_s)
    assert found.micro_batch_size == 8
    assert found.gain.value == pytest.approx(1.2)


def test_what_noise_hides_is_a_tie():
    noisy = rounds([1.0, 2.0, 0.7, 1.6, 1.1])
    assert choose_micro_batch({8: steady(1.0), 16: noisy}).micro_batch_size == 16


@pytest.mark.parametrize("common", [1, 2])
def test_with_too_few_rounds_in_common_nothing_is_slower(common):
    times_s = {8: rounds([1.0] * common), 16: rounds([3.0] * 5)}
    assert choose_micro_batch(times_s).micro_batch_size == 16


def test_sizes_are_compared_in_the_rounds_that_all_have():
    # The larger one left early, before the machine got slower.
    small = {number: 1.0 if number < 4 else 9.0 for number in range(9)}
    large = dict.fromkeys(range(4), 2.0)
    found = choose_micro_batch({8: small, 16: large})
    assert (found.fastest, found.micro_batch_size) == (8, 8)
    assert (found.gain.value, found.gain.rounds) == (2.0, 4)


def test_a_size_alone_is_the_choice():
    found = choose_micro_batch({4: {0: 1.0}})
    assert (found.micro_batch_size, found.fastest, found.gain) == (4, 4, None)


def test_of_sizes_that_are_alike_the_largest_is_nearly_always_chosen():
    rng = np.random.default_rng(0)
    chosen = [
        choose_micro_batch(
            {size: rounds(np.exp(rng.normal(0, 0.05, 9))) for size in SIZES}
        ).micro_batch_size
        for _ in range(400)
    ]
    assert chosen.count(64) > 0.9 * len(chosen)


@pytest.mark.parametrize(
    "times_s", [{}, {8: {}}, {8: {0: 1.0}, 16: {}}, {8: {0: 1.0}, 16: {1: 1.0}}]
)
def test_sizes_without_a_common_round_are_refused(times_s):
    with pytest.raises(ValueError, match=r"at least one round that all have.*Received: rounds="):
        choose_micro_batch(times_s)


def timed(speeds, count):
    return {size: steady(speed, count) for size, speed in speeds.items()}


def test_after_two_rounds_the_largest_and_the_fastest_of_the_others_go_on():
    for speeds in itertools.permutations((0.8, 1.0, 1.1, 1.3)):
        by_size = dict(zip(SIZES, speeds, strict=True))
        assert sizes_to_leave(timed(by_size, 1)) == frozenset()
        rival = min(SIZES[:-1], key=by_size.__getitem__)
        assert sizes_to_leave(timed(by_size, 2)) == set(SIZES) - {rival, 64}


@pytest.mark.parametrize(("rival", "rounds"), [(0.8, 6), (0.95, 6), (1.0, 3), (1.1, 3), (2.0, 3)])
def test_a_duel_ends_when_it_is_certain_which_is_faster_or_that_neither_is_by_2_percent(
    rival, rounds
):
    for count in range(1, 10):
        leaving = sizes_to_leave(timed({16: rival, 64: 1.0}, count))
        assert leaving == (frozenset() if count < rounds else {16, 64}), count


def test_a_duel_that_noise_hides_goes_on():
    noisy = rounds([1.0, 2.0, 0.7, 1.6, 1.1, 0.8, 1.3, 0.9])
    assert sizes_to_leave({16: noisy, 64: steady(1.1, 8)}) == frozenset()


def test_a_size_alone_needs_no_further_round():
    assert sizes_to_leave({64: steady(1.0, 1)}) == {64}


def searched(speeds, *, budget, rng):
    """Plays rounds until the time is spent; returns the choice of those that stayed."""
    live, spent, times_s = set(speeds), 0.0, {size: {} for size in speeds}
    for number in range(24):
        drift = np.exp(rng.normal(0, 0.1))
        for size in sorted(live):
            times_s[size][number] = speeds[size] * drift * np.exp(rng.normal(0, 0.04))
            spent += times_s[size][number]
        leaving = sizes_to_leave({size: times_s[size] for size in live})
        if leaving == live or spent > budget:
            break
        live -= leaving
    return choose_micro_batch({size: times_s[size] for size in live}).micro_batch_size


@pytest.mark.parametrize(("gain", "least", "most"), [(1.1, 0.85, 1.0), (1.0, 0.0, 0.1)])
def test_in_the_time_of_four_rounds_of_all_sizes_a_gain_of_a_tenth_is_found(gain, least, most):
    rng = np.random.default_rng(0)
    speeds = {8: 1.2, 16: 1.05, 32: 1.0, 64: gain}
    found = [searched(speeds, budget=20.0, rng=rng) for _ in range(200)]
    assert least <= np.mean([size != 64 for size in found]) <= most
