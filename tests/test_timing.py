"""Timing of calls and sweeps, on a fake clock that only the calls advance."""

import gc
import math

import pytest
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.errors import DataEnded
from kbatch.records.notes import Note
from kbatch.timing import (
    FEWEST_ROUNDS,
    Setting,
    Sweep,
    TimingPlan,
    interleaved,
    timed_calls,
    timed_enough,
    warm_up_calls,
)

SIZES, LARGER = (1, 2, 4, 8), (16, 32, 64, 128, 256, 512)


def worker(clock, *durations_s):
    """A call that takes the durations in turn, and then always the last one."""
    left = list(durations_s)
    return lambda: clock.sleep(left.pop(0) if len(left) > 1 else left[0])


class Calls(Sweep):
    """A sweep in which a call takes `call_s(size)`. Memory ends above the size `room`."""

    def __init__(
        self,
        call_s=lambda size: (10 + size) / 1000,
        *,
        room=10**6,
        rows=10**6,
        refused=10**6,
        examples=None,
        target_s=math.inf,
        chosen=False,
        seed=0,
        **plan,
    ):
        self.clock, self.room, self.rows, self.call_s = FakeClock(), room, rows, call_s
        self.refused, self.examples, self.target, self.called = refused, examples, target_s, []
        plan = {"time_budget_s": 1e6, "needed_calls": 6, "rounds_beyond": 0} | plan
        super().__init__(TimingPlan(**plan), chosen=chosen, seed=seed, clock=self.clock)

    def prepare(self, setting):
        if setting.size > self.rows:
            raise DataEnded(self.rows)
        return lambda: self.take(setting)

    def refusal(self, setting):
        return Note.of("too_slow_to_time") if setting.size > self.refused else None

    def batches_per_call(self, setting):
        return (self.examples or setting.size) / setting.size

    def target_s(self, setting):
        return self.target

    def take(self, setting):
        self.called.append(setting)
        if setting.size > self.room:
            raise MemoryError("no room")
        self.clock.now_s += self.call_s(setting.size)


def swept(calls, *, sizes=SIZES, larger=()):
    """Run a sweep; return for each size "measured" or the code of the reason why it was not run."""
    list(calls.warm_up(Setting("only", size) for size in sizes))
    list(calls.extend("only", larger))
    calls.run()
    reasons = {one.size: calls.not_run.get(one) for one in calls.all_settings("only")}
    return {size: reason.code if reason else "measured" for size, reason in reasons.items()}


def measured(found):
    return tuple(size for size, outcome in found.items() if outcome == "measured")


@pytest.mark.parametrize(
    ("changed", "added"),
    [
        ({}, (16, 32, 64, 128)),  # 90 examples reach 90 % of the peak.
        ({"room": 32}, (16, 32)),  # Size 64 runs out of memory.
        ({"rows": 32}, (16, 32)),
        ({"time_budget_s": 0.7}, (16,)),
        ({"time_budget_s": 0.01}, ()),
    ],
)
def test_sweep_extends_until_throughput_time_memory_or_data_end(changed, added):
    found = swept(Calls(**changed), larger=LARGER)
    start = SIZES if changed.get("time_budget_s", 1) > 0.1 else (1,)
    assert measured(found) == (*start, *added)
    if "room" in changed:
        assert found[64] == "out_of_memory"
    if "rows" in changed:
        assert found[64] == "data_gave_fewer"


def test_sweep_out_of_memory_ends_larger_sizes():
    assert swept(Calls(room=4), sizes=(8, 1, 2, 16)) == {
        8: "out_of_memory",
        1: "measured",
        2: "measured",
        16: "memory_ran_out_at",
    }


def test_sweep_does_not_call_refused_sizes():
    calls = Calls(refused=2)
    found = swept(calls)
    assert measured(found) == (1, 2)
    assert found[4] == found[8] == "too_slow_to_time"
    assert {size for _, size in calls.called} == {1, 2}


@pytest.mark.parametrize("chosen", [True, False])
def test_sweep_leaves_out_slow_sizes_unless_chosen(chosen):
    calls = Calls(lambda size: 0.01 * size, time_budget_s=10.0, chosen=chosen)
    found = swept(calls, sizes=(1, 8, 64, 512))
    assert measured(found) == ((1, 8, 64, 512) if chosen else (1, 8, 64))
    assert chosen or found[512] == "too_slow_to_time"


def test_sweep_times_two_sizes_in_any_budget():
    calls = Calls(lambda size: 1.0, time_budget_s=1.0, chosen=True)
    list(calls.warm_up(pairs := [Setting(name, size) for size in SIZES for name in "ab"]))
    assert [*calls.warm_ups] == pairs[:4]
    assert calls.not_run[pairs[4]].code == "warm_up_time_spent"


def test_sweep_leaves_out_sizes_beyond_target():
    calls = Calls(lambda size: 0.002 * size, target_s=0.06)
    found = swept(calls, sizes=(1, 8, 64, 512))
    assert measured(found) == (1, 8)
    assert found[64] == found[512] == "beyond_target"
    assert 512 not in {size for _, size in calls.called}
    calls = Calls(lambda size: 0.1, examples=64, target_s=0.02)
    assert measured(swept(calls, sizes=(1, 8, 64))) == (1, 8)


def rounds(durations_s, **plan):
    """Run a sweep of calls by name, and return its blocks, the sweep and the warm-up's seconds."""
    plan = {"needed_calls": 59, "rounds_beyond": 30} | plan
    calls = Calls(chosen=True, **plan)
    workers = {name: worker(calls.clock, *each) for name, each in durations_s.items()}
    calls.take = lambda setting: (calls.called.append(setting.series), workers[setting.series]())
    for name in durations_s:
        calls.admit(Setting(name, 1))
    calls.called.clear()
    spent_s = calls.spent_s
    calls.run()
    return {setting.series: blocks for setting, blocks in calls.blocks.items()}, calls, spent_s


def test_sweep_rounds_shuffle_all_live_settings():
    blocks, calls, _ = rounds({"a": (0.06,), "b": (0.07,), "c": (0.08,)}, needed_calls=100, seed=3)
    turns = [tuple(calls.called[i : i + 3]) for i in range(0, len(calls.called), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 6
    assert len(blocks["a"]) == len(turns)


@pytest.mark.parametrize("duration_s", [0.0004, 0.049, 0.3])
def test_sweep_block_lasts_50_ms(duration_s):
    for block in rounds({"a": (duration_s,)})[0]["a"]:
        assert math.fsum(block) >= 0.05 - 1e-9
        assert math.fsum(block[:-1]) < 0.05


def test_sweep_ends_steady_setting_after_needed_calls():
    blocks, *_ = rounds({"fast": (0.001,), "slow": (0.1,)})
    assert {name: len(each) for name, each in blocks.items()} == {"fast": 6, "slow": 59}


def test_timed_enough_at_5_percent_or_many_rounds():
    def blocks(spread):
        return [(1 + spread * (-1) ** i,) * 20 for i in range(8)]

    assert timed_enough(blocks(0.049), TimingPlan())
    assert not timed_enough(blocks(0.051), TimingPlan())
    quiet = [(1.0 + 0.001 * (i % 3),) * 20 for i in range(10)]
    assert timed_enough([*quiet, (4.0,) * 20, (7.0,) * 20], TimingPlan())
    wild = [(1.0,) if i % 2 else (3.0,) for i in range(100)]
    assert not timed_enough(wild[:39], TimingPlan(needed_calls=10))
    assert timed_enough(wild[:40], TimingPlan(needed_calls=10))


@pytest.mark.parametrize("budget_s", [100, 70, 66, 1])
def test_sweep_ends_with_budget_and_three_blocks(budget_s):
    blocks, calls, spent_s = rounds({"a": (1.0,), "b": (10.0,)}, time_budget_s=budget_s)
    assert spent_s == 33
    assert all(len(each) >= 3 for each in blocks.values())
    least_s = spent_s + 3 * 11
    assert max(budget_s, least_s - 10) <= calls.clock.now_s < max(budget_s, least_s) + 10


def test_fresh_calls_are_not_recorded():
    calls = Calls(lambda size: 0.01, chosen=True)
    calls.admit(Setting("a", 1))
    assert calls.fresh_calls(Setting("a", 1), 7) == pytest.approx([0.01] * 7)
    assert calls.blocks == {Setting("a", 1): []}


def test_sweep_out_of_memory_later_ends_one_setting():
    calls = Calls(lambda size: 0.1, chosen=True)
    one, two = Setting("a", 1), Setting("a", 2)
    calls.admit(one)
    calls.admit(two)
    calls.room = 1
    calls.run()
    assert (len(calls.blocks[one]), calls.blocks[two]) == (6, [])
    assert calls.not_run == {two: Note.of("out_of_memory")}
    assert calls.fresh_calls(two, 7) is None
    calls.call_s = lambda size: 1 / 0
    with pytest.raises(ZeroDivisionError):
        calls.admit(Setting("a", 1))


def test_sweep_takes_cublas_error_for_memory_after_success():
    error = tf.errors.InternalError(None, None, "failed to create cublas handle")

    def call_s(size):
        if size > 1:
            raise error
        return 0.1

    with pytest.raises(tf.errors.InternalError, match="cublas"):
        Calls(call_s).admit(Setting("a", 2))
    calls = Calls(call_s)
    assert calls.admit(Setting("a", 1)) is not None
    assert calls.admit(Setting("a", 2)) is None


def test_warm_up_calls_end_when_two_calls_agree():
    def warm(*durations_s):
        clock = FakeClock()
        found = warm_up_calls(worker(clock, *durations_s), clock=clock)
        return found.first_call_s, found.call_s, clock.now_s

    assert warm(2.0, 0.4, 0.2, 0.1, 0.105, 9.0) == pytest.approx((2.0, 0.1, 2.805))
    assert warm(1.0, 1.0, 1.0) == (1.0, 1.0, 3.0)
    assert warm(1.0, 0.9, 0.5, 0.2) == pytest.approx((1.0, 0.5, 2.4))  # Long calls are warm.
    doubling = [1e-6 * 2.0**k for k in range(100)]
    assert warm(*doubling)[2] == pytest.approx(sum(doubling[:13]))


def test_timed_calls_turn_off_garbage_collection():
    seen = set()
    timed_calls(lambda: seen.add(gc.isenabled()), 2)
    assert seen == {False}
    assert gc.isenabled()


@pytest.mark.parametrize("until_s", [0.0, 15.0, 16.0, 43.9, 1e9])
def test_interleaved_shuffles_and_ends_with_budget(until_s):
    clock, order = FakeClock(), []

    def contender(name):
        def run():
            order.append(name)
            clock.now_s += 1.0
            return clock.now_s

        return run

    contenders = {name: contender(name) for name in "abcd"}
    found = interleaved(contenders, until_s=until_s, most_rounds=20, now=clock)
    count = len(found["a"])
    assert count == min(20, max(FEWEST_ROUNDS, until_s // 4))
    turns = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert count < 20 or len({tuple(turn) for turn in turns}) > 5
    assert found["a"] == sorted(found["a"])
