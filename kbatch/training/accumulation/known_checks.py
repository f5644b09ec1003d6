"""What is known of the parts of models: each kind is compared once in a search."""

import keras

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
    ) -> PartsCheck:
        """Compare batches of a model, unless one of its kind was checked before."""
        given = getattr(installed_step(model), "loss_denominator", None)
        divided = keras.tree.map_structure(function_code, given) if given else None
        key = repr((model_fingerprint(model), row_shapes(source, model), divided))
        if key not in self._found:
            try:
                batch = batch_of(source, model, rows_to_compare(most))
            except DataEnded as ended:
                if ended.rows < 1:
                    raise
                batch = batch_of(source, model, ended.rows)
            self._found[key] = check_parts(model, batch)
        return self._found[key]
