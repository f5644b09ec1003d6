"""Small models of images: classifiers, segmentation, detection and sets of instances."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

CLASSES = 10


def images(count, *, seed=0, size=8, channels=1):
    """Images of shape (count, size, size, channels) and class labels of shape (count,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = rng.random((count, size, size, channels)) + 0.1 * labels[:, None, None, None]
    return x.astype("float32"), labels


def one_hot_images(count, *, seed=0):
    x, labels = images(count, seed=seed)
    return x, np.eye(CLASSES, dtype="float32")[labels]


def plain_cnn():
    model = keras.Sequential(
        [
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
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Patches(layers.Layer):
    """Cuts images into patches: (rows, 8, 8, 1) -> (rows, 16, 4)."""

    def call(self, images):
        patches = ops.image.extract_patches(images, size=2)
        return ops.reshape(patches, (ops.shape(images)[0], 16, 4))


class PatchEncoder(layers.Layer):
    """Projects patches and adds an embedding of their positions."""

    def __init__(self, width=8):
        super().__init__()
        self.projection = layers.Dense(width)
        self.positions = layers.Embedding(16, width)

    def call(self, patches):
        return self.projection(patches) + self.positions(ops.expand_dims(ops.arange(16), axis=0))


def vision_transformer():
    inputs = layers.Input((8, 8, 1))
    x = PatchEncoder()(Patches()(layers.Normalization(mean=0.5, variance=0.1)(inputs)))
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(
        *[layers.LayerNormalization(epsilon=1e-6)(x)] * 2
    )
    x = layers.Add()([attended, x])
    hidden = layers.Dense(16, activation=keras.activations.gelu)(layers.LayerNormalization()(x))
    x = layers.Add()([layers.Dropout(0.1)(layers.Dense(8)(hidden)), x])
    logits = layers.Dense(CLASSES)(layers.Dropout(0.5)(layers.Flatten()(x)))
    model = keras.Model(inputs, logits)
    model.compile(
        keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(5, name="top-5-accuracy"),
        ],
    )
    return model


class StochasticDepth(layers.Layer):
    """Leaves out a branch for some of the examples."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x, training=None):
        if not training:
            return x
        shape = (ops.shape(x)[0], *(1,) * (len(x.shape) - 1))
        kept = ops.floor(1 - self.rate + keras.random.uniform(shape, 0, 1, seed=self.seeds))
        return x / (1 - self.rate) * ops.cast(kept, x.dtype)


class SequencePooling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.Dense(1)

    def call(self, x):
        weights = ops.transpose(ops.softmax(self.attention(x), axis=1), (0, 2, 1))
        return ops.squeeze(ops.matmul(weights, x), -2)


def compact_transformer():
    inputs = layers.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, activation="relu")(inputs)
    x = layers.Reshape((16, 8))(layers.MaxPool2D(2)(x))
    attended = layers.MultiHeadAttention(2, 4)(*[layers.LayerNormalization()(x)] * 2)
    x = layers.Add()([StochasticDepth(0.2)(attended), x])
    hidden = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([StochasticDepth(0.2)(layers.Dense(8)(hidden)), x])
    model = keras.Model(inputs, layers.Dense(CLASSES)(SequencePooling()(x)))
    model.compile(
        keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=[
            keras.metrics.CategoricalAccuracy(name="accuracy"),
            keras.metrics.TopKCategoricalAccuracy(5, name="top-5-accuracy"),
        ],
    )
    return model


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
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(1e-2, momentum=0.9, global_clipnorm=10.0),
        loss={
            "boxes": BoxLoss(),
            "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"boxes": 2.0, "classes": 1.0},
        metrics={"classes": ["accuracy"]},
    )
    return model


def boxes(count, *, seed=0):
    x, _ = images(count, seed=seed)
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 4, (count, 3)).astype("float32")
    found = np.concatenate([rng.random((count, 3, 4)), kinds[..., None]], axis=-1)
    return x, {"boxes": found.astype("float32"), "classes": kinds}


class InstanceAttention(layers.Layer):
    """Weights of the instances of a bag, by a softmax over them."""

    def build(self, shapes):
        width = shapes[0][-1]
        self.v = self.add_weight(shape=(width, 4), regularizer=keras.regularizers.L2(0.01))
        self.w = self.add_weight(shape=(4, 1), regularizer=keras.regularizers.L2(0.01))

    def call(self, instances):
        scores = [ops.tanh(one @ self.v) @ self.w for one in instances]
        weights = ops.softmax(ops.stack(scores), 0)
        return [weights[i] for i in range(len(instances))]


def instance_bags():
    inputs = [layers.Input((8, 8, 1)) for _ in range(3)]
    shared = layers.Dense(8, activation="relu")
    embedded = [shared(layers.Flatten()(one)) for one in inputs]
    weights = InstanceAttention()(embedded)
    weighted = [layers.multiply([a, one]) for a, one in zip(weights, embedded, strict=True)]
    outputs = layers.Dense(2, activation="softmax")(layers.concatenate(weighted))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def bags(count, *, seed=0):
    return [images(count, seed=seed + i)[0] for i in range(3)], images(count, seed=seed)[1] % 2


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
