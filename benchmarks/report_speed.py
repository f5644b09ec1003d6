"""How long do `kbatch --help` and the report of a saved study of 200 trials take?

    python benchmarks/report_speed.py [--trials 200] [--rounds 5]

Processes of their own, commands in turn in each round: the help, the report as HTML and as
Markdown. Each trial has three executions of 20 epochs with accuracies, gradient moments and 30
timing windows. Prints seconds of wall time, their median, and the size of the page.
"""

import argparse
import dataclasses
import importlib
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kbatch.records.json_codec import write_record
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.training_run import EpochRecord, ExecutionRecord, SearchRecord
from kbatch.study.trial import Objective, TrialRecord

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
EPOCHS, WINDOWS, EXAMPLES = 20, 30, 1437


def execution(batch_size, random_):
    updates = -(-EXAMPLES // batch_size)
    rate = 900 * batch_size**0.45 * random_.lognormvariate(0, 0.02)
    epochs = []
    for epoch in range(EPOCHS):
        accuracy = 0.98 * (1 - math.exp(-(epoch + 1) * updates / 100)) + random_.gauss(0, 0.003)
        metrics = {"loss": 1 - accuracy, "val_accuracy": accuracy, "val_loss": 1.1 - accuracy}
        metrics["gradient_squared_norm"] = random_.lognormvariate(0, 0.1)
        metrics["gradient_variance"] = 90 * random_.lognormvariate(0, 0.1)
        epochs.append(EpochRecord(epoch, metrics, EXAMPLES, updates, EXAMPLES / rate, 0.01))
    return ExecutionRecord(
        status="completed",
        seed=0,
        batch_size=batch_size,
        micro_batch_size=min(batch_size, 128),
        dtype_policy="float32",
        optimizer="Adam",
        loss_scaled=False,
        learning_rate=0.001,
        learning_rate_scaling="sqrt",
        jit_compile=False,
        batch_size_seen=batch_size,
        window_examples=(100,) * WINDOWS,
        window_durations_s=tuple(
            100 / rate * random_.lognormvariate(0, 0.02) for _ in range(WINDOWS)
        ),
        first_step_s=1.2,
        examples_seen=EPOCHS * EXAMPLES,
        updates=EPOCHS * updates,
        train_s=EPOCHS * EXAMPLES / rate,
        data_wait_s=0.2,
        total_s=1.5 * EPOCHS * EXAMPLES / rate,
        epochs=tuple(epochs),
    )


def trial(number, random_):
    batch_size = SIZES[number % len(SIZES)]
    executions = tuple(execution(batch_size, random_) for _ in range(3))
    if number % 17 == 16:
        executions = (
            dataclasses.replace(executions[0], status="out_of_memory", failure="out of memory"),
        )
    hyperparameters = {
        "batch_size": batch_size,
        "units": 8 * (1 + number // len(SIZES)),
        "drop": 0.1 * (number % 5),
    }
    objective = Objective("val_accuracy", "max")
    return TrialRecord(f"{number:04d}", hyperparameters, objective, executions)


def save_study(folder, trials):
    random_ = random.Random(0)
    for number in range(trials):
        write_record(trial(number, random_), folder / f"trial_{number:04d}" / "kbatch.json")
    environment = EnvironmentRecord(
        versions={"python": "3.13", "tensorflow": "2.21.0", "keras": "3.15.1"},
        platform="Linux",
        cpu="a processor",
        cpu_count=2,
        memory_bytes=8 * 2**30,
        devices=("CPU",),
        load_average=0.1,
        command="python search.py",
        created_at="2025-01-02T03:04:05+00:00",
    )
    write_record(SearchRecord({"seed": 0}, environment), folder / "kbatch.json")


def seconds(*words):
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kbatch", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study, page = Path(folder) / "study", Path(folder) / "report.html"
        save_study(study, options.trials)
        commands = {
            "help": ("--help",),
            "report.html": ("report", str(study), "-o", str(page)),
            "report.md": ("report", str(study), "-o", str(page.with_suffix(".md"))),
        }
        importlib.import_module("matplotlib.font_manager")  # Its cache is made once a machine.
        found = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, words in commands.items():
                found[name].append(seconds(*words))
        for name, times in found.items():
            listed = " ".join(f"{s:.2f}" for s in times)
            print(f"{name:12} median {statistics.median(times):.2f} s  ({listed})")
        print(f"{options.trials} trials, page {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
