"""Inference profiles for tests. By default the latency is (b + n_half) / r_inf."""

import numpy as np
from records_factory import make_environment

from kbatch.inference.result import InferenceProfile, TimingRecord
from kbatch.inference.target_search import TargetCheck
from kbatch.memory.result import MemoryRecord
from kbatch.records.notes import Note

PEAK_RATE = 10_000.0
HALF_PEAK = 10.0


def time_s(batch_size):
    return (batch_size + HALF_PEAK) / PEAK_RATE


def make_timing(
    batch_size, *, path="compiled", policy="float32", scale=1.0, noise=0.01, calls=120, **changed
):
    rng = np.random.default_rng(batch_size)
    blocks = scale * time_s(batch_size) * (1 + noise * rng.normal(size=8))
    latencies = scale * time_s(batch_size) * (1 + noise * rng.normal(size=calls))
    fields = {"outcome": "measured", "first_call_s": 0.5, "times_s": tuple(blocks.tolist())}
    fields["latencies_s"] = tuple(latencies.tolist())
    known = {"call_path": path, "dtype_policy": policy, "batch_size": batch_size}
    return TimingRecord(**known, **(fields | changed))


def make_failed(batch_size, outcome="out_of_memory", *, path="compiled", policy="float32"):
    known = {"call_path": path, "dtype_policy": policy, "batch_size": batch_size}
    return TimingRecord(**known, outcome=outcome, reason=Note.of(outcome))


def make_check(batch_size, *, outcome="verified", latencies_s=None):
    """Return a check. By default its calls fit a target of 5 ms."""
    latencies_s = latencies_s or (0.006 if outcome == "missed" else 0.004,) * 60
    return TargetCheck(batch_size, tuple(latencies_s), outcome)


def make_memory(batch_size, *, policy="float32", fixed=2**24, each=2**18, **changed):
    fields = {"outcome": "fits", "peak_bytes": fixed + each * batch_size}
    return MemoryRecord(policy, batch_size, **(fields | changed))


def make_profile(*timings, **changed):
    sizes = (1, 2, 4, 8, 16, 32, 64)
    timings = timings or tuple(
        make_timing(size, path=path, scale=scale)
        for path, scale in (("compiled", 1.0), ("xla", 0.5))
        for size in sizes
    )
    reason = Note.of("memory_time_spent")
    guarded = {"outcome": "not_run", "reason": reason, "peak_bytes": None, "guarded": True}
    fields = {
        "model_name": "net",
        "quantile": 0.95,
        "timings": tuple(timings),
        "memory": (*map(make_memory, sizes), make_memory(128, **guarded)),
        "memory_limit_bytes": 2**26,
        "environment": make_environment(),
    }
    return InferenceProfile(**(fields | changed))
