"""Searches under MirroredStrategy on two logical CPUs and prints what was recorded.

Logical devices are made before TensorFlow's first use, so this runs in a process of its own.
"""

import dataclasses
import json
import sys

import keras
import keras_tuner
import numpy as np
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.memory.probe import ProcessProbes
from kbatch.memory.workload import Workload
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import sample_of

ROWS = 94


def searched(directory, name, strategy, data, micro_batch_size=4, batch_sizes=(8, 32)):
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: models.mlp(optimizer="sgd"),
        batch_sizes,
        micro_batch_size=micro_batch_size,
        dtype_policy="float32",
        seed=0,
    )
    tuner = keras_tuner.GridSearch(
        hypermodel,
        "val_accuracy",
        directory=directory,
        project_name=name,
        distribution_strategy=strategy,
    )
    tuner.search(*data, validation_data=models.rows(40, seed=1), epochs=2, verbose=0)
    runs = []
    for trial in kbatch.load_study(tuner).trials:
        run = trial.executions[0]
        runs.append(dataclasses.asdict(run) | {"accumulation_steps": run.accumulation_steps})
    return runs


def probed(strategy, data):
    """Probes 8 examples a replica, whole and as micro-batches of a batch of 12."""
    seen = []

    class Counting(keras.layers.Layer):
        def call(self, x):
            rows = tf.numpy_function(
                lambda rows: (seen.append(int(rows)), rows)[1], [tf.shape(x)[0]], tf.int32
            )
            with tf.control_dependencies([rows]):
                return tf.identity(x)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), Counting(), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = model.get_weights()
    found = {}
    for name, below in (("whole", 0), ("parts", 12)):
        seen.clear()
        load = Workload(lambda: model, sample_of(FitData(*data)), "float32", True, below, 0, 2)
        reading = ProcessProbes(load.start(), None, None).read(8)
        same = all(map(np.array_equal, before, model.get_weights()))
        found[name] = [reading.rows, sorted({*seen}), len(seen), same, reading.first_step_bytes]
    return found


def main(directory):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # The graphs of two replicas take far longer to optimise than to run.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    data = models.rows(ROWS)
    results = {
        "one": searched(directory, "one", None, data),
        "two": searched(directory, "two", strategy, data),
        "whole": searched(directory, "whole", strategy, data, None),
        "auto": searched(directory, "auto", strategy, data, "auto", (64,)),
        "probes": probed(strategy, data),
    }
    try:
        searched(directory, "few", strategy, data, batch_sizes=(1, 8))
    except keras_tuner.errors.FatalValueError as error:
        results["few"] = str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
