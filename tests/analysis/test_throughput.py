"""Throughput of windows, energy of readings, and series that stay short."""

import numpy as np
import pytest

from kbatch.analysis.throughput import (
    MOST_WINDOWS,
    SHORTEST_WINDOW_S,
    ThinnedSeries,
    steady_windows,
    throughput_of_windows,
)


def steps(seed, n, mean_s):
    rng = np.random.default_rng(seed)
    examples = rng.integers(1, 65, size=n).tolist()
    durations = rng.exponential(mean_s, size=n).tolist()
    steady = (rng.random(n) > 0.2).tolist()
    return examples, durations, steady


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mean_s", [1e-4, 1e-2, 0.2])
def test_windows_keep_every_steady_example_and_second(seed, mean_s):
    examples, durations, steady = steps(seed, 300, mean_s)
    window_examples, window_durations = steady_windows(examples, durations, steady)
    assert sum(window_examples) == np.sum(np.array(examples)[steady])
    np.testing.assert_allclose(sum(window_durations), np.sum(np.array(durations)[steady]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mean_s", [1e-3, 1e-2, 0.2])
def test_windows_are_long_enough_and_not_too_many(seed, mean_s):
    _, window_durations = steady_windows(*steps(seed, 3000, mean_s))
    assert min(window_durations) >= SHORTEST_WINDOW_S
    assert len(window_durations) <= MOST_WINDOWS


def test_a_training_shorter_than_a_window_is_one_window():
    assert steady_windows([8] * 3, [0.01, 0.01, 0.02], [True] * 3) == ([24], [0.04])


def test_nothing_steady_is_no_window():
    assert steady_windows([8, 8], [1.0, 2.0], [False, False]) == ([], [])
    assert throughput_of_windows([], []) is None


def test_the_order_of_windows_does_not_matter():
    rng = np.random.default_rng(0)
    examples, durations = rng.integers(1, 100, 20), rng.uniform(0.05, 1, 20)
    order = rng.permutation(20)
    assert throughput_of_windows(examples, durations) == throughput_of_windows(
        examples[order], durations[order]
    )


def test_the_value_has_the_slow_windows_in_it_and_the_quartiles_are_drawn_out_to_it():
    rng = np.random.default_rng(1)
    rates = rng.uniform(100, 200, size=50)
    found = throughput_of_windows([60] * 50, 60 / rates)
    assert found.value == pytest.approx(3000 / (60 / rates).sum())
    np.testing.assert_allclose(found.ends, np.percentile(rates, [25, 75]))
    slow = throughput_of_windows([100] * 10, [0.1] * 8 + [5.0] * 2)
    assert slow.ends == (slow.value, pytest.approx(1000))
    assert slow.value == pytest.approx(1000 / 10.8)
    assert throughput_of_windows([100], [0.1]).ends is None


def series(readings, most):
    found = ThinnedSeries(columns=len(readings[0]) if readings else 1, most=most)
    for reading in readings:
        found.add(reading)
    return found


def known_mean(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def naive_means(readings, most):
    """Cuts the whole series into pieces of the shortest power of two that leaves few enough."""
    length = 1
    while len(readings) > most * length:
        length *= 2
    pieces = [readings[start : start + length] for start in range(0, len(readings), length)]
    return [tuple(known_mean(column) for column in zip(*piece, strict=True)) for piece in pieces]


def as_floats(rows):
    return [[np.nan if value is None else value for value in row] for row in rows]


@pytest.mark.parametrize("most", [2, 4, 10])
@pytest.mark.parametrize("count", [1, 3, 9, 41, 333])
def test_the_pieces_are_those_of_the_whole_series(count, most):
    rng = np.random.default_rng(count)
    readings = [
        tuple(None if rng.random() < 0.2 else float(rng.normal()) for _ in range(3))
        for _ in range(count)
    ]
    found = series(readings, most)
    np.testing.assert_allclose(as_floats(found.means), as_floats(naive_means(readings, most)))
    np.testing.assert_allclose(as_floats([found.mean]), as_floats(naive_means([*readings], 1)[:1]))
    assert found.readings == count


def test_there_are_never_more_than_the_bound_and_never_needlessly_few():
    for count in range(1, 70):
        assert min(count, 4) <= len(series([(1.0,)] * count, 8).means) <= 8


@pytest.mark.parametrize("most", [0, 3, -2])
def test_a_bound_that_cannot_be_halved_is_refused(most):
    with pytest.raises(ValueError, match=f"even.*Received: most={most}"):
        ThinnedSeries(columns=1, most=most)
