"""How good is the size that a search names, and what does the search cost?

python benchmarks/decisions.py [--held-back] [--beside PATH]    2 minutes
python benchmarks/decisions.py --frontier [--held-back]    3 minutes

Replays whole searches on recorded trainings (`tables.py`) with kbatch's own functions. Each search
seed of a table comes first once, followed by the others in random order. Your learning rate is 1/8
to 8 times the task's own. Factors outside the table count as its outermost factor. The true answer
is the fastest size whose best rate is within the tolerance of the best pair, by the mean test
metric of seeds that no search sees. If several sizes are within 5 % of its time, it is the
smallest.

race        `next_run` and `judge_race`; runs that fall behind stop as in a live search
known rate  a race that knows the best rate of every size: the limit for a better search of rates
grid        three runs of each size at your rate, and `judge`
always 32   complete runs at batch size 32 for the rate alone: a plan that needs no kbatch
before      the race of another checkout of this repository, `--beside PATH`

time        training time of the named size over the true answer: geometric mean, 90th percentile
beyond      share of searches that name a pair more than the tolerance worse than the best one
lost        quality of the named pair below the best one, in points, or % of the best loss
trainings   complete trainings; a run of e of E epochs counts e / E
seconds     training time of the search over one complete training of each size
certain     share of searches that are certain
wrong       share of certain searches that name a pair beyond the tolerance of the best pair of the
            table; in brackets, of the best pair that was compared
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# On a busy machine a second thread takes several times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from quick import parse_arguments
from tables import BASE_SIZE, FACTORS, SIZES, Table, read_table, read_tables

from kbatch.analysis.judge import AS_FAST, judge
from kbatch.analysis.run_table import Run

OFF = (-3, -2, -1, 0, 1, 2, 3)  # Octaves between the user's rate and the task's own.
BUDGETS = (4, 6, 8, 12, 20)  # Complete trainings of the frontier.
FIRST_TABLES = ("mlp", "cnn", "text")  # The target of their time is 1.5, of the others 2.
CONFIDENCE = 0.95
Place = tuple[int, int]  # Of size and factor in a table.


class Outcome(NamedTuple):
    """The named pair of a search, and the cost of the search."""

    place: Place
    trainings: float
    seconds: float
    certain: bool
    compared: list[Place]


def place_of(pair: tuple[int, float], off: int) -> Place:
    """Return the place of a user's pair in the table."""
    octave = round(math.log2(pair[1])) + off - round(math.log2(FACTORS[0]))
    return SIZES.index(pair[0]), min(max(octave, 0), len(FACTORS) - 1)


class Search(NamedTuple):
    """One search to replay: its table and tolerance, the user's rate, and the order of seeds."""

    table: Table
    tolerance: float
    off: int
    seeds: Sequence[int]
    rates: Sequence[int] | None = None  # The place of the best rate of each size, if it is known.

    def place(self, pair: tuple[int, float]) -> Place:
        size, rate = place_of(pair, self.off)
        return (size, rate) if self.rates is None else (size, self.rates[size])

    def run(self, size: int, factor: float, number: int, epochs: int | None = None) -> Run:
        """Return a recorded run, or its first epochs."""
        table, place = self.table, self.place((size, factor))
        seed = self.seeds[number % len(self.seeds)]
        curve = table.curve[*place, seed, : epochs or table.epochs]
        ordered = np.sort(curve)[::-1] if table.larger_is_better else np.sort(curve)
        value = float(ordered[: max(2, round(len(curve) / 5))].mean())
        seconds = float(table.seconds[place[0]]) * len(curve) / table.epochs
        if not math.isfinite(value):
            return Run(size, factor, number, None, seconds, "diverged")
        outcomes = None if table.outcomes is None else table.outcomes[*place, seed]
        facts: dict[str, Any] = {"outcomes": outcomes, "examples": table.examples}
        facts["epochs"] = None if len(curve) == table.epochs else len(curve)
        facts["curve"] = tuple(curve.tolist())
        known = {name: fact for name, fact in facts.items() if name in Run._fields}
        return Run(size, factor, number, value, seconds, **known)

    def outcome(self, runs: Sequence[Run], judgement: Any) -> Outcome:
        epochs = self.table.epochs
        return Outcome(
            self.place(judgement.named),
            sum((getattr(run, "epochs", None) or epochs) / epochs for run in runs),
            sum(run.seconds or 0.0 for run in runs),
            bool(judgement.certain),
            [self.place(pair) for pair in judgement.pairs],
        )


def race(search: Search, budget: float | None = None, sizes: Sequence[int] = SIZES) -> Outcome:
    """Replay a race; of one size it looks for the rate by complete runs."""
    from kbatch.analysis.race import RaceTask, judge_race, next_run

    table, runs = search.table, []
    task = RaceTask(
        batch_sizes=tuple(sizes),
        base_batch_size=BASE_SIZE,
        epochs=table.epochs,
        larger_is_better=table.larger_is_better,
        tolerance=search.tolerance,
        confidence=CONFIDENCE,
        max_trainings=budget or 2.0 * len(SIZES),
        seconds=dict(zip(SIZES, table.seconds.tolist(), strict=True)),
        search_rate=search.rates is None,
        short_runs=table.short_runs and len(sizes) > 1,
    )
    while not isinstance(step := next_run(task, runs), str):
        run = stopped_early(search.run(*step), task, runs)
        runs = [known for known in runs if (known.pair, known.seed) != (run.pair, run.seed)]
        runs.append(run)
    judgement = judge_race(task, runs)
    if judgement is None:  # Every rate diverged.
        return search.outcome(runs, judge([Run(BASE_SIZE, 1.0, 0, 0.0)], **goal(search)))
    return search.outcome(runs, judgement)


def stopped_early(run: Run, task: Any, runs: Sequence[Run]) -> Run:
    """Return a complete run as a live search would have stopped it, if it fell behind."""
    from kbatch.analysis.race import least_values

    if run.epochs or run.value is None or run.seed is None:
        return run
    sign = 1 if task.larger_is_better else -1
    for epochs, least in enumerate(least_values(task, runs, run.seed), 1):
        if max(sign * value for value in run.curve[:epochs]) < least:
            seconds = (run.seconds or 0.0) * epochs / task.epochs
            short = {"epochs": epochs, "curve": run.curve[:epochs], "seconds": seconds}
            return run._replace(ended="stopped_early", **short)
    return run


def grid(search: Search) -> Outcome:
    runs = [search.run(size, 1.0, number) for size in SIZES for number in range(3)]
    return search.outcome(runs, judge(runs, **goal(search)))


def goal(search: Search) -> dict[str, Any]:
    better = search.table.larger_is_better
    return {"larger_is_better": better, "tolerance": search.tolerance, "confidence": CONFIDENCE}


def searches(table: Table, tolerance: float, *, known: bool = False) -> Iterator[Search]:
    """Draw the searches of a table; `known` if they know the best rates."""
    sign = 1 if table.larger_is_better else -1
    best = (sign * table.truth).argmax(1).tolist()
    count = table.curve.shape[2]
    for first in range(count):
        rng = np.random.default_rng((9, first, *table.name.encode()))
        seeds = [first, *(seed for seed in rng.permutation(count).tolist() if seed != first)]
        for off in (0,) if known else OFF:
            yield Search(table, tolerance, off, seeds, best if known else None)


@functools.cache
def true_qualities(name: str) -> tuple[np.ndarray, float]:
    """Return the quality of each size at its best rate, and of the best pair.

    The best of many means is better than it truly is. So a pair is chosen by all seeds but one and
    valued by that one, for each seed in turn.
    """
    table = read_table(name)
    tested = table.tested if table.larger_is_better else -table.tested
    seeds = range(tested.shape[2])
    by_others = [np.delete(tested, seed, 2).mean(2) for seed in seeds]
    sizes = [
        [tested[size, means[size].argmax(), seed] for size in range(len(SIZES))]
        for seed, means in zip(seeds, by_others, strict=True)
    ]
    best = [
        tested[:, :, seed].flat[means.argmax()]
        for seed, means in zip(seeds, by_others, strict=True)
    ]
    return np.mean(sizes, 0), float(np.mean(best))


def answer(table: Table, tolerance: float) -> int:
    """Return the place of the size that is the true answer."""
    sizes, best = true_qualities(table.name)
    near = np.flatnonzero(sizes >= min(best, sizes.max()) - tolerance)
    fast = [size for size in near if table.seconds[size] <= AS_FAST * table.seconds[near].min()]
    return int(min(fast))


class Score(NamedTuple):
    """The scores of searches, one row each."""

    slowdown: np.ndarray  # Log of the time over the true answer's.
    beyond: np.ndarray
    lost: np.ndarray
    trainings: np.ndarray
    loops: np.ndarray  # Seconds over one training of each size.
    certain: np.ndarray
    beyond_compared: np.ndarray

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], table: Table, tolerance: float) -> "Score":
        quality = table.truth if table.larger_is_better else -table.truth
        best = true_qualities(table.name)[1]
        fastest = table.seconds[answer(table, tolerance)]
        unit = 1.0 if table.larger_is_better else abs(best)
        gap = np.array([best - quality[one.place] for one in outcomes])
        among = [max(quality[p] for p in [*one.compared, one.place]) for one in outcomes]
        gap_compared = np.array(among) - (best - gap)
        return cls(
            np.log([table.seconds[one.place[0]] / fastest for one in outcomes]),
            gap > tolerance + 1e-12,
            100 * np.minimum(gap / unit, 1.0),
            np.array([one.trainings for one in outcomes]),
            np.array([one.seconds for one in outcomes]) / table.seconds.sum(),
            np.array([one.certain for one in outcomes]),
            gap_compared > tolerance + 1e-12,
        )

    def text(self) -> str:
        wrong, wrong_compared = (
            one[self.certain].mean() if self.certain.any() else 0.0
            for one in (self.beyond, self.beyond_compared)
        )
        return (
            f"{math.exp(self.slowdown.mean()):6.2f}{math.exp(np.quantile(self.slowdown, 0.9)):6.1f}"
            f"{self.beyond.mean():8.1%}{self.lost.mean():7.2f}{self.trainings.mean():11.1f}"
            f"{self.loops.mean():9.2f}{self.certain.mean():9.0%}{wrong:8.1%} ({wrong_compared:.1%})"
        )


def joined(scores: Sequence[Score]) -> Score:
    """Join the scores of rows, each row with the same weight."""
    most = max(len(one.slowdown) for one in scores)
    places = [np.arange(most) * len(one.slowdown) // most for one in scores]
    columns = zip(
        *([c[at] for c in one] for one, at in zip(scores, places, strict=True)), strict=True
    )
    return Score(*(np.concatenate(column) for column in columns))


Plan = Callable[[Search], Outcome]


def print_plans(tables: dict[str, Table], plans: dict[str, Plan], beside: str | None) -> None:
    """Print a row for each plan and table, then the means over tables."""
    rows: dict[str, dict[str, list[Score]]] = {}
    print(
        f"{'':34}{'time':>6}{'90th':>6}{'beyond':>8}{'lost':>7}{'trainings':>11}{'seconds':>9}{'certain':>9}{'wrong':>8}"
    )
    for name, table in tables.items():
        for tolerance in table.tolerances:
            label = f"{name} {100 * tolerance:.2g}"
            outcomes = {
                plan: [play(one) for one in searches(table, tolerance, known=plan == "known rate")]
                for plan, play in plans.items()
            }
            if beside:
                outcomes["before"] = by_checkout(beside, name, tolerance)
            for plan, own in outcomes.items():
                score = Score.of(own, table, tolerance)
                rows.setdefault(plan, {}).setdefault(name, []).append(score)
                print(f"{label:18}{plan:16}{score.text()}", flush=True)
    for plan, own in rows.items():
        groups = {"first three": [n for n in own if n in FIRST_TABLES]}
        groups["others"] = [n for n in own if n not in FIRST_TABLES]
        groups["all"] = list(own)
        for group, names in groups.items():
            if names:
                every = joined([score for name in names for score in own[name]])
                worst = max(score.beyond.mean() for name in names for score in own[name])
                print(f"{group:18}{plan:16}{every.text()}  worst row {worst:.0%} beyond")


def by_checkout(path: str, name: str, tolerance: float) -> list[Outcome]:
    """Replay the race of another checkout, in a process that imports it."""
    command = [sys.executable, __file__, "--rows", name, str(tolerance)]
    environment = {**os.environ, "PYTHONPATH": path}
    text = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    return [
        Outcome(tuple(place), trainings, seconds, certain, [tuple(p) for p in compared])
        for place, trainings, seconds, certain, compared in json.loads(text)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--tables", nargs="+", help="names of tables; default: the development tables"
    )
    parser.add_argument("--held-back", action="store_true", help="use the tables held back")
    parser.add_argument("--frontier", action="store_true", help="races at several budgets")
    parser.add_argument("--beside", help="a checkout whose race is replayed too")
    parser.add_argument("--rows", nargs=2, help=argparse.SUPPRESS)  # For `by_checkout`.
    options = parse_arguments(parser, tables=["mlp"])
    tables = read_tables(held_back=None if options.tables or options.rows else options.held_back)
    if options.rows:
        name, tolerance = options.rows[0], float(options.rows[1])
        found = [race(search) for search in searches(tables[name], tolerance)]
        print(json.dumps(found))
        return
    if options.tables:
        tables = {name: tables[name] for name in options.tables}
    plans: dict[str, Plan] = {"race": race, "known rate": race, "grid": grid}
    plans["always 32"] = functools.partial(race, sizes=(BASE_SIZE,))
    if options.frontier:
        plans = {f"race of {budget}": functools.partial(race, budget=budget) for budget in BUDGETS}
    print_plans(tables, plans, options.beside)


if __name__ == "__main__":
    main()
