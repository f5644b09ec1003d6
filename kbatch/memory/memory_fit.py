"""The line through measured memory: a fixed part and a part per example."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Share of the memory up to which a batch size is run that was not probed.
SURE_SHARE = 0.5


class MemoryFit(NamedTuple):
    """Memory M(b) = fixed + b each, fitted to measured sizes.

    Attributes:
        fixed_bytes: Part that does not depend on the batch: weights, slots, workspace.
        bytes_per_example: Part of one example.
        fixed_error_bytes: Standard error of the fixed part, None from fewer than three sizes.
        bytes_per_example_error: Standard error of the other one, likewise.
    """

    fixed_bytes: float
    bytes_per_example: float
    fixed_error_bytes: float | None
    bytes_per_example_error: float | None

    def predict(self, batch_size: int) -> float:
        """Gives the bytes that the line has at a batch size."""
        return self.fixed_bytes + batch_size * self.bytes_per_example

    def largest_within(self, most_bytes: float) -> float:
        """Return the batch size up to which the line keeps within so many bytes, 0 if flat."""
        if not self.bytes_per_example > 0:
            return 0.0
        return (most_bytes - self.fixed_bytes) / self.bytes_per_example


def fit_memory(memory_bytes: Mapping[int, float]) -> MemoryFit | None:
    """Fits a line by least squares, each size weighted by 1 / M(b)^2.

    A measurement errs by a share of its value, so small sizes tell the fixed part and large ones
    the slope.

    Args:
        memory_bytes: Measured bytes of each batch size.

    Returns:
        The line, None from fewer than two sizes.
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
