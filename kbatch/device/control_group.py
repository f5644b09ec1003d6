"""What the control groups of Linux allow a process, and whom the kernel ended there."""

import contextlib
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Version 1 writes a number near 2**63 for no limit.
_NO_LIMIT_BYTES = 2**60


def read_memory_left_bytes(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read how much memory the groups of this process leave it, None without a limit."""
    left = []
    for folder in _folders(root, membership):
        limit = _numbers(folder, "memory.max", "memory.limit_in_bytes")
        used = _numbers(folder, "memory.current", "memory.usage_in_bytes")
        if limit and limit[0] < _NO_LIMIT_BYTES:
            left += [max(0, limit[0] - bytes_used) for bytes_used in used]
    return min(left, default=None)


def read_memory_kills(root: Path = _ROOT, membership: str | None = None) -> int:
    """Count the processes of this group that the kernel has killed for want of memory."""
    for folder in _folders(root, membership):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                text = (folder / name).read_text(encoding="utf-8")
                if found := re.search(r"^oom_kill (\d+)$", text, re.M):
                    return int(found[1])
    return 0


def _folders(root: Path, membership: str | None) -> list[Path]:
    """List the folders of the groups that limit memory, the innermost of each hierarchy first."""
    if membership is None:
        file = Path("/proc/self/cgroup")
        membership = file.read_text(encoding="utf-8") if file.exists() else ""
    folders = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            base = root / "memory" if controllers else root
            group = Path(path.lstrip("/"))
            # In a container the path may be the host's, while only the root is mounted.
            folders += [base / part for part in (group, *group.parents)]
    return folders


def _numbers(folder: Path, *names: str) -> list[int]:
    """Read the numbers in those of the files that exist; none where one holds a word."""
    words: list[str] = []
    for name in names:
        with contextlib.suppress(OSError):
            words += (folder / name).read_text(encoding="utf-8").split()
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []
