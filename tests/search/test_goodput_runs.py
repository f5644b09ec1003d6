"""Trials as runs of a search by goodput, without training any."""

import numpy as np
from records_factory import make_epochs, make_execution, make_trial

from kbatch.analysis.next_size import SizeCosts, forecast_updates, next_size
from kbatch.records.training_run import Target
from kbatch.search import goodput_costs
from kbatch.search.goodput_costs import costs_of
from kbatch.study.study import GoodputRecord
from kbatch.study.trial import Objective


def timed(batch_size, seconds, *, target=None, **changed):
    epochs = make_epochs([0.5, 0.8, 0.9, 0.9], train_s=seconds / 4, updates=10)
    return make_trial(
        batch_size, make_execution(batch_size, epochs=epochs, **changed, target=target)
    )


COSTS = SizeCosts({16: 0.1, 32: 0.15}, 2.0)


def runs_of(trials, objective):
    return goodput_costs.runs_of(trials, objective, COSTS)


def test_runs_to_a_target_have_its_cost():
    objective = Objective("seconds_to_target", "min")
    (met,) = runs_of([timed(16, 8.0, target=Target("val_accuracy", 0.8, "max"))], objective)
    (missed,) = runs_of([timed(32, 4.0, target=Target("val_accuracy", 1.0, "max"))], objective)
    assert (met.cost, met.updates) == (4.0, 20)
    assert missed.cost is None
    assert missed.updates > 0


def test_runs_of_equal_time_have_that_to_what_the_first_held():
    slow = timed(32, 16.0)
    first, second = runs_of([timed(16, 8.0), slow], Objective("val_accuracy", "max"))
    assert (first.cost, second.cost) == (6.0, 12.0)


def test_a_run_on_another_kind_of_device_costs_what_its_updates_cost_on_the_first():
    objective, pilot = Objective("val_accuracy", "max"), timed(16, 8.0, device="NVIDIA A100")
    first, other = runs_of([pilot, timed(32, 1.0, device="NVIDIA H100")], objective)
    assert (first.cost, other.cost) == (6.0, 2.0 + 30 * 0.15)
    _, same = runs_of([pilot, timed(32, 1.0, device="NVIDIA A100")], objective)
    assert same.cost == 0.75


def test_a_trial_out_of_memory_tells_that_it_cannot_be_trained():
    trials = [timed(16, 8.0), make_trial(64, status="out_of_memory")]
    assert runs_of(trials, Objective("val_accuracy", "max"))[1].updates is None


def test_a_trial_that_diverged_is_no_evidence_that_its_size_is_fast():
    objective = Objective("seconds_to_target", "min")
    costs = SizeCosts({size: 1e-3 + 1e-6 * size for size in (32, 128, 512, 1024)})
    target = Target("val_accuracy", 0.8, "max")
    met = timed(32, 8.0, target=target)
    # It trained for some updates before its loss became NaN.
    diverged = timed(512, 0.1, target=target, status="failed")
    alone, both = (runs_of(trials, objective) for trials in ([met], [met, diverged]))
    assert both[1].updates is None
    assert forecast_updates(costs, both) == forecast_updates(costs, alone)
    assert next_size(costs, alone).batch_size >= 512
    assert next_size(costs, both).batch_size < 512


SWEEP = GoodputRecord((16, 32), (0.001, 0.002), (), 1.0)


def test_what_training_takes_beside_the_step_is_added():
    real = make_trial(16, make_execution(16, rate=16 / 0.0015, first_step_s=0.7))
    costs = costs_of(SWEEP, [real], objective=Objective("seconds_to_target", "min"))
    assert costs.start_cost == 0.7
    np.testing.assert_allclose(list(costs.update_costs.values()), [0.0015, 0.0025], rtol=0.02)
    fast = make_trial(16, make_execution(16, rate=16 / 0.0005, first_step_s=0.7))
    costs = costs_of(SWEEP, [fast], objective=Objective("seconds_to_target", "min"))
    np.testing.assert_allclose(list(costs.update_costs.values()), [0.0005, 0.001], rtol=0.02)


def test_updates_and_examples_cost_what_they_are():
    assert costs_of(SWEEP, [], objective=Objective("updates_to_target", "min")) == SizeCosts(
        {16: 1.0, 32: 1.0}
    )
    objective = Objective("examples_to_target", "min")
    assert costs_of(SWEEP, [], objective=objective) == SizeCosts({16: 16.0, 32: 32.0})
