"""Models in files: what Keras saved, ONNX, LiteRT, and the folder of a SavedModel."""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.inference.call_paths import Function, fixed_batch, made_rows

# How ONNX names the dtypes that NumPy names otherwise.
_ONNX_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}


def load_model_file(path: Path) -> tuple[keras.Model | Mapping[str, Function], Any]:
    """Load a model, or a function by the name of its file, with rows made for its inputs."""
    loaders = {".onnx": _load_onnx, ".tflite": _load_litert}
    if path.is_dir():
        load: Callable[[Path], tuple[Function, dict[str, Any]]] = _load_folder
    elif path.suffix.lower() in loaders:
        load = loaders[path.suffix.lower()]
    else:
        return _load_keras(path), None
    try:
        function, specs = load(path)
    except (InputError, ImportError):
        raise
    except Exception as error:  # Of a damaged file each runtime raises errors of its own.
        raise InputError(
            "The model file must be one that its runtime loads: export the model again. "
            f"Received: {path} ({' '.join(str(error).split())[:200]})"
        ) from error
    inputs = {}
    for name, (shape, dtype) in specs.items():
        if shape and isinstance(shape[0], int) and shape[0] >= 0:
            raise fixed_batch(path.name, shape[0])
        # The length of any axis may be a name, or -1.
        known = [n if isinstance(n, int) and n >= 0 else None for n in shape]
        inputs[name] = keras.KerasTensor(known, dtype, name=name)
    return {path.name: function}, made_rows(inputs)


def _load_keras(path: Path) -> Any:
    try:
        return keras.saving.load_model(path, compile=False)
    # Keras gives TypeError for a class it does not know, OSError and KeyError for a broken file.
    except (ValueError, TypeError, OSError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise InputError(
            "The model file must be one that `model.save` wrote (.keras or .h5) of layers that "
            "Keras knows, an .onnx or .tflite file, or the folder of a SavedModel. For layers of "
            f"your own call `kbatch.profile_inference` in Python. Received: {path} ({cause})"
        ) from error


def _load_onnx(path: Path) -> tuple[Function, dict[str, Any]]:
    runtime = _runtime("onnxruntime", "onnxruntime", path)
    session = runtime.InferenceSession(str(path), providers=runtime.get_available_providers())
    specs = {
        one.name: (one.shape, _ONNX_DTYPES.get(one.type, one.type[len("tensor(") : -1]))
        for one in session.get_inputs()
    }
    return lambda batch: session.run(None, batch), specs


def _load_litert(path: Path) -> tuple[Function, dict[str, Any]]:
    """Load a file of LiteRT, which runs on as many threads as this process has cores."""
    runtime = _runtime("ai_edge_litert.interpreter", "ai-edge-litert", path)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    open_file = functools.partial(runtime.Interpreter, model_path=str(path), num_threads=threads)
    inputs = open_file().get_input_details()

    @functools.cache
    def sized(size: int) -> Any:
        # One for each batch size: to change the size would cost the first call of each round.
        interpreter = open_file()
        for one in inputs:
            interpreter.resize_tensor_input(one["index"], (size, *one["shape"][1:]))
        interpreter.allocate_tensors()
        return interpreter, [one["index"] for one in interpreter.get_output_details()]

    def call(batch: Any) -> Any:
        interpreter, outputs = sized(len(batch[inputs[0]["name"]]))
        for one in inputs:
            interpreter.set_tensor(one["index"], batch[one["name"]])
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in outputs]

    return call, {
        one["name"]: (one["shape_signature"].tolist(), one["dtype"].__name__) for one in inputs
    }


def _load_folder(path: Path) -> tuple[Function, dict[str, Any]]:
    loaded: Any = tf.saved_model.load(str(path))
    if not (names := list(loaded.signatures)):
        raise InputError(
            "The folder must hold a SavedModel with a signature: export the model by "
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
