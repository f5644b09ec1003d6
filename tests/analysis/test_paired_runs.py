import dataclasses
import math

import numpy as np
import pytest
from scipy import special
from simulated_runs import simulate

from kbatch.analysis.paired_runs import LOOKS, Candidate, first_executions, judge

TOLERANCE = 0.01


def bounds(interval):
    return np.array(dataclasses.astuple(interval))


def judged(candidates, tolerance=TOLERANCE, **changed):
    return judge(candidates, larger_is_better=True, tolerance=tolerance, **changed)


def wrong(verdict, accuracies, tolerance=TOLERANCE):
    """Whether a certain answer is false: too bad a size, or a faster good one left out."""
    best = max(accuracies)
    good = [k for k, accuracy in enumerate(accuracies) if best - accuracy <= tolerance]
    return verdict.certain and verdict.named != max(good)


ROWS = {
    "tied": ([0.93] * 6, {}),
    "just inside": ([0.93, 0.93, 0.93, 0.922, 0.922, 0.922], {}),
    "just outside": ([0.93, 0.93, 0.93, 0.918, 0.918, 0.918], {}),
    "one far best": ([0.90, 0.90, 0.94, 0.90, 0.90, 0.90], {}),
    "heavy tails": ([0.93] * 6, {"tails": 2.5}),
    "one noisy size": ([0.93] * 5 + [0.918], {"spreads": [0.03] * 5 + [0.1]}),
    "two sizes": ([0.93, 0.918], {}),
}


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize("name", ROWS)
def test_a_certain_answer_is_seldom_wrong(name, rounds):
    accuracies, changed = ROWS[name]
    rng = np.random.default_rng(7)
    verdicts = [judged(simulate(rng, accuracies, rounds=rounds, **changed)) for _ in range(40)]
    # Of 40 at 5 %, and two standard errors.
    assert sum(wrong(verdict, accuracies) for verdict in verdicts) <= 4


def test_two_sizes_by_the_formula_written_out():
    rng = np.random.default_rng(3)
    outcomes = 0.8 + rng.normal(size=(2, 5, 40)) * [[[0.2]], [[0.3]]]
    values = outcomes.mean(2)
    verdict = judged([Candidate(v, o) for v, o in zip(values, outcomes, strict=True)], looks=4)
    difference = outcomes[0] - outcomes[1]
    single = np.mean([np.var(row, ddof=1) / 40 for row in difference])
    seeds = max(np.var(difference.mean(1), ddof=1), single) / 5
    mean = np.var(difference.mean(0), ddof=1) / 40
    # Less the part of a single execution's discordance that five average out.
    examples = max(0, mean - (single - mean) / 4)
    of_seeds, of_examples = special.stdtrit([4, 39], [1 - 0.05 / 2.5, 1 - 0.05])
    half = math.sqrt(of_seeds**2 * seeds + of_examples**2 * examples)
    gap = abs(difference.mean())
    np.testing.assert_allclose(
        bounds(verdict.gaps[1 - verdict.leader]), (gap - half, gap + half), rtol=1e-4
    )
    np.testing.assert_allclose(
        bounds(verdict.gaps[verdict.leader]), (-gap - half, half - gap), rtol=1e-4
    )


def test_looks_that_share_their_data_err_as_often_as_said():
    rng, draws = np.random.default_rng(5), 250
    rows = rng.normal(np.array([[TOLERANCE], [0.0]]), 0.01, (draws, 2, LOOKS[-1]))

    def certifies(row):
        pairs = ([Candidate(values[:look]) for values in row] for look in LOOKS)
        return any(1 in judged(pair, looks=len(LOOKS)).certified for pair in pairs)

    # The second is as bad as allowed: of 250 at 5 %, and two standard errors.
    assert sum(map(certifies, rows)) <= 0.05 * draws + 2 * math.sqrt(0.05 * 0.95 * draws)


def test_seeds_are_pooled_over_sizes_and_moderated_by_those_of_the_pair():
    values = np.random.default_rng(0).normal(size=(4, 6))
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    pooled = 2 * (residuals**2).sum() / (3 * 5)
    verdict = judge([Candidate(row) for row in values], larger_is_better=False, tolerance=1.0)
    leader = values.mean(1).argmin()
    for k in set(range(4)) - {leader}:
        own = np.var(values[k] - values[leader], ddof=1)
        seeds = max(pooled, (10 * pooled + 5 * own) / 15) / 6
        half = special.stdtrit(15, 1 - 0.05 / 3) * math.sqrt(seeds)
        gap = values[k].mean() - values[leader].mean()
        np.testing.assert_allclose(bounds(verdict.gaps[k]), (gap - half, gap + half))


def test_one_execution_is_never_certain_and_leaves_seeds_out():
    candidates = simulate(np.random.default_rng(1), [0.5, 0.95, 0.95], rounds=2, examples=5000)
    one = [first_executions(candidate, 1) for candidate in candidates]
    verdict, twice = judged(one, 0.05), judged(candidates, 0.05)
    assert verdict.worse == (0,)
    assert verdict.certified
    assert not verdict.certain
    assert verdict.executions_needed is None
    assert twice.certain
    assert np.ptp(bounds(verdict.gaps[0])) < np.ptp(bounds(twice.gaps[0]))
    assert judged([c._replace(outcomes=None) for c in one]).gaps == (None,) * 3


@pytest.mark.parametrize(("examples", "certain"), [(200, False), (5000, True)])
def test_sizes_that_agree_on_every_example_may_differ_on_rare_ones(examples, certain):
    hits = np.ones((4, examples))
    hits[:, ::10] = 0
    candidates = [Candidate([0.9] * 4, hits, seconds, examples) for seconds in (2.0, 1.0)]
    verdict = judged(candidates)
    assert verdict.certain == certain
    assert verdict.named == int(certain)
    # Of n examples without one that differs, -log(alpha) / n may.
    np.testing.assert_allclose(verdict.gaps[0].high, -math.log(0.05) / examples, rtol=0.3)


def test_the_verdict_is_the_same_for_errors_as_for_accuracies():
    rng = np.random.default_rng(5)
    candidates = simulate(rng, [0.93, 0.94, 0.90], rounds=4)
    errors = [
        c._replace(values=1 - np.array(c.values), outcomes=1 - c.outcomes) for c in candidates
    ]
    first = judged(candidates)
    second = judge(errors, larger_is_better=False, tolerance=TOLERANCE)
    for one, other in zip(second.gaps, first.gaps, strict=True):
        np.testing.assert_allclose(bounds(one), bounds(other))
    assert second[1:5] == first[1:5]


def test_where_all_cost_the_same_the_best_mean_is_named():
    rng = np.random.default_rng(2)
    timed = simulate(rng, [0.93, 0.931, 0.932], rounds=20, examples=20_000)
    verdict = judged([candidate._replace(seconds=None) for candidate in timed])
    assert verdict.certified == (0, 1, 2)
    assert verdict.named == verdict.leader
    assert judged(timed).named == 2


def test_a_dropped_size_stays_worse_and_blocks_no_other():
    candidates = simulate(np.random.default_rng(4), [0.95, 0.95, 0.95], rounds=16, examples=9000)
    whole = judged(candidates)
    assert whole.certain
    dropped = judged([*candidates[:2], first_executions(candidates[2], 3)])
    assert dropped.worse == (2,)
    assert dropped.certain
    assert dropped.named == 1
    lost = judged([candidates[0], *(first_executions(c, 3) for c in candidates[1:])])
    assert (lost.named, lost.certain) == (0, True)


def test_the_forecast_is_about_what_settles_it():
    rng = np.random.default_rng(6)
    ratios = []
    for _ in range(12):
        candidates = simulate(rng, [0.93, 0.93, 0.90], rounds=40, examples=4000)
        needed = judged([first_executions(c, 4) for c in candidates], 0.008).executions_needed
        found = next(
            n
            for n in range(2, 41)
            if judged([first_executions(c, n) for c in candidates], 0.008).certain
        )
        ratios.append((needed or 4) / found)
    assert 0.5 < np.median(ratios) < 2


def test_a_validation_set_too_small_says_what_it_can_settle():
    settled = []
    for seed in range(12):
        candidates = simulate(np.random.default_rng(seed), [0.93] * 3, rounds=40, examples=360)
        verdict = judged([first_executions(c, 4) for c in candidates], 0.003)
        assert not verdict.certain
        if verdict.smallest_tolerance is not None:
            assert verdict.executions_needed is None
            assert 0.003 < verdict.smallest_tolerance < 0.1
            settled.append(judged(candidates, verdict.smallest_tolerance * 1.2).certain)
    assert len(settled) >= 8
    assert sum(settled) >= 0.7 * len(settled)


def test_one_candidate_is_named():
    verdict = judged(simulate(np.random.default_rng(0), [0.9], rounds=3))
    assert verdict[:6] == (0, (0,), (), 0, True, (None,))
