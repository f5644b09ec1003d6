"""Training profiles made up for tests."""

from records_factory import make_environment

from kbatch.throughput.record import TrainingPoint, TrainingProfile

HICCUPS = (1.0, 1.01, 0.99, 1.005, 1.0, 0.995, 1.02)


def point(size, step_s, *, batch_size=None, peak=None, hiccups=HICCUPS):
    times_s = tuple(step_s * h for h in hiccups)
    return TrainingPoint(
        size,
        batch_size or size,
        "measured",
        first_step_s=step_s + 1.5,
        steps=4 * len(times_s),
        rounds=tuple(range(len(times_s))),
        step_times_s=times_s,
        peak_memory_bytes=peak,
    )


def left_out(size, outcome="not_run", reason="too slow for the time budget", peak=None):
    return TrainingPoint(size, size, outcome, reason, peak_memory_bytes=peak)


def training_profile(**changes):
    """A step of 2 ms and 0.1 ms an example, 100 kB an example beside 3 MB."""
    sizes = (1, 4, 16, 64, 256)
    points = [point(b, 2e-3 + 1e-4 * b, peak=3_000_000 + 100_000 * b) for b in sizes]
    points.append(left_out(1024, "out_of_memory", "memory ran out when it was probed"))
    defaults = {
        "model_name": "digits",
        "dtype_policy": "mixed_float16",
        "jit_compile": False,
        "points": tuple(points),
        "memory_limit_bytes": 64 * 2**20,
        "duration_s": 12.5,
        "notes": ("Rows of the dataset differ in length.",),
        "environment": make_environment(),
    }
    return TrainingProfile(**(defaults | changes))
