"""The search for the largest batch whose memory lies in a window below a limit.

Memory M(b) of a batch of b examples is a fixed part and a part per example, or the larger of
several such lines: the optimizer's phase at first, the activations' later. So

    M(b) <= M(a) b / a        for b > a

which makes a second size safe after the first. From two sizes on a secant looks for the middle
of the window. Until the measured rise is a good part of the way that remains, it is not trusted
all the way: an activation phase that is still hidden would overshoot.
"""

import dataclasses
from collections.abc import Callable, Mapping

# A probe never goes further than this many times the largest size that fitted.
_LARGEST_GROWTH = 8
# While the last rise is less than this share of the remaining way, only part of it is gone.
_TRUSTED_RISE = 0.7
_FIRST_PART = 0.55
# Spread of one measurement, as a share of its value, and how many of them a slope allows for.
_SPREAD = 0.02
_ALLOWANCE = 2.0


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
) -> MaxBatchAnswer:
    """Finds a batch size whose measured memory lies in a window, with few probes.

    Example:

    >>> search_max_batch(lambda b: 1e9 + 2e6 * b, limit_bytes=8e9).batch_size
    2900

    Args:
        probe: Measures the peak bytes of a batch; None when memory ran out.
        limit_bytes: Memory that there is.
        memory_window: Lower and upper share of it that is aimed at.
        max_batch_size: Largest size to try, None for no bound.

    Returns:
        A size that was measured, never one that was only computed.

    Raises:
        ValueError: If the window is not 0 < low < high <= 1 or a bound is not positive.
    """
    low, high = memory_window
    if not 0 < low < high <= 1:
        raise ValueError(
            "`memory_window` must be (low, high) with 0 < low < high <= 1. "
            f"Received: memory_window={memory_window}."
        )
    if limit_bytes <= 0 or (max_batch_size is not None and max_batch_size < 1):
        raise ValueError(
            "`limit_bytes` and `max_batch_size` must be positive. Received: "
            f"limit_bytes={limit_bytes}, max_batch_size={max_batch_size}."
        )
    window = _Window(low * limit_bytes, high * limit_bytes)
    measured: dict[int, float | None] = {}
    size = 1
    while True:
        measured[size] = probe(size)
        if window.holds(measured[size]):
            return MaxBatchAnswer(size, "its memory lies in the window", True, measured)
        below = max((b for b, m in measured.items() if m is not None and m < window.low), default=0)
        above = min((b for b in measured if b > below), default=None)
        end = _end(below, above, max_batch_size)
        if end is not None:
            return MaxBatchAnswer(below or None, end, False, measured)
        size = _next_size(measured, window, below, above, max_batch_size)


@dataclasses.dataclass(frozen=True)
class _Window:
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def holds(self, memory: float | None) -> bool:
        return memory is not None and self.low <= memory <= self.high


def _end(below: int, above: int | None, max_batch_size: int | None) -> str | None:
    """Says why the search ends below the window, None if it goes on."""
    if below == 0:
        return "one example needs more than the window allows"
    if below == max_batch_size:
        return "it is the largest size asked for"
    if above == below + 1:
        return f"one example more is above the window: {above} was measured"
    return None


def _next_size(
    measured: Mapping[int, float | None],
    window: _Window,
    below: int,
    above: int | None,
    max_batch_size: int | None,
) -> int:
    proposed = _proposal(measured, window, below, above)
    bound = above - 1 if above is not None else max_batch_size
    proposed = proposed if bound is None else min(proposed, bound)
    return max(below + 1, int(proposed))


def _proposal(
    measured: Mapping[int, float | None], window: _Window, below: int, above: int | None
) -> float:
    memory = _known(measured, below)
    beyond = None if above is None else measured[above]
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
    return max(safe, min(below + part * rest / slope, _LARGEST_GROWTH * below))


def _known(measured: Mapping[int, float | None], size: int) -> float:
    memory = measured[size]
    if memory is None:
        raise ValueError(f"A size that ran out of memory has no bytes. Received: size={size}.")
    return memory
