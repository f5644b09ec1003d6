"""How good is the plan of `recommend`, and what it names, apart from any machine?

python benchmarks/recommend_decisions.py [--share 0.9] [--draws 4] [--budget 60]    two minutes

Replays the pilot, the choice of sizes to train, and the decision on a clock of their own. The
updates are real: the six tasks of `recommend_against_training.py` (their rows cut to a multiple of
512) were trained at eight or nine sizes with eight seeds each, learning rate and what follows it by
the rule. recommend_decisions.json keeps how many updates each run needed to 48 losses.
The times of an update, of a build and of a look
are set, as a quiet machine with two cores has them; in each draw every size's time is off by
`--noise`. A choice is judged by its time to the pilot's target over the best size's, updates by the
median of eight seeds; and so to the loss after 98 % of the pilot's way, which is what a longer
training is after.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kbatch.recommendation import pilot_record
from kbatch.recommendation.budget import Budget
from kbatch.recommendation.choice import CandidateSearch, decide, trained_runs
from kbatch.recommendation.limits import INPUT, NOISE, SATURATION
from kbatch.recommendation.pilot_record import PilotRecord, PilotStretch, SizeCheck, useful_count
from kbatch.throughput.record import TimedRounds

SEEDS, PILOT, STRETCH, LONG_SHARE = 8, 32, 10, 0.98
START_S, INPUT_S, MOMENTS = 2.0, 6.0, 1.3


class Machine(NamedTuple):
    """Seconds of an update, an example, Keras's own work, an epoch's ends, a build and a look."""

    update_s: float
    example_s: float
    wait_s: float
    epoch_s: float
    examples: int
    build_s: float
    look_s: float

    def run_s(self, size: int) -> float:
        """Return the seconds of an update in an endless epoch."""
        return self.update_s + self.example_s * size + self.wait_s

    def fit_s(self, size: int) -> float:
        """Return the seconds of an update in `fit`."""
        return self.run_s(size) + self.epoch_s / math.ceil(self.examples / size)


MACHINES = {
    "mlp": Machine(1.0e-3, 0.9e-6, 0.8e-3, 0.045, 1536, 2.0, 0.004),
    "columns": Machine(1.0e-3, 1.9e-6, 0.7e-3, 0.040, 19456, 1.6, 0.003),
    "text": Machine(16e-3, 75e-6, 2.0e-3, 0.045, 5632, 5.0, 0.012),
    "cnn": Machine(2.0e-3, 22e-6, 1.0e-3, 0.050, 1536, 2.6, 0.010),
}


class Curves:
    """The runs of a task: updates to each loss of a falling row, by size and seed."""

    def __init__(self, counts: dict[str, Any], machine: Machine):
        self.machine = machine
        self.noise: list[float | None] = counts["noise"]
        self.losses = np.log(counts["losses"])
        self.updates = {int(size): runs for size, runs in counts["updates"].items()}
        self.sizes = sorted(self.updates)

    def needed(self, size: int, seed: int, loss: float) -> float:
        """Return the updates to a loss, infinite where the run never had it."""
        run = self.updates[size][seed]
        if math.log(loss) < self.losses[len(run) - 1]:
            return math.inf
        return math.exp(np.interp(-math.log(loss), -self.losses[: len(run)], np.log(run)))

    def lowest(self, size: int, seed: int, made: int) -> float:
        """Return the lowest loss within some updates."""
        run = self.updates[size][seed]
        return math.exp(np.interp(math.log(made), np.log(run), self.losses[: len(run)]))

    def seconds(self, size: int, loss: float) -> float:
        """Return the true time to a loss."""
        needed = np.median([self.needed(size, seed, loss) for seed in range(SEEDS)])
        return float(needed) * self.machine.fit_s(size)


def run_pilot(curves: Curves, seed: int, clock: Budget, now: list[float], share: float):
    """Train at the base size as `run_pilot` does, until the later half brought little."""
    machine, began_s, part_s = curves.machine, now[0], clock.part_s(NOISE)
    now[0] += machine.build_s
    ends_s, stretches = max(began_s + part_s, now[0] + part_s / 2), []
    ended_by, made = "budget", 0
    while now[0] <= ends_s and made < max(curves.updates[PILOT][seed]):
        made += STRETCH
        now[0] += STRETCH * MOMENTS * machine.run_s(PILOT) + machine.look_s
        loss = curves.lowest(PILOT, seed, made)
        noise = curves.noise[seed]
        stretches.append(PilotStretch(STRETCH, loss, loss, noise, 1.0 if noise else None))
        if len(stretches) >= max(24, 2 * useful_count(stretches, share)):
            ended_by = "progress"
            break
    took_s = now[0] - began_s
    times = (took_s - machine.build_s, machine.build_s, machine.look_s)
    return PilotRecord(
        PILOT, PILOT // 2, 1e-3, tuple(stretches), took_s, ended_by, seed, *times, share
    )


def named(curves: Curves, seed: int, draw: int, options: argparse.Namespace):
    """Return the size that is named, the pilot, and the seconds of the call."""
    rng, now, machine = np.random.default_rng((seed, draw)), [0.0], curves.machine
    clock = Budget(options.budget, lambda: now[0])
    clock.reserved_s = 0.2 * options.budget  # For memory, which comes last.
    now[0] += START_S
    pilot = run_pilot(curves, seed, clock, now, options.share)
    now[0] += clock.part_s(SATURATION)
    now[0] += min(clock.part_s(INPUT), INPUT_S)
    timings = []
    for size in curves.sizes:
        middle_s = machine.fit_s(size) * rng.lognormal(0, options.noise)
        times_s = middle_s * rng.lognormal(0, 0.02, 3)
        timings.append(TimedRounds(size, size, (0, 1, 2), tuple(times_s.tolist())))
    search = CandidateSearch(timings, in_fit=None, pilot=pilot, base_batch_size=PILOT, rule=None)
    while (plan := search.ask(left_s=clock.left_s, most_s=clock.most_s)) is not None:
        size = plan.batch_size
        before = sum(check.batch_size == size for check in search.checks)
        other = (seed + 1 + draw + int(math.log2(size)) + before) % SEEDS
        looks = curves.needed(size, other, plan.target) / plan.stretch
        update_s = machine.run_s(size) + machine.look_s / plan.stretch
        ends = {
            "target": math.ceil(looks) * plan.stretch if looks < math.inf else math.inf,
            "lost": plan.most_updates,
            "budget": max(1, int((plan.budget_s - machine.build_s) / update_s)),
        }
        end = min(ends, key=lambda name: ends[name])
        took_s = ends[end] * update_s
        now[0] += machine.build_s + took_s
        check = SizeCheck(size, size, None, int(ends[end]), 0.5, took_s, end)
        search.tell(check, left_s=clock.left_s)
    found = trained_runs(timings, in_fit=None, pilot=pilot, checks=search.checks)
    answer = decide(found, base_batch_size=PILOT, rule=None, missing=pilot.missing)
    return answer.batch_size, pilot, now[0]


def regret(curves: Curves, size: int, loss: float) -> float:
    """Return the time of a size to a loss over the best size's."""
    best_s = min(curves.seconds(other, loss) for other in curves.sizes)
    return curves.seconds(size, loss) / best_s if best_s < math.inf else math.nan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=pilot_record.TARGET_SHARE)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--noise", type=float, default=0.04, help="of the times of an update")
    options = parser.parse_args()
    stored = json.loads(Path(__file__).with_suffix(".json").read_text())
    columns = 2 * f"{'median':>10}{'97 %':>7}{'worst':>7}"
    print(f"{'':<14}{'to the target':>24}{'to 98 % of the way':>24}")
    print(f"{'task':<14}{columns}{'None':>6}{'named':>12}")
    every: list[tuple[float, float]] = []
    for name, counts in stored.items():
        curves = Curves(counts, MACHINES[name.split("-")[0]])
        regrets, sizes = [], []
        for seed, draw in itertools.product(range(SEEDS), range(options.draws)):
            size, pilot, _ = named(curves, seed, draw, options)
            sizes.append(size)
            if size is not None:
                losses = [stretch.held_out_loss for stretch in pilot.stretches]
                low = min(losses) + (1 - LONG_SHARE) * (losses[0] - min(losses))
                regrets.append([regret(curves, size, loss) for loss in (pilot.target, low)])
        every += regrets
        middle = np.median([size for size in sizes if size])
        print(f"{name:<14}{row(regrets)}{sizes.count(None):>6}{middle:>12.0f}")
    print(f"{'all':<14}{row(every)}")


def row(regrets: list) -> str:
    """Write the median, a quantile and the worst of each column."""
    columns = [values[~np.isnan(values)] for values in np.array(regrets).T]
    cells = [(np.median(c), np.quantile(c, 0.97, method="lower"), c.max()) for c in columns]
    return "".join(f"{a:>10.2f}{b:>7.2f}{c:>7.2f}" for a, b, c in cells)


if __name__ == "__main__":
    main()
