import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp, rows

from kbatch.errors import PolicyUnsupported
from kbatch.inference.call_paths import (
    compare_with_float32,
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
    """Layers within layers: wrapped, a cell, a model, and a layer made by another layer."""
    layers = keras.layers
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(4)])
    inputs = keras.Input((6, 3))
    lstm = layers.LSTM(2, return_sequences=True, recurrent_initializer="zeros")
    x = layers.TimeDistributed(inner)(layers.Bidirectional(lstm)(inputs))
    cell = layers.SimpleRNNCell(3, recurrent_initializer="zeros")
    return keras.Model(inputs, layers.RNN(cell)(Block()(x)))


@keras.saving.register_keras_serializable("variants")
class Block(keras.layers.Layer):
    def __init__(self, policy=None, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(4, dtype=policy)

    def call(self, x):
        return self.dense(x)


TOKENS = np.arange(96).reshape(16, 6) % 9
NUMBERS = np.random.default_rng(0).normal(size=(16, 6, 3)).astype("float32")


@pytest.mark.parametrize(
    ("make", "batch", "policy", "tolerance"),
    [
        (mlp, rows(16)[0], "bfloat16", 5e-2),
        (nested, TOKENS, "mixed_float16", 1e-2),
        (nested, TOKENS, "float64", 1e-5),
        (wrapped, NUMBERS, "float16", 1e-2),
    ],
)
def test_variant_copies_the_weights_of_every_layer(make, batch, policy, tolerance):
    model = make()
    model.set_weights([w + 0.25 for w in model.get_weights()])
    before = model.get_weights()
    copy = variant(model, policy)
    assert policies_of(copy) == {policy}
    for weight, expected in zip(copy.get_weights(), before, strict=True):
        np.testing.assert_allclose(weight.astype("float64"), expected, rtol=1e-2)
    assert output_change(outputs_of(copy, batch), outputs_of(model, batch)) <= tolerance
    assert policies_of(model) == {"float32"}
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)


def preprocessing():
    """Layers with state beside their weights, and a layer of integers."""
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


def test_variant_copies_state_beside_the_weights():
    model = preprocessing()
    numbers = np.random.default_rng(0).uniform(0, 40, (8, 4)).astype("float32")
    batch = [tf.constant(numbers), tf.constant([["a", "c"], ["b", "z"]] * 4)]
    expected = outputs_of(model, batch)
    for policy, tolerance in (("float64", 1e-5), ("float16", 1e-2), ("int8", 0.1)):
        change = output_change(outputs_of(variant(model, policy), batch), expected)
        assert change <= tolerance, policy
    np.testing.assert_array_equal(outputs_of(model, batch), expected)


def test_compare_with_float32_text_inputs_and_outputs():
    words, numbers = keras.Input((1,), dtype="string"), keras.Input((2,))
    known = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    named = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)(known)
    model = keras.Model([words, numbers], [keras.layers.Dense(2)(numbers), named])
    rows = [np.array([["a"], ["b"], ["c"]], dtype=object), np.ones((3, 2), "float32")]
    models, _ = variants_of(model, ("float32", "bfloat16"))
    sample = inference_inputs(model, rows).rows
    changes, _, _ = compare_with_float32(model, models, None, sample, most_s=9)
    assert 0 < changes["bfloat16"] < 0.1


def test_variants_of_int8_counts_layers_that_are_not_quantised():
    layers = keras.layers
    parts = [layers.Input((4, 2)), layers.Conv1D(2, 2), layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential(parts)
    _, (note,) = variants_of(model, "int8")
    assert note.code == "not_quantised"
    assert note.values == {"quantised": 1, "layers": 2, "others": model.layers[0].name}
    model = mlp()
    models, notes = variants_of(model, "int8")
    assert notes == ()
    assert any(w.dtype == "int8" for w in models["int8"].weights)
    assert all(w.dtype == "float32" for w in model.weights)
    changes, _, _ = compare_with_float32(model, models, None, rows(64)[0], most_s=9)
    assert 0 < changes["int8"] < 0.1


def test_policy_of_a_loaded_model_is_that_of_its_layers(tmp_path):
    """Keras gives the global policy to a loaded model, but not to its layers."""
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
    assert output_change(outputs_of(loaded, batch), outputs_of(reference, batch)) > 0


@pytest.mark.parametrize("form", ["arrays", "dataset", "rows"])
def test_compare_with_float32_counts_classes_over_all_data(form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4)).astype("float32")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, use_bias=False)(inputs))
    model.set_weights([np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 0.0], [0.0, 0.1]], "float32")])
    other = keras.models.clone_model(model)  # Its small noise changes some classes.
    other.set_weights([model.get_weights()[0] + np.array([[0.1, -0.1]] * 4, "float32")])
    by_32 = tf.data.Dataset.from_tensor_slices((x, np.zeros(len(x)))).batch(32)
    forms = {"arrays": (x, x[:64]), "dataset": (by_32, x[:32]), "rows": (None, x[:50])}
    models = {"float32": model, "int8": other}
    _, share, compared = compare_with_float32(model, models, *forms[form], most_s=9)
    expected = model(x[:compared]).numpy().argmax(-1) != other(x[:compared]).numpy().argmax(-1)
    assert compared == (50 if form == "rows" else 1000)
    assert share == {"int8": pytest.approx(expected.mean())}
    assert 0.01 < share["int8"] < 0.5
    assert compare_with_float32(model, {"float32": model}, x, x, most_s=9) == ({}, {}, 0)
    *_, compared = compare_with_float32(model, {"int8": other}, x, x[:64], most_s=0)
    assert compared == 64


@pytest.mark.filterwarnings("error")
def test_output_change_is_unknown_if_outputs_overflow_or_are_zero():
    assert output_change([np.array([np.inf])], [np.array([1.0])]) is None
    assert output_change([np.array([1.0])], [np.array([0.0])]) is None


def test_variant_int8_needs_a_layer_that_can_be_quantised():
    inputs = keras.Input((3,))
    without = keras.Model(inputs, keras.layers.LayerNormalization()(inputs))
    with pytest.raises(PolicyUnsupported, match=r"no layer .* quantised"):
        variant(without, "int8")
