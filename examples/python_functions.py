"""Which batch size suits a text classifier that masks its padding?

python examples/python_functions.py [DIRECTORY]      a minute on a processor

The net reads a function of Python's standard library and names the package that it is from. The
texts are on every machine with Python.
"""

import ast
import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import keras
import numpy as np

import kbatch

layers = keras.layers
SIZES = kbatch.powers_of_two(32, 512)
PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
VOCABULARY, LENGTH = 4000, 80


def build():
    model = keras.Sequential(
        [
            layers.Input((LENGTH,), dtype="int32"),
            # Token 0 is padding, which the mean skips.
            layers.Embedding(VOCABULARY, 32, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(len(PACKAGES), activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def functions(path):
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


def load():
    library = Path(sysconfig.get_path("stdlib"))
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        for path in sorted((library / package).rglob("*.py")):
            texts += [re.findall(r"\w+|[^\w\s]", text) for text in functions(path)]
            labels += [label] * (len(texts) - len(labels))
    counts = Counter(token for text in texts for token in text)
    known = {
        token: number for number, (token, _) in enumerate(counts.most_common(VOCABULARY - 2), 2)
    }
    numbers = [[known.get(token, 1) for token in text] for text in texts]
    x = keras.utils.pad_sequences(numbers, maxlen=LENGTH, padding="post", truncating="post")
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], np.array(labels)[order]


def search(x, y, directory, *, batch_sizes=SIZES, epochs=6, strategy="race"):
    hypermodel = kbatch.BatchSizeHyperModel(build, batch_sizes, micro_batch_size=128, seed=0)
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        "val_accuracy",
        strategy=strategy,
        tolerance=0.02,
        directory=directory,
        project_name="functions",
    )
    tuner.search(x, y, validation_split=0.4, epochs=epochs)
    return tuner.study


def show(study, directory):
    print(study.decide())
    print(study.to_dataframe()[["batch_size", "samples_per_second", "val_accuracy"]])
    kbatch.plot_trials(study).figure.savefig(f"{directory}/trials.png", bbox_inches="tight")
    kbatch.write_report(study, f"{directory}/report.html")
    print(f"{directory}/trials.png", f"{directory}/report.html", sep="\n")


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "functions-results"
    show(search(*load(), directory), directory)
