"""The search for the largest batch whose memory lies in a window, and the line through memory.

Memory M(b) of a batch of b examples is a fixed part and a part per example, or the larger of
several such lines: the optimizer's phase at first, the activations' later. So

    M(b) <= M(a) b / a        for b > a

which makes a second size safe after the first. From two sizes on a secant looks for the middle
of the window. Until the measured rise is a good part of the way that remains, it is not trusted
all the way: an activation phase that is still hidden would overshoot.

On a busy machine the peaks of one size differ by 10 % from run to run. A size takes what its
highest reading took, and a rise too steep for the examples between two sizes is read again before
it is taken for a jump. How well this does is measured in `benchmarks/max_batch_search.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from kbatch.analysis.intervals import UNRESOLVED, Estimate, ratio_of_estimates
from kbatch.records.notes import Note

# Lower and upper share of the limit that a batch may fill.
MEMORY_WINDOW = (0.80, 0.90)
# A size is never further than this many times the size that is safe.
_BEYOND_SAFE = 2.0
# While the last rise is less than this share of the remaining way, only part of it is gone.
_TRUSTED_RISE = 0.7
_FIRST_PART = 0.55
# A bracket this narrow, as a share of the size, is not narrowed: memory jumps in it.
_TIGHT = 0.02
# Spread of one measurement, as a share of its value.
_SPREAD = 0.02
# Spread on a machine in use, before it is measured, and how many readings that counts as.
_PRIOR_SPREAD, _READINGS = 0.03, 4
# A rise of so many times what the examples of a bracket take on average may be one of the readings.
_STEEP, _MOST_READINGS = 2.0, 3


# How a run of a batch size ended, and what it was made for.
Outcome = Literal["fits", "above_window", "out_of_memory"]
Purpose = Literal["search", "fresh_process", "mixed_sizes"]


# The largest measured size that is not above the window, None if not even one example fits, and why
# it is this one.
MaxBatchAnswer = tuple[int | None, Note]


class MaxBatchSearch:
    """Search for a batch size whose measured memory lies in a window, with few measurements."""

    def __init__(
        self,
        *,
        limit_bytes: float,
        memory_window: tuple[float, float],
        max_batch_size: int | None = None,
        examples: int | None = None,  # Of the data.
    ):
        low, high = memory_window
        self.memory_bytes: dict[int, float | None] = {}  # The most by size; None: it ran out.
        self._readings: Counter[int] = Counter()
        self._limit, self._low, self._high = limit_bytes, low * limit_bytes, high * limit_bytes
        self._middle = (self._low + self._high) / 2
        self.cap = int(limit_bytes)
        self.cap_reason = Note.of("memory_hardly_grows")
        for size, code in ((max_batch_size, "reached_most"), (examples, "reached_data")):
            if size is not None and size <= self.cap:
                self.end_at(size, code)

    def ask(self) -> int | None:
        """Return the size to measure next, None once there is an answer."""
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
        """Take the bytes of a size, again if it was run again; None where memory ran out."""
        most = self.memory_bytes.get(batch_size, 0.0)
        self.memory_bytes[batch_size] = (
            None if memory_bytes is None or most is None else max(most, memory_bytes)
        )
        self._readings[batch_size] += 1

    def end_at(self, batch_size: int, code: str) -> None:
        """End the sizes at one beyond which none can be run; the code of a note says why."""
        self.cap, self.cap_reason = batch_size, Note.of(code)

    @property
    def answer(self) -> MaxBatchAnswer | None:
        """What was found, None while there are sizes to measure."""
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
        """Return the largest size below the window, 0 if none is, and the smallest above it."""
        below = max((b for b, m in self._fitting.items() if m < self._low), default=0)
        return below, min((b for b in self.memory_bytes if b > below), default=None)

    def _reason_to_end(self, below: int, above: int | None) -> Note | None:
        """Say why the search ends below the window, None if it goes on."""

        def share(memory: float) -> str:
            return f"{100 * memory / self._limit:.0f} %"

        if below == 0:
            one = self.memory_bytes[1]
            needs = "more than there is" if one is None else f"{share(one)} of memory"
            return Note.of("one_example_above", needs=needs)
        if below == self.cap:
            return self.cap_reason
        if above is None or not _is_tight(below, above):
            return None
        beyond = self.memory_bytes[above]
        reached = "run out of it" if beyond is None else f"reach {share(beyond)}"
        code = "next_above" if above == below + 1 else "memory_jumps"
        needs = share(self._fitting[below])
        return Note.of(code, below=below, needs=needs, above=above, reached=reached)

    def _is_unsure(self, below: int, above: int | None) -> bool:
        """Return whether memory jumps in a tight bracket, unless the smaller size was read low."""
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
                return (below + above) / 2  # A slope has missed the window already: memory jumps.
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
        # Above the bracket it ran out of memory.
        return proposal if above is None else min(proposal, (below + above) / 2)


def _is_tight(below: int, above: int) -> bool:
    return above - below <= max(1, _TIGHT * below)


# Share of the memory up to which a batch size is run that was not probed.
SURE_SHARE = 0.5


class MemoryFit(NamedTuple):
    """Memory M(b) = fixed + b each, fitted to measured sizes."""

    fixed_bytes: float  # Weights, slots, workspace: what does not depend on the batch.
    bytes_per_example: float

    def predict(self, batch_size: float) -> float:
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_within(self, most_bytes: float) -> float:
        """Return the batch size up to which the line keeps within so many bytes, 0 if flat."""
        if not self.bytes_per_example > 0:
            return 0.0
        return (most_bytes - self.fixed_bytes) / self.bytes_per_example


def memory_curve(memory_bytes: Mapping[int, float]) -> Callable[[float], float] | None:
    """Return the bytes of any batch size by the line through two measured sizes or more.

    They are at least what smaller sizes took that lie above the line.
    """
    fit = fit_memory(memory_bytes)
    if fit is None:
        return None
    above = {b: m for b, m in memory_bytes.items() if m > (1 + _NOISE) * fit.predict(b)}
    return lambda batch_size: max(
        fit.predict(batch_size), *(m for b, m in above.items() if b <= batch_size), 0.0
    )


def predict_memory(memory_bytes: Mapping[int, float], batch_size: int) -> float:
    """Estimate the bytes of a batch size from the line through two measured sizes or more."""
    if (curve := memory_curve(memory_bytes)) is None:
        raise ValueError(
            "A line needs the memory of two sizes: measure more of them, with memory. "
            f"Received: memory of the sizes {sorted(memory_bytes)}."
        )
    return curve(batch_size)


# Peaks of one size differ by up to this share from run to run: a line that is farther off is wrong.
_NOISE = 0.1
# A line through fewer octaves of sizes than one shows the noise of the peaks, or a jump.
_LEAST_SPAN = 2


def fit_memory(memory_bytes: Mapping[int, float]) -> MemoryFit | None:
    """Fit a line by least squares, each size weighted by 1 / M(b)^2.

    Memory is the larger of several lines, and the last one holds for large sizes. So the smallest
    sizes are left out until the line is near all others.
    """
    return _fit_to_largest(memory_bytes)[0]


def largest_within(memory_bytes: Mapping[int, float], most_bytes: float) -> Estimate[float | None]:
    """Return the batch size at which the line reaches `most_bytes`, with its interval.

    How much peaks err is estimated from the residuals and from what earlier searches showed, which
    counts as four readings. Fieller's theorem gives the interval. Measured sizes bound it.
    """
    fit, sizes, memory = _fit_to_largest(memory_bytes)
    if fit is None or not fit.bytes_per_example > 0:
        return UNRESOLVED
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / memory[:, None]
    unscaled, freedom = np.linalg.inv(design.T @ design), len(sizes) - 2 + _READINGS
    residuals = design @ np.array(fit) - 1
    variance = float(residuals @ residuals + _READINGS * _PRIOR_SPREAD**2) / freedom
    found = ratio_of_estimates(
        most_bytes - fit.fixed_bytes,
        fit.bytes_per_example,
        covariance=variance * unscaled * [[1, -1], [-1, 1]],
        degrees_of_freedom=freedom,
    )
    least = max((size for size, peak in memory_bytes.items() if peak <= most_bytes), default=0)
    above = (size for size, peak in memory_bytes.items() if peak > most_bytes and size > least)
    most = min(above, default=math.inf) - 1
    ends = (found.value, found.low, found.high)
    value, low, high = (None if x is None else min(max(x, least), most) for x in ends)
    return Estimate(value, low, high, n=len(sizes))


def _fit_to_largest(
    memory_bytes: Mapping[int, float],
) -> tuple[MemoryFit | None, np.ndarray, np.ndarray]:
    """Fit the line, and return the sizes that it was fitted to and their memory."""
    sizes = np.array(sorted(memory_bytes), float)
    memory = np.array([memory_bytes[int(size)] for size in sizes], float)
    fitted: list[tuple[MemoryFit | None, np.ndarray, np.ndarray]] = []
    for first in range(max(0, len(sizes) - 1)):
        if fitted and _LEAST_SPAN * sizes[first] > sizes[-1]:
            break
        # A measurement errs by a share of its value: small sizes show the fixed part, large ones
        # the slope.
        b, m = sizes[first:], np.maximum(memory[first:], 1.0)
        each, fixed = np.polyfit(b, m, 1, w=1 / m).tolist()
        # Less than a byte over all of them is rounding.
        each = each if abs(each) * b[-1] >= 1 else 0.0
        fitted.append((MemoryFit(fixed, each), b, m))
        if np.all(np.abs(fixed + each * b - m) <= _NOISE * m):
            return fitted[-1]
    # No line is near: memory jumps, and sizes close to each other say nothing about the slope.
    return fitted[0] if fitted else (None, sizes, memory)


def expected_bytes(measured: dict[int, float], batch_size: int, held_bytes: float) -> float | None:
    """Predict the memory of a size from that of smaller ones; None if there are none."""
    if not measured:
        return None
    fit = fit_memory(measured)
    largest = max(measured)
    if fit is None:
        fixed = min(held_bytes, measured[largest])
        return fixed + (measured[largest] - fixed) * batch_size / largest
    return max(fit.predict(batch_size), measured[largest])
