"""How good is the pair of batch size and learning rate that each tool names, and what does it cost?

pip install '.[peers]'
python benchmarks/peers.py [--tables mlp cnn ...] [--tools loop "Optuna" ...] [--trainings 24]
    5 minutes

Optuna, keras-tuner, the loop and kbatch search the recorded trainings of `tables.py`. A tool asks
for a pair as in real use and gets the recorded curve of the next seed: the best value after an
epoch, as `fit` reports it. Its rates are rounded to the recorded ones, an octave apart. Your
learning rate is 1/8, 1 or 8 times the task's own. The true answer and the columns are those of
`decisions.py`, by seeds that no search sees.

loop                  the six lines that people write: one training of each size at your rate
keras-tuner grid      the same
keras-tuner random    sizes, and rates of 1/64 to 64 times yours, in `--trainings` trainings
keras-tuner bayes     the same by `BayesianOptimization`: on request, it computes over 10 minutes
Optuna                the same by TPE, its default; Wilcoxon: six seeds for each pair, which
                      `WilcoxonPruner` cuts short
kbatch grid, race     as in a live search
always 32             batch size 32; only its learning rate is searched, by complete runs

time        training time of the named size over the true answer, geometric mean
beyond      share of searches that name a pair more than the tolerance worse than the best one
lost        quality of the named pair below the best one, in points, or % of the best loss
trainings   complete trainings; a run of e of E epochs counts e / E
seconds     training time of the search over one complete training of each size
"""

import argparse
import datetime
import functools
import importlib.metadata
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from statistics import fmean

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from decisions import Outcome, Place, Score, Search, goal, joined, race, searches
from quick import parse_arguments
from tables import BASE_SIZE, DEVELOPMENT, FACTORS, SIZES, read_table

from kbatch.analysis.judge import judge

STARTS = (-3, 0, 3)  # Octaves between your rate and the task's own.
WIDEST = 64.0  # Tools search rates of 1/64 to 64 times yours.
REPEATS = 6  # `WilcoxonPruner` has to see four seeds before a p-value can be below its 0.1.
# Octaves of the task's own rate for each octave of the batch size: SGD's rule, or Adam's.
RULES = {"mlp": 1.0, "mlp_loss": 1.0, "noisy_table": 1.0, "cnn": 0.5, "text": 0.5}
PACKAGES = ("optuna", "keras-tuner", "keras", "tensorflow")


class Trainings:
    """The trainings of one search: a pair is a size and a multiple of your learning rate."""

    def __init__(self, search: Search):
        self.search = search
        self.table = search.table
        self.seconds: list[float] = []

    def place(self, pair: tuple[int, float]) -> Place:
        size, rate = pair
        octave = math.log2(rate) - RULES[self.table.name] * math.log2(size / BASE_SIZE)
        factor = round(octave) + self.search.off - round(math.log2(FACTORS[0]))
        return SIZES.index(size), min(max(factor, 0), len(FACTORS) - 1)

    def train(self, pair: tuple[int, float], number: int) -> float:
        """Return the best value of a recorded training, or the worst one if it diverged."""
        table, place = self.table, self.place(pair)
        self.seconds.append(float(table.seconds[place[0]]))
        curve = table.curve[*place, self.search.seeds[number % len(self.search.seeds)]]
        if not np.isfinite(curve).all():
            return 0.0 if table.larger_is_better else float(np.nanmax(table.curve))
        return float(curve.max() if table.larger_is_better else curve.min())

    def named(self, pair: tuple[int, float]) -> Outcome:
        place = self.place(pair)
        return Outcome(place, len(self.seconds), sum(self.seconds), False, [place])


def loop(search: Search, most: int) -> Outcome:
    trainings = Trainings(search)
    values = {size: trainings.train((size, 1.0), number) for number, size in enumerate(SIZES)}
    best = max if search.table.larger_is_better else min
    return trainings.named((best(SIZES, key=lambda size: values[size]), 1.0))


def keras_tuner_search(search: Search, most: int, *, tuner: str) -> Outcome:
    import keras_tuner

    trainings = Trainings(search)
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", list(SIZES))
    limit = {}
    if tuner != "GridSearch":
        space.Float("rate", 1 / WIDEST, WIDEST, sampling="log")
        limit = {"max_trials": most}

    def pair_of(values: keras_tuner.HyperParameters) -> tuple[int, float]:
        return values.get("batch_size"), 1.0 if tuner == "GridSearch" else values.get("rate")

    class Replayed(getattr(keras_tuner, tuner)):
        def run_trial(self, trial, **settings):
            number = len(trainings.seconds)
            return {"value": trainings.train(pair_of(trial.hyperparameters), number)}

    direction = "max" if search.table.larger_is_better else "min"
    with tempfile.TemporaryDirectory() as folder:
        replayed = Replayed(
            objective=keras_tuner.Objective("value", direction),
            hyperparameters=space,
            directory=folder,
            seed=1 + search.seeds[0],
            **limit,
        )
        replayed.search(verbose=0)
        return trainings.named(pair_of(replayed.get_best_hyperparameters()[0]))


def optuna_search(search: Search, most: int, *, repeats: int = 1) -> Outcome:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trainings = Trainings(search)

    def objective(trial: optuna.Trial) -> float:
        size = trial.suggest_categorical("batch_size", SIZES)
        pair = size, trial.suggest_float("rate", 1 / WIDEST, WIDEST, log=True)
        values: list[float] = []
        for step in range(repeats):
            values.append(trainings.train(pair, step if repeats > 1 else trial.number))
            if len(trainings.seconds) == most:
                trial.study.stop()
                break
            trial.report(values[-1], step)
            if step + 1 < repeats and trial.should_prune():
                break
        return fmean(values)  # Also of a pruned trial, as Optuna's documentation says.

    study = optuna.create_study(
        direction="maximize" if search.table.larger_is_better else "minimize",
        sampler=optuna.samplers.TPESampler(seed=search.seeds[0]),
        pruner=optuna.pruners.WilcoxonPruner() if repeats > 1 else None,
    )
    study.optimize(objective)
    return trainings.named((study.best_params["batch_size"], study.best_params["rate"]))


def kbatch_grid(search: Search, most: int) -> Outcome:
    runs = [search.run(size, 1.0, 0) for size in SIZES]
    return search.outcome(runs, judge(runs, **goal(search)))


def kbatch_race(search: Search, most: int, *, sizes: tuple[int, ...] = SIZES) -> Outcome:
    return race(search, sizes=sizes)


Plan = Callable[[Search, int], Outcome]
TOOLS: dict[str, Plan] = {
    "loop": loop,
    "keras-tuner grid": functools.partial(keras_tuner_search, tuner="GridSearch"),
    "keras-tuner random": functools.partial(keras_tuner_search, tuner="RandomSearch"),
    "keras-tuner bayes": functools.partial(keras_tuner_search, tuner="BayesianOptimization"),
    "Optuna": optuna_search,
    "Optuna Wilcoxon": functools.partial(optuna_search, repeats=REPEATS),
    "kbatch grid": kbatch_grid,
    "kbatch race": kbatch_race,
    "always 32": functools.partial(kbatch_race, sizes=(BASE_SIZE,)),
}
SLOW = "keras-tuner bayes"
KNOW_TOLERANCE = {"kbatch grid", "kbatch race", "always 32"}


def scores(tool: str, names: list[str], starts: list[int], most: int) -> Iterator[Score]:
    """Yield the scores of a tool for each table and tolerance."""
    for name in names:
        table, outcomes = read_table(name), []
        for tolerance in table.tolerances:
            if not outcomes or tool in KNOW_TOLERANCE:
                drawn = [one for one in searches(table, tolerance) if one.off in starts]
                outcomes = [TOOLS[tool](search, most) for search in drawn]
            yield Score.of(outcomes, table, tolerance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=list(DEVELOPMENT), choices=DEVELOPMENT)
    tools = [tool for tool in TOOLS if tool != SLOW]
    parser.add_argument("--tools", nargs="+", default=tools, choices=list(TOOLS))
    parser.add_argument("--trainings", type=int, default=24)
    parser.add_argument("--starts", type=int, nargs="+", default=list(STARTS), metavar="OCTAVES")
    options = parse_arguments(parser, tables=["mlp"], trainings=12, starts=[0])
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    print(f"{datetime.date.today():%-d %B %Y}, {', '.join(versions)}")
    print("| | time | beyond | lost | trainings | seconds |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for tool in options.tools:
        rows = scores(tool, options.tables, options.starts, options.trainings)
        score = joined(list(rows))
        cells = [
            f"{math.exp(score.slowdown.mean()):.2f}",
            f"{100 * score.beyond.mean():.2g} %",
            f"{score.lost.mean():.2f}",
            f"{score.trainings.mean():.1f}",
            f"{score.loops.mean():.2f}",
        ]
        print(f"| {tool} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
