"""Call paths: the ways to predict with a model or a function, and the inputs for them.

A timed call starts with NumPy arrays and ends with NumPy arrays. On a GPU it includes both copies.
The conversion of the outputs waits for JAX, PyTorch and TensorFlow, which compute asynchronously.
"""

import contextlib
import functools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError, PolicyUnsupported
from kbatch.inference.result import BULK_PATH
from kbatch.library_internals import (
    calls_in_graph,
    declared_structure,
    holds_variables,
    lambda_output_shape,
    layers_of,
    replaced,
)
from kbatch.page.numbers import join_words
from kbatch.records.notes import Note
from kbatch.training.data.batches import Sample
from kbatch.training.data.forms import as_dataset, is_dataset, rows_of
from kbatch.training.data.training_data import TrainingData, training_dataset
from kbatch.training.dtype_policy import POLICIES, dtype_policy_scope

MOST_ROWS = 64
TEXT_KINDS = "OSU"  # `dtype.kind` of NumPy arrays that hold text.
# TensorFlow raises these if an operation cannot take the values, shapes or dtypes.
_REFUSALS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)

# A function that takes a batch (nested NumPy arrays) and its size, and returns nested arrays.
Run = Callable[[Any, int], Any]

_OF_KERAS = ("predict_one_batch", "predict_on_batch", BULK_PATH)
CALL_PATHS = ("compiled", "xla", "model(x)", *_OF_KERAS, "saved_model")


def check_names(allowed: Sequence[str], **argument: str | Iterable[str]) -> tuple[str, ...]:
    """Check that an argument names at least one of the allowed names, and none twice."""
    ((key, value),) = argument.items()
    single = isinstance(value, str) or not isinstance(value, Iterable)
    names: tuple[Any, ...] = (value,) if single else tuple(value)
    if not names or not all(name in allowed for name in names) or len(set(names)) < len(names):
        raise InputError(
            f"`{key}` must be one or more of {', '.join(allowed)}, without duplicates. "
            f"Received: {key}={names!r}."
        )
    return names


@contextlib.contextmanager
def open_path(name: str, model: Any, rows: Any) -> Iterator[Run]:
    """Prepare a call path of a model. `rows` shows the shapes and dtypes of its batches."""

    def spec_of(leaf: Any) -> tf.TensorSpec:
        return tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype)

    signature = keras.tree.map_structure(spec_of, rows)

    def serve(batch: Any) -> Any:
        return model(batch, training=False)

    xla, of_keras = name == "xla", name in _OF_KERAS
    with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:  # For a saved model.
        call: Any = serve
        if of_keras:
            call = model.predict_on_batch if name == "predict_on_batch" else model.predict
        elif name == "saved_model":
            path = str(Path(folder, "model"))
            archive: Any = keras.export.ExportArchive()
            archive.track(model)
            archive.add_endpoint("serve", serve, input_signature=[signature])
            log = logging.getLogger("tensorflow")
            level = log.level
            # TensorFlow would log the path of the temporary folder.
            log.setLevel(max(log.getEffectiveLevel(), logging.WARNING))
            try:
                archive.write_out(path, verbose=False)
            finally:
                log.setLevel(level)
            # Kept in a variable, because `serve` does not keep the variables of the model alive.
            loaded: Any = tf.saved_model.load(path)
            call = loaded.serve
        elif name in ("compiled", "xla"):
            call = tf.function(serve, input_signature=[signature], jit_compile=xla)
        # `model.predict` does not take NumPy arrays if one of them holds text.
        has_text = any(leaf.dtype.kind in TEXT_KINDS for leaf in keras.tree.flatten(rows))

        def run(batch: Any, batch_size: int) -> Any:
            if has_text or not of_keras:
                batch = keras.tree.map_structure(tf.constant, batch)
            options = {"batch_size": batch_size, "verbose": 0} if call == model.predict else {}
            try:
                outputs = call(batch, **options)
            except _REFUSALS as error:
                if not xla or "XLA" not in error.message:
                    raise
                raise InputError(
                    'XLA cannot compile this model: leave "xla" out of `call_paths`. '
                    f"Received: model={model.name!r} ({error.message.splitlines()[0][:200]})."
                ) from error
            return fetched(outputs)

        yield run


def fetched(outputs: Any) -> Any:
    """Wait for outputs and return them as nested NumPy arrays."""
    return keras.tree.map_structure(np.asarray, outputs)


def repeated(rows: Any, batch_size: int) -> Any:
    """Make a batch by repeating the rows as often as needed."""
    index = np.arange(batch_size) % rows_of(rows)
    return keras.tree.map_structure(lambda leaf: leaf[index], rows)


def row_kinds(rows: Any) -> str:
    return ", ".join(f"{leaf.dtype} {leaf.shape[1:]}" for leaf in keras.tree.flatten(rows))


def fixed_batch(name: str, size: int) -> InputError:
    return InputError(
        "The model must take batches of any size: build it without a batch size "
        "(`keras.Input(shape)` and no `batch_shape` or `batch_size`), or export it with a batch "
        f"axis of any length. Received: model={name!r} for batches of {size} only."
    )


def inference_inputs(model: keras.Model, x: Any = None) -> Sample:
    """Take rows of the data, or make random ones, and build the model by a call on one row."""
    if type(model).call is keras.Model.call:
        raise InputError(
            "The model has no `call`: add one, or profile the part that predicts, such as "
            f"`model.decoder`. Received: model of class {type(model).__name__}."
        )
    tensors: Any = getattr(model, "inputs", None) or ()
    fixed = sorted({t.shape[0] for t in tensors if t.shape and t.shape[0] is not None})
    if fixed:
        raise fixed_batch(model.name, fixed[0])
    if x is None:
        inputs = Sample(_random_inputs(model), None, Note.of("inputs_made"))
    else:
        x = as_dataset(x)
        if is_dataset(x) and isinstance(x.element_spec, tuple):
            x = x.map(lambda inputs, *targets: (inputs,))
        sample = TrainingData(x).some_rows(model)
        if sample is None:
            raise InputError(
                "`x` must be arrays or a `tf.data.Dataset`, not a function of the batch size. "
                f"Received: x of type {type(x).__name__}."
            )
        rows = sample.rows[0] if isinstance(sample.rows, tuple) else sample.rows
        inputs = sample._replace(rows=rows)
    try:
        model(keras.tree.map_structure(tf.constant, repeated(inputs.rows, 1)), training=False)
    except (ValueError, TypeError, KeyError, *_REFUSALS) as error:
        raise InputError(
            "`x` must be nested like the model's inputs: an array for each input, with the shape "
            "and dtype of that input, and with the examples on the first axis (`x[None]` for a "
            f"single example). Received: x with rows of dtype and shape {row_kinds(inputs.rows)}; "
            f"model {model.name!r} raised: {failure_text(error)}"
        ) from error
    return inputs


def _random_inputs(model: Any) -> Any:
    tensors: Any = getattr(model, "inputs", None)
    if not tensors:
        raise InputError(
            "Without `x`, kbatch makes random inputs, but this model has no input shapes: begin it "
            "with `keras.Input`, or call `kbatch.profile_inference(model, x)` with some rows. "
            f"Received: model={model.name!r}, x=None."
        )
    structure = declared_structure(model)
    if structure is None:
        structure = tensors
    if isinstance(structure, list) and len(structure) == 1:
        structure = structure[0]
    # `input_dim` of each embedding by the id of its input tensor: inputs must be below it.
    indices = {
        id(layer.input): layer.input_dim
        for layer in layers_of(model, include_self=False)
        if isinstance(layer, keras.layers.Embedding) and calls_in_graph(layer)
    }
    return random_rows(structure, indices)


def random_rows(tensors: Any, indices: Mapping[int, int] = MappingProxyType({})) -> Any:
    """Make random rows with the shapes and dtypes of tensors."""
    rng = np.random.default_rng(0)

    def make(tensor: Any) -> np.ndarray:
        features = tuple(tensor.shape[1:])
        if None in features or tensor.dtype == "string":
            raise InputError(
                "Without `x`, the model's inputs must be numbers of a fixed shape: call "
                "`kbatch.profile_inference(model, x)` with some rows. Received: input "
                f"{tensor.name!r} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, x=None."
            )
        shape, count = (MOST_ROWS, *features), indices.get(id(tensor))
        if count is None and ("int" in tensor.dtype or tensor.dtype == "bool"):
            count = 2 if tensor.dtype == "bool" else min(indices.values(), default=2)
        values = rng.normal(size=shape) if count is None else rng.integers(0, count, shape)
        return values.astype(tensor.dtype)

    return keras.tree.map_structure(make, tensors)


INT8 = "int8"


def variants_of(
    model: keras.Model, dtype_policies: Any
) -> tuple[dict[str, keras.Model], tuple[Note, ...]]:
    """Return the model under each policy, and notes about policies that cannot be measured."""
    names: tuple[str, ...] = (policy_of(model),)
    if dtype_policies is not None:
        names = check_names((*POLICIES, INT8), dtype_policies=dtype_policies)
    models: dict[str, keras.Model] = {}
    notes = []
    for name in names:
        try:
            models[name] = variant(model, name)
        except PolicyUnsupported as reason:
            notes.append(Note.of("policy_not_measured", policy=name, reason=str(reason)))
    if not models:
        raise InputError(
            "The model cannot be rebuilt with any of these dtype policies: leave out "
            "`dtype_policies` to measure the model as it is. "
            f"{' '.join(notes)} Received: dtype_policies={names}."
        )
    if INT8 in models:
        layers = layers_with_weights(models[INT8])
        plain = [layer.name for layer in layers if INT8 not in layer.dtype_policy.name]
        if plain:
            counts = {"quantised": len(layers) - len(plain), "layers": len(layers)}
            notes.append(Note.of("not_quantised", **counts, others=join_words(plain)))
    return models, tuple(notes)


# Examples that are compared with float32 in one batch, and in all.
_COMPARED_AT_ONCE, _MOST_COMPARED = 64, 8192


def compare_with_float32(
    model: keras.Model, models: Mapping[str, keras.Model], x: Any, rows: Any, *, most_s: float
) -> tuple[dict[str, float | None], dict[str, float], int]:
    """Compare the predictions under each policy with float32.

    Returns:
        By policy, the largest change of an output of `rows`, over the largest output. By policy,
        the share of the predictions with another class, over as much of the data `x` as the time
        allows. The number of examples in the second comparison.
    """
    ends_s = time.perf_counter() + most_s
    others = {name: copy for name, copy in models.items() if name != "float32"}
    if not others:
        return {}, {}, 0
    try:
        reference = models.get("float32") or variant(model, "float32")
    except PolicyUnsupported:  # There is nothing to compare with.
        return {}, {}, 0
    expected = outputs_of(reference, rows)
    outputs = {name: outputs_of(copy, rows) for name, copy in others.items()}
    output_changes = {name: output_change(output, expected) for name, output in outputs.items()}
    batches: Iterable[Any] = [rows]
    if x is not None:
        with contextlib.suppress(InputError):  # `x` has less than a batch: `rows` is all of it.
            data = training_dataset(x, batch_size=_COMPARED_AT_ONCE, model=reference)
            batches = (keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in data)
    changed, predictions, compared = dict.fromkeys(others, 0), 0, 0
    for inputs in batches:
        expected = outputs_of(reference, inputs)
        for name, copy in others.items():
            differs = _class_differs(outputs_of(copy, inputs), expected)
            changed[name] += int(np.sum(differs))
        predictions += len(differs)
        compared += rows_of(inputs)
        if not predictions or compared >= _MOST_COMPARED or time.perf_counter() > ends_s:
            break
    if not predictions:
        return output_changes, {}, 0
    shares = {name: count / predictions for name, count in changed.items()}
    return output_changes, shares, compared


def _class_differs(outputs: Any, reference: Any) -> np.ndarray:
    """Return for each predicted class whether it differs from the reference."""
    differs = [np.zeros(0, bool)]
    leaves = map(keras.tree.flatten, (outputs, reference))
    for output, expected in zip(*leaves, strict=True):
        output, expected = np.asarray(output), np.asarray(expected)
        if expected.dtype.kind != "f" or expected.ndim < 2:
            continue
        if expected.shape[-1] > 1:
            differs.append(np.ravel(output.argmax(-1) != expected.argmax(-1)))
        elif np.all((expected >= 0) & (expected <= 1)):  # Probabilities of two classes.
            differs.append(np.ravel((output > 0.5) != (expected > 0.5)))
    return np.concatenate(differs)


def policy_of(model: keras.Model) -> str:
    """Name the policy of the layers with weights. Several policies are joined by `+`."""
    # `model.dtype_policy` is not reliable: Keras gives the global policy to a model that it loads.
    names = {layer.dtype_policy.name for layer in layers_with_weights(model)}
    return "+".join(sorted(names)) or model.dtype_policy.name


def variant(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Return a copy of the model under a policy, or the model itself if it has that policy."""
    if dtype_policy == policy_of(model):
        return model
    if dtype_policy != INT8:
        return copy_under(model, dtype_policy)
    copy: Any = copy_under(model, "float32")
    with warnings.catch_warnings():
        # Keras warns once for each layer that it cannot quantise; a note of `variants_of` counts.
        warnings.simplefilter("ignore")
        copy.quantize(INT8)
    if not any(INT8 in layer.dtype_policy.name for layer in layers_with_weights(copy)):
        raise PolicyUnsupported(f"no layer of model {model.name!r} can be quantised")
    return copy


def output_change(outputs: Any, reference: Any) -> float | None:
    """Return the largest difference over the largest output; None if not finite or all zeros."""

    def flat(nested: Any) -> np.ndarray:
        leaves = map(np.asarray, keras.tree.flatten(nested))
        numbers = [a.astype("float64").ravel() for a in leaves if a.dtype.kind not in TEXT_KINDS]
        return np.concatenate([[0.0], *numbers])  # If all outputs are text, only this zero is left.

    expected = flat(reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = float(np.max(np.abs(flat(outputs) - expected)) / np.max(np.abs(expected)))
    return change if np.isfinite(change) else None


def outputs_of(model: Any, batch: Any) -> Any:
    """Run a model eagerly on a batch."""
    return fetched(model(batch, training=False))


def copy_under(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Copy a model under a policy. Layers that compute integers or text keep their dtype."""
    clone = functools.partial(_layer_under, policy=dtype_policy)
    try:
        # Keras would compile the copy of a `Sequential` too, and may not know its loss.
        compiled = [layer for layer in layers_of(model) if getattr(layer, "compiled", False)]
        not_compiled = replaced((layer, "compiled", False) for layer in compiled)
        # The scope is for layers that make other layers themselves.
        with dtype_policy_scope(dtype_policy), not_compiled:
            copy = keras.models.clone_model(model, clone_function=clone, recursive=True)
        copy.set_weights(model.get_weights())
        _copy_state(model, copy)
    # The first three errors: a layer has no config or refuses the dtype, or the copy has other
    # weights. TensorFlow's error: initial weights cannot be drawn in the dtype.
    except (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError) as error:
        raise PolicyUnsupported(
            f"model {model.name!r} cannot be rebuilt ({str(error).splitlines()[0].rstrip('.')})"
        ) from error
    layers = layers_with_weights(copy)
    others = [layer.name for layer in layers if layer.dtype_policy.name != dtype_policy]
    if others:
        raise PolicyUnsupported(
            f"layers of model {model.name!r} have their own dtype policy: leave out their "
            f"`dtype` ({', '.join(others)})"
        )
    return copy


def layers_with_weights(model: Any) -> list[Any]:
    """Return the layers that have weights themselves, not only in inner layers."""
    return [layer for layer in layers_of(model) if holds_variables(layer)]


def _layer_under(layer: Any, policy: str) -> Any:
    layer_policy = getattr(layer, "dtype_policy", None)
    # An operation on tensors, such as `+`, has no policy, and one on integers must keep its dtype.
    changes = layer_policy is not None and layer_policy.name in POLICIES
    if isinstance(layer, keras.layers.InputLayer) or not changes:
        return type(layer).from_config(layer.get_config())
    if isinstance(layer, keras.layers.Lambda):
        # The function would lose its module if it were read from the config.
        return type(layer)(
            layer.function,
            output_shape=lambda_output_shape(layer),
            mask=layer.mask,
            arguments=layer.arguments,
            name=layer.name,
            dtype=policy,
        )
    return type(layer).from_config({**_with_policy(layer.get_config(), policy), "dtype": policy})


def _with_policy(config: Any, policy: str) -> Any:
    """Replace the policies in a config and in the configs within it, except integer dtypes."""
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(part, policy) for part in config)
    if not isinstance(config, dict):
        return config
    changed = {key: _with_policy(part, policy) for key, part in config.items()}
    dtype = config.get("dtype")
    if isinstance(dtype, dict):
        name = dtype.get("config", {}).get("name")
        changed["dtype"] = policy if name is None or "int" not in name.split("_")[0] else dtype
    return changed


def _copy_state(model: Any, copy: Any) -> None:
    """Copy the state of layers that is not in their weights, such as vocabularies."""
    pairs = zip(layers_of(model), layers_of(copy), strict=True)
    with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:
        for number, (source, target) in enumerate(pairs):
            if type(source).load_own_variables is not keras.Layer.load_own_variables:
                store: dict[str, Any] = {}
                source.save_own_variables(store)
                target.load_own_variables(store)
            if hasattr(source, "save_assets"):
                path = Path(folder, str(number))
                path.mkdir()
                source.save_assets(str(path))
                target.load_assets(str(path))
