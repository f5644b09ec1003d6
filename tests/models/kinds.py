"""Twelve small models that people train, each with a mechanism of its own, and their table."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import own_steps
import small_models
import tensorflow as tf
from keras import layers, ops

CLASSES = 10
WORDS, LENGTH = 20, 6
COLOURS = ["red", "green", "blue"]


def images(count, *, seed=0, size=8, channels=1):
    """Images of shape (count, size, size, channels) and class labels of shape (count,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = rng.random((count, size, size, channels)) + 0.1 * labels[:, None, None, None]
    return x.astype("float32"), labels


def plain_cnn():
    parts = [
        layers.Input((8, 8, 1)),
        layers.RandomFlip("horizontal"),
        layers.RandomRotation(0.1),
        layers.RandomTranslation(0.1, 0.1),
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(CLASSES, activation="softmax"),
    ]
    return small_models.compiled(
        parts, "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )


def unet():
    inputs = layers.Input((8, 8, 3))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, strides=2, padding="same")(inputs))
    x = skipped = layers.Activation("relu")(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(
        layers.SeparableConv2D(8, 3, padding="same")(x)
    )
    x = layers.BatchNormalization()(layers.Conv2DTranspose(4, 3, padding="same")(x))
    x = layers.add([layers.UpSampling2D(2)(layers.Activation("relu")(x)), skipped])
    x = layers.UpSampling2D(2)(layers.Conv2DTranspose(4, 3, padding="same")(x))
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return model


def masked_images(count, *, seed=0):
    x, _ = images(count, seed=seed, channels=3)
    masks = np.random.default_rng(seed).integers(0, 3, (count, 8, 8, 1)).astype("uint8")
    return (tf.data.Dataset.from_tensor_slices((x, masks)).batch(8),)


class BoxLoss(keras.losses.Loss):
    """Smooth distance of boxes, for the objects of an image that are there: class 0 is none."""

    def call(self, y_true, y_pred):
        there = ops.cast(y_true[..., 4] > 0, y_pred.dtype)
        distance = ops.abs(y_true[..., :4] - y_pred)
        smooth = ops.where(distance < 1, 0.5 * ops.square(distance), distance - 0.5)
        found = ops.sum(there * ops.sum(smooth, axis=-1), axis=-1)
        return ops.divide_no_nan(found, ops.sum(there, axis=-1))


def detector():
    inputs = layers.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Flatten()(x)
    outputs = {
        "boxes": layers.Reshape((3, 4), name="boxes")(layers.Dense(12)(x)),
        "classes": layers.Reshape((3, 4), name="classes")(layers.Dense(12)(x)),
    }
    return small_models.compiled(
        keras.Model(inputs, outputs),
        keras.optimizers.SGD(1e-2, momentum=0.9, global_clipnorm=10.0),
        loss={
            "boxes": BoxLoss(),
            "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"boxes": 2.0, "classes": 1.0},
        metrics={"classes": ["accuracy"]},
    )


def boxes(count, *, seed=0):
    x, _ = images(count, seed=seed)
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 4, (count, 3)).astype("float32")
    found = np.concatenate([rng.random((count, 3, 4)), kinds[..., None]], axis=-1)
    return x, {"boxes": found.astype("float32"), "classes": kinds}


def pictures(count, *, seed=0):
    """Images of shape (count, 8, 8, 1) in [0, 1], without labels."""
    return (np.random.default_rng(seed).random((count, 8, 8, 1)).astype("float32"),)


class Diffusion(keras.Model):
    """DDPM: noise of a random strength is foretold; a second net averages the weights."""

    STEPS = 10

    def __init__(self, network, ema_network):
        super().__init__()
        self.network, self.ema_network = network, ema_network
        kept = np.cumprod(1 - np.linspace(1e-4, 0.02, self.STEPS))
        self.signal = tf.constant(np.sqrt(kept), dtype=tf.float32)
        self.noise = tf.constant(np.sqrt(1 - kept), dtype=tf.float32)

    def train_step(self, images):
        rows = tf.shape(images)[0]
        t = tf.random.uniform(minval=0, maxval=self.STEPS, shape=(rows,), dtype=tf.int64)
        with tf.GradientTape() as tape:
            noise = tf.random.normal(shape=tf.shape(images), dtype=images.dtype)
            shape = [rows, 1, 1, 1]
            signal = tf.reshape(tf.gather(self.signal, t), shape)
            noisy = signal * images + tf.reshape(tf.gather(self.noise, t), shape) * noise
            foretold = self.network([noisy, t], training=True)
            loss = self.loss(noise, foretold)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        weights = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in weights:
            average.assign(0.99 * average + 0.01 * weight)
        return {"loss": loss}


class TimeEmbedding(layers.Layer):
    """Sines of the time of a step; its frequencies are constants of float32."""

    def __init__(self, width):
        super().__init__()
        self.frequencies = tf.exp(tf.range(width // 2, dtype=tf.float32) * -1.0)

    def call(self, t):
        angles = tf.cast(t, tf.float32)[:, None] * self.frequencies[None, :]
        return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def diffusion():
    def network():
        images, t = layers.Input((8, 8, 1)), layers.Input((), dtype="int64")
        time = layers.Dense(4, activation="swish")(TimeEmbedding(4)(t))
        x = layers.GroupNormalization(2)(layers.Conv2D(4, 3, padding="same")(images))
        x = layers.Add()([x, time[:, None, None, :]])
        return keras.Model([images, t], layers.Conv2D(1, 3, padding="same")(x))

    net, average = network(), network()
    average.set_weights(net.get_weights())
    model = Diffusion(net, average)
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(2e-4))
    return model


def token_ids(count, *, seed=0):
    """Token ids of shape (count, 6); 0 is padding, at the end of rows of differing length."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (count, LENGTH))
    ids *= np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (count, 1))
    return ids.astype("int64")


class CTCEndpoint(layers.Layer):
    """Adds a value a row, which Keras sums over the batch."""

    def call(self, labels, logits):
        rows = ops.ones(ops.shape(labels)[:1], dtype="int32")
        lengths = (LENGTH // 2) * rows, 8 * rows
        logits = ops.cast(logits, "float32")
        self.add_loss(ops.ctc_loss(labels, logits, *lengths, mask_index=4)[:, None])
        return logits


def captcha():
    image = layers.Input((8, 4, 1), name="image", dtype="float32")
    labels = layers.Input((None,), name="label", dtype="int32")
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(layers.Reshape((8, 16))(x)))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    outputs = CTCEndpoint()(labels, layers.Dense(5)(x))
    model = keras.Model(inputs=[image, labels], outputs=outputs)
    model.compile(optimizer=keras.optimizers.Adam())
    return model


def captchas(count, *, seed=0):
    """Dicts of inputs and labels, and no targets beside them."""
    rng = np.random.default_rng(seed)
    image = rng.random((count, 8, 4, 1)).astype("float32")
    labels = rng.integers(0, 4, (count, LENGTH // 2)).astype("int32")
    return (tf.data.Dataset.from_tensor_slices({"image": image, "label": labels}).batch(8),)


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
    return small_models.compiled(TwoTowers(), keras.optimizers.Adagrad(0.1), in_batch_negatives)


def queries(count, *, seed=0):
    ids = {"query": token_ids(count, seed=seed), "item": token_ids(count, seed=seed + 1)}
    return ids, np.zeros((count, 1), "float32")


class TokenAndPosition(layers.Layer):
    def __init__(self, width=8, *, masked=False):
        super().__init__()
        self.tokens = layers.Embedding(WORDS, width)
        self.positions = layers.Embedding(LENGTH, width)
        self.supports_masking = self.masked = masked

    def call(self, ids):
        positions = ops.arange(0, ops.shape(ids)[-1], 1)
        return self.tokens(ids) + self.positions(positions)

    def compute_mask(self, ids, mask=None):
        return ops.not_equal(ids, 0) if self.masked else None


class TransformerBlock(layers.Layer):
    def __init__(self, width=8):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, width)
        self.network = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = layers.Dropout(0.1)

    def call(self, x):
        x = self.norms[0](x + self.dropout(self.attention(x, x)))
        return self.norms[1](x + self.dropout(self.network(x)))


class NamedEntities(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = TokenAndPosition()
        self.block = TransformerBlock()
        self.head = layers.Dense(4, activation="softmax")

    def call(self, inputs, training=False):
        return self.head(self.block(self.embedding(inputs), training=training))


class TagLoss(keras.losses.Loss):
    """The mean over tokens that are no padding, of the whole batch at once."""

    def call(self, y_true, y_pred):
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        mask = ops.cast(y_true > 0, values.dtype)
        return ops.sum(values * mask) / ops.sum(mask)


def named_entities():
    return small_models.compiled(NamedEntities(), "adam", TagLoss())


def tagged(count, *, seed=0):
    """Batches that are padded to their own longest sentence."""
    ids = token_ids(count, seed=seed)

    def sentences():
        for row in ids:
            row = row[row > 0]
            yield row, 1 + row % 3

    spec = tf.TensorSpec((None,), tf.int64)
    dataset = tf.data.Dataset.from_generator(sentences, output_signature=(spec, spec))
    return (dataset.padded_batch(4, padded_shapes=([LENGTH], [LENGTH])),)


class DecoderBlock(layers.Layer):
    """Attends to what was decoded so far and to the encoder, without its padding."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.own = layers.MultiHeadAttention(2, 4)
        self.across = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()

    def call(self, inputs, mask=None):
        x, encoded = inputs
        mask, encoder_mask = (None, None) if mask is None else mask
        x = self.norm(x + self.own(x, x, use_causal_mask=True, query_mask=mask))
        return x + self.across(x, encoded, query_mask=mask, key_mask=encoder_mask)

    def compute_mask(self, inputs, mask=None):
        return None if mask is None else mask[0]


def seq2seq_transformer():
    source = layers.Input((None,), dtype="int64", name="source")
    target = layers.Input((None,), dtype="int64", name="target")
    encoded = TransformerBlock()(TokenAndPosition(masked=True)(source))
    decoded = DecoderBlock()([TokenAndPosition(masked=True)(target), encoded])
    outputs = layers.Dense(WORDS, activation="softmax")(layers.Dropout(0.5)(decoded))
    model = keras.Model({"source": source, "target": target}, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    model.compile("rmsprop", loss, metrics=["accuracy"])
    return model


def translations(count, *, seed=0):
    """A dataset of dicts."""
    source, target = token_ids(count, seed=seed), token_ids(count, seed=seed + 1)
    found = ({"source": source, "target": target}, np.roll(target, -1, axis=1))
    return (tf.data.Dataset.from_tensor_slices(found).batch(8).cache(),)


def features_of(count, *, seed=0):
    """Columns by name, one of texts, and a label of 0 or 1."""
    rng = np.random.default_rng(seed)
    columns = {
        "size": rng.normal(size=count).astype("float32"),
        "age": rng.normal(size=count).astype("float32"),
        "colour": np.array(COLOURS)[rng.integers(0, 3, count)],
    }
    return columns, (columns["size"] > 0).astype("float32")


def column_inputs():
    return {
        name: layers.Input((), name=name, dtype="string" if name == "colour" else "float32")
        for name in ("size", "age", "colour")
    }


def weighted_table(count, *, seed=0):
    columns, labels = features_of(count, seed=seed)
    weights = np.random.default_rng(seed).random(count).astype("float32")
    return (tf.data.Dataset.from_tensor_slices((columns, labels, weights)).batch(8),)


def tab_transformer():
    inputs = column_inputs()
    index = layers.StringLookup(vocabulary=COLOURS, num_oov_indices=1)(inputs["colour"])
    tokens = ops.stack([layers.Embedding(4, 4)(index), layers.Embedding(4, 4)(index)], axis=1)
    tokens = tokens + layers.Embedding(2, 4)(ops.arange(2))
    attended = layers.MultiHeadAttention(2, 4, dropout=0.2)(tokens, tokens)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([attended, tokens]))
    numbers = layers.concatenate([ops.expand_dims(inputs[name], -1) for name in ("size", "age")])
    x = layers.concatenate([layers.Flatten()(x), layers.LayerNormalization(epsilon=1e-6)(numbers)])
    x = layers.Dropout(0.2)(layers.Dense(8, activation="selu")(x))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
    metrics = [keras.metrics.BinaryAccuracy(name="accuracy")]
    model.compile(optimizer, keras.losses.BinaryCrossentropy(), metrics=metrics)
    return model


class Distiller(keras.Model):
    """A student that learns from labels and from a frozen teacher, by a loss of its own."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss, distillation_loss):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.distillation_loss = student_loss, distillation_loss

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True, allow_empty=False
    ):
        soft = ops.softmax(self.teacher(x, training=False) / 3, axis=1)
        distilled = self.distillation_loss(soft, ops.softmax(y_pred / 3, axis=1)) * 9
        return 0.1 * self.student_loss(y, y_pred) + 0.9 * distilled

    def call(self, x):
        return self.student(x)


def distiller():
    def classifier(width):
        return keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(width, 3, strides=2),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    model = Distiller(classifier(2), classifier(6))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=keras.losses.KLDivergence(),
    )
    return model


class LogisticEndpoint(layers.Layer):
    """Computes its loss and its metric from targets that are an input."""

    def __init__(self):
        super().__init__()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, targets, logits, sample_weights=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weights))
        self.accuracy.update_state(targets, logits, sample_weights)
        return ops.softmax(logits)


def logistic_endpoint():
    inputs, targets = layers.Input((3,), name="inputs"), layers.Input((10,), name="targets")
    logits = layers.Dense(10, activity_regularizer=keras.regularizers.L2(1e-3))(inputs)
    model = keras.Model([inputs, targets], LogisticEndpoint()(targets, logits))
    model.compile(optimizer="adam")
    return model


def endpoint_rows(count, *, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.random((count, 3)).astype("float32")
    return ({"inputs": inputs, "targets": rng.integers(0, 2, (count, 10)).astype("float32")},)


def vectors(count, *, seed=0):
    return (small_models.rows(count, seed=seed)[0],)


class Kind(NamedTuple):
    """A kind of model that people train."""

    name: str
    feature: str  # What of it breaks tools that change how a model trains.
    build: Callable[[], keras.Model]
    data: Callable[..., tuple[Any, ...]]  # Rows -> what `fit` takes; with another `seed` others.
    objective: str = "val_loss"  # To be minimised.


KINDS = (
    Kind("Convolutional net", "augmentation and dropout in the model", plain_cnn, images),
    Kind("U-Net", "BatchNormalization; one label per pixel", unet, masked_images),
    Kind("Object detection", "two outputs, a loss averaged over objects", detector, boxes),
    Kind(
        "DDPM",
        "own `train_step`, random numbers from TensorFlow, float32 constants, averaged weights",
        diffusion,
        pictures,
        "loss",
    ),
    Kind(
        "GAN", "own `train_step`, which updates two nets in turn", own_steps.gan, vectors, "g_loss"
    ),
    Kind(
        "CTC", "`add_loss` of one value per row; dicts as data, without targets", captcha, captchas
    ),
    Kind("Two towers", "the other examples of the batch are the negatives", two_towers, queries),
    Kind("Named entities", "a loss averaged over the tokens of the batch", named_entities, tagged),
    Kind(
        "Encoder and decoder",
        "masks through layers; a loss that ignores padding; a dataset of dicts",
        seq2seq_transformer,
        translations,
    ),
    Kind(
        "TabTransformer",
        "sample weights in the dataset; texts as inputs",
        tab_transformer,
        weighted_table,
    ),
    Kind("Distillation", "own `compute_loss`, which calls a teacher model", distiller, images),
    Kind(
        "Loss endpoint",
        "`add_loss` of a mean, targets as an input; a regularizer on activations",
        logistic_endpoint,
        endpoint_rows,
    ),
)
