"""Pickles whose large arrays lie in memory-mapped files."""

import io
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

_LARGE_BYTES = 1_000_000


class UnsendableError(TypeError):
    """What cannot be pickled and so cannot go to another process."""


class MappedPickles:
    """Pickles by value (cloudpickle), with large NumPy arrays in files beside.

    An array is read by mapping, so that all readers hold it once.

    Args:
        folder: Where the files lie: those of one pickle, until the next one is made.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: list[Path] = []

    def dumps(self, value: Any) -> bytes:
        """Pickles a value.

        Raises:
            UnsendableError: If it cannot be pickled.
            OSError: If a file cannot be written, such as on a full disk.
            MemoryError: If there is no room for the pickle.
        """
        while self._files:
            self._files.pop().unlink(missing_ok=True)  # One that was never begun.
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._file_of).dump(value)
        except (OSError, MemoryError):  # Not the value's fault.
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            raise UnsendableError(f"It cannot be sent to another process: {error}") from error
        return buffer.getvalue()

    def _file_of(self, array: np.ndarray) -> Path:
        path = self._folder / f"array-{len(self._files)}.npy"
        self._files.append(path)
        np.save(path, array, allow_pickle=False)
        return path


class _Pickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, file_of: Any):
        super().__init__(buffer)
        self._file_of = file_of

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
            if obj.nbytes >= _LARGE_BYTES:
                return _mapped, (self._file_of(obj),)
            return NotImplemented
        return super().reducer_override(obj)


def _mapped(path: Path) -> np.ndarray:
    # Copy on write: what a function does to its argument stays its own.
    return np.load(path, mmap_mode="c")
