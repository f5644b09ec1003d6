"""How does the best learning rate grow with the batch size, and does `beta_2` decide that?

nice -n 10 python benchmarks/learning_rate_exponent.py [--seeds 5]    90 minutes, one thread
python benchmarks/learning_rate_exponent.py --seeds 0    prints what is stored

Two nets of decision_tables.py, both under Adam, on its examples: the first 3,072 (cnn) or 5,120
(text) train for 21 or 25 epochs, 1,500 others validate. `beta_2` is 0.999 at every size ("fixed"),
or keeps its half-life in examples from batch size 32 on ("following"), as in a search. The loss of
a rate is the least validation cross-entropy so far, after half and after all of the epochs.

Half of the epochs finds a coarse optimum in octaves, where `beta_2` follows. Every seed then
trains thirteen rates in half octaves around it. The best rate is the vertex of a parabola in the
logarithm of the rate, through the five rates around the least mean loss. The exponent is the slope
of its logarithm over that of the batch size. The interval is from 2,000 bootstrap samples of the
seeds, and with fewer than three seeds that of the slope of the line. Sizes with fewer than 500
updates are left out. A line of learning_rate_exponent.jsonl is one net, `beta_2`, size and seed;
what is stored is not trained again.
"""

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decision_tables import Stack, rule_rate, tasks
from scipy.stats import linregress, t
from tables import FACTORS, VALIDATION

ROWS = Path(__file__).with_suffix(".jsonl")
SIZES = (8, 16, 32, 64, 128, 256, 512)
TRAINING = {"text": 5120, "cnn": 3072}
EPOCHS = {"text": (12, 25), "cnn": (10, 21)}
FEWEST_UPDATES = 500
HALF_OCTAVES = 2.0 ** (np.arange(len(FACTORS)) / 2 - 3)
KEYS = ("task", "beta_2", "size", "seed")


class Rates(Stack):
    """A net at thirteen rates side by side, whose validation loss is taken after each epoch."""

    def __init__(self, name: str, task: Any, size: int, rates: np.ndarray, *, following: bool):
        import tensorflow as tf

        super().__init__(task, size)
        self.rates, self._rows = rates, TRAINING[name]
        if not following:
            self._beta_2 = task.optimizer().beta_2
        self._losses = tf.function(self._validation_losses)

    def losses(self, weights: list[np.ndarray], seed: int, epochs: int) -> list[np.ndarray]:
        """Train from a seed; return the least loss so far of each rate after each epoch."""
        self.start(weights)
        found = []
        for epoch in range(epochs):
            order = np.random.default_rng((seed, epoch)).permutation(self._rows)
            self._train(order.astype("int32"))
            found.append(self._losses().numpy())
        return list(np.minimum.accumulate(np.where(np.isfinite(found), found, 1e3)))

    def _validation_losses(self):
        import keras
        import tensorflow as tf

        examples = self._x[-VALIDATION:]
        logits = self._task.forward(self._weights, examples, training=False)
        labels = tf.repeat(self._y[None, -VALIDATION:], len(self.rates), axis=0)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return tf.reduce_mean(losses, 1)


def train(rows: list[dict[str, Any]], seeds: int) -> None:
    """Train what is not stored: one seed of everything first."""
    loaded, stored = tasks(TRAINING), {tuple(row[key] for key in KEYS): row for row in rows}

    def found(key: tuple[str, str, int, int], rates: np.ndarray, epochs: Sequence[int]) -> Any:
        if key not in stored:
            stored[key] = losses_of(loaded[key[0]], key, rates, epochs)
            rows.append(stored[key])
            with ROWS.open("a") as file:
                file.write(json.dumps(stored[key]) + "\n")
        return stored[key]

    for seed, name, size in itertools.product(range(seeds), TRAINING, SIZES):
        if updates(name, EPOCHS[name][-1], size) >= FEWEST_UPDATES:
            octaves = np.array(FACTORS) * rule_rate(loaded[name], size)
            coarse = found((name, "coarse", size, 0), octaves, EPOCHS[name][:1])
            (losses,) = coarse["losses"].values()
            rates = HALF_OCTAVES * coarse["rates"][int(np.argmin(losses))]
            for beta_2 in ("following", "fixed"):
                found((name, beta_2, size, seed), rates, EPOCHS[name])


def losses_of(
    task: Any, key: tuple[str, str, int, int], rates: np.ndarray, epochs: Sequence[int]
) -> dict[str, Any]:
    """Train a net at all rates; return the row that is stored."""
    import keras

    name, beta_2, size, seed = key
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    net = Rates(name, task, size, rates, following=beta_2 != "fixed")
    least = net.losses(task.build().get_weights(), seed, epochs[-1])
    row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
    row["rates"] = [float(f"{rate:.5g}") for rate in rates]
    row["losses"] = {str(n): [float(f"{loss:.5g}") for loss in least[n - 1]] for n in epochs}
    return row


def updates(name: str, epochs: int, size: int) -> int:
    return epochs * (TRAINING[name] // size)


def best_rate(rates: np.ndarray, losses: np.ndarray) -> float:
    """Return the logarithm (base 2) of the rate at the vertex of a parabola."""
    least = int(np.clip(np.argmin(losses), 2, len(losses) - 3))
    near = slice(least - 2, least + 3)
    logs = np.log2(rates[near])
    bend, slope, _ = np.polyfit(logs - logs[2], losses[near], 2)
    if bend <= 0:  # No vertex: the least of the five.
        return float(logs[np.argmin(losses[near])])
    return float(np.clip(logs[2] - slope / (2 * bend), logs[0], logs[-1]))


def exponent(places: list[tuple[int, np.ndarray, np.ndarray]], seeds: np.ndarray) -> float:
    """Return the slope of the best rate over the size, both in octaves."""
    best = [best_rate(rates, losses[seeds].mean(0)) for _, rates, losses in places]
    return float(np.polyfit([np.log2(size) for size, _, _ in places], best, 1)[0])


def show(rows: list[dict[str, Any]]) -> None:
    for name, beta_2, part in itertools.product(TRAINING, ("fixed", "following"), (0, 1)):
        epochs, places = EPOCHS[name][part], []
        for size in SIZES:
            found = [row for row in rows if [row[key] for key in KEYS[:3]] == [name, beta_2, size]]
            if found and updates(name, epochs, size) >= FEWEST_UPDATES:
                losses = np.array([row["losses"][str(epochs)] for row in found])
                places.append((size, np.array(found[0]["rates"]), losses))
        if len(places) < 3:
            continue
        seeds = min(len(losses) for _, _, losses in places)
        best = [(s, best_rate(r, losses[:seeds].mean(0))) for s, r, losses in places]
        line = linregress([np.log2(size) for size, _ in best], [rate for _, rate in best])
        whole, half = line.slope, line.stderr * t.ppf(0.975, len(best) - 2)
        low, high = whole - half, whole + half
        if seeds > 2:
            drawn = np.random.default_rng(0).integers(seeds, size=(2000, seeds))
            low, high = np.quantile([exponent(places, one) for one in drawn], [0.025, 0.975])
        print(
            f"{name}, {epochs} epochs, beta_2 {beta_2}: exponent {whole:.2f} "
            f"({low:.2f} to {high:.2f}), seeds: {seeds}. Best rate by size: "
            + ", ".join(f"{size} {2**rate:.2g}" for size, rate in best)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    if options.seeds:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        train(rows, options.seeds)
    show(rows)


if __name__ == "__main__":
    main()
