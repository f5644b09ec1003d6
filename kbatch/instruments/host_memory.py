"""The memory that the host and its control group leave to this process."""

import psutil

from kbatch.instruments.control_group import read_control_group


def available_bytes() -> int:
    """Tells how many bytes this process may still take of the host and of its control group."""
    available, left = psutil.virtual_memory().available, read_control_group().memory_left_bytes
    return available if left is None else min(available, left)
