"""What does the exact mode cost, and how exact is it?

python benchmarks/exact_accumulation.py [--net mlp] [--rounds 9] [--block 0.3]    1 minute
python benchmarks/exact_accumulation.py --memory    6 minutes

The nets of `nets.py` train under a supervised contrastive loss, which relates all rows of a batch.

/ plain    time of an exact update over plain accumulation, which computes another gradient
/ whole    time of an exact update over Keras's step on the whole batch
error      distance of the gradient from float64 over the distance of Keras's float32 gradient, for
           the worst variable. Distances below rounding (1.2e-7 of the norm) count as rounding
peak       peak of the CPU's allocator with 2, 8 and 32 micro-batches. The loss has matrices of all
           pairs of rows, which grow with the square of that number
"""

import argparse
import os
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The allocator that counts its bytes, as on a GPU.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "8000"

import keras
import numpy as np
import tensorflow as tf
from accumulation_vs_keras import updates_of
from keras import ops
from nets import Net, nets
from quick import parse_arguments
from side_by_side import interleaved, ratio, ratio_interval

import kbatch

ROUNDING = 1.2e-7
STEPS = (2, 8, 32)
MICRO_BATCHES = 320


def enlarged(net: Net, steps: int) -> Net:
    rows = np.arange(net.micro_batch_size * steps) % len(net.x)
    return net._replace(x=net.x[rows], y=net.y[rows])


def supervised_contrastive(labels, vectors):
    """Khosla et al. (2020), arXiv:2004.11362, equation 2."""
    vectors = ops.normalize(vectors, axis=-1)
    near = ops.matmul(vectors, ops.transpose(vectors)) / 0.5
    others = 1 - ops.eye(ops.shape(near)[0], dtype=near.dtype)
    labels = ops.reshape(labels, (-1, 1))
    alike = ops.cast(ops.equal(labels, ops.transpose(labels)), near.dtype) * others
    logs = near - ops.log(ops.sum(ops.exp(near) * others, axis=1, keepdims=True))
    return -ops.mean(ops.sum(alike * logs, axis=1) / (ops.sum(alike, axis=1) + 1e-6))


def compiled(net: Net, optimizer="adam", **accumulation):
    keras.utils.set_random_seed(0)
    model = net.build()
    model.compile(optimizer, supervised_contrastive)
    if accumulation:
        kbatch.accumulate_gradients(model, net.micro_batch_size, **accumulation)
    return model


def gradients_of(net: Net, weights=None, **accumulation) -> tuple[list[np.ndarray], list]:
    """The gradient of a batch, as SGD hands it to the weights: taken before it is applied."""
    found: list = []

    class Kept(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **arguments):
            pairs = list(grads_and_vars)
            found.extend(np.float64(tf.convert_to_tensor(g)) for g, _ in pairs)
            return super().apply_gradients(pairs, **arguments)

    model = compiled(net, Kept(0.0), **accumulation)
    if weights is not None:
        model.set_weights(weights)
    model.run_eagerly = True
    before = model.get_weights()
    model.train_on_batch(net.x, net.y)
    return found, before


def largest_error(net: Net) -> float:
    whole, weights = gradients_of(net)
    exact, _ = gradients_of(net, exact=True)
    keras.config.set_dtype_policy("float64")
    try:
        reference, _ = gradients_of(net, weights)
    finally:
        keras.config.set_dtype_policy("float32")
    ratios = []
    for true, ours, stock in zip(reference, exact, whole, strict=True):
        rounding = ROUNDING * np.linalg.norm(true) + 1e-30
        ratios.append(np.linalg.norm(ours - true) / max(np.linalg.norm(stock - true), rounding))
    return max(ratios)


def peak_bytes(net: Net) -> int:
    model = compiled(net, exact=True)
    x, y = tf.constant(net.x), tf.constant(net.y)
    for _ in range(2):
        model.train_on_batch(x, y)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(MICRO_BATCHES // (len(net.x) // net.micro_batch_size)):
        model.train_on_batch(x, y)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", action="append", choices=sorted(nets()))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--memory", action="store_true")
    options = parse_arguments(parser, rounds=6, block=0.02, net=["mlp", "transformer"])
    print(f"{'net':<15}{'/ plain':>9}{'95 % of it':>16}{'/ whole':>9}{'error':>8}  peak (MB)")
    times = []
    for name in options.net or nets():
        net = nets()[name]
        models = {
            "exact": compiled(net, exact=True),
            "plain": compiled(net, exact=False),
            "whole": compiled(net),
        }
        runs = {key: updates_of(model, net, len(net.x)) for key, model in models.items()}
        for run in runs.values():
            run(), run()
        seconds = interleaved(runs, rounds=options.rounds, block_s=options.block)
        times.append(ratio(seconds["exact"], seconds["plain"]))
        low, high = ratio_interval(seconds["exact"], seconds["plain"])
        figures = f"{times[-1]:9.2f}{f'{low:.2f} to {high:.2f}':>16}"
        figures += f"{ratio(seconds['exact'], seconds['whole']):9.2f}{largest_error(net):8.2f}  "
        if options.memory:
            peaks = [peak_bytes(enlarged(net, steps)) / 1e6 for steps in STEPS]
            figures += ", ".join(f"K={k}: {p:.2f}" for k, p in zip(STEPS, peaks, strict=True))
        print(f"{name:<15}{figures}", flush=True)
    print(f"{'geometric mean':<15}{statistics.geometric_mean(times):9.2f}")


if __name__ == "__main__":
    main()
