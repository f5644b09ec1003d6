"""Steps to a target, S(B) = S_min (1 + B_crit / B).

McCandlish et al. (2018), arXiv:1812.06162, equation 2.11 solved for the steps: no batch
needs fewer than S_min steps and none fewer than E_min = S_min B_crit examples; at B_crit both
are twice their least. It is a line in 1 / B, fitted as one.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import Interval
from kbatch.analysis.lines import Line, fit_line
from kbatch.analysis.ratio import Ratio


@dataclasses.dataclass(frozen=True)
class StepsToTarget:
    """The fitted steps to a target.

    Attributes:
        line: The line that was fitted, one over the batch size against steps.
    """

    line: Line

    @property
    def fewest_steps(self) -> float:
        """S_min, the steps of an unboundedly large batch."""
        return self.line.intercept

    @property
    def fewest_steps_interval(self) -> Interval:
        """The 95 % interval of S_min."""
        return self.line.intercept_interval

    @property
    def fewest_examples(self) -> float:
        """E_min, the examples of an unboundedly small batch."""
        return self.line.slope

    @property
    def fewest_examples_interval(self) -> Interval:
        """The 95 % interval of E_min."""
        return self.line.slope_interval

    @property
    def critical_batch_size(self) -> Ratio:
        """B_crit = E_min / S_min, in examples; without a value where S_min may be 0.

        That is so when every trial was far below it: then it has a lower bound alone.
        """
        return self.line.slope_over_intercept

    @property
    def holds(self) -> bool | None:
        """Whether the trials are compatible with the curve; None where it cannot be told."""
        return self.line.departure.holds

    def steps(self, batch_size: float) -> float:
        """Gives the fitted steps to the target.

        Args:
            batch_size: B, in examples.
        """
        return self.line(1 / batch_size)


def fit_steps_to_target(batch_sizes: ArrayLike, steps: ArrayLike) -> StepsToTarget:
    """Fits the steps to a target to trials of several batch sizes.

    Compares batch sizes only where each trial had a learning rate that suits its size (Shallue
    et al. 2019, arXiv:1811.03600). Leave out the trials that missed the target.

    Args:
        batch_sizes: B of every trial, in examples; repeated for repetitions with other seeds.
        steps: Updates that every trial needed.

    Returns:
        The fit.

    Raises:
        ValueError: If there are fewer than three trials or two sizes, or a number is not
            positive.
    """
    sizes = np.asarray(batch_sizes, float)
    if not np.all(np.isfinite(sizes) & (sizes > 0)):
        raise ValueError(
            f"`batch_sizes` must be positive and finite. Received: batch_sizes={batch_sizes}."
        )
    return StepsToTarget(fit_line(1 / sizes, steps))
