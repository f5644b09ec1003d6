#!/usr/bin/env bash
# Keras 3.15.1: `LossScaleOptimizer.scale_loss` returns the loss times `initial_scale`, a number,
# until the optimizer is built. A `tf.function` that computes gradients and was traced before keeps
# this number for ever, while `apply` divides by the scale of today.
#
# Run: bash findings/loss-scale-before-build-is-a-constant.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: the scale cancels, so that a gradient of 1 moves a weight by the learning rate.
#
# Seen, for SGD(0.5) and a scale that doubles every second update: if `optimizer.build` is called
# before the trace, 0.5 in each of eight updates; if not, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625,
# 0.0625. Nothing warns. After an overflow the updates are twice too large instead, and the gradients
# stay as large as before, so the scale falls to 0. A loop that accumulates gradients has this form:
# gradients in one function, `apply` outside. If one function holds both, TensorFlow traces it twice
# because the first trace makes variables, and the second trace is right. Adam hides it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import sys

import keras
import tensorflow as tf


def distances(built_first):
    """Return how far each of eight updates moves a weight."""
    weight = keras.Variable(8.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=2
    )
    if built_first:
        optimizer.build([weight])

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(1.0 * weight.value)
        return tape.gradient(loss, weight.value)

    values = [8.0]
    for _ in range(8):
        optimizer.apply([gradient()], [weight])
        values.append(float(weight.value))
    return [before - after for before, after in zip(values, values[1:])]


built, traced = distances(True), distances(False)
print("built first: ", *built)
print("traced first:", *traced)
falls = [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625]
sys.exit(0 if built == [0.5] * 8 and traced == falls else 1)
PY
