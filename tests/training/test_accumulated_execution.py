"""Accumulation in each way in which Keras runs a train step, and refused models."""

import subprocess
import sys

import keras
import pytest
import small_models as models
import tensorflow as tf
from equal_training import (
    accumulating,
    assert_equal_training,
    assert_equal_weights,
    built,
    sgd_mlp,
    trained_mlp,
)

import kbatch
from kbatch.training.model import uninstall_step

X, Y = models.rows(94)


@pytest.mark.parametrize(
    ("arguments", "micro_batch_size"),
    [
        ({"run_eagerly": True}, 12),
        ({"steps_per_execution": 3}, 5),
        ({"jit_compile": True}, 5),
        pytest.param({"jit_compile": True}, 200, marks=pytest.mark.slow),
    ],
)
def test_accumulation_equals_whole_batch_in_eager_and_xla_execution(arguments, micro_batch_size):
    # XLA compiles each length. A batch of 32 has a rest, a batch of 1 is less than a micro-batch.
    rows = (32 if micro_batch_size == 5 else 33) if "jit_compile" in arguments else 94
    assert_equal_training(
        lambda: sgd_mlp(**arguments),
        models.rows(rows),
        micro_batch_size=micro_batch_size,
        reference=trained_mlp(rows=rows),
    )


def test_accumulation_makes_no_update_after_data_of_unknown_length():
    """After data of unknown length Keras runs its step once more, without data."""
    found = []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        model = models.mlp(optimizer=keras.optimizers.SGD(0.1, weight_decay=0.1))
        accumulating(model, 4, moments_every=2)
        model.run_eagerly = known  # There is no such step in eager execution.
        data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
        built(model, X, Y)
        model.fit(data if known else data.filter(lambda *_: True), epochs=2, verbose=0)
        assert int(model.optimizer.iterations) == 2 * 2
        found.append(model)
    assert_equal_weights(*found, 1e-6)


def test_accumulate_gradients_again_changes_micro_batch_size():
    sizes = []

    class Spy(keras.layers.Layer):
        def call(self, x):
            sizes.append(x.shape[0])
            return x

    model = keras.Sequential([keras.layers.Input((8,)), Spy(), keras.layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=True)
    for micro_batch_size in (8, 4):
        kbatch.accumulate_gradients(model, micro_batch_size)
        model.train_on_batch(X[:16], X[:16, :3])  # The first call compares parts with the whole.
        sizes.clear()
        model.train_on_batch(X[:16], X[:16, :3])
        assert sizes.count(micro_batch_size) == 16 // micro_batch_size


@pytest.mark.slow
def test_saved_accumulating_model_loads_without_kbatch(tmp_path):
    model, _ = trained_mlp(8)
    model.save(tmp_path / "model.keras")
    code = (
        "import keras, sys; model = keras.models.load_model('model.keras');"
        "assert 'kbatch' not in sys.modules; print(model.optimizer.iterations.numpy())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == "3", done.stderr


def test_clone_of_accumulating_model_is_plain():
    clone = keras.models.clone_model(kbatch.accumulate_gradients(models.mlp(), 8))
    assert "train_step" not in vars(clone)


def stateful():
    kept = keras.layers.LSTM(3, stateful=True)
    return models.compiled([keras.layers.Input((4, 2), batch_size=8), kept], "sgd", "mse")


def unreduced():
    return models.mlp(loss=keras.losses.MeanSquaredError(reduction=None))


def accumulating_by_keras():
    inner = keras.optimizers.SGD(gradient_accumulation_steps=4)
    return models.mlp(optimizer=keras.optimizers.LossScaleOptimizer(inner))


@pytest.mark.parametrize(
    ("build", "given", "error", "message"),
    [
        (keras.Sequential, {}, ValueError, "must be compiled"),
        (accumulating_by_keras, {}, ValueError, "gradient_accumulation_steps=4"),
        (unreduced, {}, ValueError, "reduction=None"),
        (stateful, {}, ValueError, "stateful=False"),
        (models.mlp, {"exact": 3}, TypeError, "exact=3"),
        (models.mlp, {"exact": True, "moments_every": 8}, ValueError, "moments_every=8"),
        (models.mlp, {"micro_batch_size": 0}, ValueError, "micro_batch_size=0"),
        (models.mlp, {"moments_every": -1}, ValueError, "moments_every=-1"),
        (models.mlp, {"moments_every": False}, TypeError, "moments_every=False"),
        (models.mlp, {"micro_batch_size": 2.5}, TypeError, "micro_batch_size=2.5"),
    ],
)
def test_accumulate_gradients_refuses_models_and_arguments(build, given, error, message):
    with pytest.raises(error, match=message):
        kbatch.accumulate_gradients(build(), **{"micro_batch_size": 8} | given)


class OfSparseRows(keras.Model):
    """Accepts sparse rows: a model with an `Input` would make them dense."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(3, "softmax")

    def call(self, x):
        return self.last(self.first(x))


def of_sparse_rows(optimizer, **arguments):
    keras.utils.set_random_seed(1)
    model = OfSparseRows()
    model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    return model


def sparse(x, y):
    return tf.sparse.from_dense(tf.where(x > 0.5, x, 0)), y


@pytest.mark.parametrize("settings", [{}, {"exact": True}])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.filterwarnings("error:.*whole batch:UserWarning")
def test_accumulation_equals_whole_batch_for_sparse_rows(settings, eager):
    """Three batches, the last one of 4 rows."""
    data = tf.data.Dataset.from_tensor_slices((X[:64], Y[:64])).batch(30).map(sparse)
    whole = of_sparse_rows("sgd", run_eagerly=True)
    parts = of_sparse_rows("sgd", run_eagerly=eager)
    kbatch.accumulate_gradients(parts, 8, **settings)
    for model in (whole, parts):
        model.fit(data, shuffle=False, verbose=0)
    assert_equal_weights(whole, parts, 1e-6)


@pytest.mark.parametrize("settings", [{}, {"exact": True}])
def test_accumulation_leaves_frozen_model_whole(settings):
    model = accumulating(models.linear(), 8, **settings)
    model.trainable = False
    with pytest.warns(UserWarning, match="not have any trainable weights"):
        found = model.fit(X[:32], Y[:32], batch_size=16, verbose=0).history["loss"]
    assert found == pytest.approx([model.evaluate(X[:32], Y[:32], verbose=0)], rel=1e-5)


def test_accumulation_checks_model_compiled_again():
    model = kbatch.accumulate_gradients(models.mlp(), 8)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=4), "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        model.train_on_batch(X[:32], Y[:32])


def test_exact_runs_assigned_train_step_and_uninstall_restores_it():
    model, seen = models.mlp(run_eagerly=True), []

    def step(data):
        seen.append(len(data[0]))
        return keras.Model.train_step(model, data)

    model.train_step = step
    kbatch.accumulate_gradients(model, 12, exact=True).train_on_batch(X[:32], Y[:32])
    assert seen == [32]
    assert int(model.optimizer.iterations) == 1
    uninstall_step(model)
    assert model.train_step is step


@pytest.mark.parametrize(
    ("loss", "rows", "message"), [(None, 32, "must have a loss"), ("mse", 30, "number of rows")]
)
def test_accumulation_refuses_missing_loss_and_parts_of_different_length(loss, rows, message):
    model = models.compiled([keras.layers.Input((8,)), keras.layers.Dense(3)], "sgd", loss)
    kbatch.accumulate_gradients(model, 8)
    with pytest.raises(ValueError, match=message):
        model.train_on_batch(X[:32], Y[:rows])
