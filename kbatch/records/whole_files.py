"""Files that a reader sees whole, the old one or the new one."""

import os
import tempfile
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
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # A temporary file is private to its owner; a record is shared like any other file.
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
