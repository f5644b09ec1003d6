import numpy as np
import pytest

from kbatch.analysis.batch_choice import TIE, TimedUpdate
from kbatch.analysis.goodput_search import Tried, forecast_updates
from kbatch.analysis.time_in_fit import TimeInFit
from kbatch.analysis.trained_choice import (
    choose_by_forecast,
    costs_of_updates,
    critical_batch_size,
    faster_untrained,
    update_cost_at,
)

SIZES = tuple(2**k for k in range(3, 12))
UPDATES = [TimedUpdate(size, size, 1e-3 + 5e-6 * size) for size in SIZES]
PARTS = [TimedUpdate(size, 8, 1.0) for size in SIZES if size > 8]


def run(size, needed):
    return Tried(size, needed * costs_of_updates(UPDATES).update_costs[size], needed, 60.0, 40.0)


def trained(law, sizes=(32, 256, 2048)):
    runs = [run(size, law(size)) for size in sizes]
    return forecast_updates(costs_of_updates(UPDATES), runs)


def root(size):
    """Updates under a learning rate that grows with the root and is small at every size."""
    return 4000 / np.sqrt(size)


def curve(size):
    return 200 * (1 + 30 / size)


def test_the_fastest_way_of_a_size_stands_for_it_and_waits_for_its_batch():
    costs = costs_of_updates([*UPDATES, *PARTS], in_fit=TimeInFit.through({1: 1e-5}))
    assert costs.update_costs[8] == pytest.approx(1e-3 + 4e-5)
    assert costs.update_costs[2048] == pytest.approx(2048e-5)


@pytest.mark.parametrize("law", [root, curve])
def test_the_size_is_the_smallest_within_a_tie_of_the_least_forecast_time(law):
    forecast = trained(law)
    times = {u.batch_size: forecast.updates[u.batch_size] * u.time_s for u in UPDATES}
    choice = choose_by_forecast([*UPDATES, *PARTS], forecast, largest=SIZES[-1])
    assert times[choice.best.batch_size] <= (1 + TIE) * min(times.values())
    assert all(
        times[size] > (1 + TIE) * min(times.values())
        for size in SIZES
        if size < choice.best.batch_size
    )
    assert not choice.best.accumulated
    assert choice.smallest <= choice.best.batch_size <= choice.largest


def test_updates_that_keep_falling_ask_for_a_larger_batch_than_the_noise_scale():
    best = [choose_by_forecast(UPDATES, trained(law), largest=2048).best for law in (root, curve)]
    assert best[0].batch_size > best[1].batch_size


def test_a_slow_pipeline_asks_for_no_larger_batch():
    forecast = trained(root)
    slow = choose_by_forecast(
        UPDATES, forecast, largest=SIZES[-1], in_fit=TimeInFit.through({1: 1e-4})
    )
    assert (
        slow.best.batch_size
        < choose_by_forecast(UPDATES, forecast, largest=SIZES[-1]).best.batch_size
    )


def test_the_critical_size_is_that_of_the_runs():
    found = critical_batch_size(trained(curve), runs=3)
    assert found.value == pytest.approx(30, rel=0.4)
    assert found.at_least == found.interval.low < found.value < found.interval.high
    assert found.measurements == 3


def test_no_size_is_chosen_beyond_the_largest_that_came_to_the_target():
    forecast = trained(root)
    assert choose_by_forecast(UPDATES, forecast, largest=2048).best.batch_size > 64
    assert choose_by_forecast(UPDATES, forecast, largest=64).best.batch_size <= 64


def test_sizes_tie_only_up_to_the_largest_that_came_to_the_target():
    costs = costs_of_updates(UPDATES)
    runs = [run(size, root(size)) for size in (32, 64)]
    everywhere, bounded = (forecast_updates(costs, runs, largest=most) for most in (None, 64))
    assert max(everywhere.tied) > 64
    # The best of those that may be named ties with itself.
    assert max(bounded.tied) == 64
    assert bounded.updates == everywhere.updates
    for forecast in (everywhere, bounded):
        choice = choose_by_forecast(UPDATES, forecast, largest=64)
        assert choice.smallest <= choice.best.batch_size <= choice.largest == 64
    assert min(faster_untrained(costs, everywhere, runs=runs)) > 64
    broken = [*runs, Tried(128, None, None)]
    assert faster_untrained(costs, everywhere, runs=broken) == ()
    done = [*runs, *(run(size, 1e6) for size in (128, 2048))]
    assert faster_untrained(costs, everywhere, runs=done) == ()


def test_without_a_size_that_came_to_the_target_there_is_none_to_name():
    assert choose_by_forecast(UPDATES, trained(root), largest=SIZES[0] - 1).best is None


def test_the_cost_of_a_size_that_was_not_timed_follows_its_neighbours():
    costs = costs_of_updates(UPDATES)
    for size in (4, 8, 48, 3000):
        assert update_cost_at(costs, size) == pytest.approx(1e-3 + 5e-6 * size)
