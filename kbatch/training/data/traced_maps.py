"""Maps over datasets whose functions are traced once, and `rebatch` without a function.

`tf.data` traces each function that is mapped for each dataset and makes it ready for each iterator,
and `Dataset.rebatch` maps one that changes nothing: beside small models that takes longer than to
read the data.
"""

from typing import Any

import tensorflow as tf

from kbatch.training.data.forms import open_spec


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


def of_any_length(spec: Any) -> Any:
    return open_spec(spec) if isinstance(spec, tf.TensorSpec) else spec  # Else there is no part.
