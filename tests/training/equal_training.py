"""Compare accumulated training with Keras's step on the whole batch."""

import functools

import keras
import numpy as np
import small_models as models
import tensorflow as tf

from kbatch.training.accumulation import Accumulation
from kbatch.training.model import build_ahead


class Averaged(keras.layers.Layer):
    """Adds two losses of its rows: a scalar, and one value for each row."""

    def call(self, x):
        # Keras adds up losses of one dtype.
        squares = keras.ops.square(keras.ops.cast(x, "float32"))
        self.add_loss(0.1 * keras.ops.mean(squares))
        self.add_loss(0.001 * keras.ops.sum(squares, axis=-1))
        return x


class Sampled(keras.layers.Layer):
    """Draws with its own seed generator and with Keras's global one."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        x += 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)
        return x + 0.1 * keras.random.uniform(keras.ops.shape(x))


MOMENTS = {"gradient_variance", "gradient_squared_norm"}


def built(model, *arrays):
    """Build a model for arrays before it trains, so that its first step is traced once."""

    def spec(rows):
        rows = tf.convert_to_tensor(rows)
        dtype = tf.float32 if rows.dtype == tf.float64 else rows.dtype  # As Keras takes arrays.
        return tf.TensorSpec((None, *rows.shape[1:]), dtype)

    build_ahead(model, keras.tree.map_structure(spec, arrays))
    return model


def accumulating(model, micro_batch_size, **settings):
    """Make a model accumulate without the comparison at its first training.

    The comparison takes as long as tracing a step. `test_parts_check.py` tests it.
    """
    return Accumulation(micro_batch_size, **settings).apply(model)


def batches_of_lengths(lengths, *arrays):
    """A dataset of batches of given lengths, with one shape, so that a step is traced once."""
    rows = tf.data.Dataset.from_tensor_slices(tuple(part[: sum(lengths)] for part in arrays))
    batches = rows.batch(1).rebatch(lengths)
    return batches.apply(tf.data.experimental.assert_cardinality(len(lengths)))


def trained(build, data, *, batch_size=32, micro_batch_size, epochs=1, eager=False, **fit):
    """Model and history after training, accumulated or with Keras's step (None)."""
    keras.utils.set_random_seed(1)
    model = build()
    if micro_batch_size is not None:
        accumulating(model, micro_batch_size)
    if eager and not model.jit_compile:
        model.run_eagerly = True  # A few steps take less time than tracing one.
    if isinstance(data, tf.data.Dataset):
        build_ahead(model, data.element_spec)
        data = (data,)
    else:
        weights = () if fit.get("sample_weight") is None else (fit["sample_weight"],)
        built(model, *data, *weights)
        fit["batch_size"] = batch_size
    history = model.fit(*data, epochs=epochs, shuffle=False, verbose=0, **fit)
    return model, history.history


@functools.cache
def trained_mlp(micro_batch_size=None, *, rows=94):
    """Model and history of the small classifier: for tests that only read them."""
    data = models.rows(rows)
    eager = micro_batch_size is None
    return trained(sgd_mlp, data, micro_batch_size=micro_batch_size, eager=eager)


def sgd_mlp(**arguments):
    """A classifier with SGD, whose steps are proportional to the gradient."""
    return models.mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **arguments)


def assert_equal_training(
    build, data, *, micro_batch_size=8, tolerance=1e-6, reference=None, eager=True, **fit
):
    """Assert that accumulation gives the same weights, losses and metrics as the whole batch.

    `reference` builds the model of the whole batch, or is its result. Weights are compared for each
    variable: ||difference|| <= tolerance ||weight||.
    """
    if isinstance(reference, tuple):
        whole = reference
    else:
        whole = trained(reference or build, data, micro_batch_size=None, eager=eager, **fit)
    parts = trained(build, data, micro_batch_size=micro_batch_size, **fit)
    assert parts[0].dtype_policy == whole[0].dtype_policy == keras.config.dtype_policy()
    assert_same_training(whole, parts, tolerance)
    assert not parts[1].keys() & MOMENTS
    return parts[0]


def assert_same_training(whole, parts, tolerance):
    (expected_model, expected), (model, found) = whole, parts
    assert_equal_weights(expected_model, model, tolerance)
    assert found.keys() - MOMENTS == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name], values, rtol=max(10 * tolerance, 2e-5), err_msg=name
        )


def assert_equal_weights(whole, parts, tolerance):
    variables = zip(whole.weights, parts.weights, strict=True)
    for first, second in variables:
        expected, found = np.asarray(first, "float64"), np.asarray(second, "float64")
        distance, size = np.linalg.norm(expected - found), np.linalg.norm(expected)
        assert distance <= tolerance * max(size, 1e-3), (first.path, distance / max(size, 1e-3))
