"""Gradient accumulation inside one Keras train step."""

from kbatch.training.accumulation.binding import (
    Accumulation,
    accumulate_gradients,
    accumulation_of,
    varying_micro_batch,
)

__all__ = ["Accumulation", "accumulate_gradients", "accumulation_of", "varying_micro_batch"]
