"""Read the forms of training data: arrays, datasets, PyDatasets and functions of batch sizes."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import (
    class_weight_to_sample_weights,
    declared_structure,
    inputs_of_dataset,
)

_MOST_COPIED_BYTES = 2**26  # Larger arrays in a PyDataset are shared, not copied.

FORMS = (
    "Give arrays (NumPy, pandas, tensors, SciPy's CSR, or dicts or tuples of these), a "
    "`tf.data.Dataset`, a Grain dataset of batches, a `keras.utils.PyDataset`, or a function "
    "`batch_size -> tf.data.Dataset` (or PyDataset)."
)


def is_dataset(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset)


def gives_batches(data: Any) -> bool:
    """Return whether data are a dataset, a PyDataset, or a function that returns one of these."""
    return isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)) or callable(data)


def as_dataset(data: Any, *, shuffle: bool = False, seed: int | None = None) -> Any:
    """Make a dataset of the batches of a PyDataset, read by as many threads as it has workers.

    Other data are returned unchanged.
    """
    if not isinstance(data, keras.utils.PyDataset):
        return data
    # Axes that differ between the first two batches have no fixed length.
    first = [_read(data, i) for i in range(2 if data.num_batches is None else data.num_batches)[:2]]
    if not first:
        raise InputError(
            "The data have no batches: give a `PyDataset` with at least one. "
            "Received: a PyDataset with num_batches=0."
        )
    spec = keras.tree.map_structure(_common_spec, *first)
    rng = np.random.default_rng(seed)

    def epoch() -> Iterator[int]:
        # Keras also calls both before the first epoch. Here, threads may still read batches when an
        # epoch ends, so call `on_epoch_end` just before the next epoch.
        data.on_epoch_end()
        data.on_epoch_begin()
        count = data.num_batches
        if shuffle and count is not None:
            yield from rng.permutation(count)
        else:
            yield from itertools.count() if count is None else range(count)

    def batch(number: tf.Tensor) -> Any:
        specs = keras.tree.flatten(spec)
        parts = tf.numpy_function(
            lambda i: keras.tree.flatten(_read(data, int(i))), [number], [s.dtype for s in specs]
        )
        shaped = [tf.ensure_shape(p, s.shape) for p, s in zip(parts, specs, strict=True)]
        return keras.tree.pack_sequence_as(spec, shaped)

    numbers = tf.data.Dataset.from_generator(epoch, output_signature=tf.TensorSpec((), tf.int64))
    return numbers.map(batch, num_parallel_calls=max(1, data.workers), deterministic=True)


def fresh_copy(data: Any) -> tuple[Any, str | None]:
    """Copy a PyDataset, because its hooks may change it. Also return why it cannot be copied.

    Copies share large arrays. Other data are returned unchanged.
    """
    if not isinstance(data, keras.utils.PyDataset):
        return data, None
    values = [leaf for value in vars(data).values() for leaf in keras.tree.flatten(value)]
    large = [leaf for leaf in values if getattr(leaf, "nbytes", 0) > _MOST_COPIED_BYTES]
    try:
        return copy.deepcopy(data, {id(leaf): leaf for leaf in large}), None
    except Exception as error:  # Files, locks and the user's own objects may raise anything.
        return data, f"{type(error).__name__}: {error}"


def _read(data: keras.utils.PyDataset, number: int) -> Any:
    """Read a batch of a PyDataset as arrays."""
    arrays, _ = arrays_of(*keras.utils.unpack_x_y_sample_weight(data[number]))
    return keras.tree.lists_to_tuples(each_part(np.asarray, arrays))


def _common_spec(*parts: np.ndarray) -> tf.TensorSpec:
    axes = zip(*(part.shape[1:] for part in parts), strict=True)
    shape = [None, *(sizes[0] if len(set(sizes)) == 1 else None for sizes in axes)]
    return tf.TensorSpec(shape, tf.as_dtype(parts[0].dtype))


def batches_of(
    data: Any,
    model: keras.Model | None,
    batch_size: int,
    *,
    shuffle: bool = False,  # Of the batches of a PyDataset.
    seed: int | None = None,
    whole: bool = False,
) -> tf.data.Dataset:
    """Return a dataset of batches of one size from a dataset, a PyDataset or a function.

    If `whole`, and all batches of a dataset have the same known size, drop the last smaller batch.
    """
    data = as_dataset(data, shuffle=shuffle, seed=seed)
    if not is_dataset(data):
        return called_for(data, model, batch_size, shuffle=shuffle, seed=seed)
    if is_batched(spec_of(data), model):
        endless = data.cardinality() == tf.data.INFINITE_CARDINALITY
        known = all(p.shape[:1].is_fully_defined() for p in tf.nest.flatten(data.element_spec))
        data = data.rebatch(batch_size, drop_remainder=whole and known)
        if endless:  # After `rebatch`, TensorFlow no longer knows that the dataset is endless.
            data = data.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return data
    return data.batch(batch_size)


def called_for(
    function: Callable[[int], Any], model: keras.Model | None, batch_size: int, **order: Any
) -> tf.data.Dataset:
    """Call a data function. If it does not return a dataset of batches, raise InputError."""
    dataset = as_dataset(function(batch_size), **order)
    if not is_dataset(dataset):
        raise InputError(
            "A data function is called with a batch size and must return a `tf.data.Dataset` or a "
            "`keras.utils.PyDataset`. "
            f"Received: a {type(dataset).__name__} for batch_size={batch_size}."
        )
    if not is_batched(spec_of(dataset, batched=True), model):
        raise InputError(
            "A data function must return batches: end its dataset with `.batch(batch_size)`. "
            f"Received: element_spec={dataset.element_spec} for batch_size={batch_size}."
        )
    return dataset


def spec_of(dataset: tf.data.Dataset, *, batched: bool = False) -> Any:
    """Return the spec of an element. If the elements are batches, their first axis has any length.

    If `batched`, elements that could be batches or examples count as batches.
    """
    spec: Any = dataset.element_spec
    parts = tf.nest.flatten(spec)
    dense = all(isinstance(part, tf.TensorSpec) and part.shape.rank for part in parts)
    opens = dense and (batched or _ends_in_batches(dataset))
    return tf.nest.map_structure(open_spec, spec) if opens else spec


def _ends_in_batches(dataset: Any) -> bool:
    name, inputs = type(dataset).__name__, inputs_of_dataset(dataset)
    if any(other in name for other in ("Unbatch", "FlatMap", "Interleave", "Window")):
        return False
    return "Batch" in name or bool(inputs and all(map(_ends_in_batches, inputs)))


def each_part(change: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to each part of nested data that is not None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else change(leaf), nested)


def parts_of(nested: Any) -> list[Any]:
    """List the parts of nested data that are not None."""
    return [leaf for leaf in keras.tree.flatten(nested) if leaf is not None]


def is_composite(part: Any) -> bool:
    """Return whether a part of a batch is a ragged or sparse tensor."""
    return isinstance(part, (tf.RaggedTensor, tf.SparseTensor))


def open_spec(part: Any) -> tf.TypeSpec:
    """Return the spec of a part of a batch, for any number of rows."""
    shape, dtype = [None, *part.shape[1:]], tf.as_dtype(part.dtype)
    if isinstance(part, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, dtype)
    if isinstance(part, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, dtype, part.ragged_rank, part.row_splits.dtype)
    return tf.TensorSpec(shape, dtype)


def rows_between(part: Any, start: Any, size: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return part[start : start + size]
    # In `tf.slice`, XLA accepts a start that varies if the size is fixed.
    sparse = isinstance(part, tf.SparseTensor)
    rest = part.dense_shape[1:] if sparse else tf.shape(part)[1:]
    begin = tf.concat([tf.cast([start], rest.dtype), tf.zeros_like(rest)], axis=0)
    sizes = tf.concat([tf.cast([size], rest.dtype), rest], axis=0)
    rows: Any = tf.sparse.slice(part, begin, sizes) if sparse else tf.slice(part, begin, sizes)
    rows.set_shape([size if isinstance(size, int) else None, *part.shape[1:]])
    return rows


def row_count(parts: Any) -> tf.Tensor:
    first = parts_of(parts)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int32)
    sparse = isinstance(first, tf.SparseTensor)
    return tf.cast(first.dense_shape[0], tf.int32) if sparse else tf.shape(first)[0]


def rows_of(batch: Any) -> int:
    return int(parts_of(batch)[0].shape[0])


def held_on_device(batch: Any) -> Any:
    """Copy a batch to the first GPU, if there is one. Texts stay on the host."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return batch
    with tf.device(gpus[0].name):
        return each_part(lambda leaf: leaf if leaf.dtype == tf.string else tf.identity(leaf), batch)


def first_rows(batch: Any, rows: int) -> Any:
    return each_part(lambda leaf: rows_between(leaf, 0, rows), batch)


def first_of_each(batches: Any, rows: int) -> Any:
    """Return the first rows of each batch of a dataset. Other data are returned unchanged."""
    if not is_dataset(batches):
        return batches
    several = isinstance(batches.element_spec, tuple)
    return batches.map(lambda *batch: first_rows(batch if several else batch[0], rows))


def arrays_of(x: Any, y: Any = None, weight: Any = None, class_weight: Any = None) -> Any:
    """Return inputs, targets and sample weights as arrays, packed as in `fit`, and their length."""
    # Make no tensors, because they would start TensorFlow's devices in this process, and another
    # process could then not use the GPU.
    if class_weight is not None:
        if weight is not None:
            raise InputError(
                "Give `class_weight` or `sample_weight`, not both. "
                f"Received: class_weight={class_weight} and a sample_weight."
            )
        check_class_weight(y)
        weight = class_weight_to_sample_weights(np.asarray(y), class_weight)
    parts = (x, y, weight)
    while parts[-1] is None:
        parts = parts[:-1]
    arrays: Any = each_part(_array, parts)
    lengths = [leaf.shape[0] for leaf in parts_of(arrays)]
    if len(set(lengths)) != 1:
        raise InputError(
            "Inputs, targets and sample weights must have the same number of rows. "
            f"Received, in this order: {', '.join(map(str, lengths))} rows."
        )
    check_targets(arrays[1] if len(arrays) > 1 else None)
    packed = keras.utils.pack_x_y_sample_weight(*arrays) if len(arrays) == 1 else arrays
    return packed, lengths[0]


def check_class_weight(y: Any) -> None:
    """Raise InputError if there are several outputs, because Keras then has no `class_weight`."""
    if keras.tree.is_nested(y):
        raise InputError(
            "`class_weight` requires a model with a single output: give `sample_weight` with one "
            f"array for each output. Received: y with {len(keras.tree.flatten(y))} parts."
        )


def check_targets(y: Any) -> None:
    """Raise InputError if targets are not numbers."""
    for leaf in keras.tree.flatten(y):
        dtype = getattr(leaf, "dtype", None)
        if dtype == tf.string or getattr(dtype, "kind", None) in ("O", "S", "U"):
            shape = ", ".join(["examples", *map(str, leaf.shape[1:])])
            raise InputError(
                "Targets must be numbers: give the index of each label, "
                "`np.unique(y, return_inverse=True)[1]`. "
                f"Received: y of shape ({shape}) and dtype {dtype}."
            )


def _array(leaf: Any) -> Any:
    composite = is_composite(leaf)
    if tf.is_tensor(leaf) and not composite:
        return leaf
    if hasattr(leaf, "columns") and hasattr(leaf, "astype"):  # A pandas DataFrame.
        leaf = _frame_array(leaf, dict(leaf.dtypes))
    if hasattr(leaf, "toarray") and hasattr(leaf, "__getitem__"):  # A sparse matrix of SciPy.
        leaf = leaf.toarray()
    array = None if composite or not hasattr(leaf, "__array__") else np.asarray(leaf)
    if array is None or array.ndim == 0:
        kind = type(leaf)
        raise InputError(
            f"kbatch cannot cut a {kind.__name__} into batches. "
            f"{FORMS} Received: {kind.__module__}.{kind.__name__}."
        )
    if hasattr(leaf, "to_frame") and array.ndim == 1:
        array = array[:, None]  # A pandas Series is a column, as in Keras.
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _frame_array(frame: Any, dtypes: dict[Any, Any]) -> np.ndarray:
    """Return a data frame as one array, with Keras's float type if a column has floats."""
    kinds = {getattr(dtype, "kind", "O") for dtype in dtypes.values()}
    try:
        array = np.asarray(frame.astype(keras.config.floatx()) if "f" in kinds else frame)
    except (TypeError, ValueError):
        array = np.asarray(frame)
    if array.dtype == object and not all(isinstance(value, (str, bytes)) for value in array.flat):
        raise InputError(
            "The columns of a data frame must be numbers of one type: give "
            f"`frame.astype({keras.config.floatx()!r})`, and replace text by numbers. "
            f"Received: columns {', '.join(f'{name} ({dtype})' for name, dtype in dtypes.items())}."
        )
    return array


def is_batched(spec: Any, model: keras.Model | None) -> bool:
    """Return whether the elements of a dataset are batches, by its spec and the model's inputs."""
    features: Any = spec[0] if isinstance(spec, tuple) else spec
    pairs = _paired(features, model)
    if pairs is None:
        parts = keras.tree.flatten(spec)
        if any(part.shape.rank == 0 for part in parts):
            return False
        rows = {part.shape[0] for part in parts if part.shape.rank}
        if rows == {None} and all(part.shape.rank for part in parts):
            return True
        if len(rows - {None}) > 1:  # The parts of a batch have the same number of rows.
            return False
        raise InputError(
            "kbatch cannot see whether the dataset is batched: give a model that begins with "
            "`keras.Input`, or a function `batch_size -> dataset.batch(batch_size)`. "
            f"Received: element_spec={spec}."
        )

    def fits(shape: tf.TensorShape, expected: tuple[int | None, ...]) -> bool:
        # As in Keras, a feature of shape (rows,) fits an input of shape (rows, 1).
        column = len(expected) > 1 and expected[-1] == 1
        return shape.is_compatible_with(expected) or bool(
            column and shape.is_compatible_with(expected[:-1])
        )

    axis = tf.TensorShape([None])
    batches = all(fits(part.shape, expected) for part, expected in pairs)
    examples = all(fits(axis.concatenate(part.shape), expected) for part, expected in pairs)
    if batches and examples:
        return all(part.shape.rank and part.shape[0] is None for part, _ in pairs)
    if batches or examples:
        return batches
    raise InputError(
        "Each element of the dataset must be a batch or a single example that fits the model's "
        "inputs: compare `dataset.element_spec` with `model.inputs`. Received: shapes "
        f"{[tuple(p.shape) for p, _ in pairs]} for inputs of shapes {[e for _, e in pairs]}."
    )


def _paired(features: Any, model: Any) -> list[tuple[Any, tuple[int | None, ...]]] | None:
    """Pair each feature with the shape of its model input, or return None if this is impossible."""
    structure, tensors = declared_structure(model), getattr(model, "inputs", None) or []
    if isinstance(features, dict):  # Keras finds the inputs of a dict by their names.
        named = structure if isinstance(structure, dict) else {t.name: t for t in tensors}
        if named.keys() <= features.keys():
            features = [features[name] for name in named]
            tensors = keras.tree.flatten([*named.values()])
    parts = keras.tree.flatten(features)
    known = all(part.shape.rank is not None for part in parts)
    if not tensors or not known or len(parts) != len(tensors):
        return None
    return [(part, tuple(t.shape)) for part, t in zip(parts, tensors, strict=True)]
