"""How good is the search for the largest batch, compared with published searches?

python benchmarks/max_batch_search.py [--devices 1000] [--seeds 0 1 2] [--hidden 0.75]
    less than a minute

Each seed draws simulated devices. The window is 80 to 90 % of the memory. A device counts for the
window if some whole number of examples fits in it without jitter.

in window        share of answers in the window, as measured; an answer that the strategy never ran
                 is measured once
without jitter   share of answers in the window by their true memory
probes           mean number of batches that were run
failures         mean number of probes that ran out of memory
memory           mean share of the memory that an answer fills

Measurements are off by up to 2 %, in the second row by up to 10 % as on a busy machine. `--hidden`
raises the peak of the optimizer's phase to at most that share of the memory, which hides smaller
activations.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from memory_devices import Device, OutOfMemory, Probe, draw_device
from published_searches import PUBLISHED
from quick import parse_arguments

from kbatch.memory.search import MaxBatchSearch

WINDOW = (0.80, 0.90)
JITTER, MUCH_JITTER = 0.02, 0.10


class Outcome(NamedTuple):
    """The result of a strategy on one device.

    Attributes:
        reachable: Whether the window can be reached there.
        measured_share: Share of the memory that its answer filled, 0 if it found none.
        true_share: The same without jitter.
        probes: How many batches it ran.
        failures: How often memory ran out.
    """

    reachable: bool
    measured_share: float
    true_share: float
    probes: int
    failures: int


def kbatch_search(probe: Probe) -> int | None:
    search = MaxBatchSearch(limit_bytes=probe.device.limit_bytes, memory_window=WINDOW)
    while (size := search.ask()) is not None:
        try:
            search.tell(size, probe.run(size))
        except OutOfMemory:
            search.tell(size, None)
    return search.answer[0] if search.answer else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hidden", type=float, default=0.0, metavar="SHARE")
    options = parse_arguments(parser, devices=300, seeds=[0])
    devices = []
    for seed in options.seeds:
        rng = np.random.default_rng(seed)
        devices += [draw_device(rng, hidden_share=options.hidden) for _ in range(options.devices)]
    reachable = [device.reachable(WINDOW) for device in devices]
    print(f"{len(devices)} devices, the window reachable on {sum(reachable)}")
    titles = f"{'in window':>12}{'without jitter':>16}{'probes':>10}{'failures':>10}{'memory':>10}"
    print(f"{'strategy':<26}{titles}")
    rows: list[tuple[str, Callable[[Probe], int | None], float]] = [
        ("kbatch", kbatch_search, JITTER),
        ("kbatch, 10 % of jitter", kbatch_search, MUCH_JITTER),
        *((name, strategy, JITTER) for name, strategy in PUBLISHED.items()),
    ]
    for name, strategy, jitter in rows:
        print(f"{name:<26}{figures(outcomes(strategy, devices, reachable, jitter))}", flush=True)


def outcomes(
    strategy: Callable[[Probe], int | None],
    devices: list[Device],
    reachable: list[bool],
    jitter: float,
) -> list[Outcome]:
    found = []
    for i, (device, possible) in enumerate(zip(devices, reachable, strict=True)):
        probe = Probe(device, i, jitter=jitter)
        size = strategy(probe)
        probes, failures = probe.probes, probe.failures
        true = 0.0 if size is None else float(device.memory_bytes(size)) / device.limit_bytes
        measured = 0.0 if size is None else probe.last_bytes(size) / device.limit_bytes
        found.append(Outcome(possible, measured, true, probes, failures))
    return found


def figures(found: list[Outcome]) -> str:
    low, high = WINDOW
    possible = [outcome for outcome in found if outcome.reachable]
    measured = statistics.mean(low <= outcome.measured_share <= high for outcome in possible)
    true = statistics.mean(low <= outcome.true_share <= high for outcome in possible)
    probes = statistics.mean(outcome.probes for outcome in found)
    failures = statistics.mean(outcome.failures for outcome in found)
    memory = statistics.mean(outcome.true_share for outcome in possible)
    return f"{measured:12.1%}{true:16.1%}{probes:10.2f}{failures:10.3f}{memory:10.1%}"


if __name__ == "__main__":
    main()
