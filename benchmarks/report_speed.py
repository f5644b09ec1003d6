"""How long do `kbatch --help`, all figures, and the report of a study of 200 trials take?

python benchmarks/report_speed.py [--trials 200] [--rounds 5] [--beside PATH]    1 minute

Each command runs in a process of its own, in turn in each round. `figures` draws every public
figure except `plot_search` as PNG: figures of the study, and figures of the records in docs/data.
Each trial has three executions of 20 epochs with accuracies, a target, gradient moments, readings
of a GPU and 30 timing windows. Seconds are wall time for commands and processor time for figures.
With `--beside`, another checkout draws the same figures, and the last row is the ratio.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quick import parse_arguments
from side_by_side import ratio

import kbatch
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.plotting.canvas import figure_bytes
from kbatch.records.json_codec import write_record
from kbatch.records.machine import EnvironmentRecord, GpuSample, GpuUsage, UsageRecord
from kbatch.records.training_run import EpochRecord, ExecutionRecord, SearchRecord, Target
from kbatch.study.trial import Objective, TrialRecord

DATA = Path(kbatch.__file__).parent.parent / "docs" / "data"
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
        scaling=LearningRateScaling("sqrt", batch_size, 32, (batch_size / 32) ** 0.5, 0.001),
        target=Target("val_accuracy", 0.5, "max"),
        usage=usage(random_),
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


def usage(random_):
    samples = [
        GpuSample(float(s), random_.random(), 1e9, 300 * random_.random()) for s in range(60)
    ]
    mean = GpuSample(30.0, 0.5, 1e9, 150.0)
    gpu = GpuUsage(
        "a GPU", "0000:1e:00.0", ("GPU:0",), 80 * 2**30, 9e3, "power", mean, tuple(samples)
    )
    return UsageRecord(60.0, 60, (gpu,))


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


def draw_all(study):
    """Draws every figure twice and prints the seconds of the second time, by kind."""
    load = {
        "limits": functools.partial(kbatch.Recommendation.load, DATA / "recommendation.json"),
        "memory": functools.partial(kbatch.MaxBatchSizeResult.load, DATA / "made-up-memory.json"),
        "training": functools.partial(kbatch.TrainingProfile.load, DATA / "training.json"),
        "inference": functools.partial(kbatch.InferenceProfile.load, DATA / "inference.json"),
        "input": functools.partial(kbatch.InputPipelineProfile.load, DATA / "input.json"),
    }
    found = {}
    for _ in range(2):
        loaded = {kind: read() for kind, read in load.items()}
        searched = kbatch.load_study(study)
        # The records do not say when the runs began, which `plot_search` needs.
        for plot in (name for name in dir(kbatch) if re.match("plot_(?!search)", name)):
            began_s = time.process_time()
            result = loaded.get(plot.split("_")[1], searched)
            figure_bytes(getattr(kbatch, plot)(result), ".png")
            found[plot] = time.process_time() - began_s
    print(json.dumps(found))


def figures_seconds(trials, rounds, path=""):
    """Returns the processor seconds of all figures in each round, drawn by a checkout."""
    command = [sys.executable, __file__, "--draw", "--trials", str(trials)]
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    found = []
    for _ in range(rounds):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        found.append(sum(json.loads(done.stdout).values()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", help="another checkout, which draws the same figures")
    parser.add_argument("--draw", action="store_true", help=argparse.SUPPRESS)
    options = parse_arguments(parser, trials=50, rounds=1)
    if options.draw:
        with tempfile.TemporaryDirectory() as folder:  # Each checkout reads records of its own.
            save_study(Path(folder), options.trials)
            draw_all(Path(folder))
        return
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
        found["figures"] = figures_seconds(options.trials, options.rounds)
        if options.beside:
            found["figures beside"] = figures_seconds(
                options.trials, options.rounds, options.beside
            )
        print(f"{'':16}{'median s':>9}{'least':>8}{'most':>8}{'MB':>7}")
        for name, times in found.items():
            file = page.with_name(name)
            size = f"{file.stat().st_size / 1e6:7.2f}" if file.exists() else ""
            print(
                f"{name:16}{statistics.median(times):9.2f}{min(times):8.2f}{max(times):8.2f}{size}"
            )
        if options.beside:
            print(f"{'ratio':16}{ratio(found['figures'], found['figures beside']):9.2f}")


if __name__ == "__main__":
    main()
