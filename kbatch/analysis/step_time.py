"""The time of a training step, t = a + b B: an overhead and a time per example."""

import dataclasses

from numpy.typing import ArrayLike

from kbatch.analysis.intervals import Interval
from kbatch.analysis.lines import Line, fit_line
from kbatch.analysis.ratio import Ratio


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A fitted step time.

    Attributes:
        line: The line that was fitted, batch size in examples against seconds.
    """

    line: Line

    @property
    def overhead_s(self) -> float:
        """a, in seconds a step."""
        return self.line.intercept

    @property
    def overhead_interval_s(self) -> Interval:
        """The 95 % interval of a, in seconds a step."""
        return self.line.intercept_interval

    @property
    def per_example_s(self) -> float:
        """b, in seconds an example."""
        return self.line.slope

    @property
    def per_example_interval_s(self) -> Interval:
        """The 95 % interval of b, in seconds an example."""
        return self.line.slope_interval

    @property
    def overhead_examples(self) -> Ratio:
        """The examples whose time equals the overhead, a / b: half the peak throughput."""
        return self.line.intercept_in_x

    @property
    def holds(self) -> bool | None:
        """Whether the measurements are compatible with a line; None where it cannot be told."""
        return self.line.departure.holds

    def step_time_s(self, batch_size: float) -> float:
        """Gives the fitted seconds of a step.

        Args:
            batch_size: B, in examples.
        """
        return self.line(batch_size)


def fit_step_time(batch_sizes: ArrayLike, step_times_s: ArrayLike) -> StepTime:
    """Fits the time of a step to measurements at several batch sizes.

    Assumes errors relative to the time itself. Measurements in shuffled rounds, each size once
    a round, give independent repetitions; repetitions of one size in a row share its hiccups.

    Args:
        batch_sizes: B of every measurement, in examples; repeated for repeated measurements.
        step_times_s: Time of the step of every measurement, in seconds.

    Returns:
        The fit.

    Raises:
        ValueError: If there are fewer than three measurements or two sizes, or a number is not
            positive.
    """
    return StepTime(fit_line(batch_sizes, step_times_s))
