#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: `model.build(input_shape)` of a subclassed model without a
# `build` of its own calls it built although no layer has weights.
#
# Run: bash findings/subclassed-build-makes-no-weights.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: after `model.build((None, 4))` the layers have their weights, as in a Sequential model,
# or the call raises.
#
# Seen: "built True weights 0 layers built [False, False]". A call on data makes four weights. An
# optimizer that is built in between has no variables, and a check of `model.built` finds nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import sys

import keras
import tensorflow as tf


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(3), keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


model = Net()
model.build((None, 4))
print("built", model.built, "weights", len(model.weights), "layers built", [l.built for l in model.layers])
called = Net()
called(tf.zeros([2, 4]))
print("called: weights", len(called.weights))
same = model.built and not model.weights and len(called.weights) == 4
sys.exit(0 if same else 1)
PY
