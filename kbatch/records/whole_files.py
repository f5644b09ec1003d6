"""Files that a reader sees whole, the old one or the new one."""

import os
import threading
from pathlib import Path


def write_whole_file(path: Path, data: bytes) -> None:
    """Writes a file in one step: an error leaves what was there before.

    Args:
        path: File to write; its folder is made if it is missing.
        data: Its whole content.

    Raises:
        OSError: If the folder cannot be written, with what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    except OSError as error:
        raise OSError(
            error.errno,
            f"kbatch cannot write here ({error.strerror}): give a writable directory",
            path,
        ) from error


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    # os.open gives the file the rights that the user's umask leaves, as any other file has them.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
