"""Searches by goodput on tasks whose costs are known."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.next_size import (
    FinishedRun,
    NextSize,
    SizeCosts,
    forecast_updates,
    next_size,
    pilot_size,
)

SIZES = (16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Task:
    """A training whose updates follow the model, give or take `noise`."""

    overhead: float = 1e-3
    per_example: float = 5e-6
    critical: float = 100.0
    start: float = 0.0
    noise: float = 0.0
    told: float = 1.0
    never: tuple[int, ...] = ()
    too_large: int = 10**9
    seed: int = 0

    @property
    def costs(self):
        times = {size: self.overhead + self.per_example * size for size in SIZES}
        return SizeCosts(times, self.start)

    def run(self, size):
        rng = np.random.default_rng((self.seed, size))
        updates = 200 * (1 + self.critical / size) * rng.lognormal(0, self.noise)
        if size >= self.too_large:
            return FinishedRun(size, None, None)
        if size in self.never:
            return FinishedRun(size, None, 2 * updates, self.told * self.critical)
        cost = self.start + updates * self.costs.update_costs[size]
        return FinishedRun(size, cost, updates, self.told * self.critical)


def search(task, **arguments):
    tried, steps = [], []
    while True:
        steps.append(next_size(task.costs, tried, **arguments))
        if steps[-1].batch_size is None:
            return tried, steps
        tried.append(task.run(steps[-1].batch_size))


def regret(task, tried):
    """Cost of the best run over that of the best of all sizes."""
    costs = [run.cost for run in map(task.run, SIZES) if run.cost is not None]
    return min(run.cost for run in tried if run.cost is not None) / min(costs)


def share(task, tried):
    """Cost of the search over that of the grid."""
    return sum(run.cost for run in tried) / sum(task.run(size).cost for size in SIZES)


OVERHEADS, CRITICAL = (1e-3, 2e-4, 5e-5), (10.0, 40.0, 150.0, 600.0)
TASKS = [
    Task(overhead=a, critical=b, told=c)
    for a, b, c in itertools.product(OVERHEADS, CRITICAL, (0.5, 1.0, 2.0))
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_size_found_is_within_five_percent_of_the_best(task):
    tried, steps = search(task)
    assert regret(task, tried) <= 1.06
    assert steps[-1].best == min(tried, key=lambda run: run.cost).batch_size


def test_with_noise_it_holds_in_the_median_at_a_part_of_the_grids_cost():
    tasks = [
        Task(overhead=a, critical=b, noise=0.08, told=1.5, seed=seed)
        for a, b, seed in itertools.product(OVERHEADS, CRITICAL, range(5))
    ]
    found = [
        (regret(task, tried), share(task, tried)) for task in tasks for tried, _ in [search(task)]
    ]
    regrets, shares = np.array(found).T
    assert np.median(regrets) <= 1.05
    assert np.quantile(regrets, 0.9) <= 1.15
    assert np.mean(shares) <= 0.4


@pytest.mark.parametrize("task", TASKS[::5], ids=str)
def test_no_size_is_tried_twice_and_the_search_ends(task):
    tried, steps = search(task)
    sizes = [run.batch_size for run in tried]
    assert len(set(sizes)) == len(sizes) <= len(SIZES)
    assert steps[-1].kind in ("separated", "tie", "all tried")
    assert [step.kind for step in steps[:-1]] == ["pilot", *["gain"] * (len(tried) - 1)]


@pytest.mark.parametrize("unit", [1e-6, 1e3])
def test_the_unit_of_the_cost_does_not_matter(unit):
    task = Task(noise=0.1, start=0.1)
    other = Task(unit * 1e-3, unit * 5e-6, start=unit * 0.1, noise=0.1)
    sizes = [[run.batch_size for run in search(t)[0]] for t in (task, other)]
    assert sizes[0] == sizes[1]


def test_what_every_run_costs_makes_sizes_alike():
    """Where starting costs most, nothing is to be gained by another size."""
    tried, steps = search(Task(start=1e3))
    assert len(tried) == 1
    assert steps[-1].kind == "tie"


def test_the_pilot_suits_most_noise_scales():
    assert pilot_size(SizeCosts(dict.fromkeys(SIZES, 1.0))) == 512
    assert pilot_size(SizeCosts({size: float(size) for size in SIZES})) == 16
    assert 16 < pilot_size(Task(overhead=3e-4).costs) < 512


def test_the_pilot_may_be_given():
    assert search(Task(), pilot=32)[0][0].batch_size == 32
    assert next_size(Task().costs, (), pilot=32) == NextSize(32, "given")


def test_a_size_that_misses_the_target_is_a_result():
    task = Task(never=(256, 512), critical=600.0)
    tried, steps = search(task)
    assert steps[-1].best in (64, 128)
    assert regret(task, tried) <= 1.05


def test_where_none_comes_to_the_target_all_are_tried():
    tried, steps = search(Task(never=SIZES))
    assert {run.batch_size for run in tried} == set(SIZES)
    assert steps[-1] == (None, "all tried", None, None, None)
    assert {step.kind for step in steps[1:-1]} == {"no target yet"}


def test_nothing_above_a_size_that_cannot_be_trained_is_tried():
    tried, _ = search(Task(too_large=128), pilot=256)
    for number, run in enumerate(tried):
        assert all(run.batch_size < r.batch_size for r in tried[:number] if r.updates is None)
    assert {run.batch_size for run in tried} & {16, 32, 64}


def test_where_no_size_can_be_trained_it_ends():
    tried, steps = search(Task(too_large=1))
    assert steps[-1].kind == "all tried"
    assert [run.batch_size for run in tried] == sorted([r.batch_size for r in tried], reverse=True)


@pytest.mark.parametrize("told", [{"noise_at_least": 300.0}, {}], ids=["bound", "nothing"])
def test_an_unresolved_noise_scale_leaves_more_to_be_tried(told):
    pilot = dataclasses.replace(Task().run(128), noise_scale=None, **told)
    known, unknown = (next_size(Task().costs, [run]) for run in (Task().run(128), pilot))
    assert unknown.probability is not None
    assert known.probability is not None
    assert unknown.probability > known.probability


def test_one_size_needs_no_choice():
    costs = SizeCosts({64: 1.0})
    assert next_size(costs, []).batch_size == 64
    assert next_size(costs, [FinishedRun(64, 10.0, 10)]) == (None, "all tried", 64, None, None)


def test_a_larger_bound_of_the_noise_scale_speaks_for_larger_sizes():
    pilot = dataclasses.replace(Task().run(64), noise_scale=None)
    low, high = (dataclasses.replace(pilot, noise_at_least=bound) for bound in (5.0, 3000.0))
    sizes = [next_size(Task().costs, [run]).batch_size for run in (low, high)]
    assert sizes == [32, 512]


def test_a_missed_target_speaks_against_sizes_beyond():
    costs = Task(critical=300.0).costs
    first, met = Task(critical=300.0).run(64), FinishedRun(128, 1.0, 500.0)
    missed = dataclasses.replace(met, cost=None)
    slow = dataclasses.replace(first, cost=0.9)
    one, other = (next_size(costs, [slow, run]) for run in (met, missed))
    assert (other.probability or 0.0) < (one.probability or 0.0)


def sampled(size, runs, draws=400_000):
    """The updates of a size by importance sampling: the model written down, nothing solved."""
    rng = np.random.default_rng(0)
    guess = runs[0].noise_scale * np.exp(0.7 * rng.uniform(-3, 3, draws))
    octaves = np.log2([*(run.batch_size for run in runs), size])
    order = np.argsort(octaves)  # All above the pilot, the first run.
    steps = np.sqrt(np.diff(octaves[order])) * 0.12 * rng.normal(size=(draws, len(runs)))
    walk = np.zeros((draws, len(octaves)))
    walk[:, order[1:]] = np.cumsum(steps, axis=1)
    # The pilot's updates fix the level, to the 8 % of a run.
    level = np.log(runs[0].updates) + 0.08 * rng.normal(size=draws)
    sizes = np.array([*(run.batch_size for run in runs), size])
    shape = np.log1p(guess[:, None] / sizes) + walk
    logs = level[:, None] + shape - shape[:, :1]
    weights = np.exp(-0.5 * (np.log(guess / runs[0].noise_scale) / 0.7) ** 2)
    for column, run in enumerate(runs[1:], start=1):
        z = (logs[:, column] - np.log(run.updates)) / 0.08
        if run.cost is None:
            weights *= np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(z)
        else:
            weights *= np.exp(-0.5 * z**2)
    return float(np.exp(weights @ logs[:, -1] / weights.sum()))


@pytest.mark.parametrize("cut", [100.0, 300.0, 450.0, 700.0])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_run_that_was_cut_short_says_that_it_needed_more(cut, size):
    costs = Task().costs
    pilot = FinishedRun(32, 1.0, 900.0, 150.0)
    runs = [pilot, FinishedRun(128, None, cut)]
    found = forecast_updates(costs, runs).updates[size]
    assert found == pytest.approx(sampled(size, runs, 100_000), rel=0.04)


def test_a_run_cut_short_far_before_the_forecast_changes_nothing():
    costs, met = Task().costs, Task().run(64)
    alone, early = (
        forecast_updates(costs, [met, *more]) for more in ([], [FinishedRun(256, None, 1.0)])
    )
    for size in SIZES:
        assert early.updates[size] == pytest.approx(alone.updates[size], rel=1e-6)
    late = [
        forecast_updates(costs, [met, FinishedRun(256, None, n)]).updates[256] for n in (300, 1000)
    ]
    assert 300 < late[0] < late[1]
    assert late[1] > 900


def test_a_run_that_diverged_changes_no_forecast():
    task = Task()
    alone, broken = (
        forecast_updates(task.costs, [task.run(64), *more])
        for more in ([], [FinishedRun(512, None, None)])
    )
    assert broken == alone


def test_a_forecast_goes_through_what_runs_needed():
    task = Task(critical=100.0, told=0.2)
    found = forecast_updates(task.costs, [task.run(size) for size in (16, 64, 256)])
    assert list(found.updates) == list(SIZES)
    for size in SIZES:
        true = 200 * (1 + 100 / size)
        assert found.updates[size] == pytest.approx(true, rel=0.15)
        assert found.intervals[size].low < true < found.intervals[size].high
    # The noise scale said 20: the runs correct it.
    assert 50 < found.critical < 200
    assert found.critical_interval.low < found.critical < found.critical_interval.high


def test_a_forecast_is_wider_where_nothing_was_trained():
    task = Task()

    def width(runs, size):
        interval = forecast_updates(task.costs, [task.run(b) for b in runs]).intervals[size]
        return interval.high / interval.low

    assert width((32,), 32) < width((32,), 64) < width((32,), 512)
    assert width((32, 512), 512) < width((32,), 512)


@pytest.mark.parametrize("critical", [20.0, 100.0, 1000.0])
def test_the_best_size_ties_with_itself(critical):
    task = Task(critical=critical)
    costs = {size: task.run(size).cost for size in SIZES}
    best = min(costs, key=costs.get)
    found = forecast_updates(task.costs, [task.run(size) for size in SIZES]).against(best)
    assert found[best].speedup == 1
    assert found[best].may_tie
    assert found[best].gain < 0.1
    assert not all(one.may_tie for one in found.values())
    for size, one in found.items():
        assert one.speedup == pytest.approx(costs[best] / costs[size], rel=0.1)
        assert one.most_speedup > one.speedup


def test_without_a_run_at_the_target_there_is_no_forecast():
    costs = Task().costs
    assert forecast_updates(costs, []) is None
    assert (
        forecast_updates(costs, [FinishedRun(32, None, 100.0), FinishedRun(64, None, None)]) is None
    )
