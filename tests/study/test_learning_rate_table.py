"""The best learning rate of each size, from the trials of a race."""

import numpy as np
import pytest
import records_factory as records

from kbatch.analysis.learning_rate import FACTOR_NAME, learning_rate_scaling

SIZES, BASE_RATE = (16, 64, 256), 0.01


def trial(size, factor, *values, steeper=0.25, **changed):
    scaling = learning_rate_scaling(
        BASE_RATE, 0.999, batch_size=size, base_batch_size=16, rule="sqrt", factor=factor
    )
    away = np.log2(factor) - steeper * np.log2(size / 16)
    own = values or (0.95 - 0.006 * away**2 + 0.001 * np.sin(9 * factor * size),)
    shown = {"learning_rate": scaling.learning_rate, "scaling": scaling} | changed
    executions = [
        records.make_execution(size, accuracies=(v,), seed=seed, **shown)
        for seed, v in enumerate(own)
    ]
    chosen = {FACTOR_NAME: factor}
    return records.make_trial(
        size, *executions, trial_id=f"{size}-{factor}", hyperparameters=chosen
    )


@pytest.fixture(scope="module")
def study():
    trials = [
        trial(size, 2.0**k) for size in SIZES for k in (-2, -1, 0, 1, 2) if (size, k) != (64, 0)
    ]
    return records.make_study(*trials, trial(64, 1.0, 0.94, 0.94, 0.94))


def test_each_size_has_a_row_with_its_best_rate(study):
    table = study.table()
    assert list(table["batch size"]) == [16, 64, 256]
    assert list(table["learning rate"]) == [0.01, 0.02, 0.08]
    assert list(table["rates tried"]) == [5, 5, 5]
    # The pair that was repeated is the one of its size.
    assert (table["runs"][1], table["validation accuracy"][1]) == (3, pytest.approx(0.94))
