"""Statistical efficiency, goodput, and the number of steps to a target, by batch size.

With noise scale B_noise and a base batch size M0 (Qiao et al. 2021, Pollux, OSDI, section 3.1):

    efficiency(B) = (B_noise + M0) / (B_noise + B)      progress of an example, relative to M0
    goodput(B) = B / t(B) * efficiency(B)               in examples of batch size M0 per second

The steps to a target are S(B) = S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11 solved for the steps). Every batch size needs at least S_min steps and at least
E_min = S_min B_crit examples. At B_crit both are twice their minimum. The curve is a line in 1 / B
and is fitted as one.
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
    """Compute the progress per example, relative to the progress at a base batch size.

    The formula is `(noise_scale + base_batch_size) / (noise_scale + batch_size)` (Qiao et al. 2021,
    Pollux, OSDI, section 3.1). It assumes a learning rate that suits each batch size.

    Example:

    >>> statistical_efficiency(192, noise_scale=64, base_batch_size=64)
    0.5

    Args:
        batch_size: Float. Batch size, in examples.
        noise_scale: Float. Gradient noise scale, in examples.
        base_batch_size: Float. Batch size at which the efficiency is 1, in examples.

    Returns:
        The efficiency as a `float`.

    Raises:
        ValueError: If a size is not positive, or if the noise scale is negative or not finite.
    """
    _check_positive(batch_size=batch_size, base_batch_size=base_batch_size)
    if not 0 <= noise_scale < math.inf:
        raise ValueError(
            f"`noise_scale` must be finite and not negative. Received: {noise_scale=}."
        )
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)


def goodput(
    batch_size: float, step_time_s: float, *, noise_scale: float, base_batch_size: float
) -> float:
    """Compute the throughput times the statistical efficiency.

    The time to a target is inversely proportional to the goodput (Qiao et al. 2021, Pollux, OSDI,
    section 3.1). The ratio between two batch sizes does not depend on the base batch size.

    Example:

    >>> goodput(192, 0.5, noise_scale=64, base_batch_size=64)
    192.0

    Args:
        batch_size: Float. Batch size, in examples.
        step_time_s: Float. Seconds of a training step of this batch size.
        noise_scale: Float. Gradient noise scale, in examples.
        base_batch_size: Float. Batch size at which the efficiency is 1, in examples.

    Returns:
        The goodput as a `float`, in examples of the base batch size per second.

    Raises:
        ValueError: If a size or the time is not positive, or if the noise scale is negative or not
            finite.
    """
    _check_positive(step_time_s=step_time_s)
    sizes = {"noise_scale": noise_scale, "base_batch_size": base_batch_size}
    return batch_size / step_time_s * statistical_efficiency(batch_size, **sizes)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive and finite. Received: {name}={value}.")


class StepsToTarget(NamedTuple):
    """The fitted steps to a target, S(B) = fewest_steps + fewest_examples / B."""

    fewest_steps: float  #: S_min, the limit for an infinitely large batch.
    fewest_examples: float  #: E_min, the limit for an infinitely small batch.
    #: B_crit = E_min / S_min, in examples. If S_min may be 0, only a lower bound is known.
    critical_batch_size: Estimate[float | None]
    holds: bool | None  #: Whether the trials fit the curve within their noise; None if unknown.

    def steps(self, batch_size: float) -> float:
        """Return the fitted steps to the target at `batch_size` examples."""
        return self.fewest_steps + self.fewest_examples / batch_size


def fit_steps_to_target(batch_sizes: ArrayLike, steps: ArrayLike) -> StepsToTarget:
    """Fit the steps to a target to trials of several batch sizes, by the formula of this module.

    The fit compares batch sizes only if each trial had a learning rate that suits its size (Shallue
    et al. 2019, arXiv:1811.03600). Leave out the trials that missed the target.

    Example:

    >>> fit = fit_steps_to_target([32, 64, 128, 256], [500.0, 300.0, 200.0, 150.0])
    >>> round(fit.fewest_steps), round(fit.critical_batch_size.value)
    (100, 128)

    Args:
        batch_sizes: Array of numbers: the batch size of each trial, in examples.
        steps: Array of numbers: the optimizer updates that each trial needed to reach the target.

    Returns:
        A `StepsToTarget`.

    Raises:
        ValueError: If a number is not positive and finite, or if there are fewer than three trials
            or fewer than two batch sizes.
    """
    sizes, counts = np.asarray(batch_sizes, float), np.asarray(steps, float)
    if sizes.shape != counts.shape or not np.all(
        (sizes > 0) & (counts > 0) & np.isfinite(sizes * counts)
    ):
        raise ValueError(
            "`batch_sizes` and `steps` must be positive and finite, with one value per trial. "
            f"Received: batch_sizes={batch_sizes}, steps={steps}."
        )
    line = fit_line(1 / sizes, counts)
    return StepsToTarget(line.intercept, line.slope, line.slope_over_intercept, line.holds)
