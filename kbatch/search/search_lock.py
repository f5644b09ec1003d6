"""One search at a time in a project directory: a lock that ends with its process."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kbatch.errors import InputError

if sys.platform != "win32":
    import fcntl

LOCK_NAME = "kbatch.lock"


@contextlib.contextmanager
def search_lock(project: Path) -> Iterator[None]:
    """Hold the lock of a project directory.

    The operating system drops it with the process, however that ends. Where the file system has no
    locks, nothing is held.

    Raises:
        InputError: If another search holds it, with its process.
    """
    descriptor = _opened(project)
    if descriptor is None:
        yield
        return
    try:
        if not _flock(descriptor, take=True):
            raise InputError(
                f"Another search runs in the project directory {project}: wait for its end, or "
                f"give another `project_name`. Received: a lock of process {_holder(descriptor)}."
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # A child that was forked meanwhile has the same lock: closing alone would leave it there.
        _flock(descriptor, take=False)
        os.close(descriptor)


def check_unlocked(project: Path) -> None:
    """Check that no search runs in a project directory that is to be deleted.

    Raises:
        InputError: If one does, with its process.
    """
    if (project / LOCK_NAME).exists():
        with search_lock(project):
            pass


def _opened(project: Path) -> int | None:
    """Open the file of the lock; None without locks here, or rights, which others miss too."""
    if sys.platform == "win32":
        return None
    try:
        return os.open(project / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _flock(descriptor: int, *, take: bool) -> bool:
    """Take or drop a lock; False where another one holds it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if take else fcntl.LOCK_UN)
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks, as some over the network are.
        return True
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
