"""Recommendations for tests, from a device and a gradient noise scale."""

import numpy as np
from input_profile_factory import make_profile
from records_factory import make_environment

from kbatch.memory.result import MemoryRecord
from kbatch.recommendation.result import PilotRecord, Recommendation
from kbatch.throughput.result import TimedUpdate

SIZES = tuple(2**k for k in range(3, 11))
PER_EXAMPLE_S = 1e-5
# Ten rounds that scatter by a percent.
SPREAD = 1 + 0.01 * np.array([0, 1, -1, 0.5, -0.5, 0.2, -0.2, 0.8, -0.8, 0])


def make_timings(n_half=100.0, *, sizes=SIZES):
    """Updates of a device that reaches half its peak at `n_half`."""

    def timed(size):
        times_s = PER_EXAMPLE_S * (n_half + size) * SPREAD
        return TimedUpdate(batch_size=size, times_s=tuple(times_s.tolist()))

    return tuple(timed(size) for size in sizes)


def make_memory(most_at_once=1437, *, limit_bytes=8 * 2**30):
    """Sizes on a line that reaches the limit at `most_at_once` examples."""
    each = 0.9 * limit_bytes / (most_at_once + 0.5)
    sizes = [size for size in (1, 8, 32, 128) if size <= most_at_once]
    return tuple(
        MemoryRecord("float32", size, "fits", peak_bytes=round(each * size)) for size in sizes
    )


def make_pilot(noise_scale=200.0, *, scatter=0.05, **changed):
    """A pilot whose losses make nine tenths of their reduction in a quarter of the time."""
    rng, stretches = np.random.default_rng(0), 40
    fields = {
        "batch_size": 32,
        "updates": (25,) * stretches,
        "losses": tuple(0.1 + 2 * 0.02 ** (2 * i / stretches) for i in range(stretches)),
        "gradient_variances": tuple(noise_scale * (1 + scatter * rng.normal(size=stretches))),
        "gradient_squared_norms": tuple(1 + scatter * rng.normal(size=stretches)),
        "seed": 0,
    }
    return PilotRecord(**(fields | changed))


def make_recommendation(*, n_half=100.0, noise_scale=200.0, input_rate=1e6, **changed):
    fields = {
        "model_name": "digits",
        "optimizer": "Adam",
        "dtype_policy": "float32",
        "base_batch_size": 32,
        "base_learning_rate": 0.001,
        "scheduled": False,
        "learning_rate_rule": "sqrt",
        "updates": make_timings(n_half),
        "cut": (),
        "memory": make_memory(),
        "memory_limit_bytes": 8 * 2**30,
        "pilot": make_pilot(noise_scale),
        "pipeline": make_profile(batch_size=256, pipeline=input_rate, step=50_000, together=48_000),
        "unknown": {},
        "time_budget_s": 30.0,
        "noted": (),
        "environment": make_environment(),
    }
    return Recommendation(**(fields | changed))


NOTHING = {"updates": (), "memory": (), "pilot": None, "pipeline": None}
