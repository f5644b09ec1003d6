"""The sweep on a clock that only its calls move: which sizes are timed."""

import contextlib
import functools

import numpy as np
import pytest
from inference_factory import HALF_PEAK, make_profile, time_s

from kbatch.inference.call_paths import CallPath
from kbatch.inference.measure import inference_plan
from kbatch.inference.sweep import InferencePlan, InferenceSweep
from kbatch.memory.find import MemoryPass
from kbatch.memory.result import MemoryRecord
from kbatch.timing.rounds import TimingPlan

BULK = 64
NOT_MEASURED = MemoryPass((), 0, ())


class Inputs:
    """Rows of one number."""

    def batch(self, size):
        return np.zeros((size, 1), "float32")


class Clock:
    """Seconds that pass only in calls, which are remembered."""

    def __init__(self):
        self.now_s = 0.0
        self.called = []

    def __call__(self):
        return self.now_s

    def path(self, name, call_s):
        """A call path whose batches take `call_s(batch_size)`."""
        return Path(name, functools.partial(self.take, name, call_s))

    def take(self, name, call_s, size):
        self.called.append((name, size))
        self.now_s += call_s(size)


class Path(CallPath):
    """A call path that takes the size in the place of a batch."""

    bulk = property(lambda self: self.name == "predict")

    @contextlib.contextmanager
    def open(self, model, inputs):
        yield lambda batch, size: self.function(size)


def swept(
    *paths,
    clock,
    sizes=(1, 8, 64, 512),
    larger=(),
    chosen=False,
    target_s=None,
    needed_calls=5,
    budget_s=1e3,
    memory=NOT_MEASURED,
):
    timing = TimingPlan(time_budget_s=budget_s, needed_calls=needed_calls, rounds_beyond=0)
    target_ms = target_s and 1000 * target_s
    plan = InferencePlan(paths, sizes, chosen, timing, BULK, larger, target_ms=target_ms)
    with InferenceSweep({"float32": None}, Inputs(), plan, memory, seed=0, clock=clock) as sweep:
        list(sweep.warm_up())
        list(sweep.rounds.each_round())
        return {(r.call_path, r.batch_size): r for r in sweep.records()}


def sizes_of(found, path):
    return [size for (name, size), record in found.items() if name == path and record.measured]


def test_sizes_far_beyond_a_target_are_not_even_called():
    clock = Clock()
    path = clock.path("compiled", lambda size: 0.002 * size)
    found = swept(path, clock=clock, target_s=0.06)
    assert sizes_of(found, "compiled") == [1, 8]
    for size in (64, 512):
        assert found["compiled", size].outcome == "batches beyond the latency target"
    assert {size for _, size in clock.called} == {1, 8}


def test_a_target_leaves_bulk_calls_alone():
    """Each of their batches takes longer than the target."""
    clock = Clock()
    single = clock.path("compiled", lambda size: 0.0005 * size)
    bulk = clock.path("predict", lambda size: 0.1 + 0.01 * BULK / size)
    found = swept(single, bulk, clock=clock, target_s=0.001)
    assert sizes_of(found, "compiled") == [1, 8]
    assert sizes_of(found, "predict") == [1, 8, 64]
    assert "target" not in found["predict", 512].outcome


@pytest.mark.parametrize("chosen", [True, False])
def test_a_batch_above_a_bulk_call_is_not_run_there(chosen):
    clock = Clock()
    single = clock.path("compiled", lambda size: 0.001)
    found = swept(single, clock.path("predict", lambda size: 0.01), clock=clock, chosen=chosen)
    assert sizes_of(found, "compiled") == [1, 8, 64, 512]
    assert sizes_of(found, "predict") == [1, 8, 64]
    assert "the 64 examples of a bulk call" in found["predict", 512].outcome
    bulk = [record for (name, _), record in found.items() if name == "predict" and record.measured]
    assert {record.examples_per_call for record in bulk} == {BULK}


def test_two_sizes_are_timed_however_short_the_time():
    clock = Clock()
    paths = [clock.path(name, lambda size: 1.0) for name in ("compiled", "call")]
    found = swept(*paths, clock=clock, chosen=True, budget_s=1.0)
    assert [record.measured for record in found.values()] == [True, True] + [False] * 6
    assert "half of the time budget was spent on preparing" in found["call", 1].outcome


@pytest.mark.parametrize("chosen", [True, False])
def test_default_sizes_too_slow_for_the_time_are_left_out_and_chosen_ones_are_not(chosen):
    clock = Clock()
    path = clock.path("compiled", lambda size: 0.01 * size)
    found = swept(path, clock=clock, chosen=chosen, budget_s=10.0)
    assert sizes_of(found, "compiled") == [1, 8, 64] + ([512] if chosen else [])
    reasons = {size: record.outcome for (_, size), record in found.items()}
    assert reasons[512] == ("measured" if chosen else "too slow for the time budget")


def test_with_a_target_default_sizes_are_powers_of_eight():
    def plan(latency_slo_ms):
        return inference_plan(
            batch_sizes=None,
            call_paths="compiled",
            latency_slo_ms=latency_slo_ms,
            quantile=0.95,
            time_budget_s=20.0,
            bulk_examples=BULK,
            memory_limit_bytes=None,
        )

    assert plan(60).batch_sizes == tuple(8**k for k in range(5))
    assert plan(60).target_ms == 60
    assert plan(None).batch_sizes == tuple(2**k for k in range(13))


def gone_on(*, larger=(16, 32, 64, 128, 256, 512), memory=True, limit_bytes=10**6, budget_s=1e6):
    """The records of a sweep of four sizes that may go on; an example takes a kilobyte."""
    clock, sizes = Clock(), (1, 2, 4, 8)
    known = tuple(
        MemoryRecord("float32", size, "fits", peak_bytes=10**4 + 1000 * size)
        for size in (sizes if memory else ())
    )
    return swept(
        clock.path("compiled", time_s),
        clock=clock,
        sizes=sizes,
        larger=larger,
        needed_calls=TimingPlan().needed_calls,
        budget_s=budget_s,
        memory=MemoryPass(known, limit_bytes, ()),
    )


def test_a_sweep_goes_on_until_throughput_is_flat():
    found = gone_on()
    # 90 % of the peak are reached at nine times n_half, 90 examples.
    assert sizes_of(found, "compiled") == [1, 2, 4, 8, 16, 32, 64, 128]
    answer = make_profile(*found.values()).efficient
    assert answer.batch_size == pytest.approx(9 * HALF_PEAK, abs=1)
    assert not answer.extrapolated
    assert make_profile(*gone_on(larger=()).values()).efficient.extrapolated


@pytest.mark.parametrize(
    ("changed", "largest"),
    [
        ({"limit_bytes": 100_000}, 32),  # Half of it holds 40 examples.
        ({"limit_bytes": 0}, 8),
        ({"memory": False}, 8),
        ({"budget_s": 0.9}, 32),
    ],
)
def test_a_sweep_goes_no_further_than_memory_is_known_and_time_is_left(changed, largest):
    assert max(sizes_of(gone_on(**changed), "compiled")) == largest
