"""Sample data, cut it into batches, cut validation data into blocks, and count batches."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import inputs_of_dataset, is_op_determinism_enabled
from kbatch.records.notes import Note
from kbatch.training.data import forms
from kbatch.training.model import replica_count

MOST_BLOCKS = 50  # Largest number of blocks of consecutive validation examples.
SAMPLE_ROWS = 64  # Largest number of rows in a sample of the data.

_SAMPLED_ELEMENTS = 16  # Elements of a dataset that are read for a sample.

_NUMBER, _NUMBERS = tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)


class Sample(NamedTuple):
    """Some rows of the data, and the number of examples."""

    rows: Any  # Inputs, targets and perhaps weights: nested NumPy arrays of shape (rows, ...).
    examples: int | None  # An upper bound for a long dataset of batches. If unknown, None.
    note: Note | None = None  # A warning about the choice of rows.


class Batches(NamedTuple):
    """Training data in batches of one size, with their validation data."""

    dataset: tf.data.Dataset
    validation_data: Any  # A dataset of validation batches. With several replicas, perhaps arrays.
    validation_batch_size: int
    validation_batches: int | None  # An upper bound. If unknown, None.
    examples: int | None  # An upper bound for an epoch. If unknown, None.
    # The order of the rows of arrays, in words. If it was drawn without a seed, or if the data are
    # a dataset, None.
    order: str | None
    of_dataset: bool  # Whether the data are a dataset, a `PyDataset` or a function.
    epoch_steps: int | None  # Steps of an epoch if `dataset` is endless, else None.


def sample_elements(dataset: tf.data.Dataset) -> tuple[Any, Sample | None, Sample]:
    """Read the first elements of a dataset as batches and as single examples.

    Returns:
        The spec of an element, a sample that takes elements as batches (None if an element has a
        part without axes), and a sample that takes them as single examples.
    """
    spec = forms.spec_of(dataset)
    for part in tf.nest.flatten(spec):
        if isinstance(part, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = part.value_type.__name__
            raise InputError(
                f"kbatch cannot take rows from a {kind}: convert the data with `.to_tensor()` or "
                "`tf.sparse.to_dense`. A search with `micro_batch_size=None` trains whole batches "
                f"and can use such data. Received: a dataset with a {kind}."
            )
    may_be_batches = all(part.shape.rank != 0 for part in keras.tree.flatten(spec))
    cardinality = int(dataset.cardinality())
    batches, examples = _SampleReader(cardinality), _SampleReader(cardinality)
    for element in dataset.take(_SAMPLED_ELEMENTS):
        arrays = forms.each_part(np.asarray, element)
        # The rank of a result of `tf.py_function` is known only now.
        may_be_batches = may_be_batches and all(part.ndim for part in keras.tree.flatten(arrays))
        examples.add(forms.each_part(lambda leaf: leaf[None], arrays))
        if may_be_batches:
            batches.add(arrays)
    if not examples.counts:
        raise InputError("The dataset must have elements. Received: an empty dataset.")
    return spec, batches.sample() if may_be_batches else None, examples.sample()


class _SampleReader:
    """Keeps rows of the element that has the largest examples."""

    def __init__(self, cardinality: int):
        self.counts: list[int] = []  # Rows of each element.
        self._cardinality = cardinality
        self._row_bytes: list[float] = []
        self._rows: Any = None

    def add(self, element: Any) -> None:
        leaves = forms.parts_of(element)
        count = leaves[0].shape[0]
        row_bytes = sum(leaf.nbytes for leaf in leaves) / max(1, count)
        if row_bytes > max(self._row_bytes, default=-1.0):  # A view would keep the whole element.
            self._rows = forms.each_part(lambda leaf: np.array(leaf[:SAMPLE_ROWS]), element)
        self._row_bytes.append(row_bytes)
        self.counts.append(count)

    def sample(self) -> Sample:
        known, seen = self._cardinality, len(self.counts)
        examples = sum(self.counts) if known <= seen else known * max(self.counts)
        note = Note.of("rows_differ", elements=seen) if len(set(self._row_bytes)) > 1 else None
        return Sample(self._rows, None if known < 0 else examples, note)


def epoch_sizes(examples: int, size: int) -> list[int]:
    """Return the sizes of an epoch's batches, or only one size if all are equal."""
    full, rest = divmod(examples, size)
    return [size] if full and not rest else [*[size] * full, rest]


def _pipeline(batches: tf.data.Dataset, cardinality: int) -> tf.data.Dataset:
    """Set the length of a dataset, and turn off tuning and rewriting, which do not pay here."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return batches.apply(tf.data.experimental.assert_cardinality(cardinality)).with_options(options)


class ArrayRows:
    """Arrays as tensors, with the graphs that shuffle and gather their rows."""

    def __init__(self, arrays: Any, *, shuffle: bool):
        # tf.data would pack a list into one tensor.
        arrays = keras.tree.lists_to_tuples(arrays)
        with tf.device("CPU:0"):
            tensors = forms.each_part(tf.convert_to_tensor, arrays)
            self._parts = forms.parts_of(tensors)
            self.examples: int = self._parts[0].shape[0]
            count = tf.constant(self.examples, tf.int64)
        spec = tf.data.Dataset.from_tensors(tensors).element_spec
        self._spec = tf.nest.map_structure(of_any_length, spec)
        self._count, self._shuffle = count, shuffle
        self._order = _traced(self._numbers, _NUMBER, _NUMBER)
        self._gather = _traced(self._rows, _NUMBERS)

    def endless(self, batch_size: int, *, seed: int | None, first_epoch: int) -> tf.data.Dataset:
        """Return the batches of all epochs, one after the other, each epoch in a new order."""
        epochs = tf.data.Dataset.range(first_epoch, 2**62)
        chosen = self._chosen(self._order, epochs, batch_size, seed)
        batches = map_traced(self._gather, chosen, self._spec)
        return _pipeline(batches.prefetch(2), tf.data.INFINITE_CARDINALITY)

    def epoch(self, batch_size: int, *, seed: int | None, first_epoch: int) -> tf.data.Dataset:
        """Return the batches of one epoch. The order changes after the last batch has been read."""
        # Keras also makes iterators from which it reads one batch or none. These must not count.
        with tf.device("CPU:0"):
            read = tf.Variable(tf.constant(first_epoch, tf.int64), trainable=False)
        steps = -(-self.examples // batch_size)

        def gather(step: tf.Tensor, chosen: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([read.assign_add(tf.cast(step == steps, tf.int64))]):
                return self._rows(chosen)

        order = _traced(
            lambda number, seed: self._numbers(read.read_value(), seed), _NUMBER, _NUMBER
        )
        chosen = self._chosen(order, tf.data.Dataset.range(1), batch_size, seed)
        numbered = tf.data.Dataset.zip(tf.data.Dataset.range(1, steps + 1), chosen)
        batches = map_traced(_traced(gather, _NUMBER, _NUMBERS), numbered, self._spec)
        return _pipeline(batches.prefetch(2), steps)

    def _rows(self, chosen: tf.Tensor) -> list[tf.Tensor]:
        return [tf.gather(part, chosen) for part in self._parts]

    def _numbers(self, epoch: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Return the row numbers in the order of an epoch."""
        numbers: Any = tf.range(self._count)
        random: Any = tf.random
        if not self._shuffle:
            return numbers
        return random.experimental.stateless_shuffle(numbers, seed=tf.stack([seed, epoch]))

    def _chosen(
        self, order: Any, epochs: tf.data.Dataset, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return a dataset of the row numbers of each batch."""
        seed = int(np.random.randint(2**31)) if seed is None else seed
        seeds = tf.data.Dataset.from_tensors(np.int64(seed)).repeat()
        orders = map_traced(order, tf.data.Dataset.zip(epochs, seeds), _NUMBERS)
        return rebatched(orders, epoch_sizes(self.examples, batch_size))


def _traced(function: Any, *specs: tf.TensorSpec) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


# `Dataset.map` traces its function for each dataset and instantiates it for each iterator, and
# `Dataset.rebatch` maps an identity. With small models that takes longer than reading the data, so
# the next two functions call the operations of these methods directly.


def map_traced(function: Any, dataset: tf.data.Dataset, spec: Any) -> tf.data.Dataset:
    """Map a concrete function over a dataset of dense tensors. Its results must have this spec."""
    return _dataset_of(
        tf.raw_ops.MapDataset,
        spec,
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=function.captured_inputs,
        f=function,
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
    )


def rebatched(dataset: tf.data.Dataset, sizes: list[int]) -> tf.data.Dataset:
    """Cut and join batches of dense tensors to these sizes. The list of sizes repeats."""
    with tf.device("CPU:0"):
        return _dataset_of(
            tf.raw_ops.RebatchDatasetV2,
            tf.nest.map_structure(of_any_length, dataset.element_spec),
            input_dataset=tf.data.experimental.to_variant(dataset),
            batch_sizes=tf.constant(sizes, tf.int64),
            drop_remainder=False,
        )


def _dataset_of(op: Any, spec: Any, **arguments: Any) -> tf.data.Dataset:
    tensors = [part for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)]
    types, shapes = [part.dtype for part in tensors], [part.shape for part in tensors]
    variant = op(**arguments, output_types=types, output_shapes=shapes)
    return tf.data.experimental.from_variant(variant, spec)


def of_known_size(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Return batches that all have `size` rows, with that size in their shapes."""
    spec = tf.nest.map_structure(
        lambda part: tf.TensorSpec([size, *part.shape[1:]], part.dtype), batches.element_spec
    )
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(batches), spec)


def of_any_length(spec: Any) -> Any:
    """Return a spec with any length of the first axis. The spec of a part that is None stays."""
    return forms.open_spec(spec) if isinstance(spec, tf.TensorSpec) else spec


# Keras's default. If the number of validation examples is unknown, batches are at most this large,
# so that a small set still has several blocks.
_DEFAULT_BATCH_SIZE = 32
_LEAST_REPEATED_ROWS = 8  # Fewer different rows may be equal by chance.
#: For each `validation_steps`, the place at which the data begin to repeat: the number of full
#: batches before it, and of further rows. If the data do not repeat, None.
Cuts = dict[int | None, tuple[int, int] | None]


def in_blocks(
    data: Any,
    model: Any,
    *,
    batch_size: int,
    steps: int | None,
    cuts: Cuts | None = None,
    train_batch_size: int | None = None,
    whole: bool = False,
) -> tuple[Any, int, int | None]:
    """Cut validation data into batches that do not cross blocks of consecutive examples.

    All batch sizes of a search are validated on the same examples: the whole data, or `steps`
    batches as Keras counts them (batches of the given dataset, or of 32 examples of other data).
    Rows that repeat are validated once.

    Args:
        data: Validation data in any form, or None.
        model: The model to validate. Arrays do not need it.
        batch_size: Largest batch size.
        steps: The `validation_steps` of `fit`. If None, all data are used.
        cuts: A cache of the places at which the data begin to repeat.
        train_batch_size: A data function that raises an error for `batch_size` is called with this.
        whole: Whether all batches except the last one must have `batch_size` rows.

    Returns:
        The data in batches, their batch size, and an upper bound of the number of batches. With
        several replicas arrays stay arrays, because no blocks are measured then.
    """
    if data is None:
        return None, batch_size, None
    if isinstance(data, Iterator) and not forms.gives_batches(data):
        raise InputError(
            "`validation_data` must not be an iterator, because the first trial would use it up: "
            "give arrays or a `tf.data.Dataset.from_generator`. "
            f"Received: a {type(data).__name__}."
        )
    # Keras averages the results of a batch over the replicas, so they must share it evenly.
    replicas = replica_count(model) if hasattr(model, "distribute_strategy") else 1
    cuts = {} if cuts is None else cuts

    def shared(rows: int | None) -> int:
        size = batch_size + -batch_size % replicas
        return size if rows is None else min(size, max(replicas, rows - rows % replicas))

    if not forms.gives_batches(data):
        arrays, length = forms.arrays_of(*keras.utils.unpack_x_y_sample_weight(data))
        rows = length if steps is None else min(length, steps * _DEFAULT_BATCH_SIZE)
        if steps not in cuts:
            cuts[steps] = _before_repeat([forms.each_part(lambda leaf: leaf[:rows], arrays)])
        rows = (cuts[steps] or (0, rows))[1]
        if rows < length:
            data = forms.each_part(lambda leaf: leaf[:rows], data)
            arrays = forms.each_part(lambda leaf: leaf[:rows], arrays)
        if replicas > 1:
            return data, shared(rows), -(-rows // shared(rows))
        size = batch_size if whole else _block_part(rows, batch_size)
        with tf.device("CPU:0"):
            one_batch = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays))
        batches = _pipeline(rebatched(one_batch, epoch_sizes(rows, size)), -(-rows // size))
        if whole and rows % size == 0:
            batches = of_known_size(batches, size)
        return batches, size, -(-rows // size)
    data = forms.as_dataset(data)
    spec = data.element_spec if forms.is_dataset(data) else None
    dense = [part.shape for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)]
    padded = not all(shape.rank and shape[1:].is_fully_defined() for shape in dense)
    if not forms.is_dataset(data):
        size = batch_size if steps is None else _DEFAULT_BATCH_SIZE
        try:
            data = forms.called_for(data, model, size)
        except InputError:
            raise
        except Exception:  # The user's function may accept only the batch size of training.
            if train_batch_size in (None, size):
                raise
            data = forms.called_for(data, model, train_batch_size)
    elements_per_batch = 1 if forms.is_batched(forms.spec_of(data), model) else _DEFAULT_BATCH_SIZE
    data = data if steps is None else data.take(steps * elements_per_batch)
    if steps not in cuts:
        endless = data.cardinality() == tf.data.INFINITE_CARDINALITY
        cuts[steps] = None
        if not endless and (steps is not None or _may_repeat(data)):
            batched = data if elements_per_batch == 1 else data.batch(elements_per_batch)
            cuts[steps] = _before_repeat(batched)
    if cut := cuts[steps]:
        full, rest = cut
        if elements_per_batch > 1:
            data = data.take(full * elements_per_batch + rest)
        else:
            part = forms.first_of_each(data.skip(full).take(1), rest)
            data = data.take(full).concatenate(part) if rest else data.take(full)
    # Batches that are padded to different lengths cannot be joined: they are used as they are.
    if padded and elements_per_batch == 1:
        return data, batch_size, _length(data)
    rows = most_examples(data, model)  # `batches_of` loses the length.
    if replicas > 1:
        size = shared(rows)
    elif whole:
        size = batch_size
    elif rows is None:
        size = min(batch_size, _DEFAULT_BATCH_SIZE)
    else:
        size = _block_part(rows, batch_size)
    return forms.batches_of(data, model, size, whole=whole), size, rows and -(-rows // size)


def _may_repeat(dataset: Any) -> bool:
    """Return whether a stage of a dataset may repeat rows."""
    repeats = any(word in type(dataset).__name__ for word in ("Repeat", "Concatenate"))
    return repeats or any(map(_may_repeat, inputs_of_dataset(dataset)))


def _before_repeat(batches: Any) -> tuple[int, int] | None:
    """Return the place from which all rows repeat, as in `Cuts`, or None if they do not repeat."""
    sizes, keys = [], []
    for batch in batches:
        parts = forms.parts_of(batch)
        if any(map(forms.is_composite, parts)):
            return None
        parts = [np.asarray(part) for part in parts]
        sizes.append(len(parts[0]))
        keys += [hash(b"".join(part[i].tobytes() for part in parts)) for i in range(sizes[-1])]
    hashes, place = np.array(keys, np.int64), 0
    for _ in range(100):
        place = hashes.tobytes().find(hashes[:_LEAST_REPEATED_ROWS].tobytes(), place + 1)
        rows = place // hashes.itemsize
        if place < 0 or len(set(keys[rows:])) < _LEAST_REPEATED_ROWS:
            return None
        if rows and np.array_equal(hashes[rows:], hashes[:-rows]):
            ends = np.cumsum([0, *sizes])
            full = int(np.searchsorted(ends, rows, side="right")) - 1
            return full, int(rows - ends[full])
    return None


def most_examples(dataset: tf.data.Dataset, model: keras.Model | None) -> int | None:
    """Return an upper bound of a dataset's examples, from its length and its first batch."""
    cardinality = _length(dataset)
    if cardinality is None or not forms.is_batched(forms.spec_of(dataset), model):
        return cardinality
    first = [keras.tree.flatten(batch)[0] for batch in dataset.take(1)]
    return cardinality * first[0].shape[0] if first else 0


def _length(dataset: tf.data.Dataset) -> int | None:
    length = int(dataset.cardinality())
    return None if length < 0 else length


def _block_part(examples: int, most: int) -> int:
    """Return a validation batch size, at most `most`, that cuts each block into equal batches."""
    block = max(1, -(-examples // MOST_BLOCKS))
    return -(-block // -(-block // most))


class InputReading(NamedTuple):
    """The counts of an `InputMeter` so far."""

    batches: int
    examples: int
    largest_batch: int  # Examples of the largest batch.
    wait_s: float | None  # Seconds from requests of batches to their arrival. If unknown, None.
    shape_number: float  # A number of the last batch that is equal for batches of equal shapes.
    order: str | None = None  # A fingerprint of the first batch, which shows the order of the rows.


class InputMeter:
    """Counts the batches and examples that reach the train step, in the graph of the dataset."""

    def __init__(self):
        with tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([6], tf.float64), trainable=False)
        self.see_order = False  # Whether to take a fingerprint of the first batch.
        self._functions: dict[str, Any] = {}  # Traced functions, by name and signature.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_functions": {}}  # Graphs cannot be copied.

    def reset(self) -> None:
        self.set_totals(tf.zeros_like(self._totals))

    def totals(self) -> np.ndarray:
        """Return the counts so far; `set_totals` continues from them."""
        return self._totals.numpy()

    def set_totals(self, totals: Any) -> None:
        self._totals.assign(totals)

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        """Return a dataset of the same batches that counts them when they are taken."""
        # The largest batch starts at zero again. The first stage of the dataset yields the time of
        # a request, and the last one reads the time of arrival.
        self._totals.assign(self._totals * tf.constant([1, 1, 0, 1, 1, 1], tf.float64))
        moment, spec = tf.TensorSpec([], tf.float64), dataset.element_spec
        parts = [part for part in tf.nest.flatten(spec) if part.value_type is not type(None)]
        asked = self._traced(_asked, _NUMBER)
        requests = map_traced(asked, tf.data.Dataset.range(1).repeat(), moment)
        counted = tf.data.Dataset.zip(requests, dataset)
        if all(isinstance(part, tf.TensorSpec) for part in parts):
            counted = map_traced(self._traced(self._count_parts, moment, *parts), counted, spec)
        else:
            counted = counted.map(tf.autograph.experimental.do_not_convert(self._count))
        options = tf.data.Options()
        # A prefetch after the meter would hide the waiting time.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        counted = counted.with_options(options)
        cardinality = dataset.cardinality()
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return counted
        return counted.apply(tf.data.experimental.assert_cardinality(cardinality))

    def _traced(self, function: Any, *specs: tf.TensorSpec) -> Any:
        key = repr((function.__name__, self.see_order, specs))
        if key not in self._functions:
            self._functions[key] = _traced(function, *specs)
        return self._functions[key]

    def begin_epoch(self) -> None:
        """Do nothing, because the dataset counts."""

    def end_step(self) -> None:
        """Do nothing, because the dataset counts."""

    def read(self) -> InputReading:
        batches, examples, largest, wait_s, shape, first = self._totals.numpy().tolist()
        order = f"{int(first):x}" if first else None
        waited_s = None if math.isnan(wait_s) else wait_s
        return InputReading(int(batches), int(examples), int(largest), waited_s, shape, order)

    def _count_parts(self, asked_s: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        return self._count(asked_s, list(parts))

    def _count(self, asked_s: tf.Tensor, batch: Any) -> Any:
        leaves = forms.parts_of(batch)
        ranks = [leaf.shape.rank for leaf in leaves]
        # If no other axis varies, the number of rows is enough to tell shapes from each other.
        vary = None in ranks or any(None in leaf.shape[1:].as_list() for leaf in leaves)
        shapes = [
            leaf.bounding_shape(out_type=tf.int64)
            if isinstance(leaf, tf.RaggedTensor)
            else tf.shape(leaf, out_type=tf.int64)
            for leaf in (leaves if vary else leaves[:1])
        ]
        rows = shape_number = tf.cast(shapes[0][0], tf.float64)
        if vary:
            # The sum of the lengths of all axes, each times the square root of another integer,
            # differs between shapes.
            lengths = tf.cast(tf.concat(shapes, axis=0), tf.float64)
            roots = tf.sqrt(tf.range(2.0, 2.0 + tf.cast(tf.size(lengths), tf.float64)))
            shape_number = tf.reduce_sum(lengths * roots)
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        with tf.control_dependencies(tensors):
            waited_s = _now_s() - asked_s
        batches, examples, largest, wait_s, _, order = tf.unstack(self._totals)
        totals = [batches + 1, examples + rows, tf.maximum(largest, rows), wait_s + waited_s]
        if self.see_order:
            first = tf.equal(batches, 0)
            most = tf.where(first, tf.int64.max, 0)  # `tf.cond` takes longer.
            texts = tf.strings.join([tf.io.serialize_tensor(part[:most]) for part in tensors])
            fingerprint = tf.strings.to_hash_bucket_fast(texts, 2**52)  # Exact as a float64.
            order = tf.where(first, tf.cast(fingerprint, tf.float64), order)
        update = self._totals.assign(tf.stack([*totals, shape_number, order]))
        with tf.control_dependencies([update]):
            return forms.each_part(tf.identity, batch)


def _asked(number: tf.Tensor) -> tf.Tensor:
    return _now_s()


def _now_s() -> tf.Tensor:
    # TensorFlow refuses `tf.timestamp` if operations must be deterministic.
    return tf.constant(np.nan, tf.float64) if is_op_determinism_enabled() else tf.timestamp()
