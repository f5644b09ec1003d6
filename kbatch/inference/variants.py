"""A model under other dtype policies, or quantised, with the same weights."""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from kbatch.document.numbers import join_words
from kbatch.errors import InputError
from kbatch.inference.call_paths import CallPath, check_functions, fetched
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.record import OutputChange
from kbatch.training.dtype_policy import (
    PolicyUnsupported,
    check_dtype_policies,
    copy_under,
    layers_with_weights,
)

INT8 = "int8"


class Variants(NamedTuple):
    """A model under each policy that it can be had under."""

    models: dict[str, keras.Model]  # By policy.
    output_changes: tuple[OutputChange, ...]  # Against those in float32.
    notes: tuple[str, ...]  # On the inputs, the models, and the policies that are missing.


def variants_of(
    model: keras.Model, inputs: InferenceInputs, dtype_policies: Any, paths: Iterable[CallPath]
) -> Variants:
    """Take a model under each policy under which it can be had, with notes on the others."""
    own = policy_of(model)
    names = (own,) if dtype_policies is None else check_variants(dtype_policies)
    check_functions(paths, names, own=own)
    models: dict[str, keras.Model] = {}
    notes = [inputs.note]
    for name in names:
        try:
            models[name] = variant(model, name)
        except PolicyUnsupported as reason:
            notes.append(f"Not measured under {name}: {reason}")
    if not models:
        raise InputError(
            "The model can be had under none of the policies: leave `dtype_policies` out to "
            f"measure it as it is. {' '.join(filter(None, notes[1:]))} "
            f"Received: dtype_policies={names}."
        )
    if INT8 in models:
        notes.append(quantised_note(models[INT8]))
    changes: list[OutputChange] = []
    others = {name: one for name, one in models.items() if name != "float32"}
    if others:
        try:
            expected = outputs_of(models.get("float32") or variant(model, "float32"), inputs.rows)
        except PolicyUnsupported as reason:
            notes.append(f"Outputs are not compared with float32: {reason}")
        else:
            examples = len(keras.tree.flatten(inputs.rows)[0])
            changes += [
                output_change(outputs_of(one, inputs.rows), expected, name, examples=examples)
                for name, one in others.items()
            ]
    return Variants(models, tuple(changes), tuple(filter(None, notes)))


def check_variants(dtype_policies: Any) -> tuple[str, ...]:
    """Check the names of dtype policies, or `"int8"`."""
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
        # One warning for each layer without int8; `quantised_note` counts what was quantised.
        warnings.simplefilter("ignore")
        copy.quantize(INT8)
    if not any(INT8 in layer.dtype_policy.name for layer in layers_with_weights(copy)):
        raise PolicyUnsupported(f"No layer of model {model.name!r} can be quantised to int8.")
    return copy


def output_change(
    outputs: Any, reference: Any, dtype_policy: str, *, examples: int
) -> OutputChange:
    """Compare outputs with those in float32."""

    def flat(nested: Any) -> np.ndarray:
        leaves = keras.tree.flatten(nested)
        return np.concatenate([np.asarray(leaf, "float64").ravel() for leaf in leaves])

    def finite(value: Any) -> float | None:
        return float(value) if np.isfinite(value) else None

    expected = flat(reference)
    # What is not finite, or relative to nothing but zeros, has no figure.
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, size = np.abs(flat(outputs) - expected), np.abs(expected)
        largest, mean = np.max(difference), np.mean(difference)
        figures = (largest, mean, largest / np.max(size), mean / np.mean(size))
        return OutputChange(dtype_policy, examples, *map(finite, figures))


def outputs_of(model: Any, batch: Any) -> Any:
    """Run a model eagerly on a batch."""
    return fetched(model(batch, training=False))


def quantised_note(model: Any) -> str | None:
    """Describe which layers of a quantised model compute in float32, None where none does."""
    layers = layers_with_weights(model)
    others = [one.name for one in layers if INT8 not in one.dtype_policy.name]
    if not others:
        return None
    return (
        f"Under int8, {len(layers) - len(others)} of {len(layers)} layers with weights are "
        f"quantised; the others compute in float32: {join_words(others)}."
    )
