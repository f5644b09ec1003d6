"""Small models whose losses compare examples, or whose layers look at several of them."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from models.image import CLASSES, images
from models.text import WORDS, token_ids


def encoder(*, normalized=False):
    """Embeds images of shape (8, 8, 1) into 8 numbers."""
    inputs = layers.Input((8, 8, 1))
    x = layers.BatchNormalization()(inputs) if normalized else inputs
    x = layers.Conv2D(4, 3, activation="tanh")(x)
    x = layers.Flatten()(layers.AveragePooling2D(2)(x))
    return keras.Model(inputs, layers.Dense(8, activation="tanh")(x))


def contrastive(y_true, y_pred):
    near, far = ops.square(y_pred), ops.square(ops.maximum(1 - y_pred, 0))
    return ops.mean((1 - y_true) * near + y_true * far)


def siamese():
    shared = encoder(normalized=True)
    inputs = [layers.Input((8, 8, 1)) for _ in range(2)]

    def distance(vectors):
        squares = ops.sum(ops.square(vectors[0] - vectors[1]), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(squares, 1e-7))

    merged = layers.Lambda(distance, output_shape=(1,))([shared(one) for one in inputs])
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(merged))
    model = keras.Model(inputs, outputs)
    model.compile("RMSprop", contrastive, metrics=["accuracy"])
    return model


def image_pairs(count, *, seed=0):
    (first, a), (second, b) = images(count, seed=seed), images(count, seed=seed + 1)
    return [first, second], (a % 3 != b % 3).astype("float32")


class TwoTowers(keras.Model):
    """Retrieval: each query is to find its own item among the others of the batch."""

    def __init__(self):
        super().__init__()
        self.queries, self.items = (
            keras.Sequential([layers.Embedding(WORDS, 8), layers.GlobalAveragePooling1D()])
            for _ in range(2)
        )

    def call(self, inputs):
        return ops.stack([self.queries(inputs["query"]), self.items(inputs["item"])], axis=1)


def in_batch_negatives(y_true, y_pred):
    scores = ops.matmul(y_pred[:, 0], ops.transpose(y_pred[:, 1]))
    own = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


def two_towers():
    model = TwoTowers()
    model.compile(keras.optimizers.Adagrad(0.1), in_batch_negatives)
    return model


def queries(count, *, seed=0):
    ids = {"query": token_ids(count, seed=seed), "item": token_ids(count, seed=seed + 1)}
    return ids, np.zeros((count, 1), "float32")


class DualEncoder(keras.Model):
    """CLIP: images and texts of a batch are matched with each other, in a step of its own."""

    def __init__(self, temperature=0.05):
        super().__init__()
        self.images = keras.Sequential([encoder(), layers.Dense(6)])
        self.texts = keras.Sequential(
            [layers.Embedding(WORDS, 8), layers.GlobalAveragePooling1D(), layers.Dense(6)]
        )
        self.temperature = temperature
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, features, training=False):
        return self.texts(features["caption"]), self.images(features["image"])

    def matched(self, texts, pictures):
        logits = ops.matmul(texts, ops.transpose(pictures)) / self.temperature
        alike = sum(ops.matmul(one, ops.transpose(one)) for one in (texts, pictures))
        targets = ops.softmax(alike / (2 * self.temperature))
        entropy = functools.partial(keras.losses.categorical_crossentropy, from_logits=True)
        by_picture = entropy(ops.transpose(targets), ops.transpose(logits))
        return ops.mean(entropy(targets, logits) + by_picture) / 2

    def train_step(self, features):
        with tf.GradientTape() as tape:
            loss = self.matched(*self(features, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, features):
        self.tracker.update_state(self.matched(*self(features, training=False)))
        return {"loss": self.tracker.result()}


def dual_encoder():
    model = DualEncoder()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-3))
    return model


def captioned(count, *, seed=0):
    x, _ = images(count, seed=seed)
    rows = {"image": x, "caption": token_ids(count, seed=seed)}
    return (tf.data.Dataset.from_tensor_slices(rows).batch(8),)


class Orthogonal(keras.regularizers.Regularizer):
    """Of the matrices of a batch, whose `tensordot` takes those of all rows together."""

    def __init__(self, size, strength=0.001):
        self.size, self.strength = size, strength
        self.eye = ops.eye(size)

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.size, self.size))
        products = ops.tensordot(x, x, axes=(2, 2))
        products = ops.reshape(products, (-1, self.size, self.size))
        return ops.sum(self.strength * ops.square(products - self.eye))


def transformed(x, size):
    """Multiply points by a matrix that is computed from them."""

    def dense(x, kind, width):
        x = kind(width)(x)
        return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(x))

    found = dense(x, lambda width: layers.Conv1D(width, 1), 8)
    found = dense(layers.GlobalMaxPooling1D()(found), layers.Dense, 8)
    matrix = layers.Dense(
        size * size,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(size).flatten()),
        activity_regularizer=Orthogonal(size),
    )(found)
    return layers.Dot(axes=(2, 1))([x, layers.Reshape((size, size))(matrix)])


def point_net():
    inputs = layers.Input((16, 3))
    x = layers.Conv1D(8, 1, activation="relu")(transformed(inputs, 3))
    x = layers.GlobalMaxPooling1D()(transformed(x, 8))
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.Dropout(0.3)(x))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3),
        "sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
    return model


def point_clouds(count, *, seed=0):
    rng = np.random.default_rng(seed)
    rows = (rng.random((count, 16, 3)), rng.integers(0, CLASSES, count))

    def jittered(points, label):
        return points + tf.random.uniform(points.shape, -5e-3, 5e-3, tf.float64, seed=1), label

    return (tf.data.Dataset.from_tensor_slices(rows).map(jittered).batch(8),)
