"""The ways to run a model: call paths.

A call begins with the caller's arrays in the host's memory and returns when its outputs lie there
too: on a GPU it pays for both copies, and its work is done then, and not merely begun.
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
from kbatch.inference.result import BULK_PATH

# From a batch of arrays and the batch size to outputs, as nested NumPy arrays.
Run = Callable[[Any, int], Any]

_NAMES = ("compiled", "xla", "predict_on_batch", "call", BULK_PATH, "saved_model")


class CallPath(NamedTuple):
    """A way to call a model: one of kbatch's own, or a person's function of a batch."""

    name: str
    function: Callable[..., Any] | None = None

    @property
    def bulk(self) -> bool:
        """Whether a call has all examples, which Keras cuts into batches."""
        return self.name == BULK_PATH

    @contextlib.contextmanager
    def open(self, model: Any, inputs: InferenceInputs) -> Iterator[Run]:
        """Open the path of a model: a function of a batch and the batch size that calls it."""
        by_keras, call = self.name in ("predict_on_batch", BULK_PATH), self.function
        with contextlib.ExitStack() as stack:
            if call is not None:  # It runs what it holds, whatever the model is.
                pass
            elif by_keras:
                call = getattr(model, self.name)
            elif self.name in ("compiled", "xla"):
                call = _compiled(model, inputs, xla=self.name == "xla")
            elif self.name == "call":
                call = functools.partial(model, training=False)
            else:
                folder = tempfile.TemporaryDirectory(prefix="kbatch-")
                path = str(Path(stack.enter_context(folder)) / "model")
                archive: Any = keras.export.ExportArchive()
                archive.track(model)
                function = functools.partial(model, training=False)
                archive.add_endpoint("serve", function, input_signature=[_signature(inputs)])
                archive.write_out(path, verbose=False)
                loaded: Any = tf.saved_model.load(path)
                call = loaded.serve
            # Of text Keras takes no arrays, nor arrays beside it.
            text = any(leaf.dtype.kind in "OSU" for leaf in keras.tree.flatten(inputs.rows))
            as_tensors = self.function is None and (text or not by_keras)

            def run(batch: Any, batch_size: int) -> Any:
                bulk = {"batch_size": batch_size, "verbose": 0} if self.bulk else {}
                if as_tensors:
                    batch = keras.tree.map_structure(tf.constant, batch)
                return fetched(call(batch, **bulk))

            yield run


def call_paths_of(given: "str | Callable[..., Any] | Iterable[Any]") -> tuple[CallPath, ...]:
    if isinstance(given, str) or callable(given) or not isinstance(given, Iterable):
        given = (given,)
    paths = tuple(
        CallPath(getattr(one, "__name__", type(one).__name__), one)
        if callable(one)
        else CallPath(str(one))
        for one in given
    )
    names = [path.name for path in paths]
    known = all((path.function is None) == (path.name in _NAMES) for path in paths)
    if not known or not names or len(set(names)) < len(names):
        raise InputError(
            "`call_paths` must be at least one way to call the model, each once: "
            f"{', '.join(_NAMES)}, or functions of a batch, of other and different names. "
            f"Received: call_paths={names}."
        )
    return paths


def fetched(outputs: Any) -> Any:
    """Wait for outputs and return them as nested NumPy arrays."""
    return keras.tree.map_structure(np.asarray, outputs)


def _signature(inputs: InferenceInputs) -> Any:
    return keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), inputs.rows
    )


def _compiled(model: Any, inputs: InferenceInputs, *, xla: bool) -> Callable[[Any], Any]:
    @tf.function(input_signature=[_signature(inputs)], jit_compile=xla)
    def serve(batch: Any) -> Any:
        return model(batch, training=False)

    def serve_by_xla(batch: Any) -> Any:
        try:
            return serve(batch)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if "XLA" not in error.message:
                raise
            raise InputError(
                'XLA cannot compile this model: leave "xla" out of `call_paths`. '
                f"Received: model={model.name!r} ({error.message.splitlines()[0][:200]})."
            ) from error

    return serve_by_xla if xla else serve
