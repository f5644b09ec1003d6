"""Which batch size do other tools name, how soon, and how good is that size?

python benchmarks/peers.py --environments DIR [--peers kbatch keras-tuner ...] [--seeds 2]
    [--tasks fixed linear] [--epochs 6] [--store FILE]
    half an hour on two cores that other work shared, and eight minutes before it in which the
    environments are installed: 14 GB, most of it PyTorch with its GPU libraries

Each peer runs in a virtual environment of its own in DIR, made when it is missing. The task: the
MLP and the 5,000 MNIST images of `decision_tables.py`, six batch sizes, SGD with momentum. `fixed`
trains every size at the rate of 32, which is what a tool does that is told nothing about rates;
`linear` scales the rate with the size, a line in the `fit` that keras-tuner and Optuna let a user
write. The others have no place for that line and are asked about `fixed` alone. AutoKeras names no
size, it halves one that does not fit: its row is a wider net under a limit on TensorFlow's memory.

A search has as many trainings as there are sizes, and is repeated with other seeds. `kbatch race`
may take four times as many, and is searched once.

The truth is measured apart: every size, and every other size that was named, from the same
`--truth-seeds`. A size ties with the best where the 95 % t-interval of the paired difference
of test accuracy has 0 in it. Each result appends a line to `--store`; what is stored with the
same settings is not run again.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from decision_tables import BASE_SIZE, SIZES, TRAINING, VALIDATION, mlp, mnist

RATE = 0.02
WIDE, WIDE_LIMIT_MIB = 4096, 120  # A net that runs out of memory at the whole data set.
KERAS = ("tensorflow==2.21.*", "keras==3.15.*")
PEERS = {
    "kbatch": (),  # In the environment that runs this script.
    "kbatch race": (),
    "keras-tuner": ("keras-tuner==1.4.8", "tensorboard", *KERAS),
    "optuna": ("optuna", *KERAS),
    "batch-susceptibility": ("batch-susceptibility", *KERAS),
    "autokeras": ("autokeras", *KERAS),
    "lightning": ("lightning", "numpy"),
}
OF_ITS_OWN = ("batch-susceptibility", "autokeras", "lightning")  # Only the task `fixed`.


def rate_of(task: str, size: int) -> float:
    return RATE * size / BASE_SIZE if task == "linear" else RATE


def compiled(rate: float):
    import keras

    net = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return net


# What runs inside an environment: each returns the size named and what the tool says about it.


def keras_tuner(work) -> dict:
    import keras
    import keras_tuner

    class InFit(keras_tuner.HyperModel):
        def build(self, hp):
            keras.utils.set_random_seed(1000 * work.seed + len(tried))
            return compiled(RATE)

        def fit(self, hp, model, *args, **kwargs):
            size = hp.Choice("batch_size", list(work.sizes))
            tried.append(size)
            model.optimizer.learning_rate = rate_of(work.task, size)
            return model.fit(*args, batch_size=size, **kwargs)

    tried: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.GridSearch(InFit(), "val_accuracy", directory=folder)
        started_s = time.perf_counter()
        tuner.search(work.x, work.y, epochs=work.epochs, validation_data=work.held_out, verbose=0)
        best = tuner.oracle.get_best_trials(1)[0]
        seconds = time.perf_counter() - started_s
    named = best.hyperparameters.get("batch_size")
    return {"named": named, "tried": tried, "score": best.score, "seconds": seconds}


def optuna(work) -> dict:
    import keras
    import optuna

    def objective(trial):
        size = trial.suggest_categorical("batch_size", work.sizes)
        tried.append(size)
        keras.utils.set_random_seed(1000 * work.seed + trial.number)
        history = compiled(rate_of(work.task, size)).fit(
            *(work.x, work.y, size, work.epochs), verbose=0, validation_data=work.held_out
        )
        return max(history.history["val_accuracy"])

    tried: list[int] = []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=work.seed)
    )
    started_s = time.perf_counter()
    study.optimize(objective, n_trials=len(work.sizes))
    seconds = time.perf_counter() - started_s
    named = study.best_params["batch_size"]
    return {"named": named, "tried": tried, "score": study.best_value, "seconds": seconds}


def kbatch_search(work) -> dict:
    import kbatch

    raced = {"strategy": "race", "search_learning_rate": False}
    raced["max_executions"] = 4 * len(work.sizes)
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: compiled(RATE),
        work.sizes,
        micro_batch_size=None,
        dtype_policy="float32",
        learning_rate_scaling="linear" if work.task == "linear" else None,
        base_batch_size=BASE_SIZE,
        seed=1000 * work.seed + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            "val_accuracy",
            directory=folder,
            project_name="search",
            **(raced if work.peer == "kbatch race" else {}),
        )
        started_s = time.perf_counter()
        tuner.search(work.x, work.y, epochs=work.epochs, validation_data=work.held_out, verbose=0)
        study = kbatch.load_study(tuner)
        found = study.decide()
        seconds = time.perf_counter() - started_s
    tried = [trial.batch_size for trial in study.trials for _ in trial.executions]
    sure = "certain" if found.certain else "certified" if found.certified else "not certified"
    ties = ", ".join(map(str, found.tied)) or "none"
    says = f"{sure}; ties: {ties}"
    return {"named": found.batch_size, "tried": tried, "seconds": seconds, "says": says}


def batch_susceptibility(work) -> dict:
    import warnings

    import keras
    from batch_susceptibility.tensorflow import find_optimal_batch_size

    keras.utils.set_random_seed(1000 * work.seed)
    net = compiled(RATE)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        started_s = time.perf_counter()
        found = find_optimal_batch_size(net, work.x, work.y, batch_sizes=list(work.sizes))
        seconds = time.perf_counter() - started_s
    short = sum("ran out of data" in str(warning.message) for warning in caught)
    sharp = "significant" if found.is_significant else "not significant"
    losses = {int(size): float(loss) for size, loss in zip(work.sizes, found.V_values, strict=True)}
    return {
        "named": int(found.K_c),
        "tried": list(work.sizes),
        "seconds": seconds,
        "says": f"kappa {found.kappa:.1f}, {sharp}",
        "losses": losses,
        "short": short,
    }


def autokeras(work) -> dict:
    import keras
    from autokeras.utils.utils import fit_with_adaptive_batch_size

    keras.utils.set_random_seed(1000 * work.seed)
    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(WIDE, activation="relu")]
    net = keras.Sequential([layers.Input((28, 28, 1)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(RATE, momentum=0.9), loss, metrics=["accuracy"])
    started_s = time.perf_counter()
    net, history = fit_with_adaptive_batch_size(
        net, TRAINING, x=work.x, y=work.y, epochs=1, verbose=0
    )
    seconds = time.perf_counter() - started_s
    size = math.ceil(TRAINING / history.params["steps"])
    rate = float(net.optimizer.learning_rate)
    kept = sorted(set(history.params) | set(history.history))
    return {
        "named": size,
        "tried": [TRAINING, size],
        "seconds": seconds,
        "rate": rate,
        "kept": kept,
    }


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

    class Twin(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size = work.sizes[0]
            hidden = [torch.nn.Linear(28 * 28, 48), torch.nn.ReLU()]
            self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(48, 10))

        def training_step(self, batch, index):
            tried.append(len(batch[0]))
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(*rows)
            return torch.utils.data.DataLoader(data, self.batch_size, shuffle=True)

    tried: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        started_s = time.perf_counter()
        named = Tuner(trainer).scale_batch_size(Twin(), mode="power", init_val=work.sizes[0])
        seconds = time.perf_counter() - started_s
    return {"named": named, "tried": sorted(set(tried)), "seconds": seconds}


def train(work) -> dict:
    """Train one size from one seed: a row of the truth."""
    import keras

    keras.utils.set_random_seed(work.seed)
    net = compiled(rate_of(work.task, work.size))
    started_s = time.perf_counter()
    net.fit(work.x, work.y, work.size, work.epochs, verbose=0)
    seconds = time.perf_counter() - started_s
    accuracy = net.evaluate(*work.tested, batch_size=512, verbose=0, return_dict=True)["accuracy"]
    return {"accuracy": accuracy, "seconds": seconds}


INSIDE = {
    "kbatch": kbatch_search,
    "kbatch race": kbatch_search,
    "keras-tuner": keras_tuner,
    "optuna": optuna,
    "batch-susceptibility": batch_susceptibility,
    "autokeras": autokeras,
    "lightning": lightning,
}


def run_inside(asked: dict) -> None:
    """Do one piece of work in this process and print its result as the last line."""
    with np.load(asked.pop("data")) as data:
        x, y = data["x"], data["y"]
    end = TRAINING + VALIDATION
    asked["x"], asked["y"] = x[:TRAINING], y[:TRAINING]
    asked["held_out"] = x[TRAINING:end], y[TRAINING:end]
    asked["tested"] = x[end:], y[end:]
    work = argparse.Namespace(**asked)
    work.sizes = tuple(work.sizes)
    if work.peer == "truth":
        results = []
        for size, seed in asked["runs"]:
            work.size, work.seed = size, seed
            results.append(train(work))
        print(json.dumps(results))
    else:
        from importlib.metadata import version

        result = INSIDE[work.peer](work)
        print(json.dumps(result | {"version": version(work.peer.split()[0])}))


# What runs outside.


def environment(peer: str, folder: Path) -> tuple[Path, dict]:
    """Return the Python of a peer, made when it is missing, and how its installation went."""
    if not PEERS[peer]:
        return Path(sys.executable), {}
    place = folder / peer
    python, done = place / "bin" / "python", place / "installed.json"
    if not done.exists():
        started_s = time.perf_counter()
        venv.create(place, with_pip=True, clear=True)
        words = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PEERS[peer]]
        installed = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = installed.stderr.strip().splitlines() or ["no words"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        error = errors[-1:] if installed.returncode else []
        seconds = time.perf_counter() - started_s
        done.write_text(json.dumps({"error": error, "seconds": seconds}))
    return python, json.loads(done.read_text())


def inside(python: Path, asked: dict, limit_mib: int | None = None):
    """Run a piece of work in the Python of an environment; return its result, or its end."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    if python == Path(sys.executable):
        variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    if limit_mib is not None:
        variables |= {"TF_CPU_ALLOCATOR_USE_BFC": "1"}
        variables |= {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mib)}
    words = [str(python), __file__, "--inside", json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": f"status {done.returncode}: {lines[-1] if lines else 'no words'}"}
    return json.loads(done.stdout.splitlines()[-1])


class Store:
    """Results by what was asked, a line each."""

    def __init__(self, file: Path):
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def get(self, asked: dict) -> dict | None:
        return next((row for row in self.rows if row.items() >= asked.items()), None)

    def add(self, row: dict) -> dict:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row


def truth_of(task: str, sizes, options, store: Store, data: str) -> dict[int, list[dict]]:
    """Train what the store lacks, the sizes taking turns; return the rows of each size by seed."""
    keys = [
        {"kind": "truth", "task": task, "epochs": options.epochs, "size": size, "seed": seed}
        for seed in range(options.truth_seeds)
        for size in (sizes if seed % 2 == 0 else sizes[::-1])
    ]
    missing = [key for key in keys if store.get(key) is None]
    at_once = 5 * len(sizes)  # One start of TensorFlow for so many, and what an interruption loses.
    for start in range(0, len(missing), at_once):
        part = missing[start : start + at_once]
        runs = [(key["size"], 500 + key["seed"]) for key in part]
        asked = {"peer": "truth", "task": task, "epochs": options.epochs, "runs": runs}
        asked |= {"sizes": list(sizes), "data": data}
        found = inside(Path(sys.executable), asked)
        if isinstance(found, dict):
            raise SystemExit(f"The truth could not be measured. Received: {found['failed']}")
        for key, row in zip(part, found, strict=True):
            store.add(key | row)
    rows: dict[int, list[dict]] = {size: [] for size in sizes}
    for key in sorted(keys, key=lambda key: key["seed"]):
        rows[key["size"]].append(store.get(key) or {})
    return rows


def tied_with_best(truth: dict[int, list[dict]]) -> tuple[int, list[int]]:
    """Return the size with the best mean, and the sizes that are not told apart from it."""
    from scipy import stats

    accuracies = {size: [row["accuracy"] for row in rows] for size, rows in truth.items()}
    best = max(accuracies, key=lambda size: statistics.fmean(accuracies[size]))
    tied = []
    for size, values in accuracies.items():
        gaps = np.subtract(accuracies[best], values)
        half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
        if size == best or abs(gaps.mean()) <= half:
            tied.append(size)
    return best, sorted(tied)


def silent(peer: str, rows: list[dict], tied: list[int], sizes: list[int]) -> str:
    """Say what a result lacks, from the result and the truth."""
    words = []
    if peer == "autokeras":
        row = rows[0]
        words.append(
            f"asked for {TRAINING}, out of memory, trained {row['named']} at the unchanged rate of "
            f"{row['rate']:g}; the history holds {', '.join(row['kept'])}"
        )
        return "; ".join(words)
    if peer == "lightning":
        return f"ran steps of {min(rows[0]['tried'])} to {max(rows[0]['tried'])}, compares no loss"
    untried = [len(set(sizes) - set(row["tried"])) for row in rows]
    if any(untried):
        words.append(f"{' and '.join(map(str, untried))} of {len(sizes)} sizes never tried")
    if peer == "batch-susceptibility":
        words.append(f"{rows[0]['short']} of {len(sizes)} sizes ran out of data before 50 steps")
        losses = rows[0]["losses"]
        lowest = min(losses, key=losses.__getitem__)
        words.append(
            f"names where its loss changes fastest, never the ends; it is lowest at {lowest}"
        )
    if not peer.startswith("kbatch") and len(tied) > 1:
        words.append(f"ties ({', '.join(map(str, tied))} tie)")
    return "; ".join(words) or "-"


def print_tables(found: dict, truths: dict, options) -> None:
    """Print the truth and the results of each task as Markdown."""
    for task, truth in truths.items():
        best, tied = tied_with_best(truth)
        print(f"\n### {task}: the truth, {options.truth_seeds} seeds, {options.epochs} epochs\n")
        print("| batch size | test accuracy | train s | ties with the best |\n|---|---|---|---|")
        for size, rows in truth.items():
            values = [row["accuracy"] for row in rows]
            error = statistics.stdev(values) / math.sqrt(len(values))
            seconds = statistics.median(row["seconds"] for row in rows)
            mark = "best" if size == best else "yes" if size in tied else "no"
            mean = f"{statistics.fmean(values):.4f} ± {error:.4f}"
            print(f"| {size} | {mean} | {seconds:.1f} | {mark} |")
        print(f"\n### {task}: the tools\n")
        print("| tool | runs | s | named | test accuracy, train s | says | leaves out |")
        print("|---|---|---|---|---|---|---|")
        for peer in options.peers:
            rows = found.get((task, peer), [])
            if not rows:
                continue
            if any("failed" in row for row in rows):
                failed = next(row["failed"] for row in rows if "failed" in row)
                print(f"| {peer} | - | - | - | - | - | {failed} |")
                continue
            means = []
            for row in rows:
                good = truth.get(row["named"], []) if peer != "autokeras" else []
                if good:
                    accuracy = statistics.fmean(run["accuracy"] for run in good)
                    train_s = statistics.median(run["seconds"] for run in good)
                    means.append(f"{accuracy:.4f}, {train_s:.1f}")
            trainings = ", ".join(str(len(row["tried"])) for row in rows)
            seconds = ", ".join(f"{row['seconds']:.0f}" for row in rows)
            named = ", ".join(str(row["named"]) for row in rows)
            says = " / ".join(row.get("says", "nothing") for row in rows)
            print(
                f"| {peer} {rows[0]['version']} | {trainings} | {seconds} | {named} | "
                f"{' / '.join(means) or '-'} | {says} | {silent(peer, rows, tied, options.sizes)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--tasks", nargs="+", default=["fixed", "linear"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--truth-seeds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--store", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        run_inside(options.inside)
        return
    if options.environments is None:
        parser.error("`--environments DIR` is required: a folder for the tools' environments")
    folder, store = options.environments.resolve(), Store(options.store)
    folder.mkdir(parents=True, exist_ok=True)
    data = str(folder / "mnist.npz")
    np.savez(data, **dict(zip("xy", mnist(), strict=True)))
    found: dict[tuple[str, str], list[dict]] = {}
    for peer in options.peers:
        python, installed = environment(peer, folder)
        for task in options.tasks:
            if peer in OF_ITS_OWN and task != "fixed":
                continue
            for seed in range(1 if peer == "kbatch race" else options.seeds):
                key = {"kind": "peer", "peer": peer, "task": task, "seed": seed}
                key |= {"epochs": options.epochs, "sizes": options.sizes}
                row = store.get(key)
                if row is None and installed.get("error"):
                    row = key | {"failed": f"not installed: {installed['error'][0]}"}
                elif row is None:
                    limit_mib = WIDE_LIMIT_MIB if peer == "autokeras" else None
                    row = store.add(key | inside(python, key | {"data": data}, limit_mib))
                found.setdefault((task, peer), []).append(row)
                print(peer, task, seed, row.get("named"), row.get("failed", ""), flush=True)
    truths = {}
    for task in options.tasks:
        rows = [row for (of, peer), rows in found.items() if of == task for row in rows]
        named = {row["named"] for row in rows if "named" in row and row["peer"] != "autokeras"}
        sizes = sorted({*options.sizes, *named})
        truths[task] = truth_of(task, sizes, options, store, data)
    print_tables(found, truths, options)


if __name__ == "__main__":
    main()
