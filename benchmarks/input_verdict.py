"""How often is the verdict on an input pipeline right?

python benchmarks/input_verdict.py [--budget 6] [--keep DIR] [--part 1/2]    10 minutes

Eight kinds of pipeline with a known delay per example feed models with a known step time, at eight
ratios of the two rates: 64 cases. Each case is a line on stderr. The table counts the verdicts, and
below it stand the right verdicts at rates that differ by 20 % or more, and the wrong ones at a
factor of two. `--part` runs some of the kinds. `--keep` stores the records of all parts in one
folder, and the table counts all records there.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from quick import parse_arguments
from tensorflow.python.data.experimental.ops.testing import sleep as native_sleep

import kbatch

ROWS, FEATURES = 16, 8
STEPS_S = (0.02, 0.035)
# Rate of the pipeline over the rate of the train step.
RATIOS = (0.5, 0.7, 0.8, 0.95, 1.05, 1.25, 1.4, 2.0)
VERDICTS = ("input-bound", "compute-bound", "undetermined")
BATCH = (np.ones((ROWS, FEATURES), "float32"), np.ones((ROWS, 1), "float32"))
_SPIN_S = 0.001


def wait(seconds):
    """Sleeps without holding the interpreter, and spins the last millisecond to be exact."""
    end_s = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _SPIN_S))
    while time.perf_counter() < end_s:
        pass


def spin(seconds):
    """Holds the interpreter."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def batches():
    return tf.data.Dataset.from_tensors(BATCH).repeat(200)


def waiting_map(delay_s, parallel=None):
    def slow(x, y):
        (waited,) = tf.py_function(lambda v: (wait(delay_s), v)[1:], [x], [tf.float32])
        return tf.ensure_shape(waited, x.shape), y

    return batches().map(slow, num_parallel_calls=parallel)


def generator(delay_s):
    def make():
        for _ in range(200):
            spin(delay_s)
            yield BATCH

    specs = tuple(tf.TensorSpec(part.shape, part.dtype) for part in BATCH)
    return tf.data.Dataset.from_generator(make, output_signature=specs)


def chunks(delay_s):
    """Batches in chunks of ten: the delay of all of them comes before the first."""

    def make():
        while True:
            time.sleep(10 * delay_s)
            for _ in range(10):
                yield BATCH

    specs = tuple(tf.TensorSpec(part.shape, part.dtype) for part in BATCH)
    return tf.data.Dataset.from_generator(make, output_signature=specs)


def varying_lengths(delay_s):
    """Batches of 8, 16 and 24 examples in turn, with the same delay an example."""
    rows = tf.constant([8, 16, 24])

    def make(i):
        n = rows[i % 3]
        return tf.ones((n, FEATURES)), tf.ones((n, 1))

    def slow(x, y):
        def waited(v):
            wait(delay_s * len(v) / ROWS)
            return v

        return tf.ensure_shape(tf.py_function(waited, [x], tf.float32), (None, FEATURES)), y

    return tf.data.Dataset.range(240, output_type=tf.int32).map(make).map(slow)


def shuffle_of_all(delay_s):
    """An epoch of ten batches is made before the first of them comes.

    The delay is taken once more at the end of the data. And ending an iterator may wait until the
    autotuning of tf.data wakes up, tenths of a second in epochs as short: it is switched off.
    """
    rows = tf.data.Dataset.from_tensors(BATCH).repeat(10)
    options = tf.data.Options()
    options.autotune.enabled = False
    waited = rows.apply(native_sleep(round(1e6 * delay_s * 10 / 11)))
    return waited.shuffle(10).with_options(options)


PIPELINES = {
    "native delay": lambda d: batches().apply(native_sleep(round(1e6 * d))),
    "with prefetch": lambda d: batches().apply(native_sleep(round(1e6 * d))).prefetch(2),
    "Python map": waiting_map,
    "two calls at once": lambda d: waiting_map(2 * d, parallel=2),
    "busy generator": generator,
    "chunks": chunks,
    "varying lengths": varying_lengths,
    "shuffle of all": shuffle_of_all,
}


class Delay(keras.layers.Layer):
    """Takes a known time in the forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x):
        delayed = tf.py_function(lambda v: (wait(self.seconds), v)[1], [x], tf.float32)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(delayed, x.shape))


def model(seconds):
    net = keras.Sequential([keras.layers.Input((FEATURES,)), Delay(seconds), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    return net


def own_step_s(net):
    """Measures a step of a model with its delay: the least of many, as on an idle machine."""
    net.train_on_batch(*BATCH)
    seconds = []
    for _ in range(100):
        began_s = time.perf_counter()
        net.train_on_batch(*BATCH)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=6.0, metavar="SECONDS")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to keep the records")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="i-th of n groups of kinds")
    options = parse_arguments(parser, budget=1.5, part="1/4")
    part, parts = map(int, options.part.split("/"))
    rest_s = own_step_s(model(STEPS_S[0])) - STEPS_S[0]
    log(f"step without its delay: {1e3 * rest_s:.2f} ms")
    log(f"{'pipeline':<20}{'step (ms)':>10}{'true':>7}{'found':>7}  interval         verdict")
    rows = {}
    for index, (name, make) in enumerate(PIPELINES.items()):
        for ratio in RATIOS if index * parts // len(PIPELINES) == part - 1 else ():
            step_s = STEPS_S[index // 2 % 2]
            profile = kbatch.profile_input_pipeline(
                model(step_s - rest_s),
                make(step_s / ratio),
                time_budget_s=options.budget,
                remedies=False,
                verbose=0,
            )
            keras.backend.clear_session()
            rows[name, ratio] = profile.verdict
            if options.keep:
                profile.save(options.keep / f"{name} {ratio}.json")
            tell_case(name, ratio, profile, step_s)
    if options.keep:
        kept = ((name, r, options.keep / f"{name} {r}.json") for name in PIPELINES for r in RATIOS)
        rows = {
            (name, r): kbatch.InputPipelineProfile.load(path).verdict
            for name, r, path in kept
            if path.exists()
        }
    tell([(ratio, verdict) for (_, ratio), verdict in rows.items()])


def tell_case(name, ratio, profile, step_s):
    found = profile.ratio
    interval = f"{found.low:.2f} to {found.high:.2f}"
    long_run = profile.long_run_ratio
    uneven = "" if profile.is_even else f"  (long: {long_run[0]:.2f} to {long_run[1]:.2f})"
    log(
        f"{name:<20}{1e3 * step_s:10.0f}{ratio:7.2f}{found.value:7.2f}  {interval:<17}"
        f"{profile.verdict}{uneven}"
    )


def log(text):
    print(text, file=sys.stderr, flush=True)


def truth(ratio):
    return "input-bound" if ratio < 1 else "compute-bound"


def tell(rows):
    counts = Counter((truth(ratio), verdict) for ratio, verdict in rows)
    print(f"{'true / said':<16}" + "".join(f"{verdict:>16}" for verdict in VERDICTS))
    for true in VERDICTS[:2]:
        print(f"{true:<16}" + "".join(f"{counts[true, said]:16}" for said in VERDICTS))
    clear = [(r, v) for r, v in rows if max(r, 1 / r) >= 1.2]
    right = sum(truth(r) == v for r, v in clear)
    twofold = [(r, v) for r, v in rows if max(r, 1 / r) >= 2]
    wrong = sum(v not in (truth(r), "undetermined") for r, v in twofold)
    print(f"right if the rates differ by 20 % or more: {right} of {len(clear)}")
    print(f"wrong if they differ by a factor of two: {wrong} of {len(twofold)}")


if __name__ == "__main__":
    main()
