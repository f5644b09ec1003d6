#!/usr/bin/env bash
# ONNX Runtime 1.32.0: a dynamically quantised model takes one scale for a whole batch, so a row that
# is 1,000 times larger turns the outputs of the other rows into zeros.
#
# Run: bash findings/dynamic-quantisation-scales-a-batch.sh   (Python 3.11 to 3.13, 300 MB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: the outputs of a row do not depend on the other rows of its batch, as in float32. LiteRT
# and Keras scale each row when they quantise activations.
#
# Seen (outputs of the first row):
#   float32: [0.3508, -0.748, -0.7639] alone and beside a row that is 1,000 times larger
#   int8:    [0.3399, -0.7492, -0.7549] alone, [0.0, 0.0, 0.0] beside a row that is 1,000 times larger
#
# Cause: `quantize_dynamic` inserts ONNX's operator DynamicQuantizeLinear, whose scale is defined
# over the minimum and maximum of the whole input tensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

weights = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "net",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])],
    [numpy_helper.from_array(weights, "w")],
)
opset = [helper.make_opsetid("", 17)]
onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), "float32.onnx")
quantize_dynamic("float32.onnx", "int8.onnx")
rows = np.random.default_rng(1).normal(size=(2, 8)).astype("float32")
larger = rows * np.array([[1], [1000]], "float32")


def first_row(name, batch):
    session = onnxruntime.InferenceSession(f"{name}.onnx")
    return session.run(None, {"x": batch})[0][0].astype(float).round(4).tolist()


found = {name: (first_row(name, rows[:1]), first_row(name, larger)) for name in ("float32", "int8")}
print(f"ONNX Runtime {onnxruntime.__version__}")
for name, (alone, beside) in found.items():
    print(f"{name}: {alone} alone, {beside} beside a row that is 1,000 times larger")
same = np.allclose(*found["float32"])
sys.exit(not (same and np.any(found["int8"][0]) and not np.any(found["int8"][1])))
PY
