"""Batches without end, from data that start again after each epoch."""

import contextlib
import re
import time
from typing import Any

from kbatch.errors import InputError
from kbatch.training.data.batch_source import BatchSource


class BatchStream:
    """Reads a source batch by batch; at the end of the data it starts the next epoch.

    Use it in a `with` statement: what runs behind it ends with it.

    Args:
        source: Where the batches come from.
        read_before: Whether the source has given batches before.

    Attributes:
        batches: Batches so far.
        epochs: Epochs that have ended.
    """

    def __init__(self, source: BatchSource, *, read_before: bool = False):
        self._source = source
        self._read_before = read_before
        self._exits = contextlib.ExitStack()
        self._iterator: Any = None
        self._of_epoch = 0
        self.batches = 0
        self.epochs = 0

    def __enter__(self) -> "BatchStream":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def next(self) -> Any:
        """Gives the next batch.

        Raises:
            InputError: If an epoch has no batches, or the data raise an error.
        """
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
            except Exception as error:
                raise self._broken(error) from error
            else:
                self.batches += 1
                self._of_epoch += 1
                return batch

    def _end_epoch(self) -> None:
        if self._of_epoch == 0:
            raise InputError(_empty(again=self._read_before or self.epochs > 0))
        self.epochs += 1
        self._stop()
        self._start()

    def _start(self) -> None:
        self._of_epoch = 0
        try:
            self._iterator = self._exits.enter_context(self._source.open())
        except InputError:
            raise
        except Exception as error:  # A PyDataset makes its first batches here.
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> InputError:
        return InputError(
            f"The data raised an error at batch {self._of_epoch} (the first is 0): mend them so "
            "that they can be read from start to end. Received: "
            f"{type(error).__name__}: {_first_line(error)}"
        )

    def _stop(self) -> None:
        # The iterator's threads end with its last reference.
        self._iterator = None
        self._exits.close()


def first_batch(source: BatchSource) -> tuple[Any, float]:
    """Reads the first batch of a source.

    Returns:
        The batch, and the seconds it took from the start of the pipeline.

    Raises:
        InputError: If there is none.
    """
    began_s = time.perf_counter()
    with BatchStream(source) as stream:
        return stream.next(), time.perf_counter() - began_s


def _empty(*, again: bool) -> str:
    if again:
        return (
            "The data gave batches in the first epoch and none in the second, as an iterator does "
            "that was used up: let the data function make a new generator each time it is called. "
            "Received: an empty second epoch."
        )
    return "There are no batches to measure: give data with at least one. Received: no batch."


def _first_line(error: Exception) -> str:
    # TensorFlow puts the node of its graph before the words.
    words = re.sub(r"\{\{[^{}]*\}\}", "", str(error))
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
