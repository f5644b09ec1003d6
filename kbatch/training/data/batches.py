"""Data in batches: made of arrays, cut for validation, and counted as they reach a train step."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import cache_file, inputs_of_dataset, is_op_determinism_enabled
from kbatch.training.data.forms import (
    arrays_of,
    as_dataset,
    batches_of,
    called_for,
    each_part,
    first_of_each,
    gives_batches,
    is_batched,
    is_composite,
    is_dataset,
    open_spec,
    parts_of,
    spec_of,
)
from kbatch.training.model import replica_count

MOST_BLOCKS = 50  # Of consecutive validation examples, at most.

_ENDLESS = 2**62
_NUMBER, _NUMBERS = tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)


def sized(examples: int, size: int) -> list[int]:
    """Return the sizes of the batches of an epoch."""
    full, rest = divmod(examples, size)
    return [size] if full and not rest else [*[size] * full, rest]


def held_batches(arrays: Any, batch_size: int) -> tf.data.Dataset:
    """Return arrays as they are, in batches."""
    with tf.device("CPU:0"):
        whole = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays))
        rows = len(parts_of(arrays)[0])
    return _pipeline(rebatched(whole, sized(rows, batch_size)), -(-rows // batch_size))


def endless(batch: Any) -> tf.data.Dataset:
    """Return a batch again and again."""
    options = tf.data.Options()
    # To free an iterator that TensorFlow tunes takes longer the longer it has lived.
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


def _pipeline(batches: tf.data.Dataset, cardinality: int) -> tf.data.Dataset:
    """Leave a pipeline of known length as it is: to tune or to rewrite it does not pay."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return batches.apply(tf.data.experimental.assert_cardinality(cardinality)).with_options(options)


class ArrayRows:
    """Arrays as tensors, and the graphs that draw an order of their rows and gather them."""

    def __init__(self, arrays: Any, *, shuffle: bool):
        # tf.data would pack a list into one tensor.
        arrays = keras.tree.lists_to_tuples(arrays)
        with tf.device("CPU:0"):
            tensors = each_part(tf.convert_to_tensor, arrays)
            self._parts = parts_of(tensors)
            self.examples: int = self._parts[0].shape[0]
            count = tf.constant(self.examples, tf.int64)
        whole = tf.data.Dataset.from_tensors(tensors).element_spec
        self._spec = tf.nest.map_structure(of_any_length, whole)
        self._count, self._shuffle = count, shuffle
        self._order = _traced(self._numbers, _NUMBER, _NUMBER)
        self._gather = _traced(self._rows, _NUMBERS)

    def endless(self, batch_size: int, *, seed: int | None, first_epoch: int) -> tf.data.Dataset:
        """Return batches of one epoch after the other, each in an order of its own."""
        epochs = tf.data.Dataset.range(first_epoch, _ENDLESS)
        chosen = self._chosen(self._order, epochs, batch_size, seed)
        batches = map_traced(self._gather, chosen, self._spec)
        return _pipeline(batches.prefetch(2), tf.data.INFINITE_CARDINALITY)

    def epoch(self, batch_size: int, *, seed: int | None, first_epoch: int) -> tf.data.Dataset:
        """Return the batches of an epoch, in the next order each time they were read to the end."""
        # Keras makes iterators that it does not read, or of which it reads one batch.
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
        """Return the numbers of the rows in the order of an epoch."""
        numbers: Any = tf.range(self._count)
        random: Any = tf.random
        if not self._shuffle:
            return numbers
        return random.experimental.stateless_shuffle(numbers, seed=tf.stack([seed, epoch]))

    def _chosen(
        self, order: Any, epochs: tf.data.Dataset, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return the numbers of the rows of each batch."""
        seed = int(np.random.randint(2**31)) if seed is None else seed
        seeds = tf.data.Dataset.from_tensors(np.int64(seed)).repeat()
        orders = map_traced(order, tf.data.Dataset.zip(epochs, seeds), _NUMBERS)
        return rebatched(orders, sized(self.examples, batch_size))


def _traced(function: Any, *specs: tf.TensorSpec) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


# `tf.data` traces each function that is mapped for each dataset and makes it ready for each
# iterator, and `Dataset.rebatch` maps one that changes nothing: beside small models that takes
# longer than to read the data.


def map_traced(function: Any, dataset: tf.data.Dataset, spec: Any) -> tf.data.Dataset:
    """Map a concrete function, whose results have this spec, over a dataset of dense tensors."""
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
    """Cut and join batches of dense tensors to these sizes, in turn and again and again."""
    with tf.device("CPU:0"):
        return _dataset_of(
            tf.raw_ops.RebatchDatasetV2,
            tf.nest.map_structure(of_any_length, dataset.element_spec),
            input_dataset=tf.data.experimental.to_variant(dataset),
            batch_sizes=tf.constant(sizes, tf.int64),
            drop_remainder=False,
        )


def _dataset_of(op: Any, spec: Any, **arguments: Any) -> tf.data.Dataset:
    tensors = [one for one in tf.nest.flatten(spec) if isinstance(one, tf.TensorSpec)]
    types, shapes = [one.dtype for one in tensors], [one.shape for one in tensors]
    variant = op(**arguments, output_types=types, output_shapes=shapes)
    return tf.data.experimental.from_variant(variant, spec)


def of_known_size(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Return batches that all have `size` rows, with that size in their shapes."""
    spec = tf.nest.map_structure(
        lambda part: tf.TensorSpec([size, *part.shape[1:]], part.dtype), batches.element_spec
    )
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(batches), spec)


def of_any_length(spec: Any) -> Any:
    return open_spec(spec) if isinstance(spec, tf.TensorSpec) else spec  # Else there is no part.


# Keras's own, and that of data of unknown length, so that there are blocks enough of a small set.
_DEFAULT_BATCH_SIZE = 32
_FEWEST_AGAIN = 8  # Different rows that repeat; fewer may be equal by chance.
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
    """Cut validation data into blocks: all of them, or `steps` batches as Keras counts these.

    Steps count the batches of a dataset as it is given, and batches of 32 of other data: all batch
    sizes of a search are validated on the same examples. Rows that repeat are validated once.
    `cuts` keeps by `steps` where they begin to repeat, so that the data are looked at once. A data
    function that raises for `batch_size` is called with `train_batch_size`. If `whole`, all blocks
    but the last have `batch_size` rows.

    Return a dataset in batches, the size of a batch, and how many there are at most. Arrays of
    which no blocks are measured stay arrays.
    """
    if data is None:
        return None, batch_size, None
    if isinstance(data, Iterator) and not gives_batches(data):
        raise InputError(
            "An iterator as `validation_data` is used up by the first trial: give arrays, or what "
            f"`tf.data.Dataset.from_generator` makes. Received: a {type(data).__name__}."
        )
    # Of several replicas no blocks are measured, and Keras averages the first batch over them: it
    # must be shared evenly.
    replicas = replica_count(model) if hasattr(model, "distribute_strategy") else 1
    cuts = {} if cuts is None else cuts

    def shared(rows: int | None) -> int:
        size = batch_size + -batch_size % replicas
        return size if rows is None else min(size, max(replicas, rows - rows % replicas))

    if not gives_batches(data):
        arrays, given = arrays_of(*keras.utils.unpack_x_y_sample_weight(data))
        rows = given if steps is None else min(given, steps * _DEFAULT_BATCH_SIZE)
        if steps not in cuts:
            cuts[steps] = _before_repeat([each_part(lambda leaf: leaf[:rows], arrays)])
        rows = (cuts[steps] or (0, rows))[1]
        if rows < given:
            data, arrays = (each_part(lambda leaf: leaf[:rows], one) for one in (data, arrays))
        if replicas > 1:
            return data, shared(rows), -(-rows // shared(rows))
        size = batch_size if whole else _block_part(rows, batch_size)
        batches = held_batches(arrays, size)
        if whole and rows % size == 0:
            batches = of_known_size(batches, size)
        return batches, size, -(-rows // size)
    data = as_dataset(data)
    spec = data.element_spec if is_dataset(data) else None
    dense = [one.shape for one in tf.nest.flatten(spec) if isinstance(one, tf.TensorSpec)]
    padded = not all(shape.rank and shape[1:].is_fully_defined() for shape in dense)
    if not is_dataset(data):
        size = batch_size if steps is None else _DEFAULT_BATCH_SIZE
        try:
            data = called_for(data, model, size)
        except InputError:
            raise
        except Exception:  # A function that trains this trial may validate it too.
            if train_batch_size in (None, size):
                raise
            data = called_for(data, model, train_batch_size)
    # Elements of a batch.
    count = 1 if is_batched(spec_of(data), model) else _DEFAULT_BATCH_SIZE
    data = data if steps is None else data.take(steps * count)
    if steps not in cuts:
        endless = data.cardinality() == tf.data.INFINITE_CARDINALITY
        looks = not endless and (steps is not None or _may_repeat(data))
        cuts[steps] = _before_repeat(data if count == 1 else data.batch(count)) if looks else None
    if cut := cuts[steps]:
        full, rest = cut
        if count > 1:
            data = data.take(full * count + rest)
        else:
            part = first_of_each(data.skip(full).take(1), rest)
            data = data.take(full).concatenate(part) if rest else data.take(full)
    # Batches that are padded to lengths of their own cannot be joined: all sizes take them.
    if padded and count == 1:
        return data, batch_size, _length(data)
    # The length of what is batched again is not known.
    rows = most_examples(data, model)
    if replicas > 1:
        size = shared(rows)
    elif whole:
        size = batch_size
    elif rows is None:
        size = min(batch_size, _DEFAULT_BATCH_SIZE)
    else:
        size = _block_part(rows, batch_size)
    return batches_of(data, model, size, whole=whole), size, rows and -(-rows // size)


def _may_repeat(dataset: Any) -> bool:
    """Return whether a stage of a dataset repeats rows, or joins datasets that may be equal."""
    own = type(dataset).__name__
    return (
        "Repeat" in own or "Concatenate" in own or any(map(_may_repeat, inputs_of_dataset(dataset)))
    )


def _before_repeat(batches: Any) -> tuple[int, int] | None:
    """Return how many batches, and rows of the next one, come before all rows repeat.

    None if they do not: some rows may be equal by chance.
    """
    sizes, keys = [], []
    for batch in batches:
        parts = parts_of(batch)
        if any(map(is_composite, parts)):
            return None
        parts = [np.asarray(part) for part in parts]
        sizes.append(len(parts[0]))
        keys += [hash(b"".join(part[i].tobytes() for part in parts)) for i in range(sizes[-1])]
    found, place = np.array(keys, np.int64), 0
    for _ in range(100):
        place = found.tobytes().find(found[:_FEWEST_AGAIN].tobytes(), place + 1)
        rows = place // found.itemsize
        if place < 0 or len(set(keys[rows:])) < _FEWEST_AGAIN:
            return None
        if rows and np.array_equal(found[rows:], found[:-rows]):
            ends = np.cumsum([0, *sizes])
            full = int(np.searchsorted(ends, rows, side="right")) - 1
            return full, int(rows - ends[full])
    return None


def most_examples(dataset: tf.data.Dataset, model: keras.Model | None) -> int | None:
    """Return the most examples that a dataset can have, from its length and its first batch."""
    cardinality = _length(dataset)
    if cardinality is None or not is_batched(spec_of(dataset), model):
        return cardinality
    first = [keras.tree.flatten(batch)[0] for batch in dataset.take(1)]
    return cardinality * first[0].shape[0] if first else 0


def _length(dataset: tf.data.Dataset) -> int | None:
    length = int(dataset.cardinality())
    return None if length < 0 else length


def _block_part(examples: int, most: int) -> int:
    """Return the batch size of a validation: one batch is a block, or several are."""
    block = max(1, -(-examples // MOST_BLOCKS))
    return -(-block // -(-block // most))


def fill_caches(dataset: Any, most: int | None) -> None:
    """Fill the caches that training reads to their end, up to `most` examples."""
    # The first trial would pay for all others, and seem to be slow. Where each epoch ends with the
    # data, `most` is None. A full cache takes some microseconds an element.
    waiting = [dataset]
    while waiting:
        stage = waiting.pop()
        known = most is None or 0 <= int(stage.cardinality()) <= most
        if cache_file(stage) is not None and known:
            # All are skipped, in C++; of a number beyond 32 bits none would be.
            for _ in stage.skip(2**31 - 1):
                pass
        if "Take" not in type(stage).__name__:  # It leaves a rest.
            waiting += inputs_of_dataset(stage)


class InputReading(NamedTuple):
    batches: int
    examples: int
    largest_batch: int  # Examples in it.
    wait_s: float | None  # From requests for batches to their arrivals; None where unknown.
    shape_number: float  # Tells the shapes of the last batch from others.
    order: str | None = None  # Fingerprint of the first batch: it tells orders apart, if known.


class InputMeter:
    """Counts in the graph what really reaches the train step."""

    # A `batch_size` argument says nothing about a dataset, which brings its own.
    def __init__(self):
        with tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([6], tf.float64), trainable=False)
        self.see_order = False  # Whether it takes a fingerprint of the first batch.
        self._functions: dict[str, Any] = {}  # Traced, by what they take.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_functions": {}}  # Graphs cannot be copied.

    def reset(self) -> None:
        self.set_totals(tf.zeros_like(self._totals))

    def totals(self) -> np.ndarray:
        """Return what was counted so far, to count on from there later."""
        return self._totals.numpy()

    def set_totals(self, totals: Any) -> None:
        self._totals.assign(totals)

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        """Make a dataset of the same batches that counts them as they are taken."""
        # The time is stamped when a batch is asked for, and when it is there. The largest batch is
        # counted from zero.
        self._totals.assign(self._totals * tf.constant([1, 1, 0, 1, 1, 1], tf.float64))
        moment, spec = tf.TensorSpec([], tf.float64), dataset.element_spec
        parts = [one for one in tf.nest.flatten(spec) if one.value_type is not type(None)]
        requests = tf.data.Dataset.range(1).repeat()
        requests = map_traced(self._traced(_asked, tf.TensorSpec([], tf.int64)), requests, moment)
        counted = tf.data.Dataset.zip(requests, dataset)
        if all(isinstance(part, tf.TensorSpec) for part in parts):
            counted = map_traced(self._traced(self._count_parts, moment, *parts), counted, spec)
        else:
            counted = counted.map(tf.autograph.experimental.do_not_convert(self._count))
        options = tf.data.Options()
        # A prefetch after the meter would hide the waiting.
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
            made = tf.function(function, autograph=False)
            self._functions[key] = made.get_concrete_function(*specs)
        return self._functions[key]

    def begin_epoch(self) -> None:
        """Do nothing: the dataset counts."""

    def end_step(self) -> None:
        """Do nothing: the dataset counts."""

    def read(self) -> InputReading:
        batches, examples, largest, wait_s, shape, first = self._totals.numpy().tolist()
        order = f"{int(first):x}" if first else None
        waited_s = None if math.isnan(wait_s) else wait_s
        return InputReading(int(batches), int(examples), int(largest), waited_s, shape, order)

    def _count_parts(self, asked_s: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        return self._count(asked_s, list(parts))

    def _count(self, asked_s: tf.Tensor, batch: Any) -> Any:
        leaves = parts_of(batch)
        ranks = [leaf.shape.rank for leaf in leaves]
        # Else all parts have the same rows, and nothing else varies.
        vary = None in ranks or any(None in leaf.shape[1:].as_list() for leaf in leaves)
        shapes = [
            leaf.bounding_shape(out_type=tf.int64)
            if isinstance(leaf, tf.RaggedTensor)
            else tf.shape(leaf, out_type=tf.int64)
            for leaf in (leaves if vary else leaves[:1])
        ]
        rows = shape_number = tf.cast(shapes[0][0], tf.float64)
        if vary:
            # The lengths of all axes, each times a root of its own: equal for equal shapes.
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
            most = tf.where(first, tf.int64.max, 0)  # A condition would take longer.
            texts = tf.strings.join([tf.io.serialize_tensor(one[:most]) for one in tensors])
            seen = tf.strings.to_hash_bucket_fast(texts, 2**52)  # Exact as a float.
            order = tf.where(first, tf.cast(seen, tf.float64), order)
        update = self._totals.assign(tf.stack([*totals, shape_number, order]))
        with tf.control_dependencies([update]):
            return each_part(tf.identity, batch)


def _asked(number: tf.Tensor) -> tf.Tensor:
    return _now_s()


def _now_s() -> tf.Tensor:
    # A clock is no deterministic operation.
    return tf.constant(np.nan, tf.float64) if is_op_determinism_enabled() else tf.timestamp()


class StepMeter(InputMeter):
    """Counts what several replicas train on by the steps that the host sees end."""

    # A strategy takes batches ahead of the steps, and one more to build the model from, so that its
    # input tells neither how many were trained on nor who waited. Batches are full but for the last
    # one of an epoch, where the examples of an epoch are known; an execution is one step.
    def __init__(self, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._batches = self._examples = self._last = 0
        # Examples of an epoch, and those that no step has trained on.
        self._epoch = self._left = math.inf

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        self._epoch = math.inf if examples is None else examples
        return super().attach(dataset)

    def begin_epoch(self) -> None:
        self._left = self._epoch

    def end_step(self) -> None:
        self._last = int(min(self._batch_size, self._left))
        self._left -= self._last
        self._batches += 1
        self._examples += self._last

    def read(self) -> InputReading:
        seen = super().read()
        counts = self._batches, self._examples, seen.largest_batch
        return InputReading(*counts, None, float(self._last), seen.order)
