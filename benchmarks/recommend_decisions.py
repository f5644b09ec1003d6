"""How good is the size that `recommend` starts with, and do the sizes to search hold the best one?

python benchmarks/recommend_decisions.py [--share 0.9]    seconds

Nothing is trained: recommend_decisions.json has, of six tasks, the noise scale that a pilot at 32
examples measured with eight seeds, and how many updates trainings of eight or nine sizes needed to
48 losses, eight seeds each, the learning rate by the rule. The times of an update are set, as a
quiet machine with two cores has them. A size is judged by its time to the loss after `--share` of
the way that the trainings at 32 went, updates by the median of the seeds, over the best size's.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kbatch.analysis.intervals import Estimate
from kbatch.recommendation.result import sizes_to_search, starting_size

BASE = 32


class Machine(NamedTuple):
    """What an update takes, in seconds, and what each of its examples adds."""

    update_s: float
    example_s: float

    def time_s(self, size: int) -> float:
        return self.update_s + self.example_s * size


MACHINES = {
    "mlp": Machine(1.8e-3, 0.9e-6),
    "columns": Machine(1.7e-3, 1.9e-6),
    "text": Machine(18e-3, 75e-6),
    "cnn": Machine(3.0e-3, 22e-6),
}


def needed(run: list[int], losses: np.ndarray, loss: float) -> float:
    """Return the updates of a run to a loss, infinite where it never had it."""
    if math.log(loss) < losses[len(run) - 1]:
        return math.inf
    return math.exp(np.interp(-math.log(loss), -losses[: len(run)], np.log(run)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.9)
    options = parser.parse_args()
    stored = json.loads(Path(__file__).with_suffix(".json").read_text())
    print(f"{'task':<14}{'best':>6}{'starts':>12}{'over the best: median, worst':>30}{'held':>7}")
    print(f"{'':<14}{'':>6}{'':>12}{'':>30}{'sizes':>8}")
    for name, counts in stored.items():
        machine, losses = MACHINES[name.split("-")[0]], np.log(counts["losses"])
        updates = {int(size): runs for size, runs in counts["updates"].items()}
        times_s = {size: machine.time_s(size) for size in sorted(updates)}
        least = math.exp(np.median([losses[len(run) - 1] for run in updates[BASE]]))
        loss = least + (1 - options.share) * (math.exp(losses[0]) - least)
        seconds = {
            size: float(np.median([needed(run, losses, loss) for run in runs]))
            * machine.time_s(size)
            for size, runs in updates.items()
        }
        best = min(seconds, key=lambda size: seconds[size])
        starts, held, counted = [], 0, []
        for value in counts["noise"]:
            noise = Estimate(None)
            if value is not None:
                noise = Estimate(value, value, value)
            starts.append(BASE if value is None else starting_size(times_s, noise_scale=value))
            found = sizes_to_search(times_s, noise, base_batch_size=BASE)
            held += best in found
            counted.append(len(found))
        over = [seconds[size] / seconds[best] for size in starts]
        ends = f"{min(starts)} to {max(starts)}"
        ratios = f"{np.median(over):.2f}, {max(over):.2f}"
        print(
            f"{name:<14}{best:>6}{ends:>12}{ratios:>30}{held:>4} of {len(starts)}"
            f" {np.mean(counted):.1f} of {len(times_s)}"
        )


if __name__ == "__main__":
    main()
