"""The memory that the host and its control group leave to this process, and what it takes."""

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

import psutil

from kbatch.device.control_group import read_control_group


def available_bytes() -> int:
    """Tells how many bytes this process may still take of the host and of its control group."""
    available, left = psutil.virtual_memory().available, read_control_group().memory_left_bytes
    return available if left is None else min(available, left)


class ResidentMemory(NamedTuple):
    """Bytes of the host's memory that this process takes.

    Attributes:
        current: Now.
        peak: The most since the peak was reset; those of now where the host keeps no peak.
    """

    current: int
    peak: int


def read_resident_memory() -> ResidentMemory:
    """Read how much of the host's memory this process takes."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text()
        found = [re.search(rf"^{name}:\s+(\d+) kB$", text, re.M) for name in ("VmRSS", "VmHWM")]
        if all(found):
            return ResidentMemory(*(1024 * int(one[1]) for one in found if one))
    resident = psutil.Process().memory_info().rss
    return ResidentMemory(resident, resident)


def reset_resident_peak() -> None:
    """Begin a new peak at what this process takes now, where the host keeps one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
