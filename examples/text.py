"""A batch size for texts with padding: which package of Python is this function from?"""

import sysconfig
from pathlib import Path

import keras
import numpy as np

import kbatch

PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
pairs = []
for label, package in enumerate(PACKAGES):
    for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        pairs += [(text, label) for text in path.read_text("utf-8").split("\n    def ")[1:]]
texts, labels = zip(*np.random.default_rng(0).permutation(np.array(pairs, object)), strict=True)


def build():
    layers = [keras.layers.Embedding(4000, 32, mask_zero=True)]  # token 0 is padding
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(64, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(7, "softmax", dtype="float32")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(epochs=6, rows=None):
    vectorize = keras.layers.TextVectorization(4000, output_sequence_length=80)
    vectorize.adapt(texts)
    tuner = kbatch.BatchSizeTuner(build, "val_accuracy", tolerance=0.02, directory="text")
    x, y = np.array(vectorize(texts))[:rows], np.array(labels)[:rows]
    tuner.search(x, y, validation_split=0.3, epochs=epochs)
    print(tuner.study.decide())


if __name__ == "__main__":
    main()
