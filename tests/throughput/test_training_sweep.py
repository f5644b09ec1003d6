"""Which sizes a sweep of training goes on to, on a clock that only its steps move."""

import functools

import pytest

from kbatch.throughput.update_timing import StepConfig, TrainingSweep
from kbatch.timing.rounds import TimingPlan, TimingRounds

SIZES, LARGER = (1, 2, 4, 8), (16, 32, 64, 128, 256, 512)


class Steps:
    """Steps that take 10 ms and 1 ms an example, and have no room above a size."""

    def __init__(self, room):
        self.now_s, self.room = 0.0, room

    def step(self, batch, micro_batch_size):
        return functools.partial(self.take, batch)

    def take(self, size):
        if size > self.room:
            raise MemoryError("no room")
        self.now_s += (10 + size) / 1000


def batch_of(size, room):
    if size > room:
        raise MemoryError("no room for the batch itself")
    return size


def gone_on(*, time_budget_s=1e6, room=10**6, larger=LARGER, room_for_batch=10**6):
    steps = Steps(room)
    timing = TimingPlan(time_budget_s=time_budget_s, needed_calls=6)
    sweep = TrainingSweep(steps, lambda size: batch_of(size, room_for_batch), timing)
    sweep.rounds = TimingRounds(timing, seed=0, clock=lambda: steps.now_s)
    for size in SIZES:
        sweep.warm_up(StepConfig(size, size))
    return sweep.go_on(SIZES, larger)


@pytest.mark.parametrize(
    ("changed", "added"),
    [
        ({}, (16, 32, 64, 128)),  # 90 % of the peak are reached at 90 examples.
        ({"larger": ()}, ()),
        ({"larger": (16, 32)}, (16, 32)),
        ({"room": 32}, (16, 32, 64)),  # 64 ran out of memory, which is a result.
        ({"room_for_batch": 32}, (16, 32, 64)),
        ({"time_budget_s": 0.7}, (16,)),
        ({"time_budget_s": 0.01}, ()),
    ],
)
def test_it_goes_on_until_throughput_is_flat_or_time_or_memory_end(changed, added):
    assert gone_on(**changed) == (*SIZES, *added)
