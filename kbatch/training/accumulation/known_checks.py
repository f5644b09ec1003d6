"""What is known of the parts of models: each kind is compared once in a search."""

import hashlib
from pathlib import Path

import keras

from kbatch.device.environment import read_environment
from kbatch.records.json_codec import load_if_readable, write_record
from kbatch.training.accumulation.parts_check import PartsCheck, check_parts, rows_to_compare
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of, row_shapes
from kbatch.training.fingerprint import function_code, model_fingerprint
from kbatch.training.model import installed_step


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
        """Compare batches of a model, unless one of its kind was checked before."""
        versions = sorted(read_environment().versions.items())
        given = getattr(installed_step(model), "loss_denominator", None)
        divided = keras.tree.map_structure(function_code, given) if given else None
        described = repr((model_fingerprint(model), row_shapes(source, model), versions, divided))
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        path = directory and directory / "kbatch-micro-batches" / f"{key}-parts.json"
        known = self._found.get(key) or load_if_readable(PartsCheck, path)
        if known is None:
            try:
                batch = batch_of(source, model, rows_to_compare(most))
            except DataEnded as ended:
                if ended.rows < 1:
                    raise
                batch = batch_of(source, model, ended.rows)
            known = check_parts(model, batch)
            if path is not None:
                write_record(known, path)
        self._found[key] = known
        return known
