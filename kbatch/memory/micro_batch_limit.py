"""The record of what a search learnt when a micro-batch that fitted ran out of memory after all."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MicroBatchLimit:
    """The largest micro-batch that training is tried with from then on.

    Attributes:
        micro_batch_size: The size, in examples.
    """

    micro_batch_size: int
