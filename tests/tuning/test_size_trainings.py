"""When other sizes are trained, and when not; `test_recommend` trains some."""

import models
import pytest
from recommendation_factory import make_check, make_pilot, make_recommendation
from task_factory import make_task

from kbatch.tuning.size_trainings import train_sizes


def task(build=models.mlp):
    return make_task(*models.rows(64), build=build)


def untouched():
    raise AssertionError("Nothing was to be trained.")


def test_a_size_that_the_budget_does_not_hold_is_named():
    checks, why = train_sizes(task(untouched), make_recommendation(), budget_s=0.01)
    assert checks == ()
    assert "would need about" in why
    assert "and 0.010 s of `budget_s` were left" in why


def test_runs_before_one_that_memory_ended_are_kept():
    def full():
        raise MemoryError

    def broken():
        raise RuntimeError("a mistake")

    settled = (make_check(64, 300),)
    found = make_recommendation(n_half=800.0, noise_scale=2000.0, checks=settled)
    checks, why = train_sizes(task(full), found, budget_s=60.0)
    assert checks == settled
    assert why.startswith("at batch size ")
    assert why.endswith("it ran out of memory")
    with pytest.raises(RuntimeError, match="a mistake"):
        train_sizes(task(broken), found, budget_s=60.0)


def test_a_run_has_the_rest_of_the_seconds_and_those_after_it_none():
    found = make_recommendation(pilot=make_pilot(trained_s=0.0))
    (check,), why = train_sizes(task(lambda: models.waiting(lambda _: 0.01)), found, budget_s=0.8)
    assert check.ended_by == "budget"
    assert check.trained_s > 0.8
    assert why.endswith("and 0 s of `budget_s` were left")


@pytest.mark.parametrize(
    "changed", [{"pilot": None}, {"timings": ()}, {"pilot": make_pilot(stretches=0)}]
)
def test_without_a_loss_to_come_to_nothing_is_trained(changed):
    found = make_recommendation(**changed)
    checks, why = train_sizes(task(untouched), found, budget_s=60.0)
    assert (checks, why) == ((), "the pilot came to no loss that others could be trained to")


def test_it_ends_where_no_size_is_likely_to_gain():
    # Far from the noise scale: half of the updates at no more than half the time.
    settled = tuple(make_check(size, 520) for size in (8, 16, 64, 128, 256, 512, 1024))
    checks, why = train_sizes(task(untouched), make_recommendation(checks=settled), budget_s=60.0)
    assert (checks, why) == (settled, None)
