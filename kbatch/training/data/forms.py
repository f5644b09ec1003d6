"""Training data in batches of one size, whatever form it was given in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

from kbatch.errors import InputError

_FORMS = (
    "Give arrays (NumPy, pandas, tensors, nested in dicts or tuples), a `tf.data.Dataset`, or a "
    "function `batch_size -> tf.data.Dataset`."
)


class FitData(NamedTuple):
    """The data arguments of `fit`, as Keras names them."""

    x: Any = None
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    validation_data: Any = None
    validation_split: float = 0.0
    shuffle: bool = True


class Batches(NamedTuple):
    """Training data ready for `fit`.

    Attributes:
        dataset: Batches of inputs, targets and perhaps sample weights.
        validation_data: Arrays as given, or a dataset in validation batches, or None.
    """

    dataset: tf.data.Dataset
    validation_data: Any


def in_batches(
    data: FitData,
    model: keras.Model,
    *,
    batch_size: int,
    largest_batch_size: int,
    validation_batch_size: int,
    seed: int | None,
) -> Batches:
    """Put training data into batches of `batch_size` examples."""
    if data.validation_split and data.validation_data is None:
        data = _split(data)
    dataset, examples = _dataset(data, model, batch_size, seed)
    _check_examples(examples, largest_batch_size)
    if data.class_weight is not None and (is_dataset(data.x) or callable(data.x)):
        dataset = dataset.map(make_class_weight_map_fn(data.class_weight))
    validation = data.validation_data
    if is_dataset(validation):
        validation = rebatched(validation, model, validation_batch_size)
    elif callable(validation):
        validation = called_for(validation, model, validation_batch_size)
    return Batches(dataset.prefetch(tf.data.AUTOTUNE), validation)


def rebatched(dataset: tf.data.Dataset, model: keras.Model, batch_size: int) -> tf.data.Dataset:
    """Return a dataset, batched or not, in batches of `batch_size` examples."""
    if is_batched(dataset.element_spec, model):
        return dataset.rebatch(batch_size)
    return dataset.batch(batch_size)


def _dataset(
    data: FitData, model: keras.Model, batch_size: int, seed: int | None
) -> tuple[tf.data.Dataset, int | None]:
    """Return training batches, and the number of examples where it is known."""
    x: Any = data.x
    if x is None:
        raise InputError(f"There is no training data: `x` is missing. {_FORMS} Received: x=None.")
    if is_dataset(x) or callable(x):
        if data.y is not None or data.sample_weight is not None:
            raise InputError(
                "A dataset brings its own targets and sample weights, as (x, y) or "
                "(x, y, sample_weight): leave out `y` and `sample_weight`. "
                f"Received: y of type {type(data.y).__name__}, sample_weight of type "
                f"{type(data.sample_weight).__name__}."
            )
        if isinstance(x, tf.data.Dataset):
            return rebatched(x, model, batch_size), _size(x, model)
        return called_for(x, model, batch_size), None
    arrays, examples = tensors_of(data)
    batches = array_batches(arrays, batch_size=batch_size, shuffle=data.shuffle, seed=seed)
    return batches, examples


def called_for(function: Callable[[int], Any], model: keras.Model, batch_size: int):
    """Call a data function, and check that it returns a dataset of batches."""
    dataset = function(batch_size)
    if not is_dataset(dataset):
        raise InputError(
            "A data function must return a `tf.data.Dataset`: it is called with the batch size. "
            f"Received: a {type(dataset).__name__} for batch_size={batch_size}."
        )
    if not is_batched(dataset.element_spec, model):
        raise InputError(
            "A data function must return batches: end it with `.batch(batch_size)`. "
            f"Received: element_spec={dataset.element_spec} for batch_size={batch_size}."
        )
    return dataset


def is_dataset(data: Any) -> bool:
    """Return whether data are a `tf.data.Dataset`."""
    return isinstance(data, tf.data.Dataset)


def _size(dataset: tf.data.Dataset, model: keras.Model) -> int | None:
    """Return the most examples that a dataset can have, from its length and its first batch."""
    cardinality = int(dataset.cardinality())
    if cardinality < 0:
        return None
    if not is_batched(dataset.element_spec, model):
        return cardinality
    first = [keras.tree.flatten(batch)[0] for batch in dataset.take(1)]
    return cardinality * first[0].shape[0] if first else 0


def _check_examples(examples: int | None, largest_batch_size: int) -> None:
    if examples is not None and examples < largest_batch_size:
        raise InputError(
            "A batch cannot be larger than the training set: leave the sizes above "
            f"{examples} out of `batch_sizes`. Received: batch_size={largest_batch_size} for "
            f"{examples} training examples."
        )


def _split(data: FitData) -> FitData:
    if is_dataset(data.x) or callable(data.x):
        raise InputError(
            "`validation_split` splits arrays only: give `validation_data` beside a dataset. "
            f"Received: validation_split={data.validation_split}."
        )
    try:
        split: Any = train_validation_split(
            (data.x, data.y, data.sample_weight), validation_split=data.validation_split
        )
    except (ValueError, TypeError) as error:
        raise InputError(str(error)[:300]) from error
    (x, y, weight), validation = split
    return data._replace(x=x, y=y, sample_weight=weight, validation_data=validation)


def tensors_of(data: FitData) -> tuple[Any, int]:
    """Return inputs, targets and sample weights as tensors, and their number of rows."""
    arrays, rows = arrays_of(data)
    with tf.device("CPU:0"):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arrays
        ), rows


def arrays_of(data: FitData) -> tuple[Any, int]:
    """Return inputs, targets and sample weights as arrays, and their number of rows.

    No tensor is made of an array: that would start TensorFlow's devices in this process, and a
    worker process would find the GPU taken.
    """
    weight = data.sample_weight
    if data.class_weight is not None:
        if weight is not None:
            raise InputError(
                "Give `class_weight` or `sample_weight`, not both. "
                f"Received: class_weight={data.class_weight} and a sample_weight."
            )
        weight = class_weight_to_sample_weights(np.asarray(data.y), data.class_weight)
    given = (data.x, data.y, weight)
    while given[-1] is None:
        given = given[:-1]
    arrays: Any = keras.tree.map_structure(
        lambda leaf: None if leaf is None else _array(leaf), given
    )
    lengths = {leaf.shape[0] for leaf in keras.tree.flatten(arrays) if leaf is not None}
    if len(lengths) != 1:
        raise InputError(
            "Inputs, targets and sample weights must have as many rows as each other. "
            f"Received: {sorted(lengths)} rows."
        )
    check_targets(arrays[1] if len(arrays) > 1 else None)
    return arrays, lengths.pop()


def check_targets(y: Any) -> None:
    """Check that targets are numbers."""
    for leaf in keras.tree.flatten(y):
        dtype = getattr(leaf, "dtype", None)
        if dtype == tf.string or getattr(dtype, "kind", None) in ("O", "S", "U"):
            shape = ", ".join(["examples", *map(str, leaf.shape[1:])])
            raise InputError(
                "Targets are numbers to a loss: give each label's index "
                "(`np.unique(y, return_inverse=True)[1]`). "
                f"Received: y of shape ({shape}) and dtype {dtype}."
            )


def _array(leaf: Any) -> Any:
    if tf.is_tensor(leaf) and not isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    if not hasattr(leaf, "__array__") or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        raise InputError(_refusal(leaf))
    array = np.asarray(leaf)
    if hasattr(leaf, "to_frame") and array.ndim == 1:
        array = array[:, None]  # A pandas Series is a column, as in Keras.
    if array.ndim == 0:
        raise InputError(_refusal(leaf))
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _refusal(data: Any) -> str:
    return (
        f"kbatch has to change the batch size, which a {type(data).__name__} does not allow. "
        f"{_FORMS} Received: {type(data).__module__}.{type(data).__name__}."
    )


def is_batched(spec: Any, model: keras.Model) -> bool:
    """Return whether a dataset's elements are batches.

    The shapes of its inputs are compared with those of the model's; as in Keras, a feature of
    shape (rows,) fits an input of shape (rows, 1). Where the model has no inputs yet, a scalar
    among the parts of an element tells examples, and a first axis of unknown length batches.
    """
    features: Any = spec[0] if isinstance(spec, tuple) else spec
    pairs = _paired(features, _inputs(model))
    if pairs is None:
        return _without_inputs(spec)
    batches = all(_fits(part.shape, expected) for part, expected in pairs)
    examples = all(_fits_example(part.shape, expected) for part, expected in pairs)
    if batches and examples:
        return all(part.shape.rank and part.shape[0] is None for part, _ in pairs)
    if batches or examples:
        return batches
    raise InputError(
        "The dataset fits the model neither as batches nor as single examples: compare "
        "`dataset.element_spec` with `model.inputs`. Received: shapes "
        f"{[tuple(p.shape) for p, _ in pairs]} for inputs of shapes {[e for _, e in pairs]}."
    )


def _inputs(model: keras.Model) -> Any:
    """Return the model's inputs in the structure it was made with, None if it has none yet."""
    # A single symbolic tensor has no truth value.
    structure = getattr(model, "_inputs_struct", None)
    return getattr(model, "inputs", None) if structure is None else structure


def _paired(features: Any, inputs: Any) -> list[tuple[Any, tuple[int | None, ...]]] | None:
    """Pair each feature with the shape of its input, None where they cannot be paired."""
    if isinstance(inputs, dict) and isinstance(features, dict):
        if not inputs.keys() <= features.keys():
            return None
        features, inputs = [features[name] for name in inputs], list(inputs.values())
    parts = keras.tree.flatten(features)
    tensors = [] if inputs is None else keras.tree.flatten(inputs)
    known = all(part.shape.rank is not None for part in parts)
    if not tensors or not known or len(parts) != len(tensors):
        return None
    return [(part, tuple(t.shape)) for part, t in zip(parts, tensors, strict=True)]


def _fits(shape: tf.TensorShape, expected: tuple[int | None, ...]) -> bool:
    squeezed = len(expected) > 1 and expected[-1] == 1 and shape.is_compatible_with(expected[:-1])
    return bool(squeezed or shape.is_compatible_with(expected))


def _fits_example(shape: tf.TensorShape, expected: tuple[int | None, ...]) -> bool:
    return _fits(tf.TensorShape([None]).concatenate(shape), expected)


def _without_inputs(spec: Any) -> bool:
    parts = keras.tree.flatten(spec)
    if any(part.shape.rank == 0 for part in parts):
        return False
    if all(part.shape.rank and part.shape[0] is None for part in parts):
        return True
    raise InputError(
        "A model without declared inputs does not tell whether a dataset is batched: begin it "
        "with `keras.Input`, or give a function `batch_size -> dataset.batch(batch_size)`. "
        f"Received: element_spec={spec}."
    )


def array_batches(arrays: Any, *, batch_size: int, shuffle: bool, seed: int | None):
    """Make a dataset of batches of nested arrays.

    Keras's own shuffling repeats one order in every epoch once a global seed is set; this one
    draws another each time the dataset is iterated.
    """
    # tf.data would pack a list into one tensor.
    arrays = keras.tree.lists_to_tuples(arrays)
    examples = keras.tree.flatten(arrays)[0].shape[0]
    order = _orders(examples, seed) if shuffle else tf.data.Dataset.from_tensors(tf.range(examples))
    rows = order.flat_map(lambda o: tf.data.Dataset.from_tensor_slices(o).batch(batch_size))
    batches = rows.map(
        lambda indices: keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.gather(leaf, indices), arrays
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return batches.apply(tf.data.experimental.assert_cardinality(-(-examples // batch_size)))


def _orders(examples: int, seed: int | None) -> tf.data.Dataset:
    """Make a dataset of one permutation, another one each time it is iterated."""
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    return seeds.map(lambda s: tf.argsort(tf.random.stateless_uniform([examples], seed=(s, 0))))


_SHARE = 0.2
_MOST = 1024


def with_held_out(data: FitData, *, seed: int | None) -> FitData:
    """Hold out a fifth of the rows of arrays, drawn at random, 1,024 at most."""
    if data.validation_data is not None or is_dataset(data.x) or callable(data.x):
        return data
    arrays, rows = tensors_of(data)
    count = min(_MOST, int(_SHARE * rows))
    if count == 0:
        return data
    order = np.random.default_rng(seed).permutation(rows)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    x, y, weight = (*_rows(arrays, kept), None, None)[:3]
    return data._replace(
        x=x,
        y=y,
        sample_weight=weight,
        class_weight=None,  # It is in the sample weights already.
        validation_data=_rows(arrays, held),
    )


def _rows(arrays: Any, rows: np.ndarray) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, rows), arrays
    )
