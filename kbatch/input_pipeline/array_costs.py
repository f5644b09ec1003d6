"""What it costs to make a batch of arrays: slicing its rows, and copying them."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.input_pipeline.input_rates import CostRecord
from kbatch.timing.interleaved import interleaved
from kbatch.training.borrowed_step import held_on_device

_ROUNDS = 9
_BLOCK_S = 0.02


def array_costs(arrays: tuple[Any, ...], batch_size: int) -> tuple[CostRecord, ...]:
    """Measures slicing in order, gathering in shuffled order, and copying to the device.

    Args:
        arrays: Inputs, and perhaps targets and sample weights, of shape (examples, ...).
        batch_size: Examples in a batch.

    Returns:
        The costs; none for arrays that NumPy cannot hold, such as sparse ones.
    """
    given = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    leaves = [np.asarray(leaf) for leaf in given if hasattr(leaf, "__array__")]
    if len(leaves) < len(given) or any(leaf.ndim == 0 for leaf in leaves):
        return ()
    examples = leaves[0].shape[0]
    rows = min(batch_size, examples)
    random = np.random.default_rng(0)
    parts = {
        "slicing rows in order": lambda: _slices(leaves, int(random.integers(examples)), rows),
        "gathering rows in shuffled order": lambda: _gathered(leaves, random, rows),
        "copying the batch to the device": lambda: _copied(leaves, rows),
    }
    blocks = {name: _timed(part) for name, part in parts.items()}
    found = interleaved(blocks, until_s=np.inf, most_rounds=_ROUNDS)
    return tuple(CostRecord(name, tuple(found[name])) for name in parts)


def _slices(leaves: list[np.ndarray], start: int, rows: int) -> None:
    start = min(start, leaves[0].shape[0] - rows)
    for leaf in leaves:
        leaf[start : start + rows].copy()


def _gathered(leaves: list[np.ndarray], random: np.random.Generator, rows: int) -> None:
    chosen = random.integers(leaves[0].shape[0], size=rows)
    for leaf in leaves:
        leaf[chosen]


def _copied(leaves: list[np.ndarray], rows: int) -> None:
    for leaf in leaves:
        held_on_device(tf.constant(leaf[:rows]), widen=True)
    if tf.config.list_logical_devices("GPU"):  # A copy to it has only begun.
        tf.test.experimental.sync_devices()


def _timed(part: Callable[[], None]) -> Callable[[], float]:
    def block() -> float:
        began_s, calls = time.perf_counter(), 0
        while time.perf_counter() - began_s < _BLOCK_S:
            part()
            calls += 1
        return (time.perf_counter() - began_s) / calls

    return block
