"""A saved model, and inputs for batches of any size that suit it."""

from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from kbatch.errors import InputError
from kbatch.library_internals import calls_in_graph, declared_structure, layers_of
from kbatch.records.notes import Note
from kbatch.training.data.forms import as_dataset, by_input, is_dataset, named_inputs
from kbatch.training.data.training_data import TrainingData

_MADE_ROWS = 64


class InferenceInputs(NamedTuple):
    """Rows that are repeated into batches."""

    rows: Any  # Arrays of shape (rows, ...), nested as the model takes them.
    note: Note | None  # What a reader must know of them.

    def batch(self, batch_size: int) -> Any:
        count = len(keras.tree.flatten(self.rows)[0])
        index = np.arange(batch_size) % count
        return keras.tree.map_structure(lambda leaf: leaf[index], self.rows)


def inference_inputs(model: keras.Model, x: Any = None) -> InferenceInputs:
    """Take rows of the data or make some, and build the model on them if it is not yet."""
    if type(model).call is keras.Model.call:
        raise InputError(
            "The model has no `call`, which Keras's `predict_function` needs: add one, or profile "
            "the part that predicts, such as `model.decoder`. "
            f"Received: model of class {type(model).__name__}."
        )
    if x is None:
        inputs = InferenceInputs(_made_rows(model), Note.of("inputs_made"))
    else:
        x = as_dataset(x)
        if is_dataset(x) and isinstance(x.element_spec, tuple):
            x = x.map(lambda inputs, *targets: (inputs,))  # A prediction needs no targets.
        found = TrainingData(x).some_rows(model)
        if found is None:
            raise InputError(
                "Predictions take arrays or a `tf.data.Dataset`, no function of a batch size. "
                f"Received: x of type {type(x).__name__}."
            )
        rows = found.rows[0] if isinstance(found.rows, tuple) else found.rows
        inputs = InferenceInputs(rows, found.note)
    check_inputs(model, inputs)
    if not model.built or not getattr(model, "inputs", None):
        model(inputs.batch(1), training=False)  # A subclass has its weights after a first call.
    return inputs


def _made_rows(model: Any) -> Any:
    tensors: Any = getattr(model, "inputs", None)
    if not tensors:
        raise InputError(
            "Without data the shapes of the inputs must be known, and this model has none yet: "
            "give `x`, some rows of its inputs (`kbatch.profile_inference(model, x)`), or build it "
            "with `keras.Input`. "
            f"Received: model={model.name!r}, x=None."
        )
    structure = declared_structure(model)
    if structure is None:
        structure = tensors
    if isinstance(structure, list) and len(structure) == 1:
        structure = structure[0]
    rng = np.random.default_rng(0)
    # How many indices each embedding knows, by the identity of the tensor that it takes.
    indices = {
        id(layer.input): layer.input_dim
        for layer in layers_of(model, include_self=False)
        if isinstance(layer, keras.layers.Embedding) and calls_in_graph(layer)
    }
    return keras.tree.map_structure(lambda t: _made_leaf(t, indices, rng), structure)


def _made_leaf(tensor: Any, indices: dict[int, int], rng: np.random.Generator) -> np.ndarray:
    features = tuple(tensor.shape[1:])
    if None in features or tensor.dtype == "string":
        raise InputError(
            "Without data all inputs need numbers of a fixed shape: give `x`, some rows of the "
            "model's inputs (`kbatch.profile_inference(model, x)`). Received: input "
            f"{tensor.name!r} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, x=None."
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


def check_inputs(model: keras.Model, inputs: InferenceInputs) -> None:
    """Check that a model takes batches of any size, and rows as there are."""
    tensors = getattr(model, "inputs", None) or ()
    fixed = sorted({t.shape[0] for t in tensors if t.shape and t.shape[0] is not None})
    if fixed:
        raise InputError(
            "The model must take batches of any size: build it without a batch size "
            "(`keras.Input(shape)` and no `batch_shape` or `batch_size`). "
            f"Received: model={model.name!r} for batches of {fixed[0]} only."
        )
    if not tensors:
        return
    rows, named = inputs.rows, named_inputs(model)
    missing = isinstance(rows, dict) and not named.keys() <= rows.keys()
    leaves = [] if missing else by_input(rows, model)
    if len(leaves) != len(tensors):
        raise InputError(
            "`x` must hold an array for each of the model's inputs, nested as the model takes "
            f"them: {', '.join(sorted(named))}. Received: x with "
            f"{sorted(rows) if missing else f'{len(leaves)} arrays'}."
        )
    for leaf, tensor in zip(leaves, tensors, strict=True):
        if not _alike(leaf.shape, tuple(tensor.shape)):
            raise InputError(
                "`x` must have the shapes of the model's inputs, with the examples on the first "
                "axis: give rows as the model takes them (`x[None]` for a single example). "
                f"Received: x with rows of shape {leaf.shape[1:]}, input {tensor.name!r} of shape "
                f"{tuple(tensor.shape[1:])}."
            )


def _alike(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether Keras takes a shape for an expected one: a last axis of 1 comes and goes."""
    missing = len(expected) - len(shape)
    if missing == 1 and expected[-1] == 1:
        shape = (*shape, 1)
    elif missing == -1 and shape[-1] == 1:
        shape = shape[:-1]
    return len(shape) == len(expected) and all(
        size is None or size == there for size, there in zip(expected[1:], shape[1:], strict=True)
    )


def load_saved_model(path: Path) -> keras.Model:
    try:
        model = keras.saving.load_model(path, compile=False)
    # Keras gives TypeError for a class it does not know, OSError and KeyError for a broken file.
    except (ValueError, TypeError, OSError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise InputError(
            "The model file must be one that `model.save` wrote, .keras or .h5, of layers that "
            "Keras knows: for layers of your own call `kbatch.profile_inference` in Python. "
            f"Received: {path} ({cause})"
        ) from error
    if not isinstance(model, keras.Model):
        raise InputError(
            f"The file must hold a keras.Model. Received: {path} with a {type(model).__name__}."
        )
    return model
