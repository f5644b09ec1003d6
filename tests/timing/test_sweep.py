"""Which sizes a sweep times, on a clock that only its calls move."""

import functools
import math

import pytest

from kbatch.analysis.rows import MEASURED, OUT_OF_MEMORY
from kbatch.timing.rounds import TimingPlan
from kbatch.timing.sweep import Setting, Sweep
from kbatch.training.data.training_data import DataEnded

SIZES, LARGER = (1, 2, 4, 8), (16, 32, 64, 128, 256, 512)


class Calls(Sweep):
    """Calls that take 10 ms and 1 ms an example, and have no room above a size."""

    def __init__(
        self,
        *,
        room=10**6,
        rows=10**6,
        call_s=lambda size: (10 + size) / 1000,
        refused=10**6,
        examples=None,
        target_s=math.inf,
        budget_s=1e6,
        chosen=False,
    ):
        self.now_s, self.room, self.rows, self.call_s = 0.0, room, rows, call_s
        self.refused, self.examples, self.target, self.called = refused, examples, target_s, []
        timing = TimingPlan(time_budget_s=budget_s, needed_calls=6, rounds_beyond=0)
        super().__init__(timing, chosen=chosen, clock=lambda: self.now_s)

    def prepare(self, setting):
        if setting.size > self.rows:
            raise DataEnded(self.rows)
        return functools.partial(self.take, setting.size)

    def refusal(self, setting):
        return "too large" if setting.size > self.refused else None

    def shares(self, setting):
        return (self.examples or setting.size) / setting.size

    def target_s(self, setting):
        return self.target

    def take(self, size):
        self.called.append(size)
        if size > self.room:
            raise MemoryError("no room")
        self.now_s += self.call_s(size)


def swept(calls, *, sizes=SIZES, larger=()):
    list(calls.warm_up(Setting("only", size) for size in sizes))
    list(calls.go_on("only", larger))
    calls.run()
    return {size: calls.outcome(Setting("only", size)) for size in (*sizes, *larger)}


def measured(found):
    return tuple(size for size, outcome in found.items() if outcome == MEASURED)


@pytest.mark.parametrize(
    ("changed", "added"),
    [
        ({}, (16, 32, 64, 128)),  # 90 % of the peak are reached at 90 examples.
        ({"larger": ()}, ()),
        ({"larger": (16, 32)}, (16, 32)),
        ({"room": 32}, (16, 32)),  # 64 ran out of memory, which is a result.
        ({"rows": 32}, (16, 32)),
        ({"budget_s": 0.7}, (16,)),
        ({"budget_s": 0.01}, ()),
    ],
)
def test_it_goes_on_until_throughput_is_flat_or_time_memory_or_data_end(changed, added):
    options = dict(changed)
    larger = options.pop("larger", LARGER)
    found = swept(Calls(**options), larger=larger)
    start = SIZES if options.get("budget_s", 1) > 0.1 else (1,)
    assert measured(found) == (*start, *added)
    if "room" in changed:
        assert found[64] == OUT_OF_MEMORY
    if "rows" in changed:
        assert found[64] == "the data function gave 32 examples"


def test_what_ran_out_of_memory_ends_larger_sizes_and_not_smaller_ones():
    assert swept(Calls(room=4), sizes=(8, 1, 2, 16)) == {
        8: OUT_OF_MEMORY,
        1: MEASURED,
        2: MEASURED,
        16: "memory ran out at size 8",
    }


def test_what_is_refused_is_not_called():
    calls = Calls(refused=2)
    assert swept(calls) == {1: MEASURED, 2: MEASURED, 4: "too large", 8: "too large"}
    assert set(calls.called) == {1, 2}


@pytest.mark.parametrize("chosen", [True, False])
def test_sizes_too_slow_for_the_time_are_left_out_unless_they_were_chosen(chosen):
    calls = Calls(call_s=lambda size: 0.01 * size, budget_s=10.0, chosen=chosen)
    found = swept(calls, sizes=(1, 8, 64, 512))
    assert measured(found) == ((1, 8, 64, 512) if chosen else (1, 8, 64))
    assert chosen or found[512] == "too slow for the time budget"


def test_two_are_timed_however_short_the_time():
    found = swept(Calls(call_s=lambda size: 1.0, budget_s=1.0, chosen=True))
    assert measured(found) == (1, 2)
    assert "half of the time budget was spent" in found[4]


def test_sizes_far_beyond_a_target_are_not_even_called():
    calls = Calls(call_s=lambda size: 0.002 * size, target_s=0.06)
    found = swept(calls, sizes=(1, 8, 64, 512))
    assert measured(found) == (1, 8)
    assert found[64] == found[512] == "batches beyond the latency target"
    assert set(calls.called) == {1, 8}


def test_a_share_of_a_call_counts_where_it_has_more():
    calls = Calls(call_s=lambda size: 0.1, examples=64, target_s=0.02)
    assert measured(swept(calls, sizes=(1, 8, 64))) == (1, 8)
