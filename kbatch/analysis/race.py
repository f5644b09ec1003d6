"""What a race of batch sizes runs next, asked and told: first the learning rates, then certainty.

Pairs of batch size and learning rate run once, at execution number 0, where that promises most
(`kbatch.analysis.rate_search`). What chose a pair does not certify it: of every size that may be
the answer, the pair that is best by the model then runs in rounds, one execution number for all,
and only these are judged (`kbatch.analysis.judge`), from the third round on after each. A size
leaves when it is judged worse, or when it is unlikely to be the answer or the best by all runs.

The race ends when the answer is certain; when a size is certified and no other that would be
preferred has a chance to be; when its executions are spent; or when these would not suffice and
another round is not expected to change which pair is best by more than a small part of the
tolerance. All follows from the runs alone, so a search that was killed goes on as it would have.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kbatch.analysis.judge import DEFAULT_CONFIDENCE, Judgement, Pair, Run
from kbatch.analysis.race_rounds import FIRST_LOOK, first_seed, judge_race, training_seconds_of
from kbatch.analysis.rate_search import FACTORS, RateModel

# Executions a batch size on average, where no number is given.
EXECUTIONS_PER_SIZE = 6
# Rounds that are run for a size to be certified, where these may be enough.
_ROUNDS_TO_CERTIFY = 5
# A size is raced while it is the answer, or the best, with this probability.
_LEAST_CHANCE = 0.3
# Another run must be expected to gain this share of the tolerance.
_LEAST_GAIN = 0.15
# A pair that has begun its rounds stays that of its size within this share of the tolerance.
_AS_GOOD = 1.0


class NextRun(NamedTuple):
    """One training that a race asks for."""

    batch_size: int
    factor: float  # Of the learning rate, relative to the rule.
    number: int  # Of the execution, from 0; all that have the same are a round.


class RaceStep(NamedTuple):
    """What to run next, or why the race has ended."""

    #: Empty at the end, or where the pending ones must be known first.
    runs: tuple[NextRun, ...] = ()
    #: None while the race goes on. "certain"; "certified": no other size is likely to be preferred;
    #: "out of reach": certainty needs more executions than are left; "executions": these are
    #: spent; "alone": only one size can be trained; "diverged": every rate did; "failed": no run
    #: has a value.
    ended: (
        Literal["certain", "certified", "out of reach", "executions", "alone", "diverged", "failed"]
        | None
    ) = None
    judgement: Judgement | None = None  # After the last round; None before the third.


def next_runs(
    runs: Sequence[Run],
    batch_sizes: Sequence[int],
    *,
    base_batch_size: int,
    larger_is_better: bool,
    tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_executions: int | None = None,
    pending: Sequence[NextRun] = (),
    search_rate: bool = True,
    count: int = 1,
) -> RaceStep:
    """Choose up to `count` executions to run beside those that are `pending`.

    Args:
        runs: All that ended; the smallest seed is that of execution number 0.
        batch_sizes: Ascending sizes to compare.
        base_batch_size: One of them, which is tried first.
        larger_is_better: Direction of the objective.
        tolerance: What counts as equally good, in the unit of the objective.
        confidence: As in `judge`.
        max_executions: Most executions in all; None for six a size.
        pending: Those that run now.
        search_rate: Whether to try learning rates beside the rule's.
        count: Most executions to ask for.
    """
    asked: list[NextRun] = []
    while True:
        race = _Race(
            runs,
            batch_sizes,
            base_batch_size=base_batch_size,
            factors=FACTORS if search_rate else (1.0,),
            larger_is_better=larger_is_better,
            tolerance=tolerance,
            confidence=confidence,
            most=max_executions or EXECUTIONS_PER_SIZE * len(batch_sizes),
            pending=(*pending, *asked),
        )
        step = race.step()
        asked += step.runs
        if not step.runs or len(asked) >= count:
            return step._replace(runs=tuple(asked))


class _Race:
    """The runs so far and those that are pending, with what they leave to try."""

    def __init__(
        self,
        runs: Sequence[Run],
        batch_sizes: Sequence[int],
        *,
        base_batch_size: int,
        factors: Sequence[float],
        larger_is_better: bool,
        tolerance: float,
        confidence: float,
        most: int,
        pending: Sequence[NextRun],
    ):
        # What lies on disk has another order.
        first = first_seed(runs)
        runs = [run._replace(seed=(run.seed or 0) - first) for run in runs]
        self._runs = sorted(runs, key=lambda run: (run.pair, run.seed))
        self._pending, self._most = pending, most
        self._sizes, self._factors, self._base = batch_sizes, factors, base_batch_size
        self._goal = {"larger_is_better": larger_is_better, "tolerance": tolerance}
        self._confidence = confidence
        self._left = [
            (size, factor) for size in batch_sizes for factor in factors if self._may(size, factor)
        ]
        self._numbers: dict[Pair, set[Any]] = {}
        for size, factor, number in [(*run.pair, run.seed) for run in runs] + [*pending]:
            self._numbers.setdefault((size, factor), set()).add(number)
        self._spent = sum(map(len, self._numbers.values()))

    def step(self) -> RaceStep:
        """Return the next execution, or why there is none."""
        if self._spent >= self._most:
            return RaceStep((), None if self._pending else "executions", self._judged())
        first = next((pair for pair in self._opening() if pair not in self._numbers), None)
        if first is not None:
            return RaceStep((NextRun(*first, 0),))
        model = RateModel.of(self._runs, self._left, **self._goal)
        if model is None:
            return self._without_values()
        model = model.with_pending([one[:2] for one in self._pending])
        seconds = training_seconds_of(self._runs, self._sizes)
        answer, best = model.chances(seconds, model.pairs)
        # To know which sizes are within the tolerance takes the best one too.
        gains = model.gains({size: (answer[size] + best[size]) / 2 for size in answer})
        top = int(np.where(model.counts > 0, -math.inf, gains).argmax())
        worth = _LEAST_GAIN * model.tolerance
        begun = any(max(numbers) > 0 for numbers in self._numbers.values())
        # Two sizes are to have the rounds of a first judgement.
        may_search = not begun and self._spent + 2 * FIRST_LOOK < self._most
        if may_search and not model.counts[top] and gains[top] > worth:
            return RaceStep((NextRun(*model.pairs[top], 0),))
        if not begun and self._pending:
            return RaceStep()
        return self._next_round(model, seconds, worth)

    def _opening(self) -> list[Pair]:
        """List the pairs that are run whatever comes out."""
        sizes = dict.fromkeys((self._base, self._sizes[-1], self._sizes[0]))
        pairs = [(size, 1.0) for size in (sizes if len(self._factors) > 1 else self._sizes)]
        if len(self._factors) > 1:
            pairs += [(self._base, 0.25), (self._base, 4.0)]
        return [pair for pair in pairs if pair in self._left]

    def _may(self, size: int, factor: float) -> bool:
        """Return whether a pair can be trained as far as the runs show it."""
        trained = {run.batch_size for run in self._runs if run.value is not None}
        return not any(
            (run.ended in ("out_of_memory", "failed") and size == run.batch_size)
            or (run.ended == "out_of_memory" and size > run.batch_size and size not in trained)
            or (run.ended == "diverged" and size == run.batch_size and factor >= run.factor)
            for run in self._runs
        )

    def _without_values(self) -> RaceStep:
        if self._pending:
            return RaceStep()
        smallest = self._base, min(self._factors)
        if smallest in self._left and smallest not in self._numbers:
            return RaceStep((NextRun(*smallest, 0),))
        diverged = any(run.ended == "diverged" for run in self._runs)
        return RaceStep(ended="diverged" if diverged else "failed")

    def _next_round(self, model: RateModel, seconds: Mapping[int, float], worth: float) -> RaceStep:
        pairs = self._pairs_of_sizes(model)
        if len(pairs) < 2:
            return RaceStep(ended="alone")
        rounds = {pair: self._rounds(pair) for pair in pairs}
        most = max(rounds.values())
        judgement = None
        if most >= FIRST_LOOK and not self._pending:
            judgement = self._judged()
        racing = self._racing(model, pairs, seconds, () if judgement is None else judgement.worse)
        untried = next((pair for pair in racing if pair not in self._numbers), None)
        if untried is not None:
            return RaceStep((NextRun(*untried, 0),), None, judgement)
        lacking = [pair for pair in racing if rounds[pair] < most]
        if not lacking:  # They are even.
            if judgement is not None and (ended := self._ended(judgement, model, racing, worth)):
                return RaceStep((), ended, judgement)
            if most >= FIRST_LOOK and self._pending:
                return RaceStep()
        # A round is run whole or not at all.
        if self._spent + len(lacking or racing) > self._most:
            return RaceStep((), None if self._pending else "executions", self._judged())
        pair = min(lacking or racing, key=lambda one: rounds[one])
        number = next(n for n in range(1, self._most + 1) if n not in self._numbers[pair])
        return RaceStep((NextRun(*pair, number),), None, judgement)

    def _judged(self, sizes: Sequence[int] | None = None) -> Judgement | None:
        sizes = self._sizes if sizes is None else sizes
        return judge_race(self._runs, sizes, confidence=self._confidence, **self._goal)

    def _pairs_of_sizes(self, model: RateModel) -> list[Pair]:
        """Return the pair of each size that is raced: the best one, or as good and begun."""
        found: dict[int, Pair] = {}
        for size in {size for size, _ in model.pairs}:
            means = {p: m for p, m in zip(model.pairs, model.means, strict=True) if p[0] == size}
            least = max(means.values()) - _AS_GOOD * model.tolerance
            near = [pair for pair, mean in means.items() if mean >= least]
            found[size] = max(near, key=lambda pair: (self._rounds(pair), means[pair], pair))
        return [found[size] for size in sorted(found)]

    def _rounds(self, pair: Pair) -> int:
        return len(self._numbers.get(pair, set()) - {0})

    def _racing(
        self,
        model: RateModel,
        pairs: Sequence[Pair],
        seconds: Mapping[int, float],
        worse: Sequence[Pair],
    ) -> list[Pair]:
        """Return the pairs that may be the answer, the likeliest first; two where two are left."""
        answer, best = model.chances(seconds, pairs)
        chances = {pair: max(answer[pair[0]], best[pair[0]]) for pair in pairs}
        order = sorted((pair for pair in pairs if pair not in worse), key=lambda one: -chances[one])
        return order[:2] + [pair for pair in order[2:] if chances[pair] >= _LEAST_CHANCE]

    def _ended(
        self, judgement: Judgement, model: RateModel, racing: Sequence[Pair], worth: float
    ) -> Literal["certain", "certified", "out of reach"] | None:
        """Say why no further round is run."""
        if judgement.certain:
            return "certain"
        # Sizes that were left out may forbid a certain answer: rounds settle it among the others.
        inner = self._judged(())
        if inner is None or inner.obstacle == "pinned":
            return "out of reach"
        more = math.inf
        if inner.obstacle is None:
            if inner.certain or (inner.certified and not inner.promising):
                return "certified"
            rounds = max(inner.rounds.values())
            bound = inner.gaps.get(inner.leader)
            # Widths shrink with the root of the rounds.
            shrunk = math.sqrt(rounds / _ROUNDS_TO_CERTIFY)
            near = bound is not None and bound.high * shrunk <= self._goal["tolerance"]
            if not inner.certified and near and rounds < _ROUNDS_TO_CERTIFY:
                return None
            more = (inner.executions_needed or math.inf) - rounds
        # Certain in time, or another round may show that another pair is the better one.
        within = self._spent + more * len(racing) <= self._most
        return None if within or model.gain_of_repeats(racing) > worth else "out of reach"
