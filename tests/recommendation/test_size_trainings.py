"""When other sizes are trained, and when not; `test_recommend` trains some."""

import pytest
import small_models as models
from recommendation_factory import make_check, make_pilot, make_recommendation
from task_factory import make_task

from kbatch.recommendation.budget import Budget
from kbatch.recommendation.choice import trained_runs
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION
from kbatch.recommendation.measure import train_sizes


class Clock:
    """A clock that tells what it is set to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def task(build=models.mlp, *, left_s=60.0):
    return make_task(*models.rows(64), build=build)._replace(budget=Budget(left_s, Clock()))


def train(given, found, pilot=None):
    return train_sizes(
        given,
        found.pilot if pilot is None else pilot,
        timings=found.timings,
        in_fit=found.in_fit.line,
        rule="sqrt",
    )


def untouched():
    raise AssertionError("Nothing was to be trained.")


def test_a_size_that_the_budget_does_not_hold_is_named():
    trained = train(task(untouched, left_s=0.01), make_recommendation())
    assert trained.checks == ()
    assert "would need about" in trained.ended
    assert "and 0.010 s of `budget_s` were left" in trained.ended
    assert trained.short_s[128] > 0


def test_only_a_size_that_can_end_in_the_time_that_is_left_is_trained():
    def full():
        raise MemoryError

    found = make_recommendation(pilot=make_pilot(build_s=0.0, look_s=0.0))
    alone = trained_runs(found.timings, in_fit=found.in_fit.line, pilot=found.pilot, checks=())
    updates = alone.forecast.updates
    needed_s = {b: updates[b] * alone.ways[b].time_s for b in alone.worth_training()}
    first, *later = needed_s
    # The size of the largest gain fails, and the smaller ones would take longer.
    trained = train(task(full, left_s=1.001 * needed_s[first]), found)
    assert [check.batch_size for check in trained.checks] == [first]
    left = [size for size in later if size < first]
    assert set(trained.short_s) == set(left)
    assert trained.ended.endswith("s of `budget_s` were left")
    for size in left:
        assert trained.short_s[size] == pytest.approx(needed_s[size] - 1.001 * needed_s[first])


def test_a_size_that_memory_ended_is_kept_and_smaller_ones_go_on():
    def full():
        raise MemoryError

    def broken():
        raise RuntimeError("a mistake")

    found = make_recommendation(n_half=800.0, noise_scale=2000.0)
    trained = train(task(full), found)
    sizes = [check.batch_size for check in trained.checks]
    assert {check.ended_by for check in trained.checks} == {"failed"}
    assert sizes == sorted(sizes, reverse=True)
    assert trained.ended.startswith(f"at batch size {sizes[0]:,} it ran out of memory; at batch")
    with pytest.raises(RuntimeError, match="a mistake"):
        train(task(broken), found)


def test_a_run_that_spends_the_rest_is_cut_short():
    found = make_recommendation(pilot=make_pilot(build_s=0.0, look_s=0.0))
    given = make_task(*models.rows(64), build=lambda: models.waiting(lambda _: 0.01), budget_s=1.0)
    trained = train(given, found)
    assert trained.checks[0].ended_by == "budget"
    assert not any(check.reached for check in trained.checks)


@pytest.mark.parametrize(
    "changed", [{"pilot": None}, {"timings": ()}, {"pilot": make_pilot(stretches=0)}]
)
def test_without_a_loss_to_come_to_nothing_is_trained(changed):
    trained = train(task(untouched), make_recommendation(**changed))
    words = "the pilot reached no loss that other sizes could be trained to"
    assert (trained.checks, trained.ended) == ((), words)


def test_the_clock_gives_each_measurement_a_part_of_what_is_left():
    now = Clock()
    clock = Budget(60.0, now)
    names = [MEMORY, NOISE, SATURATION, INPUT, OTHER_SIZES]
    parts = []
    for name in names:
        parts.append(clock.part_s(name))
        now.now_s += parts[-1]
    # Each takes its part: the last one is left the rest, and nothing remains.
    assert sum(parts) == pytest.approx(60.0)
    assert clock.left_s == pytest.approx(0.0)
    slow, late = Budget(60.0, now), []
    now.now_s += 50.0  # A first measurement that took far too long bounds what follows.
    for name in names[1:]:
        late.append(slow.part_s(name))
        now.now_s += late[-1]
    assert sum(late) == pytest.approx(10.0)
    now.now_s += 100.0
    assert (slow.left_s, slow.part_s(OTHER_SIZES)) == (0.0, 0.0)


def test_sizes_are_timed_however_late_while_the_call_ends_in_time():
    now = Clock()
    clock = Budget(60.0, now)
    now.now_s = 73.0  # The pilot took all of it.
    assert clock.part_s(SATURATION) == pytest.approx(2.4)
    now.now_s = 88.0  # The call is to end after 90 s.
    assert clock.part_s(SATURATION) == 0.0


def test_what_was_overspent_counts_in_what_the_call_may_still_take():
    now = Clock()
    clock = Budget(60.0, now)
    now.now_s = 69.0  # Nothing is left, and the call is to end after 90 s.
    clock.reserved_s = 12.0
    assert clock.holds(20.0)
    now.now_s = 71.0
    assert not clock.holds(20.0)


def trained_in_turns(updates):
    """Train sizes that need so many updates, and return the sizes and numbers of their runs."""
    found, made = make_recommendation(pilot=make_pilot(build_s=0.0, look_s=0.0)), []

    def run(build, data, *, plan):
        made.append((plan.batch_size, plan.run))
        needed = updates(plan.batch_size)
        end = "target" if needed <= plan.most_updates else "lost"
        return make_check(plan.batch_size, min(needed, plan.most_updates), end)

    given = task()._replace(budget=Budget(6000.0, Clock()))
    train_sizes(
        given, found.pilot, timings=found.timings, in_fit=found.in_fit.line, rule="sqrt", run=run
    )
    return made, found.pilot.batch_size


def test_sizes_that_may_be_as_good_are_trained_again_with_other_seeds():
    made, base = trained_in_turns(lambda size: round(400 * (1 + 60 / size)))
    runs = {size: [number for one, number in made if one == size] for size, _ in made}
    assert max(map(len, runs.values())) == 4
    for size, numbers in runs.items():
        first = 1 if size == base else 0  # The pilot was its first run.
        assert numbers == list(range(first, first + len(numbers)))
    sizes = [size for size, _ in made]
    once = len(dict.fromkeys(sizes))
    assert len(set(sizes[:once])) == once  # What is new comes first.


def test_the_sizes_beside_the_best_one_are_trained():
    # Every larger batch loses, as under a learning rate that is too large for it.
    made, base = trained_in_turns(lambda size: 525 if size == 32 else 10_000)
    assert {size for size, _ in made} >= {base // 2, 2 * base}
