"""The joint search of batch size and learning rate, on tables whose best pair is known."""

import numpy as np
import pytest

from kbatch.analysis.joint_search import (
    FINAL_EXECUTIONS,
    PairModel,
    PairRun,
    next_pair,
)

SIZES = (16, 32, 64, 128, 256, 512)
FACTORS = (1 / 4, 1 / 2, 1.0, 2.0, 4.0)


def octaves_off(size, factor, *, steeper=0.0, off=0.0):
    """Octaves between a rate and the best one of its size, which grows steeper than the rule."""
    return np.log2(factor) - off - steeper * np.log2(size / 32)


def linear_is_right(size, factor):
    away = octaves_off(size, factor, off=1.0)
    return None if away > 2 else 0.95 - 0.006 * away**2 - 0.002 * abs(np.log2(size / 64))


def sqrt_is_too_flat(size, factor):
    return 0.94 - 0.006 * octaves_off(size, factor, steeper=0.25) ** 2


def flat(size, factor):
    return 0.95


def cliff(size, factor):
    """The best rate is the last one that does not diverge."""
    away = octaves_off(size, factor, steeper=-0.2)
    return None if away > 1.2 else 0.93 + 0.01 * min(away, 1.0)


TABLES = [linear_is_right, sqrt_is_too_flat, flat, cliff]


def searched(
    table,
    *,
    factors=FACTORS,
    seed=0,
    noise=0.006,
    most=36,
    larger_is_better=True,
    scale=1.0,
    **options,
):
    """Run a search of a table, and return how it ended with all its executions."""
    rng, runs = np.random.default_rng(seed), []
    options = {"larger_is_better": larger_is_better, "tolerance": 0.01 * scale, "most": most}
    while True:
        found = next_pair(SIZES, factors, runs, **options)
        if found.pair is None:
            return found, runs
        value, chance = table(*found.pair), rng.normal(0, noise)
        if value is None:
            runs.append(PairRun(*found.pair, None, "diverged"))
        else:
            sign = 1 if larger_is_better else -1
            runs.append(PairRun(*found.pair, sign * scale * (value + chance)))


@pytest.mark.parametrize("table", TABLES)
def test_the_pair_that_it_finds_is_within_the_tolerance_of_the_best(table):
    best = max(table(b, a) for b in SIZES for a in FACTORS if table(b, a) is not None)
    for seed in range(4):
        found, runs = searched(table, seed=seed)
        assert best - table(*found.best) <= 0.01
        assert len(runs) <= 36


def test_a_rate_far_from_the_rule_is_found_in_a_fifth_of_the_pairs():
    factors = tuple(2.0**octave for octave in range(-5, 6))
    for seed in range(4):
        found, _ = searched(
            lambda size, factor: 0.95 - 0.004 * octaves_off(size, factor, off=-4.5) ** 2,
            factors=factors,
            seed=seed,
            most=14,
        )
        assert abs(octaves_off(*found.best, off=-4.5)) <= 1.5


def test_what_is_compared_at_the_end_was_repeated():
    found, runs = searched(sqrt_is_too_flat)
    assert found.kind == "settled"
    tried = [(run.batch_size, run.factor) for run in runs]
    assert tried.count(found.best) == FINAL_EXECUTIONS
    assert max(tried.count(pair) for pair in tried) == FINAL_EXECUTIONS


def test_no_larger_rate_of_a_size_is_tried_after_one_that_diverged():
    _, runs = searched(cliff)
    diverged = [i for i, run in enumerate(runs) if run.outcome == "diverged"]
    assert diverged
    for i in diverged:
        later = [run.factor for run in runs[i + 1 :] if run.batch_size == runs[i].batch_size]
        assert all(factor < runs[i].factor for factor in later)


def test_where_every_rate_diverges_the_smallest_are_tried_and_nothing_is_named():
    found, runs = searched(lambda size, factor: None)
    assert (found.kind, found.best) == ("all tried", None)
    assert {run.batch_size for run in runs} == set(SIZES)


@pytest.mark.parametrize(
    ("outcome", "left"), [("out_of_memory", {16, 32}), ("failed", {16, 32, 128})]
)
def test_a_size_that_cannot_be_trained_is_not_tried_again(outcome, left):
    runs, sizes = [PairRun(64, 1.0, None, outcome)], (16, 32, 64, 128)
    options = {"larger_is_better": True, "tolerance": 0.01, "most": 24}
    while (found := next_pair(sizes, FACTORS, runs, **options)).pair is not None:
        runs.append(PairRun(*found.pair, sqrt_is_too_flat(*found.pair)))
    assert {run.batch_size for run in runs[1:]} <= left


def test_a_loss_in_other_units_is_searched_in_the_same_way():
    _, runs = searched(cliff)
    _, losses = searched(cliff, larger_is_better=False, scale=100.0)
    assert [run[:2] for run in losses] == [run[:2] for run in runs]


def test_the_order_of_the_executions_does_not_matter():
    """What lies on disk has the order of the trials."""
    _, runs = searched(linear_is_right)
    options = {"larger_is_better": True, "tolerance": 0.01, "most": 36}
    for count in (7, 12):
        some = runs[:count]
        proposed = next_pair(SIZES, FACTORS, some, **options)
        assert next_pair(SIZES, FACTORS, sorted(some, key=lambda r: r[:2]), **options) == proposed


@pytest.mark.parametrize("most", [1, 5, 8])
def test_it_ends_at_its_budget(most):
    found, runs = searched(sqrt_is_too_flat, most=most)
    assert (found.kind, len(runs)) == ("budget", most)


@pytest.mark.parametrize("steeper", [-0.5, 0.0, 0.25])
def test_the_slope_is_found(steeper):
    rng, pairs = np.random.default_rng(0), [(b, a) for b in SIZES for a in FACTORS]
    runs = [
        PairRun(b, a, 0.95 - 0.01 * octaves_off(b, a, steeper=steeper) ** 2 + rng.normal(0, 0.003))
        for b, a in pairs
    ]
    model = PairModel.of(runs, pairs, larger_is_better=True, tolerance=0.01)
    slope, interval = model.slope(0.5)
    assert interval.low <= 0.5 + steeper <= interval.high
    assert slope == pytest.approx(0.5 + steeper, abs=0.15)
    assert interval.high - interval.low < 0.7


def test_the_slope_of_a_flat_table_is_not_known():
    pairs = [(b, a) for b in SIZES for a in FACTORS]
    runs = [PairRun(b, a, 0.95) for b, a in pairs]
    interval = PairModel.of(runs, pairs, larger_is_better=True, tolerance=0.01).slope(0.5)[1]
    assert interval.high - interval.low > 1
