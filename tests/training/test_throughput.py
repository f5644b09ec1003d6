"""The windows of steady steps, and their throughput."""

import numpy as np
import pytest

from kbatch.records.training_run import throughput_of_windows
from kbatch.training.callbacks import steady_windows


def steps(seed, n, mean_s):
    rng = np.random.default_rng(seed)
    examples = rng.integers(1, 65, size=n).tolist()
    durations = rng.exponential(mean_s, size=n).tolist()
    return examples, durations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean_s", [1e-4, 1e-2, 0.2])
def test_windows_hold_every_steady_step_are_long_enough_and_not_too_many(seed, mean_s):
    examples, durations = steps(seed, 3000, mean_s)
    window_examples, window_durations = steady_windows([*zip(examples, durations, strict=True)])
    assert sum(window_examples) == sum(examples)
    np.testing.assert_allclose(sum(window_durations), sum(durations))
    assert min(window_durations) >= 0.05
    assert len(window_durations) <= 200


def test_a_training_shorter_than_a_window_is_one_window():
    assert steady_windows([(8, 0.01), (8, 0.01), (8, 0.02)]) == ([24], [0.04])


def test_nothing_steady_is_no_window():
    assert steady_windows([]) == ([], [])
    assert throughput_of_windows([], []) is None


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
