"""Changes to the input pipeline, each measured in training against the pipeline as it is."""

import functools
import time
from typing import NamedTuple

from kbatch.profiling.input_blocks import MOST_ROUNDS, block_length, rate_of, training_block
from kbatch.profiling.interleaved import interleaved
from kbatch.profiling.pipeline_changes import Change, Changes
from kbatch.records.input_rates import RemedyRecord, UntriedRecord
from kbatch.training.batch_source import BatchSource
from kbatch.training.batch_stream import first_batch
from kbatch.training.borrowed_step import BorrowedStep
from kbatch.training.errors import InputError

_ORIGINAL = ""


class Remedies(NamedTuple):
    """Changes that were tried, and those that were not.

    Attributes:
        tried: Changes with what they gave.
        untried: Changes with the reason.
    """

    tried: tuple[RemedyRecord, ...]
    untried: tuple[UntriedRecord, ...]


def try_changes(
    changes: Changes, source: BatchSource, step: BorrowedStep, budget_s: float
) -> Remedies:
    """Trains on each changed pipeline and on the original, in turn.

    Args:
        changes: What to try.
        source: The pipeline as it is.
        step: The train step.
        budget_s: Seconds for all of it; three rounds are made in any case.
    """
    began_s = time.perf_counter()
    works, untried = [], list(changes.untried)
    for change in changes.tried:
        try:
            first_batch(change.source)
            works.append(change)
        except InputError as error:
            reason = f"tried, and it raised an error: {error}"
            untried.append(UntriedRecord(change.name, change.code, reason))
    if not works:
        return Remedies((), tuple(untried))
    start_s = first_batch(source)[1]
    sources = {_ORIGINAL: source} | {change.name: change.source for change in works}
    length = block_length(budget_s, contenders=len(sources), starts_s=len(sources) * start_s)
    blocks = {
        name: functools.partial(training_block, one, step, length) for name, one in sources.items()
    }
    found = interleaved(blocks, until_s=began_s + budget_s, most_rounds=MOST_ROUNDS)
    original = rate_of(found[_ORIGINAL])
    tried = [
        RemedyRecord(c.name, c.code, c.condition, original, rate_of(found[c.name])) for c in works
    ]
    return Remedies(tuple(tried), tuple(untried))


def not_tried(changes: Changes, reason: str) -> tuple[UntriedRecord, ...]:
    """Lists all changes as not tried; those that could not be made keep their own reason."""
    return (*(UntriedRecord(c.name, c.code, reason) for c in changes.tried), *changes.untried)


def with_change(changes: Changes, change: Change | UntriedRecord) -> Changes:
    """Adds a change, or why there is none."""
    if isinstance(change, Change):
        return Changes((*changes.tried, change), changes.untried)
    return Changes(changes.tried, (*changes.untried, change))
