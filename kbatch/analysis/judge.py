"""Which pairs of batch size and learning rate are as good as the best, by the runs of a grid.

All runs of a seed are a round: two pairs are compared by D, the mean over the R rounds that both
have of the difference of their values. All are validated on the same examples. Wanted is the
difference over all seeds and all examples of this kind, of which the validation set is a sample:

    var D = seeds / R + examples

`seeds` is the variance of the difference of two single runs: pooled over pairs, twice the
residual mean square of the two-way table (Montgomery 2017, Design and Analysis of Experiments,
section 4.1). It is no less than the paired discordance of single runs over the validation
examples: trainings that disagree on examples differ by chance, however equal three values happen to
be (Dietterich 1998, doi:10.1162/089976698300017197).

The pool says little of one pair that scatters far more. So of several pairs the bounds are no
narrower than t intervals by the pair's own variance, the mean over the others of the variance of
its difference. That is c + s, with s the residual mean square and c the part of the pair's own
residuals, and it has the degrees of freedom of a sum of independent mean squares: R - 1 of the pair
against the mean of the m - 1 others, (m - 2)(R - 1) of these (Satterthwaite 1946,
doi:10.2307/3002019). Its level is 0.8 + 1 / (R - 1)^2 of the error, since two or three rounds would
rarely certify otherwise, and a quarter of it where the gap is more than the pool explains, which is
how such a pair errs.

`examples` is the variance over blocks of validation examples of the mean difference, less what is
in `seeds` already: the part that more runs average out. It would be zero where two pairs
agree on all examples, though they may differ on rare ones: it is no less than what leaves a bound
of log(1 / alpha) of n examples (the rule of three). n are the examples of the rarest class if the
metric is no mean: with 10 positives one example changes recall by 0.1. A loss has no such step.
Instead nothing is certified if few blocks decide: with x the differences of the blocks,
(sum |x|)^2 / sum x^2 is 0.64 of their number for normal x, and a t interval is too narrow if it is
below 0.4.

A time to a target is known to one epoch. If all R runs need the same number of epochs, up to
1 - alpha^(1/R) of the runs may need another one. Of two pairs the shares p and q may add up to
2 - 2 alpha^(1/2R), because (1 - p)^R (1 - q)^R is above alpha up to there. So a half-width is no
less than that many times the time of an epoch.

A pair is certified by its upper bounds and found worse by a lower one (two one-sided tests,
Schuirmann 1987, doi:10.1007/BF01068419). A certain answer is wrong only where a bound of the truly
best pair against another one fails, and those hold at once (Dunnett 1955,
doi:10.1080/01621459.1955.10501294).

A search that is extended is judged again, at stricter levels. Look k may fail the best of m pairs
with min(1, 0.72 (m - 1) / k^1.5) of the error, and a pair's own variance has 1 / k^1.5 of its
level. Of two pairs it is 0.9 of the error at the first look, and 0.3 / k^1.5 at look k. The levels
do not split the error: summed over five looks they are 1.13 times the error for two pairs, 2.1
times for three and 3.5 times for six. Looks share data, so most searches that err at one look err
at others too. Simulations (`benchmarks/judge_errors.py`) show that extended searches err in
at most the given share; this is not proved. The bounds by examples have the whole error at each
look, because all looks are at the same examples.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.run_table import Pair, Run, RunTable

DEFAULT_CONFIDENCE = 0.95  # Of decisions, races and searches.
# Of pairs that train about as fast as the fastest, the smallest batch size is preferred.
AS_FAST = 1.05
# A gap of more standard errors, estimated from all sizes, is more than chance explains. Found by
# simulation, as the levels of the bounds are (`benchmarks/judge_errors.py`).
_FAR = 2.5
# Of the blocks, those that decide: fewer are a heavy tail. Normal differences have 0.64.
_FEW_BLOCKS = 0.4


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Which pairs are as good as the best, as far as their runs show it."""

    pairs: tuple[Pair, ...]  # Those compared, ascending.
    leader: Pair  # The best over the common rounds.
    certified: tuple[Pair, ...]  # At most the tolerance worse than any that may be the best.
    worse: tuple[Pair, ...]  # More than the tolerance worse than some other.
    named: Pair  # Of those certified the one to take, the leader where none is.
    # Whether one is certified and each that would be preferred to it is worse. Of all searches, at
    # most 1 - confidence are certain while a compared pair is better by more than the tolerance:
    # that is no probability that this one is right.
    certain: bool
    # Why nothing can be certain: one pair is "alone", or has "one_execution", every seed is
    # "pinned", values are over examples but the runs have "no_outcomes", few examples of
    # "heavy_tails" make up the differences, or in a race a difference of the tolerance would not
    # show in "few_examples"; None if it can.
    obstacle: (
        Literal["alone", "one_execution", "pinned", "no_outcomes", "heavy_tails", "few_examples"]
        | None
    )
    rounds: Mapping[Pair, int]  # Runs of each that are compared.
    # How much worse each is than the leader (positive is worse in either direction); of the leader
    # against the best other. All bounds of one side hold at once. Without unknown ones; empty for a
    # race.
    gaps: Mapping[Pair, Estimate[float]]
    costs: Mapping[Pair, float]  # Training times over the least; empty where one is not known.
    # What does not vary though the seed does: with both, all runs of a pair count as one.
    pinned: Literal["both", "weights", "order"] | None
    left_out: tuple[Pair, ...]  # Without a value to compare, or one of their runs diverged.
    open: tuple[Pair, ...]  # Neither certified nor worse; if certified they change the answer.
    coarse: bool = False  # Whether times to a target are known to more than the tolerance only.


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
        runs: Of all pairs, in any order, not necessarily of the same rounds.
        larger_is_better: Direction of the objective.
        tolerance: What counts as equally good, in the unit of the objective.
        confidence: 1 minus the share of searches that may be certain and wrong.
        looks: How often the growing data were judged, this time included: 3 for a search that was
            extended twice.
        over_examples: Whether the objective is a metric of a sample of examples, whose own error
            only `outcomes` show; False for a training time.
    """
    sign = 1.0 if larger_is_better else -1.0
    table = RunTable(runs, sign=sign)
    pairs, count = table.pairs, len(table.pairs)
    bounds = _Bounds(table, tolerance=tolerance, error=1 - confidence, looks=looks)
    half = bounds.half_widths()
    found = bounds.rule(half)
    obstacle = None
    if count < 2:
        obstacle = "alone"
    elif table.pinned == "both":
        obstacle = "pinned"
    elif table.most < 2:
        obstacle = "one_execution"
    elif over_examples and not table.paired:
        obstacle = "no_outcomes"
    elif bounds.heavy_tails:
        obstacle = "heavy_tails"
    second = min(
        (k for k in range(count) if k != found.leader),
        key=lambda k: (k in found.worse, bounds.gaps[found.leader, k]),
        default=found.leader,
    )
    gaps = {}
    for k, pair in enumerate(pairs):
        than = second if k == found.leader else found.leader
        if than != k and math.isfinite(half[than, k]):
            middle, width = float(bounds.gaps[than, k]), float(half[than, k])
            gaps[pair] = Estimate(middle, middle - width, middle + width)
    return Judgement(
        pairs=pairs,
        leader=pairs[found.leader],
        certified=tuple(pairs[k] for k in found.certified),
        worse=tuple(pairs[k] for k in found.worse),
        named=pairs[found.named],
        certain=bool(found.certified) and not found.open and obstacle is None,
        obstacle=obstacle,
        rounds=dict(zip(pairs, table.rounds, strict=True)),
        gaps=gaps,
        costs={} if table.costs is None else dict(zip(pairs, table.costs.tolist(), strict=True)),
        pinned=table.pinned,
        left_out=table.left_out,
        open=tuple(pairs[k] for k in found.open),
        coarse=bounds.coarse,
    )


class _Rule(NamedTuple):
    leader: int
    certified: tuple[int, ...]
    worse: tuple[int, ...]
    named: int
    open: tuple[int, ...]


class _Bounds:
    """The differences of all pairs, as matrices [than, of], and the parts of their variance."""

    def __init__(self, table: RunTable, *, tolerance: float, error: float, looks: int):
        self._table, self._tolerance, self._error = table, tolerance, error
        count, counts = len(table.pairs), table.counts
        self._others = max(1, count - 1)
        self.costs = np.zeros(count) if table.costs is None else table.costs
        self._looks = looks
        least = np.maximum(1, counts)
        differences = np.where(table.common, table.values[:, None] - table.values, 0.0)
        self.gaps = differences.sum(2) / least
        centred = np.where(table.common, differences - self.gaps[..., None], 0.0)
        squares = (centred**2).sum(2)
        freedom = np.maximum(0, counts - 1) * ~np.eye(count, dtype=bool)
        # Pairs with fewer runs, which often have another spread, are not in the pool.
        pool = [k for k, own in enumerate(table.rounds) if own == table.most]
        pool = np.ix_(*[pool if len(pool) > 1 else range(count)] * 2)
        pooled = squares[pool].sum() / max(1, freedom[pool].sum())
        self._seeds = np.full((count, count), pooled)
        self._freedom = max(1.0, freedom[pool].sum() / len(freedom[pool]))
        self._own = squares.sum(1) / np.maximum(1, freedom.sum(1))
        # Degrees of freedom of a pair's own variance, over those of its rounds.
        against = (self._own - pooled / 2) * (1 + 1 / self._others)
        against = np.clip(against, 0.0, self._own)
        parts = against**2 + (self._own - against) ** 2 / max(1, self._others - 1)
        self._parts = np.ones_like(parts)
        np.divide(self._own**2, parts, out=self._parts, where=parts > 0)
        self._resolution = np.maximum.outer(table.resolutions, table.resolutions)
        self.coarse = bool(self._unseen(max(2, table.most)).max() > tolerance)
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
            # The rule of three: without disagreement the bound is log(1 / level) examples.
            if math.isfinite(table.step):
                level = error / self._others
                rare = (math.log(level) / special.ndtri(level) * table.step) ** 2
                self._examples = np.maximum(self._examples, rare)
            else:
                self.heavy_tails = _few_blocks_decide(np.nanmean(table.outcomes, axis=1))
        elif table.most < 2:
            self._examples += math.inf  # Nothing is known.
        if table.most < 2:
            self._seeds *= 0.0
        for part in (self._seeds, self._examples):
            np.fill_diagonal(part, 0.0)

    def half_widths(self) -> np.ndarray:
        """Return the half-widths of the intervals."""
        counts, most = self._table.counts, self._table.most
        least = np.maximum(1, counts)
        share = 0.72 * self._others / self._looks**1.5
        if self._others == 1:
            share = 0.9 if self._looks == 1 else 0.3 / self._looks**1.5
        shared = max(1, round(self._freedom))
        pooled = _dunnett_quantile(
            self._error * min(1.0, share), self._others, shared if shared < 1000 else math.inf
        )
        of_pool = self._seeds / least
        seeds = pooled**2 * of_pool
        if self._others > 1:
            far = np.abs(self.gaps) > _FAR * np.sqrt(of_pool)
            freedom = np.maximum(1.0, counts - 1.0)
            level = (0.8 + 1 / freedom**2) * np.where(far, 0.25, 1.0) / self._looks**1.5
            level = np.minimum(0.5, level * self._error)
            alone = special.stdtrit(freedom * self._parts, 1 - level) ** 2 * self._own
            seeds = np.maximum(seeds, np.maximum(alone, alone.T) / least)
        examples = _dunnett_quantile(self._error, self._others, self._blocks - 1.0)
        half = np.sqrt(seeds + examples**2 * self._examples)
        half = np.maximum(half, self._unseen(least))
        np.fill_diagonal(half, 0.0)
        # Of fewer than two common rounds nothing is known, unless all have one.
        unknown = (counts < min(2, most)) & ~np.eye(len(half), dtype=bool)
        return np.where(unknown, math.inf, half)

    def _unseen(self, rounds: Any) -> np.ndarray:
        """Return the difference in time that equal numbers of epochs in all rounds can hide."""
        unseen = 2 * (1 - self._error ** (0.5 / rounds)) * self._resolution
        return unseen * ~np.eye(len(unseen), dtype=bool)

    def rule(self, half: np.ndarray) -> _Rule:
        """Judge by the gaps [than, of] and the half-widths of their intervals."""
        gaps, table = self.gaps, self._table
        indices = range(len(gaps))
        far = (gaps - half > self._tolerance).any(0)
        # Over few rounds the best may be luck.
        leaders = [k for k in indices if 2 * table.rounds[k] >= table.most and not far[k]]
        leaders = leaders or [k for k in indices if 2 * table.rounds[k] >= table.most]
        behind = gaps.max(0)
        # Of equal means the fastest.
        costs = self.costs
        leader = min(leaders, key=lambda k: (behind[k], costs[k], k))
        worse = tuple(k for k in indices if k != leader and far[k])
        # A pair that is worse than another is not the best, so no pair is compared with it.
        rivals = [k for k in indices if k not in worse]
        near = gaps + half <= self._tolerance
        certified = tuple(k for k in rivals if all(near[i, k] for i in rivals if i != k))
        if not certified:
            return _Rule(leader, (), worse, leader, tuple(rivals))
        if table.costs is None:
            named = min(certified, key=lambda k: (behind[k], k))
            return _Rule(leader, certified, worse, named, ())
        least, pairs = min(costs[k] for k in certified), table.pairs
        fast = [k for k in certified if costs[k] <= AS_FAST * least]
        named = min(fast, key=lambda k: (pairs[k][0], behind[k], k))
        # The answer would be another one if one of these were certified.
        preferred = tuple(
            k
            for k in rivals
            if k not in certified
            and (
                costs[named] > AS_FAST * costs[k]
                or (pairs[k][0] < pairs[named][0] and costs[k] <= AS_FAST * least)
            )
        )
        return _Rule(leader, certified, worse, named, preferred)


def hidden_by_examples(
    runs: Sequence[Run], *, tolerance: float, error: float
) -> Literal["few_examples", "heavy_tails"] | None:
    """Return why validation examples do not show a difference as small as the tolerance."""
    rows: dict[Pair, list[np.ndarray]] = {}
    for run in runs:
        if run.outcomes is not None and run.step is not None:
            rows.setdefault(run.pair, []).append(run.outcomes)
    if not rows:
        return None
    step = max(run.step for run in runs if run.step is not None)
    if math.isfinite(step):  # The rule of three.
        return "few_examples" if -math.log(error) * step > tolerance else None
    means = np.array([np.mean(row, axis=0) for row in rows.values()])
    return "heavy_tails" if _few_blocks_decide(means) else None


def _few_blocks_decide(means: np.ndarray) -> bool:
    """Return whether few blocks make up the differences between pairs, of [pair, block]."""
    x = np.abs(means[:, None] - means)[np.triu_indices(len(means), 1)]
    x = x[x.any(1)]
    shares = x.sum(1) ** 2 / (x**2).sum(1) / means.shape[1]
    return bool(len(x)) and float(shares.mean()) < _FEW_BLOCKS


@functools.lru_cache(maxsize=4096)
def _dunnett_quantile(error: float, others: int, freedom: float) -> float:
    """Return the quantile that bounds the best against all others at once (Dunnett 1955).

    Of T_j = (Z_j - Z_0) / (sqrt(2) S), j = 1 to `others`, the largest is above it with probability
    `error`; S^2 is a chi-square of `freedom` over that.
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
