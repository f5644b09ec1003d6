#!/usr/bin/env bash
# Keras 3.15.1, TensorFlow 2.21.0, keras-tuner 1.4.8: `keras.utils.clear_session()` inside
# `with strategy.scope():` ends the scope. keras-tuner calls it before each model that it builds.
#
# Run: bash findings/clear-session-ends-a-strategy-scope.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: the scope holds until its block ends. `clear_session` is for names and graphs.
#
# Seen, with MirroredStrategy on two logical CPUs: after `clear_session` the block has no strategy,
# and a model that is built there has one replica. `tuner.search` in a scope trains all trials on one
# replica and finishes. Nothing warns; only the end of the block raises `IndexError: pop from empty
# list`, which names neither. TensorFlow keeps the scope on the stack of default graphs, which
# `clear_session` empties. keras-tuner's `distribution_strategy` opens a scope for each trial.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 keras-tuner==1.4.8 tensorboard==2.21.0 \
  numpy==2.4.6
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import sys

import keras
import keras_tuner
import numpy as np
import tensorflow as tf

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
replicas = []


def build(hp):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(hp.Choice("rate", [0.1, 0.2])), "mse")
    replicas.append(model.distribute_strategy.num_replicas_in_sync)
    return model


def in_scope(action):
    """Return whether a strategy is left after an action in a scope, and how the block ended."""
    left = None
    try:
        with strategy.scope():
            action()
            left = tf.distribute.has_strategy()
    except IndexError as error:
        return left, str(error)
    return left, None


x = np.ones((8, 2), "float32")
settings = {"objective": "loss", "max_trials": 2, "directory": "d"}
cleared = in_scope(keras.utils.clear_session)
searched = in_scope(
    lambda: keras_tuner.GridSearch(build, **settings).search(x, x[:, :1], verbose=0)
)
trained = list(replicas)
replicas.clear()
keras_tuner.GridSearch(build, project_name="e", distribution_strategy=strategy, **settings).search(
    x, x[:, :1], verbose=0
)
print("after clear_session:", cleared)
print("after a search:", searched, "replicas of its models:", trained)
print("replicas with distribution_strategy:", replicas)
ended = (False, "pop from empty list")
sys.exit(0 if cleared == searched == ended and set(trained[1:]) == {1} and 2 in replicas else 1)
PY
