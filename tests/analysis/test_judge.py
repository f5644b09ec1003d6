import math

import numpy as np
import pytest
from scipy import special

from kbatch.analysis.judge import judge
from kbatch.analysis.run_table import Run

TOLERANCE = 0.01


def judged(runs, tolerance=TOLERANCE, **changed):
    given = {"larger_is_better": True, "tolerance": tolerance, "confidence": 0.95}
    return judge(runs, **(given | changed))


def by_seeds(values, tolerance=1.0, seconds=None, **changed):
    return judged(runs_of(values, seconds=seconds), tolerance, over_examples=False, **changed)


def runs_of(values, outcomes=None, seconds=None, **fields):
    """Make runs of the sizes 1, 2, 4, ... from values [sizes, rounds], the last one the fastest."""
    seconds = range(len(values), 0, -1) if seconds is None else seconds
    return [
        Run(2**k, 1.0, r, value, cost, outcomes=None if outcomes is None else outcomes[k][r])
        ._replace(**fields)
        for k, (row, cost) in enumerate(zip(values, seconds, strict=True))
        for r, value in enumerate(row)
    ]  # fmt: skip


def simulate(rng, accuracies, *, rounds, examples=1500, spreads=0.02, blocks=50):
    """Draw runs whose accuracies over all seeds and examples are these."""
    count = len(accuracies)
    spreads = np.full(count, spreads)[:, None, None]
    # Deviations by size and by chance in a run, relative to the difficulty of the examples.
    of_size, of_chance = 0.15, 0.25
    deviations = np.sqrt(1 + of_size**2 + of_chance**2 + spreads**2)
    levels = special.ndtri(accuracies)[:, None, None] * deviations
    score = rng.standard_normal(examples) + of_size * rng.standard_normal((count, 1, examples))
    score = score + levels + spreads * rng.standard_normal((count, rounds, 1))
    hits = score + of_chance * rng.standard_normal((count, rounds, examples)) > 0
    outcomes = hits.reshape(count, rounds, blocks, -1).mean(-1)
    return runs_of(outcomes.mean(-1), outcomes, examples=examples)


def first_rounds(runs, count):
    return [run for run in runs if run.seed < count]


def bounds(interval):
    return np.array([interval.low, interval.high])


def wrong(found, truth, tolerance):
    """Return whether an answer is certain while a pair is better by more than the tolerance."""
    return found.certain and max(truth) - truth[found.pairs.index(found.named)] > tolerance


def most_wrong(count, share=0.05):
    return share * count + 2 * math.sqrt(share * (1 - share) * count)


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize(
    "truth",
    [[0.93, 0.93, 0.93, 0.918, 0.918, 0.918], [0.90, 0.90, 0.94, 0.90, 0.90, 0.90], [0.93, 0.918]],
)
def test_judge_certain_answers_are_seldom_wrong(truth, rounds):
    rng = np.random.default_rng(7)
    found = [judged(simulate(rng, truth, rounds=rounds)) for _ in range(40)]
    assert sum(wrong(one, truth, TOLERANCE) for one in found) <= most_wrong(40)


@pytest.mark.parametrize(("rounds", "ratio"), [(2, 8), (3, 4), (6, 4)])
def test_judge_seldom_names_a_bad_size_that_scatters_more(rounds, ratio):
    # The last size is just beyond the tolerance, at which four of five such searches are certain.
    rng, tolerance = np.random.default_rng(8), {2: 5.2, 3: 3.7, 6: 2.4}[rounds]
    truth, spreads = np.zeros(6), np.ones(6)
    truth[-1], spreads[-1] = -1.001 * tolerance, ratio
    draws = truth[:, None] + spreads[:, None] * rng.standard_normal((300, 6, rounds))
    found = [by_seeds(values, tolerance) for values in draws]
    assert sum(wrong(one, truth, tolerance) for one in found) <= most_wrong(300)


@pytest.mark.parametrize(("sizes", "count"), [(2, 400), (6, 150)])
def test_judge_is_seldom_wrong_after_two_extensions(sizes, count):
    rng, truth = np.random.default_rng(5), np.array([2.001] + [0.0] * (sizes - 1))
    errors = 0
    for values in truth[:, None] + rng.standard_normal((count, sizes, 12)):
        looks = (by_seeds(values[:, :end], 2.0, looks=n) for n, end in enumerate((3, 6, 12), 1))
        last = next((one for one in looks if one.certain), None)
        errors += last is not None and wrong(last, truth, 2.0)
    assert errors <= most_wrong(count)


def test_judge_two_sizes_by_the_formula():
    rng = np.random.default_rng(3)
    outcomes = 0.8 + rng.normal(size=(2, 5, 40)) * [[[0.2]], [[0.3]]]
    found = judged(runs_of(outcomes.mean(2), outcomes, step=math.inf), looks=2)
    difference = outcomes[0] - outcomes[1]
    single = np.mean([np.var(row, ddof=1) / 40 for row in difference])
    own = np.var(difference.mean(1), ddof=1)
    mean = np.var(difference.mean(0), ddof=1) / 40
    # Minus the part of the discordance of single runs that five runs average out.
    examples = max(0, mean - (single - mean) / 4)
    pooled, of_examples = special.stdtrit([4, 39], [1 - 0.3 * 0.05 / 2**1.5, 1 - 0.05])
    gap = abs(difference.mean())
    half = math.sqrt(pooled**2 * max(own, single) / 5 + of_examples**2 * examples)
    other = next(pair for pair in found.pairs if pair != found.leader)
    np.testing.assert_allclose(bounds(found.gaps[other]), (gap - half, gap + half), rtol=1e-6)
    leads = (-gap - half, half - gap)
    np.testing.assert_allclose(bounds(found.gaps[found.leader]), leads, rtol=1e-6)


def residual_square(values):
    """The residual mean square of the two-way table of sizes and rounds."""
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    return (residuals**2).sum() / (len(values) - 1) / (values.shape[1] - 1)


@pytest.mark.parametrize(("seed", "wider"), [(0, {True}), (1, {True, False})])
def test_judge_pools_seeds_unless_one_size_scatters_more(seed, wider):
    values = np.random.default_rng(seed).normal(size=(6, 3)) * [[1], [1], [1], [1], [1], [3]]
    found = by_seeds(values)
    leader = found.pairs.index(found.leader)
    error = 2 * residual_square(values) / 3

    def alone(k, level):
        others = np.delete(values, k, 0)
        against = np.var(values[k] - others.mean(0), ddof=1)
        rest = residual_square(others) * (1 - 1 / 5)
        freedom = (against + rest) ** 2 / (against**2 / 2 + rest**2 / 8)
        return special.stdtrit(freedom, 1 - level) * math.sqrt((against + rest) / 3)

    seen = set()
    for k in set(range(6)) - {leader}:
        gap = values[leader].mean() - values[k].mean()
        far = gap > 2.5 * math.sqrt(error)
        level = 0.05 * (0.8 + 1 / 2**2) * (0.25 if far else 1)
        own = max(alone(k, level), alone(leader, level))
        half = max(2.56 * math.sqrt(error), own)  # Dunnett's table for 5 and 10.
        seen.add(own == half)
        interval = bounds(found.gaps[found.pairs[k]])
        np.testing.assert_allclose(interval, (gap - half, gap + half), rtol=1e-2, atol=1e-2)
    assert seen == wider


def test_judge_names_the_smallest_of_the_fast_sizes():
    values = np.full((4, 3), 0.9) + np.arange(3) / 1000
    found = judged(runs_of(values, seconds=[2.0, 1.04, 1.0, 1.03]), over_examples=False)
    assert found.certified == found.pairs
    assert (found.named, found.certain) == ((2, 1.0), True)
    np.testing.assert_allclose(list(found.costs.values()), [2.0, 1.04, 1.0, 1.03])


def test_judge_open_pairs_would_change_the_answer():
    def named(pairs, costs):
        least = min(costs[pair] for pair in pairs)
        return min(pair for pair in pairs if costs[pair] <= 1.05 * least)

    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        values = rng.normal(0, 0.6, (5, 1)) + rng.normal(0, 0.2, (5, 4))
        found = by_seeds(values, seconds=rng.choice([1.0, 1.03, 1.06, 1.2], 5))
        for pair in set(found.pairs) - {*found.certified, *found.worse} if found.certified else ():
            changes = named((*found.certified, pair), found.costs) != found.named
            assert (pair in found.open) == changes
            seen.add(changes)
        assert found.certain == (bool(found.certified) and not found.open)
    assert seen == {True, False}


def test_judge_without_times_names_the_best_mean():
    runs = simulate(np.random.default_rng(2), [0.93, 0.931, 0.932], rounds=20, examples=20_000)
    found = judged([run._replace(seconds=None) for run in runs])
    assert found.certified == found.pairs
    assert found.named == found.leader
    assert judged(runs).named == (4, 1.0)


def test_judge_compares_pairs_over_common_seeds():
    values = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    runs = [run for run in runs_of(values) if (run.batch_size, run.seed) != (2, 0)]
    found = judged(runs, over_examples=False)
    assert found.rounds == {(1, 1.0): 3, (2, 1.0): 2}
    np.testing.assert_allclose(bounds(found.gaps[2, 1.0]), 0.0, atol=1e-12)
    apart = judged([*runs_of(values[:1]), runs[-1]._replace(seed=7)], over_examples=False)
    assert not apart.certain
    assert (2, 1.0) not in apart.certified


def test_judge_one_run_each_is_never_certain():
    runs = simulate(np.random.default_rng(1), [0.5, 0.95, 0.95], rounds=2, examples=5000)
    once, twice = judged(first_rounds(runs, 1), 0.05), judged(runs, 0.2)
    assert once.worse == ((1, 1.0),)
    assert once.certified
    assert (once.certain, once.obstacle) == (False, "one_execution")
    assert twice.certain
    assert np.ptp(bounds(once.gaps[1, 1.0])) < np.ptp(bounds(twice.gaps[1, 1.0]))
    alone = judged([run for run in runs if run.batch_size == 2])
    assert (alone.named, alone.certain, alone.obstacle) == ((2, 1.0), False, "alone")


def test_judge_pinned_seeds_count_once():
    rng = np.random.default_rng(0)
    values = 0.9 + 1e-6 * rng.standard_normal((3, 3))
    outcomes = np.repeat(values[..., None], 50, -1)

    def pinned(weights, order):
        hashes = {"w": [("w", "o")], "v": [("w", "o"), ("x", "p"), ("y", "q")]}
        runs = [
            run._replace(
                weights=hashes[weights][run.seed % len(hashes[weights])][0] if weights else None,
                order=hashes[order][run.seed % len(hashes[order])][1] if order else None,
            )
            for run in runs_of(values, outcomes, examples=10_000)
        ]
        found = judged(runs)
        return found.pinned, found.certain, found.obstacle, found.rounds[1, 1.0]

    assert pinned("w", "w") == ("both", False, "pinned", 1)
    assert pinned("w", "v") == ("weights", True, None, 3)
    assert pinned("v", "w") == ("order", True, None, 3)
    assert pinned("v", "v") == pinned("", "") == (None, True, None, 3)


def test_judge_without_outcomes_is_never_certain():
    runs = simulate(np.random.default_rng(1), [0.9, 0.9], rounds=6, examples=5000)
    assert judged(runs, 0.1).certain
    for lost in (runs, runs[:1]):
        kept = [run._replace(outcomes=None) if run in lost else run for run in runs]
        found = judged(kept, 0.1)
        assert (found.certain, found.obstacle) == (False, "no_outcomes")
        assert judged(kept, 0.1, over_examples=False).certain


def test_judge_at_a_larger_tolerance_takes_a_size_back():
    truth = [0.95, 0.95, 0.92]
    runs = simulate(np.random.default_rng(4), truth, rounds=16, examples=9000)
    raced = [run for run in runs if run.batch_size < 4 or run.seed < 3]
    before, after = judged(raced), judged(raced, 0.03)
    assert before.worse == ((4, 1.0),)
    assert (before.named, before.certain) == ((2, 1.0), True)
    # It is the fastest, and three rounds do not show that it is worse.
    assert (after.worse, after.certain) == ((), False)


def test_judge_leaves_out_a_size_that_diverged():
    runs = runs_of(np.full((2, 3), 0.9), seconds=[1.0, 1.0])
    failing = [Run(8, 1.0, 0, 0.9, 0.1), Run(8, 1.0, 1, None, 0.1, "diverged")]
    diverged = judged([*runs, *failing], over_examples=False)
    assert (diverged.certain, diverged.left_out) == (True, ((8, 1.0),))
    with pytest.raises(ValueError, match="metric value"):
        judged([Run(8, 1.0, 0, None, 0.1, "diverged")])


@pytest.mark.parametrize(
    ("examples", "rarest", "certain"),
    [(200, None, False), (5000, None, True), (5000, 200, False), (5000, 2500, True)],
)
def test_judge_equal_outcomes_by_the_rule_of_three(examples, rarest, certain):
    outcomes = np.full((2, 4, 50), 0.9)
    step = rarest and 1 / rarest
    found = judged(runs_of(np.full((2, 4), 0.9), outcomes, examples=examples, step=step))
    assert found.certain == certain
    # If none of n examples differs, a share of up to -log(alpha) / n may differ.
    bound = -math.log(0.05) / (rarest or examples)
    np.testing.assert_allclose(found.gaps[1, 1.0].high, bound, rtol=0.3)


def test_judge_time_to_a_target_is_known_to_one_epoch():
    seconds = np.full((2, 3), -40.0)
    for epoch_s, certain in ((1.5, False), (0.5, True)):
        runs = runs_of(seconds, resolution=epoch_s)
        found = judged(runs, 0.8, over_examples=False, confidence=0.95)
        assert (found.certain, found.coarse) == (certain, not certain)
        # Runs of one size need another epoch with probability p, runs of the other with q.
        high = found.gaps[1, 1.0].high / epoch_s
        p = q = high / 2
        assert (1 - p) ** 3 * (1 - q) ** 3 == pytest.approx(0.05)


def test_judge_heavy_tails_certify_nothing():
    rng = np.random.default_rng(0)
    base = 0.3 + 0.01 * rng.normal(size=(2, 3, 50))
    for heavy, obstacle in ((0.0, None), (0.3, "heavy_tails")):
        outcomes = base.copy()
        outcomes[0, :, :4] += heavy
        given = {"larger_is_better": False, "tolerance": 0.2}
        found = judged(runs_of(outcomes.mean(2), outcomes, step=math.inf), **given)
        assert (found.obstacle, found.certain) == (obstacle, obstacle is None)


def test_judge_counts_discordance_on_examples_as_chance():
    outcomes = 0.8 + 0.1 * np.random.default_rng(0).choice([-1, 1], (2, 3, 50))
    outcomes += 0.8 - outcomes.mean(-1, keepdims=True)
    found = judged(runs_of(outcomes.mean(-1), outcomes, step=math.inf))
    # The variance of the difference of two runs, by independent blocks.
    single = np.var(outcomes[0] - outcomes[1], axis=-1, ddof=1).mean() / 50
    assert found.gaps[1, 1.0].high > special.stdtrit(2, 0.95) * math.sqrt(single / 3)


def test_judge_errors_like_accuracies():
    runs = simulate(np.random.default_rng(5), [0.93, 0.94, 0.90], rounds=4)
    errors = [run._replace(value=1 - run.value, outcomes=1 - run.outcomes) for run in runs]
    first, second = judged(runs), judged(errors, larger_is_better=False)
    for pair, gap in first.gaps.items():
        np.testing.assert_allclose(bounds(second.gaps[pair]), bounds(gap))
    assert second.named == first.named
    assert (second.certified, second.worse) == (first.certified, first.worse)


def test_judge_without_times_prefers_no_size_to_the_best():
    values = np.array([[-0.9], [-0.1], [0.0]]) + 0.05 * np.sin(np.arange(12).reshape(3, 4) ** 2)
    found = by_seeds(values, seconds=[None] * 3)
    assert (found.named, found.certain, found.open) == ((4, 1.0), True, ())
    timed = by_seeds(values)
    assert (1, 1.0) not in found.certified + found.worse + timed.certified
    assert timed.certain


def test_judge_equal_means_name_the_fastest_if_none_is_certified():
    values = [(1.0, 0.5, 0.75), (0.5, 0.75, 1.0), (0.75, 1.0, 0.5)]
    found = judged(runs_of(values))
    assert (found.certified, found.named) == ((), (4, 1.0))
