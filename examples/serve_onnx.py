"""A batch size for a latency target in ONNX Runtime: serve_onnx.py [model.onnx]"""

import sys

import keras
import numpy as np
import onnxruntime

import kbatch


def exported(path="digits.onnx"):
    layers = [keras.Input((28, 28, 1)), keras.layers.Conv2D(16, 3, activation="relu")]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model(np.zeros((1, 28, 28, 1), "float32"))  # Keras exports a model that was called.
    model.export(path, format="onnx", verbose=False)
    return path


def main(path=None, latency_ms=20, time_budget_s=15):
    session = onnxruntime.InferenceSession(path or exported())
    (inputs,) = session.get_inputs()  # Of one input of floats, whose first axis is the batch.
    x = np.random.default_rng(0).normal(size=(64, *inputs.shape[1:])).astype("float32")
    profile = kbatch.profile_inference(
        lambda batch: session.run(None, {inputs.name: batch}),
        x,
        latency_slo_ms=latency_ms,
        time_budget_s=time_budget_s,
    )
    print(profile)  # Its first line names the batch size.


if __name__ == "__main__":
    main(*sys.argv[1:])
