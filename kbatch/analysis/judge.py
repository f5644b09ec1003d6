"""Judge which pairs of batch size and learning rate are as good as the best, from runs of a grid.

All runs with the same seed are a round. D is the mean difference of two pairs over the R rounds
that both have. All runs are validated on the same examples, which are a sample. The judge asks for
the difference over all seeds and over all examples of this kind, so its variance has two parts:

    var D = seeds / R + examples

**Seeds.** `seeds` is the variance of the difference of two single runs: twice the residual mean
square of the two-way table, pooled over pairs (Montgomery 2017, Design and Analysis of Experiments,
section 4.1). A few runs may have equal values by chance although their predictions differ. So it is
at least the variance that follows from the differences of single runs by validation example
(Dietterich 1998, doi:10.1162/089976698300017197).

One pair may scatter far more than the pool says. So with several pairs, the bounds are at least as
wide as t intervals with the pair's own variance, which is the mean, over the others, of the
variance of its difference. It is c + s: s is the residual mean square, and c is the part of the
pair's own residuals. Its degrees of freedom are as for a sum of independent mean squares: R - 1 for
the pair against the mean of the m - 1 others, and (m - 2)(R - 1) for the others (Satterthwaite
1946, doi:10.2307/3002019). The level of these t intervals is 0.8 + 1 / (R - 1)^2 of the error. At a
smaller level, two or three rounds would rarely certify a pair. If the gap is larger than the pool
explains, the level is a quarter of this, because most wrong answers come from such gaps.

**Examples.** `examples` is the variance of D over blocks of validation examples, without the part
that more runs average out, which is in `seeds`. If two pairs agree on all examples, this is zero,
but they may differ on rare examples. So `examples` is at least as large as if log(1 / alpha) of n
examples differed (the rule of three). If the metric is not a mean, n is the number of examples of
the rarest class: with 10 positives, one example changes recall by 0.1. A loss has no such limit.
For a loss, nothing is certified if few blocks make up the difference, because a t interval would be
too narrow. This is so if (sum |x|)^2 / sum x^2 is below 0.4 of the number of blocks, where x are
the differences of the blocks. For normal x it is 0.64.

**Times.** A time to a target is measured in whole epochs. If all R runs of a pair need the same
number of epochs, a share p of all runs may still need another number, and the runs miss it with
probability (1 - p)^R. For two pairs, the shares p and q add up to at most 2 - 2 alpha^(1/2R) if
(1 - p)^R (1 - q)^R is at least alpha. So a half-width is at least this sum times the time of an
epoch.

**The answer.** A pair is certified by its upper bounds and found worse by a lower one (two
one-sided tests, Schuirmann 1987, doi:10.1007/BF01068419). A certain answer is wrong only if a bound
of the truly best pair against another one fails, and these bounds hold simultaneously (Dunnett
1955, doi:10.1080/01621459.1955.10501294).

**Looks.** A search that is extended is judged again, at stricter levels. At look k, the bounds of
the best of m pairs get min(1, 0.72 (m - 1) / k^1.5) of the error, and t intervals with a pair's own
variance get 1 / k^1.5 of their level. Two pairs get 0.9 of the error at the first look, and
0.3 / k^1.5 at look k. The levels add up to more than the error: over five looks to 1.13 times the
error for two pairs, 2.1 times for three and 3.5 times for six. But most searches that err at one
look err at others too, because looks share data. Simulations (`benchmarks/judge_errors.py`) show
that extended searches err in at most the given share. This is not proved. The bounds by examples
get the full error at each look, because all looks use the same examples.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy import special

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.run_table import Pair, Run, RunTable

DEFAULT_CONFIDENCE = 0.95  # Confidence of decisions, races and searches.
# The smallest batch size is preferred among pairs that take at most this times the shortest time.
AS_FAST = 1.05
# A gap of more pooled standard errors than this is more than chance explains. This number and the
# levels of the bounds were found by simulation (`benchmarks/judge_errors.py`).
_FAR = 2.5
# Few blocks decide a loss if (sum |x|)^2 / sum x^2 is below this share of their number.
_FEW_BLOCKS = 0.4
# `expected_seconds` fits these standard deviations of log(measured / planned) by their probability:
# of the plan for a size, of the speed from one run to the next, of a run, and of all runs together.
PLAN_ERRORS, SPEED_CHANGES, TIME_NOISES, SHARED = (0.1, 0.3, 1.0), (0.02, 0.1), (0.03, 0.15), (3.0,)
PLAN_ERROR_POWER = 2.0  # The prior of a plan error is its deviation to this negative power.
# Draws of the times of all sizes, and a factor of their spread: fitted variances are too small.
TIME_DRAWS, DRAW_SPREAD = 1000, 1.5


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The pairs that are as good as the best, as far as their runs show it."""

    pairs: tuple[Pair, ...]  # All compared pairs, ascending.
    leader: Pair  # The best pair by mean difference.
    certified: tuple[Pair, ...]  # At most the tolerance worse than any pair that may be the best.
    worse: tuple[Pair, ...]  # More than the tolerance worse than another pair.
    named: Pair  # The certified pair to take. If no pair is certified, the leader.
    # Whether a pair is certified and every pair that would be preferred to it is worse. At most
    # 1 - confidence of all searches are certain while a compared pair is better by more than the
    # tolerance. This is not the probability that this answer is right.
    certain: bool
    # Why nothing can be certain. If None, nothing prevents it. "alone": there is one pair.
    # "one_execution": each pair has one run. "pinned": the seed changes nothing. "no_outcomes": the
    # values of validation examples are unknown. "heavy_tails": few examples make up the
    # differences. "few_examples": in a race, they cannot show a difference of the tolerance.
    # "split_by_class": the labels are sorted, so validation examples are not representative.
    obstacle: (
        Literal["alone", "one_execution", "pinned", "no_outcomes", "heavy_tails"]
        | Literal["few_examples", "split_by_class"]
        | None
    )
    rounds: Mapping[Pair, int]  # Number of runs of each pair that are compared.
    # How much worse each pair is than the leader, and how much worse the leader is than the second
    # best. A positive gap is always worse. The bounds hold simultaneously. A race has no gaps.
    gaps: Mapping[Pair, Estimate[float]]
    costs: Mapping[Pair, float]  # Training times over the shortest. Empty if one is unknown.
    # Parts of a run that do not change with the seed. If "both", all runs of a pair count as one.
    pinned: Literal["both", "weights", "order"] | None
    left_out: tuple[Pair, ...]  # Pairs without a value, or with a run that diverged.
    open: tuple[Pair, ...]  # Undecided pairs that would be the answer if they were certified.
    # In a race: 95 % ranges of the ratios of two sizes' times.
    cost_ranges: Mapping[Any, tuple[float, float]] = dataclasses.field(default_factory=dict)
    coarse: bool = False  # Whether the error of times to a target is above the tolerance.


def judge(
    runs: Sequence[Run],
    *,
    larger_is_better: bool,
    tolerance: float,
    confidence: float,
    looks: int = 1,
    over_examples: bool = True,
) -> Judgement:
    """Judge which pairs are within a tolerance of the best, and which one to take.

    Leave out runs that were used to choose a pair. Raises `ValueError` if no run has a value.

    Args:
        runs: Runs of all pairs, in any order, not necessarily of the same rounds.
        larger_is_better: Direction of the objective.
        tolerance: Largest difference that counts as equally good, in the unit of the objective.
        confidence: At 0.95, at most 5 % of searches report a wrong pair as certain.
        looks: How often the growing data were judged, including this time: 3 for a search that was
            extended twice.
        over_examples: Whether the objective is a metric over a sample of examples, whose sampling
            error only `outcomes` show. False for a training time.
    """
    table = RunTable(runs, sign=1.0 if larger_is_better else -1.0)
    pairs, count = table.pairs, len(table.pairs)
    bounds = _Bounds(table, tolerance=tolerance, error=1 - confidence, looks=looks)
    gaps, costs, half = bounds.gaps, bounds.costs, bounds.half_widths()
    behind, far = gaps.max(0), (gaps - half > tolerance).any(0)
    # A pair that is the best over few rounds may be lucky.
    leaders = [k for k in range(count) if 2 * table.rounds[k] >= table.most_rounds]
    leaders = [k for k in leaders if not far[k]] or leaders
    # If means are equal, the fastest leads.
    leader = min(leaders, key=lambda k: (behind[k], costs[k], k))
    worse = [k for k in range(count) if k != leader and far[k]]
    # A pair that is worse than another cannot be the best, so no pair is compared with it.
    rivals = [k for k in range(count) if k not in worse]
    near = gaps + half <= tolerance
    certified = [k for k in rivals if all(near[i, k] for i in rivals if i != k)]
    named, undecided = leader, [] if certified else rivals
    if certified and table.costs is None:
        named = min(certified, key=lambda k: (behind[k], k))
    elif certified:
        least = min(costs[k] for k in certified)
        fast = [k for k in certified if costs[k] <= AS_FAST * least]
        named = min(fast, key=lambda k: (pairs[k][0], behind[k], k))
        smaller = [k for k in rivals if pairs[k][0] < pairs[named][0]]
        preferred = {k for k in smaller if costs[k] <= AS_FAST * least}
        preferred |= {k for k in rivals if costs[named] > AS_FAST * costs[k]}
        # If one of these were certified, it would be the answer.
        undecided = sorted(preferred - {*certified})
    obstacle = None
    if count < 2:
        obstacle = "alone"
    elif table.pinned == "both":
        obstacle = "pinned"
    elif table.most_rounds < 2:
        obstacle = "one_execution"
    elif over_examples and not table.paired:
        obstacle = "no_outcomes"
    elif bounds.heavy_tails:
        obstacle = "heavy_tails"
    second = min(
        (k for k in range(count) if k != leader),
        key=lambda k: (k in worse, gaps[leader, k]),
        default=leader,
    )
    estimates = {}
    for k, pair in enumerate(pairs):
        than = second if k == leader else leader
        if than != k and math.isfinite(half[than, k]):
            middle, width = float(gaps[than, k]), float(half[than, k])
            estimates[pair] = Estimate(middle, middle - width, middle + width)
    return Judgement(
        pairs=pairs,
        leader=pairs[leader],
        certified=tuple(pairs[k] for k in certified),
        worse=tuple(pairs[k] for k in worse),
        named=pairs[named],
        certain=bool(certified) and not undecided and obstacle is None,
        obstacle=obstacle,
        rounds=dict(zip(pairs, table.rounds, strict=True)),
        gaps=estimates,
        costs={} if table.costs is None else dict(zip(pairs, table.costs.tolist(), strict=True)),
        pinned=table.pinned,
        left_out=table.left_out,
        open=tuple(pairs[k] for k in undecided),
        coarse=bounds.coarse,
    )


class _Bounds:
    """The differences of all pairs and the parts of their variance.

    Each matrix compares pairs i and k. `gaps[i, k]` is how much worse pair k is than pair i.
    """

    def __init__(self, table: RunTable, *, tolerance: float, error: float, looks: int):
        self._table, self._error = table, error
        count, counts = len(table.pairs), table.counts
        self._other_count = max(1, count - 1)
        self.costs = np.zeros(count) if table.costs is None else table.costs
        self._looks = looks
        divisors = np.maximum(1, counts)
        differences = np.where(table.common, table.values[:, None] - table.values, 0.0)
        self.gaps = differences.sum(2) / divisors
        centred = np.where(table.common, differences - self.gaps[..., None], 0.0)
        squares = (centred**2).sum(2)
        freedom = np.maximum(0, counts - 1) * ~np.eye(count, dtype=bool)
        # Pairs with fewer runs, which often have another spread, are not in the pool.
        pool = [k for k, rounds in enumerate(table.rounds) if rounds == table.most_rounds]
        pool = np.ix_(*[pool if len(pool) > 1 else range(count)] * 2)
        pooled = squares[pool].sum() / max(1, freedom[pool].sum())
        self._seeds = np.full((count, count), pooled)
        self._freedom = max(1.0, freedom[pool].sum() / len(freedom[pool]))
        self._own_variance = squares.sum(1) / np.maximum(1, freedom.sum(1))
        # The degrees of freedom of a pair's own variance, divided by R - 1.
        against = (self._own_variance - pooled / 2) * (1 + 1 / self._other_count)
        against = np.clip(against, 0.0, self._own_variance)
        parts = against**2 + (self._own_variance - against) ** 2 / max(1, self._other_count - 1)
        self._own_freedom = np.ones_like(parts)
        np.divide(self._own_variance**2, parts, out=self._own_freedom, where=parts > 0)
        self._resolution = np.maximum.outer(table.resolutions, table.resolutions)
        self.coarse = bool(self._unseen(max(2, table.most_rounds)).max() > tolerance)
        self._examples, self._blocks = np.zeros((count, count)), 2
        self.heavy_tails = False
        if table.outcomes is not None:
            self._blocks = blocks = table.outcomes.shape[2]
            scale = blocks * (blocks - 1)
            single, mean = np.zeros((2, count, count))
            for i in range(count):
                for k in range(i):
                    both = table.common[i, k]
                    x = table.outcomes[i, both] - table.outcomes[k, both]
                    x -= x.mean(1, keepdims=True)
                    single[i, k] = single[k, i] = (x**2).sum() / (max(1, len(x)) * scale)
                    mean[i, k] = mean[k, i] = (x.mean(0) ** 2).sum() / scale if len(x) else 0.0
            averaged = np.maximum(0.0, single - mean) / np.maximum(1, counts - 1)
            self._examples = np.where(counts > 1, np.maximum(0.0, mean - averaged), mean)
            self._seeds = np.maximum(self._seeds, single)
            # The rule of three: if no example differs, the bound is log(1 / level) examples.
            if math.isfinite(table.step):
                level = error / self._other_count
                rare = (math.log(level) / special.ndtri(level) * table.step) ** 2
                self._examples = np.maximum(self._examples, rare)
            else:
                self.heavy_tails = _few_blocks_decide(np.nanmean(table.outcomes, axis=1))
        elif table.most_rounds < 2:
            self._examples += math.inf  # One run without examples shows nothing.
        if table.most_rounds < 2:
            self._seeds *= 0.0
        for part in (self._seeds, self._examples):
            np.fill_diagonal(part, 0.0)

    def half_widths(self) -> np.ndarray:
        """Return the half-widths of the intervals of the gaps."""
        counts, most = self._table.counts, self._table.most_rounds
        divisors = np.maximum(1, counts)
        share = 0.72 * self._other_count / self._looks**1.5
        if self._other_count == 1:
            share = 0.9 if self._looks == 1 else 0.3 / self._looks**1.5
        shared = max(1, round(self._freedom))
        pooled = _dunnett_quantile(
            self._error * min(1.0, share), self._other_count, shared if shared < 1000 else math.inf
        )
        of_pool = self._seeds / divisors
        seeds = pooled**2 * of_pool
        if self._other_count > 1:
            far = np.abs(self.gaps) > _FAR * np.sqrt(of_pool)
            freedom = np.maximum(1.0, counts - 1.0)
            level = (0.8 + 1 / freedom**2) * np.where(far, 0.25, 1.0) / self._looks**1.5
            level = np.minimum(0.5, level * self._error)
            own = special.stdtrit(freedom * self._own_freedom, 1 - level) ** 2 * self._own_variance
            seeds = np.maximum(seeds, np.maximum(own, own.T) / divisors)
        examples = _dunnett_quantile(self._error, self._other_count, self._blocks - 1.0)
        half = np.sqrt(seeds + examples**2 * self._examples)
        half = np.maximum(half, self._unseen(divisors))
        np.fill_diagonal(half, 0.0)
        # Fewer than two common rounds show nothing, unless every pair has one run.
        unknown = (counts < min(2, most)) & ~np.eye(len(half), dtype=bool)
        return np.where(unknown, math.inf, half)

    def _unseen(self, rounds: Any) -> np.ndarray:
        """Return the largest difference in time that whole epochs may hide (see the docstring)."""
        unseen = 2 * (1 - self._error ** (0.5 / rounds)) * self._resolution
        return unseen * ~np.eye(len(unseen), dtype=bool)


def hidden_by_examples(
    runs: Sequence[Run], *, tolerance: float, error: float
) -> Literal["few_examples", "heavy_tails"] | None:
    """Return why the validation examples cannot show a difference of the tolerance."""
    outcomes: dict[Pair, list[np.ndarray]] = {}
    for run in runs:
        if run.outcomes is not None and run.step is not None:
            outcomes.setdefault(run.pair, []).append(run.outcomes)
    if not outcomes:
        return None
    step = max(run.step for run in runs if run.step is not None)
    if math.isfinite(step):  # The rule of three.
        return "few_examples" if -math.log(error) * step > tolerance else None
    means = np.array([np.mean(rows, axis=0) for rows in outcomes.values()])
    return "heavy_tails" if _few_blocks_decide(means) else None


def _few_blocks_decide(means: np.ndarray) -> bool:
    """Return whether few blocks make up the differences between means of shape [pair, block]."""
    x = np.abs(means[:, None] - means)[np.triu_indices(len(means), 1)]
    x = x[x.any(1)]
    shares = x.sum(1) ** 2 / (x**2).sum(1) / means.shape[1]
    return bool(len(x)) and float(shares.mean()) < _FEW_BLOCKS


@functools.lru_cache(maxsize=4096)
def _dunnett_quantile(error: float, others: int, freedom: float) -> float:
    """Return the quantile of simultaneous bounds of one pair against `others` (Dunnett 1955).

    With probability `error`, the largest T_j = (Z_j - Z_0) / (sqrt(2) S), j = 1 to `others`, is
    above it. S^2 is a chi-square variable divided by its degrees of freedom, `freedom`.
    """
    if others == 1:
        return float(special.stdtrit(freedom, 1 - error))
    z, weights = np.polynomial.hermite_e.hermegauss(24)
    scale = np.ones(1)
    if math.isfinite(freedom):
        parts = (np.arange(40) + 0.5) / 40
        scale = np.sqrt(2 * special.gammaincinv(freedom / 2, parts) / freedom)
    low, high = special.stdtrit(freedom, 1 - np.array([error, error / others]))
    for _ in range(20):
        middle = (low + high) / 2
        below = special.ndtr(z[:, None] + math.sqrt(2) * middle * scale) ** others
        if weights @ below.mean(1) < (1 - error) * weights.sum():
            low = middle
        else:
            high = middle
    return float(high)


def expected_seconds(
    runs: Sequence[Run], batch_sizes: Sequence[int], epochs: int, planned: Mapping[int, float]
) -> tuple[dict[int, float], dict[tuple[int, int], tuple[float, float]]]:
    """Return the seconds of a complete training of each size, and 95 % ranges of their ratios.

    log(measured / planned) is a sum: a part that all runs share, the plan's error for the size, the
    changes of the machine's speed before the run, and noise. Most changes are small and a few are
    large, so changes and noise are Cauchy variables, which are normal variables with fitted
    variances (variational Bayes: Bishop 2006, Pattern Recognition and Machine Learning, section
    10.2). Without planned seconds, there are no ranges.
    """
    if not all(planned.get(size) for size in batch_sizes):
        return _measured_seconds([run for run in runs if run.epochs is None], batch_sizes), {}
    timed = [run for run in runs if run.seconds and run.ended == "completed"]
    count, sizes = len(timed), len(batch_sizes)
    if not timed:
        return {size: planned[size] for size in batch_sizes}, {}
    measured = [(run.seconds or 0.0) * epochs / (run.epochs or epochs) for run in timed]
    logs = np.log(measured) - np.log([planned[run.batch_size] for run in timed])
    of_size = np.equal.outer([run.batch_size for run in timed], batch_sizes)
    design = np.hstack([of_size, np.ones((count, 1)), np.tri(count, count - 1, -1), np.eye(count)])
    grid = np.array([*itertools.product(PLAN_ERRORS, SHARED, SPEED_CHANGES, TIME_NOISES)])
    variances = scales = grid.repeat([sizes, 1, count - 1, count], axis=1) ** 2
    for _ in range(5):
        prior = variances[..., None] * design.T
        precision = np.linalg.inv(design @ prior)
        gain, ratios = prior @ precision, scales / variances
        values = gain @ logs
        covariance = variances[..., None] * np.eye(len(design.T)) - gain @ prior.swapaxes(1, 2)
        squares = values**2 + np.diagonal(covariance, axis1=1, axis2=2)
        variances = scales + (np.arange(len(design.T)) > sizes) * (squares - scales) / 2
    fits = np.linalg.slogdet(precision)[1] - precision @ logs @ logs
    fits = (fits + (np.log(ratios) - ratios).sum(1)) / 2 - PLAN_ERROR_POWER * np.log(grid[:, 0])
    log_seconds = values[:, :sizes] + values[:, sizes : sizes + count].sum(1, keepdims=True)
    log_seconds += np.log([planned[size] for size in batch_sizes])
    weights, rng = special.softmax(fits), np.random.default_rng(1)
    drawn = rng.choice(len(weights), TIME_DRAWS, p=weights)
    factors = DRAW_SPREAD * np.linalg.cholesky(covariance[:, :sizes, :sizes])[drawn]
    draws = log_seconds[drawn] + (factors @ rng.standard_normal((TIME_DRAWS, sizes, 1)))[..., 0]
    ends = np.exp(np.quantile(draws[:, :, None] - draws[:, None], (0.025, 0.975), axis=0))
    ranges = zip(*ends.reshape(2, -1).tolist(), strict=True)
    seconds = dict(zip(batch_sizes, np.exp(weights @ log_seconds).tolist(), strict=True))
    return seconds, dict(zip(itertools.product(batch_sizes, batch_sizes), ranges, strict=True))


def _measured_seconds(runs: Sequence[Run], batch_sizes: Sequence[int]) -> dict[int, float]:
    """Return the mean training time of each size, interpolated for sizes without a time."""
    times: dict[float, list[float]] = {}
    for run in sorted(runs, key=lambda run: -run.batch_size):
        if run.seconds:
            times.setdefault(1 / run.batch_size, []).append(run.seconds)
    # A training takes a time for each example and one for each update.
    known = [*times], [*map(np.mean, times.values())]
    updates, seconds = known if times else ([0.0, 1.0], [0.0, 1.0])
    return {size: float(np.interp(1 / size, updates, seconds)) for size in batch_sizes}
