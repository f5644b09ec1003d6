"""How cheaply is the largest batch under a latency target found, and does it keep to it?

python benchmarks/inference_slo.py [--repeats 3] [--nets mlp cnn] [--multiple 8]

The target is a multiple of the time of one example, for the 0.95 quantile. Three ways:

- kbatch: `profile_inference(latency_slo_ms=)`, a sweep, a fit and fresh calls that verify;
- bisection: double the batch until it misses the target, then bisect five times between the last
  two, as Model Analyzer's quick scheme does for its concurrency; a probe makes the 59 calls that
  the quantile needs and lasts 0.3 s at least, as a size of kbatch's sweep does;
- exhaustive: such probes of all sizes, an eighth of an octave apart, up to twice the first miss.

Afterwards all answers are called in shuffled rounds: a violation is a round of 59 calls whose
0.95 quantile misses the target. `rate` is the throughput there over that of the exhaustive answer.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from inference_nets import inference_nets

import kbatch
from kbatch.profiling.inference_inputs import inference_inputs
from kbatch.profiling.inference_paths import call_paths_of
from kbatch.profiling.timing_rounds import warm_up_calls

QUANTILE = 0.95
CALLS = 59
SHORTEST_PROBE_S = 0.3
CHECK_ROUNDS = 10
MOST = 4096

Prepare = Callable[[int], Callable[[], object]]


class Found(NamedTuple):
    """What a way found.

    Attributes:
        batch_size: Its answer.
        probes: Batch sizes that it timed, with repetitions.
        seconds: What it took.
    """

    batch_size: int
    probes: int
    seconds: float


class Prober:
    """Times batch sizes of one compiled model."""

    def __init__(self, prepare: Prepare, target_s: float):
        self.prepare = prepare
        self.target_s = target_s
        self.probes = 0

    def keeps(self, batch_size: int) -> bool:
        call = self.prepare(batch_size)
        warm_up_calls(call)
        self.probes += 1
        return quantile_s(call, CALLS, SHORTEST_PROBE_S) <= self.target_s


def quantile_s(call: Callable[[], object], calls: int, least_s: float = 0.0) -> float:
    durations_s: list[float] = []
    while len(durations_s) < calls or sum(durations_s) < least_s:
        began_s = time.perf_counter()
        call()
        durations_s.append(time.perf_counter() - began_s)
    return float(np.quantile(durations_s, QUANTILE))


def by_kbatch(model, x, target_s: float) -> Found:
    began_s = time.perf_counter()
    profile = kbatch.profile_inference(
        model, x, latency_slo_ms=1000 * target_s, quantile=QUANTILE, measure_memory=False
    )
    seconds = time.perf_counter() - began_s
    kept = [check.batch_size for check in profile.checks if check.best]
    probes = sum(t.measured for t in profile.timings) + len(profile.checks)
    return Found(kept[0] if kept else 0, probes, seconds)


def by_bisection(model, x, target_s: float) -> Found:
    began_s = time.perf_counter()
    (path,) = call_paths_of("compiled")
    with path.open(model, inference_inputs(model, x), 1) as prepare:  # Traced anew, as kbatch does.
        prober = Prober(prepare, target_s)
        low, high = 0, 1
        while high < MOST and prober.keeps(high):
            low, high = high, 2 * high
        for _ in range(5):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            low, high = (middle, high) if prober.keeps(middle) else (low, middle)
    return Found(low, prober.probes, time.perf_counter() - began_s)


def by_all(prepare: Prepare, target_s: float) -> Found:
    began_s = time.perf_counter()
    prober = Prober(prepare, target_s)
    best, first_miss = 0, None
    for size in sorted({round(2 ** (k / 8)) for k in range(8 * 12 + 1)}):
        if first_miss is not None and size > 2 * first_miss:
            break
        if prober.keeps(size):
            best = size
        elif first_miss is None:
            first_miss = size
    return Found(best, prober.probes, time.perf_counter() - began_s)


def fresh_check(
    prepare: Prepare, answers: dict[str, int], target_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Gives the share of violations and the rate of each answer, measured in the same rounds."""
    calls = {name: prepare(size) for name, size in answers.items() if size}
    for call in calls.values():
        warm_up_calls(call)
    violations = dict.fromkeys(calls, 0)
    rates: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(CHECK_ROUNDS):
        for name in order.sample(sorted(calls), len(calls)):
            began_s = time.perf_counter()
            violations[name] += quantile_s(calls[name], CALLS) > target_s
            rates[name].append(CALLS * answers[name] / (time.perf_counter() - began_s))
    return (
        {name: count / CHECK_ROUNDS for name, count in violations.items()},
        {name: statistics.median(values) for name, values in rates.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nets", nargs="+", default=None)
    parser.add_argument("--multiple", type=float, default=8.0)
    options = parser.parse_args()
    shares: list[float] = []
    time_ratios: list[float] = []
    rate_ratios: list[float] = []
    print(f"{'net':<13}{'way':<12}{'batch':>7}{'probes':>8}{'s':>8}{'violations':>12}{'rate':>7}")
    for name, (model, x) in inference_nets().items():
        if options.nets is not None and name not in options.nets:
            continue
        (path,) = call_paths_of("compiled")
        with path.open(model, inference_inputs(model, x), 1) as prepare:
            one = prepare(1)
            warm_up_calls(one)
            target_s = options.multiple * quantile_s(one, 5 * CALLS)
            print(f"{name}: target {1000 * target_s:.2f} ms")
            for _ in range(options.repeats):
                ways = {
                    "kbatch": by_kbatch(model, x, target_s),
                    "bisection": by_bisection(model, x, target_s),
                    "exhaustive": by_all(prepare, target_s),
                }
                answers = {way: found.batch_size for way, found in ways.items()}
                violations, rates = fresh_check(prepare, answers, target_s)
                for way, found in ways.items():
                    rate = rates.get(way, 0.0) / rates.get("exhaustive", float("nan"))
                    print(
                        f"{name:<13}{way:<12}{found.batch_size:>7}{found.probes:>8}"
                        f"{found.seconds:>8.1f}{violations.get(way, 0.0):>12.0%}{rate:>7.2f}",
                        flush=True,
                    )
                shares.append(violations.get("kbatch", 1.0))
                time_ratios.append(ways["kbatch"].seconds / ways["bisection"].seconds)
                rate_ratios.append(rates.get("kbatch", 0.0) / rates.get("exhaustive", 1.0))
    print(
        f"kbatch: {statistics.median(time_ratios):.2f} of the bisection's time (median), "
        f"{statistics.mean(shares):.1%} violations, "
        f"{statistics.median(rate_ratios):.2f} of the exhaustive answer's throughput (median)"
    )


if __name__ == "__main__":
    main()
