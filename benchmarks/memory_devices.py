"""Synthetic devices: the memory that a training step of b examples takes, and its limit.

They are drawn so as to be awkward: a line is only the beginning. Every share below is of the
memory that there is.
"""

import dataclasses

import numpy as np

GB, MB = 1e9, 1e6


class OutOfMemory(Exception):
    """A step asked for more than there is."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A model on a device.

    Attributes:
        limit_bytes: Memory that there is.
        fixed_bytes: Weights, slots and what else does not depend on the batch.
        example_bytes: Activations an example.
        curvature: By which share activations an example are larger once they fill the memory.
        optimizer_bytes: Peak of the optimizer's phase, which hides the activations at first.
        optimizer_example_bytes: Growth of that peak per example.
        block_bytes: Allocations are rounded up to multiples of it.
        steps: Workspaces as (first size, first size without it again, bytes).
    """

    limit_bytes: float
    fixed_bytes: float
    example_bytes: float
    curvature: float
    optimizer_bytes: float
    optimizer_example_bytes: float
    block_bytes: float
    steps: tuple[tuple[float, float, float], ...]

    def memory_bytes(self, batch_size):
        """Peak of a batch without jitter; takes an array of sizes as well."""
        b = np.asarray(batch_size, float)
        straight = self.example_bytes * b
        bend = 1 + self.curvature * np.minimum(straight / self.limit_bytes, 1)
        activations = self.fixed_bytes + straight * bend
        optimizer = self.optimizer_bytes + self.optimizer_example_bytes * b
        workspace = sum((first <= b) * (b < last) * size for first, last, size in self.steps)
        peak = np.maximum(activations, optimizer) + workspace
        return np.ceil(peak / self.block_bytes) * self.block_bytes

    def reachable(self, window: tuple[float, float]) -> bool:
        """Whether some whole number of examples lies in the window, without jitter."""
        low, high = (share * self.limit_bytes for share in window)
        # Curvature saves a fifth of the activations at most.
        most = int(1.5 * self.limit_bytes / self.example_bytes) + 1
        memory = self.memory_bytes(np.arange(1, most + 1))
        return bool(np.any((low <= memory) & (memory <= high)))


def draw_device(rng: np.random.Generator, *, hidden_share: float = 0.0) -> Device:
    """Draws a device, each quantity by itself.

    Args:
        rng: Random numbers.
        hidden_share: The optimizer's phase is raised to up to this share of the memory, so that
            activations stay hidden for long; 0 leaves it at one to two times the fixed part.
    """
    limit = _log_uniform(rng, 8 * GB, 80 * GB)
    fixed = _log_uniform(rng, 0.05 * GB, 12 * GB)
    example = _log_uniform(rng, 0.3 * MB, 2000 * MB)
    hidden = rng.random() < 0.5
    optimizer = fixed * rng.uniform(1, 2) if hidden else fixed
    return Device(
        limit_bytes=limit,
        fixed_bytes=fixed,
        example_bytes=example,
        curvature=rng.uniform(-0.2, 0.2),
        optimizer_bytes=max(optimizer, hidden_share * rng.random() * limit),
        optimizer_example_bytes=example * rng.uniform(0, 0.5) if hidden else 0.0,
        block_bytes=_log_uniform(rng, 0.25 * MB, 128 * MB),
        steps=tuple(_workspace(rng, limit, limit / example) for _ in range(rng.integers(0, 4))),
    )


def _workspace(rng: np.random.Generator, limit: float, full: float) -> tuple[float, float, float]:
    """An algorithm with a workspace is chosen from some size on, for good or up to another one."""
    first = _log_uniform(rng, 1, max(full, 2))
    last = first * _log_uniform(rng, 1, 100) if rng.random() < 0.5 else np.inf
    return first, last, rng.uniform(0, 0.04) * limit


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


class Probe:
    """Runs batches on a device, and counts.

    Attributes:
        probes: How often a size was run.
        failures: How often memory ran out.
    """

    def __init__(self, device: Device, seed: int, *, jitter: float = 0.02) -> None:
        self.device = device
        self.jitter = jitter
        self.rng = np.random.default_rng(seed)
        self.probes = self.failures = 0
        self._fitted_bytes: dict[int, float] = {}

    def run(self, batch_size: int, *, share: float = 1.0) -> float:
        """Measures a batch if only a share of the memory may be used.

        Raises:
            OutOfMemory: If it needs more than that.
        """
        self.probes += 1
        memory = self._measure(batch_size)
        if memory > share * self.device.limit_bytes:
            self.failures += 1
            raise OutOfMemory
        self._fitted_bytes[batch_size] = memory
        return memory

    def fits(self, batch_size: int, *, share: float = 1.0) -> bool:
        """Returns whether a batch runs, as a strategy sees it that does not read the memory."""
        try:
            self.run(batch_size, share=share)
        except OutOfMemory:
            return False
        return True

    def last_bytes(self, batch_size: int) -> float:
        """Returns the bytes of a size when it last fitted; measures it if it never did."""
        return self._fitted_bytes.get(batch_size) or self._measure(batch_size)

    def _measure(self, batch_size: int) -> float:
        spread = 1 + self.jitter * self.rng.uniform(-1, 1)
        return float(self.device.memory_bytes(batch_size)) * spread
