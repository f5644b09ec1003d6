"""The engine against a clock that only the contenders move."""

import gc
import math

import pytest
import tensorflow as tf

from kbatch.timing.rounds import (
    Block,
    TimingPlan,
    TimingRounds,
    collection_off,
    timed_enough,
    warm_up_calls,
)


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


def rounds_of(clock, durations_s, **plan):
    rounds = TimingRounds(TimingPlan(**plan), seed=0, clock=clock)
    for key, duration_s in durations_s.items():
        work = clock.worker(*duration_s)
        rounds.admit(key, lambda work=work: work)
    return rounds


def test_the_first_call_is_kept_apart_and_the_warm_up_ends_when_two_calls_agree():
    clock = Clock()
    warm_up = warm_up_calls(clock.worker(2.0, 0.4, 0.2, 0.1, 0.105, 9.0), clock=clock)
    assert warm_up.first_call_s == 2.0
    assert warm_up.later_calls_s == pytest.approx((0.4, 0.2, 0.1, 0.105))
    assert warm_up.call_s == pytest.approx(0.1)


def test_the_first_call_never_counts_as_one_of_the_two():
    clock = Clock()
    assert len(warm_up_calls(clock.worker(1.0, 1.0, 1.0), clock=clock).later_calls_s) == 2


def test_a_warm_up_that_never_settles_ends():
    clock = Clock()
    warm_up = warm_up_calls(clock.worker(*[1e-6 * 2.0**k for k in range(100)]), clock=clock)
    assert len(warm_up.later_calls_s) == 12
    assert len(warm_up_calls(clock.worker(1.0, 0.9, 0.5, 0.2), clock=clock).later_calls_s) == 2


def test_a_call_that_another_has_traced_for_is_warm_when_its_first_two_agree():
    clock = Clock()
    assert warm_up_calls(clock.worker(1.0, 1.0), clock=clock, least=2).later_calls_s == (1.0,)
    assert len(warm_up_calls(clock.worker(9.0, 1.0), clock=clock, least=2).later_calls_s) == 2
    rounds = TimingRounds(TimingPlan(), seed=0, clock=clock)
    assert len(rounds.admit("traced", lambda: clock.worker(1.0), traced=True).later_calls_s) == 1
    assert len(rounds.admit("first", lambda: clock.worker(1.0)).later_calls_s) == 2


def test_each_round_has_one_block_of_every_live_contender_in_changing_order():
    clock = Clock()
    order = []

    def named(key, work):
        return lambda: (order.append(key), work())

    rounds = TimingRounds(TimingPlan(needed_calls=100), seed=3, clock=clock)
    for key, duration_s in {"a": 0.06, "b": 0.07, "c": 0.08}.items():
        work = named(key, clock.worker(duration_s))
        rounds.admit(key, lambda work=work: work)
    order.clear()
    list(rounds.each_round())
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 6
    numbers = [block.round for block in rounds.blocks["a"]]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("duration_s", [0.0004, 0.03, 0.049, 0.05, 0.3])
def test_a_block_lasts_at_least_50_ms_and_no_call_longer_than_needed(duration_s):
    rounds = rounds_of(Clock(), {"a": (duration_s,)})
    list(rounds.each_round())
    for block in rounds.blocks["a"]:
        assert math.fsum(block.durations_s) >= 0.05 - 1e-9
        assert math.fsum(block.durations_s[:-1]) < 0.05


def test_a_steady_contender_leaves_with_the_calls_that_the_quantile_needs():
    rounds = rounds_of(Clock(), {"fast": (0.001,), "slow": (0.1,)})
    list(rounds.each_round())
    assert len(rounds.blocks["fast"]) == 6
    assert len(rounds.blocks["slow"]) == 59


def test_a_contender_that_scatters_stays_until_30_rounds_beyond():
    blocks = [Block(i, (1.0,) if i % 2 else (3.0,)) for i in range(100)]
    plan = TimingPlan(needed_calls=10)
    assert not timed_enough(blocks[:39], plan)
    assert timed_enough(blocks[:40], plan)


def test_the_interval_has_to_reach_5_percent():
    def blocks(spread):
        return [Block(i, (1 + spread * (-1) ** i,) * 20) for i in range(8)]

    assert timed_enough(blocks(0.049), TimingPlan())
    assert not timed_enough(blocks(0.051), TimingPlan())


def test_rounds_that_a_neighbour_slowed_do_not_keep_a_contender():
    quiet = [Block(i, (1.0 + 0.001 * (i % 3),) * 20) for i in range(10)]
    slowed = [*quiet, Block(10, (4.0,) * 20), Block(11, (7.0,) * 20)]
    assert timed_enough(slowed, TimingPlan())


def test_the_median_of_a_block_holds_against_one_long_call():
    blocks = [Block(i, (0.01,) * 20 + (float(i),)) for i in range(6)]
    assert timed_enough(blocks, TimingPlan())


def test_the_time_budget_ends_the_rounds_and_each_contender_had_a_block():
    clock = Clock()
    rounds = rounds_of(clock, {"a": (1.0,), "b": (10.0,)}, time_budget_s=40)
    began_s = clock.now_s
    list(rounds.each_round())
    assert began_s == 33
    assert 40 <= clock.now_s < 40 + 11
    assert len(rounds.blocks["a"]) >= 1
    assert len(rounds.blocks["b"]) >= 1

    late = rounds_of(Clock(), {"a": (1.0,), "b": (10.0,)}, time_budget_s=1)
    list(late.each_round())
    assert {key: len(blocks) for key, blocks in late.blocks.items()} == {"a": 1, "b": 1}


def test_each_round_tells_who_goes_on():
    rounds = rounds_of(Clock(), {"fast": (0.001,), "slow": (0.1,)})
    live = list(rounds.each_round())
    assert live == [["fast", "slow"]] * 5 + [["slow"]] * 53


def test_fresh_calls_are_as_many_as_asked_and_count_for_nothing_else():
    rounds = rounds_of(Clock(), {"a": (0.01,)})
    assert rounds.fresh_calls("a", 7) == pytest.approx([0.01] * 7)
    assert rounds.blocks["a"] == []


def test_what_a_contender_raises_comes_as_it_is_and_it_takes_no_part():
    clock = Clock()
    rounds = rounds_of(clock, {"a": (0.01,)})
    with pytest.raises(ZeroDivisionError):
        rounds.admit("b", lambda: lambda: 1 / 0)
    list(rounds.each_round())
    assert set(rounds.blocks) == {"a"}


def test_who_is_withdrawn_takes_no_part():
    rounds = rounds_of(Clock(), {"a": (0.01,), "b": (0.02,)})
    assert rounds.withdraw("b").call_s == pytest.approx(0.02)
    list(rounds.each_round())
    assert set(rounds.blocks) == set(rounds.warm_ups) == {"a"}


def test_an_error_that_is_a_result_ends_one_contender_and_not_the_others():
    clock = Clock()
    rounds = TimingRounds(TimingPlan(), seed=0, clock=clock)
    work = clock.worker(0.1)
    left = [None] * 6
    called = []

    def fails_later():
        work()
        called.append("later")
        if not left:
            raise MemoryError("later")
        left.pop()

    def fails():
        raise MemoryError("at once")

    assert rounds.admit("steady", lambda: work) is not None
    assert rounds.admit("later", lambda: fails_later) is not None
    assert rounds.admit("never", lambda: fails) is None
    list(rounds.each_round())
    assert {key: str(error) for key, error in rounds.failures.items()} == {
        "later": "later",
        "never": "at once",
    }
    assert len(rounds.blocks["steady"]) == 59
    assert len(rounds.blocks["later"]) == 3
    assert len(called) == 7


def test_what_a_contender_is_made_of_may_end_in_a_result_too():
    rounds = TimingRounds(TimingPlan(), seed=0, clock=Clock())

    def no_room():
        raise MemoryError("no room for the batch")

    assert rounds.admit("fits", lambda: lambda: None) is not None
    assert rounds.admit("large", no_room) is None
    assert set(rounds.blocks) == {"fits"}
    assert str(rounds.failures["large"]) == "no room for the batch"
    # Its frames would hold what the call had of the device.
    assert rounds.failures["large"].__traceback__ is None
    with pytest.raises(ZeroDivisionError):
        rounds.admit("broken", lambda: 1 / 0)


def test_an_error_may_be_a_result_only_where_another_contender_ran():
    rounds = TimingRounds(TimingPlan(), seed=0, clock=Clock())

    def does_not_start():
        raise tf.errors.InternalError(None, None, "failed to create cublas handle")

    with pytest.raises(tf.errors.InternalError, match="cublas"):
        rounds.admit("first", lambda: does_not_start)
    rounds.admit("small", lambda: lambda: None)
    assert rounds.admit("large", lambda: does_not_start) is None


def test_fresh_calls_that_end_in_a_result_give_none_and_other_errors_come_as_they_are():
    rounds = TimingRounds(TimingPlan(), seed=0, clock=Clock())
    errors = []

    def call():
        if errors:
            raise errors[0]

    rounds.admit("a", lambda: call)
    errors.append(MemoryError("later"))
    assert rounds.fresh_calls("a", 7) is None
    errors[0] = ZeroDivisionError("a fault")
    with pytest.raises(ZeroDivisionError):
        rounds.fresh_calls("a", 7)


def test_garbage_collection_is_off_in_a_block_and_as_it_was_afterwards():
    clock = Clock()
    seen = set()
    rounds = TimingRounds(TimingPlan(), seed=0, clock=clock)
    work = clock.worker(0.01)
    rounds.admit("a", lambda: lambda: (seen.add(gc.isenabled()), work()))
    seen.clear()
    list(rounds.each_round())
    rounds.fresh_calls("a", 1)
    assert seen == {False}
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("count", "spent_s", "made"), [(True, 102.0, 1), (False, 2.0, 6)])
def test_first_calls_that_compile_are_charged_to_the_budget_unless_told(count, spent_s, made):
    clock = Clock()
    plan = {"time_budget_s": 14.0, "needed_calls": 1, "block_s": 1.0}
    rounds = rounds_of(clock, {"a": (100.0, 1.0)}, first_calls_count=count, **plan)
    assert rounds.spent_s == spent_s
    list(rounds.each_round())
    assert len(rounds.blocks["a"]) == made
