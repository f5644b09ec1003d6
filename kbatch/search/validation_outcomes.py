"""Compute a metric by blocks of validation examples, from the sums in the metric's variables.

The variables of a Keras metric hold sums over examples: total and count of a mean, or the counts
behind AUC and F1. The graph of validation stores them after each batch. The differences between
two batches are the sums of the examples in between. So one validation gives the metric of any part.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import metrics_by_name, replaced
from kbatch.page.numbers import percent
from kbatch.records.notes import Note
from kbatch.records.training_run import NoOutcomes
from kbatch.training.data.batches import MOST_BLOCKS
from kbatch.training.data.forms import is_composite, parts_of
from kbatch.training.metrics import is_accuracy
from kbatch.training.model import compiled_if_full, installed_step

_MOST_ROWS = 4096  # Rows of stored sums. A validation of unknown length needs one for each batch.
_MOST_NUMBERS = 2**21  # Numbers of all rows together.
# Relative difference up to which two outputs count as equal. For other dtypes it is 5e-7.
_ROUNDING = {tf.float16: 1e-3, tf.bfloat16: 8e-3}
_FEWEST_ALIKE = 4  # Fewer examples may have the same output by chance.
_CHECKED = 8  # Batches of a validation in which a custom metric is checked.
# Constants of a hash: each bit of a number changes about half of the bits of the result (Steele,
# Lea and Flood 2014, doi:10.1145/2660193.2660195, the finalizer of SplitMix64).
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFT = 31
_MOST_CLASSES = 128  # Classes whose examples are counted.


class Validated(NamedTuple):
    """One validation, cut into blocks of consecutive examples."""

    sums: np.ndarray  # A row for each block, in the order of the metric's variables.
    examples: tuple[int, ...]  # Examples of each block.
    key: str  # Fingerprint of the examples in their order.
    #: Examples of the rarest class. One example moves a metric such as AUC by one over this number.
    #: If the metric is a mean over examples or the labels are not classes, None.
    rarest: int | None
    lacking_blocks: int  # Blocks without any example of one of the classes.
    #: Share of the examples that have the most common class. If the labels are not classes, None.
    most_common: float | None = None


class BlockSums:
    """Replaces the test step of a model, and stores the sums of one metric."""

    def __init__(self, model: keras.Model, name: str, given_step: Any):
        self.name = name  # The key of the metric in the logs of the test step.
        self._model: Any = model
        self.given_step = given_step  # A test step that the user set on the model.
        self._batches_per_row = 1  # Batches after which the next row of `_rows` begins.
        # The first validation sets the following, if there is a metric of this name. Each is a
        # `tf.Variable` that the graph of validation changes.
        self._metric: Any = None
        # Five numbers: batches and examples so far, the fingerprint of the examples, the number of
        # batches that do not add up (see `_adds_up`), and `_batches_per_row`.
        self._counts: Any = None
        # In each row: examples so far, the variables of the metric, and `_classes`.
        self._rows: Any = None
        # Labels that are classes so far, then the examples of each class. For a loss, None.
        self._classes: Any = None
        self._columns: Any = 1  # Columns of the labels. Each of several columns is a class.
        self.full_rows: Any = None  # Examples of a batch that XLA compiles. If none, None.
        # Four numbers: examples, whether outputs differ or are not finite, the first checksum.
        self._outputs: Any = None

    @classmethod
    def of(cls, model: Any, name: str) -> "BlockSums":
        """Return the `BlockSums` of a metric in a model's test step. Install it if needed."""
        given_step = vars(model).get("test_step")
        installed: Any = getattr(given_step, "__self__", None)
        if isinstance(installed, cls):
            if installed.name == name:
                return installed
            given_step = installed.given_step
        sums = cls(model, name, given_step)
        stock = given_step is None and type(model).test_step is keras.Model.test_step
        if stock and getattr(installed_step(model), "full_rows", None) is not None:
            with tf.device("CPU:0"):
                sums.full_rows = tf.Variable(tf.constant(0), trainable=False)
        # Keras keeps the function that it built from the previous step.
        model.test_step, model.test_function = sums.run, None
        return sums

    def run(self, data: Any) -> Any:
        """Validate a batch as the model does, and store the sums of its metric."""
        return compiled_if_full(self._validate, data, self.full_rows, self._model)

    def _validate(self, data: Any) -> Any:
        if self._outputs is None:
            return self._step(data)
        before, compute, predicted = self._sums(), self._model.compute_metrics, []

        def compute_metrics(x: Any, y: Any, y_pred: Any, *others: Any, **keywords: Any) -> Any:
            predicted[:] = parts_of(y_pred)
            return compute(x, y, y_pred, *others, **keywords)

        with replaced([(self._model, "compute_metrics", compute_metrics)]):
            logs = self._step(data)
        self._compare_outputs(predicted)
        if self._rows is None:
            return logs
        sums = self._sums()
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        hashes = _example_hashes(parts_of(x if y is None else y))
        rows = tf.shape(hashes, out_type=tf.int64)[0]
        batches, examples, *_, stride = tf.unstack(self._counts)
        differs: Any = tf.constant(0, tf.int64)
        if not type(self._metric).update_state.__module__.startswith("keras."):
            # The variables of a custom metric may not be sums.
            differs = tf.cond(
                batches < _CHECKED,
                lambda: tf.cast(tf.logical_not(self._adds_up(before, data, sums)), tf.int64),
                lambda: differs,
            )
        ordered = tf.reduce_sum(_mixed(hashes + _mixed(examples + tf.range(1, rows + 1))))
        row = tf.minimum(batches // stride, self._rows.shape[0] - 1)
        numbers = [[tf.cast(examples + rows, sums.dtype)], sums]
        if self._classes is not None:
            numbers.append(self._classes.assign_add(self._class_counts(y)))
        numbers = tf.concat(numbers, axis=0)
        self._rows.scatter_update(tf.IndexedSlices(numbers[None], row[None]))
        self._counts.assign_add([1, rows, ordered, differs, 0])
        return logs

    def _step(self, data: Any) -> Any:
        return (self.given_step or type(self._model).test_step.__get__(self._model))(data)

    def _compare_outputs(self, outputs: list[Any]) -> None:
        """Store whether outputs of a batch differ from each other, or from the previous batch."""
        graph = tf.compat.v1.get_default_graph()
        if not outputs or any(
            is_composite(x) or x.dtype == tf.string or getattr(x, "graph", graph) is not graph
            for x in outputs
        ):
            return  # The outputs are from a custom step, or not numbers.
        count, differ, bad, first = tf.unstack(self._outputs)
        checksum, size, most = 0.0, 0.0, 1e-6
        for output in outputs:
            rows: Any = tf.reshape(tf.cast(output, tf.float32), [tf.shape(output)[0], -1])
            finite = tf.reduce_all(rows < np.inf)  # False for NaN.
            bad = tf.maximum(bad, 1 - tf.cast(finite, tf.float32))
            rows = tf.maximum(rows, tf.float32.min)  # A mask may be -inf.
            rounding = _ROUNDING.get(output.dtype, 5e-7)
            equal = tf.abs(rows - rows[:1]) <= rounding * tf.abs(rows[:1])
            differ = tf.maximum(differ, 1 - tf.cast(tf.reduce_all(equal), tf.float32))
            # Compare examples of different batches by a checksum: a sum with different weights.
            unmasked = tf.where(rows[0] > tf.float32.min, rows[0], -1.7)
            parts = unmasked * (1.5 + tf.cos(tf.range(tf.cast(tf.size(unmasked), tf.float32))))
            checksum, size = checksum + tf.reduce_sum(parts), size + tf.reduce_sum(tf.abs(parts))
            most = max(most, 2 * rounding)
        differs = (count > 0) & (tf.abs(checksum - first) > most * size)
        differ = tf.maximum(differ, tf.cast(differs, tf.float32))
        count = count + tf.cast(tf.shape(outputs[0])[0], tf.float32)
        self._outputs.assign(tf.stack([count, differ, bad, checksum]))

    def is_dead(self) -> bool:
        """Return whether the outputs of the last validation were constant, or one is not finite.

        Such a model can have a good metric: for equal outputs, top-k accuracy counts each as right.
        """
        count, differ, bad, _ = (0, 0, 0, 0) if self._outputs is None else self._outputs.numpy()
        return bool(bad or (count >= _FEWEST_ALIKE and not differ))

    def _sums(self) -> Any:
        if self._rows is None:
            return None
        values = [tf.reshape(variable.value, [-1]) for variable in self._metric.variables]
        return tf.concat([tf.cast(value, tf.float32) for value in values], axis=0)

    def _adds_up(self, before: Any, data: Any, after: Any) -> Any:
        """Return whether a batch adds the same to the metric as when it is validated alone."""
        variables = self._model.metrics_variables
        values = [tf.identity(variable.value) for variable in variables]
        for variable in variables:
            variable.assign(tf.zeros_like(variable.value))
        self._step(data)
        alone = self._sums()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return tf.reduce_all(tf.abs(before + alone - after) <= 1e-4 * tf.abs(after) + 1e-6)

    def begin(self, batches: int | None, full_rows: int = 0) -> None:
        """Begin a validation. `batches` is its number of batches, or None if it is unknown."""
        if self.full_rows is not None:
            self.full_rows.assign(full_rows)
        self._batches_per_row = 1 if batches is None else -(-batches // MOST_BLOCKS)
        if self._metric is None:
            self._metric = metrics_by_name(self._model).get(self.name)
            self._make_room()
        if self._outputs is None:
            self._outputs = tf.Variable(tf.zeros([4]))
        self._outputs.assign(tf.zeros([4]))
        if self._rows is not None:
            self._counts.assign([0, 0, 0, 0, self._batches_per_row])
        if self._classes is not None:
            self._classes.assign(tf.zeros_like(self._classes))

    def _make_room(self) -> None:
        """Make the variables, unless the variables of the metric have too many numbers."""
        # A function that makes variables would be traced twice, so make them before.
        variables = [] if self._metric is None else self._metric.variables
        size = 1 + sum(math.prod(variable.shape) for variable in variables)
        most = min(_MOST_ROWS, _MOST_NUMBERS // size)
        if size > 1 and most > MOST_BLOCKS:
            self._counts = tf.Variable(tf.zeros([5], tf.int64))
            if not self._is_mean() or is_accuracy(self.name):
                self._classes = tf.Variable(tf.zeros([1 + _MOST_CLASSES]))
                size += 1 + _MOST_CLASSES
            self._rows = tf.Variable(tf.zeros([most, size]))

    def _class_counts(self, y: Any) -> tf.Tensor:
        """Return the number of labels that are classes, followed by the examples of each class.

        Labels are class indices, or rows of zeros and ones with a column for each class.
        """
        if isinstance(y, (list, tuple)):
            y = dict(zip(self._model.output_names, y, strict=False))
        if isinstance(y, Mapping):
            labels_of_metric = [y[key] for key in y if self.name.startswith(f"{key}_")]
            y = labels_of_metric[0] if len(labels_of_metric) == 1 else None
        shape = y.shape if isinstance(y, tf.Tensor) and y.dtype != tf.string else ()
        self._columns = shape[1] if len(shape) == 2 else 1
        if len(shape) not in (1, 2) or self._columns not in range(1, _MOST_CLASSES + 1):
            return tf.zeros([1 + _MOST_CLASSES])
        labels = tf.reshape(tf.cast(y, tf.float32), [-1, self._columns])
        classes, most = tf.round(labels), 1 if self._columns > 1 else _MOST_CLASSES - 1
        valid = (tf.abs(labels - classes) < 1e-3) & (classes >= 0) & (classes <= most)
        valid = tf.reduce_all(valid, axis=1)
        if self._columns == 1:
            ids = tf.where(valid, tf.cast(classes[:, 0], tf.int32), -1)
            counts = tf.reduce_sum(tf.one_hot(ids, _MOST_CLASSES), axis=0)
        else:
            counts = tf.reduce_sum(tf.where(valid[:, None], classes, 0.0), axis=0)
            counts = tf.pad(counts, [[0, _MOST_CLASSES - self._columns]])
        return tf.concat([[tf.reduce_sum(tf.cast(valid, tf.float32))], counts], axis=0)

    def _rarest(self, blocks: np.ndarray, examples: np.ndarray) -> tuple[int, int]:
        """Return the number of examples of the rarest class, and how many blocks lack a class."""
        counts, columns = blocks[:, 1:], self._columns
        if columns > 1:  # Each class has positive and negative examples.
            counts = np.stack([counts[:, :columns], examples[:, None] - counts[:, :columns]])
            present = counts.sum(1).min(0) > 0
            # The metric may be for a single class. Otherwise it pools or averages all classes.
            class_id = getattr(self._metric, "class_id", None)
            if class_id is not None:
                present &= np.arange(columns) == class_id
            counts = counts[:, :, present]
            rarest = int(counts.sum(1).min(initial=examples.sum()))
            if class_id is None:
                rarest = min(columns * rarest, int(examples.sum()))
            return rarest, int((counts[0] == 0).any(1).sum())
        counts = counts[:, counts.sum(0) > 0]
        rarest = int(counts.sum(0).min()) if len(counts.T) > 1 else 0
        return rarest, int((counts == 0).any(1).sum())

    def read(self) -> Validated | NoOutcomes:
        """Return the block sums of the last validation, or a code for why there are none."""
        if self._rows is None:
            return "no_metric" if self._metric is None else "no_sums"
        batches, _, ordered, differs, _ = self._counts.numpy().tolist()
        count = -(-batches // self._batches_per_row)
        if differs or count > self._rows.shape[0]:
            return "no_sums" if differs else "unknown_length"
        rows = self._rows.numpy()[:count].astype(float)
        # Rows are sums so far, so take the last row of each block. The last block may be shorter.
        per_block = -(-count // MOST_BLOCKS)
        ends = np.append(rows[per_block - 1 : -1 : per_block], rows[-1:], axis=0)
        blocks = np.diff(ends, axis=0, prepend=0.0)
        end = blocks.shape[1] - (0 if self._classes is None else 1 + _MOST_CLASSES)
        examples, sums = blocks[:, 0], blocks[:, 1:end]
        classes, rarest, lacking_blocks, most_common = blocks[:, end:], None, 0, None
        if len(classes.T) and classes[:, 0].sum() >= examples.sum():  # Every label is a class.
            if not self._is_mean():
                rarest, lacking_blocks = self._rarest(classes, examples)
            most_common = float(classes[:, 1:].sum(0).max() / examples.sum())
        key = f"{ordered % 2**64:x}"
        return Validated(sums, tuple(map(int, examples)), key, rarest, lacking_blocks, most_common)

    def _is_mean(self) -> bool:
        return isinstance(self._metric, keras.metrics.Mean)

    def metric(self, sums: np.ndarray) -> float:
        """Return the metric of examples with these sums, or NaN if it is not one number."""
        metric = self._metric
        if self._is_mean() and type(metric).result is keras.metrics.Mean.result:
            return sums[0] / sums[1] if sums[1] else np.nan
        value = np.asarray(metric.stateless_result(list(self._parts_of(sums).values())))
        return float(value.item()) if value.size == 1 else np.nan

    def _parts_of(self, sums: np.ndarray) -> dict[int, np.ndarray]:
        """Return the values of the metric's variables for these sums, by the id of the variable."""
        variables = self._metric.variables
        parts = np.split(sums, np.cumsum([math.prod(v.shape) for v in variables])[:-1])
        pairs = zip(variables, parts, strict=True)
        return {id(v): part.reshape(v.shape).astype(v.dtype) for v, part in pairs}

    def notes(self, sums: np.ndarray) -> tuple[Note, ...]:
        """Return a note if most predictions are below the smallest threshold of an AUC."""
        metric: Any = self._metric
        if not isinstance(metric, keras.metrics.AUC) or len(metric.thresholds) < 3:
            return ()
        parts = self._parts_of(sums)
        above = float(parts[id(metric.true_positives)][1].sum())
        below = float(parts[id(metric.false_negatives)][1].sum())
        if not below > above:
            return ()
        share, first = percent(below / (above + below)), float(metric.thresholds[1])
        return (Note.of("auc_thresholds", share=share, first=first, count=len(metric.thresholds)),)


def _example_hashes(parts: list[Any]) -> tf.Tensor:
    """Return a hash of 64 bits for each example. All parts must have a row for each example."""
    hashes: Any = tf.constant(0, tf.int64)
    for part in parts:
        numbers = _numbers(part)
        places = tf.range(1, tf.shape(numbers, out_type=tf.int64)[1] + 1)
        hashes = _mixed(hashes + tf.reduce_sum(numbers * _mixed(places), axis=1))
    return hashes


def _mixed(numbers: Any) -> Any:
    """Return a hash of each 64-bit number."""
    numbers *= _FACTORS[0]
    return tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, _SHIFT)) * _FACTORS[1]


def _numbers(part: Any) -> tf.Tensor:
    """Return a part of a batch as integers, with a row for each example."""
    if isinstance(part, tf.RaggedTensor):
        part = part.to_tensor()
    elif is_composite(part):
        part = tf.sparse.to_dense(part)
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, 2**62)
    elif part.dtype.is_floating:
        part = tf.bitcast(tf.cast(part, tf.float32), tf.int32)
    return tf.reshape(tf.cast(part, tf.int64), [tf.shape(part)[0], -1])
