"""What a race of batch sizes runs next, asked and told: first the learning rates, then certainty.

Pairs of batch size and learning rate run once, at execution number 0: every size, and the pairs
that promise most (`kbatch.analysis.rate_search`). What chose a pair does not certify it: of every
size that may be the answer, the pair that is best by the model then runs in rounds, one execution
number for all, and only these are judged (`kbatch.analysis.judge`), from the third round on after
each. Who runs in a round follows from the rounds before it, so that a round is run whole: the first
three have the same pairs, and then a size leaves when it is judged worse, or when it is unlikely to
be the answer or the best by all runs.

The race ends when the answer is certain; when a size is certified and no other that would be
preferred has a chance to be; when its executions are spent; or when these would not suffice and
another round is not expected to change which pair is best by more than a small part of the
tolerance. All follows from the runs alone, so a search that was killed goes on as it would have.
"""

import collections
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kbatch.analysis.judge import FIRST_LOOK, Judgement, judge_race
from kbatch.analysis.learning_rate import FACTORS
from kbatch.analysis.rate_search import RateModel
from kbatch.analysis.run_table import Pair, Run, first_seed, training_seconds_of

# Rounds that are run for a size to be certified, where these may be enough.
_ROUNDS_TO_CERTIFY = 5
# A size is raced while it is the answer, or the best, with this probability.
_LEAST_CHANCE = 0.5
# Another run must be expected to gain this share of the tolerance.
_LEAST_GAIN = 0.15


class NextRun(NamedTuple):
    """One training that a race asks for."""

    batch_size: int
    factor: float  # Of the learning rate, relative to the rule.
    number: int  # Of the execution, from 0; all that have the same are a round.


class RaceStep(NamedTuple):
    """What to run next, or why the race has ended."""

    #: None at the end, or where the pending ones must be known first.
    run: NextRun | None = None
    #: None while the race goes on. "certain"; "certified": no other size is likely to be preferred;
    #: "out of reach": certainty needs more executions than are left; "executions": these are
    #: spent; "alone": only one size can be trained; "diverged": every rate did; "failed": no run
    #: has a value.
    ended: (
        Literal["certain", "certified", "out of reach", "executions", "alone", "diverged", "failed"]
        | None
    ) = None
    judgement: Judgement | None = None  # After the last round; None before the third.


class Race:
    """The runs so far and those that are pending, with what they leave to try.

    Args:
        runs: All that ended; the smallest seed is that of execution number 0.
        batch_sizes: Ascending sizes to compare.
        base_batch_size: One of them, which is tried first.
        larger_is_better: Direction of the objective.
        tolerance: What counts as equally good, in the unit of the objective.
        confidence: As in `judge`.
        max_executions: Most executions in all.
        pending: Those that run now.
        search_rate: Whether to try learning rates beside the rule's.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        batch_sizes: Sequence[int],
        *,
        base_batch_size: int,
        larger_is_better: bool,
        tolerance: float,
        confidence: float,
        max_executions: int,
        pending: Sequence[NextRun] = (),
        search_rate: bool = True,
    ):
        first = first_seed(runs)
        runs = [run._replace(seed=(run.seed or 0) - first) for run in runs]
        # What lies on disk has another order.
        self._runs = sorted(runs, key=lambda run: (run.pair, run.seed))
        self._sizes, self._base, self._most = batch_sizes, base_batch_size, max_executions
        self._goal = {"larger_is_better": larger_is_better, "tolerance": tolerance}
        self._confidence, self._pending = confidence, pending
        self._factors = FACTORS if search_rate else (1.0,)
        self._left = [
            (size, factor)
            for size in batch_sizes
            for factor in self._factors
            if self._may(size, factor)
        ]
        self._seconds = training_seconds_of(runs, batch_sizes)
        self._numbers: dict[Pair, set[int]] = {}
        for size, factor, number in [(*run.pair, run.seed or 0) for run in runs] + [*pending]:
            self._numbers.setdefault((size, factor), set()).add(number)
        self._spent = sum(map(len, self._numbers.values()))

    def step(self) -> RaceStep:
        """Return the next execution, or why there is none."""
        alone = len({size for size, _ in self._left}) < 2
        if self._spent >= self._most:
            ended = "alone" if alone else "executions"
            return RaceStep(None, None if self._pending else ended, self._judged())
        first = next((pair for pair in self._opening() if pair not in self._numbers), None)
        if first is not None:
            return RaceStep(NextRun(*first, 0))
        model = self._model(self._runs)
        if model is None:
            return self._without_values()
        rounds = [pair for pair, numbers in self._numbers.items() if max(numbers) > 0]
        if all(factor == 1 for _, factor in rounds):
            # None of a race, or those of a grid, which say nothing of other rates.
            tries = self._model([run for run in self._runs if not run.seed]) or model
            trying = [one[:2] for one in self._pending if not one.number]
            pair = self._pair_to_try(tries.with_pending(trying))
            if pair is not None:
                return RaceStep(NextRun(*pair, 0))
            if self._pending and not rounds:
                return RaceStep()
        return RaceStep(ended="alone") if alone else self._round()

    def _opening(self) -> list[Pair]:
        """List the pairs that are run whatever comes out."""
        pairs = [(self._base, 1.0), (self._sizes[-1], 1.0), (self._sizes[0], 1.0)]
        if len(self._factors) > 1 and len(self._sizes) + 2 <= self._most:
            pairs += [(self._base, 0.25), (self._base, 4.0)]
        else:  # At the only rate, or before any other.
            pairs += [(size, 1.0) for size in self._sizes]
        return [pair for pair in pairs if pair in self._left]

    def _pair_to_try(self, model: RateModel) -> Pair | None:
        """Return the pair that is run once before the rounds, None where they may begin."""
        tried = {size for size, _ in self._numbers}
        untried = [pair for pair in self._pair_of_each_size(model, ()) if pair[0] not in tried]
        # Two sizes are to have the rounds of a first judgement, where there is room for these
        # beside one run of each size and two of other rates.
        small = self._most < len(self._sizes) + 2 + 2 * FIRST_LOOK
        room = self._most - self._spent - len(untried)
        if room > (0 if small else 2 * FIRST_LOOK):
            answer, best = model.chances(self._seconds, model.pairs)
            # To know which sizes are within the tolerance takes the best one too.
            gains = model.gains({size: (answer[size] + best[size]) / 2 for size in answer})
            top = int(np.where(model.counts > 0, -math.inf, gains).argmax())
            if not model.counts[top] and gains[top] > _LEAST_GAIN * model.tolerance:
                return model.pairs[top]
        racing = [] if self._pending else self._racing(1)
        return next((pair for pair in [*untried, *racing] if pair not in self._numbers), None)

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
            return RaceStep(NextRun(*smallest, 0))
        diverged = any(run.ended == "diverged" for run in self._runs)
        return RaceStep(ended="diverged" if diverged else "failed")

    def _round(self) -> RaceStep:
        """Return the next execution of a round, or why no further one is run."""
        number = max(1, *(max(numbers) for numbers in self._numbers.values()))
        racing, judgement = self._racing(number), None
        lacking = self._lacking(racing, number)
        if not lacking and number >= FIRST_LOOK:
            if self._pending:
                return RaceStep()
            judgement, racing = self._judged(), self._racing(number + 1)
            if judgement is not None and judgement.certain:
                return RaceStep(None, "certain", judgement)
            lacking = self._lacking(racing, number)
            if judgement is not None and not lacking and (ended := self._ended(racing)):
                return RaceStep(None, ended, judgement)
        lacking = lacking or [NextRun(*pair, number + 1) for pair in racing]
        # A round is run whole or not at all.
        if self._spent + len(lacking) > self._most:
            return RaceStep(None, None if self._pending else "executions", self._judged())
        return RaceStep(lacking[0], None, judgement)

    def _racing(self, number: int) -> list[Pair]:
        """Return the pairs of a round by the runs before it, the likeliest to be named first.

        There are two where two are left. The first rounds, before any judgement, have the same.
        """
        before = number if number > FIRST_LOOK else 1
        runs = [run for run in self._runs if (run.seed or 0) < before]
        model = self._model(runs)
        if model is None:
            return []
        pairs, most = self._pair_of_each_size(model, runs), len(self._sizes)
        if before > 1:
            judgement = self._judged(runs=runs)
            worse = () if judgement is None else judgement.worse
            pairs = [pair for pair in pairs if pair not in worse]
        else:  # So few that they can all have these.
            most = (self._most - sum(0 in own for own in self._numbers.values())) // FIRST_LOOK
        answer, best = model.chances(self._seconds, pairs)
        chances = {pair: max(answer[pair[0]], best[pair[0]]) for pair in pairs}
        order = sorted(pairs, key=lambda pair: -chances[pair])
        likely = [pair for pair in order[2:] if chances[pair] >= _LEAST_CHANCE]
        return order[:2] + likely[: max(0, most - 2)]

    def _pair_of_each_size(self, model: RateModel, runs: Sequence[Run]) -> list[Pair]:
        """Return the best pair of each size, or one as good that has had more rounds."""
        rounds = collections.Counter(run.pair for run in runs if run.seed)
        means = dict(zip(model.pairs, model.means.tolist(), strict=True))
        found: dict[int, Pair] = {}
        for size in sorted({size for size, _ in model.pairs}):
            own = [pair for pair in model.pairs if pair[0] == size]
            least = max(means[pair] for pair in own) - model.tolerance
            near = [pair for pair in own if means[pair] >= least]
            found[size] = max(near, key=lambda pair: (rounds[pair], means[pair], pair))
        return list(found.values())

    def _lacking(self, racing: Sequence[Pair], number: int) -> list[NextRun]:
        """List what pairs lack up to a round; one that joins the others lacks earlier ones too."""
        return [
            NextRun(*pair, each)
            for each in range(number + 1)
            for pair in racing
            if each not in self._numbers.get(pair, ())
        ]

    def _model(self, runs: Sequence[Run]) -> RateModel | None:
        return RateModel.of(runs, self._left, **self._goal)

    def _judged(
        self, sizes: Sequence[int] | None = None, runs: Sequence[Run] | None = None
    ) -> Judgement | None:
        sizes = self._sizes if sizes is None else sizes
        runs = self._runs if runs is None else runs
        return judge_race(runs, sizes, confidence=self._confidence, **self._goal)

    def _ended(self, racing: Sequence[Pair]) -> Literal["certified", "out of reach"] | None:
        """Say why no further round is run, though the answer is not certain."""
        # Sizes that were left out may forbid a certain answer: rounds settle it among the others.
        inner, model = self._judged(()), self._model(self._runs)
        if inner is None or inner.obstacle == "pinned" or model is None:
            return "out of reach"
        more = math.inf
        if inner.obstacle is None:
            if inner.certain or (inner.certified and not inner.promising):
                return "certified"
            rounds = max(inner.rounds.values())
            bound = inner.gaps.get(inner.leader)
            # Widths shrink with the root of the rounds.
            shrunk = math.sqrt(rounds / _ROUNDS_TO_CERTIFY)
            high = math.inf if bound is None or bound.high is None else bound.high
            near = high * shrunk <= self._goal["tolerance"]
            if not inner.certified and near and rounds < _ROUNDS_TO_CERTIFY:
                return None
            more = (inner.executions_needed or math.inf) - rounds
        # Certain in time, or another round may show that another pair is the better one.
        within = self._spent + more * len(racing) <= self._most
        worth = _LEAST_GAIN * model.tolerance
        return None if within or model.gain_of_repeats(racing) > worth else "out of reach"
