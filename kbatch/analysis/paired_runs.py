"""Which of several batch sizes are as good as the best, by executions paired by seed and example.

Execution r of every size has the same seed, and all are validated on the same examples: two sizes
are compared by D, the mean over R executions of the difference of their values. Wanted is the
difference over all seeds and all examples of this kind, of which the validation set is a sample:

    var D = seeds / R + examples

`seeds` is the variance of the difference of two single executions: twice the mean square of the
residuals of the table of sizes and executions (two-way, pooled over sizes; Montgomery 2017, Design
and Analysis of Experiments, section 4.1), moderated by that of the pair itself where it is larger
(Smyth 2004, doi:10.2202/1544-6115.1027). It is no less than the paired discordance of single
executions over the validation examples: trainings that disagree on examples differ by chance,
however equal three values happen to be (Dietterich 1998, doi:10.1162/089976698300017197).

`examples` is the variance over blocks of validation examples of the mean difference, less what is
in `seeds` already: the part that more executions average out. It would be zero where two sizes
agree on all examples, though they may differ on rare ones: it is no less than what leaves a bound
of log(1 / alpha) of n examples (the rule of three).

A size is certified by its upper bounds and dropped by its lower one, and only one of the two can be
wrong of a size (two one-sided tests, Schuirmann 1987, doi:10.1007/BF01068419). The error
probability is divided by the comparisons of one size (Bonferroni), and for seeds by (L + 1) / 2: L
looks share their data (Pocock 1977, doi:10.1093/biomet/64.2.191). All are at the same examples.

A race says which execution comes next. All sizes train three times, a round with one seed for all.
Then the data are judged at fixed numbers of rounds, and what is worse than the leader by more than
the tolerance leaves the race. It ends when the fastest certified size is known, and every faster
one has left (Maron and Moore 1997, The racing algorithm, with paired differences).
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from kbatch.analysis.intervals import Interval

DEFAULT_CONFIDENCE = 0.95  # Of decisions, races and searches.
# The most executions of a forecast, and those for which a tolerance is advised.
_MOST_ROUNDS = 10**6
_MANY_ROUNDS = 40
# Degrees of freedom for which the variance pooled over sizes counts beside that of a pair.
_POOLED_WEIGHT = 10


class Candidate(NamedTuple):
    """A batch size, or a pair of size and learning rate, with its executions."""

    values: Sequence[float]  # Of the objective, in order: number k has the same seed everywhere.
    # Means of each block of validation examples at the best epoch, [executions, blocks]; None for
    # a metric that is no mean over examples: then seeds alone count.
    outcomes: np.ndarray | None = None
    seconds: float | None = None  # For the budget, a mean; None where all cost the same.
    examples: int | None = None  # Of the validation set; None for one a block.


class Verdict(NamedTuple):
    """Which candidates are as good as the best, as far as their executions show it."""

    leader: int  # The best mean.
    certified: tuple[int, ...]  # At most the tolerance worse than any that may be the best.
    worse: tuple[int, ...]  # More than the tolerance worse than the leader.
    named: int  # The fastest of those certified, the leader where none is.
    certain: bool  # One is certified, and each faster one is in `worse`.
    # How much worse each is than the leader (positive is worse in either direction); of the leader
    # against the best other. All bounds of one side hold at once with the confidence. None where
    # nothing is known.
    gaps: tuple[Interval | None, ...] = ()
    # Forecast of the executions of each that settle it; None where it is settled, where nothing is
    # known of seeds yet, or where no number would.
    executions_needed: int | None = None
    smallest_tolerance: float | None = None  # Too few validation examples: what they could settle.
    promising: tuple[int, ...] = ()  # Faster than `named`, perhaps certified after 40 executions.


def judge(
    candidates: Sequence[Candidate],
    *,
    larger_is_better: bool,
    tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    looks: int = 1,
) -> Verdict:
    """Judge which candidates lie within a tolerance of the best, and which is the fastest one."""
    # A candidate with fewer executions than others was dropped by a race: it stays in `worse`. The
    # first is the smallest, which is preferred where nothing else decides. A certain answer is
    # right with `confidence` at all `looks` at growing data, this one included.
    indices, level = range(len(candidates)), (1 - confidence) / max(1, len(candidates) - 1)
    sign = 1.0 if larger_is_better else -1.0
    pairs = _Pairs(candidates, sign=sign, tolerance=tolerance, level=level, looks=looks)
    rounds, dropped, costs = pairs.rounds, pairs.dropped, pairs.costs
    half = pairs.half_widths(rounds)
    found = pairs.rule(half)
    certain = found.certain and rounds > 1
    others = (k for k in indices if k != found.leader)
    second = min(others, key=lambda k: (k in dropped, pairs.gaps[found.leader, k]), default=None)
    than = [second if k == found.leader else found.leader for k in indices]
    gaps = [_interval(pairs.gaps[i, k], half[i, k]) for k, i in enumerate(than) if i is not None]
    later = pairs.half_widths(max(rounds, _MANY_ROUNDS))
    hopes = pairs.rule(np.maximum(0.0, later - pairs.chance())).certified
    needed = smallest = None
    if not certain and rounds > 1:

        def settled(number: float, chance: float = 0.0) -> bool:
            widths = pairs.half_widths(number) - chance * pairs.chance()
            return pairs.rule(np.maximum(0.0, widths)).certain

        if settled(math.inf):
            numbers = range(rounds + 1, _MOST_ROUNDS)
            needed = rounds + 1 + bisect.bisect_left(numbers, True, key=settled)
            needed = None if needed >= _MOST_ROUNDS else needed
        else:
            rivals = [k for k in indices if k not in found.worse]
            at_best = pairs.half_widths(math.inf)[np.ix_(rivals, rivals)].max()
            # Not even with equal means, or not if these move as far as seeds may take them.
            if at_best > tolerance or not settled(math.inf, 1.0):
                uppers = np.maximum(0.0, pairs.gaps) + later
                fastest = min(rivals, key=lambda k: (costs[k], k))
                smallest = float(max(uppers[k, fastest] for k in rivals))
    return found._replace(
        certain=certain,
        gaps=tuple(gaps) or (None,),
        executions_needed=needed,
        smallest_tolerance=smallest,
        promising=tuple(k for k in hopes if costs[k] < costs[found.named] or not found.certified),
    )


def _interval(middle: float, half: float) -> Interval | None:
    return Interval(float(middle - half), float(middle + half)) if math.isfinite(half) else None


class _Pairs:
    """The differences of all pairs, as matrices [than, of], and the parts of their variance."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        sign: float,
        tolerance: float,
        level: float,
        looks: int,
    ):
        self._levels, self._tolerance = (1 - 2 * level / (looks + 1), 1 - level), tolerance
        seconds = [candidate.seconds for candidate in candidates]
        self.costs = [0.0 if None in seconds else float(value or 0.0) for value in seconds]
        counts = np.array([len(candidate.values) for candidate in candidates])
        self._counts, self.rounds = np.minimum.outer(counts, counts), int(counts.max())
        self.dropped = {index for index, count in enumerate(counts) if count < self.rounds}
        # What was dropped long ago, often of another spread, is not in the pool.
        pool = counts == self.rounds if sum(counts == self.rounds) > 1 else counts > 0
        columns = int(counts[pool].min())
        table = np.array([c.values[:columns] for c, k in zip(candidates, pool, strict=True) if k])
        self._rows = len(table)
        residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        pooled = 2 * float((residuals**2).sum()) / max(1, (self._rows - 1) * (columns - 1))
        self.gaps, self._seeds, self._examples = np.zeros((3, len(counts), len(counts)))
        outcomes = [c.outcomes for c in candidates if c.outcomes is not None]
        paired = len(outcomes) == len(counts) and outcomes[0].shape[1] > 1
        self._blocks = blocks = outcomes[0].shape[1] if paired else 2
        # Pairs are compared over the executions that both have: the longer ones come later.
        for count in sorted(set(counts.tolist())):
            members = [k for k, own in enumerate(counts) if own >= count]
            at = np.ix_(members, members)
            values = np.array([candidates[k].values[:count] for k in members], float)
            means = sign * values.mean(1)
            self.gaps[at] = means[:, None] - means
            if count > 1:
                own = _distances(values - values.mean(1, keepdims=True)) / (count - 1)
                weight = (count - 1) / (count - 1 + _POOLED_WEIGHT)
                self._seeds[at] = pooled + weight * np.maximum(0.0, own - pooled)
            elif not paired:
                self._examples[at] = math.inf  # Nothing is known.
            if paired:
                x = np.array([outcomes[k][:count] for k in members], float)
                x -= x.mean(2, keepdims=True)
                scale = blocks * (blocks - 1)
                single = _distances(x.reshape(len(x), -1)) / (count * scale)
                mean = _distances(x.mean(1)) / scale
                averaged = np.maximum(0.0, single - mean) / max(1, count - 1)
                self._examples[at] = np.maximum(0.0, mean - averaged if count > 1 else mean)
                self._seeds[at] = np.maximum(self._seeds[at], single) if count > 1 else 0.0
        if paired:
            # The rule of three: without disagreement the bound is log(1 / level) examples.
            rare = (math.log(level) / special.ndtri(level)) ** 2 * _example_share(candidates)
            self._examples = np.maximum(self._examples, rare)
        np.fill_diagonal(self._seeds, 0.0)
        np.fill_diagonal(self._examples, 0.0)

    def half_widths(self, rounds: float) -> np.ndarray:
        """Return the half-widths of the intervals once the longest have so many executions."""
        # A dropped one gets no more of them.
        seeds = self._seeds / np.where(self._counts < self.rounds, self._counts, rounds)
        freedom = max(1.0, (self._rows - 1) * (rounds - 1)), self._blocks - 1
        of_seeds, of_examples = special.stdtrit(freedom, self._levels)
        return np.sqrt(of_seeds**2 * seeds + of_examples**2 * self._examples)

    def chance(self) -> np.ndarray:
        """Return two standard errors by seeds, by which the gaps may still move."""
        return 2 * np.sqrt(self._seeds / self._counts)

    def rule(self, half: np.ndarray) -> Verdict:
        """Judge by the gaps [than, of] and the half-widths of their intervals."""
        gaps, costs, indices = self.gaps, self.costs, range(len(self.costs))
        racing = [k for k in indices if k not in self.dropped]
        leader = min(racing, key=lambda k: (gaps[racing[0], k], k))
        far = gaps[leader] - half[leader] > self._tolerance
        worse = tuple(k for k in indices if k in self.dropped or (k != leader and far[k]))
        # One that is worse than the leader is not the best: nobody need be compared with it.
        rivals = [k for k in indices if k not in worse]
        near = gaps + half <= self._tolerance
        certified = tuple(k for k in rivals if all(near[i, k] for i in rivals if i != k))
        named = min(certified, key=lambda k: (costs[k], gaps[leader, k], k), default=leader)
        faster = {k for k in indices if costs[k] < costs[named]}
        return Verdict(leader, certified, worse, named, bool(certified) and faster <= set(worse))


def _distances(rows: np.ndarray) -> np.ndarray:
    """Return the squared distances of all pairs of rows."""
    products = rows @ rows.T
    squares = np.diag(products)
    return np.maximum(0.0, squares[:, None] + squares - 2 * products)


def _example_share(candidates: Sequence[Candidate]) -> float:
    """Return the square of what one example on which two sizes disagree adds to a difference."""
    # The last block may have fewer examples than the others.
    first = np.array([c.outcomes[0, :-1] for c in candidates if c.outcomes is not None], float)
    blocks = first.shape[1] + 1
    step = blocks / (candidates[0].examples or blocks)
    steps = np.diff(np.unique(np.round(first, 6)))
    return (float(steps.min(initial=step)) / blocks) ** 2


LOOKS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)
# A certified size is taken unless so many times the executions show that no faster one will do.
_WORTH = 1.5


class RaceState(NamedTuple):
    following: tuple[int, ...]  # Candidates to execute once more, in order; empty at the end.
    verdict: Verdict | None  # Of the last look, None before the first.
    rounds: int  # Executions of each in the race at that look, 0 before the first.
    # "certain"; "certified": whether a faster size will do too would take long to find out, or for
    # ever; "examples": the validation set is too small for the tolerance; "executions": there are
    # no more of them; None while the race goes on.
    ended: str | None


def race(
    candidates: Sequence[Candidate],
    *,
    larger_is_better: bool,
    tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_executions: int | None = None,
) -> RaceState:
    """Compute the state of a race, and what it executes next, from the executions so far."""
    # The smallest size comes first; `max_executions` is of all together, None for 40 of each.
    counts = [len(candidate.values) for candidate in candidates]
    looks = race_looks(len(candidates), max_executions)
    left_at = dict.fromkeys(range(len(candidates)), 0)
    racing, verdict, rounds, too_small = set(left_at), None, 0, 0
    for look in looks:
        if min(counts[k] for k in racing) < look:
            break
        rounds = look
        left_at |= dict.fromkeys(racing, look)
        verdict = judge(
            [first_executions(candidates[k], count) for k, count in left_at.items()],
            larger_is_better=larger_is_better,
            tolerance=tolerance,
            confidence=confidence,
            looks=len(looks),
        )
        racing -= set(verdict.worse)
        too_small = 0 if verdict.smallest_tolerance is None else too_small + 1
    upcoming = next((look for look in looks if look > rounds), 0)
    missing = sum(max(0, upcoming - counts[k]) for k in racing)
    ended = None
    if verdict is not None and verdict.certain:
        ended = "certain"
    elif (
        verdict is not None
        and verdict.certified
        and not verdict.promising
        and ((verdict.executions_needed or math.inf) > _WORTH * rounds)
    ):
        ended = "certified"
    elif too_small > 1:  # At two looks in a row the validation set was too small.
        ended = "examples"
    elif not upcoming or (max_executions and sum(counts) + missing > max_executions):
        ended = "executions"
    fewest = min(counts[k] for k in racing)
    following = () if ended else tuple(k for k in sorted(racing) if counts[k] == fewest)
    return RaceState(following, verdict, rounds, ended)


def race_looks(candidates: int, max_executions: int | None) -> tuple[int, ...]:
    """Return the rounds after which a race is judged; none where not even the first fits."""
    rounds = LOOKS[-1]
    if max_executions is not None:
        # From the first look on two may be left.
        rounds = LOOKS[0] + (max_executions - LOOKS[0] * candidates) // min(2, candidates)
    return tuple(look for look in LOOKS if look <= rounds)


def first_executions(candidate: Candidate, count: int) -> Candidate:
    kept = None if candidate.outcomes is None else candidate.outcomes[:count]
    return candidate._replace(values=candidate.values[:count], outcomes=kept)
