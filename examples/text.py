"""A batch size for a text classifier that masks its padding.

python examples/text.py    one minute

The net reads a function of Python's standard library and names the package that it is from.
"""

import sysconfig
from pathlib import Path

import keras
import numpy as np

import kbatch

PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
TOKENS, LENGTH = 4000, 80


def load():
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            texts += path.read_text(encoding="utf-8").split("\n    def ")[1:]
            labels += [label] * (len(texts) - len(labels))
    vectorize = keras.layers.TextVectorization(TOKENS, output_sequence_length=LENGTH)
    vectorize.adapt(texts)
    order = np.random.default_rng(0).permutation(len(texts))
    return np.array(vectorize(texts))[order].astype("int32"), np.array(labels)[order]


def build():
    layers = [keras.Input((LENGTH,), dtype="int32")]
    layers += [keras.layers.Embedding(TOKENS, 32, mask_zero=True)]  # token 0 is padding
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(64, activation="relu")]
    outputs = keras.layers.Dense(len(PACKAGES), activation="softmax", dtype="float32")
    model = keras.Sequential([*layers, outputs])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(epochs=6, rows=None):
    x, y = load()
    tuner = kbatch.BatchSizeTuner(build, "val_accuracy", tolerance=0.02, directory="text")
    tuner.search(x[:rows], y[:rows], validation_split=0.3, epochs=epochs)
    print(tuner.study.decide())
    kbatch.plot_learning_rates(tuner.study).figure.savefig("text.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
