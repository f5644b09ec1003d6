"""Functions that predict: given by the user, or loaded from a file of another runtime."""

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError, InputTypeError
from kbatch.inference.call_paths import (
    MOST_ROWS,
    TEXT_KINDS,
    Run,
    fetched,
    fixed_batch,
    inference_inputs,
    open_path,
    random_rows,
    repeated,
    row_kinds,
)
from kbatch.training.data.forms import as_dataset, is_dataset, rows_of
from kbatch.training.data.training_data import TrainingData

# Two calls of the same batch may differ by this share of the largest output.
_ROUNDING = 1e-3

Function = Callable[[Any], Any]


def functions_by_name(functions: Any) -> dict[str, Function]:
    """Return one function, or a dict of functions, as a dict by name."""
    if callable(functions):
        name = getattr(functions, "__name__", type(functions).__name__)
        functions = {"function" if name == "<lambda>" else name: functions}
    items = functions.items() if isinstance(functions, Mapping) else [("model", functions)]
    for name, function in items:
        if not (isinstance(name, str) and name and callable(function)):
            raise InputTypeError(
                "`model` must be a keras.Model, a function of a batch, or a dict of names and "
                "functions: build or load the model first (`keras.saving.load_model`). "
                f"Received: {name!r} of type {type(function).__name__}."
            )
    if not functions:
        raise InputError("If `model` is a dict, it must not be empty. Received: model={}.")
    return dict(functions)


def function_rows(x: Any) -> Any:
    """Take some rows of the data for functions, with the dtypes of the data."""
    x = as_dataset(x)
    if is_dataset(x):
        rows = TrainingData(x).some_rows(None)
        return keras.utils.unpack_x_y_sample_weight(rows.rows)[0] if rows else None
    rows = keras.tree.map_structure(np.asarray, x)
    lengths = {leaf.shape[:1] or (0,) for leaf in keras.tree.flatten(rows)}
    if len(lengths) != 1 or (0,) in lengths or _has_object_arrays(rows):
        raise InputError(
            "If `model` is a function, `x` is required: a `tf.data.Dataset`, or arrays of the same "
            "length with the examples on the first axis (`x[None]` for a single example). "
            f"Received: x of type {type(x).__name__}."
        )
    return keras.tree.map_structure(lambda leaf: leaf[:MOST_ROWS], rows)


def _has_object_arrays(nested: Any) -> bool:
    """Return whether a leaf is neither numbers nor text, such as None."""
    leaves = map(np.asarray, keras.tree.flatten(nested))
    objects = (leaf for leaf in leaves if leaf.dtype == object)
    return any(not isinstance(leaf.flat[0], (str, bytes)) for leaf in objects)


@contextlib.contextmanager
def open_function(
    name: str, function: Function, rows: Any
) -> Iterator[tuple[Run, dict[int, float]]]:
    """Prepare a function for timing, and check its outputs in three calls. Compile a Keras model.

    Yields the function, and the seconds of its first call with one row and with two.
    """
    if isinstance(function, keras.Model):
        inference_inputs(function, rows)
        with open_path("compiled", function, rows) as compiled:
            yield compiled, {}
        return

    def run(batch: Any, _: int) -> Any:
        return fetched(function(batch))

    row, pair = repeated(rows, 1), keras.tree.map_structure(lambda leaf: leaf[[-1, 0]], rows)
    first, row_s = _checked_call(name, run, rows, row)
    if not keras.tree.flatten(first) or _has_object_arrays(first):
        raise InputError(
            "The function must return arrays or tensors with one row for each row of the batch. "
            f"Received: {name!r}, which returned {first!r:.60}."
        )
    first = keras.tree.map_structure(np.array, first)  # The function may reuse its memory.
    _, pair_s = _checked_call(name, run, rows, pair)
    if not _same(first, _checked_call(name, run, rows, row)[0]):
        raise InputError(
            "The function must return the same outputs for the same batch: it must not keep state "
            "between calls, change its input, or draw random numbers. "
            f"Received: {name!r}, whose third call returned other outputs than its first."
        )
    yield run, {1: row_s, 2: pair_s}


def _checked_call(name: str, run: Run, rows: Any, batch: Any) -> tuple[Any, float]:
    """Call a function and time it. If it fails, find out whether it takes one batch size only."""
    began_s = time.perf_counter()
    try:
        return run(batch, rows_of(batch)), time.perf_counter() - began_s
    except Exception as error:  # A function may raise anything if it cannot take a batch.
        refusal = InputError(
            "The function must take a batch of `x` as NumPy arrays, nested as in `x`, and return "
            "outputs that `np.asarray` accepts. Give `x` the dtypes and shapes that the function "
            "takes, or let the function convert its inputs and outputs. "
            f"Received: x with rows of dtype and shape {row_kinds(rows)}; {name!r} raised: "
            f"{failure_text(error)}"
        )
        for size in sorted({*(2**k for k in range(9)), rows_of(rows)} - {rows_of(batch)}):
            with contextlib.suppress(Exception):  # Any error means that this size fails too.
                run(repeated(rows, size), size)
                refusal = fixed_batch(name, size)
                break
        raise refusal from error


def _same(first: Any, second: Any) -> bool:
    """Return whether two outputs differ by no more than rounding."""
    first, second = keras.tree.flatten(first), keras.tree.flatten(second)
    if [leaf.shape for leaf in first] != [leaf.shape for leaf in second]:
        return False
    for before, after in zip(first, second, strict=True):
        if before.dtype.kind in (*TEXT_KINDS, "b"):
            if not np.array_equal(before, after):
                return False
            continue
        largest = np.max(np.abs(before), initial=0.0, where=np.isfinite(before))
        if not np.allclose(before, after, rtol=0, atol=_ROUNDING * largest, equal_nan=True):
            return False
    return True


# ONNX dtypes whose names differ from those in NumPy.
_ONNX_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}


def load_model_file(path: Path) -> tuple[keras.Model | Mapping[str, Function], Any]:
    """Load a model file. Return a Keras model and None, or a function by name and random rows."""
    loaders = {".onnx": _load_onnx, ".tflite": _load_litert}
    load = _load_folder if path.is_dir() else loaders.get(path.suffix.lower())
    try:
        if load is None:
            model: Any = keras.saving.load_model(path, compile=False)
            return model, None
        function, specs = load(path)
    except (InputError, ImportError):
        raise
    except Exception as error:  # Each runtime has its own errors for a damaged file.
        raise InputError(
            "The model must be a .keras, .h5, .onnx or .tflite file, or a SavedModel folder: "
            "export the model again. If it has custom layers, export a SavedModel, or call "
            "`kbatch.profile_inference` in Python. "
            f"Received: {path} ({' '.join(str(error).split())[:200]})"
        ) from error
    inputs = {}
    for name, (shape, dtype) in specs.items():
        if shape and isinstance(shape[0], int) and shape[0] >= 0:
            raise fixed_batch(path.name, shape[0])
        # An axis of any length may be a name or -1.
        lengths = [None if not isinstance(n, int) or n < 0 else n for n in shape]
        inputs[name] = keras.KerasTensor(lengths, dtype, name=name)
    return {path.name: function}, random_rows(inputs)


def _load_onnx(path: Path) -> tuple[Function, dict[str, Any]]:
    runtime = _runtime("onnxruntime", "onnxruntime", path)
    session = runtime.InferenceSession(str(path), providers=runtime.get_available_providers())
    specs = {
        tensor.name: (tensor.shape, _ONNX_DTYPES.get(tensor.type, tensor.type[len("tensor(") : -1]))
        for tensor in session.get_inputs()
    }
    return lambda batch: session.run(None, batch), specs


def _load_litert(path: Path) -> tuple[Function, dict[str, Any]]:
    """Load a LiteRT file to run on all cores of this process."""
    runtime = _runtime("ai_edge_litert.interpreter", "ai-edge-litert", path)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    open_file = functools.partial(runtime.Interpreter, model_path=str(path), num_threads=threads)
    inputs = open_file().get_input_details()

    @functools.cache
    def interpreter_of(batch_size: int) -> Any:
        # Resizing one interpreter would slow the first call of each round.
        interpreter = open_file()
        for tensor in inputs:
            interpreter.resize_tensor_input(tensor["index"], (batch_size, *tensor["shape"][1:]))
        interpreter.allocate_tensors()
        return interpreter, [tensor["index"] for tensor in interpreter.get_output_details()]

    def call(batch: Any) -> Any:
        interpreter, outputs = interpreter_of(len(batch[inputs[0]["name"]]))
        for tensor in inputs:
            interpreter.set_tensor(tensor["index"], batch[tensor["name"]])
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in outputs]

    return call, {
        tensor["name"]: (tensor["shape_signature"].tolist(), tensor["dtype"].__name__)
        for tensor in inputs
    }


def _load_folder(path: Path) -> tuple[Function, dict[str, Any]]:
    loaded: Any = tf.saved_model.load(str(path))
    if not (names := list(loaded.signatures)):
        raise InputError(
            "The folder must hold a SavedModel with a signature: export the model with "
            f"`model.export`. Received: {path}"
        )
    serve = loaded.signatures["serving_default" if "serving_default" in names else names[0]]
    specs = serve.structured_input_signature[1]

    def call(batch: Any) -> Any:
        _ = loaded  # A signature does not keep the variables of its model alive.
        return serve(**{name: tf.constant(leaf) for name, leaf in batch.items()})

    return call, {n: (s.shape.as_list(), s.dtype.name) for n, s in specs.items()}


def _runtime(module: str, package: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"A {path.suffix} file needs its runtime: `pip install {package}`. Received: {path}"
        ) from error
