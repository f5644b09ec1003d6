"""The search for the largest batch whose memory lies in a window, and the line through memory.

The search for the largest batch whose memory lies in a window below a limit.

Memory M(b) of a batch of b examples is a fixed part and a part per example, or the larger of
several such lines: the optimizer's phase at first, the activations' later. So

    M(b) <= M(a) b / a        for b > a

which makes a second size safe after the first. From two sizes on a secant looks for the middle
of the window. Until the measured rise is a good part of the way that remains, it is not trusted
all the way: an activation phase that is still hidden would overshoot. How well this does is
measured in `benchmarks/max_batch_search.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

# A probe never goes further than this many times the size that is safe.
_BEYOND_SAFE = 2.0
# While the last rise is less than this share of the remaining way, only part of it is gone.
_TRUSTED_RISE = 0.7
_FIRST_PART = 0.55
# A bracket this narrow, as a share of the size, is not narrowed: memory jumps in it.
_TIGHT = 0.02
# Spread of one measurement, as a share of its value, and how many of them a slope allows for.
_SPREAD = 0.02
_ALLOWANCE = 1.0


@dataclasses.dataclass(frozen=True)
class MaxBatchAnswer:
    """What the search found.

    Attributes:
        batch_size: Largest measured size that is not above the window, in examples; None if not
            even one example fits below its upper end.
        reason: Why it is this one, in words.
        in_window: Whether its memory lies in the window.
        memory_bytes: Every size that was probed with its bytes, None where memory ran out.
    """

    batch_size: int | None
    reason: str
    in_window: bool
    memory_bytes: Mapping[int, float | None]


def search_max_batch(
    probe: Callable[[int], float | None],
    *,
    limit_bytes: float,
    memory_window: tuple[float, float] = (0.80, 0.90),
    max_batch_size: int | None = None,
    cap_name: str = "`max_batch_size`",
) -> MaxBatchAnswer:
    """Find a batch size whose measured memory lies in a window, with few probes.

    >>> search_max_batch(lambda b: 1e9 + 2e6 * b, limit_bytes=8e9).batch_size
    2900
    """
    low, high = check_window(memory_window)
    if limit_bytes <= 0 or (max_batch_size is not None and max_batch_size < 1):
        raise ValueError(
            "`limit_bytes` and `max_batch_size` must be positive. Received: "
            f"limit_bytes={limit_bytes}, max_batch_size={max_batch_size}."
        )
    window = _Window(low * limit_bytes, high * limit_bytes)
    cap = _Cap(int(limit_bytes), "one example a byte: memory hardly grows with the batch")
    if max_batch_size is not None and max_batch_size <= limit_bytes:
        cap = _Cap(max_batch_size, f"reached {cap_name}")
    measured: dict[int, float | None] = {}
    size = 1
    while True:
        measured[size] = _checked(probe(size), size)
        if window.holds(measured[size]):
            return MaxBatchAnswer(size, "its memory lies in the window", True, measured)
        below = max((b for b, m in measured.items() if m is not None and m < window.low), default=0)
        above = min((b for b in measured if b > below), default=None)
        reason = _reason_to_end(measured, limit_bytes, below, above, cap)
        if reason is not None:
            return MaxBatchAnswer(below or None, reason, False, measured)
        size = _next_size(measured, window, below, above, cap.batch_size)


def check_window(memory_window: tuple[float, float]) -> tuple[float, float]:
    """Check that a window is (low, high) with 0 < low < high <= 1."""
    try:
        low, high = memory_window
        if not 0 < low < high <= 1:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            "`memory_window` must be (low, high) with 0 < low < high <= 1. "
            f"Received: memory_window={memory_window}."
        ) from None
    return low, high


@dataclasses.dataclass(frozen=True)
class _Window:
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def holds(self, memory: float | None) -> bool:
        return memory is not None and self.low <= memory <= self.high


@dataclasses.dataclass(frozen=True)
class _Cap:
    batch_size: int
    reason: str


def _checked(memory: float | None, size: int) -> float | None:
    if memory is not None and not memory > 0:
        raise ValueError(
            "`probe` must return a positive number of bytes, or None when memory ran out. "
            f"Received: {memory} for batch {size}."
        )
    return memory


def _reason_to_end(
    measured: Mapping[int, float | None],
    limit_bytes: float,
    below: int,
    above: int | None,
    cap: _Cap,
) -> str | None:
    """Describe why the search ends below the window, None if it goes on."""

    def share(memory: float) -> str:
        return f"{100 * memory / limit_bytes:.0f} %"

    if below == 0:
        one = measured[1]
        needs = "more than there is" if one is None else f"{share(one)} of memory"
        return f"one example needs {needs}, which is above the window"
    if below == cap.batch_size:
        return cap.reason
    if above is None or above - below > max(1, _TIGHT * below):
        return None
    memory, beyond = _known(measured, below), measured[above]
    if above > below + 1:
        reached = "run out of it" if beyond is None else f"reach {share(beyond)}"
        return f"memory jumps: {below} need {share(memory)} of it, and {above} {reached}"
    if beyond is not None:
        return f"one example is {share(beyond - memory)} of memory: {above} reach {share(beyond)}"
    if below == 1:
        return f"one example needs {share(memory)} of memory, and 2 run out of it"
    each = (memory - _known(measured, 1)) / (below - 1)
    return f"one example is {share(each)} of memory: {above} run out of it"


def _next_size(
    measured: Mapping[int, float | None],
    window: _Window,
    below: int,
    above: int | None,
    cap: int,
) -> int:
    bound = cap if above is None else above - 1
    return max(below + 1, int(min(_proposal(measured, window, below, above), bound)))


def _proposal(
    measured: Mapping[int, float | None], window: _Window, below: int, above: int | None
) -> float:
    memory = _known(measured, below)
    beyond = None if above is None else measured[above]
    if above is not None and sum(b > below for b in measured) > 1:
        return (below + above) / 2  # A slope has missed the window already: memory jumps.
    if above is not None and beyond is not None:
        slope = (beyond - memory) / (above - below)
        return below + (window.middle - memory) / slope if slope > 0 else (below + above) / 2
    safe = below * window.middle / memory
    smaller = [b for b, m in measured.items() if m is not None and b < below]
    if not smaller:
        return max(safe, 2)
    previous = max(smaller)
    rise = memory - _known(measured, previous)
    slope = (max(rise, 0.0) + _ALLOWANCE * _SPREAD * memory) / (below - previous)
    if above is not None:  # It ran out of memory there.
        return min(below + (window.middle - memory) / slope, (below + above) / 2)
    rest = window.middle - memory
    part = 1.0 if rise >= _TRUSTED_RISE * rest else _FIRST_PART
    return max(safe, min(below + part * rest / slope, _BEYOND_SAFE * safe))


def _known(measured: Mapping[int, float | None], size: int) -> float:
    memory = measured[size]
    if memory is None:
        raise ValueError(f"A size that ran out of memory has no bytes. Received: size={size}.")
    return memory


# Share of the memory up to which a batch size is run that was not probed.
SURE_SHARE = 0.5


class MemoryFit(NamedTuple):
    """Memory M(b) = fixed + b each, fitted to measured sizes.

    Attributes:
        fixed_bytes: Part that does not depend on the batch: weights, slots, workspace.
        bytes_per_example: Part of one example.
        fixed_error_bytes: Standard error of the fixed part, None from fewer than three sizes.
        bytes_per_example_error: Standard error of the part of one example, or None.
    """

    fixed_bytes: float
    bytes_per_example: float
    fixed_error_bytes: float | None
    bytes_per_example_error: float | None

    def predict(self, batch_size: int) -> float:
        """Return the bytes that the line has at a batch size."""
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_within(self, most_bytes: float) -> float:
        """Return the batch size up to which the line keeps within so many bytes, 0 if flat."""
        if not self.bytes_per_example > 0:
            return 0.0
        return (most_bytes - self.fixed_bytes) / self.bytes_per_example


def fit_memory(memory_bytes: Mapping[int, float]) -> MemoryFit | None:
    """Fit a line by least squares, each size weighted by 1 / M(b)^2.

    A measurement errs by a share of its value, so small sizes tell the fixed part and large ones
    the slope.
    """
    if len(memory_bytes) < 2:
        return None
    sizes = np.array(list(memory_bytes), float)
    memory = np.array(list(memory_bytes.values()), float)
    scale = np.maximum(memory, 1.0)
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / scale[:, None]
    # Columns of one length keep the normal equations well conditioned.
    lengths = np.linalg.norm(design, axis=0)
    scaled = design / lengths
    solution = np.linalg.lstsq(scaled, memory / scale, rcond=None)[0]
    fixed, each = solution / lengths
    freedom = len(sizes) - 2
    if freedom == 0:
        return MemoryFit(float(fixed), float(each), None, None)
    residual = memory / scale - scaled @ solution
    covariance = np.linalg.inv(scaled.T @ scaled) * (residual @ residual) / freedom
    errors = np.sqrt(np.diag(covariance)) / lengths
    return MemoryFit(float(fixed), float(each), float(errors[0]), float(errors[1]))
