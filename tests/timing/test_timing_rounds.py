"""How calls are warmed up and timed, and the rounds, on a clock that only the contenders move."""

import gc
import math

import pytest
import tensorflow as tf

from kbatch.analysis.rows import OUT_OF_MEMORY
from kbatch.timing.rounds import Block, TimingPlan, timed_calls, timed_enough, warm_up_calls
from kbatch.timing.sweep import Setting, Sweep


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def worker(self, *durations_s):
        """A call that takes the durations in turn, the last one for ever."""
        left = list(durations_s)

        def work():
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return work


class Contenders(Sweep):
    """A sweep of calls by name, which are all warmed up."""

    def __init__(self, clock, calls, *, seed=0, **plan):
        super().__init__(TimingPlan(**plan), chosen=True, seed=seed, clock=clock)
        self.contenders = calls
        self.admitted = {name: self.admit(Setting(name, 1)) for name in calls}

    def prepare(self, setting):
        return self.contenders[setting.series]()

    def turns(self):
        """The blocks of each name, after all rounds."""
        self.run()
        return {setting.series: blocks for setting, blocks in self.blocks.items()}


def rounds_of(clock, durations_s, **plan):
    workers = {name: clock.worker(*each) for name, each in durations_s.items()}
    return Contenders(
        clock, {name: lambda work=work: work for name, work in workers.items()}, **plan
    )


def test_the_first_call_is_kept_apart_and_the_warm_up_ends_when_two_calls_agree():
    clock = Clock()
    warm_up = warm_up_calls(clock.worker(2.0, 0.4, 0.2, 0.1, 0.105, 9.0), clock=clock)
    assert warm_up.first_call_s == 2.0
    assert warm_up.later_calls_s == pytest.approx((0.4, 0.2, 0.1, 0.105))
    assert warm_up.call_s == pytest.approx(0.1)
    assert len(warm_up_calls(clock.worker(1.0, 1.0, 1.0), clock=clock).later_calls_s) == 2


def test_a_warm_up_that_never_settles_ends():
    clock = Clock()
    warm_up = warm_up_calls(clock.worker(*[1e-6 * 2.0**k for k in range(100)]), clock=clock)
    assert len(warm_up.later_calls_s) == 12
    assert len(warm_up_calls(clock.worker(1.0, 0.9, 0.5, 0.2), clock=clock).later_calls_s) == 2


def test_each_round_has_one_block_of_every_live_contender_in_changing_order():
    clock = Clock()
    order = []

    def named(key, work):
        return lambda: lambda: (order.append(key), work())

    durations_s = {"a": 0.06, "b": 0.07, "c": 0.08}
    calls = {key: named(key, clock.worker(each)) for key, each in durations_s.items()}
    rounds = Contenders(clock, calls, seed=3, needed_calls=100)
    order.clear()
    blocks = rounds.turns()
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 6
    numbers = [block.round for block in blocks["a"]]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("duration_s", [0.0004, 0.049, 0.05, 0.3])
def test_a_block_lasts_at_least_50_ms_and_no_call_longer_than_needed(duration_s):
    for block in rounds_of(Clock(), {"a": (duration_s,)}).turns()["a"]:
        assert math.fsum(block.durations_s) >= 0.05 - 1e-9
        assert math.fsum(block.durations_s[:-1]) < 0.05


def test_a_steady_contender_leaves_with_the_calls_that_the_quantile_needs():
    blocks = rounds_of(Clock(), {"fast": (0.001,), "slow": (0.1,)}).turns()
    assert {name: len(each) for name, each in blocks.items()} == {"fast": 6, "slow": 59}


def test_a_contender_that_scatters_stays_until_30_rounds_beyond():
    blocks = [Block(i, (1.0,) if i % 2 else (3.0,)) for i in range(100)]
    plan = TimingPlan(needed_calls=10)
    assert not timed_enough(blocks[:39], plan)
    assert timed_enough(blocks[:40], plan)


def test_the_interval_of_the_median_has_to_reach_5_percent_and_holds_against_slow_rounds():
    def blocks(spread):
        return [Block(i, (1 + spread * (-1) ** i,) * 20) for i in range(8)]

    assert timed_enough(blocks(0.049), TimingPlan())
    assert not timed_enough(blocks(0.051), TimingPlan())
    quiet = [Block(i, (1.0 + 0.001 * (i % 3),) * 20) for i in range(10)]
    assert timed_enough([*quiet, Block(10, (4.0,) * 20), Block(11, (7.0,) * 20)], TimingPlan())
    assert timed_enough([Block(i, (0.01,) * 20 + (float(i),)) for i in range(6)], TimingPlan())


def test_the_time_budget_ends_the_rounds_and_each_contender_had_a_block():
    clock = Clock()
    rounds = rounds_of(clock, {"a": (1.0,), "b": (10.0,)}, time_budget_s=40)
    assert clock.now_s == 33
    assert all(rounds.turns().values())
    assert 40 <= clock.now_s < 40 + 11
    late = rounds_of(Clock(), {"a": (1.0,), "b": (10.0,)}, time_budget_s=1).turns()
    assert {key: len(blocks) for key, blocks in late.items()} == {"a": 1, "b": 1}


@pytest.mark.parametrize(("count", "spent_s", "made"), [(True, 102.0, 1), (False, 2.0, 6)])
def test_first_calls_that_compile_are_charged_to_the_budget_unless_told(count, spent_s, made):
    plan = {"time_budget_s": 14.0, "needed_calls": 1, "block_s": 1.0}
    rounds = rounds_of(Clock(), {"a": (100.0, 1.0)}, first_calls_count=count, **plan)
    assert rounds.spent_s == spent_s
    assert len(rounds.turns()["a"]) == made


def test_fresh_calls_and_who_is_withdrawn_take_no_part():
    rounds = rounds_of(Clock(), {"a": (0.01,), "b": (0.02,)})
    assert rounds.fresh_calls(Setting("a", 1), 7) == pytest.approx([0.01] * 7)
    rounds.withdraw(Setting("b", 1))
    assert rounds.blocks == {Setting("a", 1): []}
    assert set(rounds.turns()) == {"a"}


def fails(error):
    def call():
        raise error

    return call


def test_want_of_memory_ends_one_contender_and_other_errors_come_as_they_are():
    clock = Clock()
    work, left, called = clock.worker(0.1), [None] * 6, []

    def fails_later():
        work()
        called.append("later")
        if not left:
            raise MemoryError("later")
        left.pop()

    def no_room():
        raise MemoryError("no room for the batch")

    calls = {
        "steady": lambda: work,
        "later": lambda: fails_later,
        "never": lambda: fails(MemoryError("at once")),
        "large": no_room,
    }
    rounds = Contenders(clock, calls)
    assert rounds.admitted["never"] is rounds.admitted["large"] is None
    blocks = rounds.turns()
    assert (len(blocks["steady"]), len(blocks["later"]), len(called)) == (59, 3, 7)
    names = ("later", "never", "large")
    assert rounds.not_run == {Setting(name, 1): OUT_OF_MEMORY for name in names}
    assert rounds.fresh_calls(Setting("later", 1), 7) is None
    with pytest.raises(ZeroDivisionError):
        Contenders(clock, {"steady": lambda: work, "broken": lambda: fails(ZeroDivisionError())})


def test_an_error_may_be_want_of_memory_only_where_another_contender_ran():
    def calls(*names):
        error = tf.errors.InternalError(None, None, "failed to create cublas handle")
        known = {"small": lambda: lambda: None, "large": lambda: fails(error)}
        return {name: known[name] for name in names}

    with pytest.raises(tf.errors.InternalError, match="cublas"):
        Contenders(Clock(), calls("large"))
    assert Contenders(Clock(), calls("small", "large")).admitted["large"] is None


def test_garbage_collection_is_off_in_a_block_and_as_it_was_afterwards():
    seen = set()
    timed_calls(lambda: seen.add(gc.isenabled()), 2)
    assert seen == {False}
    assert gc.isenabled()
    gc.disable()
    try:
        timed_calls(lambda: None, 1)
        assert not gc.isenabled()
    finally:
        gc.enable()
