"""How good are the decisions of a recommendation, apart from any clock?

python benchmarks/recommend_decisions.py [--draws 500]        ten seconds

Updates to the loss that a pilot came to were counted on scikit-learn's digits at eight batch sizes
(seed 2 of three, learning rate by the rule from 32 on); an update takes a + (b + e) B, with e an
example's share of an epoch's start. In each draw a run needs a tenth more or less, the time of each
size is off by 5 %, a by 15 %, e by a third, and the pilot's noise scale by a factor of two
(standard deviations). A choice is judged by the time to the loss that it really takes over the best
size's.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np

from kbatch.analysis.next_size import FinishedRun
from kbatch.recommendation.choice import TrainedRuns, decide
from kbatch.recommendation.limits import TimedUpdate, relative_time
from kbatch.throughput.record import TimedRounds

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
PILOT, MOST_RUNS, LOST = 32, 5, 1.3


class Task(NamedTuple):
    """Updates by size, seconds a, b and e, and the noise scale that pilots told."""

    updates: tuple[int, ...]
    update_s: float
    example_s: float
    epoch_example_s: float
    noise_scale: float

    def time_s(self, size: int, fixed: float = 1.0, epoch: float = 1.0) -> float:
        per_example_s = self.example_s + epoch * self.epoch_example_s
        return fixed * self.update_s + per_example_s * size


ADAM = (4920, 2620, 1440, 860, 506, 318, 195, 128)
SGD = (7240, 3620, 1810, 905, 428, 214, 109, 274)
CNN = (720, 400, 270, 140, 92, 53, 40, 38)
TASKS = {
    "MLP, Adam": Task(ADAM, 8e-4, 5e-7, 2.6e-5, 450),
    "MLP, Adam, long epochs": Task(ADAM, 8e-4, 5e-7, 0.0, 450),
    "MLP, SGD": Task(SGD, 8e-4, 5e-7, 2.6e-5, 460),
    "MLP, SGD, long epochs": Task(SGD, 8e-4, 5e-7, 0.0, 460),
    "CNN, Adam": Task(CNN, 2.5e-3, 1.2e-5, 9e-6, 82),
    "CNN, Adam, long epochs": Task(CNN, 2.5e-3, 1.2e-5, 0.0, 82),
}


def draw(task: Task, rng: np.random.Generator) -> dict[str, tuple[int, int]]:
    """Draw the size that each way chooses, and how many runs it made."""
    fixed, epoch = rng.lognormal(0, 0.15), rng.lognormal(0, 0.33)
    times_s = {s: task.time_s(s, fixed, epoch) * rng.lognormal(0, 0.05) for s in SIZES}
    needed = {
        size: max(1, round(updates * rng.lognormal(0, 0.1)))
        for size, updates in zip(SIZES, task.updates, strict=True)
    }
    told = task.noise_scale * rng.lognormal(0, math.log(2))
    ways = [TimedUpdate(size, size, time_s) for size, time_s in times_s.items()]
    alone = min(ways, key=lambda way: relative_time(way, noise_scale=told))
    rounds = [TimedRounds(size, size, (0,), (time_s,)) for size, time_s in times_s.items()]
    runs = [FinishedRun(PILOT, needed[PILOT] * times_s[PILOT], needed[PILOT], told, told / 2)]
    while len(runs) < MOST_RUNS and (sizes := TrainedRuns(rounds, None, runs).worth_training()):
        size = sizes[0]
        best = min(run.cost for run in runs if run.cost is not None)
        cost, most = needed[size] * times_s[size], round(LOST * best / times_s[size])
        lost = cost > LOST * best
        runs.append(FinishedRun(size, None if lost else cost, most if lost else needed[size]))
    answer = decide(TrainedRuns(rounds, None, runs), base_batch_size=PILOT, rule=None)
    if answer.batch_size is None:
        raise AssertionError("A pilot at its loss decides.")
    return {"noise scale": (alone.batch_size, 1), "trained sizes": (answer.batch_size, len(runs))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=500)
    options = parser.parse_args()
    print(
        f"{'task':<24}{'best':>5}  {'by':<14}{'named':>6}{'median':>8}{'99 %':>7}{'<= 1.15':>9}"
        f"{'one step':>10}{'runs':>6}"
    )
    for name, task in TASKS.items():
        rng = np.random.default_rng(0)
        true = {s: n * task.time_s(s) for s, n in zip(SIZES, task.updates, strict=True)}
        best = min(true, key=lambda size: true[size])
        draws = [draw(task, rng) for _ in range(options.draws)]
        for way in draws[0]:
            sizes = np.array([draw[way][0] for draw in draws])
            regrets = np.array([true[int(size)] for size in sizes]) / true[best]
            named = np.median(sizes)
            agreeing = np.mean(np.abs(np.log2(sizes / named)) <= 1)
            print(
                f"{name:<24}{best:>5}  {way:<14}{named:>6.0f}{np.median(regrets):>8.2f}"
                f"{np.quantile(regrets, 0.99):>7.2f}{np.mean(regrets <= 1.15):>9.0%}"
                f"{agreeing:>10.0%}{np.mean([draw[way][1] for draw in draws]):>6.1f}"
            )


if __name__ == "__main__":
    main()
