"""A record that people keep as a file of its own."""

from pathlib import Path
from typing import Self

from kbatch.records.json_files import read_record, write_record


class SavedRecord:
    """What a frozen record needs to be saved and loaded as versioned JSON."""

    def save(self, path: Path | str) -> None:
        """Writes the record as JSON.

        Args:
            path: File to write; its folder is made if it is missing.

        Raises:
            OSError: If it cannot be written, with what to do.
        """
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads a record that `save` wrote.

        Raises:
            RecordError: If the file is broken, of a newer kbatch or holds something else.
        """
        return read_record(cls, Path(path))
