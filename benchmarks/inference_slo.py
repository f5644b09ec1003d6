"""How fast is the largest batch under a latency target found, and does it meet the target?

python benchmarks/inference_slo.py [--repeats 4] [--nets mlp cnn] [--multiple 8]    18 minutes

The target is a multiple of the 95th percentile of the latency of one example. Three ways:

kbatch       `profile_inference(latency_slo_ms=)`: a sweep, a fit, and fresh calls that verify
bisection    doubles the batch until it misses the target, then bisects five times, as Model
             Analyzer's quick search does for its concurrency
exhaustive   all sizes, an eighth of an octave apart, up to twice the first miss; then two more
             rounds of the sizes within half an octave of the largest that met the target. The
             answer is the largest size that meets it over all calls. Once for each net

Each size is timed with the 59 calls that the percentile needs, and for at least 0.3 s. Afterwards
all answers are called in shuffled rounds of 59 calls.

violations   share of these rounds whose 95th percentile misses the target
all          whether the 95th percentile of all 590 calls meets it
rate         throughput over the throughput of the exhaustive answer
others       cores that other processes used. The benchmark waits until they use few. A repeat with
             more than 0.15 cores stands in brackets and does not count in the last lines
"""

import argparse
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import psutil
from inference_nets import inference_nets
from quick import parse_arguments

import kbatch
from kbatch.inference.call_paths import inference_inputs, open_path, repeated
from kbatch.timing import warm_up_calls

QUANTILE = 0.95
CALLS = 59
SHORTEST_PROBE_S = 0.3
CHECK_ROUNDS = 10
ROUNDS_NEAR = 2
MOST = 4096
# Cores in use by others at which a machine counts as calm.
CALM_CORES = 0.15

Prepare = Callable[[int], Callable[[], object]]


class OtherProcesses:
    """Counts the processor time of all but this process since it was made."""

    def __init__(self):
        self._began = self._seconds()

    def cores(self) -> float:
        """Returns how many cores others have used since then, on average."""
        (now_s, others_now_s), (then_s, others_then_s) = self._seconds(), self._began
        return max(0.0, (others_now_s - others_then_s) / (now_s - then_s))

    @staticmethod
    def _seconds() -> tuple[float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return time.perf_counter(), sum(times) - idle - time.process_time()


def wait_for_calm(most_s: float) -> None:
    """Waits until others leave the processors alone for a second, at most so long."""
    end_s = time.perf_counter() + most_s
    while time.perf_counter() < end_s:
        others = OtherProcesses()
        time.sleep(1.0)
        if others.cores() < CALM_CORES:
            return


class Found(NamedTuple):
    """The answer of a way.

    Attributes:
        batch_size: Its answer.
        probes: Batch sizes that it timed, with repetitions.
        seconds: Wall time of the search.
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
        self.latencies_s: dict[int, list[float]] = {}

    def keeps(self, batch_size: int) -> bool:
        call = self.prepare(batch_size)
        warm_up_calls(call)
        self.probes += 1
        latencies_s = timed(call, CALLS, SHORTEST_PROBE_S)
        self.latencies_s.setdefault(batch_size, []).extend(latencies_s)
        return quantile_s(latencies_s) <= self.target_s

    def largest(self) -> int:
        """Returns the largest size that keeps to the target over all calls of it."""
        kept = [
            n for n, calls_s in self.latencies_s.items() if quantile_s(calls_s) <= self.target_s
        ]
        return max(kept, default=0)


def quantile_s(latencies_s: list[float]) -> float:
    return float(np.quantile(latencies_s, QUANTILE))


def timed(call: Callable[[], object], calls: int, least_s: float = 0.0) -> list[float]:
    durations_s: list[float] = []
    while len(durations_s) < calls or sum(durations_s) < least_s:
        began_s = time.perf_counter()
        call()
        durations_s.append(time.perf_counter() - began_s)
    return durations_s


def by_kbatch(model, x, target_s: float) -> Found:
    began_s = time.perf_counter()
    profile = kbatch.profile_inference(
        model, x, latency_slo_ms=1000 * target_s, quantile=QUANTILE, measure_memory=False, verbose=0
    )
    seconds = time.perf_counter() - began_s
    kept = [check.batch_size for check in profile.checks if check == profile.verified]
    probes = sum(t.measured for t in profile.timings) + len(profile.checks)
    return Found(kept[0] if kept else 0, probes, seconds)


def by_bisection(model, x, target_s: float) -> Found:
    began_s = time.perf_counter()
    rows = inference_inputs(model, x).rows
    with open_path("compiled", model, rows) as run:  # Traced again, as kbatch does.
        prober = Prober(functools.partial(call_of, run, rows), target_s)
        low, high = 0, 1
        while high < MOST and prober.keeps(high):
            low, high = high, 2 * high
        for _ in range(5):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            low, high = (middle, high) if prober.keeps(middle) else (low, middle)
    return Found(low, prober.probes, time.perf_counter() - began_s)


def call_of(run, rows, batch_size: int) -> Callable[[], object]:
    return functools.partial(run, repeated(rows, batch_size), batch_size)


def by_all(prepare: Prepare, target_s: float) -> Found:
    began_s = time.perf_counter()
    first_miss: int | None = None
    prober = Prober(prepare, target_s)
    for size in sorted({round(2 ** (k / 8)) for k in range(8 * 12 + 1)}):
        if first_miss is not None and size > 2 * first_miss:
            break
        if not prober.keeps(size) and first_miss is None:
            first_miss = size
    best = prober.largest()
    near = [size for size in prober.latencies_s if best / 2**0.5 <= size <= best * 2**0.5]
    order = random.Random(0)
    for _ in range(ROUNDS_NEAR):
        for size in order.sample(near, len(near)):
            prober.keeps(size)
    return Found(prober.largest(), prober.probes, time.perf_counter() - began_s)


class Checked(NamedTuple):
    """The result of fresh calls of an answer.

    Attributes:
        violations: Share of the rounds whose quantile missed the target.
        missed: Whether the quantile of all calls did.
        rate: Median throughput, in examples per second.
    """

    violations: float
    missed: bool
    rate: float


NOTHING_FOUND = Checked(1.0, True, 0.0)


def fresh_check(prepare: Prepare, answers: dict[str, int], target_s: float) -> dict[str, Checked]:
    """Calls all answers in the same rounds, in shuffled order."""
    calls = {name: prepare(size) for name, size in answers.items() if size}
    for call in calls.values():
        warm_up_calls(call)
    durations_s: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(CHECK_ROUNDS):
        for name in order.sample(sorted(calls), len(calls)):
            durations_s[name].append(np.array(timed(calls[name], CALLS)))
    return {
        name: Checked(
            float(np.mean([np.quantile(one, QUANTILE) > target_s for one in rounds])),
            bool(np.quantile(np.concatenate(rounds), QUANTILE) > target_s),
            statistics.median(CALLS * answers[name] / float(one.sum()) for one in rounds),
        )
        for name, rounds in durations_s.items()
    }


class Row(NamedTuple):
    """One way in one repeat."""

    net: str
    way: str
    found: Found
    checked: Checked
    rate: float
    others: float

    @property
    def calm(self) -> bool:
        return self.others <= CALM_CORES

    def __str__(self) -> str:
        left, right = (" ", " ") if self.calm else ("(", ")")
        kept = "miss" if self.checked.missed else "keep"
        return (
            f"{left}{self.net:<13}{self.way:<12}{self.found.batch_size:>6}{self.found.probes:>8}"
            f"{self.found.seconds:>8.1f}{self.checked.violations:>12.0%}{kept:>6}"
            f"{self.rate:>7.2f}{self.others:>8.2f}{right}"
        )


def repeat(name: str, model, x, prepare: Prepare, target_s: float, exhaustive: Found) -> list[Row]:
    others = OtherProcesses()
    ways = {
        "kbatch": by_kbatch(model, x, target_s),
        "bisection": by_bisection(model, x, target_s),
        "exhaustive": exhaustive,
    }
    answers = {way: found.batch_size for way, found in ways.items()}
    checked = fresh_check(prepare, answers, target_s)
    cores = others.cores()
    best = checked.get("exhaustive", NOTHING_FOUND).rate or float("nan")
    found = {way: checked.get(way, NOTHING_FOUND) for way in ways}
    return [Row(name, way, ways[way], one, one.rate / best, cores) for way, one in found.items()]


def summarise(rows: list[Row]) -> None:
    by_way = {way: [row for row in rows if row.way == way] for way in ("kbatch", "bisection")}
    ours, theirs = by_way["kbatch"], by_way["bisection"]
    if not ours:
        print("no repeat was calm")
        return
    ratios = [a.found.seconds / b.found.seconds for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.median(ratios)
    print(f"{len(ours)} calm repeats: {middle:.2f} of the bisection's time (median)")
    for way, some in by_way.items():
        print(
            f"{way}: {statistics.mean(row.checked.violations for row in some):.1%} violations, "
            f"{sum(row.checked.missed for row in some)} of {len(some)} answers miss the target "
            f"over all calls, {statistics.median(row.rate for row in some):.2f} of the exhaustive "
            "answer's throughput (median)"
        )


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--nets", nargs="+", default=None)
    parser.add_argument("--multiple", type=float, default=8.0)
    parser.add_argument("--wait", type=float, default=30.0, help="most seconds to wait for calm")
    options = parse_arguments(parser, nets=["mlp"], repeats=1, wait=0.0)
    rows: list[Row] = []
    print(
        f" {'net':<13}{'way':<12}{'batch':>6}{'probes':>8}{'s':>8}{'violations':>12}{'all':>6}"
        f"{'rate':>7}{'others':>8}"
    )
    for name, (model, x) in inference_nets().items():
        if options.nets is not None and name not in options.nets:
            continue
        inputs = inference_inputs(model, x).rows
        with open_path("compiled", model, inputs) as run:
            prepare = functools.partial(call_of, run, inputs)
            one = prepare(1)
            warm_up_calls(one)
            wait_for_calm(options.wait)
            target_s = options.multiple * quantile_s(timed(one, 5 * CALLS))
            log(f" {name}: target {1000 * target_s:.2f} ms")
            exhaustive = by_all(prepare, target_s)
            log(f" {name}: exhaustive search {exhaustive.seconds:.0f} s")
            for _ in range(options.repeats):
                wait_for_calm(options.wait)
                found = repeat(name, model, x, prepare, target_s, exhaustive)
                rows += found
                print(*found, sep="\n", flush=True)
    summarise([row for row in rows if row.calm])


if __name__ == "__main__":
    main()
