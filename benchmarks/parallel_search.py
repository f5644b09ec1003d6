"""What do more workers of an executor save, and what does one task more cost the driver?

python benchmarks/parallel_search.py [--parts workers stubs] [--rounds 2]
    [--wait 30] [--store FILE]    20 minutes on two cores

Each part runs its contenders one after the other, in another order each round, and appends a line
of JSON to `--store`: seconds of `tuner.search`, from its call to its return, and ratios.

workers   four trials that wait `--wait` seconds for their data, on one worker over two and four:
          the aims are 1.8 and 3. `beside_s` is what a task takes beside its training, such as
          imports and tracing, for which all workers share the cores
stubs     a thousand executions that train nothing: memory of the driver, and seconds a trial, by
          hundreds
"""

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import psutil
import tensorflow as tf

import kbatch
from kbatch.records.json_codec import record_text
from kbatch.records.training_run import RECORD_NAME, EpochRecord, ExecutionRecord
from kbatch.search.executors import TaskResult
from kbatch.study.trial import Objective, TrialRecord

BATCHES = 40
STUBS = 1000


def build():
    model = keras.Sequential(
        [
            keras.layers.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def rows(count):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 32)).astype("float32"), rng.integers(0, 10, count)


def waiting(wait_s):
    """A data function whose batches come one by one, as from a slow disk."""

    def dataset(batch_size):
        x, y = rows(batch_size)

        def batches():
            for _ in range(BATCHES):
                time.sleep(wait_s / BATCHES)
                yield x, y

        signature = tf.TensorSpec((None, 32)), tf.TensorSpec((None,), tf.int64)
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    return dataset


def timed_search(sizes, *arguments, **chosen):
    """The seconds of a search, those of its trainings, and its trials' status."""
    hypermodel = kbatch.BatchSizeHyperModel(
        build, sizes, micro_batch_size=None, dtype_policy="float32", seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            "accuracy",
            strategy="grid",
            directory=folder,
            project_name="search",
            **chosen,
        )
        began_s = time.perf_counter()
        tuner.search(*arguments, epochs=1, verbose=0)
        seconds = time.perf_counter() - began_s
        trials = kbatch.load_study(tuner).trials
    assert [trial.status for trial in trials] == ["completed"] * len(sizes)
    return seconds, [trial.executions[0].total_s for trial in trials]


def pool(workers):
    """A pool whose processes have started, as those of an engine have."""
    context = multiprocessing.get_context("spawn")
    found = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    began_s = time.perf_counter()
    concurrent.futures.wait([found.submit(import_kbatch) for _ in range(workers)])
    return found, time.perf_counter() - began_s


def import_kbatch():
    importlib.import_module("kbatch.search.executors")
    time.sleep(1)  # So that no process takes the task of two.


def workers(options, number):
    found, order = {}, [1, 2, 4]
    random.Random(number).shuffle(order)
    for count in order:
        executor, start_s = pool(count)
        with executor:
            sizes, data = (16, 32, 64, 128), waiting(options.wait)
            seconds, trained_s = timed_search(sizes, data, executor=executor, max_parallel=count)
        beside_s = seconds * count / len(sizes) - statistics.fmean(trained_s)
        found[str(count)] = {"seconds": seconds, "start_s": start_s, "beside_s": beside_s}
    one = found["1"]["seconds"]
    return found | {f"ratio_{n}": one / found[str(n)]["seconds"] for n in (2, 4)}


class Stubs:
    """An executor whose tasks leave the record of a training that was never run."""

    def __init__(self):
        self.seconds, self.resident_bytes, self._began_s = [], [], time.perf_counter()
        self._tasks = 0

    def submit(self, function, search, task):
        self._tasks += 1
        if self._tasks % (STUBS // 10) == 0:
            now_s = time.perf_counter()
            self.seconds.append((now_s - self._began_s) / (STUBS // 10))
            self.resident_bytes.append(psutil.Process().memory_info().rss)
            self._began_s = now_s
        state = json.loads(task.files[f"trial_{task.trial_id}/trial.json"])
        values = state["hyperparameters"]["values"]
        size = values["batch_size"]
        epoch = EpochRecord(
            0, {"accuracy": 0.5}, examples=size, updates=1, train_s=1.0, data_wait_s=0
        )
        known = {"seed": 0, "batch_size": size, "micro_batch_size": size, "optimizer": "Adam"}
        known |= {"dtype_policy": "float32", "loss_scaled": False, "learning_rate": 1e-3}
        known |= {"learning_rate_scaling": None, "jit_compile": False, "epochs": (epoch,)}
        record = TrialRecord(
            task.trial_id,
            values,
            Objective("accuracy", "max"),
            (ExecutionRecord("completed", **known),),
        )
        future = concurrent.futures.Future()
        file = f"trial_{task.trial_id}/{RECORD_NAME}"
        future.set_result(TaskResult({file: record_text(record).encode()}))
        return future


def stubs(options, number):
    executor = Stubs()
    sizes = tuple(range(1, STUBS + 1))
    seconds, _ = timed_search(sizes, *rows(64), executor=executor, max_parallel=4)
    memory = executor.resident_bytes
    return {
        "seconds": seconds,
        "trial_s": executor.seconds,
        "resident_mb": [value / 1e6 for value in memory],
        "grown_mb": (memory[-1] - memory[0]) / 1e6,
        "slower": executor.seconds[-1] / executor.seconds[0],
    }


PARTS = {part.__name__: part for part in (workers, stubs)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--wait", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--store", type=Path, default=Path("parallel_search.jsonl"))
    options = parser.parse_args()
    for part in options.parts:
        found = []
        for number in range(1 if part == "stubs" else options.rounds):
            row = {"part": part, "round": number, "load": os.getloadavg()[0]}
            row |= PARTS[part](options, number)
            found.append(row)
            with options.store.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        for name in [name for name in found[0] if name.startswith("ratio")]:
            values = [row[name] for row in found]
            low, high = min(values), max(values)
            print(f"{part} {name}: {statistics.median(values):.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
