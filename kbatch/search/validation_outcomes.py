"""A metric by blocks of validation examples, taken from the sums that its variables hold.

A metric of Keras is a function of sums over examples, which its variables hold: total and count of
a mean, the counts behind AUC and F1. The graph that validates keeps them after each batch. Their
differences are the sums of blocks of examples, from which the metric of any part of the validation
set follows without another pass.
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
from kbatch.training.model import compiled_if_full, installed_step

# Of unknown length a validation may have so many batches.
_MOST_ROWS = 4096
_MOST_NUMBERS = 2**21  # In all rows together.
# Relative difference below which two numbers count as equal. For float32 and others it is 5e-7.
_ROUNDING = {tf.float16: 1e-3, tf.bfloat16: 8e-3}
_FEWEST_ALIKE = 4  # Examples with one output; fewer may have it by chance.
_CHECKED = 8  # Batches of a validation, for a metric of the user's own.
# Odd numbers of 64 bits without pattern, and a shift: each bit of a number then changes about half
# of those of its product (Steele, Lea, Flood 2014, the finalizer of SplitMix64).
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFT = 31
_MOST_CLASSES = 128  # Whose examples are counted.


class Validated(NamedTuple):
    """One validation, cut into blocks of consecutive examples."""

    sums: np.ndarray  # Of each block, in the order of the metric's variables.
    examples: tuple[int, ...]  # Of each block.
    key: str  # Fingerprint of the examples in their order.
    #: Examples of the rarest class, which decide how far one example moves a metric that is no mean
    #: over examples. If the metric is a mean or the labels are not classes, it is None.
    rarest: int | None
    lacking: int  # Blocks without any example of one of the classes.


class BlockSums:
    """Stands in for the test step of a model, and keeps the sums of one metric."""

    def __init__(self, model: keras.Model, name: str, given: Any):
        self.name = name  # Of the metric, as the test step returns it.
        self._model: Any = model
        self.given = given  # A test step that the user set on the model.
        self._stride = 1  # Batches of a row.
        # These come with the first validation, if there is a metric of that name.
        self._metric: Any = None
        # Batches, examples, their fingerprint, how many batches gave other sums alone than in
        # their turn, and batches of a row.
        self._counts: Any = None
        # Examples so far, what the metric's variables hold, and the examples of each class.
        self._rows: Any = None
        self._classes: Any = None  # Examples with a class, then those of each; None for a mean.
        self._columns: Any = 1  # Of the labels: of several columns each one is a class.
        # Examples of a full batch, which XLA compiles; None if it compiles none.
        self.full_rows: Any = None
        # Examples, whether their outputs differ, whether one is not finite, and the first output.
        self._outputs: Any = None

    @classmethod
    def of(cls, model: Any, name: str) -> "BlockSums":
        """Return the one that a model's test step has for a metric; install it if there is none."""
        given = vars(model).get("test_step")
        known: Any = getattr(given, "__self__", None)
        if isinstance(known, cls):
            if known.name == name:
                return known
            given = known.given
        found = cls(model, name, given)
        stock = given is None and type(model).test_step is keras.Model.test_step
        if stock and getattr(installed_step(model), "full_rows", None) is not None:
            with tf.device("CPU:0"):
                found.full_rows = tf.Variable(tf.constant(0), trainable=False)
        # Keras keeps the function that it built from the step before.
        model.test_step, model.test_function = found.run, None
        return found

    def run(self, data: Any) -> Any:
        """Validate a batch as the model does, and keep what its metric has summed up."""
        return compiled_if_full(self._validate, data, self.full_rows, self._model)

    def _validate(self, data: Any) -> Any:
        if self._outputs is None:
            return self._step(data)
        before, compute, predicted = self._sums(), self._model.compute_metrics, []

        def compute_metrics(x: Any, y: Any, y_pred: Any, *rest: Any, **named: Any) -> Any:
            predicted[:] = parts_of(y_pred)
            return compute(x, y, y_pred, *rest, **named)

        with replaced([(self._model, "compute_metrics", compute_metrics)]):
            logs = self._step(data)
        self._look_at(predicted)
        if self._rows is None:
            return logs
        sums = self._sums()
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        hashes = _example_hashes(parts_of(x if y is None else y))
        rows = tf.shape(hashes, out_type=tf.int64)[0]
        batches, examples, *_, stride = tf.unstack(self._counts)
        differs: Any = tf.constant(0, tf.int64)
        if not type(self._metric).update_state.__module__.startswith("keras."):
            # Keras's own add up.
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
        return (self.given or type(self._model).test_step.__get__(self._model))(data)

    def _look_at(self, outputs: list[Any]) -> None:
        """Keep whether the outputs of a batch differ, from each other and from those before."""
        here = tf.compat.v1.get_default_graph()
        if not outputs or any(
            is_composite(one) or one.dtype == tf.string or getattr(one, "graph", here) is not here
            for one in outputs
        ):
            return  # They are those of a custom step, or no numbers.
        count, differ, bad, first = tf.unstack(self._outputs)
        own, size, most = 0.0, 0.0, 1e-6
        for one in outputs:
            rows: Any = tf.reshape(tf.cast(one, tf.float32), [tf.shape(one)[0], -1])
            finite = tf.reduce_all(rows < np.inf)  # Not of NaN.
            bad = tf.maximum(bad, 1 - tf.cast(finite, tf.float32))
            rows = tf.maximum(rows, tf.float32.min)  # Those that are masked by -inf.
            rounding = _ROUNDING.get(one.dtype, 5e-7)
            alike = tf.abs(rows - rows[:1]) <= rounding * tf.abs(rows[:1])
            differ = tf.maximum(differ, 1 - tf.cast(tf.reduce_all(alike), tf.float32))
            # Of one-example batches only such sums can be compared.
            unmasked = tf.where(rows[0] > tf.float32.min, rows[0], -1.7)
            parts = unmasked * (1.5 + tf.cos(tf.range(tf.cast(tf.size(unmasked), tf.float32))))
            own, size = own + tf.reduce_sum(parts), size + tf.reduce_sum(tf.abs(parts))
            most = max(most, 2 * rounding)
        apart = (count > 0) & (tf.abs(own - first) > most * size)
        differ = tf.maximum(differ, tf.cast(apart, tf.float32))
        count, first = count + tf.cast(tf.shape(outputs[0])[0], tf.float32), own
        self._outputs.assign(tf.stack([count, differ, bad, first]))

    def is_dead(self) -> bool:
        """Return whether all examples of the last validation have one output, or one is not finite.

        A metric may be good then: ties count as in the top k.
        """
        count, differ, bad, _ = (0, 0, 0, 0) if self._outputs is None else self._outputs.numpy()
        return bool(bad or (count >= _FEWEST_ALIKE and not differ))

    def _sums(self) -> Any:
        if self._rows is None:
            return None
        numbers = [tf.reshape(one.value, [-1]) for one in self._metric.variables]
        return tf.concat([tf.cast(one, tf.float32) for one in numbers], axis=0)

    def _adds_up(self, before: Any, data: Any, after: Any) -> Any:
        """Return whether a batch alone adds to the metric what it added in its turn."""
        variables = self._model.metrics_variables
        kept = [tf.identity(one.value) for one in variables]
        for one in variables:
            one.assign(tf.zeros_like(one.value))
        self._step(data)
        alone = self._sums()
        for one, value in zip(variables, kept, strict=True):
            one.assign(value)
        return tf.reduce_all(tf.abs(before + alone - after) <= 1e-4 * tf.abs(after) + 1e-6)

    def begin(self, batches: int | None, full_rows: int = 0) -> None:
        """Begin a validation of so many batches, None where that is not known."""
        if self.full_rows is not None:
            self.full_rows.assign(full_rows)
        self._stride = 1 if batches is None else -(-batches // MOST_BLOCKS)
        if self._metric is None:
            self._metric = metrics_by_name(self._model).get(self.name)
            self._make_room()
        if self._outputs is None:
            self._outputs = tf.Variable(tf.zeros([4]))
        self._outputs.assign(tf.zeros([4]))
        if self._rows is not None:
            self._counts.assign([0, 0, 0, 0, self._stride])
        if self._classes is not None:
            self._classes.assign(tf.zeros_like(self._classes))

    def _make_room(self) -> None:
        """Make the variables, unless the metric has too many numbers."""
        # A function that makes its variables itself is traced twice.
        variables = [] if self._metric is None else self._metric.variables
        size = 1 + sum(math.prod(one.shape) for one in variables)
        most = min(_MOST_ROWS, _MOST_NUMBERS // size)
        if size > 1 and most > MOST_BLOCKS:
            self._counts = tf.Variable(tf.zeros([5], tf.int64))
            if not isinstance(self._metric, keras.metrics.Mean):
                self._classes = tf.Variable(tf.zeros([1 + _MOST_CLASSES]))
                size += 1 + _MOST_CLASSES
            self._rows = tf.Variable(tf.zeros([most, size]))

    def _class_counts(self, y: Any) -> tf.Tensor:
        """Return how many labels of a batch name classes, and the examples of each class.

        Labels are whole numbers, or rows of zeros and ones with a column for each class.
        """
        if isinstance(y, (list, tuple)):
            y = dict(zip(self._model.output_names, y, strict=False))
        if isinstance(y, Mapping):
            named = [part for key, part in y.items() if self.name.startswith(f"{key}_")]
            y = named[0] if len(named) == 1 else None
        shape = y.shape if isinstance(y, tf.Tensor) and y.dtype != tf.string else ()
        self._columns = shape[1] if len(shape) == 2 else 1
        if len(shape) not in (1, 2) or self._columns not in range(1, _MOST_CLASSES + 1):
            return tf.zeros([1 + _MOST_CLASSES])
        labels = tf.reshape(tf.cast(y, tf.float32), [-1, self._columns])
        whole, most = tf.round(labels), 1 if self._columns > 1 else _MOST_CLASSES - 1
        valid = (tf.abs(labels - whole) < 1e-3) & (whole >= 0) & (whole <= most)
        valid = tf.reduce_all(valid, axis=1)
        if self._columns == 1:
            ids = tf.where(valid, tf.cast(whole[:, 0], tf.int32), -1)
            counts = tf.reduce_sum(tf.one_hot(ids, _MOST_CLASSES), axis=0)
        else:
            counts = tf.reduce_sum(tf.where(valid[:, None], whole, 0.0), axis=0)
            counts = tf.pad(counts, [[0, _MOST_CLASSES - self._columns]])
        return tf.concat([[tf.reduce_sum(tf.cast(valid, tf.float32))], counts], axis=0)

    def _rarest(self, blocks: np.ndarray, examples: np.ndarray) -> tuple[int | None, int]:
        """Return the examples of the rarest class, and how many blocks lack a class."""
        if not len(blocks.T) or blocks[:, 0].sum() < examples.sum():
            return None, 0  # Not each label names a class.
        counts, columns = blocks[:, 1:], self._columns
        if columns > 1:  # An example is of a class or not.
            counts = np.stack([counts[:, :columns], examples[:, None] - counts[:, :columns]])
            known = counts.sum(1).min(0) > 0
            # The metric may be that of a single class; else it pools or averages all of them.
            chosen = getattr(self._metric, "class_id", None)
            if chosen is not None:
                known &= np.arange(columns) == chosen
            counts = counts[:, :, known]
            rarest = int(counts.sum(1).min(initial=examples.sum()))
            if chosen is None:
                rarest = min(columns * rarest, int(examples.sum()))
            return rarest, int((counts[0] == 0).any(1).sum())
        counts = counts[:, counts.sum(0) > 0]
        rarest = int(counts.sum(0).min()) if len(counts.T) > 1 else 0
        return rarest, int((counts == 0).any(1).sum())

    def read(self) -> Validated | NoOutcomes:
        """Return what the last validation summed up, or the code of a reason why not."""
        if self._rows is None:
            return "no_metric" if self._metric is None else "no_sums"
        batches, _, ordered, differs, _ = self._counts.numpy().tolist()
        count = -(-batches // self._stride)
        if differs or count > self._rows.shape[0]:
            return "no_sums" if differs else "unknown_length"
        rows = self._rows.numpy()[:count].astype(float)
        # Of several rows a block, the last one; the last block may have fewer.
        per_block = -(-count // MOST_BLOCKS)
        ends = np.append(rows[per_block - 1 : -1 : per_block], rows[-1:], axis=0)
        blocks = np.diff(ends, axis=0, prepend=0.0)
        end = blocks.shape[1] - (0 if self._classes is None else 1 + _MOST_CLASSES)
        examples, sums = blocks[:, 0], blocks[:, 1:end]
        rarest, lacking = self._rarest(blocks[:, end:], examples)
        key = f"{ordered % 2**64:x}"
        return Validated(sums, tuple(map(int, examples)), key, rarest, lacking)

    def metric(self, sums: np.ndarray) -> float:
        """Return the metric of examples with these sums, NaN where it is no single number."""
        metric = self._metric
        if (
            isinstance(metric, keras.metrics.Mean)
            and type(metric).result is keras.metrics.Mean.result
        ):
            return sums[0] / sums[1] if sums[1] else np.nan
        found = metric.stateless_result(list(self._parts_of(sums).values()))
        value = np.asarray(found)
        return float(value.item()) if value.size == 1 else np.nan

    def _parts_of(self, sums: np.ndarray) -> dict[int, np.ndarray]:
        """Return what the variables of the metric would hold, by the identity of each."""
        variables = self._metric.variables
        parts = np.split(sums, np.cumsum([math.prod(one.shape) for one in variables])[:-1])
        pairs = zip(variables, parts, strict=True)
        return {id(one): part.reshape(one.shape).astype(one.dtype) for one, part in pairs}

    def notes(self, sums: np.ndarray) -> tuple[Note, ...]:
        """Say where an AUC with these sums does not see the order of the predictions."""
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
    """Return a number of 64 bits for each example of a batch, whose parts have a row for each."""
    found: Any = tf.constant(0, tf.int64)
    for part in parts:
        numbers = _numbers(part)
        places = tf.range(1, tf.shape(numbers, out_type=tf.int64)[1] + 1)
        found = _mixed(found + tf.reduce_sum(numbers * _mixed(places), axis=1))
    return found


def _mixed(numbers: Any) -> Any:
    """Return numbers of 64 bits that have no pattern in common with those given."""
    numbers *= _FACTORS[0]
    return tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, _SHIFT)) * _FACTORS[1]


def _numbers(part: Any) -> tf.Tensor:
    """Return a part of a batch as whole numbers, a row for each example."""
    if isinstance(part, tf.RaggedTensor):
        part = part.to_tensor()
    elif is_composite(part):
        part = tf.sparse.to_dense(part)
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, 2**62)
    elif part.dtype.is_floating:
        part = tf.bitcast(tf.cast(part, tf.float32), tf.int32)
    return tf.reshape(tf.cast(part, tf.int64), [tf.shape(part)[0], -1])
