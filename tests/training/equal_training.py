"""Accumulated training held against Keras's own step on the whole batch."""

import keras
import numpy as np
import tensorflow as tf

import kbatch
from kbatch.training.model import build_ahead

MOMENTS = {"gradient_variance", "gradient_squared_norm"}


def built(model, *arrays):
    """Build a model for arrays before it trains: its first step is then traced once, not twice."""

    def spec(rows):
        rows = tf.convert_to_tensor(rows)
        dtype = tf.float32 if rows.dtype == tf.float64 else rows.dtype  # As Keras takes arrays.
        return tf.TensorSpec((None, *rows.shape[1:]), dtype)

    build_ahead(model, keras.tree.map_structure(spec, arrays))
    return model


def trained(build, data, *, batch_size, micro_batch_size, epochs=2, eager=False, **fit):
    """Model and history after training, accumulated or (None) with Keras's own step."""
    keras.utils.set_random_seed(1)
    model = build()
    if micro_batch_size is not None:
        kbatch.accumulate_gradients(model, micro_batch_size)
    if eager and not model.jit_compile:
        model.run_eagerly = True  # A few steps take less time than tracing one.
    weights = () if fit.get("sample_weight") is None else (fit["sample_weight"],)
    built(model, *data, *weights)
    history = model.fit(
        *data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **fit
    )
    return model, history.history


def assert_equal_training(
    build,
    data,
    *,
    batch_size=32,
    micro_batch_size=8,
    tolerance=1e-6,
    reference=None,
    eager=True,
    **fit,
):
    """Asserts equal weights, losses and metrics after two epochs.

    Weights are compared per variable: ||difference|| <= tolerance ||weight||.
    """
    arguments = {"batch_size": batch_size, **fit}
    reference = reference or build
    whole, expected = trained(reference, data, micro_batch_size=None, eager=eager, **arguments)
    parts, found = trained(build, data, micro_batch_size=micro_batch_size, **arguments)
    assert parts.dtype_policy == whole.dtype_policy == keras.config.dtype_policy()
    assert_equal_weights(whole, parts, tolerance)
    assert found.keys() - MOMENTS == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name], values, rtol=max(10 * tolerance, 2e-5), err_msg=name
        )
    return parts


def assert_equal_weights(whole, parts, tolerance):
    variables = zip(whole.weights, parts.weights, strict=True)
    for first, second in variables:
        expected, found = np.asarray(first, "float64"), np.asarray(second, "float64")
        distance, size = np.linalg.norm(expected - found), np.linalg.norm(expected)
        assert distance <= tolerance * max(size, 1e-3), (first.path, distance / max(size, 1e-3))
