"""The sweep on a clock that only its calls move: which settings are timed, and what is kept."""

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
NOT_MEASURED = MemoryPass()
ROWS = np.zeros((1, 1), "float32")


def swept(
    memory=NOT_MEASURED,
    *,
    sizes=(1, 8, 64, 512),
    larger=(),
    chosen=False,
    target_ms=None,
    around=False,
    **given,
):
    """The records of a sweep over call paths, whose batches take `given[path](batch_size)`."""
    plan = {"time_budget_s": 1e3, "needed_calls": 5} | given.pop("plan", {})
    clock = FakeClock()
    runs = {
        (path, "float32"): lambda batch, size, call_s=call_s: clock.sleep(call_s(size))
        for path, call_s in given.items()
    }
    sweep = InferenceSweep(
        runs,
        ROWS,
        memory,
        TimingPlan(rounds_beyond=0, **plan),
        chosen=chosen,
        bulk_examples=BULK,
        target_ms=target_ms,
        clock=clock,
    )
    list(sweep.warm_up_all(sizes, larger, around_target=around))
    sweep.run()
    records = sweep.records(BatchDependence({}, ROWS))
    return {(r.call_path, r.batch_size): r for r in records}


@pytest.mark.parametrize(
    ("target_ms", "sizes"),
    [
        (3.5, [1, 2, 4, 8]),
        (20.0, [1, 8, 16, 32]),
        (500.0, [1, 8, 64, 128, 256]),
        (1e4, [1, 8, 64, 512]),
    ],
)
def test_powers_of_two_around_a_target_are_timed(target_ms, sizes):
    found = swept(compiled=lambda size: size / 1000, target_ms=target_ms, around=True)
    assert sizes_of(found, "compiled") == sizes


def sizes_of(found, path):
    return [size for (name, size), record in found.items() if name == path and record.measured]


def test_a_target_leaves_bulk_calls_alone():
    """Each of their batches takes longer than the target."""
    found = swept(
        compiled=lambda size: 0.0005 * size,
        predict=lambda size: 0.1 + 0.01 * BULK / size,
        target_ms=1.0,
    )
    assert sizes_of(found, "compiled") == [1, 8]
    assert sizes_of(found, "predict") == [1, 8, 64]
    assert found["predict", 512].reason.code != "beyond_target"


@pytest.mark.parametrize("chosen", [True, False])
def test_a_batch_above_a_bulk_call_is_not_run_there(chosen):
    found = swept(compiled=lambda size: 0.001, predict=lambda size: 0.01, chosen=chosen)
    assert sizes_of(found, "compiled") == [1, 8, 64, 512]
    assert sizes_of(found, "predict") == [1, 8, 64]
    assert found["predict", 512].reason.code == "beyond_bulk_call"
    bulk = [record for (name, _), record in found.items() if name == "predict" and record.measured]
    for record in bulk:  # A batch has its share of a call.
        assert record.median_s == pytest.approx(0.01 * record.batch_size / BULK)


def gone_on(*, memory=True, limit_bytes=10**6):
    """The records of a sweep of four sizes that may go on; an example takes a kilobyte."""
    sizes = (1, 2, 4, 8)
    known = tuple(
        MemoryRecord("float32", size, "fits", peak_bytes=10**4 + 1000 * size)
        for size in (sizes if memory else ())
    )
    plan = {"time_budget_s": 1e6, "needed_calls": 59}
    probed, larger = MemoryPass(known, limit_bytes, ()), (16, 32, 64, 128, 256, 512)
    return swept(probed, compiled=time_s, sizes=sizes, larger=larger, plan=plan)


@pytest.mark.parametrize(
    ("changed", "largest"),
    [({"limit_bytes": 100_000}, 32), ({"memory": False}, 8)],  # Half of it holds 40 examples.
)
def test_a_sweep_goes_no_further_than_memory_is_known(changed, largest):
    assert max(sizes_of(gone_on(**changed), "compiled")) == largest


def test_of_many_calls_some_are_kept_of_slow_and_fast_blocks_alike():
    made = []

    def call_s(size):
        made.append(1e-4 * (1 + len(made) / 1000))  # Later ones are slower.
        return made[-1]

    (record,) = swept(compiled=call_s, sizes=(1,), chosen=True).values()
    kept_s = np.array(record.latencies_s)
    assert len(kept_s) == 64 * len(record.times_s) < len(made) / 2
    assert np.all(np.diff(kept_s) > 0)
    assert np.mean(kept_s) == pytest.approx(np.mean(made), rel=0.05)
