"""Models and data at the borders of what Keras trains."""

import keras
import keras_tuner
import numpy as np
import own_steps
import pytest
import small_models
import tensorflow as tf
from keras import layers
from shared_worker import shared_worker

import kbatch
from kbatch.errors import InputError

X, Y = small_models.rows(32)
ON_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with shared_worker():
        yield


def statuses(tmp_path, hypermodel, *data, objective="val_loss", **fit):
    """Search, and return how each trial ended."""
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        keras_tuner.Objective(objective, "min"),
        directory=tmp_path,
        project_name="search",
    )
    tuner.search(*data, epochs=1, verbose=0, **fit)
    return [(trial.batch_size, trial.status) for trial in kbatch.load_study(tuner).trials]


COMPLETED = [(8, "completed")]


def settings(**changed):
    return {"micro_batch_size": 4, "dtype_policy": "float32"} | changed


def test_a_model_without_a_call_is_not_profiled():
    with pytest.raises(InputError, match=r"no `call`.*`predict_function`.*model\.decoder"):
        kbatch.profile_inference(own_steps.vae(), X)


def test_a_model_that_turns_out_to_have_no_weights_goes_through_whole():
    model = keras.Sequential([layers.Flatten()])
    model.compile("sgd", "mse")
    kbatch.accumulate_gradients(model, 4)
    with pytest.warns(UserWarning, match="not have any trainable weights"):
        assert model.fit(X, X, batch_size=16, verbose=0).history["loss"] == [0]


def test_a_search_refuses_a_model_without_weights(tmp_path):
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Flatten()])
        model.compile("sgd", "mse")
        return model

    hypermodel = kbatch.BatchSizeHyperModel(build, (8,), **settings())
    with pytest.raises(ValueError, match="no trainable weights"):
        statuses(tmp_path, hypermodel, X, X, objective="loss")


def ragged_rows():
    rows = tf.RaggedTensor.from_row_lengths(np.arange(127) % 20, np.arange(32) % 3 + 3)
    return tf.data.Dataset.from_tensor_slices((rows, Y))


class MeanWord(layers.Layer):
    """Takes ragged rows of words."""

    def call(self, words):
        if isinstance(words, tf.RaggedTensor):
            words = words.to_tensor()
        return tf.reduce_mean(tf.one_hot(tf.cast(words, tf.int32), 20), axis=1)


def ragged_model():
    model = keras.Sequential([MeanWord(), layers.Dense(3)])
    model.compile("sgd", ON_LOGITS, run_eagerly=True)
    return model


def test_ragged_rows_are_cut():
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


def test_ragged_rows_are_searched_in_whole_batches(tmp_path):
    hypermodel = kbatch.BatchSizeHyperModel(ragged_model, (8,), **settings(micro_batch_size=None))
    assert statuses(tmp_path, hypermodel, ragged_rows(), objective="loss") == COMPLETED


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("exported") / "model")
    part = keras.Sequential([layers.Input((8,)), layers.Dense(4)])
    part.export(folder, verbose=False)
    return folder


def test_an_exported_model_may_be_a_layer(tmp_path, exported):
    def build():
        part = layers.TFSMLayer(exported, call_endpoint="serve")
        model = keras.Sequential([layers.Input((8,)), part, layers.Dense(3)])
        model.compile("sgd", ON_LOGITS, run_eagerly=True)
        return model

    hypermodel = kbatch.BatchSizeHyperModel(build, (8,), **settings())
    assert statuses(tmp_path, hypermodel, X, Y, validation_data=(X, Y)) == COMPLETED


def test_a_model_that_was_saved_and_loaded_is_searched(tmp_path):
    path = tmp_path / "model.keras"
    model = small_models.mlp(run_eagerly=True)
    kbatch.accumulate_gradients(model, 4).fit(X[:8], Y[:8], verbose=0)
    model.save(path)
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: keras.models.load_model(path), (8,), **settings()
    )
    assert statuses(tmp_path, hypermodel, X, Y, validation_data=(X, Y)) == COMPLETED


class OwnLoop(keras_tuner.HyperModel):
    """Trains its model in a loop of its own, and not by `model.fit`."""

    def build(self, hp):
        return small_models.mlp()

    def fit(self, hp, model, x, y, validation_data=None, callbacks=None, **kwargs):
        optimizer, loss = keras.optimizers.SGD(0.1), tf.constant(0.0)
        for rows, labels in tf.data.Dataset.from_tensor_slices((x, y)).batch(hp.get("batch_size")):
            with tf.GradientTape() as tape:
                found = model(rows, training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, found))
            weights = model.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"val_loss": float(loss)}


class Uncompiled(OwnLoop):
    def build(self, hp):
        return keras.Sequential([layers.Input((8,)), layers.Dense(3, activation="softmax")])


def test_a_hypermodel_may_train_in_a_loop_of_its_own(tmp_path):
    hypermodel = kbatch.BatchSizeHyperModel(OwnLoop(), (8,), **settings())
    assert statuses(tmp_path, hypermodel, X, Y, validation_data=(X, Y)) == COMPLETED


def test_an_uncompiled_model_is_to_be_compiled_where_it_is_built_to_be_adjusted(tmp_path):
    hypermodel = kbatch.BatchSizeHyperModel(Uncompiled(), (8,), **settings())
    with pytest.raises(keras_tuner.errors.FatalValueError, match="build function also where"):
        statuses(tmp_path, hypermodel, X, Y)


def test_a_loaded_model_that_has_another_half_policy_is_refused_with_what_to_give(tmp_path):
    path = tmp_path / "model.keras"
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    small_models.mlp().save(path)
    keras.config.set_dtype_policy(before)
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: keras.models.load_model(path), (8, 16), micro_batch_size=4
    )
    with pytest.raises(keras_tuner.errors.FatalValueError, match=r"which is loaded.*bfloat16"):
        statuses(tmp_path, hypermodel, X, Y)


def test_an_uncompiled_model_trains_whole_and_in_float32(tmp_path):
    hypermodel = kbatch.BatchSizeHyperModel(Uncompiled(), (8,))
    with pytest.warns(UserWarning, match="float32, not under mixed_float16"):
        found = statuses(tmp_path, hypermodel, X, Y, validation_data=(X, Y))
    assert found == COMPLETED
    (trial,) = kbatch.load_study(tmp_path / "search").trials
    codes = {note.code for note in trial.notes}
    assert {"compiled_late", "float32_instead", "nothing_timed"} <= codes
    assert (trial.dtype_policy, trial.micro_batch_size) == ("float32", trial.batch_size)
