"""Sizes of a search train a model of words by one rule, whole or in parts."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches

from kbatch.search.execution import Execution

RNG = np.random.default_rng(0)
TOKENS = np.minimum(RNG.zipf(1.3, (64, 12)), 40) - 1
LABELS = RNG.integers(0, 3, 64)


def build():
    layers = [
        keras.layers.Input((12,), dtype="int32"),
        keras.layers.Embedding(40, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, activation="softmax", dtype="float32"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.RMSprop(0.05), "sparse_categorical_crossentropy")
    return model


def trained(micro_batch_size, **arguments):
    """The embedding after three updates, and the record of the execution."""
    hypermodel = searches.hypermodel(
        build, (64,), micro_batch_size=micro_batch_size, dtype_policy="float32", **arguments
    )
    hp = keras_tuner.HyperParameters()
    model = hypermodel.build(hp)
    before = np.asarray(model.trainable_variables[0])
    for _ in range(3):
        model.train_on_batch(TOKENS, LABELS)
    return np.asarray(model.trainable_variables[0]) - before


def test_an_embedding_trains_equally_whole_and_in_parts():
    whole, parts = trained(None), trained(16)
    assert np.linalg.norm(whole - parts) <= 1e-5 * np.linalg.norm(whole)


def test_on_request_whole_batches_train_as_keras_does():
    keras.utils.set_random_seed(0)
    plain = build()
    before = np.asarray(plain.trainable_variables[0])
    for _ in range(3):
        plain.train_on_batch(TOKENS, LABELS)
    expected = np.asarray(plain.trainable_variables[0]) - before
    found = trained(None, sparse_gradients="keras")
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("micro_batch_size", "sparse_gradients", "note"),
    [
        (None, "summed", "added up over equal indices"),
        (16, "keras", "train otherwise"),
        (None, "keras", None),
    ],
)
def test_the_record_says_which_rule_was_followed(micro_batch_size, sparse_gradients, note):
    hypermodel = searches.hypermodel(
        build, (64,), micro_batch_size=micro_batch_size, sparse_gradients=sparse_gradients
    )
    hp = keras_tuner.HyperParameters()
    model = hypermodel.build(hp)
    micro_batch = hypermodel._micro_batch(hp, model, directory=None)
    record = Execution(model, hypermodel._plan(hp, None, ()), None, micro_batch).so_far()
    assert record.sparse_gradients == sparse_gradients
    assert hypermodel.settings["sparse_gradients"] == sparse_gradients
    notes = [text for text in record.notes if "indices" in text]
    assert len(notes) == (note is not None) and all(note in text for text in notes)


def test_another_rule_is_refused():
    with pytest.raises(ValueError, match="sparse_gradients='dense'"):
        searches.hypermodel(sparse_gradients="dense")
