"""How good is the pair of batch size and learning rate that each tool names, and what does it cost?

pip install '.[peers]'
python benchmarks/peers.py [--minutes 14] [--seeds 5] [--starts 0.125 1 8] [--tools loop ...]
    [--trainings 24] [--tolerance 0.01] [--save rows.jsonl]    14 minutes

The task is `mlp` of decision_tables.py: 2,048 images of MNIST to train, 1,500 to validate, SGD with
momentum, ten epochs, six batch sizes, float32. Your learning rate is 1/8, 1 or 8 times the task's
own. The named pair is valued by the recorded trainings of `tables.py`, which no search sees.

loop                the six lines that people write: one training of each size at your rate
always 32           keras-tuner's random search of the rate alone, at batch size 32
keras-tuner grid    each size at your rate; random and bayes: sizes, and rates of 1/64 to 64 times
                    yours
Optuna              TPE on both; Wilcoxon: six seeds for each pair, cut short by `WilcoxonPruner`
kbatch grid, race   the defaults, with the same tolerance as the columns

time        training time of the named size over the true answer's, geometric mean (decisions.py)
beyond      share of searches that name a pair more than the tolerance worse than the best one
lost        points of test accuracy below the best pair, with half of the 95 % interval
trainings   complete trainings: median
seconds     of a search, without imports and one first step: median

A tool without an end of its own trains `--trainings` times. Each search has a process of its own on
one core, two at a time, in shuffled order. No search starts that may not end in `--minutes`.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np
from decision_tables import mlp, mnist
from decisions import answer, true_qualities
from quick import parse_arguments
from tables import BASE_SIZE, FACTORS, SIZES, TRAINING, VALIDATION, read_table

RATE, EPOCHS = 0.02, 10  # Of `mlp` in decision_tables.py.
RATE_FACTORS = 1 / 64, 64.0  # The range in which tools search the learning rate.
REPEATS = 6  # `WilcoxonPruner` has to see four seeds before a p-value can be below its 0.1.
TOOLS = (
    "loop",
    "always 32",
    "keras-tuner grid",
    "keras-tuner random",
    "keras-tuner bayes",
    "Optuna",
    "Optuna Wilcoxon",
    "kbatch grid",
    "kbatch race",
)
QUICK_TOOLS = ("loop", "keras-tuner random", "Optuna", "kbatch race")
PACKAGES = ("tensorflow", "keras", "keras-tuner", "optuna")
Pair = tuple[int, float]


class Work:
    """A search to run in this process: its data, seed, limits and clock."""

    def __init__(self, asked: dict[str, Any]):
        self.tool, self.seed = asked["tool"], asked["seed"]
        self.trainings, self.tolerance = asked["trainings"], asked["tolerance"]
        self.rate = RATE * asked["start"]
        self.low, self.high = (factor * self.rate for factor in RATE_FACTORS)
        with np.load(asked["data"]) as data:
            x, y = data["x"], data["y"]
        self.x, self.y = x[:TRAINING], y[:TRAINING]
        end = TRAINING + VALIDATION
        self.held_out = x[TRAINING:end], y[TRAINING:end]
        compiled(self.rate).fit(self.x[:16], self.y[:16], verbose=0)

    def train(self, pair: Pair, number: int) -> float:
        """Train a pair; return its best validation accuracy."""
        import keras

        keras.utils.set_random_seed(1000 * self.seed + number)
        size, rate = pair
        held_out = {"validation_data": self.held_out}
        history = compiled(rate).fit(self.x, self.y, size, EPOCHS, verbose=0, **held_out)
        return max(history.history["val_accuracy"])


def compiled(rate: float):
    import keras

    net = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return net


# Each search returns the pair that it names, and its complete trainings.


def loop(work: Work) -> tuple[Pair, float]:
    scores = {size: work.train((size, work.rate), n) for n, size in enumerate(SIZES)}
    return (max(SIZES, key=lambda size: scores[size]), work.rate), len(SIZES)


def keras_tuner(work: Work) -> tuple[Pair, float]:
    import keras
    import keras_tuner

    kinds = {"grid": "GridSearch", "bayes": "BayesianOptimization"}
    kind = kinds.get(work.tool.split()[-1], "RandomSearch")
    sizes = [BASE_SIZE] if work.tool == "always 32" else list(SIZES)
    trained = 0

    class Both(keras_tuner.HyperModel):
        def build(self, hp):
            hp.Choice("batch_size", sizes)
            if kind != "GridSearch":
                hp.Float("learning_rate", work.low, work.high, sampling="log")
            return compiled(pair_of(hp)[1])

        def fit(self, hp, model, *args, **kwargs):
            nonlocal trained
            trained += 1
            keras.utils.set_random_seed(1000 * work.seed + trained)
            return model.fit(*args, batch_size=hp.get("batch_size"), **kwargs)

    def pair_of(hp) -> Pair:
        rate = work.rate if kind == "GridSearch" else hp.get("learning_rate")
        return hp.get("batch_size"), rate

    limit = {} if kind == "GridSearch" else {"max_trials": work.trainings}
    with tempfile.TemporaryDirectory() as folder:
        tuner = getattr(keras_tuner, kind)(
            Both(), "val_accuracy", seed=1000 * work.seed + 1, directory=folder, **limit
        )
        tuner.search(work.x, work.y, epochs=EPOCHS, validation_data=work.held_out, verbose=0)
        return pair_of(tuner.get_best_hyperparameters()[0]), trained


def optuna_search(work: Work) -> tuple[Pair, float]:
    import optuna

    repeats = REPEATS if work.tool.endswith("Wilcoxon") else 1
    trained = 0

    def objective(trial) -> float:
        nonlocal trained
        size = trial.suggest_categorical("batch_size", SIZES)
        pair = size, trial.suggest_float("learning_rate", work.low, work.high, log=True)
        scores: list[float] = []
        for step in range(repeats):
            scores.append(work.train(pair, step if repeats > 1 else trial.number))
            trained += 1
            if trained == work.trainings:
                trial.study.stop()
                break
            trial.report(scores[-1], step)
            if step + 1 < repeats and trial.should_prune():
                break
        return fmean(scores)  # Also of a pruned trial, as Optuna's documentation says.

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.WilcoxonPruner() if repeats > 1 else None
    sampler = optuna.samplers.TPESampler(seed=work.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(objective)
    return (study.best_params["batch_size"], study.best_params["learning_rate"]), trained


def kbatch_search(work: Work) -> tuple[Pair, float]:
    import kbatch
    from kbatch.study.compared_trials import complete_trainings

    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(
                lambda: compiled(work.rate),
                SIZES,
                dtype_policy="float32",
                seed=1000 * work.seed + 1,
            ),
            "val_accuracy",
            strategy=work.tool.split()[1],
            tolerance=work.tolerance,
            max_trainings=min(2 * len(SIZES), work.trainings),  # As by default, or fewer.
            directory=folder,
        )
        tuner.search(work.x, work.y, epochs=EPOCHS, validation_data=work.held_out, verbose=0)
        decision = tuner.study.decide()
        rate = decision.learning_rate or work.rate
        return (decision.batch_size or BASE_SIZE, rate), complete_trainings(tuner.study.trials)


SEARCHES = {
    "loop": loop,
    "always": keras_tuner,
    "keras-tuner": keras_tuner,
    "Optuna": optuna_search,
    "kbatch": kbatch_search,
}


def run_inside(asked: dict[str, Any]) -> None:
    """Run one search in this process and print its result as the last line."""
    work, name = Work(asked), asked["tool"].split()[0]
    if name == "kbatch":
        importlib.import_module("kbatch.search.tuner")  # Its import is no part of a search.
    began_s = time.perf_counter()
    pair, trainings = SEARCHES[name](work)
    seconds = time.perf_counter() - began_s
    print(json.dumps({"pair": pair, "trainings": trainings, "seconds": seconds}))


def run_process(asked: dict[str, Any], core: int) -> dict[str, Any]:
    """Run a search in a process on one core; return its row, or how it failed."""
    command = [sys.executable, __file__, "--inside", json.dumps(asked)]
    logs = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        ["taskset", "-c", str(core), *command],
        capture_output=True,
        text=True,
        env=os.environ | logs,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]}
    return asked | json.loads(done.stdout.splitlines()[-1])


def run_all(options: argparse.Namespace, data: str) -> list[dict[str, Any]]:
    """Run the searches on two cores, seed by seed, as many as fit in the minutes."""
    order, asked = random.Random(0), []
    same = {"data": data, "trainings": options.trainings, "tolerance": options.tolerance}
    for seed in range(options.seeds):
        pairs = [(tool, start) for tool in options.tools for start in options.starts]
        for tool, start in order.sample(pairs, len(pairs)):
            asked.append({"tool": tool, "start": start, "seed": seed} | same)
    end_s, longest_s = time.monotonic() + 60 * options.minutes, 0.0
    rows: list[dict[str, Any]] = []
    lock, waiting = threading.Lock(), iter(asked)

    def work(core: int) -> None:
        nonlocal longest_s
        while time.monotonic() + longest_s < end_s:
            with lock:
                if (one := next(waiting, None)) is None:
                    return
            began_s = time.monotonic()
            row = run_process(one, core)
            longest_s = max(longest_s, time.monotonic() - began_s)
            if "failed" in row:
                print(f"{one['tool']}: {row['failed']}", file=sys.stderr)
                continue
            with lock:
                rows.append(row)
                if options.save:
                    with options.save.open("a") as file:
                        file.write(json.dumps(row) + "\n")

    cores = sorted(os.sched_getaffinity(0))[:2]
    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def quality(means: np.ndarray, pair: Pair) -> float:
    """Return the mean test accuracy of a pair; between two rates by the logarithm."""
    size, rate = pair
    octave = math.log2(rate / (RATE * size / BASE_SIZE))
    return float(np.interp(octave, np.log2(FACTORS), means[SIZES.index(size)]))


def half_interval(values: list[float], groups: list[float]) -> float | None:
    """Return half of the 95 % interval of the mean over groups of the same size."""
    from scipy import stats

    each = [
        np.array([v for v, g in zip(values, groups, strict=True) if g == one])
        for one in set(groups)
    ]
    free = len(values) - len(each)
    if free < 1:
        return None
    variance = sum(float(((one - one.mean()) ** 2).sum()) for one in each) / free
    error = math.sqrt(variance * sum(1 / len(one) for one in each)) / len(each)
    return float(stats.t.ppf(0.975, free)) * error


def table_lines(rows: list[dict[str, Any]], tools: list[str], tolerance: float) -> Iterator[str]:
    """Yield the table in Markdown, a row for each tool."""
    table = read_table("mlp")
    best = true_qualities("mlp")[1]
    fastest_s = table.seconds[answer(table, tolerance)]
    yield "| | time | beyond | lost | trainings | seconds | searches |"
    yield "|---|---|---|---|---|---|---|"
    for tool in tools:
        own = [row for row in rows if row["tool"] == tool]
        if not own:
            yield f"| {tool} | - | - | - | - | - | 0 |"
            continue
        time_ = geometric_mean(
            table.seconds[SIZES.index(row["pair"][0])] / fastest_s for row in own
        )
        lost = [100 * (best - quality(table.truth, row["pair"])) for row in own]
        beyond = fmean(one > 100 * tolerance for one in lost)
        half = half_interval(lost, [row["start"] for row in own])
        lost_text = f"{fmean(lost):.2f}" + ("" if half is None else f" ± {half:.2f}")
        trainings, seconds = (median(row[key] for row in own) for key in ("trainings", "seconds"))
        cells = f"{time_:.2f}", f"{beyond:.0%}", lost_text, f"{trainings:.3g}", f"{seconds:.0f}"
        yield f"| {tool} | {' | '.join(cells)} | {len(own)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--starts", type=float, nargs="+", default=[1 / 8, 1.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trainings", type=int, default=24)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--save", type=Path, help="a file to which each search appends a line")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parse_arguments(parser, tools=list(QUICK_TOOLS), starts=[1.0], seeds=1, trainings=4)
    if options.inside is not None:
        run_inside(options.inside)
        return
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "mnist.npz"))
        np.savez(data, **dict(zip("xy", mnist(), strict=True)))
        rows = run_all(options, data)
    print(f"{datetime.date.today():%-d %B %Y}, {', '.join(versions)}")
    print(*table_lines(rows, options.tools, options.tolerance), sep="\n")


if __name__ == "__main__":
    main()
