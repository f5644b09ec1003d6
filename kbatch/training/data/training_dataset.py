"""The pipeline by which a search feeds arrays, for a `fit` of one's own."""

from typing import Any

import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.forms import gives_batches
from kbatch.training.data.training_data import TrainingData
from kbatch.training.state import check_seed, seed_of


def training_dataset(
    x: Any,
    y: Any,
    batch_size: int,
    *,
    sample_weight: Any = None,
    shuffle: bool = True,
    seed: int | None = None,
) -> tf.data.Dataset:
    """Put arrays into batches by the pipeline of a search.

    Each epoch reads the rows in another order. The arrays stay in memory once; of batches, only
    the next few are made ahead.

    Example:

    ```python
    model.fit(kbatch.training_dataset(x, y, 64), epochs=5)
    ```

    Args:
        x: Inputs: an array (NumPy, pandas, tensor), or several in dicts, lists or tuples.
        y: Targets in the same forms, or `None`.
        batch_size: Integer. Rows of a batch; the last one of an epoch has what is left.
        sample_weight: Weights of the rows in the loss, or `None`.
        shuffle: Boolean. Whether each epoch has an order of its own.
        seed: Integer or `None`. The first execution of each trial of a search with this seed reads
            its rows in the same orders. `None`: other orders each time.

    Returns:
        A `tf.data.Dataset` of known length, of `x`, `(x, y)` or `(x, y, sample_weight)`. Beside
        it `fit` takes no `batch_size`; `shuffle=False` only stops Keras's warning that it shuffles
        no dataset.

    Raises:
        ValueError: For data that are no arrays, of unequal length, or fewer than `batch_size`.
    """
    if not hasattr(batch_size, "__index__") or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(
            f"`batch_size` must be an integer of at least 1. Received: batch_size={batch_size!r}."
        )
    if gives_batches(x):
        raise InputError(
            "Arrays only are put into batches here: give `fit` the dataset itself. "
            f"Received: x of type {type(x).__name__}."
        )
    size = int(batch_size)
    data = TrainingData(x, y, sample_weight, shuffle=shuffle)
    # As in the first `fit` of an execution, from its first epoch.
    first = seed_of(check_seed(seed), 0, 0)
    return data.batches(size, seed=first, largest_batch_size=size).dataset
