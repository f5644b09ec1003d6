"""Functions of a batch: NumPy instead of a runtime, and the real runtimes if installed."""

import re
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp

import kbatch
from kbatch.cli import main as cli
from kbatch.errors import InputError, InputTypeError
from kbatch.inference.result import InferenceProfile

X = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
W = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def profile(function, x=X, **changed):
    arguments = {"batch_sizes": (1, 4, 16), "time_budget_s": 0.3, "verbose": 0}
    return kbatch.profile_inference(function, x, **(arguments | changed))


def product(x):
    return x @ W


def int8_of(x, axis):
    """Round to 127 steps of the largest value of the batch, or of each row."""
    scale = np.max(np.abs(x), axis=axis, keepdims=True) / 127
    return (np.round(x / scale) * scale) @ W


def test_profile_functions_and_a_model_together(tmp_path):
    functions = {"predict": product, "net": mlp(), "tensor": lambda x: [tf.constant(x)]}
    result = profile(functions, batch_sizes=(1, 4), time_budget_s=1.0)
    assert result.series == (("predict", None), ("net", None), ("tensor", None))
    assert result.model_name == "predict, net and tensor"
    table = result.table()
    assert list(table["function"]) == ["predict"] * 2 + ["net"] * 2 + ["tensor"] * 2
    assert "policy" not in table and len({*table["batch time (ms)"]}) > 3
    assert all(t.measured for t in result.timings)
    assert result.use and "depend" not in str(result.notes)
    assert result.answering[0].call_path == "predict"
    assert result.batch_for(latency_ms=1000, quantile=0.5).batch_size == 4
    assert len(result.figures()) == 2
    result.save(tmp_path / "p.json")
    assert InferenceProfile.load(tmp_path / "p.json") == result
    assert result.select(call_path="net").answering[0].call_path == "net"


def test_profile_function_with_a_target_gets_the_dtypes_of_the_data():
    dtypes = set()

    def text_and_numbers(x):
        dtypes.add((x["words"].dtype.kind, x["numbers"].dtype.name))
        return {"length": np.char.str_len(x["words"]), "same": x["numbers"]}

    x = {"words": np.array(["a", "bc"]), "numbers": np.arange(2.0)}
    result = profile(text_and_numbers, x, latency_slo_ms=10_000, time_budget_s=1.0)
    assert result.batch_for(latency_ms=10_000).verified
    assert dtypes == {("U", "float64")}
    assert result.model_name == "text_and_numbers"


class LazyArray:
    """Computes its values when NumPy asks for them, as arrays of JAX do in effect."""

    computed = 0

    def __init__(self, compute):
        self.compute = compute

    def __array__(self, dtype=None, copy=None):
        LazyArray.computed += 1
        time.sleep(0.005)
        return np.asarray(self.compute(), dtype)


def test_profile_function_times_the_computation_of_a_lazy_result():
    calls = []

    def lazy(x):
        time.sleep(0.05 * (len(x) not in calls))  # It is compiled for each batch size.
        calls.append(len(x))
        return {"y": LazyArray(lambda: x @ W)}

    result = profile(lazy, batch_sizes=(1, 2))
    # Sizes 1 and 2 were called before, when the outputs were checked.
    assert all(timing.first_call_s >= 0.05 for timing in result.timings)
    assert LazyArray.computed == len(calls) > 8
    assert all(latency_s >= 0.005 for t in result.timings for latency_s in t.latencies_s)
    assert result.use  # Outputs were compared, so the values reached kbatch.


@pytest.mark.parametrize("sizes", [(1, 4), (4, 16)])
def test_profile_function_with_one_scale_for_the_batch_is_noted(sizes):
    functions = {"row": lambda x: int8_of(x, 1), "batch": lambda x: int8_of(x, None)}
    result = profile(functions, batch_sizes=sizes)
    depends = {t.call_path: t.size_effect.depends for t in result.timings if t.size_effect}
    assert depends == {"row": False, "batch": True}
    (note,) = result.notes[:1]
    assert (note.code, note.values["size"]) == ("depends_on_size", sizes[1])
    assert "1,000 times larger" in note and not result.use


def test_profile_function_that_refuses_large_values_and_reuses_its_memory():
    memory = np.empty((64, 3))

    def reuses(x):
        if np.max(np.abs(x)) > 100:
            raise ArithmeticError("out of range")
        np.matmul(x, W, out=memory[: len(x)])
        return memory[: len(x)]

    assert all(not t.size_effect.depends for t in profile(reuses).timings[1:])


def of_size(size):
    def fixed(x):
        if len(x) != size:
            raise RuntimeError(f"expected {size} rows")
        return product(x)

    return fixed


class Averaging:
    """Subtracts a moving mean, which stays the same while all batches are equal."""

    mean = 0.0

    def __call__(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean()
        return x - self.mean


def doubled_in_place(x):
    x *= 2
    return x


def takes_float64(x):
    if x.dtype != np.float64:
        raise TypeError("Actual: float32, expected: float64")
    return product(x)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"function": of_size(1)}, InputError, r"batches of any size.*'fixed' for batches of 1 on"),
        ({"function": {"net": of_size(8)}}, InputError, "'net' for batches of 8 only"),
        ({"function": of_size(20)}, InputError, "for batches of 20 only"),
        ({"function": takes_float64}, InputError, r"convert.*float32 \(8,\).*expected: float64"),
        ({"function": lambda x: LazyArray(lambda: 1 / 0)}, InputError, "`np.asarray`.*division"),
        ({"function": lambda x: None}, InputError, "must return arrays.*Received: 'function'"),
        ({"function": lambda x: []}, InputError, "must return arrays"),
        ({"function": lambda x: {"a": product(x), "b": None}}, InputError, "must return arrays"),
        ({"function": lambda x: (row for row in x)}, InputError, "must return arrays"),
        ({"function": Averaging()}, InputError, "state.*Received: 'Averaging'"),
        ({"function": doubled_in_place}, InputError, "change its input"),
        ({"function": {}}, InputError, "must not be empty"),
        ({"function": {"a": 3}}, InputTypeError, "'a' of type int"),
        ({"function": "model.onnx"}, InputTypeError, "load the model first"),
        ({"x": None}, InputError, "`x` is required"),
        ({"x": np.float32(3)}, InputError, "`x` is required"),
        ({"x": X[:0]}, InputError, "`x` is required"),
        ({"x": {"a": X, "b": X[:3]}}, InputError, "arrays of the same length"),
        ({"call_paths": "xla"}, InputError, "require a keras.Model"),
        ({"dtype_policies": "float16"}, InputError, "require a keras.Model"),
    ],
)
def test_profile_function_refuses(changed, error, message):
    with pytest.raises(error, match=message):
        profile(**{"function": product, **changed})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model in a .keras file and in the folder of a SavedModel."""
    folder, model = tmp_path_factory.mktemp("files"), mlp()
    model.save(folder / "net.keras")
    model.export(folder / "saved", verbose=False)
    return folder


def by_command(path, capsys, *more):
    """Return the profile of the command `kbatch inference`, or the error that it printed."""
    output = path.parent / "out"
    words = ["inference", str(path), "--batch-sizes", "1,4", "--seconds", "0.3", "-o", str(output)]
    status = cli.main([*words, "--no-memory", "--verbose", "0", *more])
    printed = capsys.readouterr()
    return printed.err if status else kbatch.InferenceProfile.load(output / "profile.json")


@pytest.mark.parametrize(
    ("name", "series"), [("net.keras", ("compiled", "float32")), ("saved", ("saved", None))]
)
def test_command_inference_takes_keras_files_and_saved_models(files, capsys, name, series):
    result = by_command(files / name, capsys)
    assert result.series == (series,)
    assert [note.code for note in result.noted] == ["inputs_made"]
    assert all(t.measured for t in result.timings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.onnx", "does not exist"),
        ("net.onnx", "pip install onnxruntime"),
        ("empty", "export the model again"),
        ("net.keras --seconds -1", "`--seconds` must be a positive.*Received: --seconds -1"),
        ("net.keras --quantile 1.5", "`--quantile` must.*Received: --quantile 1.5"),
        ("net.keras --paths onnx", "`--paths` must be one or more.*Received: --paths "),
        ("net.keras --policies float8", "`--policies` must be one or more"),
        ("net.keras --bulk-examples 0", "`--bulk-examples` must"),
        ("net.keras --slo 1us --paths predict", "first in `--paths`.*Received: --paths"),
        ("net.keras --slo 0.001us", "latency target.*Received: a target of 1e-06 ms"),
    ],
)
def test_command_inference_refuses(files, capsys, words, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (files / "net.onnx").touch()
    (files / "empty").mkdir(exist_ok=True)
    name, *options = words.split()
    error = by_command(files / name, capsys, *options)
    assert re.search(message, error) and "Received: " in error
    assert not re.search(r"\w+_\w+=|`\w+_\w+`", error)  # Names of Python.


def onnx_file(path, batch="rows", dtype="FLOAT", quantised=False):
    """Write a product with W, for batches of any size or of one."""
    onnx = pytest.importorskip("onnx", reason="onnx is missing: make test-runtimes")
    kind = getattr(onnx.TensorProto, dtype)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [onnx.helper.make_tensor_value_info("x", kind, [batch, 8])],
        [onnx.helper.make_tensor_value_info("y", kind, [batch, 3])],
        [onnx.numpy_helper.from_array(W.astype(onnx.helper.tensor_dtype_to_np_dtype(kind)), "w")],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    if quantised:
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(path, path)
    return path


def litert_file(path, batch=None, quantised=False):
    """Write two layers, for batches of any size (by Keras) or of one (by LiteRT's converter)."""
    layers = [keras.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(300)]
    model = keras.Sequential(layers)
    if batch is None:
        options = {"optimizations": [tf.lite.Optimize.DEFAULT]} if quantised else {}
        model.export(path, format="litert", verbose=False, **options)
        return path
    function = tf.function(model).get_concrete_function(tf.TensorSpec((batch, 8)))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], model)
    path.write_bytes(converter.convert())
    return path


def runtime(name):
    return pytest.importorskip(name, reason=f"{name} is missing: make test-runtimes")


@pytest.mark.runtime
@pytest.mark.parametrize("dtype", ["FLOAT", "DOUBLE", "FLOAT16"])
def test_onnx_runtime_profiles_a_file_and_a_session(tmp_path, capsys, dtype):
    onnxruntime = runtime("onnxruntime")
    path = onnx_file(tmp_path / "net.onnx", dtype=dtype)
    result = by_command(path, capsys)
    assert result.series == (("net.onnx", None),) and result.use
    caption = kbatch.plot_inference_throughput(result).get_label()
    assert f"ONNX Runtime {onnxruntime.__version__}" in caption and "TensorFlow" not in caption
    session = onnxruntime.InferenceSession(path)
    if dtype == "FLOAT":
        functions = {"onnx": lambda x: session.run(None, {"x": x}), "product": product}
        assert profile(functions, latency_slo_ms=1000, time_budget_s=1.0).verified
        both = profile(functions | {"keras": keras.Sequential([keras.layers.Dense(3)])}, X)
        assert {"tensorflow", "onnxruntime"} <= both.environment.versions.keys()
        with pytest.raises(InputError, match=r"tensor\(double"):
            profile(functions, X.astype("float64"))


@pytest.mark.runtime
def test_onnx_runtime_dynamic_quantisation_depends_on_the_batch(tmp_path, capsys):
    runtime("onnxruntime")
    (note, *_) = by_command(onnx_file(tmp_path / "net.onnx", quantised=True), capsys).notes
    assert note.code == "depends_on_size" and "1,000 times larger" in note


@pytest.mark.runtime
def test_litert_dynamic_quantisation_does_not_depend_on_the_batch(tmp_path, capsys):
    runtime("ai_edge_litert")
    assert by_command(litert_file(tmp_path / "net.tflite", quantised=True), capsys).use


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("package", "suffix"), [("onnxruntime", "onnx"), ("ai_edge_litert", "tflite")]
)
def test_runtimes_refuse_files_of_one_batch_size_and_damaged_files(
    tmp_path, capsys, package, suffix
):
    runtime(package)
    path = tmp_path / f"net.{suffix}"
    (onnx_file if suffix == "onnx" else litert_file)(path, batch=4)
    assert "for batches of 4 only" in by_command(path, capsys)
    path.write_bytes(b"no model")
    assert "export the model again" in by_command(path, capsys)
