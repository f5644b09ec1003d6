"""What this process takes of its host."""

from typing import NamedTuple

import psutil


class HostReading(NamedTuple):
    """What this process has taken so far; None for what the system does not tell.

    Attributes:
        cpu_s: Processor seconds of all its threads, in user and in system mode.
        resident_bytes: Its memory in RAM, in bytes.
    """

    cpu_s: float | None
    resident_bytes: int | None


def read_host(process: psutil.Process) -> HostReading:
    """Reads a process without its children: to look for those scans all processes each time."""
    try:
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except (psutil.Error, OSError):
        return HostReading(None, None)
    return HostReading(times.user + times.system, memory.rss)
