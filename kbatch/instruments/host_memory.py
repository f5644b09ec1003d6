"""The memory that the host and its control group leave to this process."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# (limit, usage) in the second and in the first version of control groups.
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Tells how many bytes this process may still take.

    Args:
        cgroup: Folder of the process's control group.

    Returns:
        The smaller of what the host has left and what the control group leaves.
    """
    left = [psutil.virtual_memory().available]
    for limit_name, usage_name in _FILES:
        limit, usage = _number(cgroup / limit_name), _number(cgroup / usage_name)
        if limit is not None and usage is not None:
            left.append(max(0, limit - usage))
    return min(left)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" for no limit.
