#!/usr/bin/env bash
# TensorFlow 2.21.0: in a `tf.function` the arithmetic optimizer computes `x * x * c` with a constant
# c as `x * (x * c)`. What overflows in eager mode and under XLA is finite in a graph.
#
# Run: bash findings/graph-reorders-a-product.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: one value. A product of floats is not associative, and Python says the order.
#
# Seen, for four times x = 300 and c = 0.001 in float16, whose largest number is 65,504: eager inf,
# graph 90.0, XLA inf, graph without `arithmetic_optimization` inf. For a scalar x the graph gives
# inf too. So a search for overflows in eager mode finds some that the traced step does not have, and
# `jit_compile` decides whether mixed_float16 loses updates.
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

import tensorflow as tf

x = tf.fill([4], tf.constant(300.0, tf.float16))


@tf.autograph.experimental.do_not_convert
def scaled_square(x):
    return x * x * tf.constant(1e-3, tf.float16)


found = {
    "eager": scaled_square(x),
    "graph": tf.function(scaled_square)(x),
    "XLA": tf.function(scaled_square, jit_compile=True)(x),
    "graph of a scalar": tf.function(scaled_square)(x[0]),
}
tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
found["graph without the optimizer"] = tf.function(scaled_square)(x)
found = {name: float(tf.reduce_max(value)) for name, value in found.items()}
print(found)
finite = {name for name, value in found.items() if value != float("inf")}
sys.exit(0 if finite == {"graph"} and round(found["graph"]) == 90 else 1)
PY
