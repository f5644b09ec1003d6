"""Inputs of a model for batches of any size: rows of the data, or rows made for its inputs."""

from typing import Any, NamedTuple

import keras
import numpy as np

from kbatch.training.data import FitData
from kbatch.training.errors import InputError
from kbatch.training.sample_rows import SampleElements, SampleRows, sample_of

_MADE_ROWS = 64
_MADE_NOTE = "Inputs were made at random for the model's input shapes."


class InferenceInputs(NamedTuple):
    """Rows that are repeated into batches.

    Attributes:
        rows: Nested NumPy arrays of shape (rows, ...), in the structure that the model takes.
        note: What a reader must know of them, or None.
    """

    rows: Any
    note: str | None

    def batch(self, batch_size: int) -> Any:
        """Gives nested arrays of shape (batch_size, ...)."""
        count = len(keras.tree.flatten(self.rows)[0])
        index = np.arange(batch_size) % count
        return keras.tree.map_structure(lambda leaf: leaf[index], self.rows)

    @property
    def source(self) -> SampleRows:
        """The rows as a probe of memory takes them."""
        return SampleRows((self.rows,), None, self.note)


def inference_inputs(model: keras.Model, x: Any = None) -> InferenceInputs:
    """Takes rows of the data, or makes some.

    Args:
        model: A built model, where `x` is None.
        x: Arrays of shape (examples, ...), nested as the model takes them, or a
            `tf.data.Dataset`; None for random rows: normal numbers, and for integers those that
            the model's embeddings know.

    Raises:
        InputError: If the data cannot be used, or there are none and the model's input shapes do
            not tell what to make.
    """
    if x is None:
        return InferenceInputs(_made_rows(model), _MADE_NOTE)
    source = sample_of(FitData(x))
    found = source.rows(model) if isinstance(source, SampleElements) else source
    # A dataset's element may have targets, which a prediction does not need.
    rows = found.rows[0] if isinstance(found.rows, tuple) else found.rows
    return InferenceInputs(rows, found.note)


def check_inputs(model: keras.Model, inputs: InferenceInputs) -> None:
    """Checks that a model takes batches of any size, and rows of the shapes that there are.

    Args:
        model: A model; one that does not declare its inputs is not looked at.
        inputs: Its inputs.

    Raises:
        InputError: If not.
    """
    tensors: Any = getattr(model, "inputs", None) or ()
    declared = [tuple(tensor.shape) for tensor in tensors]
    fixed = sorted({shape[0] for shape in declared if shape and shape[0] is not None})
    if fixed:
        raise InputError(
            "The model must take batches of any size: build it without a batch size "
            "(`keras.Input(shape)` and no `batch_shape` or `batch_size`). "
            f"Received: model={model.name!r} for batches of {fixed[0]} only."
        )
    found = [leaf.shape for leaf in keras.tree.flatten(inputs.rows)]
    if len(found) != len(declared):
        return
    for shape, expected in zip(found, declared, strict=True):
        # Of other ranks Keras makes one of size 1 itself, or says what it misses.
        alike = len(shape) != len(expected) or all(
            size is None or size == there
            for size, there in zip(expected[1:], shape[1:], strict=True)
        )
        if not alike:
            raise InputError(
                "`x` must have the shapes of the model's inputs: give rows as the model takes "
                f"them. Received: x with rows of shape {shape[1:]}, an input of shape "
                f"{expected[1:]}."
            )


def _made_rows(model: keras.Model) -> Any:
    tensors: Any = getattr(model, "inputs", None)
    if not tensors:
        raise InputError(
            "Without data the shapes of the inputs must be known, and this model has none yet: "
            "give `x`, some rows of its inputs, or build it with `keras.Input`. "
            f"Received: model={model.name!r}, x=None."
        )
    structure: Any = getattr(model, "_inputs_struct", None)
    if structure is None:
        structure = tensors
    if isinstance(structure, list) and len(structure) == 1:
        structure = structure[0]
    rng = np.random.default_rng(0)
    indices = _embedding_sizes(model)
    return keras.tree.map_structure(lambda t: _made_leaf(t, indices, rng), structure)


def _made_leaf(tensor: Any, indices: dict[int, int], rng: np.random.Generator) -> np.ndarray:
    features = tuple(tensor.shape[1:])
    if None in features or tensor.dtype == "string":
        raise InputError(
            "Without data all inputs need numbers of a fixed shape: give `x`, some rows of the "
            f"model's inputs. Received: input {tensor.name!r} of shape {tuple(tensor.shape)} and "
            f"dtype {tensor.dtype}, x=None."
        )
    shape = (_MADE_ROWS, *features)
    known = indices.get(id(tensor))
    if known is None and "int" in tensor.dtype:
        known = min(indices.values(), default=2)
    if known is not None:
        return rng.integers(0, known, shape).astype(tensor.dtype)
    if tensor.dtype == "bool":
        return rng.integers(0, 2, shape).astype("bool")
    return rng.normal(size=shape).astype(tensor.dtype)


def _embedding_sizes(model: Any) -> dict[int, int]:
    """Gives how many indices each embedding knows, by the identity of the tensor that it takes."""
    layers = model._flatten_layers(include_self=False)
    return {
        id(layer.input): layer.input_dim
        for layer in layers
        if isinstance(layer, keras.layers.Embedding) and layer._inbound_nodes
    }
