"""The ways to call a model, each as a function of a batch that waits for the outputs.

A call returns when its outputs lie in the host's memory as NumPy arrays: a GPU's work is done
then, and not merely begun.
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
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.record import BULK_PATH
from kbatch.training.data.model_inputs import declared_inputs, of_rank, ordered_rows

Call = Callable[[], Any]


class CallPath(NamedTuple):
    """A way to call a model.

    Attributes:
        name: Its name.
        open: Gives, for a model, its inputs and the examples of a bulk call, a context with a
            function of the batch size that prepares a call.
        is_function: Whether it is a function of a person, which runs what it holds, whatever the
            model is.
    """

    name: str
    open: Callable[
        [Any, InferenceInputs, int], contextlib.AbstractContextManager[Callable[[int], Call]]
    ]
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
            f"different names: {', '.join(_PATHS)} or a function of a batch. "
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
        name = _name_of(given)
        if name in _PATHS:
            raise InputError(
                f"`call_paths` may hold no function of the name {name!r}, which is that of one of "
                f"kbatch's own paths: give {name!r} itself, or a function of another name. "
                f"Received: call_paths with the function {name!r}."
            )
        return CallPath(name, _user_path(given), is_function=True)
    if not isinstance(given, str) or given not in _PATHS:
        raise InputError(
            f"`call_paths` may hold {', '.join(_PATHS)} and functions of a batch. "
            f"Received: call_paths with {given if isinstance(given, str) else type(given)!r}."
        )
    return CallPath(given, _PATHS[given])


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _user_path(function: Callable[..., Any]) -> Any:
    @contextlib.contextmanager
    def open_path(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
        def prepare(batch_size: int) -> Call:
            batch = inputs.batch(batch_size)
            return lambda: fetched(function(batch))

        yield prepare

    return open_path


@contextlib.contextmanager
def _compiled(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
    yield _on_tensors(_function(model, inputs, jit_compile=False), inputs)


@contextlib.contextmanager
def _xla(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
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

    yield _on_tensors(call, inputs)


@contextlib.contextmanager
def _eager(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
    yield _on_tensors(lambda batch: model(batch, training=False), inputs)


@contextlib.contextmanager
def _predict_on_batch(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
    def prepare(batch_size: int) -> Call:
        batch = _as_keras_takes(inputs.batch(batch_size))
        return lambda: fetched(model.predict_on_batch(batch))

    yield prepare


@contextlib.contextmanager
def _predict(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
    def prepare(batch_size: int) -> Call:
        rows = _as_keras_takes(inputs.batch(bulk_examples))
        return lambda: model.predict(rows, batch_size=batch_size, verbose=0)

    yield prepare


@contextlib.contextmanager
def _saved_model(model: Any, inputs: InferenceInputs, bulk_examples: int) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:
        path = str(Path(folder) / "model")
        model.export(path, format="tf_saved_model", verbose=False)
        loaded: Any = tf.saved_model.load(path)
        yield _on_tensors(loaded.serve, _as_declared(inputs, model))


_PATHS = {
    "compiled": _compiled,
    "xla": _xla,
    "predict_on_batch": _predict_on_batch,
    "call": _eager,
    BULK_PATH: _predict,
    "saved_model": _saved_model,
}


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
    leaves = ordered_rows(model, inputs.rows)
    ranked = [of_rank(leaf, len(t.shape)) for leaf, t in zip(leaves, tensors, strict=True)]
    cast = [
        leaf if t.dtype == "string" else leaf.astype(t.dtype)
        for leaf, t in zip(ranked, tensors, strict=True)
    ]
    structure: Any = getattr(model, "_inputs_struct", None)
    if not isinstance(inputs.rows, dict) or structure is None:
        structure = inputs.rows
    return inputs._replace(rows=keras.tree.pack_sequence_as(structure, cast))


def _as_keras_takes(batch: Any) -> Any:
    """Make tensors where there is text, of which Keras takes no arrays, nor arrays beside it."""
    if any(leaf.dtype.kind in "OSU" for leaf in keras.tree.flatten(batch)):
        return keras.tree.map_structure(tf.constant, batch)
    return batch


def _on_tensors(function: Callable[[Any], Any], inputs: InferenceInputs) -> Callable[[int], Call]:
    """Prepare calls whose inputs lie on the device already."""

    def prepare(batch_size: int) -> Call:
        batch = keras.tree.map_structure(tf.constant, inputs.batch(batch_size))
        return lambda: fetched(function(batch))

    return prepare
