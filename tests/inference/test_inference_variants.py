import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp, rows

from kbatch.errors import PolicyUnsupported
from kbatch.inference.call_paths import (
    changed_classes,
    inference_inputs,
    output_change,
    outputs_of,
    policy_of,
    variant,
    variants_of,
)


def nested():
    inner = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 4)(inputs)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.BatchNormalization()(inner(x)))


def policies_of(model):
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Model)]
    return {layer.dtype_policy.name for layer in layers if layer.weights}


def wrapped():
    """Layers within layers: wrapped, as a cell, as a model, and made by the layer itself."""
    layers = keras.layers
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(4)])
    inputs = keras.Input((6, 3))
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True, recurrent_initializer="zeros"))(
        inputs
    )
    x = layers.TimeDistributed(inner)(x)
    return keras.Model(
        inputs, layers.RNN(layers.SimpleRNNCell(3, recurrent_initializer="zeros"))(Block()(x))
    )


@keras.saving.register_keras_serializable("variants")
class Block(keras.layers.Layer):
    def __init__(self, policy=None, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(4, dtype=policy)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    ("make", "policy", "tolerance"),
    [
        (mlp, "bfloat16", 5e-2),
        (nested, "mixed_float16", 1e-2),
        (nested, "float64", 1e-5),
        (wrapped, "float16", 1e-2),
    ],
)
def test_a_copy_has_the_weights_in_every_layer(make, policy, tolerance):
    model = make()
    model.set_weights([w + 0.25 for w in model.get_weights()])
    before = model.get_weights()
    copy = variant(model, policy)
    assert policies_of(copy) == {policy}
    for one, other in zip(copy.get_weights(), before, strict=True):
        np.testing.assert_allclose(one.astype("float64"), other, rtol=1e-2)
    batch = rows(16)[0] if make is mlp else np.arange(96).reshape(16, 6) % 9
    if make is wrapped:
        batch = np.random.default_rng(0).normal(size=(16, 6, 3)).astype("float32")
    expected = outputs_of(model, batch)
    change = output_change(outputs_of(copy, batch), expected)
    assert change <= tolerance
    assert policies_of(model) == {"float32"}
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def preprocessing():
    """Layers whose state is more than their weights, and one of whole numbers."""
    layers = keras.layers
    numbers, words = keras.Input((4,)), keras.Input((2,), dtype="string")
    scaled = layers.Normalization()
    scaled.adapt(np.arange(40.0).reshape(10, 4))
    known = layers.StringLookup()
    known.adapt(np.array(["a", "b", "c"]))
    hashed = layers.Hashing(5000)(words)
    embedded = layers.Embedding(5000, 3)(hashed) + layers.Embedding(9, 3)(known(words))
    joined = layers.Concatenate()([scaled(numbers), layers.Flatten()(embedded)])
    doubled = layers.Lambda(lambda tensor: 2 * np.float32(1) * tensor)(joined)
    return keras.Model([numbers, words], layers.Dense(2)(keras.ops.relu(doubled) + joined))


def test_a_copy_has_what_its_layers_hold_beside_weights():
    model = preprocessing()
    numbers = np.random.default_rng(0).uniform(0, 40, (8, 4)).astype("float32")
    batch = [tf.constant(numbers), tf.constant([["a", "c"], ["b", "z"]] * 4)]
    expected = outputs_of(model, batch)
    for policy, tolerance in (("float64", 1e-5), ("float16", 1e-2), ("int8", 0.1)):
        change = output_change(outputs_of(variant(model, policy), batch), expected)
        assert change <= tolerance, policy
    np.testing.assert_array_equal(outputs_of(model, batch), expected)


def test_outputs_are_compared_where_inputs_and_outputs_are_texts():
    words, numbers = keras.Input((1,), dtype="string"), keras.Input((2,))
    known = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    named = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)(known)
    model = keras.Model([words, numbers], [keras.layers.Dense(2)(numbers), named])
    rows = [np.array([["a"], ["b"], ["c"]], dtype=object), np.ones((3, 2), "float32")]
    _, changes, _ = variants_of(model, inference_inputs(model, rows), ("float32", "bfloat16"))
    assert 0 < changes["bfloat16"] < 0.1


def test_layers_that_are_not_quantised_are_told():
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((4, 2)), layers.Conv1D(2, 2), layers.Flatten(), layers.Dense(1)]
    )
    _, _, notes = variants_of(model, inference_inputs(model), "int8")
    (note,) = (note for note in notes if note.code == "not_quantised")
    assert note.values == {"quantised": 1, "layers": 2, "others": model.layers[0].name}
    model = mlp()
    copies, changes, notes = variants_of(model, inference_inputs(model), "int8")
    assert [note.code for note in notes] == ["inputs_made"]
    assert any(w.dtype == "int8" for w in copies["int8"].weights)
    assert all(w.dtype == "float32" for w in model.weights)
    assert 0 < changes["int8"] < 0.1


def test_a_loaded_model_is_named_by_the_policy_of_its_layers(tmp_path):
    """Keras gives a loaded model the global policy, and its layers theirs."""
    layers = keras.layers
    inputs = keras.Input((4,))
    hidden = layers.Dense(16, activation="relu", dtype="mixed_float16")(inputs)
    model = keras.Model(inputs, layers.Dense(3, dtype="mixed_float16")(hidden))
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.dtype_policy.name == "float32"
    assert policy_of(loaded) == "mixed_float16"
    assert variant(loaded, "mixed_float16") is loaded
    reference = variant(loaded, "float32")
    assert policies_of(reference) == {"float32"}
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    one, other = outputs_of(loaded, batch), outputs_of(reference, batch)
    assert output_change(one, other) > 0


@pytest.mark.parametrize("form", ["arrays", "dataset", "rows"])
def test_classes_are_compared_on_all_data_that_were_given(form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4)).astype("float32")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, use_bias=False)(inputs))
    model.set_weights([np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 0.0], [0.0, 0.1]], "float32")])
    other = keras.models.clone_model(model)  # It takes another class where noise decides.
    other.set_weights([model.get_weights()[0] + np.array([[0.1, -0.1]] * 4, "float32")])
    given, rows = {"arrays": (x, x[:64]), "dataset": (by_32(x), x[:32]), "rows": (None, x[:50])}[
        form
    ]
    share, compared = changed_classes(
        model, {"float32": model, "int8": other}, given, rows, most_s=9
    )
    expected = model(x[:compared]).numpy().argmax(-1) != other(x[:compared]).numpy().argmax(-1)
    assert compared == (50 if form == "rows" else 1000)
    assert share == {"int8": pytest.approx(expected.mean())}
    assert 0.01 < share["int8"] < 0.5
    assert changed_classes(model, {"float32": model}, x, x, most_s=9) == ({}, 0)
    _, compared = changed_classes(model, {"int8": other}, x, x[:64], most_s=0)
    assert compared == 64


def by_32(x):
    return tf.data.Dataset.from_tensor_slices((x, np.zeros(len(x)))).batch(32)


@pytest.mark.filterwarnings("error")
def test_outputs_that_overflow_or_are_zero_have_an_unknown_change():
    assert output_change([np.array([np.inf])], [np.array([1.0])]) is None
    assert output_change([np.array([1.0])], [np.array([0.0])]) is None


def test_what_cannot_be_had_says_why():
    inputs = keras.Input((3,))
    without = keras.Model(inputs, keras.layers.LayerNormalization()(inputs))
    with pytest.raises(PolicyUnsupported, match=r"No layer .* int8"):
        variant(without, "int8")
