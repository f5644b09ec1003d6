"""One long reading of a pipeline before the rounds: what short blocks of it would not show."""

import time
from statistics import fmean
from typing import Any, NamedTuple

from kbatch.input_pipeline.held_batches import HeldBatches
from kbatch.input_pipeline.input_rates import LongRunRecord
from kbatch.input_pipeline.long_run import long_run
from kbatch.training.borrowed_step import rows_of
from kbatch.training.data.batch_source import BatchSource
from kbatch.training.data.batch_stream import BatchStream

# A pause as long as the longest so far would change the rate by less than this share.
_PAUSE_SHARE = 0.2
# So long it goes on after a late first batch: a shuffle buffer is drained much faster than filled.
_BEYOND_FIRST = 1.5
# So many batches tell whether they grow.
_MANY = 16
_GROWN = 1.3


class Epoch(NamedTuple):
    """How long the data are.

    Attributes:
        batches: Batches in an epoch.
        duration_s: Seconds that the pipeline alone takes for them, with its start.
    """

    batches: int
    duration_s: float


class InputPass(NamedTuple):
    """What a long reading gave.

    Attributes:
        record: What was counted.
        batches: Some batches of the first epoch that stand for those that were read, see
            `HeldBatches`.
        epoch: How long the data are, None where no end was reached.
        duration_s: Seconds that it took.
        batch_numbers: Numbers in a batch on average.
        notes: What a reader of the numbers must know.
    """

    record: LongRunRecord
    batches: tuple[Any, ...]
    epoch: Epoch | None
    duration_s: float
    batch_numbers: float
    notes: tuple[str, ...]


def read_pass(source: BatchSource, *, least_s: float, most_s: float) -> InputPass:
    """Reads a pipeline from its start, until pauses as long as the longest matter little.

    Args:
        source: Where the batches come from.
        least_s: Seconds that it lasts at least; two batches are read in any case.
        most_s: Seconds after which it ends, half as long again as the first batch took at least.

    Raises:
        InputError: If the data are empty or raise an error.
    """
    rows: list[int] = []
    arrivals_s: list[float] = []
    epochs: list[int] = []
    held = HeldBatches()
    longest_s, began_s = 0.0, time.perf_counter()
    with BatchStream(source) as stream:
        while True:
            batch = stream.next()
            arrived_s = time.perf_counter() - began_s
            longest_s = max(longest_s, arrived_s - (arrivals_s[-1] if arrivals_s else 0.0))
            rows.append(rows_of(batch))
            arrivals_s.append(arrived_s)
            epochs.append(stream.epochs)
            if stream.epochs == 0:
                held.add(batch)
            even = stream.epochs > 0 or longest_s <= _PAUSE_SHARE * arrived_s
            over = arrived_s >= max(most_s, _BEYOND_FIRST * arrivals_s[0])
            if len(rows) > 1 and (over or (even and arrived_s >= least_s)):
                break
    counted = long_run(rows, arrivals_s, epochs=epochs)
    first = epochs.count(0)
    return InputPass(
        LongRunRecord(counted, arrivals_s[0]),
        held.chosen(whole=first < len(rows)),
        Epoch(first, arrivals_s[first] - arrivals_s[0]) if first < len(rows) else None,
        arrivals_s[-1],
        fmean(held.elements),
        _growth_note(held.elements),
    )


def _growth_note(elements: list[int]) -> tuple[str, ...]:
    """Says where batches grow or shrink on the way: what follows may go on so."""
    if len(elements) < _MANY:
        return ()
    half = len(elements) // 2
    ratio = sum(elements[-half:]) / max(1, sum(elements[:half]))
    if 1 / _GROWN < ratio < _GROWN:
        return ()
    word = "larger" if ratio > 1 else "smaller"
    return (
        f"Batches become {word}: of {len(elements)} that were read, the second half holds "
        f"{ratio:.2g} times as much as the first. The verdict is that of these batches, not of "
        "what comes later in the data.",
    )
