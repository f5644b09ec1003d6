"""Trains under MirroredStrategy on two logical CPUs and prints how far accumulation is off.

Logical devices are made before TensorFlow's first use, so this runs in a process of its own. What
else needs another process is printed too: TensorFlow starts once for all of it.
"""

import json
import warnings

import keras
import numpy as np
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.training.accumulation import Accumulation


def trained(strategy, micro_batch_size, build, *, compare=True, **how):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    if micro_batch_size is not None and compare:
        kbatch.accumulate_gradients(model, micro_batch_size, **how)
    elif micro_batch_size is not None:
        Accumulation(micro_batch_size).apply(model)
    x, y = models.rows(95)  # The last batch does not share out evenly.
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(data, epochs=2, verbose=0)
    return (
        model.get_weights(),
        history.history,
        int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        [text for one in caught if "equal to the whole batch" in (text := str(one.message))],
    )


def off_by(found, expected):
    weights, losses = [], []
    for part, whole in zip(found[0], expected[0], strict=True):
        weights.append(np.linalg.norm(whole - part) / np.linalg.norm(whole))
    for part, whole in zip(found[1]["loss"], expected[1]["loss"], strict=True):
        losses.append(abs(part / whole - 1))
    return {"weights": max(weights), "loss": max(losses), "updates": found[2], "warned": found[3]}


class OnlyCompared(keras.Sequential):
    """Makes no step when it is trained."""

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
    options = {"disable_meta_optimizer": True}  # It takes longer than the steps.
    tf.config.optimizer.set_experimental_options(options)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    # Its optimizers have variables: it may be imported once the devices are made.
    from test_fingerprint import fingerprints

    results = {"fingerprints": fingerprints()}
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        # That parts are compared with the whole shows in the models below.
        whole, parts = (trained(strategy, n, clipped, compare=False) for n in (None, 4))
        results[policy] = off_by(parts, whole)
    keras.config.set_dtype_policy("float32")
    try:
        trained(strategy, 4, clipped, exact=True)
    except ValueError as refused:
        results["refused"] = str(refused)
    results["warned of"] = trained(strategy, 4, normalised)[3]
    print(json.dumps(results, default=float))
