"""How often is a certain answer wrong?

python benchmarks/judge_errors.py [--searches 1000] [--rows looks] [--seed 0]
    about 5 minutes on one core

Each row draws so many searches from a known truth and judges them as kbatch does. A search is wrong
where it is certain while one of its sizes is better than the named one by more than the tolerance:
5 % may be. The truth is as hard as it can be: where nothing else is said, one size is better than
another, faster one by just more than the tolerance.

certain  share of all searches that are certain
wrong    share of all searches that are wrong, with its interval of 95 %

alike      six or two sizes of the same spread: tied, or with one that is better and the slowest
scatter    one size's seeds deviate 1, 2, 4 or 8 times as much as the others'; it is just not good
           enough, or the best and the slowest (whichever is wrong most often); and what is certain
           where all are alike and tied
examples   the same with 2,000 validation examples, which all sizes share
looks      judged again after more executions until certain: a search that is extended twice, a race
pinned     every execution starts from the same weights and sees the same order of the data
auc        a metric that is no mean over examples, by pseudo-values of 50 blocks and without them
tolerance  a race at 0.01 that is judged at 0.05 afterwards; also wrong where it is certain though a
           faster size that left the race is good enough
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from kbatch.analysis.judge import Judgement, judge
from kbatch.analysis.run_table import Run

BLOCKS = 50
# Deviation of an accuracy of 0.8 by seeds, in units of an example's difficulty.
SPREAD = 0.015


class Row(NamedTuple):
    """Searches of one kind."""

    name: str
    truth: Sequence[float]  # Value of each size over all seeds and examples, the fastest last.
    draw: Callable[[np.random.Generator], list[Run]]
    tolerance: float
    rounds: tuple[int, ...]  # After which it is judged, until it is certain.
    over_examples: bool = True
    race: bool = False  # Whether what is worse gets no more executions.


def runs_of(values: np.ndarray, outcomes: np.ndarray | None = None, **fields) -> list[Run]:
    """Make runs of [size, round]; the last size is the fastest."""
    return [
        Run(
            2**k, 1.0, r, float(values[k, r]), float(len(values) - k), **fields,
            outcomes=None if outcomes is None else outcomes[k, r],
        )
        for k in range(len(values))
        for r in range(values.shape[1])
    ]  # fmt: skip


def by_seeds(truth, spreads, rounds: int) -> Callable[[np.random.Generator], list[Run]]:
    """Draw values that seeds alone disturb, as in an endless validation set."""
    truth, spreads = np.array(truth, float)[:, None], np.array(spreads, float)[:, None]

    def draw(rng: np.random.Generator) -> list[Run]:
        return runs_of(truth + spreads * rng.standard_normal((len(truth), rounds)))

    return draw


def by_examples(
    truth, spreads, rounds: int, *, examples: int = 2000, one_training: bool = False, **fields
):
    """Draw accuracies over examples that differ in difficulty; maybe of one training."""
    spreads = np.array(spreads, float)[:, None, None]
    of_size, of_chance = 0.15, 0.25
    total = np.sqrt(1 + of_size**2 + of_chance**2 + spreads**2)
    levels = special.ndtri(np.array(truth))[:, None, None] * total

    def draw(rng: np.random.Generator) -> list[Run]:
        def normal(*shape):
            return rng.standard_normal(shape, dtype=np.float32)

        count, drawn = len(truth), 1 if one_training else rounds
        score = normal(examples) + np.float32(of_size) * normal(count, 1, examples)
        score = score + (levels + spreads * normal(count, drawn, 1)).astype(np.float32)
        hits = score + np.float32(of_chance) * normal(count, drawn, examples) > 0
        outcomes = hits.reshape(count, drawn, BLOCKS, -1).mean(-1)
        if one_training:
            outcomes = np.repeat(outcomes, rounds, 1)
            outcomes = outcomes + 1e-6 * rng.standard_normal((count, rounds, 1))
        return runs_of(outcomes.mean(-1), outcomes, examples=examples, **fields)

    return draw


def by_auc(shifts, rounds: int, *, examples: int = 1000, outcomes: bool = True):
    """Draw areas under the curve of scores; `shifts` part the two classes."""
    shifts = np.array(shifts)[:, None]

    def draw(rng: np.random.Generator) -> list[Run]:
        half, count = examples // 2, len(shifts)
        shared, own = rng.standard_normal((2, half)), rng.standard_normal((count, 2, half))
        values, pseudo = np.zeros((count, rounds)), np.zeros((count, rounds, BLOCKS))
        for r in range(rounds):
            chance = rng.standard_normal((count, 2, half)) + 0.1 * rng.standard_normal(
                (count, 2, 1)
            )
            scores = shared + 0.4 * own + 0.2 * chance
            for k in range(count):
                # Which of each block's positives lie above which of each block's negatives.
                above = scores[k, 0][:, None] + shifts[k] > scores[k, 1]
                wins = above.reshape(BLOCKS, -1, BLOCKS, half // BLOCKS).sum((1, 3))
                without = wins.sum() - wins.sum(0) - wins.sum(1) + np.diag(wins)
                values[k, r] = wins.sum() / half**2
                left = without / (half - half // BLOCKS) ** 2
                pseudo[k, r] = BLOCKS * values[k, r] - (BLOCKS - 1) * left
        if not outcomes:
            return runs_of(values)
        return runs_of(pseudo.mean(-1), pseudo, examples=examples)

    return draw


def area(shift: float) -> float:
    """Return the area under the curve over all seeds and examples."""
    return float(special.ndtr(shift / np.sqrt(2 * (1 + 0.4**2 + 0.2**2 * 1.01))))


def rows() -> Iterator[tuple[str, list[Row]]]:
    """Yield what is drawn for each line of the table: the worst of some rows."""
    out = 1.001
    for sizes in (6, 2):
        for rounds, tolerance in ((3, 3.0), (6, 2.0)):
            truths = {"tied": [0.0] * sizes, "just outside": [out] + [0.0] * (sizes - 1)}
            for name, truth in truths.items():
                scaled = [tolerance * value for value in truth]
                draw = by_seeds(scaled, [1.0] * sizes, rounds)
                name = f"alike, {sizes} sizes, {rounds} executions, {name}"
                yield name, [Row(name, scaled, draw, tolerance, (rounds,), False)]
    for sizes, (rounds, tolerance) in itertools.product((6, 3), ((2, 5.2), (3, 3.7), (6, 2.4))):
        for ratio in (1, 2, 4, 8):
            found = []
            for truth, noisy in (
                ([out] + [0.0] * (sizes - 1), -1),
                ([out] + [0.0] * (sizes - 1), 0),
                ([out, 0.0] + [-2.0] * (sizes - 2), 1),
            ):
                spreads, scaled = [1.0] * sizes, [tolerance * value for value in truth]
                spreads[noisy] = ratio
                draw = by_seeds(scaled, spreads, rounds)
                found.append(Row("", scaled, draw, tolerance, (rounds,), False))
            yield f"scatter, {sizes} sizes, {rounds} executions, ratio {ratio}", found
        draw = by_seeds([0.0] * sizes, [1.0] * sizes, rounds)
        row = Row("", [0.0] * sizes, draw, tolerance, (rounds,), False)
        yield f"scatter, {sizes} sizes, {rounds} executions, tied", [row]
    for rounds in (2, 3, 6):
        for ratio in (1, 2, 4, 8):
            found = []
            for truth, noisy in (([0.8, 0.7795] + [0.74] * 4, 1), ([0.8] + [0.7795] * 5, 0)):
                spreads = [SPREAD] * 6
                spreads[noisy] *= ratio
                draw = by_examples(truth, spreads, rounds)
                found.append(Row("", truth, draw, 0.02, (rounds,)))
            yield f"examples, {rounds} executions, ratio {ratio}", found
        draw = by_examples([0.8] * 6, [SPREAD] * 6, rounds)
        row = Row("", [0.8] * 6, draw, 0.02, (rounds,))
        yield f"examples, {rounds} executions, tied", [row]
    for sizes in (2, 3, 6):
        for name, looks in (("3, 6, 12", (3, 6, 12)), ("3, 4, 5, 6", (3, 4, 5, 6))):
            for ratio in (1, 8) if sizes > 2 else (1,):
                truth, spreads = [2 * out] + [0.0] * (sizes - 1), [1.0] * (sizes - 1) + [ratio]
                draw = by_seeds(truth, spreads, looks[-1])
                name_ = f"looks, {sizes} sizes after {name}, ratio {ratio}"
                yield name_, [Row("", truth, draw, 2.0, looks, False, race=len(looks) > 3)]
    truth, spreads = [0.8] * 3 + [0.7795] * 3, [SPREAD] * 6
    same = {"one_training": True}
    for name, fields in {
        "hashes of weights and order": {"weights": "w", "order": "o"},
        "without hashes": {},
    }.items():
        draw = by_examples(truth, [0.05] * 6, 3, examples=8000, **same, **fields)
        yield f"pinned, {name}", [Row("", truth, draw, 0.02, (3,))]
    tolerance = (area(2.2) - area(1.9)) / out
    for name, shifts, known in (
        ("pseudo-values, tied", [2.2] * 3, True),
        ("pseudo-values", [2.2, 2.2, 1.9], True),
        ("without them", [2.2, 2.2, 1.9], False),
    ):
        for rounds in (3, 6):
            draw = by_auc(shifts, rounds, outcomes=known)
            row = Row("", [area(shift) for shift in shifts], draw, tolerance, (rounds,))
            yield f"auc, {name}, {rounds} executions", [row]
    truth = [0.8, 0.8, 0.8, 0.8, 0.76, 0.755]
    draw = by_examples(truth, spreads, 6, examples=4000)
    yield (
        "tolerance, 0.05 after a race at 0.01",
        [Row("tolerance", truth, draw, 0.01, (3, 4, 5, 6), race=True)],
    )


def search(row: Row, rng: np.random.Generator) -> tuple[bool, bool]:
    """Draw a search; return whether it is certain, and whether it is wrong."""
    runs, left_at = row.draw(rng), {}
    given = {"larger_is_better": True, "confidence": 0.95, "over_examples": row.over_examples}
    kept: list[Run] = []
    found: Judgement | None = None
    for look, rounds in enumerate(row.rounds, 1):
        kept = [r for r in runs if (r.seed or 0) < left_at.get(r.pair, rounds)]
        found = judge(kept, tolerance=row.tolerance, looks=look, **given)
        if found.certain:
            break
        if row.race:
            left_at |= {pair: rounds for pair in found.worse if pair not in left_at}
    assert found is not None
    if row.name == "tolerance":
        found = judge(kept, tolerance=0.05, looks=look, **given)
        good = max(k for k, value in enumerate(row.truth) if value >= max(row.truth) - 0.05)
        return found.certain, found.certain and found.named != (2**good, 1.0)
    gap = max(row.truth) - row.truth[found.pairs.index(found.named)]
    return found.certain, found.certain and gap > row.tolerance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--rows", default="", help="only rows whose name begins so")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    options = parser.parse_args()
    count = options.searches
    print(f"{count:,} searches a row{'':40}{'certain':>8}{'wrong':>8}")
    for name, found in rows():
        if not name.startswith(options.rows):
            continue
        worst = (-1, 0)
        for row in found:
            rng = np.random.default_rng(options.seed)
            answers = np.array([search(row, rng) for _ in range(count)])
            worst = max(worst, (int(answers[:, 1].sum()), int(answers[:, 0].sum())))
        wrong, certain = worst
        low = special.betaincinv(wrong, count - wrong + 1, 0.025) if wrong else 0.0
        high = special.betaincinv(wrong + 1, count - wrong, 0.975) if wrong < count else 1.0
        shares = f"{100 * certain / count:7.1f}%{100 * wrong / count:7.1f}%"
        print(f"{name:58}{shares}  {100 * low:.1f} to {100 * high:.1f}", flush=True)


if __name__ == "__main__":
    main()
