"""The outcomes of a training run on its validation examples, in blocks."""

import base64
import dataclasses
import zlib
from typing import Any, Self

import numpy as np

from kbatch.records.record import check_ranges

MOST_BLOCKS = 512


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """A metric of the best epoch in each block of consecutive validation examples.

    Runs that were validated on the same examples in the same order are compared block by block:
    what makes an example hard is in both and cancels. The standard error of the difference is the
    spread over blocks by the root of their number.
    """

    metric: str | None = None  # As Keras names it; None where no metric was to be had.
    epoch: int | None = None  # Number of the best one, from 0.
    examples: int | None = None  # For validation.
    block_examples: int | None = None  # Examples in a block; the last one may have fewer.
    key: str | None = None  # Fingerprint of the targets in their order: runs with one are paired.
    set_key: str | None = None  # Fingerprint of the targets in any order.
    data: str | None = None  # The values of the blocks: base64 of zlib of little-endian float32.
    reason: str | None = None  # Why there are no values, None where there are.

    def __post_init__(self):
        check_ranges(0, epoch=self.epoch)
        check_ranges(1, examples=self.examples, block_examples=self.block_examples)
        if (self.data is None) == (self.reason is None):
            raise ValueError(
                "Outcomes have either `data` or a `reason` why there are none. "
                f"Received: data={self.data!r:.60}, reason={self.reason!r}."
            )
        # Now, so that a damaged file is found where files are read: some microseconds each.
        values, (examples, size) = self.values, (self.examples or 0, self.block_examples or 1)
        if values is not None and not (
            self.key
            and 0 < len(values) == -(-examples // size) <= MOST_BLOCKS
            and np.isfinite(values).all()
        ):
            raise ValueError(
                f"`data` must hold a finite value for each of up to {MOST_BLOCKS} blocks of the "
                f"`examples`, and have a `key`. Received: {len(values)} values, {self.examples} "
                f"examples in blocks of {self.block_examples}, key={self.key!r}."
            )

    @classmethod
    def of(cls, values: np.ndarray, **fields: Any) -> Self:
        """Make the record of the values of the blocks; the other attributes go by name."""
        packed = zlib.compress(np.asarray(values, "<f4").tobytes(), 9)
        return cls(data=base64.b64encode(packed).decode(), **fields)

    @property
    def values(self) -> np.ndarray | None:
        """The metric of each block in order, float64; None where there is a `reason`."""
        if self.data is None:
            return None
        packed = base64.b64decode(self.data, validate=True)
        try:
            # One more than there may be: a damaged file may claim gigabytes.
            raw = zlib.decompressobj().decompress(packed, 4 * (MOST_BLOCKS + 1))
        except zlib.error as error:
            raise ValueError(f"`data` is damaged: {error}.") from error
        return np.frombuffer(raw, "<f4").astype(float)
