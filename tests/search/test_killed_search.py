"""A search that is killed several times ends as an undisturbed search.

`python test_killed_search.py DIRECTORY KILLS SEED grid|race` kills searches. It starts TensorFlow
once and forks a process for each search. SIGKILL ends the process before a random file operation,
because the files do not change at any other moment. Another process continues in the same
directory, until the search ends. The script prints the results as JSON.
"""

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import pytest
import small_models as models
import tensorflow as tf
from own_process import printed

import kbatch

# Columns that do not depend on the time.
KEPT = ["trial_id", "status", "batch_size", "executions", "learning_rate", "updates", "accuracy"]
KEPT += ["loss", "val_accuracy", "val_loss", "examples_seen"]


def learner():
    """A classifier that learns something in 24 updates, and in 2 nothing."""
    return models.stock(optimizer=keras.optimizers.SGD(0.1))


def learnable(count, *, seed=0):
    """Rows whose class is the largest of their first three features."""
    x, _ = models.rows(count, seed=seed)
    return x, x[:, :3].argmax(1)


class Case(NamedTuple):
    """The arguments of a search."""

    build: Callable[[], keras.Model]
    batch_sizes: tuple[int, ...]
    hypermodel: dict[str, object]
    tuner: dict[str, object]
    rows: Callable[..., tuple]
    validation_rows: int
    operations: int  # The approximate number of file operations of the search.


CASES = {
    "grid": Case(
        models.mlp,
        (8, 32),
        {"micro_batch_size": 8, "learning_rate_scaling": "sqrt"},
        {"executions_per_trial": 2},
        models.rows,
        40,
        100,
    ),
    # Sizes with 24 updates and with 1 per epoch, so that the next run does not depend on the time.
    "race": Case(
        learner,
        (4, 94),
        {"micro_batch_size": None, "base_batch_size": 4},
        {"strategy": "race", "max_trainings": 11},
        learnable,
        100,
        520,
    ),
}


class Logs(keras.callbacks.Callback):
    """Appends the batch size to a file whenever a training run begins."""

    def __init__(self, file, sizes):
        super().__init__()
        self.file, self.sizes = file, sizes

    def on_train_begin(self, logs=None):
        (size,) = (size for size in self.sizes if -(-94 // size) == self.params["steps"])
        with open(self.file, "a") as lines:
            lines.write(f"{size}\n")


def search(case, directory, log):
    hypermodel = kbatch.BatchSizeHyperModel(
        case.build, case.batch_sizes, dtype_policy="float32", seed=0, **case.hypermodel
    )
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        "val_accuracy",
        directory=directory,
        project_name="search",
        **{"strategy": "grid"} | case.tuner,
    )
    validation = case.rows(case.validation_rows, seed=1)
    fit = {"epochs": 2, "verbose": 0, "callbacks": [Logs(log, case.batch_sizes)]}
    tuner.search(*case.rows(94), validation_data=validation, **fit)


def fork(case, directory, log, operations=None):
    """Start a search in a new process, which kills itself before a file operation."""
    pid = os.fork()
    if pid:
        return pid
    if operations is not None:
        _die_at(operations, str(directory))
    try:
        search(case, directory, log)
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
    """Count the runs that began, by batch size."""
    return Counter(log.read_text().split() if log.exists() else [])


def finished(directory):
    """Count the completed runs on disk, by batch size."""
    counts = Counter()
    for file in (directory / "search").glob("trial_*/kbatch.json"):
        for execution in json.loads(file.read_text())["record"]["executions"]:
            counts[str(execution["batch_size"])] += execution["status"] == "completed"
    return counts


def until_it_ends(case, directory, rng, wanted):
    """Runs a search that is killed until it ends; gives the kills and what ran though finished.

    `wanted` are the executions of each size that it is to end with.
    """
    log, kills, repeated = directory / "log", [], []
    while True:
        before, kept = begun(log), finished(directory)
        pid = fork(case, directory, log, rng.randint(1, case.operations))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for size, count in begun(log).items():
            if count - before[size] > wanted[size] - kept[size]:
                repeated.append(size)
        if status == -signal.SIGKILL:
            kills.append(sum(finished(directory).values()))
        else:
            return kills, repeated, status


def main(directory, kills, seed, case):
    # Each search traces its steps again, which takes longer than they do.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    rng = random.Random(seed)
    undisturbed = directory / "undisturbed"
    undisturbed.mkdir()
    pid = fork(case, undisturbed, undisturbed / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wanted = finished(undisturbed)
    searches = []
    while sum(len(found["kills"]) for found in searches) < kills:
        folder = directory / f"killed-{len(searches)}"
        folder.mkdir()
        found = until_it_ends(case, folder, rng, wanted)
        searches.append(dict(zip(("kills", "repeated", "status"), found, strict=True)))
    print(json.dumps(searches))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kills"), [("grid", 8), ("race", 4)])
def test_killed_search_ends_as_undisturbed_search(case, kills, tmp_path):
    searches = printed(__file__, tmp_path, kills, 1, case)
    assert sum(len(search["kills"]) for search in searches) >= kills
    assert [search["status"] for search in searches] == [0] * len(searches)
    assert [search["repeated"] for search in searches] == [[]] * len(searches)
    undisturbed = kbatch.load_study(tmp_path / "undisturbed" / "search")
    if case == "race":
        assert sum(len(trial.executions) for trial in undisturbed.trials) <= 11
    for number in range(len(searches)):
        study = kbatch.load_study(tmp_path / f"killed-{number}" / "search")
        assert study.problems == ()
        assert study.to_dataframe()[KEPT].equals(undisturbed.to_dataframe()[KEPT])
        assert _decided(study) == _decided(undisturbed)
        assert _ran(study) == _ran(undisturbed)
        assert _told(tmp_path / f"killed-{number}") == _told(tmp_path / "undisturbed")


def _decided(study):
    """The parts of a decision that do not depend on the time."""
    found = study.decide()
    judged = found.judgement
    return found.tied, found.worse, judged.rounds, judged.certified, judged.gaps


def _ran(study):
    """The seeds and results of each run, without throughput."""
    return {
        trial.trial_id: [
            (
                (run.seed, run.initial_weights, run.first_order),
                (run.status, run.updates, {**run.reported, "samples_per_second": None}),
                run.outcomes,
            )
            for run in trial.executions
        ]
        for trial in study.trials
    }


def _told(directory):
    """The results of each trial in keras-tuner's files, without throughput."""
    trials = {}
    for file in (directory / "search").glob("trial_*/trial.json"):
        trial = json.loads(file.read_text())
        metrics = trial["metrics"]["metrics"]
        metrics.pop("samples_per_second", None)
        kept = ("status", "score", "best_step", "message")
        trials[trial["trial_id"]] = [metrics, *(trial[name] for name in kept)]
    return trials


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), CASES[sys.argv[4]])
