"""Memory that the host and its control group leave to this process."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import psutil


def available_bytes() -> int:
    """Return how many bytes this process may still take of the host and of its control group."""
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


# Version 1 writes a number near 2**63 for no limit.
_NO_LIMIT_BYTES = 2**60


@dataclasses.dataclass(frozen=True)
class ControlGroup:
    """What the control groups of a process allow.

    Attributes:
        memory_limit_bytes: The smallest memory limit, None without one.
        memory_left_bytes: The least that a limit leaves free, None without one.
        cpu_quota: The smallest processor time, in processors, None without a quota.
    """

    memory_limit_bytes: int | None
    memory_left_bytes: int | None
    cpu_quota: float | None


def read_control_group(
    root: Path = Path("/sys/fs/cgroup"), membership: str | None = None
) -> ControlGroup:
    """Read the limits of the groups that a process is in, in versions 1 and 2."""
    if membership is None:
        file = Path("/proc/self/cgroup")
        membership = file.read_text(encoding="utf-8") if file.exists() else ""
    folders = _folders(root, membership, "memory")
    limits = [_memory_limit(folder) for folder in folders]
    left = [_memory_left(folder) for folder in folders]
    quotas = [_cpu_quota(folder) for folder in _folders(root, membership, "cpu")]
    return ControlGroup(
        memory_limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        memory_left_bytes=min((free for free in left if free is not None), default=None),
        cpu_quota=min((quota for quota in quotas if quota is not None), default=None),
    )


def _folders(root: Path, membership: str, controller: str) -> list[Path]:
    """List the folders of the process's groups and of those above them."""
    folders = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's, while only the root is mounted.
        folders += [base / part for part in (group, *group.parents)]
    return folders


def _memory_limit(folder: Path) -> int | None:
    words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
    if not words or not words[0].isdigit() or int(words[0]) >= _NO_LIMIT_BYTES:
        return None
    return int(words[0])


def _memory_left(folder: Path) -> int | None:
    limit = _memory_limit(folder)
    words = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
    if limit is None or not words or not words[0].isdigit():
        return None
    return max(0, limit - int(words[0]))


def _cpu_quota(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    if not words:
        words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
