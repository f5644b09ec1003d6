"""Accumulation under MirroredStrategy on two logical CPUs, compared with Keras's step there.

Logical devices are made before TensorFlow's first use, so `python test_mirrored_training.py` trains
and prints how far the two are apart.
"""

import json
import warnings

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from own_process import printed, two_replicas

import kbatch
from kbatch.training.accumulation import Accumulation

pytestmark = pytest.mark.slow


def trained(strategy, build, change=lambda model: model):
    """Weights, losses and updates of a training run whose last batch has an odd number of rows."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = change(build())
    data = tf.data.Dataset.from_tensor_slices(models.rows(95)).batch(32)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    return model.get_weights(), losses, int(keras.ops.convert_to_numpy(model.optimizer.iterations))


class OnlyCompared(keras.Sequential):
    """Its `fit` makes no step."""

    def fit(self, *args, **kwargs):
        return keras.callbacks.History()


def normalised():
    layers = keras.layers
    model = OnlyCompared([layers.Input((8,)), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def clipped():
    return models.mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05))


def main():
    strategy = two_replicas()
    results = {}
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        weights, losses, updates = trained(strategy, clipped, Accumulation(4).apply)
        whole, expected, _ = trained(strategy, clipped)
        pairs = zip(weights, whole, strict=True)
        apart = max(np.linalg.norm(two - one) / np.linalg.norm(one) for two, one in pairs)
        results[policy] = apart, np.max(np.abs(np.divide(losses, expected) - 1)), updates
    keras.config.set_dtype_policy("float32")
    with strategy.scope():
        compared, refused = normalised(), clipped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kbatch.accumulate_gradients(compared, 4).fit(*models.rows(64))
    results["warned of"] = [str(one.message) for one in caught]
    try:
        kbatch.accumulate_gradients(refused, 4, exact=True)
    except ValueError as error:
        results["refused"] = str(error)
    print(json.dumps(results, default=float))


@pytest.fixture(scope="module")
def found():
    return printed(__file__)


@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 1e-6), ("mixed_float16", 2e-3)])
def test_accumulation_on_two_replicas_equals_mirrored_strategy(found, policy, tolerance):
    weights, loss, updates = found[policy]
    assert weights <= tolerance
    assert loss <= max(tolerance, 1e-5)
    assert updates == 2 * 3


def test_two_replicas_compare_parts_and_refuse_exact(found):
    (text,) = (one for one in found["warned of"] if "the whole batch" in one)
    assert "batch_normalization (BatchNormalization); the loss" in text
    assert "requires one device" in found["refused"]


if __name__ == "__main__":
    main()
