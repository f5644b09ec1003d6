"""How far does the chosen batch size scatter beside a noisy neighbour?

python benchmarks/inference_repeatability.py [--repeats 10] [--net cnn] [--seconds 10] [--quiet]

A neighbour process multiplies matrices in bursts of random length. In turns, kbatch profiles the
net in shuffled rounds, and a sequential sweep times each size for as long in all. The spread is
the standard deviation of log2 of the chosen batch, in octaves.
"""

import argparse
import contextlib
import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from inference_nets import inference_nets

import kbatch
from kbatch.inference.call_paths import inference_inputs, open_path, repeated
from kbatch.timing import warm_up_calls

SIZES = kbatch.powers_of_two(1, 256)
NEIGHBOUR = """
import random, time
import numpy as np
a = np.ones((700, 700), "float32")
while True:
    end = time.monotonic() + random.expovariate(1 / 0.4)
    while time.monotonic() < end:
        a @ a
    time.sleep(random.expovariate(1 / 0.6))
"""


@contextlib.contextmanager
def neighbour(quiet: bool) -> Iterator[None]:
    if quiet:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def by_kbatch(model, x, seconds: float) -> dict[str, int | None]:
    profile = kbatch.profile_inference(
        model, x, batch_sizes=SIZES, time_budget_s=seconds, measure_memory=False
    )
    found: dict[str, int | None] = {}
    for name in ("knee", "efficient", "fastest"):
        try:
            found[f"kbatch: {name}"] = getattr(profile, name).batch_size
        except ValueError:
            found[f"kbatch: {name}"] = None
    return found


def by_sequence(run, rows, seconds: float) -> dict[str, int]:
    rates: dict[int, float] = {}
    for size in SIZES:
        call = functools.partial(run, repeated(rows, size), size)
        warm_up_calls(call)
        began_s, calls = time.perf_counter(), 0
        while calls < 3 or time.perf_counter() - began_s < seconds / len(SIZES):
            call()
            calls += 1
        rates[size] = size * calls / (time.perf_counter() - began_s)
    best = max(rates, key=rates.__getitem__)
    enough = min(size for size, rate in rates.items() if rate >= 0.9 * rates[best])
    return {"sequence: argmax": best, "sequence: 90 % of the largest": enough}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--net", default="cnn")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--quiet", action="store_true", help="without the neighbour")
    options = parser.parse_args()
    model, x = inference_nets()[options.net]
    chosen: dict[str, list[int | None]] = {}
    rows = inference_inputs(model, x).rows
    with open_path("compiled", model, rows) as run, neighbour(options.quiet):
        for _ in range(options.repeats):
            answers = {
                **by_kbatch(model, x, options.seconds),
                **by_sequence(run, rows, options.seconds),
            }
            for name, size in answers.items():
                chosen.setdefault(name, []).append(size)
    print(f"{options.net}, {options.repeats} repeats of {options.seconds:g} s")
    print(f"{'way':<32}{'spread (octaves)':>17}{'median':>8}  chosen")
    for name, sizes in chosen.items():
        known = [size for size in sizes if size is not None]
        spread = statistics.stdev(map(math.log2, known)) if len(known) > 1 else math.nan
        middle = statistics.median(known) if known else math.nan
        words = " ".join("-" if size is None else str(size) for size in sizes)
        print(f"{name:<32}{spread:>17.2f}{middle:>8.0f}  {words}")


if __name__ == "__main__":
    main()
