import numpy as np
import pytest
from simulated_runs import simulate

from kbatch.analysis.paired_runs import LOOKS, first_executions, judge, race, race_looks

TOLERANCE = 0.01


def run(candidates, **changed):
    """Run a race on executions that are known, and return its end and what it executed."""
    arguments = {"larger_is_better": True, "tolerance": TOLERANCE} | changed
    counts, history = [0] * len(candidates), []
    while True:
        known = [first_executions(c, n) for c, n in zip(candidates, counts, strict=True)]
        state = race(known, **arguments)
        if not state.following:
            return state, counts, history
        for following in state.following:
            counts[following] += 1
            history.append((following, state))


def simulated(seed, accuracies=(0.92, 0.94, 0.94, 0.90), examples=3000, **changed):
    rng = np.random.default_rng(seed)
    return simulate(rng, accuracies, rounds=40, examples=examples, **changed)


def test_it_ends_with_the_fastest_within_the_tolerance():
    state, counts, history = run(simulated(0))
    assert state.ended == "certain"
    assert state.verdict.named == 2
    # All train three times, in rounds; then what is far worse is out at once.
    assert [following for following, _ in history[:12]] == [0, 1, 2, 3] * 3
    assert counts[3] == 3
    assert counts[2] == state.rounds


@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_whole_and_what_has_left_stays_out(seed):
    _, _, history = run(simulated(seed, (0.93, 0.935, 0.94, 0.92), examples=2000))
    counts, last = [0] * 4, set(range(4))
    for following, state in history:
        racing = set(range(4)) - set(state.verdict.worse if state.verdict else ())
        assert racing <= last
        last = racing
        assert following in racing
        counts[following] += 1
        assert max(counts[k] for k in racing) - min(counts[k] for k in racing) <= 1


def test_more_executions_of_what_has_left_change_nothing():
    candidates = simulated(0)
    state, counts, _ = run(candidates)
    known = [first_executions(c, n) for c, n in zip(candidates, counts, strict=True)]
    known[3] = candidates[3]
    again = race(known, larger_is_better=True, tolerance=TOLERANCE)
    assert again.ended == "certain"
    np.testing.assert_equal(again.verdict.gaps, state.verdict.gaps)


@pytest.mark.parametrize("most", [12, 14, 20, 31])
def test_no_more_executions_than_allowed(most):
    tied = simulated(1, (0.93, 0.93, 0.93, 0.93), examples=1000)
    state, counts, _ = run(tied, max_executions=most, tolerance=0.004)
    assert sum(counts) <= most
    assert state.ended in ("executions", "examples")
    assert not state.verdict.certain


def test_a_certified_size_is_taken_where_a_faster_one_lies_at_the_tolerance():
    state, counts, _ = run(simulated(3, (0.94, 0.94, 0.9295), examples=8000))
    assert state.ended == "certified"
    assert (state.verdict.named, state.verdict.certain) == (1, False)
    assert state.verdict.worse == state.verdict.promising == ()
    assert max(counts) < 40


def test_too_few_examples_end_it_early():
    state, counts, _ = run(simulated(1, (0.93,) * 4, examples=360), tolerance=0.003)
    assert state.ended == "examples"
    assert max(counts) <= 8
    assert state.verdict.smallest_tolerance > 0.003


def test_a_look_that_finds_enough_examples_restarts_the_count_of_too_few(monkeypatch):
    smallest = {3: 0.02, 4: None, 5: 0.02, 6: 0.02}

    def judge_by_list(candidates, **arguments):
        verdict = judge(candidates, **arguments)
        open_ = {"certain": False, "certified": (), "worse": ()}
        return verdict._replace(
            smallest_tolerance=smallest[len(candidates[0].values)], executions_needed=None, **open_
        )

    monkeypatch.setattr("kbatch.analysis.paired_runs.judge", judge_by_list)
    state, _, _ = run(simulated(0))
    assert (state.ended, state.rounds) == ("examples", 6)


def test_a_round_goes_on_with_those_that_it_has_not_executed():
    candidates = [first_executions(c, n) for c, n in zip(simulated(0), (2, 1, 2, 1), strict=True)]
    assert race(candidates, larger_is_better=True, tolerance=TOLERANCE).following == (1, 3)


def test_a_candidate_alone_ends_after_its_first_look():
    state, counts, _ = run(simulated(0, (0.9,)))
    assert (state.ended, counts) == ("certain", [3])


def test_looks_follow_what_is_allowed():
    assert race_looks(6, None) == LOOKS
    assert race_looks(6, 17) == ()
    assert race_looks(6, 18) == (3,)
    assert race_looks(6, 24) == (3, 4, 5, 6)  # Two sizes may be left after 18.
    assert race_looks(1, 5) == (3, 4, 5)


def test_a_race_is_seldom_wrong():
    rng, wrong, executions = np.random.default_rng(11), 0, []
    accuracies = [0.93, 0.93, 0.93, 0.918, 0.918, 0.918]
    for _ in range(8):
        state, counts, _ = run(simulate(rng, accuracies, rounds=40, examples=1500))
        wrong += state.ended == "certain" and state.verdict.named != 2
        executions.append(sum(counts))
    assert wrong <= 1  # At 5 %, and two standard errors.
