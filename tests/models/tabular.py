"""Small models of tables, graphs and outputs of several kinds."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

COLOURS = ["red", "green", "blue"]


def features_of(count, *, seed=0):
    """Columns by name, one of texts, and a label of 0 or 1."""
    rng = np.random.default_rng(seed)
    columns = {
        "size": rng.normal(size=count).astype("float32"),
        "age": rng.normal(size=count).astype("float32"),
        "colour": np.array(COLOURS)[rng.integers(0, 3, count)],
    }
    return columns, (columns["size"] > 0).astype("float32")


def weighted_table(count, *, seed=0):
    columns, labels = features_of(count, seed=seed)
    weights = np.random.default_rng(seed).random(count).astype("float32")
    return (tf.data.Dataset.from_tensor_slices((columns, labels, weights)).batch(8),)


def column_inputs():
    return {
        name: layers.Input((), name=name, dtype="string" if name == "colour" else "float32")
        for name in ("size", "age", "colour")
    }


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


def feature_space():
    """The columns are encoded within the model, crosses of them too."""
    space = keras.utils.FeatureSpace(
        features={
            "size": "float_normalized",
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "colour": "string_categorical",
        },
        crosses=[keras.utils.FeatureSpace.cross(("colour", "age"), crossing_dim=8)],
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(features_of(32)[0]))
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(space.get_encoded_features()))
    model = keras.Model(space.get_inputs(), layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def column_table(count, *, seed=0):
    """A dataset of dicts, each feature with an axis of its own."""
    columns, labels = features_of(count, seed=seed)
    columns = {name: values[:, None] for name, values in columns.items()}
    return (tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8),)


class Recommender(keras.Model):
    """Matrix factorisation, as it is often copied: the product is one number for the batch."""

    def __init__(self, users=8, items=8):
        super().__init__()
        regularizer = keras.regularizers.l2(1e-6)
        self.users, self.items = (
            layers.Embedding(n, 4, embeddings_regularizer=regularizer) for n in (users, items)
        )
        self.user_bias, self.item_bias = layers.Embedding(users, 1), layers.Embedding(items, 1)

    def call(self, inputs):
        user, item = inputs[:, 0], inputs[:, 1]
        product = ops.tensordot(self.users(user), self.items(item), 2)
        return ops.sigmoid(product + self.user_bias(user) + self.item_bias(item))


def matrix_factorization():
    model = Recommender()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.BinaryCrossentropy())
    return model


def ratings(count, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 8, (count, 2)), rng.random(count)


class GraphConvolution(layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.prepare, self.update = layers.Dense(width, activation="gelu"), layers.Dense(width)

    def call(self, inputs):
        nodes, edges, weights = inputs
        messages = self.prepare(ops.take(nodes, edges[1], axis=0)) * weights[:, None]
        gathered = tf.math.unsorted_segment_mean(messages, edges[0], num_segments=nodes.shape[0])
        return ops.normalize(self.update(ops.concatenate([nodes, gathered], axis=1)))


class NodeClassifier(keras.Model):
    """Holds the whole graph; its input are the indices of nodes."""

    def __init__(self, nodes, edges):
        super().__init__()
        self.nodes, self.edges = tf.constant(nodes), tf.constant(edges)
        self.weights_of_edges = tf.ones(edges.shape[1]) / edges.shape[1]
        self.preprocess = layers.Dense(8, activation="gelu")
        self.convolutions = [GraphConvolution(8), GraphConvolution(8)]
        self.head = layers.Dense(3)

    def call(self, indices):
        x = self.preprocess(self.nodes)
        for convolution in self.convolutions:
            x = x + convolution((x, self.edges, self.weights_of_edges))
        return self.head(ops.take(x, indices, axis=0))


def graph_network():
    rng = np.random.default_rng(0)
    nodes = rng.normal(size=(64, 5)).astype("float32")
    model = NodeClassifier(nodes, rng.integers(0, 64, (2, 150)))
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    return model


def node_indices(count, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.permutation(64)[:count], rng.integers(0, 3, count)


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


def multi_output():
    title, body = (layers.Input((None,), name=name) for name in ("title", "body"))
    tags = layers.Input((4,), name="tags")
    read = [layers.LSTM(4)(layers.Embedding(20, 4, mask_zero=True)(one)) for one in (title, body)]
    x = layers.concatenate([*read, tags])
    outputs = {
        "priority": layers.Dense(1, name="priority")(x),
        "department": layers.Dense(3, name="department")(x),
    }
    model = keras.Model([title, body, tags], outputs)
    model.compile(
        keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    return model


def tickets(count, *, seed=0):
    rng = np.random.default_rng(seed)
    x = {name: rng.integers(1, 20, (count, n)) for name, n in (("title", 3), ("body", 5))}
    x["tags"] = rng.integers(0, 2, (count, 4)).astype("float32")
    departments = np.eye(3, dtype="float32")[rng.integers(0, 3, count)]
    return x, {"priority": rng.random((count, 1)).round(), "department": departments}
