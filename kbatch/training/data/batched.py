"""Whether the elements of a dataset are batches or single examples."""

from typing import Any

import keras
import tensorflow as tf

from kbatch.errors import InputError


def is_batched(spec: Any, model: keras.Model) -> bool:
    """Tells whether a dataset's elements are batches.

    The shapes of its inputs are compared with those of the model's; as in Keras, a feature of
    shape (rows,) fits an input of shape (rows, 1). Where the model has no inputs yet, a scalar
    among the parts of an element tells examples, and a first axis of unknown length batches.

    Args:
        spec: The dataset's `element_spec`: inputs, (inputs, targets) or (inputs, targets, sample
            weights).
        model: The model to train.

    Raises:
        InputError: If it can be neither, or cannot be told.
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
    """Gives the model's inputs in the structure it was made with, None if it has none yet."""
    # A single symbolic tensor has no truth value.
    structure = getattr(model, "_inputs_struct", None)
    return getattr(model, "inputs", None) if structure is None else structure


def _paired(features: Any, inputs: Any) -> list[tuple[Any, tuple[int | None, ...]]] | None:
    """Pairs each feature with the shape of its input, None where they cannot be paired."""
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
