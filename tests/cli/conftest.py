"""A user's module with models and data for the commands."""

import sys

import pytest

MODULE = """
import keras, numpy as np, tensorflow as tf

def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])

def build():
    model = uncompiled()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def forgetful():
    build()

def broken():
    raise ValueError("the file is not there")

def arrays():
    x = np.random.default_rng(0).normal(size=(200, 8)).astype("float32")
    return x, np.argmax(x[:, :3], axis=1)

def data():
    return sized(8)

def sized(batch_size):
    return tf.data.Dataset.from_tensor_slices(arrays()).take(40).batch(batch_size)

def placed(batch_size, /):
    return sized(batch_size)

def stream():
    yield arrays()

class Nested:
    build = staticmethod(build)

def three():
    return 1, 2, 3

dataset = data()
pair = arrays()
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder that contains the module `given`."""
    (tmp_path / "given.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("given", None)
