"""The shared graph of a search: traced once, with the results of separate models."""

import keras
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.training.model import compiled_if_full


def build(*more):
    return models.mlp(inner=(keras.layers.Dropout(0.2), keras.layers.BatchNormalization(), *more))


def searched(directory, build, executions=1):
    """Return the metrics of each epoch of each run, without throughput."""
    # The first trial does not have the base size, so its settings are scaled.
    trials = searches.stock(build, (8, 32), base_batch_size=32)
    arguments = {"executions_per_trial": executions}
    tuner = searches.search(directory, trials, kbatch.BatchSizeTuner, **arguments)
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
    """A search, and how often the loss was traced between builds."""
    calls, seen, plain = [], [], keras.Model.compute_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    def counting():
        seen.append(len(calls))
        return build()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "compute_loss", counted)
        metrics = searched(tmp_path_factory.mktemp("shared"), counting, executions=2)
    return metrics, np.diff([*seen, len(calls)])


def test_search_traces_train_step_once(shared):
    _, traced = shared
    assert sorted(traced) == [0] * (len(traced) - 1) + [traced.max()]
    assert traced.max() > 0


def test_shared_graph_trains_as_separate_graphs(shared, tmp_path):
    # A model with a custom function is not shared.
    separate = searched(tmp_path, lambda: build(keras.layers.Lambda(lambda x: x)))
    assert separate == {run: metrics for run, metrics in shared[0].items() if run in separate}
    assert len(separate) == 2 and len(shared[0]) == 4


@pytest.mark.slow
def test_search_with_xla_has_equal_metrics(tmp_path):
    # At both sizes, 94 rows end with a batch that is not full.
    def compiled():
        model = build()
        model.jit_compile = True
        return model

    plain = searched(tmp_path / "plain", lambda: build())
    by_xla = searched(tmp_path / "xla", compiled)
    assert plain.keys() == by_xla.keys()
    for run, epochs in plain.items():
        for one, other in zip(epochs, by_xla[run], strict=True):
            np.testing.assert_allclose([*one.values()], [*other.values()], rtol=1e-6, atol=1e-7)


def test_compiled_if_full_compiles_no_other_batch():
    model, full_rows, says = build(), tf.Variable(3), set()

    @tf.function(input_signature=[tf.TensorSpec([None, 8])], autograph=False)
    def step(data):
        def count(rows):  # XLA has no texts.
            says.add(bool(model.jit_compile))
            return {"length": tf.strings.length(tf.strings.as_string(rows[0, 0]))}

        return compiled_if_full(count, data, full_rows, model)

    assert step(tf.zeros([4, 8]))["length"] > 0
    with pytest.raises(tf.errors.OpError, match="XLA"):
        step(tf.zeros([3, 8]))
    assert says == {True, False}
    assert not model.jit_compile


def test_build_draws_equal_tensorflow_numbers_for_each_size(tmp_path):
    drawn = []

    def drawing():
        drawn.append(float(tf.random.uniform(())))
        return models.linear()

    hypermodel = searches.stock(drawing, (8, 32))
    arguments = {"executions_per_trial": 2, "objective": "loss"}
    searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    assert len(set(drawn)) == 2  # One for each of the two runs of a size.
