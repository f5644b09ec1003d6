"""Checks of whether parts of a batch train as the whole does, one for each kind of model."""

import hashlib
from pathlib import Path
from typing import Any

import keras

from kbatch.device.environment import read_environment
from kbatch.records.json_files import load_if_readable, write_record
from kbatch.training.accumulation.batch_coupling import check_note, coupled_parts, coupling_note
from kbatch.training.accumulation.parts_check import check_parts
from kbatch.training.accumulation.parts_check_record import PartsCheck
from kbatch.training.data.data_source import DataEnded, Source, batch_of, row_shapes
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.replica_meter import replica_count

# Of each of two batches; their parts have 2, 3 and 11. Fewer than four tell little.
_ROWS, _FEWEST_ROWS = 16, 4


class PartsChecks:
    """Compares batches whole and in parts, and remembers what was found."""

    def __init__(self):
        self._found: dict[str, PartsCheck] = {}

    def find(
        self,
        model: keras.Model,
        source: Source,
        *,
        most: int | None = None,
        directory: Path | None = None,
    ) -> PartsCheck:
        """Compare batches of a model, unless one of its kind was checked before.

        Args:
            model: A compiled, built model on one device; it stays as it is.
            source: Its data.
            most: Most examples that fit at once, None where that is not known.
            directory: Where results are kept for later runs of a search, or None.
        """
        key = _key(model, source)
        path = directory and directory / "kbatch-micro-batches" / f"{key}-parts.json"
        known = self._found.get(key) or load_if_readable(PartsCheck, path)
        if known is None:
            rows = min(_ROWS, max(most or _ROWS, _FEWEST_ROWS))
            known = check_parts(model, _rows(source, model, 2 * rows))
            if path is not None:
                write_record(known, path)
        self._found[key] = known
        return known

    def difference(
        self,
        model: keras.Model,
        source: Source,
        *,
        most: int | None = None,
        directory: Path | None = None,
    ) -> str | None:
        """Return what makes parts train another model than the whole batch, None where they do not.

        Args:
            model: As in `find`; one on several replicas is told by its layers and losses alone.
            source: As in `find`.
            most: As in `find`.
            directory: As in `find`.
        """
        parts = coupled_parts(model)
        if replica_count(model) == 1:
            check = self.find(model, source, most=most, directory=directory)
            if check.equal:
                return None
            if not parts:
                return check_note(check)
        return coupling_note(parts) if parts else None


def _rows(source: Source, model: keras.Model, rows: int) -> Any:
    try:
        return batch_of(source, model, rows)
    except DataEnded as ended:
        if ended.rows < 1:
            raise
        return batch_of(source, model, ended.rows)


def _key(model: keras.Model, source: Source) -> str:
    versions = sorted(read_environment().versions.items())
    described = repr((model_fingerprint(model), row_shapes(source, model), versions))
    return hashlib.sha256(described.encode()).hexdigest()[:16]
