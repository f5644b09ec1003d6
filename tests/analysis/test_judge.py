import numpy as np
import pytest

from kbatch.analysis.judge import Run, judge

TOLERANCE = 0.01


def judged(runs, tolerance=TOLERANCE, **changed):
    return judge(runs, **{"larger_is_better": True, "tolerance": tolerance} | changed)


def runs_of(values, seconds=None, seeds=None):
    """Make runs of the sizes 16, 32, ... from values [sizes, rounds] that no example disturbs."""
    found = []
    for k, row in enumerate(values):
        for r, value in enumerate(row):
            cost = None if seconds is None else seconds[k]
            found.append(Run(16 * 2**k, 1.0, seeds[r] if seeds else r, value, cost))
    return found


def test_the_smallest_of_those_about_as_fast_as_the_fastest_is_named():
    values = np.full((4, 3), 0.9) + np.arange(3) / 1000
    found = judged(runs_of(values, [2.0, 1.04, 1.0, 1.03]), over_examples=False)
    assert found.certified == found.pairs
    assert (found.named, found.certain) == ((32, 1.0), True)
    np.testing.assert_allclose(list(found.costs.values()), [2.0, 1.04, 1.0, 1.03])


def test_pairs_are_compared_over_their_common_seeds():
    values = np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])
    runs = [run for run in runs_of(values) if (run.batch_size, run.seed) != (32, 0)]
    found = judged(runs, over_examples=False)
    assert found.rounds == {(16, 1.0): 3, (32, 1.0): 2}
    assert found.gaps[32, 1.0].low == found.gaps[32, 1.0].high == pytest.approx(0.0)


def test_a_pair_that_the_search_left_out_forbids_certainty_where_it_may_be_preferred():
    values = np.full((2, 3), 0.9)
    runs = runs_of(values, [1.0, 1.0])
    assert judged(runs, over_examples=False).certain
    for size, seconds, certain in ((64, 0.5, False), (64, 1.0, True), (8, 1.0, False)):
        dropped = Run(size, 1.0, None, None, seconds, "left_out")
        found = judged([*runs, dropped], over_examples=False)
        assert (found.certain, found.left_out) == (certain, ((size, 1.0),))
