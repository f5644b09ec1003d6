import dataclasses
import math

import numpy as np
import pytest
from inference_factory import make_check, make_failed, make_profile, make_timing, time_s

from kbatch.errors import TargetTooLow
from kbatch.inference.measure import InferenceSweep
from kbatch.inference.target_search import check_reachable, verify_target
from kbatch.memory.find import MemoryPass
from kbatch.timing import Setting, TimingPlan

FIRST = ("compiled", "float32")


class Machine(InferenceSweep):
    """A sweep whose calls move its clock, and run out of memory above a size while asked to."""

    def __init__(self, room=math.inf, *, target_ms, sizes=(1, 8, 64), time_budget_s=1e6):
        self.now_s, self.room, self.short = 0.0, room, False
        self.target, self.time_budget_s = target_ms, time_budget_s
        super().__init__(
            {FIRST: self.call},
            np.zeros((1, 1)),
            MemoryPass(),
            TimingPlan(),
            chosen=True,
            bulk_examples=1,
            target_ms=target_ms,
            clock=lambda: self.now_s,
        )
        for size in sizes:
            self.admit(Setting(FIRST, size))
        self.short = True

    def call(self, batch, size):
        if self.short and size > self.room:
            raise MemoryError("no room")
        self.now_s += time_s(size)

    def reach(self, size):
        check_reachable(self, Setting(FIRST, size), self.target, 0.95)


def verified(profile, machine):
    asked = dataclasses.replace(profile, target_ms=machine.target)
    budget_s = machine.time_budget_s
    return verify_target(asked, machine, FIRST, time_budget_s=budget_s)


@pytest.mark.parametrize("room", [3, 50])
def test_memory_that_runs_out_in_a_check_leaves_a_smaller_answer(tmp_path, room):
    profile = make_profile(*(make_timing(size) for size in (1, 8, 64)))
    found = verified(profile, Machine(room, target_ms=100.0))
    assert found.checks[0].batch_size == 64
    assert found.checks[0].latencies_s == ()
    assert found.checks[0].outcome == "missed"
    assert found.settings["sizes called afresh"].startswith("64 missed")
    answer = found.batch_for(latency_ms=100)
    assert answer.verified
    assert 1 <= answer.batch_size <= room
    found.save(tmp_path / "p.json")
    assert type(found).load(tmp_path / "p.json") == found


def test_where_nothing_was_timed_no_size_is_verified_and_the_answer_says_so():
    found = verified(make_profile(make_failed(64)), Machine(sizes=(), target_ms=100.0))
    assert found.checks == ()
    assert [note.code for note in found.notes] == ["target_not_verified"]
    assert "100 ms" in found.answer
    # Other questions have answers, which are none to this one.
    timings = [make_timing(size) for size in (1, 4, 16, *range(84, 97))]
    missed = {"target_ms": 5.0, "checks": (make_check(33, outcome="missed"),)}
    assert len(make_profile(*timings).table().attrs["answer"]) == 1
    assert make_profile(*timings, **missed).table().attrs["answer"] == []
    assert "5 ms" in make_profile(*timings, **missed).answer


def test_the_smallest_size_may_lie_above_the_answer():
    """Of 64 and 128 examples both miss the target: 16 would keep to it without room."""
    sizes, target_ms = (64, 128), 1000 * time_s(16)
    machine = Machine(sizes=sizes, target_ms=target_ms)
    machine.reach(64)
    assert {setting.size for setting in machine.warm_ups} == set(sizes)
    profile = make_profile(*(make_timing(size) for size in sizes))
    found = verified(profile, machine)
    answer = found.batch_for(latency_ms=target_ms)
    assert answer.verified
    assert 9 <= answer.batch_size <= 13


def test_a_target_below_one_example_is_told_by_one_example():
    with pytest.raises(TargetTooLow, match="at least what batch size 1 takes") as caught:
        Machine(sizes=(64, 128), target_ms=1.0).reach(64)
    assert caught.value.reachable_ms == pytest.approx(1000 * time_s(1))


@pytest.mark.parametrize(("time_budget_s", "most"), [(0.0, 0), (0.5, 1), (1e6, 6)])
def test_checks_go_on_while_there_is_time(time_budget_s, most):
    """The sweep found half the times that the checks find: the first guess fails."""
    profile = make_profile(*(make_timing(size, scale=0.5) for size in (1, 8, 64)))
    machine = Machine(target_ms=5.0, time_budget_s=time_budget_s)
    found = verified(profile, machine)
    assert machine.now_s <= max(time_budget_s, 6 * time_s(64)) + time_s(64)
    assert [check.outcome for check in found.checks[:1]] == ["missed"] * (most > 0)
    assert all(len(c.latencies_s) >= 59 and sum(c.latencies_s) >= 0.3 for c in found.checks)
    assert (len(found.checks) > 1) == (most > 1)
    assert len(found.checks) <= most
    noted = [note.values for note in found.notes if note.code == "target_not_verified"]
    assert noted == [{"longer": True}] * (most < 2)


@pytest.mark.parametrize(
    "blocks",
    [{1: (1.0, 1.9, 1.9), 8: (3.02, 5.7)}, {1: (1.0,), 8: (1.6,)}, {8: (1.6,)}],
    ids=["two kinds of rounds", "one block each", "one size"],
)
def test_a_target_is_looked_for_where_blocks_are_few(blocks):
    """A slow model has few rounds of few sizes: no fit may be possible."""
    timings = (make_timing(size, calls=len(ms), times_s=seconds(ms)) for size, ms in blocks.items())
    found = verified(make_profile(*timings), Machine(target_ms=100.0))
    assert found.checks
    assert found.batch_for(latency_ms=100).verified


def seconds(milliseconds):
    return tuple(value / 1000 for value in milliseconds)
