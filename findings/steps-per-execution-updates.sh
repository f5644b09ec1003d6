#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: with `steps_per_execution`, `fit(steps_per_epoch=...)` makes
# more updates than it is asked for, and a finite dataset begins again early.
#
# Run: bash findings/steps-per-execution-updates.sh    (needs Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: an epoch of `steps_per_epoch=10` makes 10 updates, whatever `steps_per_execution` is:
# that is documented to change only how many batches run in one call of a `tf.function`.
#
# Seen (updates of each of three epochs):
#   endless data, 10 steps, 1 a call: [10, 10, 10]
#   endless data, 10 steps, 4 a call: [12, 12, 12]     47 steps, 4 a call: [48, 48, 48]
#   12 batches,    9 steps, 1 a call: [9, 3, 9]        the second epoch has what the first left
#   12 batches,    9 steps, 4 a call: [12, 12, 12]     the data begin again in each epoch
#   12 batches,    9 steps, 2 a call: [10, 2, 10]      10 updates, though 9 were asked for
#
# Cause: `EpochIterator._enumerate_iterator` (keras/src/trainers/epoch_iterator.py) yields
# `range(0, steps_per_epoch, steps_per_execution)`, and each execution runs in full. `_steps_seen`
# grows by whole executions. A divisor of `steps_per_epoch` as `steps_per_execution` is exact.
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

x = np.ones((96, 1), "float32")


def updates(endless, steps_per_epoch, steps_per_execution):
    """Return the updates of each of three epochs."""
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(8)
    data = data.repeat() if endless else data
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    counts = [0]
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: counts.append(int(model.optimizer.iterations))
    )
    model.fit(
        data, epochs=3, steps_per_epoch=steps_per_epoch, callbacks=[count], verbose=0, shuffle=False
    )
    return np.diff(counts).tolist()


SEEN = {
    (True, 10, 1): [10, 10, 10],
    (True, 10, 4): [12, 12, 12],
    (True, 47, 4): [48, 48, 48],
    (False, 9, 1): [9, 3, 9],
    (False, 9, 4): [12, 12, 12],
    (False, 9, 2): [10, 2, 10],
}
found = {case: updates(*case) for case in SEEN}
print(f"Keras {keras.__version__}, TensorFlow {tf.__version__}")
for (endless, steps, at_once), made in found.items():
    kind = "endless data" if endless else "12 batches"
    print(f"{kind}, steps_per_epoch={steps}, steps_per_execution={at_once}: {made}")
sys.exit(found != SEEN)
PY
