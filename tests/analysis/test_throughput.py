import numpy as np
import pytest

from kbatch.analysis.throughput import (
    MOST_WINDOWS,
    SHORTEST_WINDOW_S,
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


def test_the_mean_has_the_slow_windows_in_it_and_the_median_shows_most_of_them():
    durations = [0.1] * 7 + [5.0] * 3
    found = throughput_of_windows([100] * 10, durations)
    assert found.mean == pytest.approx(1000 / 15.7)
    assert found.median == pytest.approx(1000)


def test_quartiles_enclose_the_median():
    rng = np.random.default_rng(1)
    rates = rng.uniform(100, 200, size=50)
    found = throughput_of_windows([60] * 50, 60 / rates)
    np.testing.assert_allclose(
        [found.low, found.median, found.high], np.percentile(rates, [25, 50, 75])
    )
    assert found.windows == 50
