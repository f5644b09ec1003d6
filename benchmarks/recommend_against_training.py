"""How good is the recommended batch size, when it and its neighbours are trained?

python benchmarks/recommend_against_training.py FOLDER [--net mlp] [--seeds 0,1,2] [--budget 60]

One recommendation on scikit-learn's digits, kept in the folder; then all sizes from 16 to 1,024 are
trained by `fit` on the arrays, with the learning rate that the recommendation gives each, to the
held-out loss that its pilot came to, or until one took four times as long as the recommended size.
Each run is kept in the folder too, so that the seeds may be trained by several commands: the table
is of all there are. Seconds are those of the epochs without validation, the first step (graph
building) taken as long as a median one. The examples held out are the pilot's. `predicted` is the
time that the recommendation gives a size, `measured` the median over the seeds, both over those of
the recommended size.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from recommend_repeatability import NETS

import kbatch
from kbatch.demo import load_digits

SIZES = kbatch.powers_of_two(16, 1024)
_MOST_S = 40.0
_LOST = 4.0


class Epochs(keras.callbacks.Callback):
    """Counts seconds and updates of epochs, and ends at a held-out loss."""

    def __init__(self, target: float, most_s: float):
        super().__init__()
        self.target = target
        self.most_s = most_s
        self.steps_s: list[float] = []
        self.reached = False
        self._before_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._before_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._before_s)
        self._before_s = now_s

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None):
        self.reached = (logs or {})["val_loss"] <= self.target
        model: Any = self.model
        model.stop_training = self.reached or self.seconds > self.most_s

    @property
    def seconds(self) -> float:
        """Seconds of all updates, the first one as long as a median one."""
        return sum(self.steps_s[1:]) + statistics.median(self.steps_s)


def train(
    build, pilot, batch_size: int, *, rate: float, target: float, most_s: float, seed: int
) -> dict:
    """Trains until the held-out loss is at the target, or for the seconds given."""
    x, y = load_digits()
    order = np.random.default_rng(pilot.seed).permutation(len(x))
    held, kept = order[: len(x) // 5], order[len(x) // 5 :]
    keras.utils.set_random_seed(seed)
    model = build()
    model.optimizer.learning_rate = rate
    epochs = Epochs(target, most_s)
    model.fit(
        x[kept],
        y[kept],
        batch_size=batch_size,
        validation_data=(x[held], y[held]),
        validation_batch_size=512,
        epochs=10_000,
        callbacks=[epochs],
        verbose=0,
    )
    return {
        "batch_size": batch_size,
        "seed": seed,
        "reached": epochs.reached,
        "updates": len(epochs.steps_s),
        "seconds": epochs.seconds,
    }


def recommended(folder: Path, net: str, budget_s: float) -> kbatch.Recommendation:
    """Gives the recommendation of the folder, made where it is missing."""
    file = folder / f"{net}.json"
    if not file.exists():
        found = kbatch.recommend(NETS[net], *load_digits(), budget_s=budget_s, seed=0)
        found.save(file)
    return kbatch.Recommendation.load(file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--net", choices=sorted(NETS), default="mlp")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--budget", type=float, default=60.0)
    options = parser.parse_args()
    found = recommended(options.folder, options.net, options.budget)
    print(found)
    pilot, rate = found.pilot, found.base_learning_rate
    if found.batch_size is None or pilot is None or pilot.target is None or rate is None:
        return
    file = options.folder / f"{options.net}-runs.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    done = {(run["seed"], run["batch_size"]) for run in runs}
    for seed in map(int, options.seeds.split(",")):
        most_s = _MOST_S
        # The recommended size first: others end at four times its seconds.
        for size in sorted(SIZES, key=lambda other: other != found.batch_size):
            if (seed, size) in done:
                continue
            run = train(
                NETS[options.net],
                pilot,
                size,
                rate=rate * found.learning_rate_ratio(size),
                target=pilot.target,
                most_s=most_s,
                seed=seed,
            )
            if size == found.batch_size and run["reached"]:
                most_s = _LOST * run["seconds"]
            runs.append(run)
            file.write_text(json.dumps(runs))
    tell(options.net, found, pilot.target, runs)


def tell(net: str, found: kbatch.Recommendation, target: float, runs: list[dict]) -> None:
    """Prints the table, and how far the recommended size is from the best."""
    by_size = {size: [run for run in runs if run["batch_size"] == size] for size in SIZES}
    by_size = {size: of for size, of in by_size.items() if of}
    seconds = {size: statistics.median(r["seconds"] for r in of) for size, of in by_size.items()}
    costs = {cost.batch_size: cost for cost in found.costs}
    print(f"\n{net} to held-out loss {target:.3f}")
    print(
        f"{'batch':>6}{'reached':>9}{'updates':>9}{'predicted':>11}{'seconds':>9}{'measured':>10}"
    )
    best = found.batch_size or SIZES[0]
    for size, of in by_size.items():
        reached = f"{sum(run['reached'] for run in of)}/{len(of)}"
        updates = statistics.median(run["updates"] for run in of)
        relative = costs[size].relative_time.value if size in costs else None
        predicted = "n/a" if relative is None else f"{relative:.2f}"
        print(
            f"{size:>6}{reached:>9}{updates:>9.0f}{predicted:>11}"
            f"{seconds[size]:>9.2f}{seconds[size] / seconds[best]:>10.2f}"
        )
    whole = [size for size, of in by_size.items() if all(run["reached"] for run in of)]
    least = min(whole or by_size, key=lambda size: seconds[size])
    print(f"recommended {best}: {seconds[best] / seconds[least]:.2f} times the best, {least}")


if __name__ == "__main__":
    main()
