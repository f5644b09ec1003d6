"""How good is the pair of batch size and learning rate that each tool names, and how soon?

python benchmarks/peers.py                          # three starts, as many seeds as 14 minutes hold
python benchmarks/peers.py --minutes 60 --seeds 5 --starts 0.125 0.5 1 2 8    # goes on with these
    [--tools loop "kbatch race" ...] [--others] [--trainings 24] [--tolerance 0.01]
    [--environments DIR] [--store FILE]

The task is `mlp` of decision_tables.py: 2,048 images of MNIST to train, 1,500 to validate, SGD with
momentum, ten epochs, six sizes. A user starts at 1/8, 1 or 8 times the task's own learning rate and
does not know which. `regret` is how far the named pair lies below the best one of the table, in
points of test accuracy: means of 16 other trainings, between two rates by the logarithm, beyond the
outermost as these. So only searches run here. Before its first training a tool names size 32 at the
user's rate, and after its end what it named last.

loop                  the six lines that people write: each size at the user's rate
keras-tuner grid      the same; random and bayes: sizes, and rates of 1/64 to 64 times the user's
optuna                TPE on both; wilcoxon: with six seeds a pair and `WilcoxonPruner`, which has
                      to see four of them before a p-value can be below its 0.1
kbatch grid, race     the defaults, in float32 as all others; of sizes within its `--tolerance` it
                      takes the fastest, so that some regret is meant

Tools without an end of their own train `--trainings` times; a race at most six times a size. Each
search has a process of its own, pinned to a core, that has trained one step before its clock
starts; two run at a time, in shuffled order, one seed after the other. Each result appends a line
to `--store`: what is there is not run again, and no search starts that may not end in `--minutes`.
With 36 trainings about one seed fits in 14 minutes, which leaves no interval.

its score too high by   the validation accuracy that a tool reports of the pair, less the mean of
                        that pair in the table: the highest of many scores was lucky too
certified, wrong        more than the tolerance below the best of the table

Optuna is installed in a folder of its own beside the packages of this environment, and so are the
tools of `--others`, which look at no rate (several GB for Lightning's PyTorch): AutoKeras halves a
size that does not fit, here of a wider net under a limit on TensorFlow's memory;
batch-susceptibility compares losses of steps; Lightning doubles the size. Not run: BatchTune 0.1.1,
which needs Python 3.13 and a GPU or MPS and looks for the largest or the fastest size, and
batch-finder 0.6.0, which looks for the largest on PyTorch.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from decision_tables import mlp, mnist
from quick import parse_arguments
from tables import BASE_SIZE, FACTORS, SIZES, TRAINING, VALIDATION, judged, read_table

RATE, EPOCHS = 0.02, 10  # Of `mlp` in decision_tables.py.
RATE_FACTORS = 1 / 64, 64.0  # The range that tools for any hyperparameter are given.
REPEATS = 6  # Trainings of a pair that a pruner may cut short.
# Each with the package whose version is printed.
TOOLS = {
    "loop": "tensorflow",
    "keras-tuner grid": "keras-tuner",
    "keras-tuner random": "keras-tuner",
    "keras-tuner bayes": "keras-tuner",
    "optuna": "optuna",
    "optuna wilcoxon": "optuna",
    "kbatch grid": "tensorflow",
    "kbatch race": "tensorflow",
}
OTHERS = {name: name for name in ("batch-susceptibility", "autokeras", "lightning")}
INSTALLED = ("optuna", *OTHERS)  # Each in a folder of its own.
WIDE, WIDE_LIMIT_MIB = 4096, 120  # A net that runs out of memory at the whole data set.


def compiled(rate: float):
    import keras

    net = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return net


class Trace:
    """What was trained when, and the pair that the tool would name then with its score."""

    def __init__(self):
        self.rows: list[dict[str, Any]] = []
        self._began = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def pause(self, since_s: float) -> None:
        """Leave out what passed since then."""
        self._began += self.seconds() - since_s

    def trained(self, pair: tuple[int, float], score: float) -> None:
        before = self.rows[-1] if self.rows else {"named": pair, "score": score}
        self.rows.append(before | {"s": self.seconds(), "tried": pair})

    def names(self, pair: tuple[int, float], score: float) -> None:
        self.rows[-1] |= {"named": pair, "score": score}


# What runs inside a process: each fills the trace and returns what the tool says of its answer.


def train(work, pair: tuple[int, float], seed: int) -> float:
    import keras

    size, rate = pair
    keras.utils.set_random_seed(seed)
    held = {"validation_data": work.held_out}
    history = compiled(rate).fit(work.x, work.y, size, EPOCHS, verbose=0, **held)
    return max(history.history["val_accuracy"])


def loop(work) -> dict:
    trace = work.begin()
    scores: dict[int, float] = {}
    for size in SIZES:
        scores[size] = train(work, (size, work.rate), 1000 * work.seed + len(scores))
        trace.trained((size, work.rate), scores[size])
        best = max(scores, key=lambda size: scores[size])
        trace.names((best, work.rate), scores[best])
    return {}


def keras_tuner(work) -> dict:
    import keras
    import keras_tuner

    kind = work.tool.split()[1]
    low, high = (factor * work.rate for factor in RATE_FACTORS)

    class Both(keras_tuner.HyperModel):
        def build(self, hp):
            hp.Choice("batch_size", list(SIZES))
            if kind != "grid":
                hp.Float("learning_rate", low, high, sampling="log")
            keras.utils.set_random_seed(1000 * work.seed + len(trace.rows))
            return compiled(pair_of(hp)[1])

        def fit(self, hp, model, *args, **kwargs):
            return model.fit(*args, batch_size=hp.get("batch_size"), **kwargs)

    def pair_of(hp) -> tuple[int, float]:
        return hp.get("batch_size"), work.rate if kind == "grid" else hp.get("learning_rate")

    named = {"grid": "GridSearch", "random": "RandomSearch", "bayes": "BayesianOptimization"}

    class Watched(getattr(keras_tuner, named[kind])):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            best = self.oracle.get_best_trials(1)[0]
            trace.trained(pair_of(trial.hyperparameters), trial.score)
            trace.names(pair_of(best.hyperparameters), best.score)

    with tempfile.TemporaryDirectory() as folder:
        trace = work.begin()
        settings: dict[str, Any] = {"seed": 1000 * work.seed + 1, "directory": folder}
        if kind != "grid":
            settings["max_trials"] = work.trainings
        tuner = Watched(Both(), "val_accuracy", **settings)
        tuner.search(work.x, work.y, epochs=EPOCHS, validation_data=work.held_out, verbose=0)
    return {}


def optuna(work) -> dict:
    import optuna

    low, high = (factor * work.rate for factor in RATE_FACTORS)
    pruned, repeated = 0, work.tool == "optuna wilcoxon"

    def objective(trial) -> float:
        nonlocal pruned
        size = trial.suggest_categorical("batch_size", SIZES)
        pair = size, trial.suggest_float("learning_rate", low, high, log=True)
        scores = []
        for step in range(REPEATS if repeated else 1):
            number = step if repeated else trial.number
            scores.append(train(work, pair, 1000 * work.seed + number))
            trace.trained(pair, scores[-1])
            if len(trace.rows) == work.trainings:
                study.stop()
                break
            trial.report(scores[-1], step)
            if repeated and step + 1 < REPEATS and trial.should_prune():
                pruned += 1
                break
        return fmean(scores)  # Also of a pruned one, as Optuna's documentation has it.

    def name_best(study, trial) -> None:
        found = study.best_trial.params
        trace.names((found["batch_size"], found["learning_rate"]), study.best_value)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=work.seed)
    given = {"pruner": optuna.pruners.WilcoxonPruner()} if repeated else {}
    trace = work.begin()
    study = optuna.create_study(direction="maximize", sampler=sampler, **given)
    study.optimize(objective, callbacks=[name_best])
    return {"pruned": pruned, "pairs": len(study.trials)} if repeated else {}


def kbatch_search(work) -> dict:
    import kbatch

    studies: list[tuple[float, kbatch.Study]] = []

    class Watched(kbatch.BatchSizeTuner):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            now_s = trace.seconds()
            studies.append((now_s, self.study))
            trace.pause(now_s)

    with tempfile.TemporaryDirectory() as folder:
        settings = {"strategy": work.tool.split()[1], "tolerance": work.tolerance}
        trace = work.begin()
        hypermodel = kbatch.BatchSizeHyperModel(
            lambda: compiled(work.rate), SIZES, dtype_policy="float32", seed=1000 * work.seed + 1
        )
        tuner = Watched(hypermodel, "val_accuracy", directory=folder, **settings)
        tuner.search(work.x, work.y, epochs=EPOCHS, validation_data=work.held_out, verbose=0)
        found = tuner.study.decide()
        end_s = trace.seconds()
    before: list[tuple[int, float]] = []
    for now_s, study in studies:
        runs = [(t.batch_size, e.learning_rate or 0.0) for t in study.trials for e in t.executions]
        (tried,) = {run for run in runs if runs.count(run) > before.count(run)}
        before = runs
        then, row = study.decide(), {"s": now_s, "tried": tried}
        if then.trial is None:  # None that is finite yet: what the user had.
            row |= {"named": (BASE_SIZE, work.rate), "score": 0.0}
        else:
            named = then.batch_size, then.learning_rate
            row |= {"named": named, "score": then.trial.judged_value}
        trace.rows.append(row)
    return {"end_s": end_s, "certified": found.certified, "certain": found.certain}


def batch_susceptibility(work) -> dict:
    import warnings

    import keras
    from batch_susceptibility.tensorflow import find_optimal_batch_size

    keras.utils.set_random_seed(1000 * work.seed)
    net = compiled(work.rate)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        trace = work.begin()
        found = find_optimal_batch_size(net, work.x, work.y, batch_sizes=list(SIZES))
    short = sum("ran out of data" in str(warning.message) for warning in caught)
    sharp = "significant" if found.is_significant else "not significant"
    says = f"{sharp}; {short} of {len(SIZES)} sizes ran out of data before 50 steps"
    return {"size": int(found.K_c), "end_s": trace.seconds(), "says": says}


def autokeras(work) -> dict:
    import keras
    from autokeras.utils.utils import fit_with_adaptive_batch_size

    keras.utils.set_random_seed(1000 * work.seed)
    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(WIDE, activation="relu")]
    net = keras.Sequential([layers.Input((28, 28, 1)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(work.rate, momentum=0.9), loss, metrics=["accuracy"])
    trace = work.begin()
    net, history = fit_with_adaptive_batch_size(
        net, TRAINING, x=work.x, y=work.y, epochs=1, verbose=0
    )
    end_s, size = trace.seconds(), math.ceil(TRAINING / history.params["steps"])
    kept = ", ".join(sorted(set(history.params) | set(history.history)))
    rate = float(net.optimizer.learning_rate)
    says = f"a wider net, asked for {TRAINING}; rate {rate:g}; its history holds {kept}"
    return {"size": size, "end_s": end_s, "says": says}


def lightning(work) -> dict:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import lightning
    import torch
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1000 * work.seed, verbose=False)
    rows = torch.tensor(work.x).flatten(1), torch.tensor(work.y).long()
    tried: set[int] = set()

    class Twin(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size = SIZES[0]
            hidden = [torch.nn.Linear(28 * 28, 48), torch.nn.ReLU()]
            self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(48, 10))

        def training_step(self, batch, index):
            tried.add(len(batch[0]))
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), work.rate, momentum=0.9)

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(*rows)
            return torch.utils.data.DataLoader(data, self.batch_size, shuffle=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trace = work.begin()
        size = Tuner(trainer).scale_batch_size(Twin(), mode="power", init_val=SIZES[0])
    says = f"steps of {min(tried)} to {max(tried)}, compares no loss"
    return {"size": size, "end_s": trace.seconds(), "says": says}


INSIDE = {
    "loop": loop,
    "keras-tuner": keras_tuner,
    "optuna": optuna,
    "kbatch": kbatch_search,
    "batch-susceptibility": batch_susceptibility,
    "autokeras": autokeras,
    "lightning": lightning,
}


def run_inside(asked: dict) -> None:
    """Run one search in this process and print its result as the last line."""
    work = argparse.Namespace(**asked, rate=RATE * asked["start"], trace=None)
    with np.load(work.data) as data:
        x, y = data["x"], data["y"]
    work.x, work.y = x[:TRAINING], y[:TRAINING]
    end = TRAINING + VALIDATION
    work.held_out = x[TRAINING:end], y[TRAINING:end]

    def begin() -> Trace:
        if work.tool in TOOLS:
            compiled(work.rate).fit(work.x[:16], work.y[:16], verbose=0)
        if work.tool.startswith("kbatch"):
            importlib.import_module("kbatch.search.tuner")
        work.trace = Trace()
        return work.trace

    work.begin = begin
    name = work.tool.split()[0]
    found = INSIDE[name](work)
    found = {"end_s": work.trace.seconds()} | found
    package = (TOOLS | OTHERS)[work.tool]
    version = f"{package} {importlib.metadata.version(package)}"
    print(json.dumps(found | {"trace": work.trace.rows, "version": version}))


# What runs outside.


def python_of(tool: str, folder: Path) -> str:
    """Return the Python of a tool; install what is missing beside this environment's packages."""
    package = (TOOLS | OTHERS)[tool]
    if package not in INSTALLED:
        return sys.executable
    place = folder / package
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        venv.create(place, with_pip=True, clear=True)
        for own in place.glob("lib/python*/site-packages"):
            (own / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        words = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", package]
        subprocess.run(words, check=True)
        done.touch()
    return str(python)


def search(asked: dict, python: str, core: int) -> dict:
    """Run a search in a process on one core; return its result, or its end."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    if python == sys.executable:
        variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    if asked["tool"] == "autokeras":
        variables |= {"TF_CPU_ALLOCATOR_USE_BFC": "1"}
        variables |= {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(WIDE_LIMIT_MIB)}
    words = ["taskset", "-c", str(core), python, __file__, "--inside", json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": f"status {done.returncode}: {lines[-1] if lines else 'no words'}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_all(options, rows: list[dict]) -> None:
    """Run what the store lacks, on two cores, and append it."""
    tools = [*options.tools, *(OTHERS if options.others else ())]
    began_s, longest_s, order = time.monotonic(), 0.0, random.Random(0)
    keys = []
    for seed in range(options.seeds):  # Of what does not fit in the time, seeds are missing.
        same = {"seed": seed, "trainings": options.trainings, "tolerance": options.tolerance}
        own = [{"tool": tool, "start": s} | same for tool in tools for s in options.starts]
        keys += order.sample(own, len(own))
    keys = [key for key in keys if not any(key.items() <= row.items() for row in rows)]
    options.environments.mkdir(parents=True, exist_ok=True)
    data = str(options.environments / "mnist.npz")
    np.savez(data, **dict(zip("xy", mnist(), strict=True)))
    pythons = {tool: python_of(tool, options.environments) for tool in tools}
    lock, left = threading.Lock(), iter(keys)

    def work(core: int) -> None:
        nonlocal longest_s
        while time.monotonic() + longest_s < began_s + 60 * options.minutes:
            with lock:
                key = next(left, None)
            if key is None:
                return
            started_s = time.monotonic()
            row = key | search(key | {"data": data}, pythons[key["tool"]], core)
            longest_s = max(longest_s, time.monotonic() - started_s)
            with lock:
                end = row.get("failed") or f"{row['end_s']:.1f} s"
                print(key["tool"], f"from {key['start']:g}, seed {key['seed']}:", end, flush=True)
                if "failed" not in row:
                    rows.append(row)
                    with options.store.open("a") as file:
                        file.write(json.dumps(row) + "\n")

    cores = sorted(os.sched_getaffinity(0))[:2]
    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(1 for _ in left)} searches did not fit in {options.minutes:g} minutes.")


def at(means: np.ndarray, pair: tuple[int, float]) -> float:
    """Return the mean of a pair, rates interpolated by their logarithm."""
    size, rate = pair
    octave = math.log2(rate / (RATE * size / BASE_SIZE))
    place = int(np.abs(np.log2(SIZES) - math.log2(size)).argmin())
    return float(np.interp(octave, np.log2(FACTORS), means[place]))


def summary(starts: list[float], values: list[float]) -> str:
    """Return the mean over searches and half its 95 % interval, the starts being fixed."""
    from scipy import stats

    groups = [[v for s, v in zip(starts, values, strict=True) if s == one] for one in set(starts)]
    if not groups:
        return "-"
    mean, free = fmean(map(fmean, groups)), len(values) - len(groups)
    if not free:
        return f"{mean:.2f}"
    variance = sum(sum((v - fmean(own)) ** 2 for v in own) for own in groups) / free
    error = math.sqrt(variance * sum(1 / len(own) for own in groups)) / len(groups)
    return f"{mean:.2f} ± {stats.t.ppf(0.975, free) * error:.2f}"


def print_tables(rows: list[dict], starts: list[float], most_trainings: int) -> None:
    """Print regrets and what was silently wrong as Markdown."""
    table = read_table("mlp")
    # Means over seeds, [size, factor of the rule's rate], in points.
    tested, validated = 100 * table.truth, 100 * judged(table.curve, table.curve, 1).mean(2)

    def regret(row: dict, *, trainings: float = math.inf, seconds: float = math.inf) -> float:
        named = (BASE_SIZE, RATE * row["start"])
        for number, one in enumerate(row["trace"], 1):
            if number <= trainings and one["s"] <= seconds:
                named = one["named"]
        return float(tested.max()) - at(tested, named)

    by_tool = {tool: [row for row in rows if row["tool"] == tool] for tool in (*TOOLS, *OTHERS)}
    searched = {tool: by_tool[tool] for tool in TOOLS if by_tool[tool]}
    races = by_tool["kbatch race"]
    race_s = median([row["end_s"] for row in races] or [math.nan])
    counts = [n for n in (12, 24, 36) if n <= most_trainings]
    times = race_s / 2, race_s, 2 * race_s
    fewest, most = (which(map(len, searched.values()), default=0) for which in (min, max))
    print(
        f"\n{datetime.date.today():%-d %B %Y}, {', '.join(sorted({r['version'] for r in rows}))}: "
        f"{fewest} to {most} searches a tool, from {', '.join(f'{s:g}' for s in starts)} times the "
        "task's rate.\n"
    )
    heads = [f"{count} trainings" for count in counts] + [f"{time_s:.0f} s" for time_s in times]
    print("| regret in points after | own end: trainings, s |", " | ".join(heads), "|")
    print("|---" * (2 + len(heads)) + "|")
    limits = [{"trainings": n} for n in counts] + [{"seconds": time_s} for time_s in times]
    for tool, own in searched.items():
        end = f"{median(len(r['trace']) for r in own):.0f}, {median(r['end_s'] for r in own):.0f}"
        of = [row["start"] for row in own]
        cells = [summary(of, [regret(row, **limit) for row in own]) for limit in limits]
        print(f"| {tool} | {end} |", " | ".join(cells), "|")

    raced = {(row["start"], row["seed"]): regret(row) for row in races}
    heads = [f"from {start:g}" for start in starts]
    heads += ["sizes never tried", "trainings of its pair", "its score too high by", "says"]
    print("\n| regret at the end: the race's, and of others less it |", " | ".join(heads), "|")
    print("|---" * (1 + len(heads)) + "|")
    for tool, own in searched.items():
        cells = []
        for start in starts:
            both = [row for row in own if row["start"] == start and (start, row["seed"]) in raced]
            less = 0 if tool == "kbatch race" else 1  # Its own row has its regret.
            gaps = [regret(row) - less * raced[start, row["seed"]] for row in both]
            cells.append(summary([start] * len(gaps), gaps))
        tried = [[one["tried"] for one in row["trace"]] for row in own]
        ends = [row["trace"][-1] for row in own]
        untried = fmean(len(set(SIZES) - {size for size, _ in pairs}) for pairs in tried)
        repeats = [
            sum(np.allclose(end["named"], pair) for pair in pairs)
            for end, pairs in zip(ends, tried, strict=True)
        ]
        high = fmean(100 * end["score"] - at(validated, end["named"]) for end in ends)
        cells += [f"{untried:.1f}", f"{median(repeats):g}", f"{high:.2f}", says(own, regret)]
        print(f"| {tool} |", " | ".join(cells), "|")

    if any(by_tool[tool] for tool in OTHERS):
        print("\n| at the user's rate | s | size | says |\n|---|---|---|---|")
    for tool in OTHERS:
        for row in by_tool[tool]:
            print(f"| {tool} | {row['end_s']:.0f} | {row['size']} | {row['says']} |")


def says(own: list[dict], regret) -> str:
    """Say how sure a tool is of its answers, and how often that is wrong."""
    if "certified" in own[0]:
        sure = [row for row in own if row["certified"]]
        wrong = sum(regret(row) > 100 * row["tolerance"] for row in sure)
        count = f"certified in {len(sure)} of {len(own)}, of these {wrong} wrong"
        return f"{count}; certain in {sum(row['certain'] for row in own)}"
    if "pruned" in own[0]:
        pruned, pairs = (sum(row[name] for row in own) for name in ("pruned", "pairs"))
        return f"pruned {pruned} of {pairs} pairs, names no ties"
    return "nothing"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--starts", type=float, nargs="+", default=[1 / 8, 1.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trainings", type=int, default=24)
    parser.add_argument("--tolerance", type=float, default=0.01, help="of kbatch; its default")
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--store", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parse_arguments(
        parser,
        tools=["loop", "kbatch grid", "kbatch race"],
        starts=[1.0],
        seeds=1,
        trainings=6,
        store=Path(tempfile.gettempdir(), "kbatch-peers-quick.jsonl"),
    )
    if options.inside is not None:
        run_inside(options.inside)
        return
    if options.environments is None:
        options.environments = Path(tempfile.gettempdir(), "kbatch-peers")
    lines = options.store.read_text().splitlines() if options.store.exists() else []
    rows = [json.loads(line) for line in lines]
    run_all(options, rows)
    asked = options.trainings, options.tolerance
    rows = [row for row in rows if (row["trainings"], row["tolerance"]) == asked]
    rows = [row for row in rows if row["start"] in options.starts]
    print_tables(rows, options.starts, options.trainings)


if __name__ == "__main__":
    main()
