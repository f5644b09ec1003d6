import itertools

import numpy as np
import pytest

from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.input_pipeline.result import input_verdict, long_run


def estimate(low, high):
    return Estimate((low * high) ** 0.5, low, high, 7)


def noisy(rate, seed=0, rounds=7):
    return rate * np.random.default_rng(seed).lognormal(0, 0.03, rounds)


OPPOSITE = {"input-bound": "compute-bound", "compute-bound": "input-bound"}


def test_input_verdict_is_symmetric():
    for ratio in (0.2, 0.5, 0.8, 0.97, 1.0, 1.03, 1.25, 2.0, 5.0):
        pipeline, step = noisy(1000 * ratio, 1), noisy(1000, 2)
        verdict = input_verdict(ratio_over_rounds(pipeline, step))
        assert input_verdict(ratio_over_rounds(step, pipeline)) == OPPOSITE.get(verdict, verdict)
        assert input_verdict(ratio_over_rounds(7 * pipeline, 7 * step)) == verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (estimate(0.4, 0.6), "input-bound"),
        (estimate(1.6, 2.4), "compute-bound"),
        (estimate(0.8, 1.2), "undetermined"),
        (estimate(0.96, 0.99), "undetermined"),
        (estimate(0.94, 0.951), "input-bound"),
        (Estimate(0.1, None, None, 2), "undetermined"),
        (None, "undetermined"),
    ],
)
def test_input_verdict_needs_the_whole_interval(ratio, verdict):
    assert input_verdict(ratio) == verdict


@pytest.mark.parametrize(
    ("middle", "low", "high", "verdict"),
    [
        (2.0, 1.9, 2.1, "compute-bound"),  # If both agree, the rounds decide.
        (1.15, 0.95, 1.3, "compute-bound"),
        (2.0, 0.5, 0.7, "input-bound"),  # A short round saw the batches of one chunk.
        (2.0, 0.5, 2.0, "undetermined"),
        (2.0, 0.7, 0.95, "undetermined"),
        (0.5, 1.2, 1.4, "compute-bound"),  # Short rounds saw a slow start.
        (1.15, 0.9, 0.97, "undetermined"),  # Close to each other, but with opposite verdicts.
        (1.15, 0.9, 1.01, "compute-bound"),
    ],
)
def test_input_verdict_with_a_long_reading(middle, low, high, verdict):
    ratio = estimate(middle / 1.02, middle * 1.02)
    assert input_verdict(ratio, long_run=(low, high)) == verdict
    inverse = estimate(1 / middle / 1.02, 1.02 / middle)
    assert input_verdict(inverse, long_run=(1 / high, 1 / low)) == OPPOSITE.get(verdict, verdict)


def chunked(*, pause_s, burst, batch_s, read_s):
    """Arrivals of batches that come in chunks, each after a pause."""
    now_s, arrivals_s = 0.0, []
    while now_s < read_s:
        for batch in range(burst):
            now_s += batch_s + (pause_s if batch == 0 else 0.0)
            arrivals_s.append(now_s)
    return [arrival_s for arrival_s in arrivals_s if arrival_s <= read_s]


def test_long_run_bounds_contain_the_rate_of_chunks():
    for pause_s, burst, periods in itertools.product(
        (0.2, 1.0), (5, 50), (2.3, 3.0, 3.7, 5.5, 20.2)
    ):
        period_s = pause_s + burst * 0.002
        truth = 8 * burst / period_s
        times_s = chunked(pause_s=pause_s, burst=burst, batch_s=0.002, read_s=periods * period_s)
        run = long_run([8] * len(times_s), times_s, epochs=[0] * len(times_s))
        low, high = run.bounds
        assert low <= truth * 1.001
        assert high >= truth * 0.999
        if run.basis == "whole_chunks":
            assert low == high == pytest.approx(truth)
        else:
            assert periods < 4


# A buffer is filled for a second, then five batches come at once.
SHUFFLED_S = [epoch + 1 + 0.001 * i for epoch in range(3) for i in range(5)]


@pytest.mark.parametrize(
    ("rows", "arrivals_s", "epochs", "basis", "bounds"),
    [
        # One pause counts once, or not at all.
        ([8] * 4, [1.0, 1.1, 1.2, 1.3], [0] * 4, "part_of_the_data", (32 / 1.3, 24 / 0.3)),
        ([8] * 29, [0.1 * i for i in range(1, 30)], [0] * 29, "whole_chunks", (80, 80)),
        ([8] * 30, [3 + 0.1 * i for i in range(30)], [0] * 30, "part_of_the_data", (240 / 5.9, 80)),
        ([8] * 12, SHUFFLED_S[:12], [0] * 5 + [1] * 5 + [2] * 2, "whole_epochs", (40, 40)),
        ([8, 8, 4, 8, 8, 4, 8], range(1, 8), [0, 0, 0, 1, 1, 1, 2], "whole_epochs", (20 / 3,) * 2),
    ],
)
def test_long_run(rows, arrivals_s, epochs, basis, bounds):
    run = long_run(rows, arrivals_s, epochs=epochs)
    assert (run.basis, run.bounds) == (basis, pytest.approx(bounds))
