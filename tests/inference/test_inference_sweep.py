"""The sweep on a fake clock: which settings are timed, and which calls are recorded."""

import numpy as np
import pytest
from fake_clock import FakeClock
from inference_factory import time_s

from kbatch.inference.batch_dependence import BatchDependence
from kbatch.inference.measure import InferenceSweep
from kbatch.memory.find import MemoryPass
from kbatch.memory.result import MemoryRecord
from kbatch.timing import TimingPlan

BULK = 64
NONE, SIZES = MemoryPass(), (1, 8, 64, 512)
ROWS = np.zeros((1, 1), "float32")


def swept(
    memory=NONE, *, sizes=SIZES, larger=(), chosen=False, target_ms=None, plan=(), around=False, **s
):
    """The records of a sweep over call paths, whose calls take `s[path](batch_size)` seconds."""
    plan = {"time_budget_s": 1e3, "needed_calls": 5} | dict(plan)
    clock = FakeClock()
    runs = {
        (path, "float32"): lambda batch, size, seconds=seconds: clock.sleep(seconds(size))
        for path, seconds in s.items()
    }
    settings = {"chosen": chosen, "bulk_examples": BULK, "target_ms": target_ms, "clock": clock}
    sweep = InferenceSweep(runs, ROWS, memory, TimingPlan(rounds_beyond=0, **plan), **settings)
    list(sweep.warm_up_all(sizes, larger, around_target=around))
    sweep.run()
    records = sweep.records(BatchDependence({}, ROWS))
    return {(r.call_path, r.batch_size): r for r in records}


TIMED = {3.5: [1, 2, 4], 20.0: [1, 8, 16, 32], 500.0: [1, 8, 64, 128, 256, 512], 1e4: [*SIZES]}


@pytest.mark.parametrize(("target_ms", "sizes"), TIMED.items())
def test_sweep_times_the_powers_of_two_around_a_target(target_ms, sizes):
    records = swept(compiled=lambda size: size / 1000, target_ms=target_ms, around=True)
    assert sizes_of(records, "compiled") == sizes


def sizes_of(records, path):
    return [size for (name, size), record in records.items() if name == path and record.measured]


def test_sweep_target_does_not_apply_to_bulk_calls():
    """A bulk call takes longer than the target at each batch size."""
    slow_s = {"predict": lambda size: 0.1 + 0.01 * BULK / size}
    records = swept(compiled=lambda size: 0.0005 * size, **slow_s, target_ms=1.0)
    assert sizes_of(records, "compiled") == [1, 8]
    assert sizes_of(records, "predict") == [1, 8, 64]
    assert records["predict", 512].reason.code != "beyond_target"


@pytest.mark.parametrize("chosen", [True, False])
def test_sweep_does_not_run_a_batch_larger_than_a_bulk_call(chosen):
    records = swept(compiled=lambda size: 0.001, predict=lambda size: 0.01, chosen=chosen)
    assert sizes_of(records, "compiled") == [1, 8, 64, 512]
    assert sizes_of(records, "predict") == [1, 8, 64]
    assert records["predict", 512].reason.code == "beyond_bulk_call"
    for size in (1, 8, 64):  # The time of a batch is its share of the call.
        assert records["predict", size].median_s == pytest.approx(0.01 * size / BULK)


@pytest.mark.parametrize(
    ("measured", "largest"),
    [((1, 2, 4, 8), 32), ((), 8)],  # Half of the limit holds 40 examples.
)
def test_sweep_continues_as_long_as_memory_is_known_to_suffice(measured, largest):
    peaks = (MemoryRecord("float32", n, "fits", peak_bytes=10**4 + 1000 * n) for n in measured)
    memory, plan = MemoryPass(tuple(peaks), 100_000, ()), {"needed_calls": 59}
    sizes, larger = (1, 2, 4, 8), (16, 32, 64, 128)
    records = swept(memory, compiled=time_s, sizes=sizes, larger=larger, plan=plan)
    assert max(sizes_of(records, "compiled")) == largest


def test_sweep_records_a_sample_of_calls_of_slow_and_fast_blocks():
    calls_s = []

    def call_s(size):
        calls_s.append(1e-4 * (1 + len(calls_s) / 1000))  # Each call is slower than the last.
        return calls_s[-1]

    (record,) = swept(compiled=call_s, sizes=(1,), chosen=True).values()
    sample_s = np.array(record.latencies_s)
    assert len(sample_s) == 64 * len(record.times_s) < len(calls_s) / 2
    assert np.all(np.diff(sample_s) > 0)
    assert np.mean(sample_s) == pytest.approx(np.mean(calls_s), rel=0.05)
