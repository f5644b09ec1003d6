"""Executions of batch sizes drawn from a known truth, for tests of decisions."""

import math

import numpy as np
from scipy import special

from kbatch.analysis.paired_runs import Candidate

# Of an example's difficulty 1: what a size makes of it, what chance does in each execution, and
# how far a seed shifts a whole execution.
SIZE, CHANCE, SEED = 0.15, 0.25, 0.05


def simulate(rng, accuracies, *, rounds, examples=1500, tails=math.inf, spreads=None):
    """Draw executions whose accuracies over all seeds and examples are these, slower ones first."""
    count = len(accuracies)
    spreads = SEED * np.ones(count) if spreads is None else np.asarray(spreads)
    seeds = rng.standard_normal((count, rounds))
    if math.isfinite(tails):
        seeds = rng.standard_t(tails, (count, rounds)) / math.sqrt(tails / (tails - 2))
    spread = np.sqrt(1 + SIZE**2 + CHANCE**2 + spreads**2)
    # For heavy tails the shift of a whole execution is small against an example's difficulty.
    levels = special.ndtri(accuracies) * spread
    score = rng.standard_normal(examples) + SIZE * rng.standard_normal((count, 1, examples))
    score = score + (levels[:, None] + spreads[:, None] * seeds)[..., None]
    hits = score + CHANCE * rng.standard_normal((count, rounds, examples)) > 0
    block = -(-examples // 512)
    starts = np.arange(0, examples - examples % block, block)
    blocks = np.add.reduceat(hits[..., : examples - examples % block], starts, axis=-1) / block
    return [
        Candidate(tuple(each.mean(1)), outcomes, float(count - k), examples)
        for k, (each, outcomes) in enumerate(zip(hits, blocks, strict=True))
    ]
