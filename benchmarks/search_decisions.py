"""How good are the decisions of a search by goodput, apart from any clock?

python benchmarks/search_decisions.py [--seeds 20]

Synthetic tasks with six batch sizes: seconds of an update a + b B, updates S_min (1 + B_crit / B)
with a log-normal scatter of 8 %, a part of them with a bend that makes large sizes need more than
the model says, or never come to the target. The noise scale that the pilot tells is off by a
factor of 1/3, 1 or 3. `regret` is the cost of the chosen size over that of the best, both as the
task drew them; `cost` what the search's runs took over the grid's, where a run ends at 1.3 times
the best so far, and a size that never comes to the target costs the grid the dearest other run.
"""

import argparse
import itertools
import math

import numpy as np

from kbatch.analysis.next_size import FinishedRun, SizeCosts, next_size, pilot_size

SIZES = (16, 32, 64, 128, 256, 512)
OVERHEADS = (10, 50, 200)  # a / b, in examples
CRITICAL = (20, 100, 500)
BENDS = (0.0, 0.15, math.inf)  # of log S, an octave squared beyond B_crit
TOLD = (1 / 3, 1.0, 3.0)
CAP = 1.3


class Task:
    """A task whose runs are drawn once."""

    def __init__(self, overhead, critical, bend, told, seed):
        rng = np.random.default_rng((overhead, critical, int(10 * told), seed))
        self.told = told * critical
        self.costs = SizeCosts({size: overhead + size for size in SIZES})
        self.updates = {}
        for size in SIZES:
            octaves = max(0.0, math.log2(size / critical) - 1)
            beyond = 0.0 if octaves == 0 else bend * octaves**2
            curve = 200 * (1 + critical / size) * rng.lognormal(0, 0.08)
            self.updates[size] = curve * math.exp(beyond) if beyond < 50 else math.inf
        self.seconds = {s: n * self.costs.update_costs[s] for s, n in self.updates.items()}
        reached = [cost for cost in self.seconds.values() if cost < math.inf]
        self.best = min(reached)
        self.grid = sum(min(cost, max(reached)) for cost in self.seconds.values())

    def run(self, size, cap=math.inf):
        """What a run shows, and what it costs."""
        cost = self.seconds[size]
        cap = min(cap, max(c for c in self.seconds.values() if c < math.inf))
        if cost > cap:
            return FinishedRun(size, None, cap / self.costs.update_costs[size], self.told), cap
        return FinishedRun(size, cost, self.updates[size], self.told), cost


def by_goodput(task, most):
    tried, spent = [], 0.0
    while len(tried) < most:
        size = next_size(task.costs, tried).batch_size
        if size is None:
            break
        best = min((r.cost for r in tried if r.cost is not None), default=math.inf)
        run, cost = task.run(size, CAP * best)
        tried.append(run)
        spent += cost
    return tried, spent


def with_neighbours(task):
    """The pilot, then neighbours as long as they are better."""
    tried, spent = [], 0.0
    left = {pilot_size(task.costs)}
    while left:
        size = left.pop()
        best = min((r.cost for r in tried if r.cost is not None), default=math.inf)
        run, cost = task.run(size, CAP * best)
        tried.append(run)
        spent += cost
        if run.cost is not None and run.cost < best:
            near = SIZES.index(size)
            sizes = SIZES[max(0, near - 1) : near + 2]
            left |= set(sizes) - {r.batch_size for r in tried}
    return tried, spent


def by_formula(task):
    """The pilot, then the size that its noise scale names, untried."""
    size = pilot_size(task.costs)
    run, cost = task.run(size)
    named = min(SIZES, key=lambda s: (1 + task.told / s) * task.costs.update_costs[s])
    return [FinishedRun(named, task.seconds[named], None)] if run.cost else [run], cost


RULES = {
    "goodput": lambda task: by_goodput(task, len(SIZES)),
    "pilot and formula": by_formula,
    "pilot and neighbours": with_neighbours,
    "goodput, two runs at most": lambda task: by_goodput(task, 2),
}


def judged(rule, tasks):
    regrets, shares, counts = [], [], []
    for task in tasks:
        tried, spent = rule(task)
        costs = [run.cost for run in tried if run.cost is not None]
        regrets.append(min(costs, default=math.inf) / task.best)
        shares.append(spent / task.grid)
        counts.append(len(tried))
    return np.array(regrets), np.array(shares), np.array(counts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    for bend in BENDS:
        grid = itertools.product(OVERHEADS, CRITICAL, TOLD, range(options.seeds))
        tasks = [Task(a, c, bend, told, seed) for a, c, told, seed in grid]
        print(f"bend {bend}: {len(tasks)} tasks")
        titles = ("median", "90 %", "99 %", "<= 1.15", "cost", "runs")
        print(f"{'':<28}" + "".join(f"{title:>9}" for title in titles))
        for name, rule in RULES.items():
            regrets, shares, counts = judged(rule, tasks)
            finite = np.minimum(regrets, 99.0)
            figures = [*np.quantile(finite, [0.5, 0.9, 0.99]), np.mean(regrets <= 1.15)]
            figures += [shares.mean(), counts.mean()]
            print(f"{name:<28}" + "".join(f"{figure:9.2f}" for figure in figures))
        for name, size in (("largest", lambda t: 512), ("smallest", lambda t: 16)):
            regrets = np.array([min(t.seconds[size(t)] / t.best, 99.0) for t in tasks])
            figures = [*np.quantile(regrets, [0.5, 0.9, 0.99]), np.mean(regrets <= 1.15)]
            print(f"{name:<28}" + "".join(f"{figure:9.2f}" for figure in figures))


if __name__ == "__main__":
    main()
