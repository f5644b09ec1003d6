"""Does a race end at the same size, however wrong the user's learning rate is?

python benchmarks/mnist_ends.py [--start 0.125 8] [--seed 0 1] [--task mlp]    within 8 minutes

Trains for real what `decisions.py` replays: 2,048 of 5,000 MNIST images to train, 1,500 to
validate, six sizes from 16 to 512, by `mlp` (SGD with momentum) or `cnn` (Adam) of
`decision_tables.py`. The model is built with `--start` times the rate that suits 32 examples; the
race does not know. Beside it a grid with three executions of each size, whose learning rate follows
the size by the same rule. Each start and seed is a run of its own: give one of each, and several
go side by side.

size       that is named
rate       its learning rate, over the one that suits the size by the rule
answer     certain; certified, where another size may be preferred; or open
trainings  of the whole search
loss       test accuracy of the pair that is named below that of the best pair, in points, both by
           the seeds of `tables.py` that tell the truth
"""

import argparse
import math
import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from decision_tables import Task, rule_rate, tasks
from decisions import place_of
from tables import BASE_SIZE, SIZES, TRAINING, VALIDATION, read_table

import kbatch

STRATEGIES = {"race": {"strategy": "race"}, "grid": {"strategy": "grid", "executions_per_trial": 3}}


def builder(task: Task, start: float):
    def build() -> keras.Model:
        model, optimizer = task.build(), task.optimizer()
        optimizer.learning_rate = start * task.rate
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    return build


def search(task: Task, strategy: str, *, start: float, seed: int) -> tuple[kbatch.Study, float]:
    """Search for real; return the study and the seconds that it took."""
    held_out = slice(TRAINING, TRAINING + VALIDATION)
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(
                builder(task, start), SIZES, base_batch_size=BASE_SIZE, seed=1000 * seed + 1
            ),
            "val_accuracy",
            directory=folder,
            **STRATEGIES[strategy],
        )
        began_s = time.perf_counter()
        tuner.search(
            task.x[:TRAINING],
            task.y[:TRAINING],
            validation_data=(task.x[held_out], task.y[held_out]),
            epochs=task.epochs,
            verbose=0,
        )
        return tuner.study, time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=float, nargs="+", default=[0.125, 8.0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--task", default="mlp", choices=("mlp", "cnn"))
    options = parser.parse_args()
    task, truth = tasks([options.task])[options.task], read_table(options.task).truth
    # The first training of a process pays for all, and belongs to no search.
    builder(task, 1.0)().fit(task.x[:TRAINING], task.y[:TRAINING], verbose=0)
    print(
        f"{'start':>6}{'seed':>5} {'':6}{'size':>5}{'rate':>8}  {'answer':11}{'trainings':>9}"
        f"{'seconds':>9}{'loss':>7}",
        flush=True,
    )
    named: dict[str, list[int]] = {strategy: [] for strategy in STRATEGIES}
    for start in options.start:
        for seed in options.seed:
            for strategy in STRATEGIES:
                study, seconds = search(task, strategy, start=start, seed=seed)
                found = study.decide()
                size, rate = found.batch_size, found.learning_rate
                assert size is not None
                named[strategy].append(size)
                factor = (rate or math.nan) / rule_rate(task, size)
                answer = "certain" if found.certain else "certified" if found.certified else "open"
                epochs = [len(run.epochs) for trial in study.trials for run in trial.executions]
                trainings = sum(epochs) / task.epochs
                loss = 100 * (truth.max() - truth[place_of((size, factor), 0)])
                print(
                    f"{start:6g}{seed:5} {strategy:6}{size:5}{factor:8.3g}  {answer:11}"
                    f"{trainings:9.1f}{seconds:9.0f}{loss:7.2f}",
                    flush=True,
                )
    for strategy, sizes in named.items():
        octaves = math.log2(max(sizes) / min(sizes))
        print(f"{strategy}: {min(sizes)} to {max(sizes)}, {octaves:.0f} octaves apart")


if __name__ == "__main__":
    main()
