"""What the control group (Linux, version 2) allows a process, and whom the kernel ended there."""

import contextlib
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def read_memory_left_bytes(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read how much memory the groups of this process leave it, None without a limit."""
    left = []
    for folder in _folders(root, membership):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():  # Without a limit it is "max".
            left.append(max(0, int(limit) - int(used)))
    return min(left, default=None)


def read_memory_kills(root: Path = _ROOT, membership: str | None = None) -> int:
    """Count the processes of this group that the kernel has killed for want of memory."""
    for folder in _folders(root, membership):
        if found := re.search(r"^oom_kill (\d+)$", _text(folder / "memory.events"), re.M):
            return int(found[1])
    return 0


def _folders(root: Path, membership: str | None) -> list[Path]:
    """List the folders of the groups of this process, the innermost first."""
    membership = _text(Path("/proc/self/cgroup")) if membership is None else membership
    found = re.search(r"^0::/(.*)$", membership, re.M)
    group = Path(found[1] if found else "")
    # In a container the path may be the host's, while only the root is mounted.
    return [root / part for part in (group, *group.parents)]


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""
