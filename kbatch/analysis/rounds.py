"""What a race of batch sizes runs next, asked and told: first the learning rates, then certainty.

Pairs of batch size and learning rate run once, at execution number 0: every size, and the pairs
that promise most (`RateModel`). What chose a pair does not certify it: the two sizes that are
likeliest to be the answer or the best, each at its best rate by the model, then run in rounds, one
execution number for both, and only these are judged (`kbatch.analysis.judge`), from the third round
on after each. The first three rounds have the same two. Then another size takes the place of one
that is judged worse or has become less likely, and runs the rounds that it missed first.

The race ends when the answer is certain; when a size is certified and no other that would be
preferred has a chance to be; when its executions are spent; or when certainty is out of reach: the
rounds that are forecast to settle it do not fit into what is left, and one more run is not expected
to raise the best by more than a small part of the tolerance. Then no other size joins either: at
this tolerance it would hardly settle more. All follows from the runs alone, so a search that was
killed goes on as it would have.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from kbatch.analysis.judge import AS_FAST, FIRST_LOOK, Judgement, judge_race
from kbatch.analysis.learning_rate import FACTORS
from kbatch.analysis.run_table import Pair, Run, first_seed, training_seconds_of

# Rounds that are run for a size to be certified, where these may be enough.
_ROUNDS_TO_CERTIFY = 5
# Another run must be expected to gain this share of the tolerance.
_LEAST_GAIN = 0.15
# Losses are compressed from this many units on; one of these stands for no value at all.
_COMPRESSED, _NO_VALUE = 3.0, 10.0
# The grid of hyperparameters: q; length in octaves of rate and of size; deviations in units.
_STEEPER = np.arange(-1.0, 1.01, 0.25)
_RATE_LENGTHS, _SIZE_LENGTH = (0.75, 1.5, 3.0), 8.0
_SIGNALS, _NOISES = (3.0, 8.0), (0.15, 0.4, 1.0, 2.0)
_STEEPER_SPREAD, _LEVEL, _SIZE_SLOPE = 0.4, 10.0, 1.0


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
    judgement: Judgement | None = None  # By the rounds so far; None where they were not judged.


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
        return RaceStep(ended="alone") if alone else self._round(model)

    def _opening(self) -> list[Pair]:
        """List the pairs that are run whatever comes out."""
        pairs = [(self._base, 1.0), (self._sizes[-1], 1.0), (self._sizes[0], 1.0)]
        if len(self._factors) > 1 and len(self._sizes) + 2 <= self._most:
            pairs += [(self._base, 0.25), (self._base, 4.0)]
        else:  # At the only rate, or before any other.
            pairs += [(size, 1.0) for size in self._sizes]
        return [pair for pair in pairs if pair in self._left]

    def _pair_to_try(self, model: "RateModel") -> Pair | None:
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
        racing = [] if self._pending else self._racing(1, model)
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

    def _round(self, model: "RateModel") -> RaceStep:
        """Return the next execution of a round, or why no further one is run."""
        number = max(1, *(max(numbers) for numbers in self._numbers.values()))
        racing, judgement = self._racing(number, model), None
        lacking = self._lacking(racing, number)
        if not lacking and number >= FIRST_LOOK:
            if self._pending:
                return RaceStep()
            judgement, racing = self._judged(), self._racing(number + 1, model)
            lacking = self._lacking(racing, number)
            ended = judgement and self._ended(judgement, model, racing, joining=bool(lacking))
            if ended:
                return RaceStep(None, ended, judgement)
        lacking = lacking or [NextRun(*pair, number + 1) for pair in racing]
        # A round is run whole or not at all.
        if self._spent + len(lacking) > self._most:
            return RaceStep(None, None if self._pending else "executions", self._judged())
        return RaceStep(lacking[0], None, judgement)

    def _racing(self, number: int, model: "RateModel") -> list[Pair]:
        """Return the two pairs of a round by the runs before it, one where no other is left.

        The first rounds, before any judgement, have the same. `model` is of all runs.
        """
        before = number if number > FIRST_LOOK else 1
        runs = [run for run in self._runs if (run.seed or 0) < before]
        if len(runs) < len(self._runs):
            model = self._model(runs) or model
        judgement = self._judged(runs=runs)
        worse = () if judgement is None else judgement.worse
        pairs = [pair for pair in self._pair_of_each_size(model, runs) if pair not in worse]
        answer, best = model.chances(self._seconds, pairs)
        return sorted(pairs, key=lambda pair: -max(answer[pair[0]], best[pair[0]]))[:2]

    def _pair_of_each_size(self, model: "RateModel", runs: Sequence[Run]) -> list[Pair]:
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

    def _model(self, runs: Sequence[Run]) -> "RateModel | None":
        return RateModel.of(runs, self._left, **self._goal)

    def _judged(
        self, sizes: Sequence[int] | None = None, runs: Sequence[Run] | None = None
    ) -> Judgement | None:
        sizes = self._sizes if sizes is None else sizes
        runs = self._runs if runs is None else runs
        return judge_race(runs, sizes, confidence=self._confidence, **self._goal)

    def _ended(
        self, judgement: Judgement, model: "RateModel", racing: Sequence[Pair], *, joining: bool
    ) -> Literal["certain", "certified", "out of reach"] | None:
        """Say why no further round is run, nor what a pair that would join now lacks."""
        if judgement.certain:
            return "certain"
        # Sizes that were left out may forbid a certain answer: rounds settle it among the others.
        inner = self._judged(()) or judgement
        if inner.obstacle == "pinned":
            return "out of reach"
        more = math.inf
        if inner.obstacle is None:
            if inner.certain or (inner.certified and not inner.promising):
                return None if joining else "certified"
            rounds = max(inner.rounds.values())
            bound = inner.gaps.get(inner.leader)
            # Widths shrink with the root of the rounds.
            shrunk = math.sqrt(rounds / _ROUNDS_TO_CERTIFY)
            high = math.inf if bound is None or bound.high is None else bound.high
            near = high * shrunk <= self._goal["tolerance"]
            if not inner.certified and near and rounds < _ROUNDS_TO_CERTIFY:
                return None
            more = (inner.executions_needed or math.inf) - rounds
        within = self._spent + more * len(racing) <= self._most
        worth = _LEAST_GAIN * model.tolerance
        return None if within or model.gain_of_repeats(racing) > worth else "out of reach"


class RateModel(NamedTuple):
    """What is known of pairs of batch size and rate: means and covariance, in units of the model.

    With a the factor of the learning rate relative to a rule (linear or sqrt) the objective is

        y(a, B) = f(u, log B) + noise        u = log a - q log B

    where f is a Gaussian process and q how much steeper than the rule the best rate grows: the
    slope of log rate against log B is p = p_rule + q. The process has a constant and a slope in log
    B, and squared-exponential covariance in both; q, length scales, signal and noise are averaged
    over a grid by their marginal likelihood (Rasmussen and Williams 2006, sections 2.7 and 5.4.1).

    What lies far below the best value matters little, and a cliff would hide the top: the loss
    against it is compressed, c log(1 + loss / c). A run that diverged counts as such a loss, and no
    larger rate of its size is tried.

    A pair is worth what a run of it is expected to raise the best mean of its size by, the
    knowledge gradient (Frazier et al. 2009, doi:10.1287/ijoc.1080.0314), times the probability that
    the size is the best or the answer: of the sizes within the tolerance of the best, each at its
    best rate, those that train about as fast as the fastest, and of these the smallest.
    """

    pairs: tuple[tuple[int, float], ...]
    counts: np.ndarray  # Executions of each that have a value.
    means: np.ndarray
    covariance: np.ndarray
    noise: float  # Variance of one execution.
    tolerance: float

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        pairs: Sequence[tuple[int, float]],
        *,
        larger_is_better: bool,
        tolerance: float,
    ) -> "RateModel | None":
        """Condition the process on the runs, None where none of the pairs has a value."""
        sign = 1.0 if larger_is_better else -1.0
        found: dict[tuple[int, float], list[float]] = {}
        for run in runs:
            if run.ended in ("completed", "diverged"):
                value = -math.inf if run.value is None else sign * run.value
                found.setdefault((run.batch_size, run.factor), []).append(value)
        means = np.array([np.mean(values) for values in found.values()])
        known = means[np.isfinite(means)]
        every = [*pairs, *(pair for pair in found if pair not in pairs)]
        tried = [pair for pair in pairs if pair in found and np.isfinite(np.mean(found[pair]))]
        if not tried:
            return None
        # A unit that neither the noise nor the shape of the objective is far from.
        unit = max(tolerance, (known.max() - np.median(known)) / 8, 1e-12)
        losses = np.minimum((known.max() - means) / unit, _NO_VALUE)
        values = -_COMPRESSED * np.log1p(losses / _COMPRESSED)
        at = np.array([every.index(pair) for pair in found])
        counts = np.zeros(len(every))
        counts[at] = [len(each) for each in found.values()]

        sizes, rates = np.log2(np.array(every)).T
        sizes = sizes - sizes.mean()
        # A covariance for each q, length and signal, without noise.
        shapes = np.meshgrid(_STEEPER, _RATE_LENGTHS, indexing="ij")
        steeper, length = (axis.ravel()[:, None, None] for axis in shapes)
        u = rates - steeper[:, :, 0] * sizes
        du, dv = u[:, :, None] - u[:, None, :], np.subtract.outer(sizes, sizes)
        bumps = np.exp(-0.5 * ((du / length) ** 2 + (dv / _SIZE_LENGTH) ** 2))
        lines = _LEVEL**2 + _SIZE_SLOPE**2 * np.multiply.outer(sizes, sizes)
        smooth = np.square(_SIGNALS)[:, None, None] * bumps[:, None] + lines
        smooth = smooth.reshape(-1, *lines.shape)
        q = np.repeat(steeper.ravel(), len(_SIGNALS) * len(_NOISES))
        noise = np.tile(_NOISES, len(smooth))

        # With the values as a last row, one factorisation also solves `lower @ off = values`.
        last, places = len(at), np.arange(len(at))
        observed = np.zeros((len(noise), last + 1, last + 1))
        observed[:, :last, :last] = np.repeat(smooth[:, at][:, :, at], len(_NOISES), axis=0)
        observed[:, places, places] += np.multiply.outer(noise**2, 1 / counts[at])
        observed[:, last, :last], observed[:, last, last] = values, 1e9
        factor = np.linalg.cholesky(observed)
        lower, off = factor[:, :last, :last], factor[:, last, :last]
        logs = -0.5 * np.sum(off**2, axis=1) - 0.5 * (q / _STEEPER_SPREAD) ** 2
        logs -= np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        # Parts without weight change nothing.
        parts = np.argsort(-shares)[:40]
        shares = shares[parts] / shares[parts].sum()
        whole = smooth[parts // len(_NOISES)]
        across = np.linalg.solve(lower[parts], whole[:, at])
        part_means = np.matmul(across.transpose(0, 2, 1), off[parts][:, :, None])[:, :, 0]
        mean = shares @ part_means
        apart = part_means - mean
        weighted = (np.sqrt(shares)[:, None, None] * across).reshape(-1, len(every))
        covariance = np.tensordot(shares, whole, 1) - weighted.T @ weighted
        covariance += (shares[:, None] * apart).T @ apart
        kept = len(pairs)
        counts = np.where([pair in tried for pair in pairs], counts[:kept], 0.0)
        model = tuple(pairs), counts, mean[:kept], covariance[:kept, :kept]
        margin = float(_COMPRESSED * np.log1p(tolerance / unit / _COMPRESSED))
        return cls(*model, float(shares @ noise[parts] ** 2), margin)

    def with_pending(self, pairs: Sequence[tuple[int, float]]) -> "RateModel":
        """Add pending runs at their expected value: means stay, variances shrink."""
        counts, covariance = self.counts.copy(), self.covariance
        for i in (self.pairs.index(pair) for pair in pairs if pair in self.pairs):
            counts[i] += 1
            across = covariance[:, i]
            covariance = covariance - np.outer(across, across) / (across[i] + self.noise)
        return self._replace(counts=counts, covariance=covariance)

    def chances(
        self, seconds: Mapping[int, float], pairs: Sequence[Pair]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the probabilities of each size to be the answer, and to be the best."""
        at = [self.pairs.index(pair) for pair in pairs]
        sizes = np.array([pair[0] for pair in pairs])
        every = np.unique(sizes)
        draws = self._draws()[:, at]
        tops = np.stack([draws[:, sizes == size].max(axis=1) for size in every], axis=1)
        near = tops >= tops.max(axis=1, keepdims=True) - self.tolerance
        costs = np.where(near, [seconds[size] for size in every.tolist()], math.inf)
        fast = costs <= AS_FAST * costs.min(axis=1, keepdims=True)
        answers, bests = (
            {size: float(np.mean(one.argmax(axis=1) == k)) for k, size in enumerate(every.tolist())}
            for one in (fast, tops)
        )
        return answers, bests

    def gains(self, weights: Mapping[int, float]) -> np.ndarray:
        """Return what a run of each pair promises, each size counted with its weight."""
        sizes = np.array([size for size, _ in self.pairs])
        found = np.zeros(len(sizes))
        for size, weight in weights.items():
            found += weight * self._gains_of(np.flatnonzero(sizes == size))
        return found

    def gain_of_repeats(self, pairs: Sequence[Pair]) -> float:
        """Return by how much one more run of `pairs` is expected to raise the best, at most."""
        own = np.array([self.pairs.index(pair) for pair in pairs])
        return float(self._gains_of(own)[own].max())

    def _gains_of(self, own: np.ndarray) -> np.ndarray:
        """Return by how much a run of each pair is expected to raise the best mean of `own`."""
        points = np.linspace(-2.5, 2.5, 15)
        shares = np.exp(-0.5 * points**2)
        deviations = np.sqrt(np.diagonal(self.covariance) + self.noise)
        shifts = self.covariance[own] / deviations  # A column for each pair that is run.
        after = np.max(self.means[own][:, None, None] + shifts[:, :, None] * points, axis=0)
        return after @ (shares / shares.sum()) - self.means[own].max()

    def _draws(self) -> np.ndarray:
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = np.random.default_rng(0).standard_normal((1000, len(self.means)))
        return self.means + normal @ root.T
