"""What is run to predict: a model by a call path, and inputs for batches of any size that suit it.

A call begins with the caller's arrays in the host's memory and returns when its outputs lie there
too: on a GPU it pays for both copies, and its work is done then, and not merely begun.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.inference.result import BULK_PATH
from kbatch.library_internals import calls_in_graph, declared_structure, layers_of
from kbatch.records.notes import Note
from kbatch.training.data.forms import as_dataset, is_dataset
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


# From a batch of arrays and the batch size to outputs, as nested NumPy arrays.
Run = Callable[[Any, int], Any]

_PATHS = ("compiled", "xla", BULK_PATH, "saved_model")


def check_call_paths(given: str | Iterable[str]) -> tuple[str, ...]:
    single = isinstance(given, str) or not isinstance(given, Iterable)
    paths: tuple[Any, ...] = (given,) if single else tuple(given)
    if not paths or not all(path in _PATHS for path in paths) or len(set(paths)) < len(paths):
        raise InputError(
            f"`call_paths` must be at least one of {', '.join(_PATHS)}, each once. "
            f"Received: call_paths={paths!r}."
        )
    return paths


@contextlib.contextmanager
def open_path(name: str, model: Any, inputs: InferenceInputs) -> Iterator[Run]:
    """Open a call path of a model: a function of a batch and the batch size that calls it."""
    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), inputs.rows
    )

    def serve(batch: Any) -> Any:
        return model(batch, training=False)

    bulk, xla = name == BULK_PATH, name == "xla"
    with contextlib.ExitStack() as stack:
        if bulk:
            call: Any = model.predict
        elif name == "saved_model":
            folder = tempfile.TemporaryDirectory(prefix="kbatch-")
            path = str(Path(stack.enter_context(folder)) / "model")
            archive: Any = keras.export.ExportArchive()
            archive.track(model)
            archive.add_endpoint("serve", serve, input_signature=[signature])
            archive.write_out(path, verbose=False)
            loaded: Any = tf.saved_model.load(path)
            call = loaded.serve
        else:
            call = tf.function(serve, input_signature=[signature], jit_compile=xla)
        # Keras takes no arrays of text, and no other arrays beside text.
        text = any(leaf.dtype.kind in "OSU" for leaf in keras.tree.flatten(inputs.rows))

        def run(batch: Any, batch_size: int) -> Any:
            if text or not bulk:
                batch = keras.tree.map_structure(tf.constant, batch)
            try:
                outputs = call(batch, **({"batch_size": batch_size, "verbose": 0} if bulk else {}))
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
                if not xla or "XLA" not in error.message:
                    raise
                raise InputError(
                    'XLA cannot compile this model: leave "xla" out of `call_paths`. Received: '
                    f"model={model.name!r} ({error.message.splitlines()[0][:200]})."
                ) from error
            return fetched(outputs)

        yield run


def fetched(outputs: Any) -> Any:
    """Wait for outputs and return them as nested NumPy arrays."""
    return keras.tree.map_structure(np.asarray, outputs)


def inference_inputs(model: keras.Model, x: Any = None) -> InferenceInputs:
    """Take rows of the data or make some, and run the model on one, which builds it."""
    if type(model).call is keras.Model.call:
        raise InputError(
            "The model has no `call`: add one, or profile the part that predicts, such as "
            "`model.decoder`. "
            f"Received: model of class {type(model).__name__}."
        )
    tensors: Any = getattr(model, "inputs", None) or ()
    fixed = sorted({t.shape[0] for t in tensors if t.shape and t.shape[0] is not None})
    if fixed:
        raise InputError(
            "The model must take batches of any size: build it without a batch size "
            "(`keras.Input(shape)` and no `batch_shape` or `batch_size`). "
            f"Received: model={model.name!r} for batches of {fixed[0]} only."
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
    try:
        model(keras.tree.map_structure(tf.constant, inputs.batch(1)), training=False)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        shapes = [leaf.shape[1:] for leaf in keras.tree.flatten(inputs.rows)]
        raise InputError(
            "`x` must hold rows that the model takes, an array for each of its inputs, nested as "
            "they are and with the examples on the first axis (`x[None]` for a single example). "
            f"Received: x with rows of shape {', '.join(map(str, shapes))}, and the model "
            f"{model.name!r} says: {' '.join(str(error).split())[:300]}"
        ) from error
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
