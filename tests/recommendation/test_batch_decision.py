"""Evidence in, answer out: which batch size is named, and what is said of the others."""

import dataclasses

import numpy as np
import pytest

from kbatch.analysis.next_size import FinishedRun
from kbatch.recommendation.choice import TrainedRuns, decide
from kbatch.recommendation.limits import TimeInFit
from kbatch.throughput.record import TimedRounds

SIZES = tuple(2**k for k in range(3, 11))
ROUNDS = 1 + 0.01 * np.array([0, 1, -1, 0.5, -0.5, 0.2, -0.2, 0.8, -0.8, 0])


def update_s(size):
    return 1e-3 + 5e-6 * size


def rounds_of(sizes=SIZES):
    return [
        TimedRounds(b, b, tuple(range(10)), tuple((update_s(b) * ROUNDS).tolist())) for b in sizes
    ]


def met(size, updates, noise=None):
    return FinishedRun(size, updates * update_s(size), updates, noise)


def law(size, critical=200.0):
    return 300 * (1 + critical / size)


def decided(*tried, sizes=SIZES, **arguments):
    found = TrainedRuns(rounds_of(sizes), None, tried)
    return decide(found, base_batch_size=32, rule="sqrt", **arguments)


def rows(decision):
    return {row.batch_size: row for row in decision.sizes}


def runs(sizes, *, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    first, *others = (met(b, law(b) * float(rng.lognormal(0, noise)), 200.0) for b in sizes)
    return first, *(dataclasses.replace(run, noise_scale=None) for run in others)


def test_the_answer_is_the_best_row_of_those_that_came_to_the_target():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes = [32, *rng.choice([b for b in SIZES if b != 32], rng.integers(0, 5), replace=False)]
        evidence = list(runs(map(int, sizes), noise=0.2, seed=seed))
        if len(evidence) > 2:  # A cut, and one that diverged.
            evidence[1] = FinishedRun(evidence[1].batch_size, None, 40.0)
            evidence[2] = FinishedRun(evidence[2].batch_size, None, None)
        answer = decided(*evidence)
        reached = {b: row for b, row in rows(answer).items() if row.ended_by == "target"}
        best = min(reached, key=lambda b: (reached[b].seconds.value, b))
        assert answer.batch_size == best
        assert min(row.relative_time.value for row in reached.values()) == 1
        assert reached[best].relative_time.value == 1
        assert set(reached) == {run.batch_size for run in evidence if run.cost is not None}
        assert 32 in reached
        assert answer.learning_rate_ratio == (best / 32) ** 0.5
        # What is only forecast is in no one's way: it is named beside the answer.
        for one in answer.untested:
            assert one.batch_size not in reached
            assert one.most_speedup > one.speedup
        broken = [run.batch_size for run in evidence if not run.updates]
        assert all(one.batch_size < min(broken, default=10**9) for one in answer.untested)


def test_the_size_of_the_pilot_is_an_answer():
    answer = decided(met(32, law(32), 200.0))
    assert (answer.batch_size, answer.missing, answer.critical) == (32, None, None)
    assert answer.untested[0].speedup > 1.3
    assert rows(answer)[32].ended_by == "target"
    # By the law of the noise scale itself, the sizes that promise are near the closed form.
    assert {one.batch_size for one in answer.untested} >= {128, 256}


def test_what_was_cut_short_needs_more_than_it_had():
    cut = FinishedRun(256, None, 500.0)
    answer = decided(met(32, law(32), 200.0), cut)
    row = rows(answer)[256]
    assert (row.ended_by, row.updates.value) == ("cut short", 500.0)
    assert row.seconds.value == pytest.approx(500 * update_s(256))
    before, after = (
        {one.batch_size: one.speedup for one in d.untested}
        for d in (decided(met(32, law(32), 200.0)), answer)
    )
    assert after.get(128, 0.0) < before[128]


def test_a_size_that_diverged_changes_no_other_row():
    alone, broken = (
        decided(met(32, law(32), 200.0), *more) for more in ((), (FinishedRun(256, None, None),))
    )
    assert rows(broken)[256].ended_by == "diverged"
    for size in SIZES:
        if size != 256:
            assert rows(broken)[size] == rows(alone)[size]
    assert (
        max(one.batch_size for one in broken.untested)
        < 256
        < max(one.batch_size for one in alone.untested)
    )


@pytest.mark.parametrize("missing", ["few updates", "no progress", "pilot diverged"])
def test_without_a_resolved_pilot_no_size_is_named(missing):
    answer = decided(met(32, 9.0), missing=missing)
    assert (answer.batch_size, answer.learning_rate_ratio) == (None, None)
    assert answer.missing == missing
    assert answer.micro_batch_size == 1024  # The fastest.
    assert all(row.ended_by is None for row in answer.sizes)
    assert decided().missing == "no pilot"
    assert decided(sizes=()).missing == "no times"


def test_the_budget_that_is_named_holds_what_was_short():
    given = {"budget_s": 20.0, "short_s": {128: 3.0}}
    answer = decided(met(32, law(32), 200.0), **given)
    budgets = {one.batch_size: one.budget_s for one in answer.untested}
    assert budgets[128] == 30.0
    assert budgets[64] is None


def test_the_wait_for_data_counts():
    tried = runs((32, 128, 512))
    waiting = TimeInFit({1: 1e-4})
    free, slow = (
        decide(TrainedRuns(rounds_of(), in_fit, tried), base_batch_size=32, rule=None)
        for in_fit in (None, waiting)
    )
    assert slow.batch_size < free.batch_size
    assert rows(slow)[512].samples_per_second.value == pytest.approx(1e4)


def test_a_size_that_was_not_timed_has_the_time_of_its_neighbours():
    answer = decided(met(48, law(48), 200.0), sizes=(8, 256))
    assert answer.batch_size == 48
    assert rows(answer)[48].seconds.value == pytest.approx(law(48) * update_s(48), rel=0.02)


def test_what_is_worth_training_comes_by_its_gain_and_not_twice():
    first = met(32, law(32), 200.0)
    sizes = TrainedRuns(rounds_of(), None, [first]).worth_training()
    assert sizes[0] in (128, 256)
    assert 32 not in sizes
    broken = TrainedRuns(rounds_of(), None, [first, FinishedRun(sizes[0], None, None)])
    assert all(size < sizes[0] for size in broken.worth_training())
    settled = TrainedRuns(rounds_of(), None, runs((32, *(b for b in SIZES if b != 32))))
    assert settled.worth_training() == []
    assert TrainedRuns(rounds_of(), None, ()).worth_training() == []


def test_sizes_are_compared_within_a_round():
    """A machine that grows slower by 64 times widens the seconds and not the comparison."""
    drift = tuple(2.0**k for k in range(7))
    rounds = [
        TimedRounds(b, b, tuple(range(7)), tuple(update_s(b) * d for d in drift)) for b in (32, 64)
    ]
    steady = [TimedRounds(b, b, tuple(range(7)), (update_s(b),) * 7) for b in (32, 64)]
    drifting, calm = (
        decide(TrainedRuns(r, None, runs((32, 64))), base_batch_size=32, rule=None)
        for r in (rounds, steady)
    )
    one, other = rows(drifting)[32], rows(calm)[32]
    assert one.relative_time.interval.high == pytest.approx(other.relative_time.interval.high)
    assert one.seconds.interval.high > 2 * other.seconds.interval.high
