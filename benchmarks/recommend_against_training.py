"""How good is the recommended batch size, when it and the others are trained?

python benchmarks/recommend_against_training.py FOLDER [--tasks a,b] [--seeds 0,1,2,3,4]
    [--budget 60] [--minutes 1000] [--repeats 5]

Six tasks, two each with Adam, AdamW and SGD, one of them a text model (a seventh by --tasks). For
each seed a recommendation is made. Then an update of every size is timed, in turns, over whole
epochs with their start and end, and every size is trained by `fit`, `--repeats` times with other
seeds, with the learning rate and the other settings that follow the size, to the lowest target of
the recommendations, until it took 2.5 times as long as the best so far (4 times where it was
named). One that did not come there is not repeated unless it was named. Each row is kept in FOLDER:
the same command goes on where it was, nothing is begun after --minutes, and the table is of all
there are. All rows of a task share these runs: a size takes its updates to a row's target, the
median over the repeats, times the median seconds of an update. A run has reached a loss where the
mean over the looks in the last tenth of its updates is no higher: held-out losses of large learning
rates go up and down by a third, and the lowest of many looks would be luck. Six tasks and five
seeds take about 45 minutes on two quiet cores: 30 calls of 50 s, and 20 minutes for the sizes.

Printed: the time of the recommended size over the best one's (median and worst, each with its 95 %
interval by the bootstrap over tasks and seeds), on how many tasks no size was named, the call's
time over its budget, and whether a page's headline is not its table's best.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
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
_MOST_S, _LOST, _NAMED_LOST = 20.0, 2.5, 4.0
_ROUNDS = 5


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


class Losses(keras.callbacks.Callback):
    """Looks at a held-out loss, and ends where it is at a target or after a number of updates."""

    def __init__(self, x: Any, y: Any, target: float, most_updates: float, stride: int):
        super().__init__()
        self.held = x, y
        self.target = target
        self.most_updates = most_updates
        self.stride = stride
        self.updates = 0
        self.looks: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self.updates += 1
        if self.updates % self.stride == 0:
            model: Any = self.model
            outputs = model.predict_on_batch(self.held[0])
            picked = outputs[np.arange(len(outputs)), self.held[1]]
            loss = float(-np.log(np.maximum(picked, 1e-7)).mean())
            self.looks.append((self.updates, loss))
            reached = recent_mean(self.looks) <= self.target
            model.stop_training = reached or self.updates > self.most_updates or loss != loss


def recent_mean(looks: list[tuple[int, float]]) -> float:
    """Return the mean of the looks in the last tenth of the updates."""
    return statistics.mean(loss for updates, loss in looks if updates >= 0.9 * looks[-1][0])


def updates_to(target: float, looks: list[tuple[int, float]]) -> float:
    """Count the updates to a loss, infinite where a run did not come there."""
    total, start = 0.0, 0
    for k, (updates, loss) in enumerate(looks):
        total += loss
        while looks[start][0] < 0.9 * updates:
            total, start = total - looks[start][1], start + 1
        if total / (k + 1 - start) <= target:
            return updates
    return math.inf


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


def time_updates(task: Task, sizes: Sequence[int]) -> dict[str, float]:
    """Time an update of each size: the median over whole epochs, the sizes in turns."""
    x, y, _, _ = split(*task.data(), 0)
    models: dict[int, Any] = {size: task.build() for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(_ROUNDS + 1):
        for size, model in models.items():
            began_s = time.perf_counter()
            model.fit(x, y, batch_size=size, verbose=0)
            if turn:  # The first one builds the graphs.
                found[size].append((time.perf_counter() - began_s) / math.ceil(len(x) / size))
    return {str(size): statistics.median(times) for size, times in found.items()}


def train(task: Task, size: int, seed: int, answers: list[dict], most_updates: float) -> dict:
    """Train a size until the held-out loss is at the lowest target, or for so many updates."""
    x, y, held_x, held_y = split(*task.data(), 0)
    keras.utils.set_random_seed(seed + 1000)
    stride = max(1, round(min(answer["stretch"] for answer in answers) * 32 / size))
    target = min(answer["target"] for answer in answers)
    losses = Losses(held_x, held_y, target, most_updates, stride)
    model: Any = task.build()
    with scaled_model(
        model,
        batch_size=size,
        base_batch_size=32,
        rule=answers[0]["rule"],
        follow_batch_size=FOLLOWERS,
    ):
        model.fit(x, y, batch_size=size, epochs=10_000, callbacks=[losses], verbose=0)
    return {"updates": losses.updates, "target": target, "losses": losses.looks}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", default=",".join(list(TASKS)[:6]))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=1000.0)
    parser.add_argument("--repeats", type=int, default=5)
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
    sizes = kbatch.powers_of_two(8, min(2048, len(task.data()[0]) - HELD_OUT))
    if "update_s" not in row:
        row["update_s"] = time_updates(task, sizes)
    # The named sizes first: the others end at some times the seconds of the best so far.
    for size in sorted(sizes, key=lambda other: (other not in named, -other)):
        runs = row["runs"].setdefault(str(size), {})
        reached = [updates_to(target, run["losses"]) < math.inf for run in runs.values()]
        far = size not in named and runs and not any(reached)
        done = str(seed) in runs and runs[str(seed)]["target"] <= target
        if done or far or time.perf_counter() > end_s:
            continue
        least_s = min(
            (
                updates_to(target, other[str(seed)]["losses"]) * row["update_s"][key]
                for key, other in row["runs"].items()
                if str(seed) in other
            ),
            default=math.inf,
        )
        most_s = min(_MOST_S, (_NAMED_LOST if size in named else _LOST) * least_s)
        most_updates = most_s / row["update_s"][str(size)]
        runs[str(seed)] = train(task, size, seed, answers, most_updates)
        yield size


def seconds_to(target: float, runs: dict, update_s: float) -> tuple[float, bool] | None:
    """Return the seconds of a size to a loss, and whether it came there."""
    if not runs:
        return None
    needed = statistics.median(updates_to(target, run["losses"]) for run in runs.values())
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
            times = {
                int(b): seconds_to(answer["target"], runs, row["update_s"][b])
                for b, runs in row["runs"].items()
            }
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
