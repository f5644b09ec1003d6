"""What a batch size is worth: statistical efficiency, goodput and steps to a target.

With noise scale B_noise and a base batch size M0 (Qiao et al. 2021, Pollux, OSDI, section 3.1):

    efficiency(B) = (B_noise + M0) / (B_noise + B)      progress of an example, relative to M0
    goodput(B) = B / t(B) * efficiency(B)               in examples of batch size M0 a second

Steps to a target are S(B) = S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11 solved for the steps): no batch needs fewer than S_min steps and none fewer than
E_min = S_min B_crit examples; at B_crit both are twice their least. It is a line in 1 / B, fitted
as one.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.scaling_curve import fit_line


def statistical_efficiency(
    batch_size: float, *, noise_scale: float, base_batch_size: float
) -> float:
    """Compute the progress of an example relative to that at a base batch size M0.

    Assumes a learning rate that suits each size. B, B_noise and M0 are in examples.

    >>> statistical_efficiency(192, noise_scale=64, base_batch_size=64)
    0.5

    Raises:
        ValueError: If a size is not positive or the noise scale is negative or not finite.
    """
    _check_positive(batch_size=batch_size, base_batch_size=base_batch_size)
    if not 0 <= noise_scale < math.inf:
        raise ValueError(
            "`noise_scale` must be a finite number that is not negative: an unresolved one gives "
            f"no efficiency. Received: noise_scale={noise_scale}."
        )
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)


def goodput(
    batch_size: float, step_time_s: float, *, noise_scale: float, base_batch_size: float
) -> float:
    """Compute the throughput times the statistical efficiency, in examples of size M0 per second.

    Takes the seconds of a step of B examples, and sizes in examples. Ratios of goodput between
    batch sizes do not depend on M0; times to a target are inversely proportional to it.

    >>> goodput(192, 0.5, noise_scale=64, base_batch_size=64)
    192.0

    Raises:
        ValueError: If a size or the time is not positive, or the noise scale is negative.
    """
    _check_positive(step_time_s=step_time_s)
    efficiency = statistical_efficiency(
        batch_size, noise_scale=noise_scale, base_batch_size=base_batch_size
    )
    return batch_size / step_time_s * efficiency


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive and finite. Received: {name}={value}.")


class StepsToTarget(NamedTuple):
    """The fitted steps to a target."""

    fewest_steps: float  #: S_min, the steps of an unboundedly large batch.
    fewest_examples: float  #: E_min, the examples of an unboundedly small batch.
    #: B_crit = E_min / S_min, in examples; a lower bound alone where S_min may be 0.
    critical_batch_size: Estimate[float | None]
    holds: bool | None  #: Whether the trials fit the curve; None where it is not known.

    def steps(self, batch_size: float) -> float:
        """Return the fitted steps to the target at B examples."""
        return self.fewest_steps + self.fewest_examples / batch_size


def fit_steps_to_target(batch_sizes: ArrayLike, steps: ArrayLike) -> StepsToTarget:
    """Fit the steps to a target to trials of several batch sizes, one value a trial.

    Compares batch sizes only where each trial had a learning rate that suits its size (Shallue
    et al. 2019, arXiv:1811.03600). Leave out the trials that missed the target.

    Raises:
        ValueError: If a number is not positive, or there are fewer than three trials of two sizes.
    """
    sizes, made = np.asarray(batch_sizes, float), np.asarray(steps, float)
    if sizes.shape != made.shape or not np.all(
        (sizes > 0) & (made > 0) & np.isfinite(sizes * made)
    ):
        raise ValueError(
            "`batch_sizes` and `steps` must be positive and finite, one each a trial. "
            f"Received: batch_sizes={batch_sizes}, steps={steps}."
        )
    line = fit_line(1 / sizes, made)
    return StepsToTarget(line.intercept, line.slope, line.slope_over_intercept, line.holds)
