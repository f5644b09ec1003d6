"""Does a search by goodput find the best batch size, at a part of the grid's cost?

python benchmarks/search_cost.py [--tasks mlp,cnn,table] [--seeds 0,1,2] [--limit 40] [--by clock]

Each task is trained to a target accuracy at each of six batch sizes, the grid, and then searched
by `strategy="goodput"` anew. A choice is judged by the seconds of training that the grid took to
the target with it, over those of the grid's best size: that of goodput, the largest size, which
max-memory rules take, as all of them fit, and the size of the largest throughput. A search is
judged by its wall time over the grid's. A size that misses the target within the limit counts as
the limit. Adam with the sqrt rule, float32.

A shared machine slows trials unlike each other. With --by sweep a choice is judged by the grid's
updates to the target times the seconds of an update in the search's interleaved sweep.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_tuner
import numpy as np
from sklearn.datasets import load_digits, make_classification

import kbatch

SIZES = kbatch.powers_of_two(16, 512)
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


def cnn():
    return [
        layers.Input((8, 8)),
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
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


# Data, layers, and the validation accuracy to come to.
TASKS = {"mlp": (digits, mlp, 0.95), "cnn": (digits, cnn, 0.96), "table": (table, wide, 0.88)}


def search(strategy, task, *, seed, limit_s, directory):
    """A search's tuner, and the wall time that it took."""
    data, stack, target = TASKS[task]
    x, y = data()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    held = len(x) // 5

    def build():
        model = keras.Sequential(stack())
        model.compile(
            keras.optimizers.Adam(2e-4), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        return model

    hypermodel = kbatch.BatchSizeHyperModel(
        build,
        SIZES,
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
        keep_checkpoints=0,
        directory=directory,
        project_name=strategy,
    )
    tuner.search(
        x[held:],
        y[held:],
        validation_data=(x[:held], y[:held]),
        epochs=1000,
        callbacks=[kbatch.StopAtTarget("val_accuracy", target), kbatch.TimeBudget(limit_s)],
        verbose=0,
    )
    return kbatch.load_study(tuner), time.perf_counter() - began_s


def grid_seconds(grid, sweep, limit_s, by):
    """Seconds to the target by batch size, the limit where it was missed."""
    if by == "clock":
        return {t.batch_size: t.cost("seconds_to_target") or limit_s for t in grid.trials}
    times_s = dict(zip(sweep.batch_sizes, sweep.update_times_s, strict=True))
    updates = {t.batch_size: t.cost("updates_to_target") for t in grid.trials}
    return {size: n * times_s[size] if n else limit_s for size, n in updates.items()}


def judged(task, seed, limit_s, by):
    """Ratios to the grid's best, and the search's share of the grid's wall time."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = {"seed": seed, "limit_s": limit_s, "directory": directory}
        grid, grid_s = search("grid", task, **arguments)
        found, found_s = search("goodput", task, **arguments)
    seconds = grid_seconds(grid, found.goodput, limit_s, by)
    best = min(seconds, key=seconds.__getitem__)
    fastest = max(grid.trials, key=lambda t: t.samples_per_second or 0).batch_size
    chosen = found.best_trial()
    choices = {
        "goodput": chosen.batch_size if chosen else SIZES[0],
        "largest": SIZES[-1],
        "fastest": fastest,
    }
    times = " ".join(f"{size}:{seconds[size]:.2f}" for size in SIZES)
    stop = found.goodput.decisions[-1].kind
    tried = [d.batch_size for d in found.goodput.decisions[:-1]]
    ratios = [seconds[size] / seconds[best] for size in choices.values()]
    print(
        f"{task:<6}{seed:>5}{best:>6}{choices['goodput']:>9}"
        + "".join(f"{ratio:9.2f}" for ratio in ratios)
        + f"{found_s / grid_s:9.2f}{grid_s:8.1f} s  tried {tried} ({stop}, sweep "
        f"{found.goodput.sweep_s:.1f} s); {times}",
        flush=True,
    )
    return [*ratios, found_s / grid_s]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=float, default=40.0, metavar="SECONDS")
    parser.add_argument("--by", choices=("clock", "sweep"), default="clock")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:  # TensorFlow's own first uses are no trial's.
        search("grid", "mlp", seed=0, limit_s=0.5, directory=directory)
    titles = ("goodput", "largest", "fastest", "cost")
    print(f"{'task':<6}{'seed':>5}{'best':>6}{'chosen':>9}" + "".join(f"{t:>9}" for t in titles))
    rows = [
        judged(task, int(seed), options.limit, options.by)
        for task in options.tasks.split(",")
        for seed in options.seeds.split(",")
    ]
    columns = list(zip(*rows, strict=True))
    for name, summary in (("median", statistics.median), ("worst", max)):
        print(f"{name:<26}" + "".join(f"{summary(column):9.2f}" for column in columns))


if __name__ == "__main__":
    main()
