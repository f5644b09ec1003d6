"""The rounds of a race: which runs judge its pairs, and which only chose them."""

from collections.abc import Sequence

import numpy as np

from kbatch.analysis.judge import Judgement, Pair, Run, judge

# Rounds before the first judgement.
FIRST_LOOK = 3


def judge_race(
    runs: Sequence[Run],
    batch_sizes: Sequence[int],
    *,
    larger_is_better: bool,
    tolerance: float,
    confidence: float,
) -> Judgement | None:
    """Judge the rounds of a race, None before two sizes have one and where all of them diverged.

    Runs of the smallest seed chose the pairs, and certify nothing. A size without rounds is left
    out, which forbids a certain answer where that size may be preferred.
    """
    first = first_seed(runs)
    rounds: dict[Pair, int] = {}
    for run in runs:
        if (run.seed or 0) > first and run.value is not None:
            rounds[run.pair] = rounds.get(run.pair, 0) + 1
    bad = {run.pair for run in runs if run.ended in ("diverged", "out_of_memory")}
    if len({size for size, _ in rounds}) < 2 or not rounds.keys() - bad:
        return None
    most = max(rounds[pair] for pair in rounds.keys() - bad)
    # Some may not have had their turn in the last round yet.
    least = max(1, min(FIRST_LOOK, most - 1))
    judged = {pair for pair, count in rounds.items() if count >= least}
    # Where the pair of a size has changed, the one that was repeated most.
    order = sorted(judged, key=lambda pair: (pair not in bad, rounds[pair], pair))
    judged = set({pair[0]: pair for pair in order}.values())
    seconds = training_seconds_of(runs, batch_sizes)
    while True:
        given = [run for run in runs if run.pair in judged and (run.seed or 0) > first]
        absent = set(batch_sizes) - {size for size, _ in judged}
        given += [Run(size, 1.0, None, None, seconds[size], "left_out") for size in absent]
        found = judge(
            given,
            larger_is_better=larger_is_better,
            tolerance=tolerance,
            confidence=confidence,
            looks=max(1, most - FIRST_LOOK + 1),
        )
        # What left the race as unlikely, and not as worse, is no longer compared.
        left = {pair for pair in judged - set(found.worse) if rounds[pair] < most - 1}
        if not left:
            return found
        judged -= left


def first_seed(runs: Sequence[Run]) -> int:
    """Return the seed of execution number 0."""
    return min((run.seed or 0 for run in runs), default=0)


def training_seconds_of(runs: Sequence[Run], batch_sizes: Sequence[int]) -> dict[int, float]:
    """Return the training time of each size, 0 where none is known."""
    own = {
        size: [s for run in runs if run.batch_size == size and (s := run.seconds)]
        for size in sorted(batch_sizes, reverse=True)
    }
    known = {size: float(np.mean(seconds)) for size, seconds in own.items() if seconds}
    if not known:
        return dict.fromkeys(batch_sizes, 0.0)
    # A training takes a time for each example and one for each update.
    updates = [1 / size for size in known]
    return {
        size: known.get(size, float(np.interp(1 / size, updates, list(known.values()))))
        for size in batch_sizes
    }
