"""Kills searches: `python killed_searches.py DIRECTORY KILLS SEED`.

It starts TensorFlow once and forks a real process a search, which SIGKILL ends at a random moment,
or at a random one of its own file operations; then another one goes on in the same directory, until
the search ends. It prints what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import keras_tuner
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.search.tuner import BatchSizeTuner

BATCH_SIZES = (8, 32)
EXECUTIONS = 2


class Logged(keras_tuner.HyperModel):
    """Appends a line to a file whenever an execution begins."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def build(self, hp):
        return models.mlp()

    def fit(self, hp, model, *args, **kwargs):
        with open(self.log, "a") as lines:
            lines.write(f"{hp.get('batch_size')}\n")
        return model.fit(*args, **kwargs)


def search(directory, log):
    hypermodel = kbatch.BatchSizeHyperModel(
        Logged(log),
        BATCH_SIZES,
        micro_batch_size=8,
        learning_rate_scaling="sqrt",
        dtype_policy="float32",
        seed=0,
    )
    tuner = BatchSizeTuner(
        hypermodel,
        "val_accuracy",
        executions_per_trial=EXECUTIONS,
        directory=directory,
        project_name="search",
    )
    validation = models.rows(40, seed=1)
    tuner.search(*models.rows(94), validation_data=validation, epochs=2, verbose=0)


def fork(directory, log, *, operations=None):
    """Starts a search in a process of its own, which ends itself before a file operation."""
    pid = os.fork()
    if pid:
        return pid
    if operations is not None:
        _die_at(operations, str(directory))
    try:
        search(directory, log)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def _die_at(operations, directory):
    left = [operations]

    def hook(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.mkdir"):
            paths = [str(a) for a in arguments[:2] if isinstance(a, (str, os.PathLike))]
            if any(path.startswith(directory) for path in paths):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def begun(log):
    """Counts the executions that began, by batch size."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {size: lines.count(str(size)) for size in BATCH_SIZES}


def finished(directory):
    """Counts the executions on disk that completed, by batch size."""
    counts = dict.fromkeys(BATCH_SIZES, 0)
    for file in (directory / "search").glob("trial_*/kbatch.json"):
        for execution in json.loads(file.read_text())["record"]["executions"]:
            counts[execution["batch_size"]] += execution["status"] == "completed"
    return counts


def until_it_ends(directory, rng, duration_s):
    """Runs a search that is killed until it ends; gives the kills and what ran though finished."""
    log, kills, repeated = directory / "log", [], []
    while True:
        before, kept = begun(log), finished(directory)
        if rng.random() < 0.5:
            pid = fork(directory, log, operations=rng.randint(1, 25))
        else:
            pid = fork(directory, log)
            time.sleep(rng.uniform(0, duration_s / 2))
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for size, count in begun(log).items():
            if count - before[size] > EXECUTIONS - kept[size]:
                repeated.append(size)
        if status == -signal.SIGKILL:
            kills.append(sum(finished(directory).values()))
        else:
            return kills, repeated, status


def main(directory, kills, seed):
    # Each search traces its steps again, which takes longer than they do.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    rng = random.Random(seed)
    (directory / "undisturbed").mkdir()
    started_s = time.monotonic()
    pid = fork(directory / "undisturbed", directory / "undisturbed" / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    duration_s = time.monotonic() - started_s
    searches = []
    while sum(len(found["kills"]) for found in searches) < kills:
        folder = directory / f"killed-{len(searches)}"
        folder.mkdir()
        found = until_it_ends(folder, rng, duration_s)
        searches.append(dict(zip(("kills", "repeated", "status"), found, strict=True)))
    print(json.dumps(searches))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
