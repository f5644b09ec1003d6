"""Does a search by goodput find the best batch size, at a part of the grid's cost?

python benchmarks/search_cost.py [--tasks "mlp,wide cnn"] [--seeds 0,1,2] [--limit 30]
    [--save rows.jsonl] [--within SECONDS]

Each task is trained to a target accuracy at each of six batch sizes, the grid, and then searched
by `strategy="goodput"`. A choice is judged by the seconds of train steps that the grid took to the
target with it, over those of the grid's best size: that of goodput, the largest size, which
max-memory rules take, as all of them fit, and the size of the largest throughput. The first step,
which traces, is left out: it costs every size the same. `with tracing` has it in, as the user
waits for it. `sweep` is free of what happened to single trials: the grid's updates to the target
times the seconds of an update in the search's interleaved sweep. `cost` is the wall time of
the search over the grid's. A size that misses the target within the limit counts as the limit.
Adam with the sqrt rule, float32.

With --save each task and seed is kept when it is done, and not run again; --within begins no
further one that is not likely to end in time. So the benchmark can be run in pieces.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_tuner
import numpy as np
from sklearn.datasets import load_digits, make_classification

import kbatch

SIZES = kbatch.powers_of_two(16, 512)
COLUMNS = ("goodput", "largest", "fastest", "with tracing", "sweep", "cost")
layers = keras.layers


def digits():
    found = load_digits()
    return (found.images / 16.0).astype("float32"), found.target


def table():
    x, y = make_classification(
        6000, 24, n_informative=12, n_classes=4, n_clusters_per_class=3, random_state=0
    )
    return x.astype("float32"), y


def mlp():
    return [
        layers.Input((8, 8)),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]


def cnn(filters=16):
    return [
        layers.Input((8, 8)),
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(filters, 3, padding="same", activation="relu"),
        layers.Conv2D(2 * filters, 3, strides=2, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]


def wide():
    return [
        layers.Input((24,)),
        layers.Dense(128, activation="relu"),
        layers.Dense(128, activation="relu"),
        layers.Dense(4, activation="softmax"),
    ]


class Task(NamedTuple):
    """What is trained, and how far.

    Attributes:
        data: Gives inputs and labels.
        layers: Gives the layers of the model.
        target: Validation accuracy to come to.
        learning_rate: That of batch size 16: so small that training lasts longer than tracing.
        passes: Passes over the data in an epoch, at whose end the target is looked at.
    """

    data: Callable[[], tuple[np.ndarray, np.ndarray]]
    layers: Callable[[], list[keras.Layer]]
    target: float
    learning_rate: float
    passes: int


TASKS = {
    "mlp": Task(digits, mlp, 0.95, 5e-5, 4),
    "cnn": Task(digits, cnn, 0.96, 5e-5, 4),
    "wide cnn": Task(digits, lambda: cnn(48), 0.97, 1e-4, 2),
    "table": Task(table, wide, 0.84, 1e-4, 2),
}


def search(strategy, name, *, seed, limit_s, directory, sizes=SIZES):
    """A search's study, and the wall time that it took."""
    task = TASKS[name]
    x, y = task.data()
    order = np.random.default_rng(0).permutation(len(x))
    held, trained = np.split(order, [len(x) // 5])
    trained = np.tile(trained, task.passes)

    def build():
        model = keras.Sequential(task.layers())
        optimizer = keras.optimizers.Adam(task.learning_rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    hypermodel = kbatch.BatchSizeHyperModel(
        build,
        sizes,
        micro_batch_size=None,
        dtype_policy="float32",
        learning_rate_scaling="sqrt",
        seed=seed,
    )
    began_s = time.perf_counter()
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        keras_tuner.Objective("seconds_to_target", "min"),
        strategy=strategy,
        directory=directory,
        project_name=strategy,
    )
    tuner.search(
        x[trained],
        y[trained],
        validation_data=(x[held], y[held]),
        epochs=1000,
        callbacks=[kbatch.StopAtTarget("val_accuracy", task.target), kbatch.TimeBudget(limit_s)],
        verbose=0,
    )
    return kbatch.load_study(tuner), time.perf_counter() - began_s


def measured(task, seed, limit_s):
    """What a grid and a search by goodput did, as it is kept in a file."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = {"seed": seed, "limit_s": limit_s, "directory": directory}
        grid, grid_s = search("grid", task, **arguments)
        found, found_s = search("goodput", task, **arguments)
    trials = sorted(grid.trials, key=lambda trial: trial.batch_size)
    chosen = found.best_trial()
    return {
        "task": task,
        "seed": seed,
        "limit_s": limit_s,
        "seconds": [trial.cost("seconds_to_target") for trial in trials],
        "first_step_s": [trial.executions[0].first_step_s for trial in trials],
        "updates": [trial.cost("updates_to_target") for trial in trials],
        "samples_per_second": [trial.samples_per_second or 0.0 for trial in trials],
        "swept_s": found.goodput.update_times_s,
        "sweep_s": found.goodput.sweep_s,
        "chosen": None if chosen is None else chosen.batch_size,
        "tried": [d.batch_size for d in found.goodput.decisions if d.batch_size],
        "stop": found.goodput.decisions[-1].kind,
        "grid_s": grid_s,
        "goodput_s": found_s,
    }


def to_target(row, by):
    """Seconds to the target by batch size, the limit where it was missed."""
    missed = [row["limit_s"] if cost is None else None for cost in row["seconds"]]
    if by == "sweep":
        seconds = [n and n * s for n, s in zip(row["updates"], row["swept_s"], strict=True)]
    else:
        first = row["first_step_s"] if by == "steps" else [0.0] * len(SIZES)
        pairs = zip(row["seconds"], first, strict=True)
        seconds = [None if cost is None else cost - step for cost, step in pairs]
    found = zip(seconds, missed, strict=True)
    return dict(zip(SIZES, (limit if s is None else s for s, limit in found), strict=True))


def ratios(row):
    """What the choices took over the grid's best, and the search's share of the grid's time."""
    rates = dict(zip(row["samples_per_second"], SIZES, strict=True))
    goodput = row["chosen"] or SIZES[0]

    def over_best(size, by):
        seconds = to_target(row, by)
        return seconds[size] / min(seconds.values())

    steps = [over_best(size, "steps") for size in (goodput, SIZES[-1], rates[max(rates)])]
    others = [over_best(goodput, by) for by in ("clock", "sweep")]
    return [*steps, *others, row["goodput_s"] / row["grid_s"]]


def show(row):
    seconds = to_target(row, "steps")
    best = min(seconds, key=seconds.__getitem__)
    times = " ".join(f"{size}:{s:.2f}" for size, s in seconds.items())
    print(
        f"{row['task']:<9}{row['seed']:>5}{best:>6}{row['chosen'] or 'none':>9}"
        + "".join(f"{ratio:14.2f}" for ratio in ratios(row))
        + f"{row['grid_s']:8.1f} s  tried {row['tried']} ({row['stop']}, sweep "
        f"{row['sweep_s']:.1f} s); {times}",
        flush=True,
    )


def rows_of(options):
    """The rows of all tasks and seeds that were run before or could be run now."""
    file = options.save
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["task"], row["seed"], row["limit_s"]): row for row in kept}
    began_s, longest_s, warm, rows = time.perf_counter(), 0.0, False, []
    for seed in map(int, options.seeds.split(",")):
        for task in options.tasks.split(","):
            row = known.get((task, seed, options.limit))
            if row is None:
                unit_began_s = time.perf_counter()
                if unit_began_s - began_s + 1.2 * longest_s > options.within:
                    print(f"{task}, seed {seed}: left for another run")
                    continue
                if not warm:  # TensorFlow's own first uses are no trial's.
                    warm_up()
                    warm = True
                row = measured(task, seed, options.limit)
                longest_s = max(longest_s, time.perf_counter() - unit_began_s)
                with file.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
            show(row)
            rows.append(row)
    return rows


def warm_up():
    with tempfile.TemporaryDirectory() as directory:
        search("grid", "mlp", seed=0, limit_s=0.5, directory=directory, sizes=(16,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options.save = options.save or Path(directory) / "rows.jsonl"
        titles = "".join(f"{title:>14}" for title in COLUMNS)
        print(f"{'task':<9}{'seed':>5}{'best':>6}{'chosen':>9}{titles}")
        rows = rows_of(options)
    if rows:
        columns = list(zip(*map(ratios, rows), strict=True))
        for name, summary in (("median", statistics.median), ("worst", max)):
            print(f"{name:<29}" + "".join(f"{summary(column):14.2f}" for column in columns))


if __name__ == "__main__":
    main()
