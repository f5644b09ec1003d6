"""Models and data at the borders of what Keras trains."""

import keras
import keras_tuner
import numpy as np
import own_steps
import pytest
import small_models
import tensorflow as tf
from keras import layers
from records_factory import make_search, make_study

import kbatch
from kbatch.errors import InputError

X, Y = small_models.rows(32)
ON_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def searched(tmp_path, build, *data, sizes=(8,), objective="val_loss", fit=None, **settings):
    """Search, and return the trials."""
    given = {"micro_batch_size": 4, "dtype_policy": "float32"} | settings
    tuner = kbatch.BatchSizeTuner(
        kbatch.BatchSizeHyperModel(build, sizes, **given),
        keras_tuner.Objective(objective, "min"),
        strategy="grid",
        directory=tmp_path,
        project_name="search",
    )
    tuner.search(*data, epochs=1, verbose=0, **(fit or {}))
    return kbatch.load_study(tuner).trials


def test_profile_inference_refuses_a_model_without_call():
    with pytest.raises(InputError, match=r"no `call`.*model\.decoder"):
        kbatch.profile_inference(own_steps.vae(), X)


class MeanWord(layers.Layer):
    """Takes ragged rows of words."""

    def call(self, words):
        if isinstance(words, tf.RaggedTensor):
            words = words.to_tensor()
        return tf.reduce_mean(tf.one_hot(tf.cast(words, tf.int32), 20), axis=1)


def ragged_rows():
    rows = tf.RaggedTensor.from_row_lengths(np.arange(127) % 20, np.arange(32) % 3 + 3)
    return tf.data.Dataset.from_tensor_slices((rows, Y))


def ragged_model():
    return small_models.compiled([MeanWord(), layers.Dense(3)], "sgd", ON_LOGITS, run_eagerly=True)


def test_accumulate_gradients_cuts_ragged_rows():
    def trained(micro_batch_size=None):
        keras.utils.set_random_seed(0)
        model = ragged_model()
        model.build((None, None))
        model.run_eagerly = micro_batch_size is None
        if micro_batch_size:
            kbatch.accumulate_gradients(model, micro_batch_size)
        model.fit(ragged_rows().batch(12), verbose=0)
        return model.get_weights()

    # Rows are padded to the longest beside them: here that has five words in every part.
    with pytest.warns(UserWarning, match="depend on other rows"):
        found = trained(5)
    for parts, whole in zip(found, trained(), strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ragged rows", "an exported layer", "saved and loaded"])
def test_search_trains_unusual_models_and_data(tmp_path, kind):
    build, data, more = ragged_model, (ragged_rows(),), {"micro_batch_size": None}
    if kind != "ragged rows":
        data, more = (X, Y), {"fit": {"validation_split": 0.5}}
    if kind == "an exported layer":
        folder = str(tmp_path / "exported")
        keras.Sequential([layers.Input((8,)), layers.Dense(4)]).export(folder, verbose=False)

        def build():
            part = layers.TFSMLayer(folder, call_endpoint="serve")
            parts = [layers.Input((8,)), part, layers.Dense(3)]
            return small_models.compiled(parts, "sgd", ON_LOGITS, run_eagerly=True)

    elif kind == "saved and loaded":
        model = kbatch.accumulate_gradients(small_models.linear(run_eagerly=True), 4)
        model.fit(X[:8], Y[:8], verbose=0)
        model.save(tmp_path / "model.keras")

        def build():
            return keras.models.load_model(tmp_path / "model.keras")

    (trial,) = searched(tmp_path, build, *data, objective="loss", **more)
    assert (trial.batch_size, trial.status) == (8, "completed")


class Uncompiled(keras_tuner.HyperModel):
    """Trains its model in a loop of its own, and not by `model.fit`."""

    def build(self, hp):
        return keras.Sequential([layers.Input((8,)), layers.Dense(3, activation="softmax")])

    def fit(self, hp, model, x, y, validation_data=None, callbacks=None, **kwargs):
        optimizer, loss = keras.optimizers.SGD(0.1), tf.constant(0.0)
        for rows, labels in tf.data.Dataset.from_tensor_slices((x, y)).batch(hp.get("batch_size")):
            with tf.GradientTape() as tape:
                found = model(rows, training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, found))
            weights = model.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"val_loss": float(loss)}


class OwnFit(keras_tuner.HyperModel):
    """Trains by `model.fit`, with an option of its own."""

    def build(self, hp):
        return small_models.stock(optimizer=keras.optimizers.SGD(0.5))

    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, shuffle=False, **kwargs)


def test_search_hypermodel_with_own_fit_sets_only_the_batch_size(tmp_path):
    fit = {"validation_data": (X, Y)}
    given = {"micro_batch_size": "auto", "dtype_policy": None, "sizes": (4, 8), "fit": fit}
    for trial in searched(tmp_path, OwnFit(), X, Y, learning_rate_scaling="auto", **given):
        run = trial.last
        assert (run.status, run.plan, run.scaling) == ("completed", None, None)
        assert run.learning_rate == pytest.approx(0.5)
        assert run.batch_size_seen == run.micro_batch_size == run.batch_size
        assert (run.dtype_policy, run.steps_per_execution, run.notes) == ("float32", 1, ())


@pytest.mark.parametrize(
    "setting",
    [{"micro_batch_size": 4}, {"learning_rate_scaling": "sqrt"}, {"steps_per_execution": 8}],
    ids=lambda setting: next(iter(setting)),
)
def test_hypermodel_with_own_fit_refuses_other_settings(setting):
    with pytest.raises(InputError, match=f"leave `{next(iter(setting))}` out"):
        kbatch.BatchSizeHyperModel(OwnFit(), (8, 16), **setting)


@pytest.mark.parametrize(
    ("build", "objective", "why"),
    [
        (OwnFit, "val_accuracy", "own_fit"),
        (OwnFit, None, "returned_number"),
        (small_models.mlp, ["val_accuracy", "val_loss"], "several_objectives"),
        (small_models.mlp, "samples_per_second", "time"),
        (small_models.mlp, keras_tuner.Objective("seconds_to_target", "min"), "time"),
        (small_models.mlp, "val_accuracy", None),
    ],
)
def test_tuner_runs_a_grid_if_a_race_is_impossible(tmp_path, build, objective, why):
    build = build() if build is OwnFit else build
    sizes = {"batch_sizes": (8, 16), "strategy": "race"}
    tuner = kbatch.BatchSizeTuner(build, objective, directory=tmp_path, **sizes)
    study_settings = tuner.study_settings
    chosen = study_settings.get("grid_because"), study_settings["strategy"]
    assert chosen == (why, "grid" if why else "race")
    study = make_study(search=make_search(**study_settings))
    assert [n.values["why"] for n in study.notes if n.code == "grid_because"] == [why] * bool(why)


def without_weights():
    return small_models.compiled([layers.Input((8,)), layers.Flatten()], "sgd", "mse")


def test_search_refuses_no_weights_and_a_loaded_policy(tmp_path):
    with pytest.raises(ValueError, match="must have trainable weights"):
        searched(tmp_path / "1", without_weights, X, X, objective="loss")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    small_models.mlp().save(path := tmp_path / "model.keras")
    keras.config.set_dtype_policy(before)
    half = {"sizes": (8, 16), "dtype_policy": None}
    with pytest.raises(keras_tuner.errors.FatalValueError, match=r"loads a saved model.*bfloat16"):
        searched(tmp_path / "3", lambda: keras.models.load_model(path), X, Y, **half)


def test_search_hypermodel_that_trains_in_its_own_loop(tmp_path):
    """It compiles the model in `fit`, and kbatch sets the batch size alone."""
    given = {"micro_batch_size": "auto", "dtype_policy": None, "fit": {"validation_data": (X, Y)}}
    (trial,) = searched(tmp_path, Uncompiled(), X, Y, **given)
    assert {note.code for note in trial.notes} == {"nothing_timed"}
    assert (trial.status, trial.dtype_policy, trial.last.plan) == ("completed", "float32", None)
    run = trial.last
    assert run.micro_batch_size == trial.batch_size
    assert (run.examples_seen, run.updates, run.train_s, run.total_s) == (None,) * 4
