"""Gradient accumulation inside one Keras train step."""

from kbatch.training.accumulation.binding import (
    Accumulation,
    accumulate_gradients,
    accumulation_of,
    varying_micro_batch,
)
from kbatch.training.accumulation.halving import cut_batches, measure_moments

__all__ = [
    "Accumulation",
    "accumulate_gradients",
    "accumulation_of",
    "cut_batches",
    "measure_moments",
    "varying_micro_batch",
]
