"""What a race of batch sizes runs next, and which size it names: pure functions of its runs.

A race looks for the size that trains fastest among those within the tolerance of the best.

1. Short runs at the base size, a fifth of the epochs each, find the learning rate (`_short_run`).
2. Complete runs at the base size check it against its neighbours (`_check`).
3. Complete runs of other sizes follow, each at the rate that the rule makes of the base size's
   rate: the largest size, then one in the middle. After these, the next run is the one that tells
   most for its seconds about which sizes are within the tolerance (`_comparison`). A size that ran
   before runs with its next seed.
4. After any run, the fastest size that is probably within the tolerance is named (`_named`).

All sizes share one `Belief`: the quality is a smooth curve over the logarithm of the size, seen
through the noise of single runs. It is a Gaussian process whose amplitude and noise are averaged
over a grid by their marginal likelihood (Rasmussen and Williams 2006, sections 2.2 and 5.4.1).
The constants were chosen by replays of recorded trainings (`benchmarks/decisions.py`).
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kbatch.analysis.judge import AS_FAST, Judgement, hidden_by_examples
from kbatch.analysis.run_table import Pinned, Run, first_seed, pinned_parts, training_seconds_of

# A short run trains this share of the epochs, at least two: after one epoch the best rate seems to
# be an octave higher than it is.
SHORT_SHARE, LEAST_SHORT = 0.2, 2
# The largest distance in octaves between a rate that is tried and the rule's rate. If the rule's
# rate is wrong by a factor of 8, two octaves are left beyond the right one.
MOST_OCTAVES = 5
# The first octaves tried. Steps by a factor of four need few runs; a factor of two follows.
FIRST_OCTAVES = (0, -2, 2)
# A size is named if it is within the tolerance with this probability. A larger value names slower
# and safer sizes.
ENOUGH = 0.8
# A run that is further behind the best than this sum, in tolerances and in standard errors, counts
# as this far behind: a run that collapsed must not bend the curve of the sizes that matter.
CLIPPED_TOLERANCES, CLIPPED_ERRORS = 3.0, 3.0
# The deviation that is expected between seeds, over the standard error by validation examples. It
# is below 1 because all runs are validated on the same examples.
SEEDS_PER_SAMPLE = 0.6
# The curve over sizes, in units of the noise that is expected: its possible amplitudes, its length
# in octaves, the deviation of its slope over the amplitude, and that of its level, so large that
# the level is free.
AMPLITUDES, LENGTH, SLOPE, LEVEL = (1.0, 2.0, 4.0, 8.0), 3.0, 0.5, 100.0
# The possible noise of one run in the same unit, the deviation of its logarithm around 0, and the
# share of its variance that runs with the same seed number have in common.
NOISES, NOISE_SPREAD, SHARED = (0.5, 0.71, 1.0, 1.41, 2.0), 0.4, 0.25
DRAWS = 2000  # Of the curve. They give probabilities to about one percent.
# The noise of a run is at least this part of the tolerance, because smaller differences do not
# matter, and half of the tolerance if nothing is known of single validation examples.
LEAST_ERROR, UNKNOWN_ERROR = 1 / 8, 1 / 2
# Number of standard errors by which a larger rate must be worse after a short run to be skipped.
CLEAR = 1.0
# A run is stopped early if it trails by more than the other runs made up for, plus this margin in
# tolerances. At least two complete runs must show how much others made up for. In replays, a tenth
# of the stopped runs would have ended within the tolerance. Without a margin it is a third.
STOPPED_MARGIN, LEAST_FINISHED = 2.0, 2
# Complete trainings for each size. In replays a race rarely took more, and rarely fewer.
MOST_NEEDED, LEAST_NEEDED = 2.5, 1.5
# What a run tells is divided by its seconds to this power. With 0, seconds would not count. With 1,
# a race would take fewer seconds and name slower sizes.
PRICED = 0.5
# Deviations of the logarithm of seconds: a change of the machine's speed that lasts for about
# `DRIFT_RUNS` runs, and the noise of a single run.
DRIFT, DRIFT_RUNS, TIME_NOISE = 1.0, 5.0, 0.05
# The plan's error for a size is the first of these deviations. Another one is taken if the runs are
# `SURER` times as likely with it: other work disturbed the timing of the plan.
PLAN_ERRORS, SURER = (0.1, 0.3, 1.0), 10.0


@dataclass(frozen=True)
class RaceTask:
    """What does not change during a race."""

    batch_sizes: tuple[int, ...]  # Ascending.
    base_batch_size: int  # One of them, at which the learning rate is looked for.
    epochs: int  # Of a complete training.
    larger_is_better: bool
    tolerance: float  # What counts as equally good, in the unit of the objective.
    confidence: float  # Probability from which a size is certified.
    max_trainings: float  # Complete trainings; a run of e of E epochs counts e / E.
    seconds: Mapping[int, float]  # That a complete training of each size is expected to take.
    search_rate: bool = True  # Whether to try other rates than the rule's.
    short_runs: bool = True  # Whether short runs may look for the rate; else complete ones do.


class NextRun(NamedTuple):
    """One training run that a race asks for."""

    batch_size: int
    factor: float  # Of the learning rate, relative to the rule.
    number: int  # Of the seed, from 0.
    epochs: int  # To train in all; a short run that is continued trains only the others.


class RaceStep(NamedTuple):
    """What to run next, or why the race has ended; neither while pending runs must end first."""

    run: NextRun | None = None
    # "settled": the named size is within the tolerance and no such size is faster, in all
    # likelihood; "trainings" or "time": the next run does not fit into what is left; "alone": only
    # one size can be trained; "diverged": every rate did; "failed": no run has a value.
    ended: Literal["settled", "trainings", "time", "alone", "diverged", "failed"] | None = None


def next_run(
    task: RaceTask,
    runs: Sequence[Run],
    *,
    pending: Sequence[NextRun] = (),
    seconds_left: float | None = None,
) -> RaceStep:
    """Return what to run next, or why the race has ended; it follows from the runs alone.

    Args:
        task: What does not change during the race.
        runs: All that ended, in the order in which they began.
        pending: Those that run now.
        seconds_left: Seconds that are left of the time budget. Default: no limit.
    """
    race = _Race(task, runs, pending, seconds_left)
    if not race.sizes:
        return RaceStep(None, "failed")
    return _short_run(race) or _check(race) or _comparison(race)


def judge_race(task: RaceTask, runs: Sequence[Run]) -> Judgement | None:
    """Judge which sizes are within the tolerance of the best, and name one.

    It works after any number of runs. After short runs alone it names the base size at the best
    rate so far. Returns None if no run has a value.
    """
    race = _Race(task, runs)
    sizes = race.compared()
    belief = _believe(race)
    if belief is None:
        sizes = [race.base] if any(value > -math.inf for value in race.tried.values()) else []
    if not sizes:
        return None
    pairs = {size: (size, 2.0 ** race.octave(size)) for size in sizes}
    if belief is None:  # Not the vertex, where no run may be.
        pairs = {race.base: (race.base, 2.0 ** max(race.tried, key=lambda k: race.tried[k]))}
    within = dict.fromkeys(sizes, 0.0) if belief is None else belief.within()
    within = {size: within[size] for size in sizes}
    named, least = _named(race, within), 1 - task.confidence
    # The curve may lie above what a size has shown: this is not certified.
    best = max(race.mean(size) for size in sizes)
    shown = [size for size in sizes if race.mean(size) >= best - task.tolerance]
    certified = [size for size in shown if within[size] >= task.confidence]
    obstacle = race.obstacle()
    fastest = min(race.seconds[size] for size in sizes)
    open_ = [size for size in sizes if least < within[size] < task.confidence]
    return Judgement(
        pairs=tuple(pairs.values()),
        leader=pairs[named if belief is None else belief.best_first(sizes)[0]],
        certified=tuple(pairs[size] for size in certified),
        worse=tuple(pairs[size] for size in sizes if within[size] <= least),
        named=pairs[named],
        certain=not obstacle and named in certified and _is_settled(race, within, named),
        obstacle=obstacle,
        rounds={pair: len(race.numbers(size)) for size, pair in pairs.items()},
        gaps={},  # Those of the curve differ from those of the values shown.
        costs={pair: race.seconds[size] / fastest for size, pair in pairs.items() if fastest},
        pinned=race.pinned,
        left_out=tuple((size, 1.0) for size in task.batch_sizes if size not in sizes),
        open=tuple(pairs[size] for size in open_),
    )


def expected_trainings(task: RaceTask) -> float:
    """Return after how many complete trainings a race is expected to end."""
    sizes = len(task.batch_sizes)
    most = min(task.max_trainings, MOST_NEEDED * sizes)
    return (min(most, LEAST_NEEDED * sizes) + most) / 2


def least_values(task: RaceTask, runs: Sequence[Run], seed: int) -> tuple[float, ...]:
    """Return the values that a complete run must have reached by the end of each epoch.

    A run that has not reached its value trails the run of the named pair with this seed by more
    than any complete run made up for later: it is stopped. The first third of the epochs decides
    nothing, because large batches learn slowly at first. Values are such that larger is better. If
    no run is to be stopped, the result is empty.
    """
    judgement, sign = judge_race(task, runs), 1.0 if task.larger_is_better else -1.0
    whole = [run for run in runs if run.epochs is None and len(run.curve) == task.epochs]
    curves = {(run.pair, run.seed): [sign * value for value in run.curve] for run in whole}
    named = curves.pop((judgement.named, seed), None) if judgement else None
    if named is None or len(curves) < LEAST_FINISHED:
        return ()
    best = np.maximum.accumulate([named, *curves.values()], axis=1)
    behind = best[0] - best[1:]
    made_up = np.maximum(0.0, (behind - behind[:, -1:]).max(0))
    least = best[0] - made_up - STOPPED_MARGIN * task.tolerance
    least[: -(-task.epochs // 3) - 1] = -math.inf
    return tuple(least[:-1].tolist())


def short_epochs(task: RaceTask) -> int:
    """Return the epochs of a short run, or of a complete one if none can be short."""
    short = max(LEAST_SHORT, round(SHORT_SHARE * task.epochs))
    return short if task.short_runs and short < task.epochs else task.epochs


def _short_run(race: "_Race") -> RaceStep | None:
    """Return the next try of a learning rate at the base size, None if the best is known.

    Rates a factor of four apart are tried until the best lies between two worse ones, then its
    neighbours at a factor of two.
    """
    if not race.task.search_rate:
        return None
    best = max(race.tried, key=lambda octave: race.tried[octave], default=0)
    wanted = [*FIRST_OCTAVES]
    if race.tried:
        wanted += [best - 2, best + 2, best - 1, best + 1]
        if race.tried[best] == -math.inf:  # All diverged.
            wanted = [min(race.tried) - 2, -MOST_OCTAVES]
    wanted = [k for k in wanted if race.may(race.base, k) and k not in race.tried]
    for octave in wanted:
        run = race.run(race.base, octave, 0, race.short)
        if run not in race.pending:
            return None if race.lacks(run, race.essential()) else RaceStep(run)
    if any(
        (run.batch_size, run.number, run.epochs) == (race.base, 0, race.short)
        and _octave(run) not in race.tried
        for run in race.pending
    ):
        return RaceStep()
    return RaceStep(None, "diverged") if race.tried.get(best) == -math.inf else None


def _check(race: "_Race") -> RaceStep | None:
    """Return the next complete run that checks the rate at the base size, None if it is checked.

    Large rates look better after short runs than after complete ones, most of all on noisy data.
    So the next smaller rate is trained too, then smaller ones as long as they are better. If none
    is better, the next larger rate is trained, unless it was clearly worse after a short run.
    """
    guess, known = race.guess, race.at_base
    wanted = [guess]
    if race.task.search_rate and race.short < race.task.epochs:
        wanted.append(guess - 1)
        best = race.best_at_base() if known else guess
        gap = race.tried.get(guess, -math.inf) - race.tried.get(guess + 1, -math.inf)
        if best == guess and gap < CLEAR * race.error:
            wanted.append(guess + 1)
        if best != guess:
            wanted.append(best + (1 if best > guess else -1))
    for octave in wanted:
        run = race.run(race.base, octave, 0, race.task.epochs)
        if octave not in known and run not in race.pending and race.may(race.base, octave):
            return None if race.lacks(run, race.essential() if known else ()) else RaceStep(run)
    return None


def _comparison(race: "_Race") -> RaceStep:
    """Return the complete run that tells most about the answer, or why the race has ended."""
    belief = _believe(race)
    every = [race.next_of(size) for size in race.sizes if size not in race.stopped]
    options = [run for run in every if not race.lacks(run)]
    ended = "settled" if not every else None if options else race.lacks(every[0])
    if belief is not None and options:
        within = belief.within()
        named = _named(race, within)
        if len(race.sizes) == 1:
            ended = "alone"
        elif not race.essential() and named in race.compared():
            ended = "settled" if _is_settled(race, within, named) else None
    if ended is not None:
        return RaceStep(None, None if race.pending else ended)
    first = [run for run in race.essential() if run in options]
    if belief is None or first:
        return RaceStep((first or options)[0])
    first = [run for run in options if run.batch_size == named and not run.number]
    worth = belief.information()
    return RaceStep(max(first or options, key=lambda run: worth[run.batch_size] / race.price(run)))


def _named(race: "_Race", within: Mapping[int, float]) -> int:
    """Return the fastest size that is probably within the tolerance, else the likeliest one."""
    likely = [size for size in within if within[size] >= ENOUGH]
    if not likely:
        return max(within, key=lambda size: within[size])
    least = min(race.seconds[size] for size in likely)
    return min(size for size in likely if race.seconds[size] <= AS_FAST * least)


def _is_settled(race: "_Race", within: Mapping[int, float], named: int) -> bool:
    """Return whether the named size is within the tolerance and no faster one is."""
    faster = [size for size in within if AS_FAST * race.seconds[size] < race.seconds[named]]
    sure = race.task.confidence
    return within[named] >= sure and all(within[size] <= 1 - sure for size in faster)


class _Race:
    """What follows from the runs alone: the sizes and rates to train, values, and costs."""

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
                # A network that is dead at the end has no value.
                ended="diverged" if (run.value, run.ended) == (None, "completed") else run.ended,
                curve=tuple(sign * value for value in run.curve),
            )
            for run in runs
        ]
        self.short = short_epochs(task)
        self.pinned: Pinned | None = pinned_parts(self.runs)
        self.sizes = [size for size in task.batch_sizes if self._trains(size)]
        nearest = sorted(self.sizes, key=lambda size: abs(math.log(size / task.base_batch_size)))
        self.base = nearest[0] if nearest else task.base_batch_size
        self.error = self._standard_error()
        first_at_base = [r for r in self.runs if r.batch_size == self.base and not r.seed]
        #: Values at the base size by the octave of the rate: after a short run of the first seed,
        #: and the mean of the complete runs, so that the luck of one seed does not choose the rate.
        self.tried = {_octave(r): self._short_value(r) for r in first_at_base}
        whole: dict[int, list[float]] = {}
        for run in self.runs:
            if run.batch_size == self.base and (run.epochs is None or run.ended == "stopped_early"):
                complete = run.value is not None and run.epochs is None
                whole.setdefault(_octave(run), []).extend([run.value or 0.0] if complete else [])
        self.at_base = {k: float(np.mean(v)) if v else -math.inf for k, v in whole.items()}
        self.guess = self._vertex()
        self._rate = self.guess
        if self.at_base and self.short < task.epochs:
            self._rate = self.best_at_base()
        self.sizes = [size for size in self.sizes if self.may(size, self.octave(size))]
        self.seconds = _seconds(task, self.runs)
        #: Sizes that fell behind at their rate: they are neither run again nor named.
        self.stopped = {r.batch_size for r in self.observed() if r.ended == "stopped_early"}

    def best_at_base(self) -> int:
        return max(self.at_base, key=lambda octave: self.at_base[octave])

    def _trains(self, size: int) -> bool:
        """Return whether a size may be trained, as far as its runs and smaller sizes show."""
        trained = {run.batch_size for run in self.runs if run.value is not None}
        return not any(
            (run.ended in ("out_of_memory", "failed") and size == run.batch_size)
            or (run.ended == "out_of_memory" and size > run.batch_size and size not in trained)
            for run in self.runs
        )

    def _ceiling(self, size: int) -> int:
        """Return the lowest octave that diverged: no larger rate of the size is tried.

        A rate that diverged below one that did not says nothing about others.
        """
        own = [run for run in self.runs if run.batch_size == size]
        least = max((_octave(r) for r in own if r.value is not None), default=-MOST_OCTAVES)
        diverged = [_octave(r) for r in own if r.ended == "diverged"]
        return min((k for k in diverged if k >= least), default=MOST_OCTAVES + 1)

    def may(self, size: int, octave: int) -> bool:
        return -MOST_OCTAVES <= octave < self._ceiling(size)

    def octave(self, size: int) -> int:
        """Return the octave of a size's rate: that of the base size, or below what diverged."""
        return min(self._rate, self._ceiling(size) - 1)

    def _standard_error(self) -> float:
        """Return the noise of one run that is expected before any is repeated."""
        scored = [run for run in self.runs if run.value is not None]
        best = max(scored, key=lambda run: run.value or 0.0, default=None)
        if best is None or best.outcomes is None:
            return max(UNKNOWN_ERROR * self.task.tolerance, 1e-12)
        outcomes = best.outcomes[~np.isnan(best.outcomes)]
        error = float(np.std(outcomes, ddof=1)) / math.sqrt(len(outcomes))
        return max(SEEDS_PER_SAMPLE * error, LEAST_ERROR * self.task.tolerance, 1e-12)

    def _short_value(self, run: Run) -> float:
        """Return the value of a run after the epochs of a short one."""
        if run.ended == "diverged" or run.value is None:
            return -math.inf
        whole = self.short == self.task.epochs or not run.curve
        return run.value if whole else max(run.curve[: self.short])

    def _vertex(self) -> int:
        """Return the octave at the top of a parabola through the values around the best one."""
        if not self.tried:
            return 0
        best = max(self.tried, key=lambda octave: self.tried[octave])
        near = [octave for octave in self.tried if abs(octave - best) <= 2]
        if len(near) < 3:
            return best
        low = self.tried[best] - CLIPPED_ERRORS * self.error
        values = [max(self.tried[k], low) for k in near]
        bend, slope, _ = np.polyfit(np.array(near) - best, values, 2)
        return best if bend >= 0 else best + int(np.clip(round(-slope / 2 / bend), -1, 1))

    def compared(self) -> list[int]:
        """List the sizes that have a run at their rate, none of which was stopped."""
        return [s for s in self.sizes if self.numbers(s) and s not in self.stopped]

    def numbers(self, size: int) -> list[int]:
        """List the seed numbers of the complete runs of a size at its rate."""
        return [run.seed or 0 for run in self.observed() if run.batch_size == size]

    def mean(self, size: int) -> float:
        """Return the mean of the complete runs of a size at its rate, of short ones without any."""
        own = [r.value for r in self.observed() if r.batch_size == size and r.value is not None]
        return float(np.mean(own)) if own else self.tried.get(self.octave(size), -math.inf)

    def observed(self) -> list[Run]:
        """List the runs that show the quality of their size."""
        return [
            run
            for run in self.runs
            if run.batch_size in self.sizes
            and _octave(run) == self.octave(run.batch_size)
            and (run.ended == "stopped_early" or (run.value is not None and run.epochs is None))
        ]

    def run(self, size: int, octave: int, number: int, epochs: int) -> NextRun:
        return NextRun(size, 2.0**octave, number, epochs)

    def next_of(self, size: int) -> NextRun:
        """Return the next complete run of a size."""
        factor = 2.0 ** self.octave(size)
        ran = [run for run in self.runs if run.pair == (size, factor)]
        used = {run.seed for run in ran if run.epochs is None or run.ended != "completed"}
        used |= {run.number for run in self.pending if run[:2] == (size, factor)}
        number = next(n for n in range(len(used) + 1) if n not in used)
        return self.run(size, self.octave(size), number, self.task.epochs)

    def essential(self) -> list[NextRun]:
        """List the first runs of the comparison that are missing: base, far end, and middle."""
        places = [self.sizes.index(self.base)]
        far = len(self.sizes) - 1 if places[0] < len(self.sizes) - 1 else 0
        places += [far, (far + places[0]) // 2]
        wanted = [self.next_of(self.sizes[place]) for place in dict.fromkeys(places)]
        return [run for run in wanted if run.number == 0]

    def share(self, run: NextRun) -> float:
        """Return the cost of a run in complete trainings, without what a short run has trained."""
        had = [
            one.epochs or 0
            for one in self.runs
            if (*one.pair, one.seed) == run[:3] and one.ended == "completed"
        ]
        return (run.epochs - max(had, default=0)) / self.task.epochs

    def lacks(
        self, run: NextRun, keep: Sequence[NextRun] = ()
    ) -> Literal["trainings", "time"] | None:
        """Return which budget a run does not fit into, with room for the runs to `keep`."""
        shares = [self.share(one) for one in (run, *keep)]
        spent = sum((one.epochs or self.task.epochs) / self.task.epochs for one in self.runs)
        spent += sum(self.share(one) for one in self.pending)
        if not _fits(shares, self.task.max_trainings - spent, spent):
            return "trainings"
        if self.seconds_left is None or not self.runs:
            return None
        seconds = [self.seconds[one.batch_size] for one in (run, *keep)]
        costs = [share * one for share, one in zip(shares, seconds, strict=True)]
        spent = sum(one.seconds or 0.0 for one in self.runs)
        return None if _fits(costs, self.seconds_left, spent) else "time"

    def price(self, run: NextRun) -> float:
        """Return what the information of a run is divided by."""
        return (self.seconds[run.batch_size] * self.share(run)) ** PRICED

    def obstacle(
        self,
    ) -> Literal["alone", "pinned", "no_outcomes", "few_examples", "heavy_tails"] | None:
        """Return why nothing can be certain."""
        if len(self.compared()) < 2:
            return "alone"
        if self.pinned == "both":
            return "pinned"
        if any(run.outcomes is None for run in self.observed()):
            return "no_outcomes"
        given = {"tolerance": self.task.tolerance, "error": 1 - self.task.confidence}
        return hidden_by_examples(self.observed(), **given)


def _fits(costs: Sequence[float], left: float, spent: float) -> bool:
    """Return whether the first of some costs fits into what is left, with room for the others.

    No room is kept for others that would not even fit if nothing had been spent.
    """
    room = sum(costs[1:])
    return costs[0] + (room if sum(costs) <= left + spent else 0.0) <= left * (1 + 1e-9) + 1e-9


class _Belief(NamedTuple):
    """What complete runs of the sizes at their rates say about the quality of each size."""

    sizes: Sequence[int]
    mean: np.ndarray
    covariance: np.ndarray
    noise: float  # Variance of one run.
    draws: np.ndarray  # Of the qualities of all sizes, [draw, size].
    near: np.ndarray  # Whether each is within the tolerance of the best.

    def within(self) -> dict[int, float]:
        """Return the probability of each size to be within the tolerance of the best."""
        return dict(zip(self.sizes, self.near.mean(0).tolist(), strict=True))

    def information(self) -> dict[int, float]:
        """Return how much a run of each size tells about which sizes are within the tolerance.

        For each size, `near` is 0 or 1. The result is, to first order, how much the run is expected
        to lower the sum of the variances of `near`.
        """
        moved = (self.draws - self.draws.mean(0)).T @ (self.near - self.near.mean(0))
        worth = ((moved / len(self.draws)) ** 2).sum(1) / (np.diag(self.covariance) + self.noise)
        return dict(zip(self.sizes, worth.tolist(), strict=True))

    def best_first(self, sizes: Sequence[int]) -> list[int]:
        return sorted(sizes, key=lambda size: -self.mean[self.sizes.index(size)])


def _believe(race: _Race) -> _Belief | None:
    """Condition the curve over sizes on the complete runs. None if there is no complete run yet."""
    runs = race.observed()
    values = [run.value for run in runs if run.epochs is None and run.value is not None]
    if not values:
        return None
    sizes, error = race.sizes, race.error
    low = max(values) - CLIPPED_TOLERANCES * race.task.tolerance - CLIPPED_ERRORS * error
    # A run that was stopped would have become better than it is, but not good enough.
    worse = max(values) - race.task.tolerance - error
    most = [worse if run.ended == "stopped_early" else math.inf for run in runs]
    y = [max(low, min(run.value or low, top)) for run, top in zip(runs, most, strict=True)]
    y = (np.array(y) - max(values)) / error
    at = [sizes.index(run.batch_size) for run in runs]
    numbers = np.array([run.seed for run in runs])
    x = np.log2(sizes) - np.mean(np.log2(sizes))
    octaves = np.subtract.outer(x, x)
    shape = SLOPE**2 * np.outer(x, x) + np.exp(-0.5 * (octaves / LENGTH) ** 2)
    alike = (1 - SHARED) * np.eye(len(y)) + SHARED * np.equal.outer(numbers, numbers)
    parts = []
    for amplitude, noise in itertools.product(AMPLITUDES, NOISES):
        prior = amplitude**2 * shape + LEVEL**2
        lower = np.linalg.cholesky(prior[np.ix_(at, at)] + noise**2 * alike)
        white, cross = np.linalg.solve(lower, y), np.linalg.solve(lower, prior[at])
        log = -0.5 * white @ white - np.log(np.diag(lower)).sum()
        log -= 0.5 * (math.log(noise) / NOISE_SPREAD) ** 2
        parts.append((log, cross.T @ white, prior - cross.T @ cross, noise**2))
    logs, means, covariances, noises = map(np.array, zip(*parts, strict=True))
    shares = np.exp(logs - logs.max())
    shares /= shares.sum()
    mean, noise = shares @ means, float(shares @ noises)
    apart = means - mean
    covariance = np.tensordot(shares, covariances, 1) + (shares[:, None] * apart).T @ apart
    for run in race.pending:  # Its value is taken to be the expected one, so the mean stays.
        if run.batch_size in sizes and run.epochs == race.task.epochs:
            place = sizes.index(run.batch_size)
            column = covariance[:, place]
            covariance = covariance - np.outer(column, column) / (column[place] + noise)
    variances, axes = np.linalg.eigh(covariance)
    draws = mean + (_normals(len(sizes)) * np.sqrt(np.maximum(variances, 0.0))) @ axes.T
    draws, mean, covariance = draws * error, mean * error, covariance * error**2
    near = draws >= draws.max(1, keepdims=True) - race.task.tolerance
    return _Belief(sizes, mean, covariance, noise * error**2, draws, near)


@functools.cache
def _normals(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((DRAWS, count))


def _seconds(task: RaceTask, runs: Sequence[Run]) -> dict[int, float]:
    """Return the seconds of a complete training of each size: as planned, corrected by the runs.

    The logarithm of measured over planned seconds is the sum of the plan's error for the size, the
    change of the machine's speed, which is similar for runs that follow each other, and noise.
    """
    if not all(task.seconds.get(size) for size in task.batch_sizes):
        measured = training_seconds_of([r for r in runs if r.epochs is None], task.batch_sizes)
        return {size: seconds or 1 / size for size, seconds in measured.items()}
    logs, sizes = [], []
    for run in runs:
        if run.seconds and run.ended == "completed":
            planned = task.seconds[run.batch_size] * (run.epochs or task.epochs) / task.epochs
            logs.append(math.log(run.seconds / planned))
            sizes.append(run.batch_size)
    places = np.arange(len(logs))
    drift = DRIFT**2 * np.exp(-np.abs(np.subtract.outer(places, places)) / DRIFT_RUNS)
    same, fits = np.equal.outer(sizes, sizes), []
    for deviation in PLAN_ERRORS if logs else ():
        covariance = drift + deviation**2 * same + TIME_NOISE**2 * np.eye(len(logs))
        weights = np.linalg.solve(covariance, logs)
        likelihood = -float(logs @ weights + np.linalg.slogdet(covariance)[1]) / 2
        fits.append((likelihood - math.log(SURER) * bool(fits), deviation**2, weights))
    _, variance, weights = max(fits, key=lambda fit: fit[0], default=(0.0, 0.0, np.zeros(0)))
    slower = max(0.0, float(drift[-1] @ weights)) if logs else 0.0
    errors = {size: variance * float(np.equal(sizes, size) @ weights) for size in set(sizes)}
    return {
        size: task.seconds[size] * math.exp(slower + errors.get(size, 0.0))
        for size in task.batch_sizes
    }


def _octave(run: Run | NextRun) -> int:
    return round(math.log2(run.factor))
