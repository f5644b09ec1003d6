"""Races on tables of sizes and rates whose best one is known."""

import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.judge import expected_seconds
from kbatch.analysis.race import NextRun, RaceTask, expected_trainings, judge_race, least_values
from kbatch.analysis.race import next_run as next_step
from kbatch.analysis.run_table import Run

SIZES, BASE, EPOCHS, BLOCKS = (16, 32, 64, 128, 256, 512), 32, 10, 50


def level(size, octave):
    """Return a quality that is best up to size 128, an octave above the rule's rate."""
    return 0.95 - 0.03 * max(0, math.log2(size / 128)) - 0.01 * (octave - 1) ** 2


class Search:
    """Trains what a race asks for, with the noise of a seed and of a run."""

    def __init__(self, level=level, *, sizes=SIZES, base=BASE, epochs=EPOCHS, noise=0.002, **task):
        self.level, self.noise, self.runs = level, noise, []
        self.seconds = {size: 10 + 1000 / size for size in sizes}
        options = {"larger_is_better": True, "tolerance": 0.01, "confidence": 0.95}
        options |= {"max_trainings": 2.0 * len(sizes), "seconds": dict(self.seconds)}
        self.task = RaceTask(sizes, base, epochs, **(options | task))
        self.slower = 1.0

    def trained(self, run):
        size, factor, number, epochs = run
        end, whole = self.level(size, math.log2(factor)), self.task.epochs
        seconds = self.slower * self.seconds[size] * epochs / whole
        if end is None:
            return Run(size, factor, number, None, seconds, "diverged")
        rng = np.random.default_rng((size, int(1024 * factor), number))
        end += self.noise * (rng.standard_normal() + np.random.default_rng(number).normal())
        sign = 1 if self.task.larger_is_better else -1
        curve = [sign * (end - 0.2 / 2**epoch) for epoch in range(1, epochs + 1)]
        outcomes = curve[-1] + 0.02 * np.random.default_rng(0).normal(size=BLOCKS)
        short = None if epochs == whole else epochs
        facts = {"outcomes": outcomes, "examples": 1000, "epochs": short, "curve": tuple(curve)}
        return Run(size, factor, number, curve[-1], seconds, **facts)

    def step(self, **state):
        return next_step(self.task, self.runs, **state)

    def end(self, run):
        """Add a run, in place of the short one that it continues."""
        self.runs = [known for known in self.runs if (*known.pair, known.seed) != run[:3]]
        self.runs.append(self.trained(run))

    def to_the_end(self, most=60):
        for _ in range(most):
            step = self.step()
            if isinstance(step, str):
                return step
            self.end(step)
        raise AssertionError("It does not end.")

    def judged(self):
        return judge_race(self.task, self.runs)

    def trainings(self):
        return sum((run.epochs or self.task.epochs) / self.task.epochs for run in self.runs)


def test_next_run_looks_for_the_rate_by_short_runs_at_the_base_size():
    search = Search()
    assert search.step() == NextRun(BASE, 1.0, 0, 2)
    search.to_the_end()
    assert {run.batch_size for run in search.runs if run.epochs} == {BASE}
    assert {0.25, 1.0, 4.0} <= {run.factor for run in search.runs if run.batch_size == BASE}
    # The other sizes have the rate of the base size, an octave above the rule's.
    assert {run.factor for run in search.runs if run.batch_size != BASE} == {2.0}


def test_next_run_corrects_short_runs_that_flatter_large_rates():
    class Flattered(Search):
        def trained(self, run):
            whole = super().trained(run)
            gain = 0.04 * math.log2(run.factor)  # That is lost after the short run.
            curve = [v + gain if n < 2 else v for n, v in enumerate(whole.curve)]
            value = whole.value + (gain if run.epochs == 2 else 0.0)
            return whole._replace(curve=tuple(curve), value=value)

    search = Flattered(noise=0.0005, max_trainings=20.0)
    search.to_the_end()
    assert max(run.factor for run in search.runs if run.epochs is None) > 2.0
    assert search.judged().named[1] == 2.0


def test_judge_race_averages_the_rate_over_seeds_at_the_base_size():
    search = Search()
    lucky = {(2.0, 0): 0.97, (1.0, 0): 0.95, (2.0, 1): 0.91, (2.0, 2): 0.91}
    for (factor, number), value in lucky.items():
        run = search.trained(NextRun(BASE, factor, number, EPOCHS))
        search.runs.append(run._replace(value=value, curve=(value,) * EPOCHS))
    assert search.judged().named == (BASE, 1.0)


@pytest.mark.parametrize("off", [-3, 0, 3])
def test_judge_race_names_the_fastest_size_within_the_tolerance(off):
    search = Search(lambda size, octave: level(size, octave - off))
    assert search.to_the_end() == "settled"
    found = search.judged()
    assert found.named == (128, 2.0 ** (off + 1))
    assert found.leader in found.certified
    assert {512} <= {size for size, _ in found.worse} <= {256, 512}
    assert search.trainings() <= 10
    assert not found.gaps  # A curve's gaps would contradict the values in the table.


def test_race_of_a_loss_equals_race_of_its_negative():
    accuracy, loss = Search(), Search(larger_is_better=False)
    assert accuracy.to_the_end() == loss.to_the_end()
    assert [run.pair for run in accuracy.runs] == [run.pair for run in loss.runs]
    assert accuracy.judged().named == loss.judged().named


@pytest.mark.parametrize("sizes", [(7, 100), (8, 24, 96), tuple(range(10, 90, 10))])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("epochs", [1, 3])
def test_race_of_any_sizes_base_and_epochs_ends_within_the_budget(sizes, place, epochs):
    search = Search(sizes=sizes, base=sizes[place], epochs=epochs)
    assert search.to_the_end() in ("settled", "trainings")
    assert search.trainings() <= search.task.max_trainings + 1e-9
    assert search.judged().named[0] in sizes
    assert epochs > 1 or all(run.epochs is None for run in search.runs)


def test_next_run_trains_completely_only_if_short_runs_do_not_decide():
    search = Search(search_rate=False)
    search.to_the_end()
    assert {(run.factor, run.epochs) for run in search.runs} == {(1.0, None)}
    clear = Search(lambda size, octave: level(size, octave + 1), noise=0.0)
    clear.to_the_end()  # The larger neighbour of the best rate needs no complete run.
    assert {run.factor for run in clear.runs if run.epochs is None} == {0.5, 1.0}
    search = Search(short_runs=False)
    search.to_the_end()
    assert all(run.epochs is None for run in search.runs)
    assert search.judged().named[1] == 2.0


def test_next_run_lowers_the_rate_of_a_size_that_diverged():
    search = Search(lambda size, octave: None if octave > 0 and size > 64 else level(size, octave))
    search.to_the_end()
    for run in search.runs:
        later = search.runs[search.runs.index(run) + 1 :]
        if run.ended == "diverged":
            assert all(r.factor < run.factor for r in later if r.batch_size == run.batch_size)
    assert any(run.pair == (512, 1.0) for run in search.runs)
    assert search.judged().named == (64, 2.0)
    hot = Search(lambda size, octave: None if octave > -1 else level(size, octave))
    hot.to_the_end()
    assert sum(run.ended == "diverged" for run in hot.runs) == 1
    assert hot.judged().named[1] == 0.5


@pytest.mark.parametrize(
    ("ended", "dropped"), [("failed", {128}), ("out_of_memory", {128, 256, 512})]
)
def test_next_run_drops_a_size_that_cannot_be_trained(ended, dropped):
    search = Search()
    search.runs = [Run(128, 1.0, 0, None, ended=ended)]
    search.to_the_end()
    assert not {run.batch_size for run in search.runs[1:]} & dropped
    assert search.judged().named[0] not in dropped
    search.runs = [Run(BASE, 1.0, 0, None, ended="failed")]
    assert search.step().batch_size in (16, 64)
    larger = search.trained(NextRun(512, 1.0, 0, EPOCHS))  # It trains, so it stays.
    search.runs = [larger, Run(128, 1.0, 0, None, ended=ended)]
    assert search.judged().named == (512, 1.0)


def test_race_continues_after_a_dead_network_and_a_chance_failure():
    search = Search(lambda size, k: None if (size, k) == (512, 1) else level(size, k))
    while not isinstance(run := search.step(), str):
        search.end(run)
        dead = search.runs[-1].ended == "diverged"
        search.runs[-1] = search.runs[-1]._replace(**({"ended": "completed"} if dead else {}))
    assert sum(run.pair == (512, 2.0) for run in search.runs) == 1
    assert search.judged().named == (128, 2.0)
    search = Search()
    search.end(search.step())
    search.runs.append(Run(BASE, 0.5, 0, None, ended="diverged"))
    search.to_the_end()
    assert search.judged().named == (128, 2.0)


def test_race_without_any_value_ends_and_names_nothing():
    search = Search(lambda size, octave: None)
    assert search.to_the_end() == "diverged"
    assert min(run.factor for run in search.runs) == 2.0**-5
    assert search.judged() is None
    search.runs = [Run(16, 1.0, 0, None, ended="out_of_memory")]
    assert search.step() == "failed"


def test_judge_race_of_short_runs_names_the_base_size():
    search = Search()
    for _ in range(3):
        search.end(search.step())
    found = search.judged()
    best = max(search.runs, key=lambda run: run.value)
    assert (found.named, found.certified, found.certain) == (best.pair, (), False)
    assert found.obstacle is not None
    assert set(found.rounds.values()) == {0}


def test_next_run_does_not_repeat_pending_runs():
    for most in (5.0, 12.0):
        search = Search(max_trainings=most)
        while not isinstance(run := search.step(), str):
            given = [run]
            while len(given) < 3 and (more := search.step(pending=given)) != "pending":
                assert more not in given
                given.append(more)
            for one in given:
                search.end(one)
        assert search.trainings() <= most
    assert search.judged().named == (128, 2.0)


def test_next_run_after_short_runs():
    search = Search(search_rate=False, max_trainings=1.0)
    search.end(NextRun(BASE, 1.0, 0, 2))  # A run that continues it costs the missing epochs.
    assert search.step() == NextRun(BASE, 1.0, 0, EPOCHS)
    search = Search(tolerance=0.1)  # The rate is the vertex of a parabola through short runs.
    for octave, value in {-2: 0.8, -1: 0.86, 0: 0.91, 1: 0.905, 2: 0.9}.items():
        search.runs.append(Run(BASE, 2.0**octave, 0, value, 1.0, epochs=2, curve=(value, value)))
    assert search.step() == NextRun(BASE, 2.0, 0, EPOCHS)


@pytest.mark.parametrize(("slower", "named"), [(1.03, 64), (1.2, 128)])
def test_judge_race_names_the_smallest_of_the_fast_sizes(slower, named):
    seconds = {size: 10 + 1000 / size for size in SIZES}
    search = Search(seconds=seconds | {64: slower * seconds[128]})
    search.seconds = search.task.seconds
    search.to_the_end()
    search.end(NextRun(64, 2.0, 0, EPOCHS))
    assert search.judged().named == (named, 2.0)


@pytest.mark.parametrize("budget", [1, 3, 3.5])
def test_race_with_a_small_budget_or_deadline_has_an_answer(budget):
    small = Search(max_trainings=budget)
    assert small.to_the_end() == "trainings"
    assert small.trainings() <= budget
    assert 0 < expected_trainings(small.task) <= budget
    assert len(small.judged().pairs) >= (3 if budget > 3 else 1)
    late, left = Search(), budget * 40.0
    while not isinstance(step := late.step(seconds_left=left), str):
        before = sum(run.seconds for run in late.runs)
        late.end(step)
        left -= sum(run.seconds for run in late.runs) - before
    assert step in ("time", "settled")
    assert left >= -1e-6
    assert late.judged() is not None


def test_judge_race_costs_survive_a_machine_that_slows_down():
    for slower in (3.0, 1 / 3):
        search = Search()
        while not isinstance(run := search.step(), str):
            search.slower = slower if any(r.batch_size != BASE for r in search.runs) else 1.0
            search.end(run)
        found = search.judged()
        costs = {size: cost for (size, _), cost in found.costs.items()}
        for size in costs:
            expected = search.seconds[size] / search.seconds[512]
            assert costs[size] / costs[512] == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("error", [0.05, 0.3, 1.0])
def test_expected_seconds_lie_within_runs_that_take_turns(error):
    sizes, hits = SIZES[:3], []
    for rng in map(np.random.default_rng, range(20)):
        logs = 0.1 * rng.standard_normal((4, 3))  # In truth, all sizes take 10 s.
        planned = dict(zip(sizes, 10 * np.exp(error * rng.standard_normal(3)), strict=True))
        times = zip(itertools.product(range(4), sizes), 10 * np.exp(logs.ravel()), strict=True)
        runs = [Run(size, 1.0, seed, 0.9, time) for (seed, size), time in times]
        seconds, ranges = expected_seconds(runs, sizes, EPOCHS, planned)
        for a, b in itertools.permutations(range(3), 2):
            ratio = math.log(seconds[sizes[a]] / seconds[sizes[b]])
            assert ratio < logs[:, a].max() - logs[:, b].min()
            hits.append(sorted((1, *ranges[sizes[a], sizes[b]]))[1] == 1)
    assert np.mean(hits) > 0.85


@pytest.mark.parametrize("planned", [dict.fromkeys(SIZES, 50.0), {}], ids=["equal", "unknown"])
def test_judge_race_costs_follow_measured_seconds(planned):
    search = Search(seconds=planned)
    search.to_the_end()
    costs = search.judged().costs
    assert costs[512, 2.0] < costs[32, 2.0]
    search.runs = [run._replace(seconds=None) for run in search.runs]
    assert search.judged() is not None


def test_race_uses_complete_runs_of_a_grid():
    search = Search()
    for size in SIZES:
        search.end(NextRun(size, 1.0, 0, EPOCHS))
    search.to_the_end()
    assert search.judged().named == (128, 2.0)
    same = Search(lambda size, octave: level(size, octave + 1))
    for size in SIZES:
        same.end(NextRun(size, 1.0, 0, EPOCHS))
    same.to_the_end()
    assert sum(run.epochs is None for run in same.runs) < 12


@pytest.mark.parametrize("size", [BASE, 128, 512])
def test_next_run_does_not_repeat_a_stopped_run(size):
    search, stopped = Search(), None
    while not isinstance(run := search.step(), str):
        assert stopped is None or run[:2] != stopped[:2]
        search.end(run)
        if run.batch_size == size and run.epochs == EPOCHS and stopped is None:
            stopped, (*others, last) = run, search.runs
            half = {"value": last.value - 0.1, "epochs": 5, "ended": "stopped_early"}
            search.runs = [*others, last._replace(**half)]
    assert stopped is not None and search.judged().named != stopped[:2]


@pytest.mark.parametrize("sign", [1, -1])
def test_least_values_are_below_the_named_run_by_what_others_made_up_for(sign):
    curves = {
        32: [0.5, 0.68, 0.79, 0.87],
        64: [0.5, 0.7, 0.8, 0.9],
        16: [0.3, 0.6, 0.75, 0.89],  # It made up 0.19, 0.09 and 0.04 of what 64 was ahead.
    }
    runs = [
        Run(size, 1.0, 3, sign * curve[-1], 1.0, curve=tuple(sign * value for value in curve))
        for size, curve in curves.items()
    ]
    task = Search(sizes=(16, 32, 64), epochs=4, tolerance=0.001, larger_is_better=sign > 0).task
    assert judge_race(task, runs).named == (64, 1.0)
    expected = [-math.inf, 0.7 - 0.09 - 0.002, 0.8 - 0.04 - 0.002]
    np.testing.assert_allclose(least_values(task, runs, 3), expected)
    assert least_values(task, runs, 4) == ()  # The named pair has not run with this seed.
    assert least_values(task, runs[:2], 3) == ()  # One other run says too little.


def test_judge_race_obstacles():
    search = Search(noise=0.0001)
    search.to_the_end()
    assert search.judged().obstacle is None and search.judged().certain
    pinned = [run._replace(weights="w", order="o") for run in search.runs]
    pinned.append(pinned[-1]._replace(seed=7))
    few = [run._replace(step=1 / 200) for run in search.runs]
    tail = np.eye(BLOCKS)[0]
    heavy = [
        run._replace(step=math.inf, outcomes=run.outcomes + math.log2(run.batch_size) * tail)
        for run in search.runs
    ]
    for runs, obstacle in ((few, "few_examples"), (heavy, "heavy_tails"), (pinned, "pinned")):
        found = judge_race(search.task, runs)
        assert (found.obstacle, found.certain) == (obstacle, False)
    unknown = [run._replace(outcomes=None) for run in search.runs]
    assert judge_race(search.task, unknown).obstacle == "no_outcomes"
    enough = [run._replace(step=1 / 400) for run in search.runs]
    assert judge_race(search.task, enough).obstacle is None
