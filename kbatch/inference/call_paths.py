"""What is run to predict: a model by a call path and under a policy, and inputs that suit it.

A call begins with the caller's arrays in the host's memory and returns when its outputs lie there
too: on a GPU it pays for both copies, and its work is done then, and not merely begun.
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
from kbatch.errors import InputError, InputTypeError, PolicyUnsupported
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

_MADE_ROWS = 64
# Share of the largest output by which two calls of the same batch may differ.
_ROUNDING = 1e-3
_TEXT = "OSU"  # How NumPy names the kinds of its arrays that hold text.
# What TensorFlow raises of values, shapes or dtypes that an operation does not take.
_REFUSALS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


# From a batch of arrays and the batch size to outputs, as nested NumPy arrays.
Run = Callable[[Any, int], Any]

ONE_BATCH_PATH = "predict_one_batch"
CALL_PATHS = (
    "compiled",
    "xla",
    "model(x)",
    ONE_BATCH_PATH,
    "predict_on_batch",
    BULK_PATH,
    "saved_model",
)


def check_names(known: Sequence[str], **given: str | Iterable[str]) -> tuple[str, ...]:
    """Check an argument that names one or several of what is known, each once."""
    ((argument, value),) = given.items()
    single = isinstance(value, str) or not isinstance(value, Iterable)
    names: tuple[Any, ...] = (value,) if single else tuple(value)
    if not names or not all(name in known for name in names) or len(set(names)) < len(names):
        raise InputError(
            f"`{argument}` must be at least one of {', '.join(known)}, each once. "
            f"Received: {argument}={names!r}."
        )
    return names


@contextlib.contextmanager
def open_path(name: str, model: Any, rows: Any) -> Iterator[Run]:
    """Open a call path: a function of a batch, whose rows are like these, and the batch size."""
    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), rows
    )

    def serve(batch: Any) -> Any:
        return model(batch, training=False)

    xla, of_keras = name == "xla", name in (BULK_PATH, ONE_BATCH_PATH, "predict_on_batch")
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
            # At the level of info it names the folder, which goes again.
            log.setLevel(max(log.getEffectiveLevel(), logging.WARNING))
            try:
                archive.write_out(path, verbose=False)
            finally:
                log.setLevel(level)
            loaded: Any = tf.saved_model.load(path)
            call = loaded.serve
        elif name in ("compiled", "xla"):
            call = tf.function(serve, input_signature=[signature], jit_compile=xla)
        # Keras takes no arrays of text, and no other arrays beside text.
        text = any(leaf.dtype.kind in _TEXT for leaf in keras.tree.flatten(rows))

        def run(batch: Any, batch_size: int) -> Any:
            if text or not of_keras:
                batch = keras.tree.map_structure(tf.constant, batch)
            cut = {"batch_size": batch_size, "verbose": 0} if call == model.predict else {}
            try:
                outputs = call(batch, **cut)
            except _REFUSALS as error:
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


def repeated(rows: Any, batch_size: int) -> Any:
    """Make a batch of rows, again from the first one where there are fewer."""
    count = len(keras.tree.flatten(rows)[0])
    index = np.arange(batch_size) % count
    return keras.tree.map_structure(lambda leaf: leaf[index], rows)


Function = Callable[[Any], Any]


def functions_by_name(functions: Any) -> dict[str, Function]:
    """Return functions of a batch by their names, from one or a dict of them."""
    if callable(functions):
        name = getattr(functions, "__name__", type(functions).__name__)
        functions = {"function" if name == "<lambda>" else name: functions}
    given = functions.items() if isinstance(functions, Mapping) else [("model", functions)]
    for name, function in given:
        if not (isinstance(name, str) and name and callable(function)):
            raise InputTypeError(
                "`model` must be a keras.Model, a function of a batch, or a dict of names and "
                "functions: build or load it first (`keras.saving.load_model`). "
                f"Received: {name!r} of type {type(function).__name__}."
            )
    if not functions:
        raise InputError("`model` must hold at least one function. Received: model={}.")
    return dict(functions)


def function_rows(x: Any) -> Any:
    """Take rows of the data for functions, of the dtypes that they have."""
    x = as_dataset(x)
    if is_dataset(x):
        rows = TrainingData(x).some_rows(None)
        return keras.utils.unpack_x_y_sample_weight(rows.rows)[0] if rows else None
    rows = keras.tree.map_structure(np.asarray, x)
    lengths = {leaf.shape[:1] or (0,) for leaf in keras.tree.flatten(rows)}
    if len(lengths) != 1 or (0,) in lengths or _object_arrays(rows):
        raise InputError(
            "A function needs `x`: arrays with the examples on the first axis (`x[None]` for a "
            "single example), as many in each, or a `tf.data.Dataset`. "
            f"Received: x of type {type(x).__name__}."
        )
    return keras.tree.map_structure(lambda leaf: leaf[:_MADE_ROWS], rows)


def _object_arrays(nested: Any) -> bool:
    """Return whether some of these are no arrays, such as None."""
    leaves = map(np.asarray, keras.tree.flatten(nested))
    return any(one.dtype == object and not isinstance(one.flat[0], (str, bytes)) for one in leaves)


@contextlib.contextmanager
def open_function(name: str, function: Function, rows: Any) -> Iterator[Run]:
    """Open a function, or a model as a compiled one, and check it on one row, two, and one."""
    if isinstance(function, keras.Model):
        inference_inputs(function, rows)
        with open_path("compiled", function, rows) as compiled:
            yield compiled
        return

    def run(batch: Any, _: int) -> Any:
        return fetched(function(batch))

    one, pair = repeated(rows, 1), keras.tree.map_structure(lambda leaf: leaf[[-1, 0]], rows)
    first = _called(name, run, rows, one)
    if not keras.tree.flatten(first) or _object_arrays(first):
        raise InputError(
            "The function must return its outputs: arrays or tensors with a row for each row of "
            f"the batch. Received: {name!r}, which returned {first!r:.60}."
        )
    first = keras.tree.map_structure(np.array, first)  # Of a function that reuses its memory.
    _called(name, run, rows, pair)
    again = _called(name, run, rows, one)
    if not _same(first, again):
        raise InputError(
            "The function must return the same outputs whenever it gets the same batch: let it "
            "keep no state between calls, leave its input as it is, and draw no random numbers. "
            f"Received: {name!r}, which gave other outputs in the third call than in the first."
        )
    yield run


def _called(name: str, run: Run, rows: Any, batch: Any) -> Any:
    size = rows_of(batch)
    try:
        return run(batch, size)
    except Exception as error:  # Whatever a function raises of a batch that does not suit it.
        sizes = {1, *(2**k for k in range(1, 9)), rows_of(rows)} - {size}
        taken = next((n for n in sorted(sizes) if _takes(run, repeated(rows, n))), None)
        if taken is not None:
            raise fixed_batch(name, taken) from error
        kinds = ", ".join(f"{leaf.dtype} {leaf.shape[1:]}" for leaf in keras.tree.flatten(rows))
        raise InputError(
            "The function must take a batch of `x` as NumPy arrays, nested as they are in `x`: "
            "give rows of the dtypes and shapes that it takes, or let it convert them. Received: x "
            f"with rows of dtype and shape {kinds}, and {name!r} says: {failure_text(error)}"
        ) from error


def _takes(run: Run, batch: Any) -> bool:
    try:
        run(batch, rows_of(batch))
    except Exception:  # As above.
        return False
    return True


def fixed_batch(name: str, size: int) -> InputError:
    return InputError(
        "The model must take batches of any size: build it without a batch size "
        "(`keras.Input(shape)` and no `batch_shape` or `batch_size`), or export it with a batch "
        f"axis of any length. Received: model={name!r} for batches of {size} only."
    )


def _same(first: Any, again: Any) -> bool:
    """Return whether two outputs differ by no more than rounding."""
    pairs = [keras.tree.flatten(outputs) for outputs in (first, again)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        one.shape == other.shape
        and (
            bool(np.all(one == other))
            if one.dtype.kind in (*_TEXT, "b")
            else np.allclose(one, other, rtol=0, atol=_ROUNDING * _most(one), equal_nan=True)
        )
        for one, other in zip(*pairs, strict=True)
    )


def _most(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def inference_inputs(model: keras.Model, x: Any = None) -> Sample:
    """Take rows of the data or make some, and run the model on one, which builds it."""
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
        inputs = Sample(_made_rows(model), None, Note.of("inputs_made"))
    else:
        x = as_dataset(x)
        if is_dataset(x) and isinstance(x.element_spec, tuple):
            x = x.map(lambda inputs, *targets: (inputs,))  # A prediction needs no targets.
        sample = TrainingData(x).some_rows(model)
        if sample is None:
            raise InputError(
                "Predictions take arrays or a `tf.data.Dataset`, not a function of the batch size. "
                f"Received: x of type {type(x).__name__}."
            )
        rows = sample.rows[0] if isinstance(sample.rows, tuple) else sample.rows
        inputs = sample._replace(rows=rows)
    try:
        model(keras.tree.map_structure(tf.constant, repeated(inputs.rows, 1)), training=False)
    except (ValueError, TypeError, KeyError, *_REFUSALS) as error:
        rows = (f"{leaf.dtype} {leaf.shape[1:]}" for leaf in keras.tree.flatten(inputs.rows))
        raise InputError(
            "`x` must hold rows that the model takes, an array for each of its inputs, of their "
            "shapes and dtypes, nested as they are and with the examples on the first axis "
            f"(`x[None]` for a single example). Received: x with rows of dtype and shape "
            f"{', '.join(rows)}, and the model {model.name!r} says: {failure_text(error)}"
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
    # How many indices each embedding knows, by the identity of the tensor that it takes.
    indices = {
        id(layer.input): layer.input_dim
        for layer in layers_of(model, include_self=False)
        if isinstance(layer, keras.layers.Embedding) and calls_in_graph(layer)
    }
    return made_rows(structure, indices)


def made_rows(tensors: Any, indices: Mapping[int, int] = MappingProxyType({})) -> Any:
    """Make random rows of the shapes and dtypes of these."""
    rng = np.random.default_rng(0)
    return keras.tree.map_structure(lambda t: _made_leaf(t, indices, rng), tensors)


def _made_leaf(tensor: Any, indices: Mapping[int, int], rng: np.random.Generator) -> np.ndarray:
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


# A copy of the model under another dtype policy or quantised, and how far its outputs differ.
INT8 = "int8"


def variants_of(
    model: keras.Model, inputs: Sample, dtype_policies: Any
) -> tuple[dict[str, keras.Model], dict[str, float | None], tuple[Note, ...]]:
    """Return the model under each policy, how its outputs differ from float32's, and notes."""
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
            "The model cannot be copied under any of the policies: leave out `dtype_policies` to "
            f"measure it as it is. {' '.join(notes)} Received: dtype_policies={names}."
        )
    if inputs.note is not None:
        notes.append(inputs.note)
    if INT8 in models:
        layers = layers_with_weights(models[INT8])
        plain = [one.name for one in layers if INT8 not in one.dtype_policy.name]
        if plain:
            known = {"quantised": len(layers) - len(plain), "layers": len(layers)}
            notes.append(Note.of("not_quantised", **known, others=join_words(plain)))
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
    return models, changes, tuple(notes)


# Examples that are compared with float32 at once, and at most.
_COMPARED_AT_ONCE, _MOST_COMPARED = 64, 8192


def changed_classes(
    model: keras.Model, models: Mapping[str, keras.Model], x: Any, rows: Any, *, most_s: float
) -> tuple[dict[str, float], int]:
    """Return by policy the share of predictions with another class than in float32.

    All data are compared, as far as the time allows, or else the rows that were taken or made. The
    second value is how many examples were compared.
    """
    others = {name: one for name, one in models.items() if name != "float32"}
    if not others:
        return {}, 0
    changed, predictions, compared = dict.fromkeys(others, 0), 0, 0
    batches: Iterable[Any] = [rows]
    ends_s = time.perf_counter() + most_s
    with contextlib.suppress(PolicyUnsupported):  # Then there is nothing to compare with.
        reference = models.get("float32") or variant(model, "float32")
        if x is not None:
            with contextlib.suppress(InputError):  # Fewer rows than a batch: these are all.
                data = training_dataset(x, batch_size=_COMPARED_AT_ONCE, model=reference)
                batches = (keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in data)
        for inputs in batches:
            expected = outputs_of(reference, inputs)
            for name, one in others.items():
                found = _classes_changed(outputs_of(one, inputs), expected)
                changed[name] += int(np.sum(found))
            predictions += len(found)
            compared += rows_of(inputs)
            if not predictions or compared >= _MOST_COMPARED or time.perf_counter() > ends_s:
                break
    if not predictions:
        return {}, 0
    return {name: count / predictions for name, count in changed.items()}, compared


def _classes_changed(outputs: Any, reference: Any) -> np.ndarray:
    """Return for each prediction of a class whether it differs."""
    found = [np.zeros(0, bool)]
    leaves = map(keras.tree.flatten, (outputs, reference))
    for one, other in zip(*leaves, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if other.dtype.kind != "f" or other.ndim < 2:
            continue
        if other.shape[-1] > 1:
            found.append(np.ravel(one.argmax(-1) != other.argmax(-1)))
        elif np.all((other >= 0) & (other <= 1)):  # Of two classes.
            found.append(np.ravel((one > 0.5) != (other > 0.5)))
    return np.concatenate(found)


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
        leaves = (np.asarray(leaf) for leaf in keras.tree.flatten(nested))
        numbers = [
            leaf.astype("float64").ravel() for leaf in leaves if leaf.dtype.kind not in _TEXT
        ]
        return np.concatenate([[0.0], *numbers])  # Where all are texts nothing is left.

    expected = flat(reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = float(np.max(np.abs(flat(outputs) - expected)) / np.max(np.abs(expected)))
    return change if np.isfinite(change) else None


def outputs_of(model: Any, batch: Any) -> Any:
    """Run a model eagerly on a batch."""
    return fetched(model(batch, training=False))


def copy_under(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Copy a model; layers get the policy unless they compute whole numbers or text."""
    under_policy = functools.partial(_layer_under, policy=dtype_policy)
    try:
        # Layers that make others themselves leave them to the global policy.
        compiled = [one for one in layers_of(model) if getattr(one, "compiled", False)]
        # Keras would compile the copy of a `Sequential`, for which it may not know the loss.
        not_compiled = replaced((one, "compiled", False) for one in compiled)
        with dtype_policy_scope(dtype_policy), not_compiled:
            copy = keras.models.clone_model(model, clone_function=under_policy, recursive=True)
        copy.set_weights(model.get_weights())
        _copy_state(model, copy)
    # What a layer raises that has no config or refuses the dtype in it, that makes other weights
    # than it had (`set_weights`), or whose first weights cannot be drawn in the dtype (the last).
    except (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError) as error:
        raise PolicyUnsupported(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    others = [
        one.name for one in layers_with_weights(copy) if one.dtype_policy.name != dtype_policy
    ]
    if others:
        raise PolicyUnsupported(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: layers keep a "
            f"policy of their own: {', '.join(others)}."
        )
    return copy


def layers_with_weights(model: Any) -> list[Any]:
    """Return the layers that hold weights themselves, not only in layers within them."""
    return [layer for layer in layers_of(model) if holds_variables(layer)]


def _layer_under(layer: Any, policy: str) -> Any:
    own = getattr(layer, "dtype_policy", None)
    # An operator between tensors, such as `+`, has no policy; one on whole numbers needs its own.
    if isinstance(layer, keras.layers.InputLayer) or own is None or own.name not in POLICIES:
        return type(layer).from_config(layer.get_config())
    if isinstance(layer, keras.layers.Lambda):
        # Read from a config, the function would have lost its module.
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
    """Put a policy wherever a config, or one within it, has a policy; inputs have plain dtypes."""
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(part, policy) for part in config)
    if not isinstance(config, dict):
        return config
    changed = {key: _with_policy(part, policy) for key, part in config.items()}
    own = config.get("dtype")
    if isinstance(own, dict):  # That of whole numbers stays.
        name = own.get("config", {}).get("name")
        changed["dtype"] = policy if name is None or "int" not in name.split("_")[0] else own
    return changed


def _copy_state(model: Any, copy: Any) -> None:
    """Copy what layers hold beside weights, such as vocabularies, as Keras saves it."""
    pairs = zip(layers_of(model), layers_of(copy), strict=True)
    with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:
        for number, (one, other) in enumerate(pairs):
            if type(one).load_own_variables is not keras.Layer.load_own_variables:
                store: dict[str, Any] = {}
                one.save_own_variables(store)
                other.load_own_variables(store)
            if hasattr(one, "save_assets"):
                place = Path(folder, str(number))
                place.mkdir()
                one.save_assets(str(place))
                other.load_assets(str(place))
