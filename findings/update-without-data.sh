#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: at the end of a dataset of unknown length, each epoch of `fit`
# counts an update that had no data, and AdamW decays the weights once more.
#
# Run: bash findings/update-without-data.sh            (needs Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: 12 batches make 12 updates, whether or not the dataset knows its length, and the weights
# are the same. Schedules of the learning rate read `optimizer.iterations`.
#
# Seen (`optimizer.iterations` after one epoch of 12 batches, and the weight that starts at 1, has
# a gradient of 0 and decays by 10 % of the learning rate 1 in each update):
#   known length:                         12 updates, weight 0.9^12 = 0.282430
#   unknown length (`unbatch` in it):      13 updates, weight 0.9^13 = 0.254187
#   unknown length, 2 steps an execution: 12 updates, weight 0.9^12 = 0.282430
#
# Cause: with one step an execution, the train function is a graph of `iterator.get_next()` and the
# train step (`multi_step_on_iterator` in keras/src/backend/tensorflow/trainer.py). At the end of
# the data `get_next` fails, but the operations of the optimizer that read no data, such as its
# counter and the decay of weights, have run or run anyway: nothing in the graph makes them wait.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys

import keras
import numpy as np
import tensorflow as tf

x = np.zeros((96, 1), "float32")  # The gradient is zero: only the decay changes the weight.


def trained(known, steps_per_execution):
    """Return the updates that the optimizer counts, and the weight."""
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(8)
    data = data if known else data.unbatch().batch(8)
    layer = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    model = keras.Sequential([keras.Input((1,)), layer])
    optimizer = keras.optimizers.AdamW(1.0, weight_decay=0.1)
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    model.fit(data, verbose=0, shuffle=False)
    return int(optimizer.iterations), round(float(layer.kernel[0, 0]), 6)


SEEN = {
    (True, 1): (12, 0.28243),
    (False, 1): (13, 0.254187),
    (False, 2): (12, 0.28243),
}
found = {case: trained(*case) for case in SEEN}
print(f"Keras {keras.__version__}, TensorFlow {tf.__version__}")
for (known, at_once), (updates, weight) in found.items():
    kind = "known" if known else "unknown"
    print(f"{kind} length, steps_per_execution={at_once}: {updates} updates, weight {weight}")
sys.exit(found != SEEN)
PY
