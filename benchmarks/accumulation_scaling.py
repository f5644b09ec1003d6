"""Do the first step and the peak memory grow with the number of micro-batches?

python benchmarks/accumulation_scaling.py [--net resnet] [--rounds 3]

One micro-batch size, K = 2 ... 64 micro-batches an update. Building is the time of the first
step less that of a later one: tracing and optimising the graph. Memory is the peak of
TensorFlow's CPU allocator above what lay there before, weights and batch among it; peaks depend
on scheduling, so each is the largest over the same number of micro-batches. The last column is
the last figure over the first.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The allocator that counts its bytes, as on a GPU.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "8000"

import keras
import numpy as np
import tensorflow as tf
from accumulation_vs_keras import compiled
from nets import Net, nets

import kbatch

STEPS = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = 320


def enlarged(net: Net, steps: int) -> Net:
    rows = np.arange(net.micro_batch_size * steps) % len(net.x)
    return net._replace(x=net.x[rows], y=net.y[rows])


def measured(net: Net) -> tuple[float, float]:
    """Seconds of building the train function, and peak bytes of the steps after it."""
    model = kbatch.accumulate_gradients(compiled(net), net.micro_batch_size)
    x, y = tf.constant(net.x), tf.constant(net.y)
    started_s = time.perf_counter()
    model.train_on_batch(x, y)
    first_s = time.perf_counter() - started_s
    model.train_on_batch(x, y)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    started_s, updates = time.perf_counter(), MICRO_BATCHES // (len(net.x) // net.micro_batch_size)
    for _ in range(updates):
        model.train_on_batch(x, y)
    later_s = (time.perf_counter() - started_s) / updates
    return first_s - later_s, tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", action="append", choices=sorted(nets()))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measured(nets()["mlp"])  # TensorFlow's own first use.
    print(f"{'net':<15}{'':<18}" + "".join(f"{'K=' + str(k):>9}" for k in STEPS) + "   last/first")
    for name in options.net or nets():
        rounds = []
        for _ in range(options.rounds):
            keras.utils.clear_session()
            rounds.append([measured(enlarged(nets()[name], steps)) for steps in STEPS])
        for index, (title, unit) in enumerate((("building (s)", 1.0), ("peak memory (MB)", 1e6))):
            columns = zip(*[[step[index] / unit for step in row] for row in rounds], strict=True)
            figures = [statistics.median(column) for column in columns]
            row = "".join(f"{figure:9.2f}" for figure in figures)
            print(f"{name:<15}{title:<18}{row}{figures[-1] / figures[0]:13.2f}", flush=True)


if __name__ == "__main__":
    main()
