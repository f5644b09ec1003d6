"""What is known of pairs of batch size and learning rate from runs of some."""

import numpy as np

from kbatch.analysis.rounds import RateModel
from kbatch.analysis.run_table import Run

FACTORS = (1 / 4, 1 / 2, 1.0, 2.0, 4.0)


def peaked(best=2.0):
    """A model of three sizes at three rates each, of which size 128 is untried."""
    pairs = [(b, a) for b in (16, 64, 128) for a in FACTORS]
    runs = [
        Run(b, a, 0, 0.95 - 0.01 * np.log2(a / best) ** 2)
        for b, a in pairs
        if b < 128 and a in (0.25, 1.0, 4.0)
    ]
    return RateModel.of(runs, pairs, larger_is_better=True, tolerance=0.01)


def test_an_untried_size_is_best_where_its_neighbours_are():
    model = peaked()
    means = dict(zip(model.pairs, model.means, strict=True))
    assert max((a for b, a in model.pairs if b == 128), key=lambda a: means[128, a]) in (
        1.0,
        2.0,
        4.0,
    )
    assert not model.counts[model.pairs.index((128, 2.0))]


def test_a_run_promises_more_where_less_is_known_and_for_sizes_that_count():
    model = peaked()
    gains = dict(zip(model.pairs, model.gains({16: 1.0, 64: 1.0, 128: 1.0}), strict=True))
    assert min(gains.values()) > -1e-9
    assert gains[16, 0.25] < gains[16, 2.0]
    assert model.gains({16: 0.0, 64: 0.0, 128: 0.0}).max() == 0
    half = model.gains({128: 0.5})
    np.testing.assert_allclose(2 * half, model.gains({128: 1.0}))


def test_of_sizes_within_the_tolerance_the_fastest_is_the_answer():
    pairs = [(16, 1.0), (64, 1.0), (256, 1.0)]
    runs = [
        Run(b, a, k, v)
        for (b, a), v in zip(pairs, (0.95, 0.95, 0.9), strict=True)
        for k in range(9)
    ]
    model = RateModel.of(runs, pairs, larger_is_better=True, tolerance=0.02)
    answer, best = model.chances({16: 3.0, 64: 2.0, 256: 1.0}, pairs)
    assert max(answer, key=answer.get) == 64
    assert best[256] < 0.05
    # Of sizes that take about the same time the smallest is preferred.
    answer, _ = model.chances({16: 1.03, 64: 1.0, 256: 0.99}, pairs)
    assert max(answer, key=answer.get) == 16


def test_pending_runs_count_as_what_is_expected_of_them():
    model = peaked()
    expected = model.with_pending([(128, 2.0), (16, 2.0)])
    np.testing.assert_array_equal(expected.means, model.means)
    own = model.pairs.index((128, 2.0))
    assert expected.covariance[own, own] < model.covariance[own, own]
    # As in one dimension: 1 / variance grows by 1 / noise.
    one = model.with_pending([(128, 2.0)]).covariance[own, own]
    np.testing.assert_allclose(1 / one, 1 / model.covariance[own, own] + 1 / model.noise)
