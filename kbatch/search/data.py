"""The data of a search as a source of rows for probes."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from kbatch.training.data.forms import FitData, is_batched, is_dataset
from kbatch.training.data.sample_rows import SampleRows, Source, dataset_rows, sample_of


class SearchData:
    """Takes rows of the data that `fit` gets, and reads a dataset once.

    Every execution of a search has the same data: to read them again may fill a buffer of
    shuffling, or run through what comes before it.
    """

    def __init__(self):
        self._read: weakref.WeakKeyDictionary[tf.data.Dataset, dict[bool, SampleRows]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self):
        """Leave what was read behind where a copy travels to another process."""
        return SearchData, ()

    def source(self, data: FitData, model: keras.Model) -> Source:
        """Return the rows of arrays or of a dataset, or the function that returns datasets."""
        x: Any = data.x
        if is_dataset(x) and data.y is None:
            return self._rows_of(x, model)
        if callable(x) and not is_dataset(x):
            function: Any = x
            return function
        return sample_of(data)

    def _rows_of(self, dataset: Any, model: keras.Model) -> SampleRows:
        known = self._read.setdefault(dataset, {})
        batched = is_batched(dataset.element_spec, model)
        if batched not in known:
            known[batched] = dataset_rows(dataset, model)
        return known[batched]
