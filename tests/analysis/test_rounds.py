"""Races on tables of pairs whose best one is known."""

import collections
import functools

import numpy as np
import pytest

from kbatch.analysis.judge import FIRST_LOOK, judge_race
from kbatch.analysis.rounds import NextRun, Race
from kbatch.analysis.run_table import Run

SIZES, BASE = (16, 32, 64, 128, 256, 512), 32
BLOCKS, EXAMPLES = 50, 2000


def octaves_off(size, factor, *, steeper=0.0, off=0.0):
    """Octaves between a rate and the best one of its size, which grows steeper than the rule."""
    return np.log2(factor) - off - steeper * np.log2(size / BASE)


def linear_is_right(size, factor):
    away = octaves_off(size, factor, off=1.0)
    return None if away > 2 else 0.95 - 0.006 * away**2 - 0.002 * abs(np.log2(size / 64))


def eight_times_too_small(size, factor):
    away = octaves_off(size, factor, off=3.0)
    return 0.95 - min(0.5, 0.004 * away**2) - 0.03 * (size > 128)


def cliff(size, factor):
    """The best rate is the last one that does not diverge."""
    away = octaves_off(size, factor, off=-3.0, steeper=-0.2)
    return None if away > 1.2 else 0.93 + 0.01 * min(away, 1.0) - 0.02 * (size > 64)


def flat(size, factor):
    return 0.93


TABLES = [linear_is_right, eight_times_too_small, cliff, flat]


class Search:
    """Trains what a race asks for: values of a table, with the noise of seeds and examples."""

    sizes = SIZES

    def __init__(self, table, seed=0, noise=0.004, sign=1, scale=1.0, **options):
        self.table, self.noise, self.sign, self.scale = table, noise, sign, scale
        self.draw = seed
        self.goal = {"larger_is_better": sign > 0, "tolerance": 0.01 * scale, "confidence": 0.95}
        self.options = {"base_batch_size": BASE, "max_executions": 36} | self.goal | options
        self.runs = []

    def trained(self, execution):
        size, factor, number = execution
        value, seconds = self.table(size, factor), 1 + 40 / size
        if value is None:
            return Run(size, factor, number, None, seconds, "diverged")
        own = np.random.default_rng((self.draw, size, int(factor * 1024), number))
        same = np.random.default_rng((self.draw, number))
        value += self.noise * (own.standard_normal() + same.standard_normal())
        blocks = value + 0.01 * own.standard_normal(BLOCKS)
        outcomes = self.sign * self.scale * blocks
        return Run(size, factor, number, outcomes.mean(), seconds, "completed", outcomes, EXAMPLES)

    def step(self, runs=None, **changed):
        runs = self.runs if runs is None else runs
        return Race(runs, self.sizes, **(self.options | changed)).step()

    def asked(self, count, runs=None):
        """What so many workers are given, one by one."""
        given = []
        while len(given) < count and (run := self.step(runs, pending=given).run):
            given.append(run)
        return given

    def to_the_end(self, workers=1):
        while given := self.asked(workers):
            self.runs += [self.trained(execution) for execution in given]
        return self.step()

    def judged(self, **changed):
        return judge_race(self.runs, SIZES, **(self.goal | changed))


@functools.cache
def ended(table, seed=0):
    """A search of a table that was left alone, and its last step."""
    search = Search(table, seed)
    return search, search.to_the_end()


def executions(runs):
    return [NextRun(run.batch_size, run.factor, run.seed) for run in runs]


@pytest.mark.parametrize("table", TABLES)
def test_the_pairs_that_it_names_are_within_the_tolerance_of_the_best(table):
    values = [v for b in SIZES for k in range(-5, 6) if (v := table(b, 2.0**k)) is not None]
    losses = []
    for seed in range(2):
        search, step = ended(table, seed)
        assert step.ended in ("certain", "certified", "out of reach", "executions")
        losses.append(max(values) - table(*step.judgement.named))
        assert len(search.runs) <= 6 * len(SIZES)
        assert any(run.batch_size == BASE for run in search.runs)
    assert np.mean(losses) <= 0.01


@pytest.mark.parametrize("table", TABLES)
def test_what_chose_a_pair_does_not_judge_it_and_rounds_are_whole(table):
    search, step = ended(table)
    rounds = collections.defaultdict(set)
    for run in search.runs:
        if run.seed > 0:
            rounds[run.pair].add(run.seed)
    most = max(map(len, rounds.values()))
    for pair, count in step.judgement.rounds.items():
        assert count == len(rounds[pair])
        # One that left early is worse, or no longer compared.
        assert count >= most - 1 or pair in step.judgement.worse
    assert all(own == set(range(1, len(own) + 1)) for own in rounds.values())
    rivals = set(step.judgement.pairs) - set(step.judgement.worse)
    assert sum(len(rounds[pair]) == most for pair in rivals) >= 2
    assert search.judged() == step.judgement
    chose = [run for run in search.runs if run.seed == 0]
    assert judge_race(chose, SIZES, **search.goal) is None


@pytest.mark.parametrize("table", TABLES)
def test_a_search_that_was_killed_goes_on_as_it_would_have(table):
    whole, end = ended(table)
    for count in range(0, len(whole.runs), 8):
        # On disk they are in the order of the trials.
        kept = sorted(whole.runs[:count], key=lambda run: run.pair)
        assert [whole.step(kept).run] == executions(whole.runs[count : count + 1])
    shuffled = sorted(whole.runs, key=lambda run: (run.pair, -run.seed))
    assert whole.step(shuffled).ended == end.ended


def test_a_round_is_known_when_it_begins_and_is_run_whole():
    search, rounds = Search(flat, 5, noise=0.02, max_executions=23), 0
    while run := search.step().run:
        if run.number > rounds:  # The first of its round.
            rounds = run.number
            asked = search.asked(100)
            assert len(search.runs) + len(asked) <= 23
            for execution in asked:
                assert search.step().run == execution
                search.runs.append(search.trained(execution))
        else:
            search.runs.append(search.trained(run))
    assert rounds


@pytest.mark.parametrize("search_rate", [True, False])
@pytest.mark.parametrize("most", [6, 10])
def test_every_size_is_trained_where_there_are_executions_for_all(most, search_rate):
    search = Search(cliff, max_executions=most, search_rate=search_rate)
    search.to_the_end()
    assert {run.batch_size for run in search.runs} == set(SIZES)


@pytest.mark.parametrize(("most", "workers"), [(4, 1), (7, 3), (19, 3)])
def test_never_more_executions_than_allowed(most, workers):
    search = Search(linear_is_right, max_executions=most)
    step = search.to_the_end(workers)
    assert len(search.runs) <= most
    assert step.ended
    if most < 8:
        assert (step.ended, len(search.runs)) == ("executions", most)


def test_executions_that_are_no_whole_round_are_left():
    search = Search(flat, max_executions=11, search_rate=False)
    assert search.to_the_end().ended
    counts = collections.Counter(run.seed for run in search.runs if run.seed > 0)
    assert len(set(counts.values())) <= 1


def test_a_rate_that_is_far_off_is_found_and_the_size_with_it():
    search, step = ended(eight_times_too_small)
    assert {factor for _, factor in step.judgement.pairs} <= {4.0, 8.0, 16.0}
    assert {size for size, _ in step.judgement.pairs} & {64, 128}
    assert sum(run.seed == 0 for run in search.runs) <= 20


def test_sizes_at_a_rate_that_is_known_are_all_tried_and_the_good_ones_raced():
    search = Search(lambda size, factor: 0.93 - 0.05 * (size > 64), search_rate=False)
    step = search.to_the_end()
    assert {run.factor for run in search.runs} == {1.0}
    assert {run.batch_size for run in search.runs} == set(SIZES)
    assert len(step.judgement.pairs) >= 2
    assert set(step.judgement.pairs) <= {(size, 1.0) for size in (16, 32, 64)}
    assert set(step.judgement.left_out) >= {(size, 1.0) for size in (128, 256, 512)}
    # A faster size that is left out may be as good at another tolerance.
    assert not search.judged(tolerance=0.1).certain


def test_workers_are_given_several_that_no_judgement_would_change():
    search = Search(linear_is_right)
    first = search.asked(4)
    assert len(first) == len(set(first)) == 4
    end = search.to_the_end(4)
    assert end.ended and len(search.runs) <= 36
    # Nobody runs ahead of a judgement.
    whole = [run for run in search.runs if run.seed <= FIRST_LOOK]
    raced = [run for run in whole if run.seed == FIRST_LOOK]
    kept, begun = [run for run in whole if run is not raced[-1]], executions(raced[-1:])
    following = search.step(kept, pending=begun).run
    assert following is None or following.number <= FIRST_LOOK


def test_no_larger_rate_of_a_size_is_tried_after_one_that_diverged():
    search, _ = ended(cliff)
    diverged = [i for i, run in enumerate(search.runs) if run.ended == "diverged"]
    assert diverged
    for i in diverged:
        later = [
            r.factor for r in search.runs[i + 1 :] if r.batch_size == search.runs[i].batch_size
        ]
        assert all(factor < search.runs[i].factor for factor in later)


def test_where_every_rate_diverges_it_ends_after_the_smallest():
    search = Search(lambda size, factor: None)
    step = search.to_the_end()
    assert (step.ended, step.judgement) == ("diverged", None)
    assert min(run.factor for run in search.runs) == 1 / 32
    assert len(search.runs) <= 6


@pytest.mark.parametrize(
    ("ended", "left"), [("out_of_memory", {16, 32}), ("failed", {16, 32, 128, 256, 512})]
)
def test_a_size_that_cannot_be_trained_is_not_tried_again(ended, left):
    search = Search(flat)
    search.runs = [Run(64, 1.0, 0, None, None, ended)]
    search.to_the_end()
    assert {run.batch_size for run in search.runs[1:]} <= left


def test_a_size_that_trained_goes_on_where_a_smaller_one_runs_out_later():
    search = Search(flat, search_rate=False)
    while (run := search.step().run).number == 0:
        search.runs.append(search.trained(run))
    search.runs.append(Run(64, 1.0, 1, None, None, "out_of_memory"))
    search.to_the_end()
    assert 64 not in {run.batch_size for run in search.runs[len(SIZES) + 1 :]}
    assert {128, 256, 512} & {run.batch_size for run in search.runs if run.seed == FIRST_LOOK}


def test_one_size_is_searched_for_its_rate_and_compared_with_nothing():
    search = Search(linear_is_right)
    search.sizes = (BASE,)
    step = search.to_the_end()
    assert (step.ended, step.judgement) == ("alone", None)
    best = max((run for run in search.runs if run.value is not None), key=lambda run: run.value)
    assert abs(octaves_off(*best.pair, off=1.0)) <= 1


def test_a_loss_in_other_units_is_raced_in_the_same_way():
    (gains, end), losses = ended(cliff), Search(cliff, sign=-1, scale=100.0)
    assert losses.to_the_end().judgement.named == end.judgement.named
    assert executions(gains.runs) == executions(losses.runs)


def test_a_race_over_a_grid_of_several_executions_still_looks_for_the_rate():
    search = Search(eight_times_too_small)
    search.runs = [
        search.trained(NextRun(size, 1.0, number)) for size in (16, 32, 64) for number in range(3)
    ]
    given = len(search.runs)
    search.to_the_end()
    asked = search.runs[given:]
    tried, raced = ({run.pair for run in asked if bool(run.seed) == one} for one in (False, True))
    assert len(tried - raced) > 4, "rates are tried that are not repeated"
    assert search.judged().named[1] >= 4


@pytest.mark.parametrize("noise", [0.004, 0.02])
def test_pairs_that_all_diverge_in_their_rounds_are_not_judged(noise):
    class Late(Search):
        def trained(self, execution):
            run = super().trained(execution)
            late = execution.number >= FIRST_LOOK - 1
            return run._replace(value=None, outcomes=None, ended="diverged") if late else run

    search = Late(flat, noise=noise)
    assert search.to_the_end().ended in ("executions", "out of reach")
    rounds = [run.seed for run in search.runs]
    assert max(rounds) >= FIRST_LOOK - 1
    found = search.judged()
    diverged = {run.pair for run in search.runs if run.ended == "diverged"}
    assert found is None or not (found.certain or diverged & {*found.pairs})
