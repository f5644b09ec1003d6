"""Which sizes a sweep takes, on a machine whose clock only its calls move."""

import contextlib

import numpy as np
import pytest

from kbatch.inference.sweep import InferencePlan, InferenceSweep
from kbatch.memory.find import MemoryPass
from kbatch.memory.record import MemoryRecord
from kbatch.timing.rounds import TimingPlan
from tests.inference_factory import HALF_PEAK, make_profile, time_s

SIZES, LARGER = (1, 2, 4, 8), (16, 32, 64, 128, 256, 512)


class Path:
    """A call path whose latency is (b + n_half) / r_inf."""

    name = "compiled"

    def __init__(self, machine):
        self.machine = machine

    @contextlib.contextmanager
    def open(self, model, inputs, bulk_examples):
        yield lambda size: lambda: self.machine.take(time_s(size))

    def examples_per_call(self, batch_size, bulk_examples):
        return batch_size


class Machine:
    now_s = 0.0

    def take(self, seconds):
        self.now_s += seconds

    def batch(self, size):
        return np.zeros((size, 1), "float32")


def swept(*, memory=True, limit_bytes=10**6, time_budget_s=1e6, larger=LARGER):
    """The records of a sweep; an example takes a kilobyte."""
    machine = Machine()
    timing = TimingPlan(time_budget_s=time_budget_s, rounds_beyond=0)
    plan = InferencePlan((Path(machine),), SIZES, False, timing, 4096, larger)
    records = tuple(
        MemoryRecord("float32", s, "fits", peak_bytes=10**4 + 1000 * s)
        for s in (SIZES if memory else ())
    )

    def clock():
        return machine.now_s

    with InferenceSweep({"float32": None}, machine, plan, seed=0, clock=clock) as sweep:
        list(sweep.warm_up(MemoryPass(records, limit_bytes, ())))
        list(sweep.each_round())
        return sweep.records()


def test_a_sweep_goes_on_until_throughput_is_flat():
    records = swept()
    # 90 % of the peak are reached at nine times n_half, 90 examples.
    assert [r.batch_size for r in records] == [*SIZES, 16, 32, 64, 128]
    assert all(record.measured for record in records)
    answer = make_profile(*records).efficient
    assert answer.batch_size == pytest.approx(9 * HALF_PEAK, abs=1)
    assert not answer.extrapolated
    assert make_profile(*swept(larger=())).efficient.extrapolated


@pytest.mark.parametrize(
    ("changed", "largest"),
    [
        ({"limit_bytes": 100_000}, 32),  # Half of it holds 40 examples.
        ({"limit_bytes": 0}, 8),
        ({"memory": False}, 8),
        ({"time_budget_s": 0.9}, 32),
    ],
)
def test_a_sweep_goes_no_further_than_memory_is_known_and_time_is_left(changed, largest):
    assert max(r.batch_size for r in swept(**changed) if r.measured) == largest
