import numpy as np
import pytest

from kbatch.analysis.max_batch_search import search_max_batch

GB = 1e9


class Device:
    """Memory of a batch: the larger of an optimizer and an activation phase; it may run out."""

    def __init__(self, *, limit, fixed, each, floor=0.0, jitter=0.0, seed=0):
        self.limit, self.fixed, self.each, self.floor = limit, fixed, each, floor
        self.jitter = jitter
        self.rng = np.random.default_rng(seed)
        self.probed = []

    def __call__(self, size):
        self.probed.append(size)
        memory = max(self.fixed + self.each * size, self.floor)
        memory *= 1 + self.jitter * self.rng.uniform(-1, 1)
        return memory if memory <= self.limit else None


def random_device(seed, **arguments):
    rng = np.random.default_rng(seed)
    limit = rng.choice([8, 16, 40]) * GB
    fixed = 10 ** rng.uniform(-1.3, 0.85) * GB
    each = 10 ** rng.uniform(-3.5, 0.3) * GB
    floor = rng.choice([0.0, 0.6 * limit])
    return Device(limit=limit, fixed=fixed, each=each, floor=floor, seed=seed, **arguments)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("cap", [None, 1, 37, 1000])
def test_the_answer_was_measured_and_is_the_largest_below_the_window_or_in_it(seed, cap):
    device = random_device(seed, jitter=0.02)
    answer = search_max_batch(device, limit_bytes=device.limit, max_batch_size=cap)
    assert list(answer.memory_bytes) == device.probed
    assert len(set(device.probed)) == len(device.probed) < 30
    assert device.probed[0] == 1
    if cap is not None:
        assert max(device.probed) <= cap
    if answer.batch_size is None:
        assert answer.memory_bytes[1] is None or answer.memory_bytes[1] > 0.9 * device.limit
        return
    memory = answer.memory_bytes[answer.batch_size]
    assert memory <= 0.9 * device.limit
    assert answer.in_window == (memory >= 0.8 * device.limit)
    if not answer.in_window:
        below = [b for b, m in answer.memory_bytes.items() if m and m < 0.8 * device.limit]
        assert answer.batch_size == max(below)


@pytest.mark.parametrize("seed", range(40))
def test_a_line_through_the_origin_never_runs_out(seed):
    """M(b) <= M(1) b with equality: the second size is in the window already."""
    each = 10 ** np.random.default_rng(seed).uniform(-4, -1.2) * GB
    device = Device(limit=8 * GB, fixed=0.0, each=each)
    answer = search_max_batch(device, limit_bytes=device.limit)
    assert answer.in_window
    assert len(device.probed) == 2


@pytest.mark.parametrize(
    ("device", "cap", "size", "reason"),
    [
        (Device(limit=8 * GB, fixed=7.5 * GB, each=0.1 * GB), None, None, "one example needs more"),
        (Device(limit=8 * GB, fixed=9 * GB, each=0.1 * GB), None, None, "one example needs more"),
        (Device(limit=8 * GB, fixed=1 * GB, each=3.4 * GB), None, 1, "one example more is above"),
        (Device(limit=8 * GB, fixed=1 * GB, each=0.001 * GB), 37, 37, "largest size asked for"),
        (Device(limit=8 * GB, fixed=1 * GB, each=0.001 * GB), 1, 1, "largest size asked for"),
    ],
)
def test_where_the_window_cannot_be_reached_it_says_why(device, cap, size, reason):
    answer = search_max_batch(device, limit_bytes=device.limit, max_batch_size=cap)
    assert (answer.batch_size, answer.in_window) == (size, False)
    assert reason in answer.reason


def test_a_size_above_the_window_that_fitted_is_used():
    """1 -> 2 measures 95 %: the answer must come from between without running out."""
    memory = {1: 1.0, 2: 5.0, 3: 6.0, 4: 7.6, 5: 9.0}
    asked = []

    def probe(size):
        asked.append(size)
        return memory[min(size, 5)] * GB if size < 5 else None

    answer = search_max_batch(probe, limit_bytes=8 * GB)
    assert answer.batch_size == 3
    assert "4 was measured" in answer.reason


@pytest.mark.parametrize("window", [(0.0, 0.9), (0.9, 0.8), (0.8, 0.8), (0.8, 1.1)])
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(ValueError, match="memory_window"):
        search_max_batch(lambda b: b, limit_bytes=10, memory_window=window)


@pytest.mark.parametrize("bounds", [{"limit_bytes": 0}, {"limit_bytes": 1, "max_batch_size": 0}])
def test_bounds_must_be_positive(bounds):
    with pytest.raises(ValueError, match="must be positive"):
        search_max_batch(lambda b: b, **bounds)
