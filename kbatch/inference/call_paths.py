"""The ways to call a model, each as a function of a batch that waits for the outputs.

A call returns when its outputs lie in the host's memory as NumPy arrays: a GPU's work is done
then, and not merely begun.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.record import BULK_PATH
from kbatch.training.data.model_inputs import declared_inputs, of_rank, ordered_rows

Prepare = Callable[[int], Callable[[], Any]]

_NAMES = ("compiled", "xla", "predict_on_batch", "call", BULK_PATH, "saved_model")


class CallPath(NamedTuple):
    """A way to call a model.

    `open` is given a model, its inputs and the examples of a bulk call, and its context a function
    of the batch size that prepares a call. A function of a person runs what it holds, whatever the
    model is.
    """

    name: str
    open: Callable[[Any, InferenceInputs, int], contextlib.AbstractContextManager[Prepare]]
    is_function: bool = False

    def examples_per_call(self, batch_size: int, bulk_examples: int) -> int:
        """Return how many examples one call has: a bulk call has as many whatever the batch."""
        return bulk_examples if self.name == BULK_PATH else batch_size

    def reason_not_to_run(self, batch_size: int, bulk_examples: int) -> str | None:
        """Return why a batch size is not for this path; None where it is."""
        if self.name != BULK_PATH or batch_size <= bulk_examples:
            return None
        return f"more than the {bulk_examples} examples of a bulk call: see `bulk_examples`"


def call_paths_of(given: "str | Callable[..., Any] | Iterable[Any]") -> tuple[CallPath, ...]:
    """Return call paths for their names and for functions of a batch."""
    if isinstance(given, str) or callable(given) or not isinstance(given, Iterable):
        given = (given,)
    paths = tuple(_path_of(one) for one in given)
    names = [path.name for path in paths]
    if not names or len(set(names)) < len(names):
        raise InputError(
            "`call_paths` must be at least one way to call the model, each once and functions of "
            f"different names: {', '.join(_NAMES)} or a function of a batch. "
            f"Received: call_paths={names}."
        )
    return paths


def check_functions(paths: Iterable[CallPath], dtype_policies: Iterable[str], *, own: str) -> None:
    """Check that functions are asked for under the model's own policy only."""
    functions = [path.name for path in paths if path.is_function]
    policies = tuple(dtype_policies)
    if functions and set(policies) != {own}:
        raise InputError(
            "Functions in `call_paths` do not run under other policies than what they hold: "
            "profile them without `dtype_policies`, or name kbatch's own paths. "
            f"Received: call_paths with {functions}, dtype_policies={policies}."
        )


def fetched(outputs: Any) -> Any:
    """Wait for outputs and return them as nested NumPy arrays."""
    return keras.tree.map_structure(np.asarray, outputs)


def _path_of(given: Any) -> CallPath:
    if callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        if name in _NAMES:
            raise InputError(
                f"`call_paths` may hold no function of the name {name!r}, which is that of one of "
                f"kbatch's own paths: give {name!r} itself, or a function of another name. "
                f"Received: call_paths with the function {name!r}."
            )
        return CallPath(name, functools.partial(_open_function, given), is_function=True)
    if not isinstance(given, str) or given not in _NAMES:
        raise InputError(
            f"`call_paths` may hold {', '.join(_NAMES)} and functions of a batch. "
            f"Received: call_paths with {given if isinstance(given, str) else type(given)!r}."
        )
    return CallPath(given, functools.partial(_open, given))


@contextlib.contextmanager
def _open_function(
    function: Callable[..., Any], model: Any, inputs: InferenceInputs, bulk_examples: int
) -> Iterator[Prepare]:
    def prepare(batch_size: int) -> Callable[[], Any]:
        batch = inputs.batch(batch_size)
        return lambda: fetched(function(batch))

    yield prepare


@contextlib.contextmanager
def _open(name: str, model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Prepare]:
    def prepare_on_batch(batch_size: int) -> Callable[[], Any]:
        batch = _as_keras_takes(inputs.batch(batch_size))
        return lambda: fetched(model.predict_on_batch(batch))

    def prepare_bulk(batch_size: int) -> Callable[[], Any]:
        rows = _as_keras_takes(inputs.batch(bulk_examples))
        return lambda: model.predict(rows, batch_size=batch_size, verbose=0)

    match name:
        case "compiled":
            yield _on_tensors(_function(model, inputs, jit_compile=False), inputs)
        case "xla":
            yield _on_tensors(_xla(model, inputs), inputs)
        case "call":
            yield _on_tensors(lambda batch: model(batch, training=False), inputs)
        case "predict_on_batch":
            yield prepare_on_batch
        case "predict":
            yield prepare_bulk
        case "saved_model":
            with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:
                path = str(Path(folder) / "model")
                model.export(path, format="tf_saved_model", verbose=False)
                loaded: Any = tf.saved_model.load(path)
                yield _on_tensors(loaded.serve, _as_declared(inputs, model))


def _xla(model: Any, inputs: InferenceInputs) -> Callable[[Any], Any]:
    function = _function(model, inputs, jit_compile=True)

    def call(batch: Any) -> Any:
        try:
            return function(batch)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if "XLA" not in error.message:
                raise
            raise InputError(
                'XLA cannot compile this model: leave "xla" out of `call_paths`. '
                f"Received: model={model.name!r} ({error.message.splitlines()[0][:200]})."
            ) from error

    return call


def _function(model: Any, inputs: InferenceInputs, *, jit_compile: bool) -> Callable[[Any], Any]:
    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), inputs.rows
    )

    @tf.function(input_signature=[signature], jit_compile=jit_compile)
    def serve(batch: Any) -> Any:
        return model(batch, training=False)

    return serve


def _as_declared(inputs: InferenceInputs, model: Any) -> InferenceInputs:
    """Cast rows to dtype and rank of the model's inputs: an exported model takes no others."""
    tensors = declared_inputs(model)
    if not tensors:
        return inputs
    cast = []
    for leaf, tensor in zip(ordered_rows(model, inputs.rows), tensors, strict=True):
        ranked = of_rank(leaf, len(tensor.shape))
        cast.append(ranked if tensor.dtype == "string" else ranked.astype(tensor.dtype))
    structure: Any = getattr(model, "_inputs_struct", None)
    if not isinstance(inputs.rows, dict) or structure is None:
        structure = inputs.rows
    return inputs._replace(rows=keras.tree.pack_sequence_as(structure, cast))


def _as_keras_takes(batch: Any) -> Any:
    """Make tensors where there is text, of which Keras takes no arrays, nor arrays beside it."""
    if any(leaf.dtype.kind in "OSU" for leaf in keras.tree.flatten(batch)):
        return keras.tree.map_structure(tf.constant, batch)
    return batch


def _on_tensors(function: Callable[[Any], Any], inputs: InferenceInputs) -> Prepare:
    """Prepare calls whose inputs lie on the device already."""

    def prepare(batch_size: int) -> Callable[[], Any]:
        batch = keras.tree.map_structure(tf.constant, inputs.batch(batch_size))
        return lambda: fetched(function(batch))

    return prepare
