"""Gradient accumulation inside one Keras train step."""

from kbatch.training.accumulation.accumulate import (
    Accumulation,
    accumulate_gradients,
    accumulation_of,
    varying_micro_batch,
)
from kbatch.training.accumulation.whole_batch import measure_moments, sum_sparse_gradients

__all__ = [
    "Accumulation",
    "accumulate_gradients",
    "accumulation_of",
    "measure_moments",
    "sum_sparse_gradients",
    "varying_micro_batch",
]
