"""How often is a race between batch sizes wrong, and what does it cost?

python benchmarks/decisions.py [--draws 1000] [--tolerance 0.01] [--validation 360 1500]
    [--rows mlp cnn text tied ...] [--joint mlp cnn text] [--checked 50] [--store FILE]

The races of many draws run side by side; of each row the first ones run by kbatch too, one after
the other, and must end in the same way.

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
least       the same of the fastest size that is within the tolerance: no rule does better
best of 5   share of draws in which the best mean of five is more than the tolerance below the best

The joint search asks for pairs of batch size and learning rate until it ends, at most 36 times.
`grid` and `grid 3` take the best mean of all 30 pairs with one and with three executions. Each draw
shuffles the eight seeds of each pair. The truth is the mean accuracy on the test examples. The
interval of the difference in loss is over the draws: eight seeds and one validation set are behind
all of them. What `--store` holds is not searched again.
"""

import argparse
import base64
import collections
import functools
import json
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# On a busy machine a second thread made the joint search of `text` take seven times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from kbatch.analysis.joint_search import PairRun, next_pair
from kbatch.analysis.paired_runs import (
    DEFAULT_CONFIDENCE,
    LOOKS,
    Candidate,
    RaceState,
    first_executions,
    race,
)

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
    levels, accuracies = latent_levels(
        seed_spread, math.sqrt(1 + size_spread**2 + chance**2), tails
    )
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


@functools.cache
def latent_levels(seed_spread: float, spread: float, tails: float) -> tuple[np.ndarray, np.ndarray]:
    """Integrate the accuracies of latent levels over seeds."""
    uniform = (np.arange(20_000) + 0.5) / 20_000
    seeds = seed_spread * (ndtri(uniform) if tails == math.inf else stdtrit(tails, uniform))
    levels = np.linspace(0.5, 3.0, 2001)
    return levels, np.array([ndtr((level + seeds) / spread).mean() for level in levels])


class Draws(NamedTuple):
    """What a race uses of many searches, after each number of rounds in `LOOKS`.

    Attributes:
        means: Accuracies [draw, look, size].
        values: Squared deviations of single executions' differences from their mean, summed,
            [draw, look, size, size].
        single: Squared distances of the block means of single executions, about their means.
        mean: The same of their means over the executions.
        blocks: Blocks of validation examples.
        step: What an example adds to the mean of a block.
    """

    means: np.ndarray
    values: np.ndarray
    single: np.ndarray
    mean: np.ndarray
    blocks: int
    step: float


def summarize(searches: list[np.ndarray]) -> Draws:
    """Summarize the outcomes `[size, round, example]` of searches."""
    looks, examples = np.array(LOOKS), searches[0].shape[-1]
    length = math.ceil(examples / MOST_BLOCKS)
    blocks = examples // length
    found = []
    for hits in searches:
        whole = hits[..., : blocks * length].view(np.uint8)
        # Products of these counts are exact in 32 bits.
        x = sum(whole[..., part::length] for part in range(length)).astype(np.float32)
        values = np.count_nonzero(hits, axis=-1) / examples
        sums = np.cumsum(np.add.reduceat(x, [0, *looks[:-1]], axis=1), axis=1)
        products = np.cumsum(centred_products(x), axis=0)[looks - 1]
        of_values = np.cumsum(np.einsum("ir,jr->rij", values, values), axis=0)[looks - 1]
        means = (np.cumsum(values, axis=1)[:, looks - 1] / looks).T
        of_values -= looks[:, None, None] * means[:, :, None] * means[:, None, :]
        distances = squared_distances(centred_products(sums)) / (looks**2)[:, None, None]
        found.append((means, squared_distances(of_values), squared_distances(products), distances))
    means, values, single, mean = (np.array(part) for part in zip(*found, strict=True))
    return Draws(means, values, single / length**2, mean / length**2, blocks, blocks / examples)


def centred_products(x: np.ndarray) -> np.ndarray:
    """Return the products [round, size, size] of rows `x[size, round]` about their means."""
    rows = x.transpose(1, 0, 2)
    sums = rows.sum(-1, dtype=np.float64)
    products = np.matmul(rows, rows.transpose(0, 2, 1)).astype(np.float64)
    return products - sums[:, :, None] * sums[:, None, :] / x.shape[-1]


def squared_distances(products: np.ndarray) -> np.ndarray:
    """Return the squared distances of rows whose products these are."""
    squares = np.diagonal(products, axis1=1, axis2=2)
    return np.maximum(0.0, squares[:, :, None] + squares[:, None, :] - 2 * products)


class Rule(NamedTuple):
    """What the rule of `kbatch.analysis.paired_runs` finds in each draw."""

    leader: np.ndarray
    certified: np.ndarray  # [draw, size], as `worse`.
    worse: np.ndarray
    named: np.ndarray
    settled: np.ndarray


class Variances(NamedTuple):
    """The parts of the variance of each difference [draw, size, size] after a number of rounds."""

    seeds: np.ndarray  # Of single executions.
    examples: np.ndarray
    counts: np.ndarray  # Executions that both have.
    rows: np.ndarray  # Sizes that the variance by seeds is pooled over.
    rounds: int
    blocks: int

    @classmethod
    def of(cls, draws: Draws, pair: tuple, racing: np.ndarray, rounds: int) -> "Variances":
        """Estimate them for `pair`, the places of each difference in the summaries."""
        blocks, rows = draws.blocks, racing.sum(1)
        counts = np.array(LOOKS)[pair[1]].astype(float)
        level = (1 - DEFAULT_CONFIDENCE) / (racing.shape[1] - 1)
        both = racing[:, :, None] & racing[:, None, :]
        own = draws.values[pair]
        # The residuals of a table are those of all pairs of its rows.
        pooled = np.where(both, own, 0.0).sum((1, 2)) / (rows * (rows - 1) * (rounds - 1))
        pooled, own = pooled[:, None, None], own / (counts - 1)
        seeds = pooled + (counts - 1) / (counts + 9) * np.maximum(0.0, own - pooled)
        scale = blocks * (blocks - 1)
        single, mean = draws.single[pair] / (counts * scale), draws.mean[pair] / scale
        averaged = np.maximum(0.0, single - mean) / (counts - 1)
        rare = (math.log(level) / ndtri(level) * draws.step / blocks) ** 2
        of_examples = np.maximum(np.maximum(0.0, mean - averaged), rare)
        seeds = np.maximum(seeds, single)
        same = np.arange(racing.shape[1])
        of_examples[:, same, same] = seeds[:, same, same] = 0.0
        return cls(seeds, of_examples, counts, rows, rounds, blocks)

    def half_widths(self, rounds: float) -> np.ndarray:
        """Return the half-widths of the intervals once the longest have so many executions."""
        level = (1 - DEFAULT_CONFIDENCE) / (self.seeds.shape[1] - 1)
        of_seeds = stdtrit((self.rows - 1) * (rounds - 1.0), 1 - 2 * level / (len(LOOKS) + 1))
        of_examples = stdtrit(self.blocks - 1, 1 - level)
        seeds = self.seeds / np.where(self.counts < self.rounds, self.counts, rounds)
        return np.sqrt(of_seeds[:, None, None] ** 2 * seeds + of_examples**2 * self.examples)


def run_races(draws: Draws, seconds: np.ndarray, tolerance: float) -> dict[str, np.ndarray]:
    """Run the races of all draws at once, as `analysis.paired_runs` does one after the other."""
    count, sizes = len(draws.means), len(seconds)
    looks, places = np.array(LOOKS), np.arange(sizes)
    left_at = np.zeros((count, sizes), int)  # Numbers of looks.
    racing, running = np.ones((count, sizes), bool), np.ones(count, bool)
    too_small = np.zeros(count, int)
    found = {name: np.zeros(count, int) for name in ("named", "certain", "certified", "executions")}
    for number, rounds in enumerate(LOOKS):
        at = np.flatnonzero(running)
        left_at[at] = np.where(racing[at], number, left_at[at])
        look = np.minimum(left_at[at][:, :, None], left_at[at][:, None, :])
        pair = at[:, None, None], look, places[:, None], places
        gaps = draws.means[pair[:3]] - draws.means[at[:, None, None], look, places]
        variances = Variances.of(draws, pair, racing[at], rounds)
        setting = {"dropped": ~racing[at], "means": draws.means[at, number], "seconds": seconds}
        setting |= {"tolerance": tolerance}

        now = apply_rule(gaps, variances.half_widths(rounds), **setting)
        chance = 2 * np.sqrt(variances.seeds / variances.counts)
        last, endless = variances.half_widths(LOOKS[-1]), variances.half_widths(math.inf)
        soon = apply_rule(gaps, variances.half_widths(math.floor(1.5 * rounds)), **setting)
        hopes = apply_rule(gaps, np.maximum(0.0, last - chance), **setting).certified
        ever = apply_rule(gaps, endless, **setting)
        moved = apply_rule(gaps, np.maximum(0.0, endless - chance), **setting)

        certified = now.certified.any(1)
        promising = hopes & ((seconds < seconds[now.named][:, None]) | ~certified[:, None])
        rivals = ~now.worse[:, :, None] & ~now.worse[:, None, :]
        widest = np.where(rivals, endless, 0.0).max((1, 2))
        small = ~now.settled & ~ever.settled & ((widest > tolerance) | ~moved.settled)
        too_small[at] = np.where(small, too_small[at] + 1, 0)
        racing[at] &= ~now.worse
        ended = now.settled | (certified & ~promising.any(1) & ~soon.settled)
        ended |= (too_small[at] >= 2) | (rounds == LOOKS[-1])
        ends = at[ended]
        found["named"][ends] = now.named[ended]
        found["certain"][ends] = now.settled[ended]
        found["certified"][ends] = certified[ended]
        found["executions"][ends] = looks[left_at[ends]].sum(1)
        running[ends] = False
    return found


def apply_rule(gaps, half, *, dropped, means, seconds, tolerance) -> Rule:
    """Apply the rule to gaps [draw, than, of] and the half-widths of their intervals."""
    each = np.arange(len(gaps))
    leader = np.where(dropped, -np.inf, means).argmax(1)
    worse = dropped | (gaps[each, leader] - half[each, leader] > tolerance)
    worse[each, leader] = False
    within = (gaps + half <= tolerance) | worse[:, :, None] | np.eye(len(seconds), dtype=bool)
    certified = within.all(1) & ~worse
    fastest = np.where(certified, seconds, np.inf).argmin(1)
    named = np.where(certified.any(1), fastest, leader)
    faster = seconds < seconds[named][:, None]
    settled = certified.any(1) & (~faster | worse).all(1)
    return Rule(leader, certified, worse, named, settled)


def run_race(hits: np.ndarray, seconds: np.ndarray, tolerance: float) -> tuple[RaceState, int]:
    """Run a race by kbatch; return its end and how many executions it took."""
    examples = hits.shape[-1]
    length = math.ceil(examples / MOST_BLOCKS)
    whole = hits[:, :, : examples // length * length].astype(np.float32)
    outcomes = sum(whole[:, :, part::length] for part in range(length)) / length
    parts = zip(hits.mean(-1), outcomes, seconds, strict=True)
    candidates = [Candidate(*part, examples) for part in parts]
    given = [first_executions(candidate, LOOKS[0]) for candidate in candidates]
    while True:
        state = race(given, larger_is_better=True, tolerance=tolerance)
        if state.ended is not None:
            return state, sum(len(candidate.values) for candidate in given)
        look = next(look for look in LOOKS if look > state.rounds)
        for k in state.following:
            given[k] = first_executions(candidates[k], look)


def check_races(searches, found, *, seconds, tolerance: float) -> None:
    """Raise where a race by kbatch ends in another way than the one that was run with others."""
    for number, hits in enumerate(searches):
        state, executions = run_race(hits, seconds, tolerance)
        verdict = state.verdict
        theirs = verdict.named, verdict.certain, verdict.named in verdict.certified, executions
        mine = tuple(int(values[number]) for values in found.values())
        if mine != theirs:
            raise AssertionError(f"Draw {number}: kbatch finds {theirs}, the replay {mine}.")


def replay(row: Row, rng: np.random.Generator, options, *, examples: int) -> dict[str, np.ndarray]:
    """Draw searches and judge their answers by the truth."""
    parts = []
    for start in range(0, options.draws, 50):
        number = min(50, options.draws - start)
        searches = [row.draw(rng, examples) for _ in range(number)]
        draws = summarize(searches)
        found = run_races(draws, row.seconds, options.tolerance)
        if start < options.checked:
            some = searches[: options.checked - start]
            check_races(some, found, seconds=row.seconds, tolerance=options.tolerance)
        for rounds in (1, 3, 5):
            values = np.array(
                [np.count_nonzero(hits[:, :rounds], axis=(1, 2)) for hits in searches]
            )
            found[f"best of {rounds}"] = values.argmax(1)
        parts.append(found)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    named, certified = found["named"], found["certified"].astype(bool)
    enough = row.truth >= row.truth.max() - options.tolerance
    found["wrong"] = certified & ~enough[named]
    fastest = row.seconds[enough].min()
    found["missed"] = found["certain"].astype(bool) & (row.seconds[named] > fastest)
    if row.tested is not None:
        found["tested"] = certified & (row.tested[named] < row.tested.max() - options.tolerance)
    for rounds in (1, 3, 5):
        best = found[f"best of {rounds}"]
        found[f"time {rounds}"] = row.seconds[named] / row.seconds[best]
        found[f"off {rounds}"] = ~enough[best]
    found["least time"] = fastest / row.seconds[found["best of 5"]]
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
    found = {answer: float(tested.max() - tested[pair]) for answer, pair in answers.items()}
    return found | {"trials": len(runs), "cost": sum(seconds) / (3 * whole_s)}


def replays_joint(name: str, table, options) -> list[dict]:
    """Replay the draws of a task that `--store` does not hold yet."""
    key = {"task": name, "tolerance": options.tolerance}
    lines = options.store.read_text().splitlines() if options.store else []
    rows = [row for row in map(json.loads, lines) if row.items() >= key.items()]
    stored = {row["draw"]: row for row in rows}
    for draw in range(options.draws):
        if draw not in stored:
            rng = np.random.default_rng((8, draw, *name.encode()))
            found = replay_joint(table, rng, name=name, tolerance=options.tolerance)
            stored[draw] = key | {"draw": draw} | found
            if options.store:
                with options.store.open("a") as file:
                    file.write(json.dumps(stored[draw]) + "\n")
    return [stored[draw] for draw in range(options.draws)]


def print_joint(options) -> None:
    """Print a row for each task."""
    tolerance, draws = options.tolerance, options.draws
    print(f"joint search of {len(SIZES)} sizes x {len(FACTORS)} rates, tolerance {tolerance:.2%}")
    print(
        f"{'':<6}{'within: joint':>14}{'grid':>7}{'grid 3':>8}{'trials':>8}{'loss: joint':>13}"
        f"{'grid 3':>8}{'difference, 95 %':>20}{'cost / grid 3':>15}"
    )
    tables = joint_tables()
    for name in options.joint:
        found = replays_joint(name, tables[name], options)
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
    parser.add_argument("--checked", type=int, default=50, help="draws a row that kbatch races too")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--validation", type=int, nargs="*", default=[360, 1500])
    parser.add_argument("--rows", nargs="+", help="of the race, all by default")
    parser.add_argument("--joint", nargs="*", default=list(COSTS), help="tasks of the joint search")
    parser.add_argument("--store", type=Path, help="file to which joint searches are appended")
    options = parser.parse_args()
    if options.store:
        options.store.touch()
    rows = stored_rows() | synthetic_rows(options.tolerance) if options.validation else {}
    for examples in options.validation:
        print(f"{examples} validation examples, tolerance {options.tolerance:.2%}")
        print(
            f"{'':<12}{'wrong':>12}{'missed':>8}{'certain':>9}{'certified':>11}{'test':>7}"
            f"{'executions':>12}{'time / best of 1':>18}{'3':>6}{'5':>6}{'least':>7}"
            f"{'best of 5':>11}"
        )
        for place, (name, row) in enumerate(rows.items()):
            if name in (options.rows or rows):
                rng = np.random.default_rng((7, examples, place))
                found = replay(row, rng, options, examples=examples)
                print(f"{name:<12}{summary(found)}", flush=True)
    if options.joint:
        print_joint(options)


def summary(found: dict[str, np.ndarray]) -> str:
    """Write the columns of a row."""
    wrong = found["wrong"].mean()
    error = math.sqrt(wrong * (1 - wrong) / len(found["wrong"]))
    tested = f"{found['tested'].mean():7.1%}" if "tested" in found else f"{'':7}"
    middle, most = np.quantile(found["executions"], [0.5, 0.9])
    times = [found[name].mean() for name in ("time 1", "time 3", "time 5", "least time")]
    return (
        f"{wrong:6.1%} ± {error:.1%}{found['missed'].mean():8.1%}"
        f"{found['certain'].mean():9.1%}{found['certified'].mean():11.1%}"
        f"{tested}{middle:8.0f}{most:4.0f}"
        f"{times[0]:18.2f}{times[1]:6.2f}{times[2]:6.2f}{times[3]:7.2f}"
        f"{found['off 5'].mean():11.1%}"
    )


if __name__ == "__main__":
    main()
