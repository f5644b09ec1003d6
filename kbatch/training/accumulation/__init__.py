"""Gradient accumulation inside one Keras train step."""

from kbatch.training.accumulation.binding import accumulate_gradients

__all__ = ["accumulate_gradients"]
