"""What does a search on an engine cost, and how much sooner does it end?

python benchmarks/parallel_search.py overhead|workers|stubs [--engine local|slurm|ray|dask]
    [--seconds 30] [--trials 4] [--stubs 1000]

`overhead`: a search on one worker over the same search with `isolate=True`, and the seconds that
the engine takes to run an empty task. `workers`: two and four workers over one, for trials that
wait for data; how long a worker takes to start stands apart. `stubs`: trials of a stub that never
imports TensorFlow, with the seconds of a trial and the driver's memory after each tenth of them.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import psutil
import tensorflow as tf

import kbatch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from search_on_cluster import ENGINES

STEPS = 10


def build():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def waiting_data(seconds):
    """Make data of one epoch that trains for about so many seconds, however large the batches."""

    def data(batch_size):
        def wait(number):
            time.sleep(seconds / STEPS)
            return number

        def batch(number):
            tf.numpy_function(wait, [number], tf.int64)
            return tf.zeros((batch_size, 4)), tf.zeros((batch_size, 1))

        return tf.data.Dataset.range(STEPS).map(batch)

    return data


def search(directory, sizes, x, y=None, **arguments):
    hypermodel = kbatch.BatchSizeHyperModel(
        build, sizes, micro_batch_size=None, dtype_policy="float32", seed=0
    )
    tuner = kbatch.BatchSizeTuner(hypermodel, "loss", directory=directory, **arguments)
    started_s = time.monotonic()
    tuner.search(x, y, epochs=1, verbose=0)
    took_s = time.monotonic() - started_s
    study = kbatch.load_study(tuner)
    assert all(trial.status == "completed" for trial in study.trials)
    return took_s, study


def search_on(engine, sizes, x, y=None, **arguments):
    """Return the seconds of a search, its study, and the seconds of an empty task before it."""
    with tempfile.TemporaryDirectory() as folder, ENGINES[engine](folder) as executor:
        empty_s = 0.0
        if executor != "local":
            started_s = time.monotonic()
            executor.submit(os.getpid).result()
            empty_s = time.monotonic() - started_s
        return *search(folder, sizes, x, y, executor=executor, **arguments), empty_s


def overhead(options):
    sizes, data = range(1, options.trials + 1), waiting_data(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        isolated_s, _ = search(folder, sizes, data, isolate=True)
    took_s, _, empty_s = search_on(options.engine, sizes, data, max_parallel=1)
    more = (took_s - isolated_s - empty_s * options.trials) / isolated_s
    print(f"isolate=True {isolated_s:.1f} s, {options.engine} {took_s:.1f} s, an empty task")
    print(f"{empty_s:.1f} s: overhead of a trial {100 * more:+.1f} % beside it")


def workers(options):
    sizes, data = range(1, options.trials + 1), waiting_data(options.seconds)
    alone_s = None
    for count in (1, 2, 4):
        took_s, _, _ = search_on(options.engine, sizes, data, max_parallel=count)
        alone_s = alone_s or took_s
        start_s = took_s * count / options.trials - options.seconds
        print(f"{count} workers: {took_s:.1f} s, {alone_s / took_s:.2f} times one worker;")
        print(f"  a trial's start and end {start_s:.1f} s")


class Stubs:
    """An engine whose tasks return the record of another trial instead of training one."""

    def __init__(self, engine, record):
        self._engine, self._record, self.submitted = engine, record, []

    def submit(self, function, search, task):
        self.submitted.append((time.monotonic(), psutil.Process().memory_info().rss))
        return self._engine.submit(stub, task, self._record)


def stub(task, record):
    from kbatch.search.executors import TaskResult

    return TaskResult({f"trial_{task.trial_id}/kbatch.json": record})


def stubs(options):
    rows = np.zeros((40, 4), "float32"), np.zeros((40, 1), "float32")
    with tempfile.TemporaryDirectory() as folder:
        search(folder, [1], *rows, project_name="one")
        record = next(Path(folder, "one").glob("trial_*/kbatch.json")).read_bytes()
    with tempfile.TemporaryDirectory() as folder, ENGINES[options.engine](folder) as executor:
        engine = Stubs(executor, record)
        search(folder, range(1, options.stubs + 1), *rows, executor=engine, max_parallel=8)
    part = options.stubs // 10
    for first in range(0, options.stubs - part, part):
        (begun_s, _), (ended_s, memory) = engine.submitted[first], engine.submitted[first + part]
        print(
            f"{first + part:5} trials: {(ended_s - begun_s) / part:.3f} s each, {memory >> 20} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("overhead", "workers", "stubs"))
    parser.add_argument("--engine", choices=tuple(ENGINES), default="local")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--stubs", type=int, default=1000)
    options = parser.parse_args()
    {"overhead": overhead, "workers": workers, "stubs": stubs}[options.part](options)
