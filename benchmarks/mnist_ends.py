"""Does a race end at the same size, however wrong the user's learning rate is, and in time?

python benchmarks/mnist_ends.py [--start 0.125 1 8] [--seed 0 1 2] [--task mlp] [--grid]   6 minutes

Trains for real what `decisions.py` replays: 2,048 of 5,000 MNIST images to train, 1,500 to
validate, six sizes from 16 to 512, by `mlp` (SGD with momentum) or `cnn` (Adam) of
`decision_tables.py`. The model is built with `--start` times the rate that suits 32 examples; the
race does not know. `--grid` adds a grid with three training runs of each size, whose learning rate
follows the size by the same rule.

size       that is named
rate       its learning rate, over the one that suits the size by the rule
answer     certain; certified, if another size may be preferred; or open
trainings  complete training runs of the whole search
seconds    of the whole search
forecast   the middle of what the search says before its first training run, over what the rest took
time       training time of the size over that of the fastest size that other seeds find within the
           tolerance
loss       test accuracy of the pair that is named below that of the best pair, in points, both by
           the seeds of `tables.py` that tell the truth
"""

import argparse
import contextlib
import io
import math
import os
import re
import tempfile
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from decision_tables import Task, rule_rate, tasks
from decisions import place_of
from tables import BASE_SIZE, SIZES, TRAINING, VALIDATION, Table, read_table

import kbatch

TOLERANCE = 0.01
STRATEGIES = {"race": {"strategy": "race"}, "grid": {"strategy": "grid", "executions_per_trial": 3}}
UNITS = {"s": 1, "min": 60, "h": 3600}


class Searched(NamedTuple):
    study: kbatch.Study
    seconds: float  # Of the whole search.
    forecast: float  # Middle of the announced seconds over those that the training runs took.


def builder(task: Task, start: float):
    def build() -> keras.Model:
        model, optimizer = task.build(), task.optimizer()
        optimizer.learning_rate = start * task.rate
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    return build


class Announced(io.StringIO):
    """What a search prints, and when it announced its price."""

    at_s = math.nan

    def write(self, text: str) -> int:
        if "complete trainings" in text and math.isnan(self.at_s):
            self.at_s = time.perf_counter()
        return super().write(text)

    def middle_s(self) -> float:
        found = re.search(r"trainings, ([\d.]+)(?: to ([\d.]+))? (s|min|h)\b", self.getvalue())
        if found is None:
            return math.nan
        low, high = found[1], found[2] or found[1]
        return UNITS[found[3]] * (float(low) + float(high)) / 2


def search(task: Task, strategy: str, *, start: float, seed: int) -> Searched:
    held_out = slice(TRAINING, TRAINING + VALIDATION)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(Announced()) as said:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(
                builder(task, start), SIZES, base_batch_size=BASE_SIZE, seed=1000 * seed + 1
            ),
            "val_accuracy",
            tolerance=TOLERANCE,
            directory=folder,
            **STRATEGIES[strategy],
        )
        began_s = time.perf_counter()
        tuner.search(
            task.x[:TRAINING],
            task.y[:TRAINING],
            validation_data=(task.x[held_out], task.y[held_out]),
            epochs=task.epochs,
            verbose=1,
        )
        ended_s = time.perf_counter()
        return Searched(tuner.study, ended_s - began_s, said.middle_s() / (ended_s - said.at_s))


def fastest_size(truth: Table) -> int:
    """Return the place of the fastest size that is within the tolerance of the best."""
    best = truth.truth.max(1)
    near = [k for k in range(len(SIZES)) if best[k] >= best.max() - TOLERANCE]
    least = min(truth.seconds[k] for k in near)
    return min(k for k in near if truth.seconds[k] <= 1.05 * least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=float, nargs="+", default=[0.125, 1.0, 8.0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", default="mlp", choices=("mlp", "cnn"))
    parser.add_argument("--grid", action="store_true")
    options = parser.parse_args()
    task, table = tasks([options.task])[options.task], read_table(options.task)
    fastest = fastest_size(table)
    # The first training of a process pays for all, and belongs to no search.
    builder(task, 1.0)().fit(task.x[:TRAINING], task.y[:TRAINING], verbose=0)
    print(f"{options.task}: other seeds find {SIZES[fastest]}")
    print(
        f"{'start':>6}{'seed':>5} {'':6}{'size':>5}{'rate':>8}  {'answer':11}{'trainings':>9}"
        f"{'seconds':>9}{'forecast':>10}{'time':>7}{'loss':>7}",
        flush=True,
    )
    for start in options.start:
        for seed in options.seed:
            for strategy in ("race", "grid") if options.grid else ("race",):
                study, seconds, forecast = search(task, strategy, start=start, seed=seed)
                found = study.decide()
                size, rate = found.batch_size, found.learning_rate
                assert size is not None
                factor = (rate or math.nan) / rule_rate(task, size)
                answer = "certain" if found.certain else "certified" if found.certified else "open"
                epochs = [
                    len(run.epochs) + run.epochs_repeated
                    for trial in study.trials
                    for run in trial.executions
                ]
                slower = table.seconds[SIZES.index(size)] / table.seconds[fastest]
                loss = 100 * (table.truth.max() - table.truth[place_of((size, factor), 0)])
                print(
                    f"{start:6g}{seed:5} {strategy:6}{size:5}{factor:8.3g}  {answer:11}"
                    f"{sum(epochs) / task.epochs:9.1f}{seconds:9.0f}{forecast:10.2f}{slower:7.2f}"
                    f"{loss:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
