"""Search for the largest batch whose memory is inside a window, and fit memory with a line.

Memory M(b) of a batch of b examples is a fixed part plus a part per example. More exactly, it is
the maximum of several such lines: the optimizer's phase for small batches, the activations' for
large ones. Therefore

    M(b) <= M(a) b / a        for b > a

so the second size can be chosen safely after the first. From two sizes on, the search uses a
secant to the middle of the window. If the measured rise is small compared with the rise that
remains, the next size is only a part of the way, because a steeper line may begin further on.

On a busy machine the peaks of one size differ by 10 % from run to run. The search uses the highest
reading of each size. If memory rises too steeply between two sizes, it measures the smaller one
again before it concludes that memory jumps. `benchmarks/max_batch_search.py` measures how well
this works.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from kbatch.analysis.intervals import UNRESOLVED, Estimate, ratio_of_estimates
from kbatch.records.notes import Note

# The share of the limit that a batch may fill, as (low, high).
MEMORY_WINDOW = (0.80, 0.90)
# The next size is at most this many times the size that is safe by M(b) <= M(a) b / a.
_BEYOND_SAFE = 2.0
# If memory rose by less than `_TRUSTED_RISE` of the rise that remains to the middle of the window,
# the next size aims at only `_FIRST_PART` of this rise.
_TRUSTED_RISE, _FIRST_PART = 0.7, 0.55
# If two sizes differ by at most this share and only the smaller one is too small, memory jumps.
_TIGHT = 0.02
# Standard deviation of one measurement, as a share of its value.
_SPREAD = 0.02
# Prior of that deviation on a machine in use, and its weight as a number of readings.
_PRIOR_SPREAD, _PRIOR_READINGS = 0.03, 4
# A rise of at least this many times the average per example is a jump. A smaller rise may be noise,
# and the smaller size is then measured up to `_MOST_READINGS` times.
_STEEP, _MOST_READINGS = 2.0, 3

# How a run of a batch size ended, and its purpose.
Outcome = Literal["fits", "above_window", "out_of_memory"]
Purpose = Literal["search", "fresh_process", "mixed_sizes"]
# The largest measured size that is not above the window (None if not even one example fits), and
# the reason why the search ended with it.
MaxBatchAnswer = tuple[int | None, Note]


class MaxBatchSearch:
    """Search for a batch size whose memory is inside a window: `ask`, measure, `tell`."""

    def __init__(
        self,
        *,
        limit_bytes: float,
        memory_window: tuple[float, float],
        max_batch_size: int | None = None,
        examples: int | None = None,  # Number of examples in the data.
    ):
        low, high = memory_window
        # The highest reading of each size; None if it ran out of memory.
        self.memory_bytes: dict[int, float | None] = {}
        self._readings: Counter[int] = Counter()
        self._limit, self._low, self._high = limit_bytes, low * limit_bytes, high * limit_bytes
        self._middle = (self._low + self._high) / 2
        self.cap = int(limit_bytes)
        self.cap_reason = Note.of("memory_hardly_grows")
        for size, code in ((max_batch_size, "reached_most"), (examples, "reached_data")):
            if size is not None and size <= self.cap:
                self.end_at(size, code)

    def ask(self) -> int | None:
        """Return the size to measure next, or None if there is an answer."""
        if 1 not in self.memory_bytes:
            return 1
        if self.answer is not None:
            return None
        below, above = self._bracket()
        if self._is_unsure(below, above):
            return below
        bound = self.cap if above is None else above - 1
        return max(below + 1, int(min(self._proposal(below, above), bound)))

    def tell(self, batch_size: int, memory_bytes: float | None) -> None:
        """Add a measurement of a size, in bytes, or None if it ran out of memory."""
        most = self.memory_bytes.get(batch_size, 0.0)
        self.memory_bytes[batch_size] = (
            None if memory_bytes is None or most is None else max(most, memory_bytes)
        )
        self._readings[batch_size] += 1

    def end_at(self, batch_size: int, code: str) -> None:
        """Set the largest size that can be run, and the code of the note that says why."""
        self.cap, self.cap_reason = batch_size, Note.of(code)

    @property
    def answer(self) -> MaxBatchAnswer | None:
        """The answer, or None if there are sizes left to measure."""
        inside = [b for b, m in self._fitting.items() if self._low <= m <= self._high]
        if inside:
            return max(inside), Note.of("in_window")
        below, above = self._bracket()
        known = 1 in self.memory_bytes and not self._is_unsure(below, above)
        reason = self._reason_to_end(below, above) if known else None
        return None if reason is None else (below or None, reason)

    @property
    def _fitting(self) -> dict[int, float]:
        return {b: m for b, m in self.memory_bytes.items() if m is not None}

    def _bracket(self) -> tuple[int, int | None]:
        """Return the largest size below the window (or 0) and the next measured size (or None)."""
        below = max((b for b, m in self._fitting.items() if m < self._low), default=0)
        return below, min((b for b in self.memory_bytes if b > below), default=None)

    def _reason_to_end(self, below: int, above: int | None) -> Note | None:
        """Return why the search ends below the window, or None if it continues."""

        def share(memory: float) -> str:
            return f"{100 * memory / self._limit:.0f} %"

        if below == 0:
            single = self.memory_bytes[1]
            needs = "more than there is" if single is None else f"{share(single)} of memory"
            return Note.of("one_example_above", needs=needs)
        if below == self.cap:
            return self.cap_reason
        if above is None or not _is_tight(below, above):
            return None
        beyond = self.memory_bytes[above]
        reached = "runs out of memory" if beyond is None else f"needs {share(beyond)}"
        code = "next_above" if above == below + 1 else "memory_jumps"
        needs = share(self._fitting[below])
        return Note.of(code, below=below, needs=needs, above=above, reached=reached)

    def _is_unsure(self, below: int, above: int | None) -> bool:
        """Return whether noise may explain the difference of two near sizes, and not a jump."""
        if below < 2 or above is None or not _is_tight(below, above):
            return False
        memory, beyond = self._fitting[below], self.memory_bytes[above]
        steep = memory + _STEEP * memory / below * (above - below)
        return self._readings[below] < _MOST_READINGS and steep < (beyond or self._limit)

    def _proposal(self, below: int, above: int | None) -> float:
        fitting = self._fitting
        memory = fitting[below]
        rest = self._middle - memory
        if above is not None:
            if sum(b > below for b in self.memory_bytes) > 1:
                return (below + above) / 2  # The secant missed the window once: memory jumps.
            if above in fitting:
                slope = (fitting[above] - memory) / (above - below)
                return below + rest / slope if slope > 0 else (below + above) / 2
        safe = below * self._middle / memory
        previous = max((b for b in fitting if b < below), default=None)
        if previous is None:
            return max(safe, 2)
        rise = memory - fitting[previous]
        slope = (max(rise, 0.0) + _SPREAD * memory) / (below - previous)
        part = 1.0 if rise >= _TRUSTED_RISE * rest else _FIRST_PART
        proposal = max(safe, min(below + part * rest / slope, _BEYOND_SAFE * safe))
        # The upper end of the bracket ran out of memory, so there is no secant to it.
        return proposal if above is None else min(proposal, (below + above) / 2)


def _is_tight(below: int, above: int) -> bool:
    return above - below <= max(1, _TIGHT * below)


# A size that was not probed may run if its estimated memory is at most this share of the limit.
SURE_SHARE = 0.5


class MemoryFit(NamedTuple):
    """The line M(b) = fixed_bytes + b * bytes_per_example, fitted to measured sizes."""

    fixed_bytes: float  # Weights, optimizer variables and workspace, which every batch needs.
    bytes_per_example: float

    def predict(self, batch_size: float) -> float:
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_within(self, most_bytes: float) -> float:
        """Return the batch size at which the line reaches `most_bytes`, or 0 if it is flat."""
        if not self.bytes_per_example > 0:
            return 0.0
        return (most_bytes - self.fixed_bytes) / self.bytes_per_example


def memory_curve(memory_bytes: Mapping[int, float]) -> Callable[[float], float] | None:
    """Return a function that estimates the bytes of a batch size, or None below two sizes.

    The estimate is on the fitted line, or at the peak of a smaller size if that is above the line.
    """
    fit = fit_memory(memory_bytes)
    if fit is None:
        return None
    above = {b: m for b, m in memory_bytes.items() if m > (1 + _NOISE) * fit.predict(b)}
    return lambda batch_size: max(
        fit.predict(batch_size), *(m for b, m in above.items() if b <= batch_size), 0.0
    )


def predict_memory(memory_bytes: Mapping[int, float], batch_size: int) -> float:
    """Estimate the bytes of a batch size from two measured sizes or more."""
    if (curve := memory_curve(memory_bytes)) is None:
        raise ValueError(
            "Estimating memory needs measurements at two or more batch sizes: measure more sizes. "
            f"Received: measurements at the sizes {sorted(memory_bytes)}."
        )
    return curve(batch_size)


# Peaks of one size differ by up to this share from run to run, and so may a point and the line.
_NOISE = 0.1
# A line is fitted only to sizes that differ by at least this factor. Others show noise or a jump.
_LEAST_SPAN = 2


def fit_memory(memory_bytes: Mapping[int, float]) -> MemoryFit | None:
    """Fit a line by least squares, each size weighted by 1 / M(b)^2.

    Memory is the maximum of several lines, and the steepest one holds for large sizes. Therefore
    the smallest sizes are left out until the line is near all that remain.
    """
    return _fit_to_largest(memory_bytes)[0]


def largest_within(memory_bytes: Mapping[int, float], most_bytes: float) -> Estimate[float | None]:
    """Return the batch size at which the line reaches `most_bytes`, with a 95 % interval.

    The variance of the peaks is estimated from the residuals and from a prior that counts as four
    readings. Fieller's theorem gives the interval, and measured sizes bound it.
    """
    fit, sizes, memory = _fit_to_largest(memory_bytes)
    if fit is None or not fit.bytes_per_example > 0:
        return UNRESOLVED
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / memory[:, None]
    unscaled, freedom = np.linalg.inv(design.T @ design), len(sizes) - 2 + _PRIOR_READINGS
    residuals = design @ np.array(fit) - 1
    variance = float(residuals @ residuals + _PRIOR_READINGS * _PRIOR_SPREAD**2) / freedom
    estimate = ratio_of_estimates(
        most_bytes - fit.fixed_bytes,
        fit.bytes_per_example,
        covariance=variance * unscaled * [[1, -1], [-1, 1]],
        degrees_of_freedom=freedom,
    )
    least = max((size for size, peak in memory_bytes.items() if peak <= most_bytes), default=0)
    above = (size for size, peak in memory_bytes.items() if peak > most_bytes and size > least)
    most = min(above, default=math.inf) - 1
    ends = (estimate.value, estimate.low, estimate.high)
    value, low, high = (None if size is None else min(max(size, least), most) for size in ends)
    return Estimate(value, low, high, n=len(sizes))


def _fit_to_largest(
    memory_bytes: Mapping[int, float],
) -> tuple[MemoryFit | None, np.ndarray, np.ndarray]:
    """Fit the line, and return it with the sizes that it was fitted to and their memory."""
    sizes = np.array(sorted(memory_bytes), float)
    memory = np.array([memory_bytes[int(size)] for size in sizes], float)
    fits: list[tuple[MemoryFit | None, np.ndarray, np.ndarray]] = []
    for first in range(max(0, len(sizes) - 1)):
        if fits and _LEAST_SPAN * sizes[first] > sizes[-1]:
            break
        # The error of a measurement is a share of its value, hence the weights 1 / m.
        b, m = sizes[first:], np.maximum(memory[first:], 1.0)
        slope, fixed = np.polyfit(b, m, 1, w=1 / m).tolist()
        # A rise of less than a byte over all sizes is a rounding error.
        slope = slope if abs(slope) * b[-1] >= 1 else 0.0
        fits.append((MemoryFit(fixed, slope), b, m))
        if np.all(np.abs(fixed + slope * b - m) <= _NOISE * m):
            return fits[-1]
    # Memory jumps, so no line is near all sizes. Use the line through all sizes.
    return fits[0] if fits else (None, sizes, memory)


def expected_bytes(
    measured: Mapping[int, float], batch_size: int, held_bytes: float
) -> float | None:
    """Predict the memory of a size from smaller ones, or return None if there are none."""
    if not measured:
        return None
    fit = fit_memory(measured)
    largest = max(measured)
    if fit is None:
        fixed = min(held_bytes, measured[largest])
        return fixed + (measured[largest] - fixed) * batch_size / largest
    return max(fit.predict(batch_size), measured[largest])
