"""How fast is an accumulated update, compared with Keras's own ways and an eager loop?

python benchmarks/accumulation_vs_keras.py [--rounds 9] [--block 0.3] [--policies float32]
    2 minutes

Each row is one net under one dtype policy. The numbers are ratios of times for the same examples:
above 1 kbatch is faster. `keras` is `gradient_accumulation_steps` over micro-batches, `whole` is
Keras's step on the whole batch, and `eager` is a Python loop over `tf.GradientTape`. The last row
is the geometric mean.
"""

import argparse
import itertools
import os
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from nets import Net, nets
from quick import parse_arguments
from side_by_side import interleaved, ratio

import kbatch

LOSS = "sparse_categorical_crossentropy"


def compiled(net: Net, steps: int | None = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = net.build()
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=steps), LOSS)
    return model


def updates_of(model: keras.Model, net: Net, batch_size: int):
    """A function that trains on the whole batch once, in calls of `batch_size` examples."""
    data = tf.data.Dataset.from_tensor_slices((net.x, net.y)).batch(batch_size).cache().repeat()
    iterator = iter(data.prefetch(8))
    model.make_train_function()
    calls = len(net.x) // batch_size

    def update():
        for _ in range(calls):
            model.train_function(iterator)

    return update


def eager_loop(net: Net):
    """The loop of many tutorials: one tape a micro-batch, in Python."""
    model = compiled(net)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    size = net.micro_batch_size
    starts = range(0, len(net.x), size)

    def update():
        total = [tf.zeros_like(v) for v in model.trainable_variables]
        for start in starts:
            with tf.GradientTape() as tape:
                y_pred = model(net.x[start : start + size], training=True)
                loss = loss_fn(net.y[start : start + size], y_pred) / len(starts)
                loss = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, model.trainable_variables)
            total = [t + tf.convert_to_tensor(g) for t, g in zip(total, gradients, strict=True)]
        model.optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))

    return update


def contenders(net: Net) -> dict:
    steps = len(net.x) // net.micro_batch_size
    ours = kbatch.accumulate_gradients(compiled(net), net.micro_batch_size)
    return {
        "kbatch": updates_of(ours, net, len(net.x)),
        "keras": updates_of(compiled(net, steps), net, net.micro_batch_size),
        "whole": updates_of(compiled(net), net, len(net.x)),
        "eager": eager_loop(net),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=float, default=0.3, metavar="SECONDS")
    policies = ("float32", "mixed_float16")
    parser.add_argument("--policies", nargs="+", default=policies, choices=policies)
    options = parse_arguments(parser, rounds=1, block=0.05, policies=["float32"])
    print(f"{'net':<15}{'policy':<15}{'/ keras':>9}{'/ whole':>9}{'/ eager':>9}{'ms/update':>11}")
    rows = []
    for (name, net), policy in itertools.product(nets().items(), options.policies):
        keras.config.set_dtype_policy(policy)
        runs = contenders(net)
        for run in runs.values():
            run(), run()
        seconds = interleaved(runs, rounds=options.rounds, block_s=options.block)
        rows.append([ratio(seconds[other], seconds["kbatch"]) for other in list(runs)[1:]])
        figures = "".join(f"{figure:9.2f}" for figure in rows[-1])
        median_ms = 1e3 * statistics.median(seconds["kbatch"])
        print(f"{name:<15}{policy:<15}{figures}{median_ms:11.1f}", flush=True)
        keras.config.set_dtype_policy("float32")
    means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':<30}" + "".join(f"{mean:9.2f}" for mean in means))


if __name__ == "__main__":
    main()
