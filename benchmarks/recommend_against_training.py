"""How good is the recommended batch size, when it and the others are trained?

python benchmarks/recommend_against_training.py FOLDER [--tasks a,b] [--seeds 0,1,2,3,4]
    [--budget 60] [--minutes 1000] [--repeats 3]

Six tasks, two each with Adam, AdamW and SGD, one of them a text model (a seventh by --tasks). For
each seed a recommendation is made. Then every size is trained by `fit`, `--repeats` times with
other seeds in turns, with the learning rate and the other settings that follow the size, to the
lowest target of the recommendations, until it took 1.5 times as long as the best so far (3 times
where it was named). One that did not come there is not repeated unless it was named. Each row is
kept in FOLDER: the same command goes on where it was, nothing is begun after --minutes, and the
table is of all there are. All rows of a task share these runs: a size takes its updates to a row's
target, the median over the repeats, times the seconds of an update, which is the median over whole
epochs, their start and end included and looks at the loss left out. As in a recommendation, a run
has reached a loss at the first look that is no higher, about thirty looks after its start. One run
alone would make the best of eight sizes look better than it is. Six tasks and two seeds take about
25 minutes on two quiet cores: 12 calls of 45 s, and 15 minutes to train the sizes.

Printed: the time of the recommended size over the best one's (median and worst, each with its 95 %
interval by the bootstrap over tasks and seeds), on how many tasks no size was named, the call's
time over its budget, and whether a page's headline is not its table's best.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from nets import digits, digits_cnn
from recommend_repeatability import mlp
from sklearn.datasets import make_classification

import kbatch
from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.training.learning_rate import scaled_model

layers, optimizers = keras.layers, keras.optimizers
HELD_OUT = 256
_MOST_S, _LOST, _NAMED_LOST = 20.0, 1.5, 3.0


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
    return mlp(optimizer), *digits()


def digits_net(optimizer):
    model = digits_cnn()
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model, *digits()


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
    "cnn-adamw": Task(digits_net, lambda: optimizers.AdamW(1e-3, weight_decay=0.01)),
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
        self.epochs_s: list[float] = []  # Of an update, by the whole epoch.
        self._begun = 0
        self.losses: list[tuple[int, float]] = []
        self.reached = False
        self._before_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._begun = len(self.steps_s)
        self._before_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._before_s)
        if len(self.steps_s) % self.looks == 0:
            model: Any = self.model
            outputs = model.predict_on_batch(self.held[0])
            picked = outputs[np.arange(len(outputs)), self.held[1]]
            loss = float(-np.log(np.maximum(picked, 1e-7)).mean())
            self.losses.append((len(self.steps_s), loss))
            self.reached = loss <= self.target
            model.stop_training = self.reached or self.seconds > self.most_s or loss != loss
        self._before_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None):
        steps_s = self.steps_s[self._begun :]
        if self._begun and not self.model.stop_training:  # The first one builds a graph.
            end_s = time.perf_counter() - self._before_s
            self.epochs_s.append((sum(steps_s) + end_s) / len(steps_s))

    @property
    def update_s(self) -> float:
        """Seconds of an update: the median over whole epochs, or the mean within the first one."""
        later = self.steps_s[1:] or self.steps_s
        return statistics.median(self.epochs_s) if self.epochs_s else sum(later) / len(later)

    @property
    def seconds(self) -> float:
        """Seconds of all updates; of the first one alone, which builds a graph, not known."""
        return self.update_s * len(self.steps_s) if len(self.steps_s) > 1 else 0.0


def split(x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """Hold examples out, few enough that `recommend` looks at all of them.

    The others are a multiple of 512. A last batch of few is an update like any other: of 1,541 rows
    five are left over, and batch size 512 needs twice the updates that it needs of 1,536.
    """
    order = np.random.default_rng(seed).permutation(len(x))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    kept = kept[: len(kept) // 512 * 512]
    return x[kept], y[kept], x[held], y[held]


def recommended(task: Task, seed: int, budget_s: float, file: Path) -> dict:
    """Make the recommendation of a seed, and sum it up."""
    x, y, held_x, held_y = split(*task.data(), 0)
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


def train(task: Task, size: int, seed: int, answers: list[dict], most_s: float) -> dict:
    """Train a size until the held-out loss is at the lowest target, or for the seconds given."""
    x, y, held_x, held_y = split(*task.data(), 0)
    keras.utils.set_random_seed(seed + 1000)
    model = task.build()
    looks = max(1, round(min(answer["stretch"] for answer in answers) * 32 / size))
    target = min(answer["target"] for answer in answers)
    epochs = Epochs(held_x, held_y, target, most_s, looks)
    with scaled_model(
        model,
        batch_size=size,
        base_batch_size=32,
        rule=answers[0]["rule"],
        follow_batch_size=FOLLOWERS,
    ):
        trained: Any = model
        trained.fit(x, y, batch_size=size, epochs=10_000, callbacks=[epochs], verbose=0)
    return {
        "reached": epochs.reached,
        "updates": len(epochs.steps_s),
        "update_s": epochs.update_s,
        "target": target,
        "losses": epochs.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", default=",".join(list(TASKS)[:6]))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=1000.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end_s = time.perf_counter() + 60 * options.minutes
    file = options.folder / f"rows-{options.budget:g}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    names = options.tasks.split(",")
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            row = rows.setdefault(name, {"answers": {}, "runs": {}})
            if str(seed) not in row["answers"] and time.perf_counter() < end_s:
                record = options.folder / f"{name}-{seed}-{options.budget:g}.json"
                row["answers"][str(seed)] = recommended(TASKS[name], seed, options.budget, record)
                file.write_text(json.dumps(rows))
    for seed in range(options.repeats):
        for name in names:
            for _ in train_all(TASKS[name], rows[name], seed, end_s):
                file.write_text(json.dumps(rows))
    tell(rows, options.budget)


def train_all(task: Task, row: dict, seed: int, end_s: float) -> Iterator[int]:
    """Train the sizes that were not yet trained with this seed, while there is time."""
    answers = [a for a in row["answers"].values() if a["batch_size"] and a["target"] is not None]
    if not answers:
        return
    named = {answer["batch_size"] for answer in answers}
    target = min(answer["target"] for answer in answers)
    # The named sizes first: the others end at some times the seconds of the best so far.
    sizes = kbatch.powers_of_two(8, min(2048, len(task.data()[0]) - HELD_OUT))
    for size in sorted(sizes, key=lambda other: (other not in named, -other)):
        runs = row["runs"].setdefault(str(size), {})
        far = size not in named and runs and not any(run["reached"] for run in runs.values())
        done = str(seed) in runs and runs[str(seed)]["target"] <= target
        if done or far or time.perf_counter() > end_s:
            continue
        known = [r[str(seed)] for r in row["runs"].values() if str(seed) in r]
        least = min((r["updates"] * r["update_s"] for r in known if r["reached"]), default=_MOST_S)
        most_s = min(_MOST_S, (_NAMED_LOST if size in named else _LOST) * least)
        runs[str(seed)] = train(task, size, seed, answers, most_s)
        yield size


def seconds_to(target: float, runs: dict) -> tuple[float, bool] | None:
    """Return the seconds of a size to a loss, and whether it came there."""
    if not runs:
        return None
    update_s = statistics.median(run["update_s"] for run in runs.values())
    needed = statistics.median(
        next((updates for updates, loss in run["losses"] if loss <= target), math.inf)
        for run in runs.values()
    )
    if needed < math.inf:
        return update_s * needed, True
    return update_s * max(run["updates"] for run in runs.values()), False


def tell(rows: dict, budget_s: float) -> None:
    """Print a row a task and seed, and what they come to."""
    regrets: dict[str, list[float]] = {}
    untold, wrong, spent = set(), [], []
    print(f"{'task, seed':<18}{'named':>7}{'best':>7}{'times the best':>16}{'call/budget':>13}")
    for name, row in rows.items():
        for seed, answer in sorted(row["answers"].items()):
            key, size = f"{name} {seed}", answer["batch_size"]
            spent.append(answer["seconds"] / budget_s)
            if size is None:
                untold.add(name)
                print(f"{key:<18}{'None':>7}{answer['missing']:>23}{spent[-1]:>13.2f}")
                continue
            if size != answer["table_best"] or f" batch size {size:,}," not in answer["headline"]:
                wrong.append(key)
            times = {int(b): seconds_to(answer["target"], runs) for b, runs in row["runs"].items()}
            known = {b: time for b, time in times.items() if time is not None}
            reached = {b: seconds for b, (seconds, came) in known.items() if came}
            if len(known) < 8 or not reached:
                print(f"{key:<18}{size:>7}{'not all trained':>23}{spent[-1]:>13.2f}")
                continue
            best = min(reached, key=lambda b: reached[b])
            # A size that did not come there is at least as slow as the seconds that it had.
            regret = known[size][0] / reached[best]
            regrets.setdefault(name, []).append(regret)
            print(f"{key:<18}{size:>7}{best:>7}{regret:>16.2f}{spent[-1]:>13.2f}")
    known_regrets = [value for values in regrets.values() for value in values]
    if known_regrets:
        for label, of in (("median", np.median), ("worst", np.max)):
            low, high = bootstrap(regrets, of)
            print(f"{label} {of(known_regrets):.2f} ({low:.2f} to {high:.2f})")
    print(f"None on {len(untold)} of {len(rows)} tasks: {', '.join(sorted(untold)) or 'no one'}")
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
