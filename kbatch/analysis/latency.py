"""Latency of inference against batch size, t(b) = (b + n_half) / r_inf.

Hockney and Jesshope (1988), Parallel Computers 2, section 1.3.2: r_inf is the throughput of an
unboundedly large batch, and a batch of n_half reaches half of it. It is the line t = a + c b
with c = 1 / r_inf and a = n_half / r_inf. Where the measurements leave the line by more than
their noise, a monotone interpolation of them takes its place.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.latency_curve import LatencyCurve, fit_latency_curve
from kbatch.analysis.lines import Line, fit_line
from kbatch.analysis.ratio import Ratio, ratio_of_estimates


@dataclasses.dataclass(frozen=True)
class Latency:
    """A fitted latency.

    Attributes:
        line: The line through all measurements, batch size in examples against seconds.
        curve: The interpolation of the same measurements.
    """

    line: Line
    curve: LatencyCurve

    @property
    def follows_line(self) -> bool:
        """Whether the line answers questions: nothing speaks against it, and it rises."""
        return self.line.departure.holds is not False and self.line.slope_interval.low > 0

    @property
    def peak_throughput(self) -> Ratio:
        """r_inf, in examples per second; without a value where the line may be flat."""
        covariance = np.diag([0.0, self.line.covariance[1, 1]])
        return ratio_of_estimates(
            1.0,
            self.line.slope,
            covariance=covariance,
            degrees_of_freedom=self.line.degrees_of_freedom,
        )

    @property
    def half_peak_batch_size(self) -> Ratio:
        """n_half, in examples; without a value where the line may be flat."""
        return self.line.intercept_in_x

    def latency_s(self, batch_size: float) -> float:
        """Gives the latency of a batch size by the line, or by the curve where no line holds.

        Args:
            batch_size: b, in examples.

        Returns:
            The latency, in seconds.

        Raises:
            ValueError: If no line holds and the size lies outside the measured ones.
        """
        return self.line(batch_size) if self.follows_line else self.curve.latency_s(batch_size)


def fit_latency(batch_sizes: ArrayLike, latencies_s: ArrayLike) -> Latency:
    """Fits the latency of one call path to measurements at several batch sizes.

    The latencies may be medians or another quantile of rounds of calls, one value a round;
    rounds that visit the sizes in shuffled order keep a machine's drift out of the line.

    Example:

    >>> latency = fit_latency([1, 2, 4, 8] * 2, [5e-3, 6e-3, 8e-3, 12e-3] * 2)
    >>> latency.peak_throughput.value, latency.half_peak_batch_size.value
    (1000.0, 4.0)

    Args:
        batch_sizes: Batch size of every measurement, in examples; repeated for repeated ones.
        latencies_s: Latency of every measurement, in seconds.

    Returns:
        The fit.

    Raises:
        ValueError: If there are fewer than three measurements or two sizes, or a number is not
            positive.
    """
    return Latency(fit_line(batch_sizes, latencies_s), fit_latency_curve(batch_sizes, latencies_s))
