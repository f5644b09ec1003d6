"""Accumulate gradients over micro-batches inside one Keras train step."""

from kbatch.training.accumulation.accumulate import Accumulation as Accumulation
from kbatch.training.accumulation.accumulate import accumulate_gradients as accumulate_gradients
from kbatch.training.accumulation.train_step import sum_sparse_gradients as sum_sparse_gradients
