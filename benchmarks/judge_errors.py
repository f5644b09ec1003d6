"""How often is a certain answer wrong?

python benchmarks/judge_errors.py [--searches 1000] [--rows looks] [--seed 0] [--beside PATH]
    5 minutes on one core

Each row draws searches with a known truth and judges them as kbatch does. A search is wrong if it
is certain although another size is better than the named one by more than the tolerance. At most
5 % may be wrong. Unless a row says otherwise, the truth is as hard as possible: one size is better
than a faster one by just more than the tolerance. `--beside` adds the columns of another checkout.

certain  share of all searches that are certain
wrong    share of all searches that are wrong, with its 95 % interval

alike      six or two sizes of the same spread: tied, or one size is better and the slowest
scatter    the seeds of one size deviate 1, 2, 4 or 8 times as much as the others. This size is just
           too bad, or the best and the slowest, whichever is wrong more often; or all are tied
examples   the same with 2,000 validation examples, which all sizes share
looks      a search that is extended: judged after more executions until it is certain
epochs     values after each of 20 epochs, which vary: one size varies four times as much, or its
           predictions change four times as much between epochs
classes    recall and area under the curve of a class with 10 to 500 of 1,000 examples
target     seconds to a target, for which some runs need one epoch more than others
tails      losses with a lognormal part, of deviation 0.5 to 4
pinned     every execution starts from the same weights and reads the data in the same order
auc        a metric that is not a mean over examples, with and without pseudo-values of 50 blocks
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from quick import parse_arguments
from scipy import special

from kbatch.analysis.judge import Judgement, judge
from kbatch.analysis.run_table import Run

try:
    from kbatch.analysis.intervals import pseudo_values
    from kbatch.analysis.run_table import best_epochs
except ImportError:  # A checkout before best epochs were averaged.
    from kbatch.analysis.cross_fit import CrossFit, pseudo_values

    best_epochs = None
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


def runs_of(values: np.ndarray, outcomes: np.ndarray | None = None, **fields) -> list[Run]:
    """Make runs of [size, round]; the last size is the fastest."""
    fields = {name: value for name, value in fields.items() if name in Run._fields}
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


def accuracy(sums: np.ndarray) -> float:
    return sums[0] / sums[1]


def by_epochs(levels, wander, flicker, rounds: int, *, examples: int = 2000, epochs: int = 20):
    """Draw the accuracies of epochs; return a function of the generator, and of the truths.

    Args:
        levels: Of each size's score at the end of training.
        wander: Deviation of each size's level from epoch to epoch, the same for all examples.
        flicker: Deviation of the scores of single examples from epoch to epoch.
    """
    learnt = -np.exp(-np.arange(epochs) / 3)
    wander, flicker = np.array(wander)[:, None, None], np.array(flicker)
    of_size, seeds, count = 0.15, 0.01, len(levels)

    def draw(rng: np.random.Generator, truths: bool = False):
        def normal(*shape):
            return rng.standard_normal(shape, dtype=np.float32)

        level = np.array(levels)[:, None, None] + learnt + wander * normal(count, rounds, epochs)
        level = level + seeds * normal(count, rounds, 1)
        shared, total = normal(examples), np.sqrt(1 + of_size**2 + flicker**2)
        values, tested = np.zeros((2, count, rounds))
        blocks = np.zeros((count, rounds, BLOCKS))
        for k in range(count):
            score = shared + np.float32(of_size) * normal(examples)
            for r in range(rounds):
                chance = np.float32(flicker[k]) * normal(epochs, examples)
                hits = score + chance + level[k, r].astype(np.float32)[:, None] > 0
                sums = hits.reshape(epochs, BLOCKS, -1).sum(-1)
                found = [np.stack([one, np.full(BLOCKS, examples // BLOCKS)], 1) for one in sums]
                if best_epochs is None:
                    fit = CrossFit(accuracy, larger_is_better=True)
                    for one in found:
                        fit.add(one)
                    blocks[k, r], places = fit.values(), [sums.sum(1).argmax()]
                else:
                    places = best_epochs(sums.sum(1).tolist(), larger_is_better=True)
                    blocks[k, r] = np.mean([found[p][:, 0] / found[p][:, 1] for p in places], 0)
                values[k, r] = blocks[k, r].mean()
                tested[k, r] = special.ndtr(level[k, r, places] / total[k]).mean()
        if truths:
            return tested.mean(1)
        return runs_of(values, blocks, examples=examples)

    return draw


def epochs_row(levels, wander, flicker, rounds: int, *, tolerance: float | None = None) -> Row:
    """Make a row whose fastest size is worse by just more than the tolerance if none is given."""
    rng = np.random.default_rng(99)
    known = by_epochs(levels, wander, flicker, 8)
    truth = np.mean([known(rng, truths=True) for _ in range(60)], axis=0)
    tolerance = tolerance or float(truth.max() - truth[-1]) / 1.001
    return Row("", truth, by_epochs(levels, wander, flicker, rounds), tolerance, (rounds,))


def by_class(
    shifts,
    rounds: int,
    *,
    examples: int = 1000,
    positives: int | None = None,
    recall: bool = False,
    outcomes: bool = True,
    apart: float = 1.0,
):
    """Draw areas under the curve of scores, or recalls; `shifts` part the two classes.

    Args:
        apart: How much the scores of two trainings differ; at 0.25 they agree on most examples.
    """
    shifts, positives = np.array(shifts), positives or examples // 2
    parts = {True: positives, False: examples - positives}

    def draw(rng: np.random.Generator) -> list[Run]:
        def normal(scale, *shape):
            return {own: scale * rng.standard_normal((*shape, n)) for own, n in parts.items()}

        count = len(shifts)
        shared, own = normal(1.0), normal(0.4 * apart, count)
        # Positives and negatives of each block.
        places = rng.permutation(examples) % BLOCKS
        mine, others = (np.eye(BLOCKS)[one] for one in np.split(places, [positives]))
        values, pseudo = np.zeros((count, rounds)), np.zeros((count, rounds, BLOCKS))
        for r, k in itertools.product(range(rounds), range(count)):
            chance, move = normal(0.2 * apart), 0.02 * rng.standard_normal(2)
            scores = [shared[c] + own[c][k] + chance[c] + move[int(c)] for c in (True, False)]
            if recall:
                found = mine.T @ (scores[0] + shifts[k] > 0)
                sums = np.stack([found, mine.sum(0)], 1)
                values[k, r], pseudo[k, r] = accuracy(sums.sum(0)), pseudo_values(sums, accuracy)
                continue
            # Which of each block's positives lie above which of each block's negatives.
            above = scores[0][:, None] + shifts[k] > scores[1]
            wins = mine.T.astype("f4") @ above.astype("f4") @ others.astype("f4")
            pairs = np.outer(mine.sum(0), others.sum(0))
            left = [m.sum() - m.sum(0) - m.sum(1) + np.diag(m) for m in (wins, pairs)]
            values[k, r] = wins.sum() / pairs.sum()
            pseudo[k, r] = BLOCKS * values[k, r] - (BLOCKS - 1) * left[0] / left[1]
            pseudo[k, r] += values[k, r] - pseudo[k, r].mean()
        if not outcomes:
            return runs_of(values)
        step = 1 / min(positives, examples - positives)
        return runs_of(values, pseudo, examples=examples, step=step)

    return draw


def by_target(late, rounds: int, *, epochs: int):
    """Draw negative times to a target. A share of the runs needs one epoch more."""
    late = np.array(late)[:, None]

    def draw(rng: np.random.Generator) -> list[Run]:
        needed = epochs + np.floor(late + rng.random((len(late), rounds)))
        return runs_of(-needed, resolution=1.0)

    return draw


def by_losses(means, rounds: int, *, deviation: float, examples: int = 1000):
    """Draw losses, of which a part has a lognormal distribution of these means."""
    means, count = np.array(means)[:, None, None], len(means)

    def draw(rng: np.random.Generator) -> list[Run]:
        def normal(*shape):
            return rng.standard_normal((*shape, examples))

        part = 0.9 * normal(1, 1) + 0.4 * normal(count, 1) + 0.2 * normal(count, rounds)
        tail = np.exp(deviation * part - deviation**2 * 1.01 / 2)
        losses = np.exp(0.5 * normal(1, 1) + 0.05 * normal(count, rounds)) + means * tail
        losses += 0.002 * rng.standard_normal((count, rounds, 1))
        blocks = losses.reshape(count, rounds, BLOCKS, -1).mean(-1)
        return runs_of(-blocks.mean(-1), -blocks, examples=examples, step=np.inf)

    return draw


def deviation_of_scores(apart: float = 1.0) -> float:
    return float(np.sqrt(1 + (0.4**2 + 0.2**2) * apart**2 + 0.02**2))


def area(shift: float) -> float:
    """Return the area under the curve over all seeds and examples."""
    return float(special.ndtr(shift / np.sqrt(2) / deviation_of_scores()))


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
                yield name_, [Row("", truth, draw, 2.0, looks, False)]
    alike = [0.03] * 6, [0.25] * 6
    yield (
        "epochs, 6 sizes, 3 executions, tied",
        [epochs_row([0.86] * 6, *alike, 3, tolerance=0.026)],
    )
    for name, wander, flicker in (
        ("alike", *alike),
        ("one wanders", [0.03] * 5 + [0.12], [0.25] * 6),
        ("the others wander", [0.12] * 5 + [0.03], [0.25] * 6),
        ("one flickers", [0.03] * 6, [0.25] * 5 + [1.0]),
    ):
        rows_ = []
        for rounds in (3, 6):
            level = 0.86 if flicker[-1] < 1 else 1.2
            rows_.append(epochs_row([0.94] + [0.86] * 4 + [level - 0.05], wander, flicker, rounds))
        yield f"epochs, 6 sizes, {name}", rows_
    for recall, positives in itertools.product((True, False), (500, 50, 20, 10)):
        best, name = 0.84 if recall else 0.94, "recall" if recall else "auc"
        name, common = f"classes, {name}, {positives} of 1,000", {"recall": recall}
        for tolerance, apart in ((0.02, 0.25), (0.02, 1.0), (0.05, 1.0)):
            unit = deviation_of_scores(apart) * (1 if recall else np.sqrt(2))
            truth = [best] + [best - 1.001 * tolerance] * 2
            shifts = [float(special.ndtri(value)) * unit for value in truth]
            draw = by_class(shifts, 3, positives=positives, apart=apart, **common)
            agree = ", trainings agree" if apart < 1 else ""
            yield f"{name}, tolerance {tolerance}{agree}", [Row("", truth, draw, tolerance, (3,))]
        draw = by_class([shifts[0]] * 3, 3, positives=positives, **common)
        yield f"{name}, tied, tolerance 0.1", [Row("", [best] * 3, draw, 0.1, (3,))]
    for sizes, epochs, share in itertools.product((2, 6), (10, 33, 40), (0.0, 0.5)):
        gap = 1.001 * 0.02 * epochs
        late = [-share * gap] + [(1 - share) * gap] * (sizes - 1)
        truth = [-epochs - one for one in late]
        row = Row("", truth, by_target(late, 3, epochs=epochs), gap / 1.001, (3,), False)
        yield f"target, {sizes} sizes, {epochs} epochs, best is early in {share}", [row]
    for deviation in (0.5, 1.0, 2.0, 3.0, 4.0):
        means = [0.1, 0.13003, 0.13003]
        draw = by_losses(means, 3, deviation=deviation)
        yield f"tails, deviation {deviation}", [Row("", [-m for m in means], draw, 0.03, (3,))]
        draw = by_losses([0.1] * 3, 3, deviation=deviation)
        yield f"tails, deviation {deviation}, tied", [Row("", [-0.1] * 3, draw, 0.05, (3,))]
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
            draw = by_class(shifts, rounds, outcomes=known)
            row = Row("", [area(shift) for shift in shifts], draw, tolerance, (rounds,))
            yield f"auc, {name}, {rounds} executions", [row]


def search(row: Row, rng: np.random.Generator) -> tuple[bool, bool]:
    """Draw a search; return whether it is certain, and whether it is wrong."""
    found: Judgement | None = None
    runs = row.draw(rng)
    given = {"larger_is_better": True, "confidence": 0.95, "over_examples": row.over_examples}
    for look, rounds in enumerate(row.rounds, 1):
        kept = [r for r in runs if (r.seed or 0) < rounds]
        found = judge(kept, tolerance=row.tolerance, looks=look, **given)
        if found.certain:
            break
    assert found is not None
    gap = max(row.truth) - row.truth[found.pairs.index(found.named)]
    return found.certain, found.certain and gap > row.tolerance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--rows", default="", help="only rows whose name begins so")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--beside", help="another checkout, whose judge sees the same searches")
    options = parse_arguments(parser, searches=5)
    count = options.searches
    if options.beside:
        other = [sys.executable, __file__, *sys.argv[1:]]
        other = other[: other.index("--beside")] + other[other.index("--beside") + 2 :]
        environment = os.environ | {"PYTHONPATH": options.beside}
        text = subprocess.run(other, env=environment, check=True, capture_output=True, text=True)
        beside = iter(text.stdout.splitlines())
    else:
        beside = itertools.repeat("")
    header = f"{count:,} searches a row{'':40}{'certain':>8}{'wrong':>8}"
    print(f"{header}{'':16}{next(beside)[len(header) - 16 :]}")
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
        ends = f"{100 * low:.1f} to {100 * high:.1f}"
        print(f"{name:58}{shares}  {ends:14}{next(beside)[58:]}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
