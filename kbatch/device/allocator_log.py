"""What TensorFlow's allocator writes when it runs out of memory."""

import re
from typing import NamedTuple

_START = "ran out of memory trying to allocate"
_REQUESTED = re.compile(r"rounded to (\d+)\)")
_FREE = re.compile(r"Free\s+at \w+ of size (\d+)")
_UNTAKEN = re.compile(r"available size: ([\d.]+)(B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class FreeMemory(NamedTuple):
    """Memory that was free when an allocation failed.

    Attributes:
        requested_bytes: What the allocation asked for, in one piece.
        free_bytes: All that was free.
        largest_block_bytes: The largest free piece.
    """

    requested_bytes: int
    free_bytes: int
    largest_block_bytes: int

    @property
    def fragmented(self) -> bool:
        """Whether enough was free, in pieces too small."""
        return self.largest_block_bytes < self.requested_bytes <= self.free_bytes


def free_memory(log: str) -> FreeMemory | None:
    """Reads the free memory at the last failure in a log.

    Args:
        log: What TensorFlow wrote to stderr with `TF_CPP_MIN_LOG_LEVEL=0`.

    Returns:
        The free memory, None if no failure was written whole.
    """
    dump = log[max(log.rfind(_START), 0) :]
    requested, untaken = _REQUESTED.search(dump), _UNTAKEN.search(dump)
    if requested is None or untaken is None:
        return None
    blocks = [int(size) for size in _FREE.findall(dump)]
    blocks.append(int(float(untaken[1]) * _UNITS[untaken[2]]))
    return FreeMemory(int(requested[1]), sum(blocks), max(blocks))
