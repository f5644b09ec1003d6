"""The oracle: the grid in one order from wherever it goes on, and the best of its trials."""

import keras_tuner
import pytest
from keras_tuner.src.engine.trial import TrialStatus

from kbatch.search.space import grid, untried_in_grid


def plain():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16, 32])
    space.Choice("units", [4, 2, 8], default=2)
    space.Boolean("bias")
    space.Fixed("depth", 3)
    return space


def conditional():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16])
    space.Choice("kind", ["mlp", "cnn"])
    with space.conditional_scope("kind", ["cnn"]):
        space.Int("filters", 4, 12, step=4)
    with space.conditional_scope("kind", ["mlp"]):
        space.Float("rate", 0.1, 0.3, step=0.1)
    return space


@pytest.mark.parametrize("space", [plain, conditional])
def test_the_order_is_that_of_keras_tuners_grid_search_from_wherever_it_goes_on(space):
    oracle = keras_tuner.oracles.GridSearchOracle(
        keras_tuner.Objective("loss", "min"), hyperparameters=space()
    )
    oracle._save_trial = oracle.save = lambda *_: None
    oracle.verbose = 0
    found = []
    while (trial := oracle.create_trial("one")).status != TrialStatus.STOPPED:
        found.append(trial.hyperparameters.values)
        oracle.update_trial(trial.trial_id, {"loss": 0.0})
        trial.status = TrialStatus.COMPLETED
        oracle.end_trial(trial)
    assert list(grid(space())) == found
    for ended in range(len(found) + 1):
        assert list(untried_in_grid(space(), found[:ended])) == found[ended:]


def test_a_hyperparameter_found_later_counts_as_its_default_in_the_trials_before():
    space = plain()
    tried = list(grid(space))
    space.Choice("late", ["a", "b"])
    left = list(untried_in_grid(space, tried))
    assert len(left) == len(tried)
    assert {values["late"] for values in left} == {"b"}


def test_a_range_without_a_step_gives_ascending_samples_after_its_default():
    space = keras_tuner.HyperParameters()
    space.Float("rate", 0.0, 1.0)
    found = [values["rate"] for values in grid(space)]
    assert found == sorted(found)
    assert (len(found), type(found[1])) == (11, float)
