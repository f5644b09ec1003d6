"""How good is the recommended batch size, when it and the others are trained?

python benchmarks/recommend_against_training.py FOLDER [--tasks a,b] [--seeds 0,1,2,3,4]
    [--budget 60] [--minutes 1000]

Seven tasks, two with Adam, two with AdamW and three with SGD, one of them a text model. For each
seed a recommendation is made, then every size is trained by `fit` to the held-out loss that its
pilot came to, with the learning rate and the other settings that follow the size, until it took
three times as long as the best so far. Each row is kept in FOLDER: the same command goes on where
it was, none is begun after --minutes, and the table is of all there are. Seconds are those of the
epochs without validation, the first step (graph building) taken as long as a median one.

Printed: the time of the recommended size over the best one's (median and worst, each with its 95 %
interval by the bootstrap over tasks and seeds), on how many tasks no size was named, the call's
time over its budget, and whether a page's headline is not its table's best.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from recommend_repeatability import mlp
from sklearn.datasets import make_classification

import kbatch
from kbatch.analysis.timescales import FOLLOWERS
from kbatch.demo import build_model, load_digits
from kbatch.training.scaled_model import scaled_model

layers, optimizers = keras.layers, keras.optimizers
SIZES = kbatch.powers_of_two(8, 1024)
HELD_OUT = 256
_MOST_S, _LOST = 30.0, 3.0


def columns(optimizer):
    """A table of numbers: 20,000 rows of 40."""
    x, y = make_classification(
        20_000, 40, n_informative=20, n_classes=5, class_sep=1.5, random_state=0
    )
    model = keras.Sequential(
        [
            layers.Input((40,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model, np.asarray(x, "float32"), np.asarray(y)


def texts(optimizer):
    """Token sequences of Zipf's law: two classes, told by twenty of 2,000 tokens."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=6000)
    x = np.minimum(rng.zipf(1.3, size=(6000, 40)), 1999)
    told = rng.integers(1000, 1010, size=(6000, 40)) + 10 * y[:, None]
    x = np.where(rng.random((6000, 40)) < 0.08, told, x)
    model = keras.Sequential(
        [
            layers.Input((40,), dtype="int32"),
            layers.Embedding(2000, 16),
            layers.GRU(16),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model, x.astype("int32"), y


def digits_mlp(optimizer):
    return mlp(optimizer), *load_digits()


def digits_cnn(optimizer):
    model = build_model()
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model, *load_digits()


class Task(NamedTuple):
    """A model with its data, and an optimizer."""

    make: Any
    optimizer: Any

    def build(self) -> keras.Model:
        return self.make(self.optimizer())[0]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        return self.make(self.optimizer())[1:]


TASKS = {
    "mlp-adam": Task(digits_mlp, lambda: optimizers.Adam(1e-3)),
    "text-adam": Task(texts, lambda: optimizers.Adam(1e-3)),
    "mlp-adamw": Task(digits_mlp, lambda: optimizers.AdamW(1e-3, weight_decay=0.01)),
    "cnn-adamw": Task(digits_cnn, lambda: optimizers.AdamW(1e-3, weight_decay=0.01)),
    "mlp-sgd": Task(digits_mlp, lambda: optimizers.SGD(0.05)),
    "columns-sgd": Task(columns, lambda: optimizers.SGD(0.05, momentum=0.9)),
    "columns-adam": Task(columns, lambda: optimizers.Adam(1e-3)),
}


class Epochs(keras.callbacks.Callback):
    """Counts seconds and updates, and ends at a held-out loss or after some seconds."""

    def __init__(self, x: Any, y: Any, target: float, most_s: float, looks: int):
        super().__init__()
        self.held = x, y
        self.target = target
        self.most_s = most_s
        self.looks = looks
        self.steps_s: list[float] = []
        self.reached = False
        self._before_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._before_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._before_s)
        if len(self.steps_s) % self.looks == 0:
            model: Any = self.model
            outputs = model.predict_on_batch(self.held[0])
            picked = outputs[np.arange(len(outputs)), self.held[1]]
            loss = float(-np.log(np.maximum(picked, 1e-7)).mean())
            self.reached = loss <= self.target
            model.stop_training = self.reached or self.seconds > self.most_s or loss != loss
        self._before_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of all updates, the first one as long as a median one."""
        return sum(self.steps_s[1:]) + statistics.median(self.steps_s)


def split(x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """Hold examples out, few enough that `recommend` looks at all of them."""
    order = np.random.default_rng(seed).permutation(len(x))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    return x[kept], y[kept], x[held], y[held]


def recommended(task: Task, seed: int, budget_s: float, file: Path) -> dict:
    """Make the recommendation of a seed, and sum it up."""
    x, y, held_x, held_y = split(*task.data(), seed)
    began_s = time.perf_counter()
    found = kbatch.recommend(
        task.build, x, y, validation_data=(held_x, held_y), budget_s=budget_s, seed=seed
    )
    seconds = time.perf_counter() - began_s
    found.save(file)
    reached = [row for row in found.decision.sizes if row.ended_by == "target"]
    best = min(reached, key=lambda row: row.relative_time.value or 0.0, default=None)
    return {
        "batch_size": found.batch_size,
        "missing": found.decision.missing,
        "target": found.pilot.target if found.pilot else None,
        "rule": found.learning_rate_rule,
        "stretch": max(1, round((found.pilot.updates_to_target if found.pilot else 1) / 30)),
        "seconds": seconds,
        "table_best": best and best.batch_size,
        "headline": str(found).split("\n\n")[0].replace("\n", " "),
    }


def train(task: Task, size: int, seed: int, answer: dict, most_s: float) -> dict:
    """Train a size until the held-out loss is at the target, or for the seconds given."""
    x, y, held_x, held_y = split(*task.data(), seed)
    keras.utils.set_random_seed(seed + 1000)
    model = task.build()
    looks = max(1, round(answer["stretch"] * 32 / size))
    epochs = Epochs(held_x, held_y, answer["target"], most_s, looks)
    with scaled_model(
        model,
        batch_size=size,
        base_batch_size=32,
        rule=answer["rule"],
        follow_batch_size=FOLLOWERS,
    ):
        trained: Any = model
        trained.fit(x, y, batch_size=size, epochs=10_000, callbacks=[epochs], verbose=0)
    return {"reached": epochs.reached, "updates": len(epochs.steps_s), "seconds": epochs.seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", default=",".join(list(TASKS)[:6]))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=1000.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end_s = time.perf_counter() + 60 * options.minutes
    file = options.folder / f"rows-{options.budget:g}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    for seed in map(int, options.seeds.split(",")):
        for name in options.tasks.split(","):
            done_in_time(TASKS[name], name, seed, options, rows, file, end_s)
    tell(rows, options.budget)


def done_in_time(
    task: Task, name: str, seed: int, options: Any, rows: dict, file: Path, end_s: float
) -> None:
    """Make the rows of a task and seed that are missing, while there is time."""
    row = rows.setdefault(f"{name} {seed}", {"runs": {}})
    if time.perf_counter() > end_s:
        return
    if "answer" not in row:
        record = options.folder / f"{name}-{seed}-{options.budget:g}.json"
        row["answer"] = recommended(task, seed, options.budget, record)
        file.write_text(json.dumps(rows, indent=1))
    answer = row["answer"]
    if answer["batch_size"] is None or answer["target"] is None:
        return
    # The recommended size first: the others end at three times the seconds of the best so far.
    for size in sorted(SIZES, key=lambda other: (other != answer["batch_size"], -other)):
        if str(size) in row["runs"] or time.perf_counter() > end_s:
            continue
        least = [run["seconds"] for run in row["runs"].values() if run["reached"]]
        most_s = min(_MOST_S, _LOST * min(least, default=_MOST_S))
        row["runs"][str(size)] = train(task, size, seed, answer, most_s)
        file.write_text(json.dumps(rows, indent=1))


def tell(rows: dict, budget_s: float) -> None:
    """Print a row a task and seed, and what they come to."""
    regrets: dict[str, list[float]] = {}
    untold, wrong, spent = set(), [], []
    print(f"{'task, seed':<18}{'named':>7}{'best':>7}{'times the best':>16}{'call/budget':>13}")
    for key, row in rows.items():
        answer, runs = row.get("answer"), row["runs"]
        if answer is None:
            continue
        name, size = key.split()[0], answer["batch_size"]
        spent.append(answer["seconds"] / budget_s)
        if size is None:
            untold.add(name)
            print(f"{key:<18}{'None':>7}{answer['missing']:>23}{spent[-1]:>13.2f}")
            continue
        if size != answer["table_best"] or f" batch size {size:,}," not in answer["headline"]:
            wrong.append(key)
        reached = {int(b): run["seconds"] for b, run in runs.items() if run["reached"]}
        if len(runs) < len(SIZES) or not reached:
            print(f"{key:<18}{size:>7}{'not all trained':>23}{spent[-1]:>13.2f}")
            continue
        best = min(reached, key=lambda b: reached[b])
        # A size that did not come there is at least as slow as the seconds that it had.
        regret = runs[str(size)]["seconds"] / reached[best]
        regrets.setdefault(name, []).append(regret)
        print(f"{key:<18}{size:>7}{best:>7}{regret:>16.2f}{spent[-1]:>13.2f}")
    known = [value for values in regrets.values() for value in values]
    if known:
        for label, of in (("median", np.median), ("worst", np.max)):
            low, high = bootstrap(regrets, of)
            print(f"{label} {of(known):.2f} ({low:.2f} to {high:.2f})")
    tasks = {key.split()[0] for key in rows}
    print(f"None on {len(untold)} of {len(tasks)} tasks: {', '.join(sorted(untold)) or 'no one'}")
    print(f"call over budget: median {np.median(spent):.2f}, most {max(spent):.2f}")
    print(f"headline is not the table's best: {', '.join(wrong) or 'on no page'}")


def bootstrap(regrets: dict[str, list[float]], of: Any, draws: int = 2000) -> tuple[float, float]:
    """Compute the 95 % interval of a statistic over tasks and their seeds."""
    rng, names = np.random.default_rng(0), list(regrets)
    values = []
    for _ in range(draws):
        drawn = [regrets[names[i]] for i in rng.integers(len(names), size=len(names))]
        values.append(of([v for one in drawn for v in rng.choice(one, len(one))]))
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
