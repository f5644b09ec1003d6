"""The ways to run a model: call paths, and copies of it under other dtype policies or quantised.

A call begins with the caller's arrays in the host's memory and returns when its outputs lie there
too: on a GPU it pays for both copies, and its work is done then, and not merely begun.
"""

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.inference.inputs import (
    InferenceInputs,
    declared_inputs,
    of_rank,
    ordered_rows,
)
from kbatch.inference.result import BULK_PATH
from kbatch.library_internals import declared_structure
from kbatch.page.numbers import join_words
from kbatch.records.notes import Note
from kbatch.training.dtype_policy import (
    PolicyUnsupported,
    check_dtype_policies,
    copy_under,
    layers_with_weights,
)

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
        return self.function is None and self.name == BULK_PATH

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
                model.export(path, format="tf_saved_model", verbose=False)
                loaded: Any = tf.saved_model.load(path)
                call = loaded.serve
            # Of text Keras takes no arrays, nor arrays beside it.
            text = any(leaf.dtype.kind in "OSU" for leaf in keras.tree.flatten(inputs.rows))
            as_tensors = self.function is None and (text or not by_keras)

            def run(batch: Any, batch_size: int) -> Any:
                bulk = {"batch_size": batch_size, "verbose": 0} if self.bulk else {}
                if self.function is None and self.name == "saved_model":
                    batch = _as_declared(model, batch)
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


def _compiled(model: Any, inputs: InferenceInputs, *, xla: bool) -> Callable[[Any], Any]:
    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), inputs.rows
    )

    @tf.function(input_signature=[signature], jit_compile=xla)
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


def _as_declared(model: Any, batch: Any) -> Any:
    """Cast a batch to dtype and rank of the model's inputs: an exported model takes no others."""
    tensors = declared_inputs(model)
    if not tensors:
        return batch
    cast = []
    for leaf, tensor in zip(ordered_rows(model, batch), tensors, strict=True):
        ranked = of_rank(leaf, len(tensor.shape))
        text = tensor.dtype == "string"
        cast.append(ranked if text else ranked.astype(tensor.dtype, copy=False))
    structure = declared_structure(model)
    if not isinstance(batch, dict) or structure is None:
        structure = batch
    return keras.tree.pack_sequence_as(structure, cast)


INT8 = "int8"


def variants_of(
    model: keras.Model, inputs: InferenceInputs, dtype_policies: Any, paths: Iterable[CallPath]
) -> tuple[dict[str, keras.Model], dict[str, float | None], tuple[Note, ...]]:
    """Return the model under each policy, how its outputs differ from float32's, and notes."""
    own = policy_of(model)
    names = (own,) if dtype_policies is None else check_variants(dtype_policies)
    functions = [path.name for path in paths if path.function is not None]
    if functions and set(names) != {own}:
        raise InputError(
            "Functions in `call_paths` do not run under other policies than what they hold: "
            "profile them without `dtype_policies`, or name kbatch's own paths. "
            f"Received: call_paths with {functions}, dtype_policies={names}."
        )
    models: dict[str, keras.Model] = {}
    notes = [] if inputs.note is None else [inputs.note]
    refused = []
    for name in names:
        try:
            models[name] = variant(model, name)
        except PolicyUnsupported as reason:
            refused.append(Note.of("policy_not_measured", policy=name, reason=str(reason)))
    if not models:
        raise InputError(
            "The model can be had under none of the policies: leave `dtype_policies` out to "
            f"measure it as it is. {' '.join(refused)} Received: dtype_policies={names}."
        )
    if INT8 in models:
        layers = layers_with_weights(models[INT8])
        plain = [one.name for one in layers if INT8 not in one.dtype_policy.name]
        if plain:
            note = Note.of(
                "not_quantised",
                quantised=len(layers) - len(plain),
                layers=len(layers),
                others=join_words(plain),
            )
            notes.append(note)
    changes: dict[str, float | None] = {}
    others = {name: one for name, one in models.items() if name != "float32"}
    if others:
        with contextlib.suppress(PolicyUnsupported):  # Then there is nothing to compare with.
            reference = models.get("float32") or variant(model, "float32")
            expected = outputs_of(reference, inputs.rows)
            changes = {
                name: output_change(outputs_of(one, inputs.rows), expected)
                for name, one in others.items()
            }
    return models, changes, (*refused, *notes)


def check_variants(dtype_policies: Any) -> tuple[str, ...]:
    single = isinstance(dtype_policies, str) or not isinstance(dtype_policies, Iterable)
    names: tuple[Any, ...] = (dtype_policies,) if single else tuple(dtype_policies)
    if not names or len(set(names)) < len(names):
        raise InputError(
            "`dtype_policies` must be at least one policy, each once. "
            f"Received: dtype_policies={names!r}."
        )
    policies = [name for name in names if name != INT8]
    if policies:
        check_dtype_policies(policies)
    return names


def policy_of(model: keras.Model) -> str:
    """Name the policy that the layers with weights have; several are joined by `+`."""
    # Keras does not save the policy of the model itself: a loaded model has the global one.
    found = {layer.dtype_policy.name for layer in layers_with_weights(model)}
    return "+".join(sorted(found)) or model.dtype_policy.name


def variant(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Return the model under a policy; the model itself stays as it is."""
    if dtype_policy == policy_of(model):
        return model
    if dtype_policy != INT8:
        return copy_under(model, dtype_policy)
    copy: Any = copy_under(model, "float32")
    with warnings.catch_warnings():
        # One warning for each layer without int8; `variants_of` counts what was quantised.
        warnings.simplefilter("ignore")
        copy.quantize(INT8)
    if not any(INT8 in layer.dtype_policy.name for layer in layers_with_weights(copy)):
        raise PolicyUnsupported(f"No layer of model {model.name!r} can be quantised to int8.")
    return copy


def output_change(outputs: Any, reference: Any) -> float | None:
    """Return the largest difference over the largest output; None if not finite or all zeros."""

    def flat(nested: Any) -> np.ndarray:
        leaves = keras.tree.flatten(nested)
        return np.concatenate([np.asarray(leaf, "float64").ravel() for leaf in leaves])

    expected = flat(reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = float(np.max(np.abs(flat(outputs) - expected)) / np.max(np.abs(expected)))
    return change if np.isfinite(change) else None


def outputs_of(model: Any, batch: Any) -> Any:
    """Run a model eagerly on a batch."""
    return fetched(model(batch, training=False))
