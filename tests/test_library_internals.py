"""Assumptions about private parts of Keras and TensorFlow, by the function that makes them.

The tests of accumulation cover calls, losses, metrics, masks, BatchNormalization, applied
gradients, draws and seeds. The tests of training data cover adapters.

If a test fails with a new version of a library, change the function that it names in
`kbatch/library_internals.py`.
"""

import copy
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch import library_internals as internals

layers = keras.layers
X, Y = models.rows(8)


@pytest.fixture(scope="module")
def model():
    """A trained classifier."""
    model = models.mlp(weighted_metrics=["accuracy"], run_eagerly=True)
    model.train_on_batch(X, Y)
    return model


def added(layer):
    layer(np.ones((1, 2), "float32"))
    return internals.own_losses(layer)


def own(y, p):
    return p


def is_even(x):
    return x % 2 == 0


INNER = keras.Sequential([layers.Input((8,)), layers.Dense(2), layers.ReLU()])
NESTED = keras.Sequential([layers.Input((8,)), INNER])
TWO = {"a": keras.Input((2,)), "b": keras.Input((2,))}
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
ROWS = tf.data.Dataset.range(9)
IGNORING = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
SHAPED = layers.Lambda(lambda x: x, output_shape=(3,))
# Each function, and whether it reads the expected value.
READS = {
    "layers_of": lambda m: {NESTED, INNER, *INNER.layers} <= {*internals.layers_of(NESTED)},
    "declared_structure": lambda m: (
        internals.declared_structure(keras.Model(TWO, layers.Add()([*TWO.values()]))).keys()
        == TWO.keys()
    ),
    "declared_structure of none": lambda m: internals.declared_structure(keras.Model()) is None,
    "holds_variables": lambda m: (
        [internals.holds_variables(one) for one in (INNER, *INNER.layers)] == [False, True, False]
    ),
    "calls_in_graph": lambda m: internals.calls_in_graph(INNER.layers[0]),
    "calls_in_graph of none": lambda m: not internals.calls_in_graph(layers.Dense(2)),
    "lambda_output_shape": lambda m: internals.lambda_output_shape(SHAPED) == (3,),
    "loss_arguments": lambda m: internals.loss_arguments(IGNORING)["ignore_class"] == -1,
    "compile_arguments": lambda m: (
        {"optimizer", "loss", "metrics", "loss_weights"} <= internals.compile_arguments(m).keys()
    ),
    "rate_of": lambda m: internals.rate_of(keras.optimizers.SGD(SCHEDULE)) is SCHEDULE,
    "trained_variables": lambda m: (
        [one.path for one in internals.trained_variables(m.optimizer)]
        == [one.path for one in m.trainable_variables]
    ),
    "own_losses": lambda m: [x.shape for x in added(layers.ActivityRegularization(1.0))] == [()],
    "inputs_of_dataset": lambda m: internals.inputs_of_dataset(ROWS.cache("file")) == [ROWS],
    "cache_file": lambda m: internals.cache_file(ROWS.cache("file")) == "file",
    "cache_file in memory": lambda m: internals.cache_file(ROWS.cache()) == "",
    "cache_file of none": lambda m: internals.cache_file(ROWS) is None,
    "dataset_function": lambda m: internals.dataset_function(ROWS.map(abs)) is abs,
    "dataset_function to filter": lambda m: (
        internals.dataset_function(ROWS.filter(is_even)) is is_even
    ),
    "dataset_graph": lambda m: internals.dataset_graph(ROWS.map(abs)).get_operations(),
    "dataset_graph of none": lambda m: internals.dataset_graph(ROWS) is None,
    "local_devices": lambda m: (
        {d.name: d.memory_limit for d in internals.local_devices()}["/device:CPU:0"] > 0
    ),
    "has_started_devices": lambda m: internals.has_started_devices(),
}


@pytest.mark.parametrize("name", READS)
def test_private_attribute(name, model):
    assert READS[name](model)


def test_replaced_restores_instance_and_class_attributes():
    class Kind:
        first, second = 1, 2

    one = Kind()
    one.second = 3
    with pytest.raises(KeyError), internals.replaced([(one, "first", 0), (one, "second", 0)]):
        assert (one.first, one.second, Kind.first) == (0, 0, 1)
        raise KeyError
    assert (vars(one), one.first) == ({"second": 3}, 1)


def test_without_retracing_advice_drops_only_that_warning(caplog):
    def trace_often():
        for size in range(1, 8):
            function(tf.zeros([size]))

    function = tf.function(lambda x: x + 1)
    with internals.without_retracing_advice():
        trace_often()
        tf.get_logger().warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]
    function = tf.function(lambda x: x + 2)
    trace_often()
    assert "triggered tf.function retracing" in caplog.text  # Afterwards TensorFlow warns again.


def test_metrics_by_name(model):
    model.train_on_batch(X, Y)
    found = internals.metrics_by_name(model)
    results = model.get_metrics_result()
    assert found.keys() == results.keys()
    for name, metric in found.items():
        assert float(metric.result()) == float(results[name])


def test_metrics_in_float32():
    seen = []

    def metric(y, predicted):
        seen.append((predicted.dtype, internals.mask_of(predicted) is not None))
        return predicted[:, :, 0]

    masked = keras.Sequential([layers.Input((2,)), layers.Embedding(4, 3, mask_zero=True)])
    masked.compile("sgd", "mse", metrics=[metric], run_eagerly=True)
    internals.metrics_in_float32(masked)
    for dtype in (tf.float16, tf.bfloat16, tf.float32):
        predicted = tf.cast(masked(np.ones((1, 2))), dtype)
        internals.set_mask(predicted, tf.ones([1, 2], bool))
        masked.compute_metrics(None, tf.zeros([1, 2, 3]), predicted, None)
    assert seen == [(tf.float32, True)] * 3
    internals.metrics_in_float32(keras.Sequential())  # Not compiled.


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (ROWS.batch(4, drop_remainder=True), {"batch_size": 4, "drop_remainder": True}),
        (
            ROWS.batch(4, num_parallel_calls=2, deterministic=False),
            {"batch_size": 4, "num_parallel_calls": 2, "deterministic": "false"},
        ),
        (
            ROWS.map(abs, num_parallel_calls=2, deterministic=True),
            {"num_parallel_calls": 2, "deterministic": "true"},
        ),
        (ROWS.batch(2).rebatch(3), {"batch_sizes": 3, "drop_remainder": False}),
        (ROWS.prefetch(5), {"buffer_size": 5}),
        (
            ROWS.shuffle(6, reshuffle_each_iteration=False),
            {"buffer_size": 6, "reshuffle_each_iteration": False},
        ),
        (ROWS.repeat(7), {"count": 7}),
        (ROWS.take(7), {"count": 7}),
        (ROWS.skip(7), {"count": 7}),
    ],
)
def test_dataset_argument(dataset, arguments):
    for name, value in arguments.items():
        found = internals.dataset_argument(dataset, name)
        assert (found.numpy() if tf.is_tensor(found) else found) == value


class Tuner(keras_tuner.RandomSearch):
    """A search of one trial that uses the functions under test."""

    def run_trial(self, trial, *args, **kwargs):
        board = keras.callbacks.TensorBoard(self.project_dir)
        self.copies = internals.trial_callbacks(self, trial, [board], 1)
        callbacks = self.copies[1:]
        hp = trial.hyperparameters
        self.model = internals.built_by(self, lambda: self.hypermodel.build(hp))
        self.history = self.model.fit(*args, callbacks=callbacks, **kwargs)
        internals.keep_build_config(self, trial.trial_id, self.model)
        self.found = internals.trial_metrics(self.history, self.oracle.objective)
        return self.history


@pytest.fixture(scope="module")
def tuner(tmp_path_factory):
    """A finished search."""
    folder = tmp_path_factory.mktemp("search")
    objective = keras_tuner.Objective("loss", "min")
    tuner = Tuner(
        lambda hp: models.mlp(run_eagerly=True),
        objective=objective,
        max_trials=1,
        optimizer="adam",
        directory=folder,
        project_name="p",
    )
    tuner.search(X, Y, verbose=0)
    return tuner


def test_auto_jit_models_lists_models_compiled_with_auto():
    given = {"auto": "auto", True: True, False: False, "default": None}
    with internals.auto_jit_models() as found:
        built = {name: keras.Sequential([layers.Dense(1)]) for name in (*given, "again")}
        for name, value in given.items():
            built[name].compile("sgd", "mse", **({} if value is None else {"jit_compile": value}))
        for value in ("auto", False):
            built["again"].compile("sgd", "mse", jit_compile=value)
    assert found == [built["auto"], built["default"]]
    built[True].compile("sgd", "mse")  # After the context.
    assert len(found) == 2


def test_compiling_gives_same_dropout_under_xla(model):
    seed = keras.random.SeedGenerator(1)  # TensorFlow itself draws from a constant.

    def drawn():
        return keras.random.dropout(tf.ones([64]), 0.5, seed=seed)

    def compiled():
        with internals.compiling(model):
            return drawn()

    found = []
    for function in (tf.function(drawn), tf.function(compiled, jit_compile=True)):
        seed.state.assign([3, 7])
        found.append(function().numpy())
    np.testing.assert_array_equal(*found)


def test_scaled_losses_lists_losses():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    with internals.scaled_losses(optimizer) as losses:
        assert float(optimizer.scale_loss(2.0)) == 16.0
    assert losses == [2.0]
    assert float(optimizer.scale_loss(2.0)) == 16.0
    assert losses == [2.0]


def test_is_recorded_and_stopped_tapes():
    one, other = tf.constant(1.0), tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(one)
        assert internals.is_recorded([one])
        assert not internals.is_recorded([other])
        with internals.stopped_tapes():
            kept = 3 * one
        assert tape.gradient(one + kept, one) == 1.0
    assert not internals.is_recorded([one])


def test_keras_tuner_functions_in_a_search(tuner, tmp_path):
    (trial,) = tuner.oracle.trials.values()
    assert tuner.history.params["epochs"] == 1
    assert tuner.found["loss"] == tuner.history.history["loss"][0]
    assert trial.trial_id in Path(tuner.copies[0].log_dir).parts
    assert trial.metrics.exists("loss")  # Its callback reported the epoch.
    assert isinstance(
        tuner.model.optimizer, keras.optimizers.Adam
    )  # The optimizer of the tuner, not of the model.
    assert isinstance(internals.build_again(tuner, trial.hyperparameters), keras.Model)
    assert "build_config" in "".join(path.name for path in Path(tuner.project_dir).glob("*/*"))
    assert internals.trial_metrics({"loss": 2.0}, tuner.oracle.objective) == {"loss": 2.0}
    with pytest.raises(keras_tuner.errors.FatalTypeError):
        internals.trial_metrics("text", tuner.oracle.objective)
    assert str(internals.project_directory(tuner.oracle)) == tuner.project_dir
    assert not internals.is_oracle_elsewhere()
    moved = copy.copy(tuner)
    moved.oracle = copy.copy(tuner.oracle)
    internals.move_project(moved, tmp_path / "elsewhere")
    assert Path(moved.project_dir) == tmp_path / "elsewhere"
    assert str(internals.project_directory(moved.oracle)) == moved.project_dir != tuner.project_dir


def test_fail_at_once_without_memory_before_devices_start(monkeypatch):
    fresh = internals.context.Context()
    monkeypatch.setattr(internals.context, "context", lambda: fresh)
    internals.fail_at_once_without_memory()
    assert fresh.config.gpu_options.experimental.disallow_retry_on_allocation_failure
    monkeypatch.undo()
    internals.fail_at_once_without_memory()
    options = internals.context.context().config.gpu_options
    assert not options.experimental.disallow_retry_on_allocation_failure


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_kept_kernels_clears_only_after_draws(wanted, draws):
    def stateful():
        return float(tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32, seed=1, seed2=2)[0])

    tf.random.set_seed(0)
    with internals.kept_kernels(lambda: wanted):
        first, second = stateful(), stateful()
        if draws:
            tf.random.uniform(())
        tf.random.set_seed(0)
        third = stateful()
        keras.utils.clear_session()
        found = first, second, third, stateful()
    assert len(set(found)) == (4 if wanted and not draws else 2)
    tf.random.set_seed(0)
    assert stateful() == first
