"""Searches under MirroredStrategy on two logical CPUs and prints what was recorded.

Logical devices are made before TensorFlow's first use, so this runs in a process of its own.
"""

import dataclasses
import json
import sys

import keras_tuner
import small_models as models
import tensorflow as tf

import kbatch

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
    }
    try:
        searched(directory, "few", strategy, data, batch_sizes=(1, 8))
    except keras_tuner.errors.FatalValueError as error:
        results["few"] = str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
