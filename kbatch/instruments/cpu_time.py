"""Processor time of this process and its children."""

import psutil


def process_cpu_s() -> float:
    """Reads the processor seconds used so far, over all cores, running children included."""
    process = psutil.Process()
    return sum(_cpu_s(one) for one in (process, *process.children(recursive=True)))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
