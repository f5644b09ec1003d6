"""A search in one process traces the step once, and its trials train as fresh builds do."""

import keras
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch


def build(*more):
    return models.mlp(inner=(keras.layers.Dropout(0.2), keras.layers.BatchNormalization(), *more))


def searched(directory, build, *callbacks):
    """The metrics of each epoch of each execution, throughput aside."""
    # The first trial has another size than the base: its settings follow it.
    trials = searches.stock(build, (8, 32), base_batch_size=32)
    given = {"executions_per_trial": 2, "fit": {"callbacks": list(callbacks)}}
    tuner = searches.search(directory, trials, kbatch.BatchSizeTuner, **given)
    return {
        (run.batch_size, run.seed): [
            {name: value for name, value in epoch.metrics.items() if name != "samples_per_second"}
            for epoch in run.epochs
        ]
        for trial in kbatch.load_study(tuner).trials
        for run in trial.executions
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A search, and how often the loss was traced from each build to the next."""
    calls, seen, plain = [], [], keras.Model.compute_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    def counting():
        seen.append(len(calls))
        return build()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "compute_loss", counted)
        found = searched(tmp_path_factory.mktemp("shared"), counting)
    return found, np.diff([*seen, len(calls)])


def test_the_step_of_a_search_is_traced_once(shared):
    _, traced = shared
    assert sorted(traced) == [0] * (len(traced) - 1) + [traced.max()]
    assert traced.max() > 0


def test_trials_train_as_if_each_had_a_graph_of_its_own(shared, tmp_path):
    # With a function of the user's own in the model nothing is shared.
    assert shared[0] == searched(tmp_path, lambda: build(keras.layers.Lambda(lambda x: x)))


def test_a_build_function_that_draws_by_tensorflow_draws_the_same_for_each_size(tmp_path):
    drawn = []

    def drawing():
        drawn.append(float(tf.random.uniform(())))
        return build()

    searched(tmp_path, drawing)
    assert len(set(drawn)) == 2  # Of the two executions of each size.
