"""Choose the next training run of a race of batch sizes, and the size that the race names.

A race looks for the size that trains fastest among those within the tolerance of the best.

1. Short runs at the base size, a fifth of the epochs each, find the learning rate (`_short_run`).
2. Complete runs at the base size compare this rate with its neighbours (`_rate_check`).
3. Complete runs of the largest size, of one in the middle, then of any size follow, each at the
   rate that the rule derives from the rate of the base size (`_comparison`). The next run is the
   one that shows most, per second, about which sizes are within the tolerance.
4. After any run, the race names the fastest size that is probably within the tolerance (`_named`).

The quality is taken to be a smooth curve over the logarithm of the size, which runs measure with
noise (`_Belief`). The curve is a Gaussian process, averaged over its amplitude and noise by their
marginal likelihood (Rasmussen and Williams 2006, sections 2.2 and 5.4.1). The constants were chosen
by replays of recorded trainings (`benchmarks/decisions.py`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from kbatch.analysis.judge import AS_FAST, Judgement, expected_seconds, hidden_by_examples
from kbatch.analysis.run_table import Pinned, Run, first_seed, pinned_parts

# A short run trains this share of the epochs, at least two. After one epoch, the best rate seems to
# be twice as high as it is. An octave is a factor of two.
SHORT_SHARE, LEAST_SHORT = 0.2, 2
# Octaves from the rule's rate: the first ones to try, and the farthest. If the rule's rate is wrong
# by a factor of 8 (three octaves), two octaves beyond the right rate can still be tried.
FIRST_OCTAVES, MOST_OCTAVES = (0, -2, 2), 5
ENOUGH = 0.8  # A size is named if it is within the tolerance with this probability.
# A value counts as at most this many tolerances plus standard errors below the best. Otherwise, a
# run that collapsed would bend the curve at the sizes that matter.
CLIPPED_TOLERANCES, CLIPPED_ERRORS = 3.0, 3.0
# `_Race.error`, the expected noise of a run: `SEEDS_PER_SAMPLE` times its standard error over
# validation examples (below 1, because all runs have the same examples), at least `LEAST_ERROR`
# tolerances. If the outcomes of single examples are unknown, it is `UNKNOWN_ERROR` tolerances.
SEEDS_PER_SAMPLE, LEAST_ERROR, UNKNOWN_ERROR = 0.6, 1 / 8, 1 / 2
# The prior of the curve over sizes, in units of `error`: possible amplitudes, correlation length in
# octaves, deviation of the slope over the amplitude, and deviation of the level (nearly flat).
AMPLITUDES, LENGTH, SLOPE, LEVEL = (1.0, 2.0, 4.0, 8.0), 3.0, 0.5, 100.0
# Possible noises of a run in the same unit, the deviation of the logarithm of the noise in the
# prior, and the share of the noise's variance that runs with the same seed have in common.
NOISES, NOISE_SPREAD, SHARED = (0.5, 0.71, 1.0, 1.41, 2.0), 0.4, 0.25
DRAWS = 2000  # Draws of the curve. The error of a probability is then about 0.01.
CLEAR = 1.0  # A larger rate is skipped if its short run is worse by this many times `error`.
# A run is stopped early if it is farther behind than any other run that caught up later, plus this
# margin in tolerances. At least two other complete runs are needed to judge this. In replays, 10 %
# of the stopped runs would have ended within the tolerance, and a third without the margin.
STOPPED_MARGIN, LEAST_FINISHED = 2.0, 2
MOST_NEEDED, LEAST_NEEDED = 2.5, 1.5  # Complete trainings for each size, in most replays.
# The information of a run is divided by its seconds to this power. With 0, seconds would not count.
# With 1, a race would take fewer seconds and name slower sizes.
SECONDS_POWER = 0.5


@dataclass(frozen=True)
class RaceTask:
    """The fixed settings of a race."""

    batch_sizes: tuple[int, ...]  # Ascending.
    base_batch_size: int  # The batch size at which the race looks for the learning rate.
    epochs: int  # Epochs of a complete training.
    larger_is_better: bool
    tolerance: float  # Largest difference that counts as equally good, in the objective's unit.
    confidence: float  # Probability from which a size is certified.
    max_trainings: float  # Complete trainings; a run of e of E epochs counts e / E.
    seconds: Mapping[int, float]  # Expected seconds of a complete training, by batch size.
    search_rate: bool = True  # Whether to try other rates than the rule's.
    short_runs: bool = True  # Whether short runs may look for the rate; if not, complete runs do.


class NextRun(NamedTuple):
    """One training run that a race asks for."""

    batch_size: int
    factor: float  # Of the learning rate, relative to the rule.
    number: int  # Number of the seed, from 0.
    epochs: int  # Epochs at the end. A run that continues a short run trains only the rest.


# Why there is no next run. "pending": pending runs must end first. Otherwise the race has ended.
# "settled": the named size is within the tolerance and no faster one is, at the confidence.
# "trainings" and "time": the next run does not fit into this budget. "alone": only one size can be
# trained. "diverged": every rate diverged. "failed": no size can be trained.
NoRun = Literal["pending", "settled", "trainings", "time", "alone", "diverged", "failed"]


def next_run(
    task: RaceTask,
    runs: Sequence[Run],
    *,
    pending: Sequence[NextRun] = (),
    seconds_left: float | None = None,
) -> NextRun | NoRun:
    """Return what to run next, or why there is no next run. This is a pure function.

    Args:
        task: The fixed settings of the race.
        runs: All runs that ended, in the order in which they began.
        pending: Runs that have begun and not ended.
        seconds_left: Seconds that are left of the time budget. If None, there is no limit.
    """
    race = _Race(task, runs, pending, seconds_left)
    if not race.sizes:
        return "failed"
    return _short_run(race) or _rate_check(race) or _comparison(race)


def judge_race(task: RaceTask, runs: Sequence[Run]) -> Judgement | None:
    """Judge which sizes are within the tolerance of the best, and name one.

    It works after any number of runs. After short runs alone it names the base size at the best
    rate so far. If no run has a value, it returns None.
    """
    race = _Race(task, runs)
    belief = _believe(race)
    if belief is not None:
        pairs = {size: (size, 2.0 ** race.octave(size)) for size in race.compared()}
        within = {size: belief.within[size] for size in pairs}
    else:  # There are only short runs. Take the best of them, because `vertex` may have no run.
        best_octave = max(race.short_values, key=lambda k: race.short_values[k], default=0)
        alive = race.short_values.get(best_octave, -math.inf) > -math.inf
        pairs = {race.base: (race.base, 2.0**best_octave)} if alive else {}
        within = dict.fromkeys(pairs, 0.0)
    if not pairs:
        return None
    sizes, least = [*pairs], 1 - task.confidence
    named = _named(race, within)
    leader = named if belief is None else max(sizes, key=lambda size: belief.mean[size])
    means = {}
    for size in sizes:
        values = [run.value for run in race.runs_at_rate(size) if run.value is not None]
        short_value = race.short_values.get(race.octave(size), -math.inf)
        means[size] = float(np.mean(values)) if values else short_value
    # The curve may be above the values of a size. Certify only sizes whose own values are good.
    good = [size for size in sizes if means[size] >= max(means.values()) - task.tolerance]
    certified = [size for size in good if within[size] >= task.confidence]
    runs_at_rate = race.runs_at_rate()
    if len(race.compared()) < 2:
        obstacle = "alone"
    elif race.pinned == "both":
        obstacle = "pinned"
    elif any(run.outcomes is None for run in runs_at_rate):
        obstacle = "no_outcomes"
    else:
        obstacle = hidden_by_examples(runs_at_rate, tolerance=task.tolerance, error=least)
    fastest = min(race.seconds[size] for size in sizes)
    timed = {run.pair for run in race.runs if run.seconds and run.epochs is None and fastest}
    costs = {pair: race.seconds[pair[0]] / fastest for pair in timed if pair[0] in race.seconds}
    return Judgement(
        pairs=tuple(pairs.values()),
        leader=pairs[leader],
        certified=tuple(pairs[size] for size in certified),
        worse=tuple(pairs[size] for size in sizes if within[size] <= least),
        named=pairs[named],
        certain=not obstacle and named in certified and _is_settled(race, within, named),
        obstacle=obstacle,
        rounds={pair: len(race.runs_at_rate(size)) for size, pair in pairs.items()},
        gaps={},  # Gaps on the curve would differ from those between values in the table.
        costs=costs if costs.keys() >= {*pairs.values()} else {},
        cost_ranges=race.time_ranges,
        pinned=race.pinned,
        left_out=tuple((size, 1.0) for size in task.batch_sizes if size not in sizes),
        open=tuple(pairs[size] for size in sizes if least < within[size] < task.confidence),
    )


def expected_trainings(task: RaceTask) -> float:
    """Return after how many complete trainings a race is expected to end."""
    sizes = len(task.batch_sizes)
    most = min(task.max_trainings, MOST_NEEDED * sizes)
    return (min(most, LEAST_NEEDED * sizes) + most) / 2


def least_values(task: RaceTask, runs: Sequence[Run], seed: int) -> tuple[float, ...]:
    """Return the values that a complete run must have reached by the end of each epoch.

    A run below such a value is stopped: it is farther behind the run of the named pair with this
    seed than any complete run that caught up later. The first third of the epochs does not count,
    because large batches learn slowly at first. Values are negated if smaller is better. If there
    are too few complete runs, the result is empty.
    """
    judgement, sign = judge_race(task, runs), 1.0 if task.larger_is_better else -1.0
    complete = [run for run in runs if run.epochs is None and len(run.curve) == task.epochs]
    curves = {(run.pair, run.seed): [sign * value for value in run.curve] for run in complete}
    curve_of_named = curves.pop((judgement.named, seed), None) if judgement else None
    if curve_of_named is None or len(curves) < LEAST_FINISHED:
        return ()
    best = np.maximum.accumulate([curve_of_named, *curves.values()], axis=1)
    behind = best[0] - best[1:]
    made_up = np.maximum(0.0, (behind - behind[:, -1:]).max(0))
    least = best[0] - made_up - STOPPED_MARGIN * task.tolerance
    least[: -(-task.epochs // 3) - 1] = -math.inf
    return tuple(least[:-1].tolist())


def short_epochs(task: RaceTask) -> int:
    """Return the epochs of a short run, or of a complete one if none can be short."""
    short = max(LEAST_SHORT, round(SHORT_SHARE * task.epochs))
    return short if task.short_runs and short < task.epochs else task.epochs


def _short_run(race: "_Race") -> NextRun | NoRun | None:
    """Return the next rate to try at the base size. If the best rate is known, return None.

    The race first tries rates a factor of four apart, until the best is between two worse ones.
    Then it tries half and twice the best rate.
    """
    if not race.task.search_rate:
        return None
    values = race.short_values
    best = max(values, key=lambda octave: values[octave], default=0)
    octaves = [*FIRST_OCTAVES]
    if values:
        octaves += [best - 2, best + 2, best - 1, best + 1]
        if values[best] == -math.inf:  # All diverged.
            octaves = [min(values) - 2, -MOST_OCTAVES]
    for octave in octaves:
        run = NextRun(race.base, 2.0**octave, 0, race.short)
        if race.allows(race.base, octave) and octave not in values and run not in race.pending:
            return None if race.exceeded(run, race.missing_first_runs()) else run
    pending = [r for r in race.pending if (r.batch_size, *r[2:]) == (race.base, 0, race.short)]
    if any(_octave(run) not in values for run in pending):
        return "pending"
    return "diverged" if values.get(best) == -math.inf else None


def _rate_check(race: "_Race") -> NextRun | None:
    """Return the next complete run that checks the rate at the base size, if one is needed.

    Large rates look better after short runs than after complete ones, above all on noisy data. So
    the next smaller rate is trained too, then smaller ones as long as they are better. If none is
    better, the next larger rate is trained, unless its short run was clearly worse.
    """
    vertex, known = race.vertex, race.base_values
    octaves = [vertex]
    if race.task.search_rate and race.short < race.task.epochs:
        octaves.append(vertex - 1)
        best, values = race.checked, race.short_values
        gap = values.get(vertex, -math.inf) - values.get(vertex + 1, -math.inf)
        if best != vertex:
            octaves.append(best + (1 if best > vertex else -1))
        elif gap < CLEAR * race.error:
            octaves.append(vertex + 1)
    for octave in octaves:
        run = NextRun(race.base, 2.0**octave, 0, race.task.epochs)
        if octave not in known and run not in race.pending and race.allows(race.base, octave):
            reserved = race.missing_first_runs() if known else ()
            return None if race.exceeded(run, reserved) else run
    return None


def _comparison(race: "_Race") -> NextRun | NoRun:
    """Return the complete run that shows most about the answer, or why the race has ended."""
    belief = _believe(race)
    next_runs = [race.next_complete_run(s) for s in race.sizes if s not in race.stopped_sizes]
    options = [run for run in next_runs if not race.exceeded(run)]
    ended = "settled" if not next_runs else None if options else race.exceeded(next_runs[0])
    if belief is not None and options:
        named = _named(race, belief.within)
        if len(race.sizes) == 1:
            ended = "alone"
        elif not race.missing_first_runs() and named in race.compared():
            ended = "settled" if _is_settled(race, belief.within, named) else None
    if ended is not None:
        return "pending" if race.pending else ended
    first = [run for run in race.missing_first_runs() if run in options]
    if belief is None or first:
        return (first or options)[0]
    first = [run for run in options if run.batch_size == named and not run.number]
    # To first order, a run of a size lowers the sum of the variances of `near` by `information`.
    # `near` is 1 for each size that is within the tolerance, and 0 for all others.
    moved = (belief.draws - belief.draws.mean(0)).T @ (belief.near - belief.near.mean(0))
    information = ((moved / DRAWS) ** 2).sum(1) / (np.diag(belief.covariance) + belief.noise)
    worth = {
        run: information[race.sizes.index(run.batch_size)]
        / (race.seconds[run.batch_size] * race.share(run)) ** SECONDS_POWER
        for run in first or options
    }
    return max(worth, key=lambda run: worth[run])


def _named(race: "_Race", within: Mapping[int, float]) -> int:
    """Return the fastest size that is probably within the tolerance, or else the most probable."""
    probable = [size for size in within if within[size] >= ENOUGH]
    probable = probable or [max(within, key=lambda size: within[size])]
    least = min(race.seconds[size] for size in probable)
    return min(size for size in probable if race.seconds[size] <= AS_FAST * least)


def _is_settled(race: "_Race", within: Mapping[int, float], named: int) -> bool:
    """Return whether the named size is within the tolerance and no faster one is."""
    faster = [size for size in within if AS_FAST * race.seconds[size] < race.seconds[named]]
    confidence = race.task.confidence
    return within[named] >= confidence and all(within[size] <= 1 - confidence for size in faster)


class _Race:
    """The state of a race, derived from its runs. Larger values are better. Rates are octaves."""

    def __init__(
        self,
        task: RaceTask,
        runs: Sequence[Run],
        pending: Sequence[NextRun] = (),
        seconds_left: float | None = None,
    ):
        self.task, self.pending, self.seconds_left = task, pending, seconds_left
        first, sign = first_seed(runs), 1.0 if task.larger_is_better else -1.0
        self.runs = [
            run._replace(
                seed=(run.seed or 0) - first,
                value=None if run.value is None else sign * run.value,
                # A model with constant outputs at the end has no value.
                ended="diverged" if (run.value, run.ended) == (None, "completed") else run.ended,
                curve=tuple(sign * value for value in run.curve),
            )
            for run in runs
        ]
        self.short = short_epochs(task)
        self.pinned: Pinned | None = pinned_parts(self.runs)
        with_value = {run.batch_size for run in self.runs if run.value is not None}
        too_large = {run.batch_size for run in self.runs if run.ended == "out_of_memory"}
        failed = {run.batch_size for run in self.runs if run.ended == "failed"} | too_large
        larger = {s for s in task.batch_sizes if s > min(too_large, default=s)} - with_value
        trainable = [size for size in task.batch_sizes if size not in failed | larger]
        nearest = sorted(trainable, key=lambda size: abs(math.log(size / task.base_batch_size)))
        self.base = nearest[0] if nearest else task.base_batch_size
        self.error = self._standard_error()
        runs_at_base = [run for run in self.runs if run.batch_size == self.base]
        #: Values of the first seed at the base size after a short run, by the octave of the rate.
        self.short_values = {
            _octave(run): -math.inf
            if run.ended == "diverged" or run.value is None
            else max(run.curve[: self.short] if self.short < task.epochs else (), default=run.value)
            for run in runs_at_base
            if not run.seed
        }
        values: dict[int, list[float]] = {}
        for run in runs_at_base:
            if run.epochs is None or run.ended == "stopped_early":
                complete = run.value is not None and run.epochs is None
                values.setdefault(_octave(run), []).extend([run.value or 0.0] if complete else [])
        #: Means of the complete runs at the base size by octave, so that no lucky seed decides.
        self.base_values = {k: float(np.mean(v)) if v else -math.inf for k, v in values.items()}
        self.vertex = self._vertex()
        #: The best octave by complete runs at the base size, or by short runs if there are none.
        self.checked = max(self.base_values, key=lambda k: self.base_values[k], default=self.vertex)
        self._base_octave = self.checked if self.short < task.epochs else self.vertex
        self.sizes = [size for size in trainable if self.allows(size, self.octave(size))]
        known = task.batch_sizes, task.epochs, task.seconds
        self.seconds, self.time_ranges = expected_seconds(self.runs, *known)
        #: Sizes with a run that was stopped early. They are neither run again nor named.
        stopped = [run for run in self.runs_at_rate() if run.ended == "stopped_early"]
        self.stopped_sizes = {run.batch_size for run in stopped}

    def _ceiling(self, size: int) -> int:
        """Return the lowest octave that diverged above all octaves that have a value."""
        runs = [run for run in self.runs if run.batch_size == size]
        least = max((_octave(r) for r in runs if r.value is not None), default=-MOST_OCTAVES)
        diverged = [_octave(r) for r in runs if r.ended == "diverged"]
        return min((k for k in diverged if k >= least), default=MOST_OCTAVES + 1)

    def allows(self, size: int, octave: int) -> bool:
        """Return whether a size may be trained at a rate."""
        return -MOST_OCTAVES <= octave < self._ceiling(size)

    def octave(self, size: int) -> int:
        """Return the octave of a size's rate: as at the base size, or lower if that diverged."""
        return min(self._base_octave, self._ceiling(size) - 1)

    def _standard_error(self) -> float:
        """Return the expected noise of a run's value, before any run is repeated."""
        scored = [run for run in self.runs if run.value is not None]
        best = max(scored, key=lambda run: run.value or 0.0, default=None)
        error = UNKNOWN_ERROR * self.task.tolerance
        if best is not None and best.outcomes is not None:
            outcomes = best.outcomes[~np.isnan(best.outcomes)]
            by_examples = float(np.std(outcomes, ddof=1)) / math.sqrt(len(outcomes))
            error = max(SEEDS_PER_SAMPLE * by_examples, LEAST_ERROR * self.task.tolerance)
        return max(error, 1e-12)

    def _vertex(self) -> int:
        """Return the octave at the top of a parabola through the values around the best one."""
        values = self.short_values
        best = max(values, key=lambda octave: values[octave], default=0)
        near = [octave for octave in values if abs(octave - best) <= 2]
        if len(near) < 3:
            return best
        low = values[best] - CLIPPED_ERRORS * self.error
        clipped = [max(values[k], low) for k in near]
        bend, slope, _ = np.polyfit(np.array(near) - best, clipped, 2)
        return best if bend >= 0 else best + int(np.clip(round(-slope / 2 / bend), -1, 1))

    def compared(self) -> list[int]:
        """List the sizes that have a run at their rate, none of which was stopped."""
        return [s for s in self.sizes if self.runs_at_rate(s) and s not in self.stopped_sizes]

    def runs_at_rate(self, *sizes: int) -> list[Run]:
        """List the complete and stopped runs at the rates of the sizes, or of all sizes."""
        return [
            run
            for run in self.runs
            if run.batch_size in (sizes or self.sizes)
            and _octave(run) == self.octave(run.batch_size)
            and (run.ended == "stopped_early" or (run.value is not None and run.epochs is None))
        ]

    def next_complete_run(self, size: int) -> NextRun:
        factor = 2.0 ** self.octave(size)
        runs = [run for run in self.runs if run.pair == (size, factor)]
        used = {run.seed for run in runs if run.epochs is None or run.ended != "completed"}
        used |= {run.number for run in self.pending if run[:2] == (size, factor)}
        number = next(n for n in range(len(used) + 1) if n not in used)
        return NextRun(size, factor, number, self.task.epochs)

    def missing_first_runs(self) -> list[NextRun]:
        """List the first runs that are missing at the base size, the far end and the middle."""
        base, last = self.sizes.index(self.base), len(self.sizes) - 1
        far = last if base < last else 0
        places = dict.fromkeys([base, far, (far + base) // 2])
        runs = [self.next_complete_run(self.sizes[place]) for place in places]
        return [run for run in runs if run.number == 0]

    def share(self, run: NextRun) -> float:
        """Return the cost of a run in complete trainings, without epochs of its short run."""
        trained = [
            known.epochs or 0
            for known in self.runs
            if (*known.pair, known.seed) == run[:3] and known.ended == "completed"
        ]
        return (run.epochs - max(trained, default=0)) / self.task.epochs

    def exceeded(
        self, run: NextRun, reserved: Sequence[NextRun] = ()
    ) -> Literal["trainings", "time"] | None:
        """Return which budget a run does not fit into, with room for the `reserved` runs.

        No room is kept for runs that would not fit into an unspent budget.
        """
        shares = [self.share(planned) for planned in (run, *reserved)]
        spent = sum((ended.epochs or self.task.epochs) / self.task.epochs for ended in self.runs)
        spent += sum(self.share(pending) for pending in self.pending)
        budgets: list[Any] = [("trainings", shares, spent, self.task.max_trainings - spent)]
        if self.seconds_left is not None and self.runs:
            seconds = [self.seconds[planned.batch_size] for planned in (run, *reserved)]
            costs = [share * size_s for share, size_s in zip(shares, seconds, strict=True)]
            spent_s = sum(ended.seconds or 0.0 for ended in self.runs)
            budgets.append(("time", costs, spent_s, self.seconds_left))
        for budget, costs, spent, left in budgets:
            room = sum(costs[1:]) if sum(costs) <= left + spent else 0.0
            if costs[0] + room > left * (1 + 1e-9) + 1e-9:
                return budget
        return None


class _Belief(NamedTuple):
    """The probable quality of each size, from the runs of the sizes at their rates."""

    mean: Mapping[int, float]
    covariance: np.ndarray
    noise: float  # Variance of one run.
    draws: np.ndarray  # Of the qualities of all sizes, [draw, size].
    near: np.ndarray  # Whether each drawn quality is within the tolerance of the best.
    within: dict[int, float]  # Probability that a size is within the tolerance of the best.


def _believe(race: _Race) -> _Belief | None:
    """Fit the curve over sizes to the complete runs. If there is none yet, return None."""
    runs = race.runs_at_rate()
    values = [run.value for run in runs if run.epochs is None and run.value is not None]
    if not values:
        return None
    sizes, error, tolerance = race.sizes, race.error, race.task.tolerance
    low = max(values) - CLIPPED_TOLERANCES * tolerance - CLIPPED_ERRORS * error
    # A stopped run would have become better than its last value, but not good enough.
    tops = {"stopped_early": max(values) - tolerance - error}
    y = [max(low, min(run.value or low, tops.get(run.ended, math.inf))) for run in runs]
    y = (np.array(y) - max(values)) / error
    places = [sizes.index(run.batch_size) for run in runs]
    seeds = np.array([run.seed for run in runs])
    x = np.log2(sizes) - np.mean(np.log2(sizes))
    shape = SLOPE**2 * np.outer(x, x) + np.exp(-0.5 * (np.subtract.outer(x, x) / LENGTH) ** 2)
    correlation = (1 - SHARED) * np.eye(len(y)) + SHARED * np.equal.outer(seeds, seeds)
    posteriors = []
    for amplitude, noise in itertools.product(AMPLITUDES, NOISES):
        prior = amplitude**2 * shape + LEVEL**2
        lower = np.linalg.cholesky(prior[np.ix_(places, places)] + noise**2 * correlation)
        white, cross = np.linalg.solve(lower, y), np.linalg.solve(lower, prior[places])
        log = -0.5 * white @ white - np.log(np.diag(lower)).sum()
        log -= 0.5 * (math.log(noise) / NOISE_SPREAD) ** 2
        posteriors.append((log, cross.T @ white, prior - cross.T @ cross, noise**2))
    logs, curves, covariances, noises = map(np.array, zip(*posteriors, strict=True))
    weights = special.softmax(logs)
    mean, noise = weights @ curves, float(weights @ noises)
    covariance = np.tensordot(weights, covariances, 1)
    covariance = covariance + (weights[:, None] * (curves - mean)).T @ (curves - mean)
    for run in race.pending:  # If its value is the expected one, only the variance falls.
        if run.batch_size in sizes and run.epochs == race.task.epochs:
            place = sizes.index(run.batch_size)
            column = covariance[:, place]
            covariance = covariance - np.outer(column, column) / (column[place] + noise)
    variances, axes = np.linalg.eigh(covariance)
    normals = np.random.default_rng(1).standard_normal((DRAWS, len(sizes)))
    draws = mean + (normals * np.sqrt(np.maximum(variances, 0.0))) @ axes.T
    draws, mean, covariance = draws * error, mean * error, covariance * error**2
    near = draws >= draws.max(1, keepdims=True) - tolerance
    within = dict(zip(sizes, near.mean(0).tolist(), strict=True))
    means = dict(zip(sizes, mean.tolist(), strict=True))
    return _Belief(means, covariance, noise * error**2, draws, near, within)


def _octave(run: Run | NextRun) -> int:
    return round(math.log2(run.factor))
