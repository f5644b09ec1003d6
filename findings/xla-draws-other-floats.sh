#!/usr/bin/env bash
# TensorFlow 2.21.0: `tf.random.stateless_uniform` with one seed gives the same bits with and without
# XLA, and other floats, also if the algorithm is named.
#
# Run: bash findings/xla-draws-other-floats.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: equal numbers. They are a function of the seed alone, and philox is philox.
#
# Seen, for the seed (7, 11) in a variable, eager and in a graph beside XLA:
#   int32 bits  the same three numbers
#   floats      0.7251 0.0772 0.5419 beside 0.8100 0.6252 0.8389
# A constant seed gives equal floats, because TensorFlow folds the draw before XLA compiles.
# TensorFlow makes a float of the lowest 23 bits, XLA of the highest ones. So `jit_compile` changes
# which units Keras's `Dropout` drops and the weights that an initializer draws in a compiled function:
# a training with and without XLA differs by more than rounding.
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

import numpy as np
import tensorflow as tf

seed = tf.Variable([7, 11], dtype=tf.int32)

@tf.autograph.experimental.do_not_convert
def bits():
    return tf.random.stateless_uniform([3], seed, None, None, tf.int32, alg="philox")


@tf.autograph.experimental.do_not_convert
def floats():
    return tf.random.stateless_uniform([3], seed, alg="philox")


found = {}
for draw in (bits, floats):
    ways = draw(), tf.function(draw)(), tf.function(draw, jit_compile=True)()
    found[draw.__name__] = eager, graph, xla = [one.numpy() for one in ways]
    print(draw.__name__, "eager", eager, "graph", graph, "XLA", xla)
of_bits, of_floats = found["bits"], found["floats"]
drawn = of_bits[0].view(np.uint32)
low = (drawn & 0x7FFFFF) / 2**23
high = (drawn >> 9) / 2**23
same = (
    np.array_equal(of_bits[0], of_bits[2])
    and np.array_equal(of_floats[0], of_floats[1])
    and np.allclose(of_floats[0], low, rtol=0, atol=1e-6)
    and np.allclose(of_floats[2], high, rtol=0, atol=1e-6)
)
sys.exit(0 if same else 1)
PY
