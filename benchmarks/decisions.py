"""How good is the answer of a race, and what does it cost?

python benchmarks/decisions.py [--draws 12] [--tolerance 0.01] [--tasks mlp cnn text]    2 minutes
python benchmarks/decisions.py --simulate 1000 [--tolerance 0.01]    8 minutes

Replays whole searches on the trainings that `tables.py` reads, by the classes of the product:
`Race` asks for trainings and judges them. The user's learning rate is 1/8 to 8 times the task's
own; the race does not know. A draw shuffles the seeds that searches are drawn from. Factors beyond
the table count as its outermost ones.

loss        test accuracy of the pair that is named below that of the best pair of the table, in
            points, by the mean of other seeds; with a 95 % interval over these seeds
            (bootstrap). Of a pair that is named within a tolerance some of it is meant.
grid        the same of a grid with three executions of each size at the user's rate
all seeds   the same of the best mean of all these seeds on the validation examples: what no search
            with these examples can beat by more than luck
trainings   median and most of a search
certified   share of searches in which a size is certified; certain: and each that would be
            preferred to it is worse
wrong       share of the certified that lie more than the tolerance below the best pair
time        training time of the named size over that of the base size, geometric mean

`--simulate` draws searches from what is fitted to the tables instead: the mean of each size and
rate, which is the truth; deviations of seeds, one that all pairs share and one of each pair; and
the validation blocks, drawn with replacement for all pairs alike, with what trainings differ by.

loss        of the named pair below the best of the table, in points
wrong       of the certified: more than the tolerance below the best of the table; of the certain:
            more than the tolerance below a pair that was compared
"""

import argparse
import math
import os
from typing import NamedTuple

# On a busy machine a second thread takes several times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from scipy.stats import beta
from tables import BASE_SIZE, FACTORS, SIZES, VALIDATION, read_table

from kbatch.analysis.judge import Judgement, judge
from kbatch.analysis.rounds import Race
from kbatch.analysis.run_table import Run

TASKS = ("mlp", "cnn", "text")
OFF = (-3, -2, -1, 0, 1, 2, 3)  # Octaves between the user's rate and the task's own.
GOAL = {"larger_is_better": True, "confidence": 0.95}
MOST_ROUNDS = 36  # Of a search.


class Table(NamedTuple):
    """The trainings of a task.

    Attributes:
        outcomes: Accuracy on each block of validation examples, [size, factor, seed, block].
        tested: Accuracy on the test examples of the seeds that tell the truth, [seed, size,
            factor].
        seconds: Training time of an example at each size.
    """

    outcomes: np.ndarray
    tested: np.ndarray
    seconds: np.ndarray


class Named(NamedTuple):
    """What a search named, and what it took."""

    place: tuple[int, int]  # Of size and factor in the table.
    trainings: int
    certified: bool
    certain: bool
    compared: list[tuple[int, int]]


def stored_tables() -> dict[str, Table]:
    """Read the trainings of each task."""
    tables = {name: read_table(name) for name in TASKS}
    return {
        name: Table(table.outcomes, table.tested.transpose(2, 0, 1), table.seconds)
        for name, table in tables.items()
    }


def place_of(pair: tuple[int, float], off: int) -> tuple[int, int]:
    """Return where a pair of the user's stands in the table."""
    octave = round(math.log2(pair[1])) + off - round(math.log2(FACTORS[0]))
    return SIZES.index(pair[0]), min(max(octave, 0), len(FACTORS) - 1)


def train(table: Table, pair: tuple[int, float], number: int, *, off: int, seeds) -> Run:
    size, factor = place_of(pair, off)
    blocks = table.outcomes[size, factor, seeds[number % len(seeds)]]
    seconds = float(table.seconds[size])
    return Run(*pair, number, float(blocks.mean()), seconds, outcomes=blocks, examples=VALIDATION)


def replay_race(table: Table, *, off: int, seeds, tolerance: float) -> Named:
    runs, goal = [], GOAL | {"base_batch_size": BASE_SIZE, "max_executions": 6 * len(SIZES)}
    while (step := Race(runs, SIZES, tolerance=tolerance, **goal).step()).run is not None:
        size, factor, number = step.run
        runs.append(train(table, (size, factor), number, off=off, seeds=seeds))
    return named_by(step.judgement, len(runs), off)


def replay_grid(table: Table, *, off: int, seeds, tolerance: float) -> Named:
    pairs = [((size, 1.0), number) for size in SIZES for number in range(3)]
    runs = [train(table, pair, number, off=off, seeds=seeds) for pair, number in pairs]
    return named_by(judge(runs, tolerance=tolerance, **GOAL), len(runs), off)


def named_by(found: Judgement, trainings: int, off: int) -> Named:
    certified = found.obstacle is None and found.named in found.certified
    compared = [place_of(pair, off) for pair in found.pairs]
    return Named(place_of(found.named, off), trainings, certified, found.certain, compared)


def losses(tested: np.ndarray, places: list[tuple[int, int]]) -> float:
    """Return the mean loss of pairs against the best one, in points."""
    means = tested.mean(0)
    return 100 * float(np.mean([means.max() - means[place] for place in places]))


def interval(tested: np.ndarray, of) -> tuple[float, float]:
    """Bootstrap over the seeds that tell the truth."""
    rng = np.random.default_rng(0)
    drawn = (tested[rng.integers(0, len(tested), len(tested))] for _ in range(1000))
    low, high = np.quantile([of(one) for one in drawn], [0.025, 0.975])
    return low, high


def print_task(name: str, table: Table, *, draws: int, tolerance: float) -> None:
    """Print the row of a task, and the mean loss from each of the user's rates."""
    races: dict[int, list[Named]] = {off: [] for off in OFF}
    grids: dict[int, list[Named]] = {off: [] for off in OFF}
    for off in OFF:
        for draw in range(draws):
            rng = np.random.default_rng((8, draw, *name.encode()))
            given = {"off": off, "seeds": rng.permutation(table.outcomes.shape[2])}
            races[off].append(replay_race(table, **given, tolerance=tolerance))
            grids[off].append(replay_grid(table, **given, tolerance=tolerance))
    found = [one for own in races.values() for one in own]
    places = [one.place for one in found]
    by_grid = [one.place for own in grids.values() for one in own]
    tested, means = table.tested, table.tested.mean(0)
    low, high = interval(tested, lambda drawn: losses(drawn, places))
    apart = interval(tested, lambda drawn: losses(drawn, places) - losses(drawn, by_grid))
    whole = np.unravel_index(table.outcomes.mean((2, 3)).argmax(), means.shape)
    certified = [one for one in found if one.certified]
    wrong = [means.max() - means[one.place] > tolerance for one in certified]
    trainings = [one.trainings for one in found]
    base = table.seconds[SIZES.index(BASE_SIZE)]
    time = math.exp(np.mean([math.log(table.seconds[size] / base) for size, _ in places]))
    print(
        f"{name:<6}{losses(tested, places):6.2f} ({low:.2f} to {high:.2f})"
        f"{losses(tested, by_grid):7.2f} (by {apart[0]:5.2f} to {apart[1]:5.2f})"
        f"{losses(tested, [whole]):11.2f}{np.median(trainings):10.0f}{max(trainings):4.0f}"
        f"{len(certified) / len(found):11.0%}{np.mean([one.certain for one in found]):9.0%}"
        f"{np.mean(wrong) if wrong else 0:7.0%}{time:6.2f}",
        flush=True,
    )
    for label, own in (("race", races), ("grid", grids)):
        each = [losses(tested, [one.place for one in own[off]]) for off in OFF]
        shown = [f"{2.0**off:g}: {loss:.2f}" for off, loss in zip(OFF, each, strict=True)]
        print(f"       {label}: {'  '.join(shown)}")


def drawn(table: Table, rng: np.random.Generator) -> Table:
    """Draw a table with other seeds and other validation examples; its truth are the means."""
    found = table.outcomes  # [size, factor, seed, block]
    seeds, blocks = found.shape[2:]
    means, of_blocks = found.mean((2, 3)), found.mean(2)
    of_seeds = found.mean(3) - means[..., None]
    shared = of_seeds.mean((0, 1))
    own = np.std(of_seeds - shared, axis=2, ddof=1)
    rest = found - of_blocks[:, :, None] - of_seeds[..., None]
    chance = np.sqrt((rest**2).sum((2, 3)) / ((seeds - 1) * (blocks - 1)))

    values = rng.standard_normal((*means.shape, MOST_ROUNDS, blocks)) * chance[..., None, None]
    values -= values.mean(3, keepdims=True)  # It is in the deviations of seeds.
    values += (own[..., None] * rng.standard_normal((*means.shape, MOST_ROUNDS)))[..., None]
    values += np.std(shared, ddof=1) * rng.standard_normal((MOST_ROUNDS, 1))
    away = (of_blocks - means[..., None]) * math.sqrt(blocks / (blocks - 1))
    values += (means[..., None] + away[..., rng.integers(0, blocks, blocks)])[:, :, None]
    return Table(values, means[None], table.seconds)


def print_simulated(name: str, table: Table, *, searches: int, tolerance: float) -> None:
    """Print how often searches are certified and certain, and how often these are wrong."""
    rng, rounds = np.random.default_rng((33, *name.encode())), range(MOST_ROUNDS)
    found: dict[str, list[Named]] = {"race": [], "grid": []}
    for search in range(searches):
        one = drawn(table, rng)
        given = {"off": OFF[search % len(OFF)], "seeds": rounds, "tolerance": tolerance}
        found["race"].append(replay_race(one, **given))
        found["grid"].append(replay_grid(one, **given))
    means = table.outcomes.mean((2, 3))
    for label, own in found.items():
        certified = [means.max() - means[one.place] > tolerance for one in own if one.certified]
        certain = [
            max(means[place] for place in one.compared) - means[one.place] > tolerance
            for one in own
            if one.certain
        ]
        low, high = beta.ppf(
            [0.025, 0.975],
            [max(1e-9, sum(certified)), sum(certified) + 1],
            [len(certified) - sum(certified) + 1, max(1e-9, len(certified) - sum(certified))],
        )
        print(
            f"{name:6}{label:6}{losses(means[None], [one.place for one in own]):6.2f}"
            f"{np.median([one.trainings for one in own]):10.0f}{len(certified) / len(own):11.1%}"
            f"{np.mean(certified) if certified else 0:9.1%} ({low:.1%} to {high:.1%})"
            f"{len(certain) / len(own):10.1%}{sum(certain):6} of {len(certain)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulate", type=int, default=0, help="searches to draw for each task")
    parser.add_argument("--draws", type=int, default=12, help="of each of the user's rates")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    options = parser.parse_args()
    tables = stored_tables()
    if options.simulate:
        print(f"{options.simulate} searches a task, tolerance {options.tolerance:.2%}")
        print(f"{'':12}{'loss':>6}{'trainings':>10}{'certified':>11}{'wrong':>9}{'certain':>25}")
        for name in options.tasks:
            drawn_by = {"searches": options.simulate, "tolerance": options.tolerance}
            print_simulated(name, tables[name], **drawn_by)
        return
    count = options.draws * len(OFF)
    print(f"{count} searches a task, tolerance {options.tolerance:.2%}; below by the user's rate")
    print(
        f"{'':<6}{'loss (95 %)':>21}{'grid (race less grid)':>27}{'all seeds':>11}"
        f"{'trainings':>14}{'certified':>11}{'certain':>9}{'wrong':>7}{'time':>6}"
    )
    for name in options.tasks:
        print_task(name, tables[name], draws=options.draws, tolerance=options.tolerance)


if __name__ == "__main__":
    main()
