import itertools

import numpy as np
import pytest

from kbatch.memory.search import MEMORY_WINDOW, MaxBatchSearch, fit_memory, predict_memory
from kbatch.records.notes import Note

GB = 1e9


def searched(probe, **arguments):
    """Run a search to its end."""
    search = MaxBatchSearch(**({"memory_window": MEMORY_WINDOW} | arguments))
    while (size := search.ask()) is not None:
        search.tell(size, probe(size))
    return search


class Device:
    """Memory of a batch: the maximum of a flat phase and a line, or None above the limit."""

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


def test_max_batch_search_on_random_devices():
    probed, out = [], 0
    for seed, cap in itertools.product(range(60), [1, 37, 1000, None]):
        device = random_device(seed, jitter=0.02)
        search = searched(device, limit_bytes=device.limit, max_batch_size=cap)
        (answer, reason), memory_bytes = search.answer, search.memory_bytes
        assert list(memory_bytes) == device.probed
        assert len(set(device.probed)) == len(device.probed) < 30
        assert device.probed[0] == 1
        if cap is not None:
            assert max(device.probed) <= cap
        else:
            probed.append(len(device.probed))
            out += sum(memory is None for memory in memory_bytes.values())
        if answer is None:
            assert memory_bytes[1] is None or memory_bytes[1] > 0.9 * device.limit
            continue
        memory = memory_bytes[answer]
        assert memory <= 0.9 * device.limit
        assert (reason.code == "in_window") == (memory >= 0.8 * device.limit)
        if reason.code != "in_window":
            below = [b for b, m in memory_bytes.items() if m and m < 0.8 * device.limit]
            assert answer == max(below)
    # The search runs few sizes, and fewer run out of memory.
    assert np.mean(probed) < 8
    assert out < 0.5 * len(probed)


def test_max_batch_search_without_fixed_memory_takes_two_sizes():
    """M(b) = M(1) b, so the second size is inside the window."""
    for seed in range(40):
        each = 10 ** np.random.default_rng(seed).uniform(-4, -1.2) * GB
        device = Device(limit=8 * GB, fixed=0.0, each=each)
        assert searched(device, limit_bytes=device.limit).answer[1].code == "in_window"
        assert len(device.probed) == 2


@pytest.mark.parametrize(
    ("fixed", "each", "cap", "size", "reason"),
    [
        (7.5, 0.1, None, None, "one example needs 95 % of memory, above `memory_window`"),
        (9, 0.1, None, None, "one example needs more than there is, above `memory_window`"),
        (0.4, 0.96, None, 6, "batch size 6 needs 77 % of memory, and 7 needs 89 %"),
        (1, 4, None, 1, "batch size 1 needs 62 % of memory, and 2 runs out of memory"),
        (1, 0.001, 37, 37, "it is `max_batch_size`"),
        (1, 0.001, 1, 1, "it is `max_batch_size`"),
    ],
)
def test_max_batch_search_reason_outside_of_the_window(fixed, each, cap, size, reason):
    device = Device(limit=8 * GB, fixed=fixed * GB, each=each * GB)
    window = (0.8, 0.88)
    search = searched(device, limit_bytes=8 * GB, memory_window=window, max_batch_size=cap)
    assert search.answer == (size, reason)


def test_max_batch_search_ends_if_memory_does_not_grow():
    search = searched(lambda b: 1 * GB, limit_bytes=8 * GB)
    assert "hardly grows" in search.answer[1]
    assert len(search.memory_bytes) < 30


@pytest.mark.parametrize("jump", [None, 0.97])
def test_max_batch_search_locates_a_jump_within_two_percent(jump):
    """Memory that jumps, as with an allocator whose blocks double, needs no full bisection."""
    asked = []

    def probe(size):
        asked.append(size)
        return 1e6 + 300.0 * size if size <= 1_024_000 else jump and jump * 1e9

    size, reason = searched(probe, limit_bytes=1e9).answer
    assert 1_024_000 / 1.02 <= size <= 1_024_000
    assert reason.startswith(f"memory jumps: batch size {size} needs 3")
    assert ("runs out" in reason) == (jump is None)
    assert len(asked) <= 14


def test_max_batch_search_repeats_a_low_reading_before_a_jump():
    """150 examples need 85 % of the memory, but the first reading is 79 %."""
    readings = iter([0.79, 0.80, 0.85])
    asked = []

    def probe(size):
        asked.append(size)
        return next(readings) * 1e9 if size == 150 else 1e9 * (0.1 + 0.005 * size)

    search = MaxBatchSearch(limit_bytes=1e9, memory_window=(0.82, 0.86))
    search.tell(1, 0.105e9)
    search.tell(150, probe(150))
    search.tell(152, 0.93e9)
    while (size := search.ask()) is not None:
        search.tell(size, probe(size))
    assert search.answer == (150, Note.of("in_window"))
    assert asked[:3] == [150, 150, 150]


@pytest.mark.parametrize(
    ("measured", "next_size"),
    [
        # On the line through the two sizes around the middle of the window, 85 %.
        ({1: 0.105, 100: 0.6, 180: 1.0}, 150),
        # The last rise is small, so only 0.55 of the way is gone, and the slope has a margin of
        # 2 % of the memory: 2 + 0.55 * 0.45 / 0.108.
        ({1: 0.3, 2: 0.4}, 4),
    ],
)
def test_max_batch_search_next_size(measured, next_size):
    search = MaxBatchSearch(limit_bytes=GB, memory_window=(0.8, 0.9))
    for size, share in measured.items():
        search.tell(size, share * GB)
    assert search.ask() == next_size


def test_max_batch_search_keeps_the_highest_reading():
    search = MaxBatchSearch(limit_bytes=GB, memory_window=MEMORY_WINDOW)
    for memory in (3e8, 5e8, 4e8):
        search.tell(8, memory)
    for memory in (None, 9e8):
        search.tell(16, memory)
    assert search.memory_bytes == {8: 5e8, 16: None}


def naive_fit(memory):
    """Fit a line by the normal equations with weights 1 / M^2."""
    sizes, values = np.array(list(memory), float), np.array(list(memory.values()), float)
    design = np.stack([np.ones_like(sizes), sizes], axis=1)
    weights = np.diag(1 / values**2)
    return np.linalg.solve(design.T @ weights @ design, design.T @ weights @ values)


@pytest.mark.parametrize("sizes", [(1, 2), (1, 7, 300), (1, 64, 512, 4096, 100_000)])
@pytest.mark.parametrize(("fixed", "each"), [(5e7, 2e6), (1e10, 300.0), (0.0, 1.0)])
def test_fit_memory_exact_line(sizes, fixed, each):
    fit = fit_memory({b: fixed + each * b for b in sizes})
    np.testing.assert_allclose(fit.bytes_per_example, each, rtol=1e-6, atol=1e-9 * fixed)
    np.testing.assert_allclose([fit.predict(b) for b in sizes], [fixed + each * b for b in sizes])
    np.testing.assert_allclose(fit.largest_within(fit.predict(sizes[-1])), sizes[-1], rtol=1e-5)


def test_fit_memory_equals_the_normal_equations():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        memory = {b: (1e8 + 3e6 * b) * (1 + rng.normal(0, 0.02)) for b in (1, 30, 90, 200, 600)}
        fit = fit_memory(memory)
        np.testing.assert_allclose(fit, naive_fit(memory), rtol=1e-6, err_msg=str(memory))


def test_fit_memory_with_a_jump():
    memory = {2: 2.0, 64: 4.0, 256: 10.0, 509: 17.0, 511: 17.2, 518: 33.0}
    assert 0.02 < fit_memory(memory).bytes_per_example < 0.08


def test_predict_memory_with_a_flat_part():
    # Measured with a convolutional autoencoder under 64 MiB, in MiB.
    memory = {1: 12.17, 4: 12.16, 35: 21.3, 84: 47.0, 89: 56.4, 93: 60.2}
    assert predict_memory(memory, 93) == pytest.approx(60.2, rel=0.07)
    assert predict_memory(memory, 110) == pytest.approx(68, abs=3)
    assert predict_memory(memory, 2) == predict_memory(memory, 10) == 12.17
    for seed in range(20):  # The maximum of a flat part and a line.
        rng = np.random.default_rng(seed)
        flat, each = 10 ** rng.uniform(6, 9), 10 ** rng.uniform(3, 7)
        known = {b: max(flat, each * b) * (1 + rng.normal(0, 0.01)) for b in 4 ** np.arange(8)}
        found = predict_memory({int(b): m for b, m in known.items()}, 4**8)
        assert found == pytest.approx(max(flat, each * 4**8), rel=0.1 if each * 4**6 > flat else 4)


def test_fit_memory_constant():
    fit = fit_memory({1: 2352, 50: 2352, 100: 2352})
    assert fit.predict(10**6) == pytest.approx(2352)


def test_fit_memory_needs_two_sizes():
    assert fit_memory({}) is fit_memory({8: 100.0}) is None
