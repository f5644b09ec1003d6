"""Small models of sequences: text, speech and series of time."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WORDS, LENGTH = 20, 6


def token_ids(count, *, seed=0, words=WORDS, padded=True):
    """Token ids of shape (count, 6); 0 is padding, at the end of rows of differing length."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, words, (count, LENGTH))
    if padded:
        ids *= np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (count, 1))
    return ids.astype("int64")


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
    def __init__(self, width=8, *, causal=False):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, width)
        self.network = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = layers.Dropout(0.1)
        self.causal = causal

    def call(self, x):
        mask = None
        if self.causal:  # Made for each row of the batch, as old guides do.
            rows, length = ops.shape(x)[0], ops.shape(x)[1]
            later = ops.arange(length)[:, None] >= ops.arange(length)
            mask = ops.tile(ops.cast(later, "bool")[None], (rows, 1, 1))
        attended = self.attention(x, x, attention_mask=mask)
        x = self.norms[0](x + self.dropout(attended))
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
    model = NamedEntities()
    model.compile("adam", TagLoss())
    return model


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


def mini_gpt():
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = TransformerBlock(causal=True)(TokenAndPosition()(inputs))
    model = keras.Model(inputs, [layers.Dense(WORDS)(x), x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=[loss, None])
    return model


def next_tokens(count, *, seed=0):
    ids = token_ids(count, seed=seed, padded=False)
    return (tf.data.Dataset.from_tensor_slices((ids, np.roll(ids, -1, axis=1))).batch(8),)


class MaskedLanguageModel(keras.Model):
    def train_step(self, inputs):
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def masked_language_model():
    inputs = layers.Input((LENGTH,), dtype="int64")
    x = TransformerBlock()(TokenAndPosition()(inputs))
    model = MaskedLanguageModel(inputs, layers.Dense(WORDS, activation="softmax")(x))
    model.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    model.tracker = keras.metrics.Mean(name="loss")
    model.compile(optimizer=keras.optimizers.Adam(1e-3))
    return model


def masked_tokens(count, *, seed=0):
    """Tokens with some of them hidden, the tokens, and weights that are 1 where they are hidden."""
    ids = token_ids(count, seed=seed, padded=False)
    hidden = np.random.default_rng(seed).random(ids.shape) < 0.3
    rows = (np.where(hidden, 1, ids), ids, hidden.astype("int64"))
    return (tf.data.Dataset.from_tensor_slices(rows).batch(8),)


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
