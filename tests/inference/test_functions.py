"""Functions of a batch, with NumPy in place of a runtime, and the real runtimes if installed."""

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


def scale_of_the_batch(x):
    return int8_of(x, None)


def scale_of_each_row(x):
    return int8_of(x, 1)


def test_functions_and_a_model_share_rounds_a_table_a_figure_and_a_record(tmp_path):
    functions = {"predict": product, "net": mlp(), "tensor": lambda x: [tf.constant(x)]}
    found = profile(functions, batch_sizes=(1, 4), time_budget_s=1.0)
    assert found.series == (("predict", None), ("net", None), ("tensor", None))
    assert found.model_name == "predict, net and tensor"
    table = found.table()
    assert list(table["function"]) == ["predict"] * 2 + ["net"] * 2 + ["tensor"] * 2
    assert "policy" not in table and len({*table["batch time (ms)"]}) > 3
    assert all(t.measured for t in found.timings)
    assert found.use and "depend" not in str(found.notes)
    assert found.answering[0].call_path == "predict"
    assert found.batch_for(latency_ms=1000, quantile=0.5).batch_size == 4
    assert len(found.figures()) == 2
    found.save(tmp_path / "p.json")
    assert InferenceProfile.load(tmp_path / "p.json") == found
    assert found.select(call_path="net").answering[0].call_path == "net"


def test_a_target_of_a_function_is_verified_and_it_gets_the_dtypes_of_the_data():
    seen = set()

    def text_and_numbers(x):
        seen.add((x["words"].dtype.kind, x["numbers"].dtype.name))
        return {"length": np.char.str_len(x["words"]), "same": x["numbers"]}

    x = {"words": np.array(["a", "bc"]), "numbers": np.arange(2.0)}
    found = profile(text_and_numbers, x, latency_slo_ms=10_000, time_budget_s=1.0)
    assert found.batch_for(latency_ms=10_000).verified
    assert seen == {("U", "float64")}
    assert found.model_name == "text_and_numbers"


@pytest.mark.parametrize("sizes", [(1, 4), (4, 16)])
def test_one_row_that_is_larger_shows_a_scale_of_the_whole_batch(sizes):
    found = profile({"each": scale_of_each_row, "whole": scale_of_the_batch}, batch_sizes=sizes)
    depends = {t.call_path: t.size_effect.depends for t in found.timings if t.size_effect}
    assert depends == {"each": False, "whole": True}
    (note,) = found.notes[:1]
    assert (note.code, note.values["size"]) == ("depends_on_size", sizes[1])
    assert "1,000 times larger" in note and not found.use


def test_a_function_that_refuses_large_values_or_reuses_its_memory_is_not_accused():
    memory = np.empty((64, 3))

    def reuses(x):
        if np.max(np.abs(x)) > 100:
            raise ArithmeticError("out of range")
        np.matmul(x, W, out=memory[: len(x)])
        return memory[: len(x)]

    found = profile(reuses)
    assert all(not t.size_effect.depends for t in found.timings[1:])


def of_size(size):
    def fixed(x):
        if len(x) != size:
            raise RuntimeError(f"expected {size} rows")
        return product(x)

    return fixed


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls


class Averaging:
    """Subtracts a mean that follows the batches: of equal batches it is the same."""

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
        ({"function": lambda x: None}, InputError, "must return its outputs.*Received: 'function'"),
        ({"function": lambda x: []}, InputError, "must return its outputs"),
        ({"function": lambda x: {"a": product(x), "b": None}}, InputError, "must return its out"),
        ({"function": lambda x: (row for row in x)}, InputError, "must return its outputs"),
        ({"function": Counting()}, InputError, "state.*Received: 'Counting'"),
        ({"function": Averaging()}, InputError, "state"),
        ({"function": doubled_in_place}, InputError, "leave its input as it is"),
        ({"function": {}}, InputError, "at least one function"),
        ({"function": {"a": 3}}, InputTypeError, "'a' of type int"),
        ({"function": "model.onnx"}, InputTypeError, "load it first"),
        ({"x": None}, InputError, "needs `x`"),
        ({"x": np.float32(3)}, InputError, "needs `x`"),
        ({"x": X[:0]}, InputError, "needs `x`"),
        ({"x": {"a": X, "b": X[:3]}}, InputError, "as many in each"),
        ({"call_paths": "xla"}, InputError, "for one keras.Model"),
        ({"dtype_policies": "float16"}, InputError, "for one keras.Model"),
    ],
)
def test_a_function_that_cannot_be_profiled_gets_one_error(changed, error, message):
    with pytest.raises(error, match=message):
        profile(**{"function": product, **changed})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model as Keras writes it, and as the folder of a SavedModel."""
    folder, model = tmp_path_factory.mktemp("files"), mlp()
    model.save(folder / "net.keras")
    model.export(folder / "saved", verbose=False)
    return folder


def by_command(path, capsys, *more):
    output = path.parent / "out"
    words = ["inference", str(path), "--batch-sizes", "1,4", "--seconds", "0.3", "-o", str(output)]
    status = cli.main([*words, "--no-memory", "--verbose", "0", *more])
    said = capsys.readouterr()
    if status:
        return said.err
    return kbatch.InferenceProfile.load(output / "profile.json")


@pytest.mark.parametrize(
    ("name", "series"), [("net.keras", ("compiled", "float32")), ("saved", ("saved", None))]
)
def test_inference_takes_what_keras_saves_and_exports(files, capsys, name, series):
    found = by_command(files / name, capsys)
    assert found.series == (series,)
    assert [note.code for note in found.noted] == ["inputs_made"]
    assert all(t.measured for t in found.timings)


@pytest.mark.parametrize("name", ["none.onnx", "net.onnx", "empty"])
def test_inference_says_what_is_wrong_with_a_file(files, capsys, name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    (files / "net.onnx").touch()
    (files / "empty").mkdir(exist_ok=True)
    expected = {"none.onnx": "does not exist", "net.onnx": "pip install onnxruntime"}
    said = by_command(files / name, capsys)
    assert expected.get(name, "export the model again") in said and "Received: " in said


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
    """Write two layers; of one batch size as LiteRT's converter does, since Keras opens it."""
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


runtimes = pytest.mark.runtime


def runtime(name):
    return pytest.importorskip(name, reason=f"{name} is missing: make test-runtimes")


@runtimes
@pytest.mark.parametrize("dtype", ["FLOAT", "DOUBLE", "FLOAT16"])
def test_onnx_runtime_profiles_a_file_and_a_session(tmp_path, capsys, dtype):
    onnxruntime = runtime("onnxruntime")
    path = onnx_file(tmp_path / "net.onnx", dtype=dtype)
    found = by_command(path, capsys)
    assert found.series == (("net.onnx", None),) and found.use
    session = onnxruntime.InferenceSession(path)
    if dtype == "FLOAT":
        functions = {"onnx": lambda x: session.run(None, {"x": x}), "product": product}
        assert profile(functions, latency_slo_ms=1000, time_budget_s=1.0).verified
        with pytest.raises(InputError, match=r"tensor\(double"):
            profile(functions, X.astype("float64"))


@runtimes
def test_dynamic_quantisation_of_onnx_runtime_is_found_and_litert_scales_each_row(tmp_path, capsys):
    runtime("onnxruntime")
    found = by_command(onnx_file(tmp_path / "net.onnx", quantised=True), capsys)
    assert found.notes[0].code == "depends_on_size" and "1,000 times larger" in found.notes[0]
    runtime("ai_edge_litert")
    found = by_command(litert_file(tmp_path / "net.tflite", quantised=True), capsys)
    assert found.use


@runtimes
@pytest.mark.parametrize(
    ("package", "suffix"), [("onnxruntime", "onnx"), ("ai_edge_litert", "tflite")]
)
def test_files_of_one_batch_size_and_damaged_ones_get_one_error(tmp_path, capsys, package, suffix):
    runtime(package)
    path = tmp_path / f"net.{suffix}"
    (onnx_file if suffix == "onnx" else litert_file)(path, batch=4)
    assert "for batches of 4 only" in by_command(path, capsys)
    path.write_bytes(b"no model")
    assert "export the model again" in by_command(path, capsys)
