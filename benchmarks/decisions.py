"""How often is a race between batch sizes wrong, and what does it cost?

python benchmarks/decisions.py [--draws 1000] [--tolerance 0.01] [--validation 360 1500]
    [--rows mlp cnn text tied ...] [--joint mlp cnn text]    twenty minutes; in pieces by row

Each draw is a search. Seeds and validation examples are drawn from the population of a row, the
race asks for executions until it ends, and its answer is compared with the truth.

`mlp`, `cnn` and `text` are the trainings in decision_tables.jsonl (see decision_tables.py). The
population is their 40 seeds and 1,500 validation examples, both drawn with replacement, and the
truth is the mean over all of them: then every error is the race's, what the validation set leaves
open included. The mean on the test examples has a sampling error of its own, 0.2 to 0.4 % for a
difference of two sizes; `test` judges the same answers by it. Drawn without replacement, ten of
40 seeds would know more of the truth than ten of all there are.

The other rows are synthetic. An example's difficulty, what a size makes of it, a seed and chance
add up to a latent score, whose sign is the outcome; the accuracies are known by integration.
`tied` and, with more noise, `tied, noisy`: no size differs. `inside`, `outside`: the three fastest
sizes are 0.8 and 1.25 tolerances worse. `edge`: all but the slowest size are 1.05 tolerances worse.
`one best`: one size is better than all others by four tolerances. `heavy tails`: no size differs,
the seeds have Student's t with 2.5 degrees of freedom.

wrong       named as certified and more than the tolerance below the best, with its standard error
missed      called certain though a faster size is within the tolerance
certain     named as certified, with every faster size out; certified: named as certified
executions  of all sizes together: median and 90 % quantile
time        training time of the named size, whether certain or not, over that of the size with the
            best mean of one, three and five executions; mean over the draws
best of 5   share of draws in which the best mean of five is more than the tolerance below the best

The joint search asks for pairs of batch size and learning rate until it ends, at most 36 times.
`grid` and `grid 3` take the best mean of all 30 pairs with one and with three executions. Each draw
shuffles the eight seeds of each pair. The truth is the mean accuracy on the test examples. The
interval of the difference in loss is over the draws: eight seeds and one validation set are behind
all of them.
"""

import argparse
import base64
import collections
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

import kbatch.analysis.race
from kbatch.analysis.joint_search import PairRun, next_pair
from kbatch.analysis.paired_runs import Candidate, judge
from kbatch.analysis.race import LOOKS, RaceState, first_executions, race

TABLES = Path(__file__).with_name("decision_tables.jsonl")
SIZES = (16, 32, 64, 128, 256, 512)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # Of the rate by the rule.
MOST_TRIALS = 36
MOST_ROUNDS, MOST_BLOCKS, EXAMPLES = 40, 512, 1500
# Seconds of an update and of an example, of the machine in recommend_decisions.py.
COSTS = {"mlp": (1.8e-3, 0.9e-6), "cnn": (3.0e-3, 22e-6), "text": (18e-3, 75e-6)}


class Row(NamedTuple):
    """What a search is drawn from.

    Attributes:
        truth: Accuracy of each size.
        tested: Accuracy of each size on the separate test examples.
        seconds: Training time of each size.
        draw: Makes the outcomes `[size, round, example]` of one search.
    """

    truth: np.ndarray
    tested: np.ndarray | None
    seconds: np.ndarray
    draw: Callable[[np.random.Generator, int], np.ndarray]


def stored_runs(table: str) -> list[dict]:
    """Read the trainings of a table."""
    runs = [json.loads(line) for line in TABLES.read_text().splitlines()]
    return [run for run in runs if run["table"] == table]


def stored_rows() -> dict[str, Row]:
    """Read the trainings of each task."""
    runs = collections.defaultdict(dict)
    for run in stored_runs("race"):
        packed = zlib.decompress(base64.b85decode(run["wrong"]))
        hits = ~np.unpackbits(np.frombuffer(packed, np.uint8), count=EXAMPLES).astype(bool)
        runs[run["task"]][run["seed"], run["size"]] = hits, run["test"]
    return {name: stored_row(name, found) for name, found in runs.items()}


def stored_row(name: str, runs: dict) -> Row:
    """Make the population of a task from its trainings."""
    seeds = [s for s in range(MOST_ROUNDS) if all((s, size) in runs for size in SIZES)]
    hits = np.array([[runs[seed, size][0] for seed in seeds] for size in SIZES])
    tested = np.array([[runs[seed, size][1] for seed in seeds] for size in SIZES]).mean(1)

    def draw(rng, examples):
        rounds = rng.integers(0, len(seeds), MOST_ROUNDS)
        return hits[:, rounds][:, :, rng.integers(0, EXAMPLES, examples)]

    update_s, example_s = COSTS[name]
    return Row(hits.mean((1, 2)), tested, update_s / np.array(SIZES) + example_s, draw)


def synthetic_rows(tolerance: float) -> dict[str, Row]:
    """Make the rows with known gaps."""
    levels = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    best = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    return {
        "tied": synthetic_row(0 * levels),
        "tied, noisy": synthetic_row(0 * levels, seed_spread=0.06),
        "inside": synthetic_row(0.8 * tolerance * levels),
        "outside": synthetic_row(1.25 * tolerance * levels),
        "edge": synthetic_row(1.05 * tolerance * np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])),
        "one best": synthetic_row(4 * tolerance * best),
        "heavy tails": synthetic_row(0 * levels, tails=2.5),
    }


def synthetic_row(gaps: np.ndarray, *, seed_spread=0.03, tails: float = math.inf) -> Row:
    """Make a row from the gaps to the best size, whose accuracy is 93 %.

    One seed's difference of two sizes has a standard deviation of 0.7 %, as in `cnn`; 0.5 % in
    `mlp`; 1.1 % in `text` and where `seed_spread` is 0.06.
    """
    accuracy, size_spread, chance = 0.93, 0.05, 0.2
    spread = math.sqrt(1 + size_spread**2 + chance**2)
    uniform = (np.arange(20_000) + 0.5) / 20_000
    seeds = seed_spread * (ndtri(uniform) if tails == math.inf else stdtrit(tails, uniform))
    levels = np.linspace(0.5, 3.0, 2001)
    accuracies = np.array([ndtr((level + seeds) / spread).mean() for level in levels])
    shifts = np.interp(accuracy - gaps, accuracies, levels)

    def draw(rng, examples):
        shape = (len(SIZES), MOST_ROUNDS, 1)
        normal = tails == math.inf
        seed = rng.standard_normal(shape) if normal else rng.standard_t(tails, shape)
        score = rng.standard_normal(examples, dtype=np.float32)
        score = score + size_spread * rng.standard_normal((len(SIZES), 1, examples))
        score = (score + shifts[:, None, None]).astype(np.float32)
        score = score + (seed_spread * seed).astype(np.float32)
        noise = rng.standard_normal((len(SIZES), MOST_ROUNDS, examples), dtype=np.float32)
        return score + np.float32(chance) * noise > 0

    update_s, example_s = COSTS["mlp"]
    return Row(accuracy - gaps, None, update_s / np.array(SIZES) + example_s, draw)


def run_race(candidates: list[Candidate], tolerance: float) -> tuple[RaceState, int]:
    """Run a race on stored executions; return its end and how many executions it took."""
    given, verdicts = [first_executions(candidate, LOOKS[0]) for candidate in candidates], {}

    def remembered(compared, **setting):
        counts = tuple(len(candidate.values) for candidate in compared)
        if counts not in verdicts:
            verdicts[counts] = judge(compared, **setting)
        return verdicts[counts]

    # A race repeats its earlier looks whenever it is asked, which takes most of the time here.
    kbatch.analysis.race.judge = remembered
    while True:
        state = race(given, larger_is_better=True, tolerance=tolerance)
        if state.ended is not None:
            return state, sum(len(candidate.values) for candidate in given)
        look = next(look for look in LOOKS if look > state.rounds)
        for k in state.following:
            given[k] = first_executions(candidates[k], look)


def replay(row: Row, rng: np.random.Generator, *, examples: int, tolerance: float) -> dict:
    """Draw one search and judge its answer by the truth."""
    hits = row.draw(rng, examples)
    length = math.ceil(examples / MOST_BLOCKS)
    whole = hits[:, :, : examples // length * length].astype(np.float32)
    outcomes = sum(whole[:, :, part::length] for part in range(length)) / length
    values = hits.mean(-1)
    parts = zip(values, outcomes, row.seconds, strict=True)
    state, executions = run_race([Candidate(*part, examples) for part in parts], tolerance)
    named, certain = state.verdict.named, state.verdict.certain
    certified = named in state.verdict.certified
    found = {"certain": certain, "certified": certified, "executions": executions}
    enough = row.truth >= row.truth.max() - tolerance
    found["wrong"] = certified and not enough[named]
    found["missed"] = certain and (enough & (row.seconds < row.seconds[named])).any()
    if row.tested is not None:
        found["tested"] = certified and row.tested[named] < row.tested.max() - tolerance
    for count in (1, 3, 5):
        best = int(values[:, :count].mean(1).argmax())
        found[f"time {count}"] = row.seconds[named] / row.seconds[best]
        found[f"off {count}"] = not enough[best]
    return found


def joint_tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read validation accuracies `[size, rate, seed]` and mean test accuracies by task."""
    runs = collections.defaultdict(list)
    for run in stored_runs("joint"):
        key = run["seed"], run["size"], run["rate"]
        runs[run["task"]].append((*key, run["validation"], run["test"]))
    tables = {}
    for name, found in runs.items():
        shape = (-1, len(SIZES), len(FACTORS))
        whole = len(found) // (len(SIZES) * len(FACTORS)) * len(SIZES) * len(FACTORS)
        values = np.array(sorted(found)[:whole])[:, 3:].T.reshape(2, *shape)
        tables[name] = values[0].transpose(1, 2, 0), values[1].mean(0)
    return tables


def replay_joint(table, rng, *, name: str, tolerance: float) -> dict:
    """Draw one joint search, and the whole grid once and three times, on the same trainings."""
    validation, tested = table
    drawn = rng.permuted(validation, axis=-1)
    runs, setting = [], {"larger_is_better": True, "tolerance": tolerance, "most": MOST_TRIALS}
    while (step := next_pair(SIZES, FACTORS, runs, **setting)).pair is not None:
        at = SIZES.index(step.pair[0]), FACTORS.index(step.pair[1])
        made = sum((run.batch_size, run.factor) == step.pair for run in runs)
        runs.append(PairRun(*step.pair, float(drawn[*at, made])))
    update_s, example_s = COSTS[name]
    seconds = [update_s / run.batch_size + example_s for run in runs]
    whole_s = len(FACTORS) * sum(update_s / size + example_s for size in SIZES)
    named = SIZES.index(step.best[0]), FACTORS.index(step.best[1])
    answers = {"joint": named}
    for count in (1, 3):
        means = drawn[..., :count].mean(-1)
        answers[f"grid {count}"] = np.unravel_index(means.argmax(), means.shape)
    found = {answer: tested.max() - tested[pair] for answer, pair in answers.items()}
    return found | {"trials": len(runs), "cost": sum(seconds) / (3 * whole_s)}


def print_joint(tasks: list[str], draws: int, tolerance: float) -> None:
    """Print a row for each task."""
    print(f"joint search of {len(SIZES)} sizes x {len(FACTORS)} rates, tolerance {tolerance:.2%}")
    print(
        f"{'':<6}{'within: joint':>14}{'grid':>7}{'grid 3':>8}{'trials':>8}{'loss: joint':>13}"
        f"{'grid 3':>8}{'difference, 95 %':>20}{'cost / grid 3':>15}"
    )
    tables = joint_tables()
    for name, table in ((name, tables[name]) for name in tasks):
        rng = np.random.default_rng((8, *name.encode()))
        found = [replay_joint(table, rng, name=name, tolerance=tolerance) for _ in range(draws)]
        columns = {key: np.array([draw[key] for draw in found]) for key in found[0]}
        within = [np.mean(columns[key] <= tolerance) for key in ("joint", "grid 1", "grid 3")]
        apart = columns["joint"] - columns["grid 3"]
        half = 1.96 * apart.std(ddof=1) / math.sqrt(draws)
        print(
            f"{name:<6}{within[0]:14.1%}{within[1]:7.1%}{within[2]:8.1%}"
            f"{np.median(columns['trials']):5.0f}{columns['trials'].max():3.0f}"
            f"{columns['joint'].mean():13.2%}{columns['grid 3'].mean():8.2%}"
            f"{apart.mean() - half:11.2%} to {apart.mean() + half:5.2%}"
            f"{columns['cost'].mean():15.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--validation", type=int, nargs="*", default=[360, 1500])
    parser.add_argument("--rows", nargs="+", help="of the race, all by default")
    parser.add_argument("--joint", nargs="*", default=list(COSTS), help="tasks of the joint search")
    options = parser.parse_args()
    rows = stored_rows() | synthetic_rows(options.tolerance)
    for examples in options.validation:
        print(f"{examples} validation examples, tolerance {options.tolerance:.2%}")
        print(
            f"{'':<12}{'wrong':>12}{'missed':>8}{'certain':>9}{'certified':>11}{'test':>7}"
            f"{'executions':>12}{'time / best of 1':>18}{'3':>6}{'5':>6}{'best of 5':>11}"
        )
        for place, (name, row) in enumerate(rows.items()):
            if name in (options.rows or rows):
                rng = np.random.default_rng((7, examples, place))
                setting = {"examples": examples, "tolerance": options.tolerance}
                found = [replay(row, rng, **setting) for _ in range(options.draws)]
                print(f"{name:<12}{summary(found)}", flush=True)
    if options.joint:
        print_joint(options.joint, options.draws, options.tolerance)


def summary(found: list[dict]) -> str:
    """Write the columns of a row."""
    columns = {key: np.array([draw[key] for draw in found]) for key in found[0]}
    wrong = columns["wrong"].mean()
    error = math.sqrt(wrong * (1 - wrong) / len(found))
    tested = f"{columns['tested'].mean():7.1%}" if "tested" in columns else f"{'':7}"
    middle, most = np.quantile(columns["executions"], [0.5, 0.9])
    times = [columns[f"time {count}"].mean() for count in (1, 3, 5)]
    return (
        f"{wrong:6.1%} ± {error:.1%}{columns['missed'].mean():8.1%}"
        f"{columns['certain'].mean():9.1%}{columns['certified'].mean():11.1%}"
        f"{tested}{middle:8.0f}{most:4.0f}"
        f"{times[0]:18.2f}{times[1]:6.2f}{times[2]:6.2f}{columns['off 5'].mean():11.1%}"
    )


if __name__ == "__main__":
    main()
