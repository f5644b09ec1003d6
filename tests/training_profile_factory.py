"""Training profiles made up for tests."""

from records_factory import make_environment

from kbatch.memory.result import MemoryRecord
from kbatch.records.notes import Note
from kbatch.throughput.result import TimedUpdate, TrainingProfile

HICCUPS = (1.0, 1.01, 0.99, 1.005, 1.0, 0.995, 1.02)


def update(size, step_s, *, steps=1, hiccups=HICCUPS):
    return TimedUpdate(
        batch_size=size,
        times_s=tuple(step_s * h for h in hiccups),
        steps_per_execution=steps,
        first_call_s=steps * step_s + 1.5,
    )


def left_out(size, outcome="not_run"):
    reason = Note.of("too_slow_to_time" if outcome == "not_run" else outcome)
    return TimedUpdate(batch_size=size, outcome=outcome, reason=reason)


def memory_of(*sizes):
    """Memory of 100 kB an example beside 3 MB."""
    return tuple(
        MemoryRecord("mixed_float16", size, "fits", peak_bytes=3_000_000 + 100_000 * size)
        for size in sizes
    )


def training_profile(*updates, **changes):
    """A step of 2 ms and 0.1 ms an example."""
    sizes = (1, 4, 16, 64, 256)
    made = [update(b, 2e-3 + 1e-4 * b) for b in sizes] + [left_out(1024, "out_of_memory")]
    defaults = {
        "model_name": "digits",
        "dtype_policy": "mixed_float16",
        "jit_compile": False,
        "updates": updates or tuple(made),
        "memory": memory_of(*sizes) if not updates else (),
        "memory_limit_bytes": 64 * 2**20,
        "noted": (Note.of("rows_differ", elements=16),),
        "environment": make_environment(),
    }
    return TrainingProfile(**(defaults | changes))


def in_executions():
    """Small steps that run faster many at once, which is timed beside one."""
    updates = []
    for size in (8, 32, 128):
        updates.append(update(size, 1e-3 + 1e-5 * size))
        if size < 128:
            updates.append(update(size, 2e-4 + 1e-5 * size, steps=100_000 // size))
    return training_profile(*updates, memory=memory_of(8, 32, 128))
