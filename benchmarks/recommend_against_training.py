"""How good is the recommended batch size, when it and its neighbours are trained?

python benchmarks/recommend_against_training.py [--net mlp] [--seeds 3] [--budget 60]

One recommendation on scikit-learn's digits; then the sizes from a quarter of it to four times as
much are trained by `fit` on the arrays, with the learning rate that the recommendation gives each,
to the held-out loss that its pilot came to. Seconds are those of the epochs without validation, the
first step (graph building) taken as long as a median one. `predicted` is the time that the
recommendation gives a size, `measured` the median over the seeds, both over those of the
recommended size.
"""

import argparse
import statistics
import time
from typing import Any

import keras
import numpy as np
from recommend_repeatability import NETS

import kbatch
from kbatch.demo import load_digits

_MOST_EPOCHS = 400


class Epochs(keras.callbacks.Callback):
    """Counts seconds and updates of epochs, and ends at a held-out loss."""

    def __init__(self, target: float):
        super().__init__()
        self.target = target
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
        model.stop_training = self.reached

    @property
    def seconds(self) -> float:
        """Seconds of all updates, the first one as long as a median one."""
        return sum(self.steps_s[1:]) + statistics.median(self.steps_s)


def train(build, data, batch_size: int, learning_rate: float, target: float, seed: int) -> Epochs:
    """Trains until the held-out loss is at the target, or for 400 epochs."""
    x, y = data
    keras.utils.set_random_seed(seed)
    model = build()
    model.optimizer.learning_rate = learning_rate
    order = np.random.default_rng(seed).permutation(len(x))
    held, kept = order[: len(x) // 5], order[len(x) // 5 :]
    epochs = Epochs(target)
    model.fit(
        x[kept],
        y[kept],
        batch_size=batch_size,
        validation_data=(x[held], y[held]),
        validation_batch_size=512,
        epochs=_MOST_EPOCHS,
        callbacks=[epochs],
        verbose=0,
    )
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=sorted(NETS), default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    build, data = NETS[options.net], load_digits()
    found = kbatch.recommend(build, *data, budget_s=options.budget, seed=0)
    print(kbatch.recommendation_text(found))
    best = found.batch_size
    if best is None or found.pilot is None or found.base_learning_rate is None:
        return
    target = min(s.held_out_loss for s in found.pilot.useful if s.held_out_loss is not None)
    costs = {cost.batch_size: cost for cost in found.costs}
    sizes = [size for size in costs if best / 4 <= size <= 4 * best]
    runs: dict[int, list[Epochs]] = {size: [] for size in sizes}
    for seed in range(options.seeds):
        for size in sizes:
            rate = found.base_learning_rate * found.learning_rate_ratio(size)
            runs[size].append(train(build, data, size, rate, target, seed))
    print(f"\n{options.net} to held-out loss {target:.3f}, {options.seeds} seeds")
    print(
        f"{'batch':>6}{'reached':>9}{'updates':>9}{'predicted':>11}{'seconds':>9}{'measured':>10}"
    )
    seconds = {size: statistics.median(run.seconds for run in of) for size, of in runs.items()}
    for size in sizes:
        reached = sum(run.reached for run in runs[size])
        updates = statistics.median(len(run.steps_s) for run in runs[size])
        predicted = costs[size].relative_time.value or float("nan")
        print(
            f"{size:>6}{reached:>7}/{options.seeds}{updates:>9.0f}{predicted:>11.2f}"
            f"{seconds[size]:>9.2f}{seconds[size] / seconds[best]:>10.2f}"
        )
    all_reached = [s for s in sizes if all(run.reached for run in runs[s])]
    least = min((seconds[size], size) for size in all_reached or sizes)
    print(f"recommended {best}: {seconds[best] / least[0]:.2f} times the best, {least[1]}")


if __name__ == "__main__":
    main()
