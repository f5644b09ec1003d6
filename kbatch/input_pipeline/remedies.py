"""Changes to the input pipeline, each measured in training against the pipeline as it is."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.document.section import one_line
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    InputPass,
    block_length,
    rate_of,
    training_block,
)
from kbatch.input_pipeline.changes import Change, Changes
from kbatch.input_pipeline.record import CostRecord, RemedyRecord, UntriedRecord
from kbatch.input_pipeline.rounds import WarmStep, counted
from kbatch.timing.rounds import FEWEST_ROUNDS, interleaved
from kbatch.training.data.batch_source import BatchSource
from kbatch.training.train_step import held_on_device, rows_of

_ORIGINAL = ""
# Batches that a block takes at least after the first: one to settle and one that counts.
_LATER_BATCHES = 2
# Changes are tried that might take so much longer than there is time.
_LONGER = 1.5


class Remedies(NamedTuple):
    """Changes that were tried, and those that were not.

    Attributes:
        tried: Changes with what they gave.
        untried: Changes with the reason.
    """

    tried: tuple[RemedyRecord, ...]
    untried: tuple[UntriedRecord, ...]


def try_changes(
    changes: Changes,
    source: BatchSource,
    *,
    warm: WarmStep,
    reading: InputPass,
    even: bool,
    budget_s: float,
) -> Remedies:
    """Train on each changed pipeline and on the original, in turn.

    Three rounds are made in any case: changes for which there is no time are not tried, and one
    that raises an error is left out from then on.
    """
    began_s = time.perf_counter()
    block_s = _least_block_s(reading, warm, even=even)
    given, untried = _in_time(changes, block_s, budget_s=budget_s)
    if not given:
        return Remedies((), untried)
    length = _block_length(reading, warm, contenders=len(given) + 1, budget_s=budget_s)
    if not even:
        length = BlockLength(0.0, reading.duration_s, reading.duration_s, "start")
    train = functools.partial(training_block, step=warm.step, length=length)
    failures: dict[str, str] = {}
    blocks = {c.name: _until_it_fails(c, train, failures) for c in given}
    found = interleaved(
        {_ORIGINAL: lambda: train(source)} | blocks,
        until_s=began_s + budget_s,
        most_rounds=MOST_ROUNDS,
    )
    original = rate_of([block for block in found[_ORIGINAL] if block])
    tried = [
        RemedyRecord(
            c.name, c.code, c.condition, original, rate_of([b for b in found[c.name] if b])
        )
        for c in given
        if c.name not in failures
    ]
    failed = [UntriedRecord(c.name, c.code, failures[c.name]) for c in given if c.name in failures]
    return Remedies(tuple(tried), (*untried, *failed))


def _in_time(
    changes: Changes, block_s: float, *, budget_s: float
) -> tuple[tuple[Change, ...], tuple[UntriedRecord, ...]]:
    """Pick the changes for which there is time, and describe of the others what they need."""
    most = max(0, int(_LONGER * budget_s / (FEWEST_ROUNDS * block_s)) - 1)
    needed_s = FEWEST_ROUNDS * block_s * (len(changes.tried) + 1)
    short = f"there was no time: all changes need about {needed_s:.0f} s, half of `budget_s`"
    left = (UntriedRecord(c.name, c.code, short) for c in changes.tried[most:])
    return changes.tried[:most], (*changes.untried, *left)


def _block_length(
    reading: InputPass, warm: WarmStep, *, contenders: int, budget_s: float
) -> BlockLength:
    first_batch_s = reading.record.first_batch_s
    length = block_length(budget_s, contenders=contenders, starts_s=contenders * first_batch_s)
    return counted(length, reading.epoch, first_batch_s=first_batch_s, step_s=warm.step_s)


def _least_block_s(reading: InputPass, warm: WarmStep, *, even: bool) -> float:
    if not even:
        return reading.duration_s
    read = reading.record.counted
    batch_s = rows_of(warm.batches[0]) * read.duration_s / read.examples
    return reading.record.first_batch_s + _LATER_BATCHES * (batch_s + warm.step_s)


def _until_it_fails(
    change: Change, train: Callable[[BatchSource], Block], failures: dict[str, str]
) -> Callable[[], Block | None]:
    """Make a block of a changed pipeline that keeps an error as the reason and end there."""

    def block() -> Block | None:
        if change.name in failures:
            return None
        try:
            return train(change.source)
        except Exception as error:  # Whatever the changed pipeline raises: the others go on.
            failures[change.name] = f"failed: {one_line(str(error)) or type(error).__name__}"
            return None

    return block


def not_tried(changes: Changes, reason: str) -> tuple[UntriedRecord, ...]:
    """List all changes as not tried; those that could not be made keep their own reason."""
    return (*(UntriedRecord(c.name, c.code, reason) for c in changes.tried), *changes.untried)


def with_change(changes: Changes, change: Change | UntriedRecord) -> Changes:
    """Add a change, or why there is none."""
    if isinstance(change, Change):
        return Changes((*changes.tried, change), changes.untried)
    return Changes(changes.tried, (*changes.untried, change))


_ROUNDS = 9
_BLOCK_S = 0.02


def array_costs(arrays: tuple[Any, ...], batch_size: int) -> tuple[CostRecord, ...]:
    """Measure slicing in order, gathering in shuffled order, and copying to the device."""
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
