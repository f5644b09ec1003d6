"""`exact=True`: losses over the whole batch, in the memory of micro-batches."""

import functools
import threading

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
from equal_training import (
    Averaged,
    Sampled,
    accumulating,
    assert_equal_training,
    assert_same_training,
    built,
    trained,
)

from kbatch.training.dtype_policy import dtype_policy_scope

layers, ops = keras.layers, keras.ops
X, Y = small_models.rows(94)


def supervised_contrastive(labels, vectors):
    """Khosla et al. (2020), arXiv:2004.11362, equation 2."""
    vectors = ops.normalize(vectors, axis=-1)
    near = ops.matmul(vectors, ops.transpose(vectors)) / 0.5
    others = 1 - ops.eye(ops.shape(near)[0], dtype=near.dtype)
    labels = ops.reshape(labels, (-1, 1))
    alike = ops.cast(ops.equal(labels, ops.transpose(labels)), near.dtype) * others
    logs = near - ops.log(ops.sum(ops.exp(near) * others, axis=1, keepdims=True))
    return -ops.mean(ops.sum(alike * logs, axis=1) / (ops.sum(alike, axis=1) + 1e-6))


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


LOSSES = {
    "alike": (supervised_contrastive, Y, 4),
    "classes": ("sparse_categorical_crossentropy", Y, 3),
}


def of_whole_batches(names=tuple(LOSSES), **arguments):
    inputs = keras.Input((8,))
    hidden = layers.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = Averaged()(hidden)
    found = {}
    for name in names:
        loss, _, units = LOSSES[name]
        activation = "softmax" if isinstance(loss, str) else None
        found[name] = layers.Dense(units, activation=activation, dtype="float32", name=name)(hidden)
    model = keras.Model(inputs, found)
    losses = {name: LOSSES[name][0] for name in names}
    metrics = {"alike": [supervised_contrastive]} if "classes" in names else None
    model.compile(sgd(), losses, metrics=metrics, **arguments)
    return model


def in_parts(build, micro_batch_size=8):
    return lambda: accumulating(build(), micro_batch_size, exact=True)


def assert_exact(build, data, *, sample_weight=None, **arguments):
    """Assert equal training on two batches of 31 rows, each in four parts of unequal size.

    The batches have one length, because Keras weights the losses of outputs by rows only eagerly.
    """
    data, sample_weight = keras.tree.map_structure(
        lambda part: None if part is None else part[:62], (data, sample_weight)
    )
    arguments |= {"batch_size": 31, "micro_batch_size": None, "sample_weight": sample_weight}
    arguments = {"tolerance": 1e-5} | arguments
    return assert_equal_training(in_parts(build), data, reference=build, **arguments)


TARGETS_OF_ALL = {name: y for name, (_, y, _) in LOSSES.items()}
WEIGHTS = {name: np.random.default_rng(2).random(94).astype("float32") for name in LOSSES}


def test_exact_equals_whole_batch_for_batch_losses_and_weights():
    """The last micro-batch of each batch is smaller."""
    assert_exact(of_whole_batches, (X, TARGETS_OF_ALL), sample_weight=WEIGHTS)


@pytest.mark.slow
def test_exact_equals_whole_batch_under_xla():
    """There is only one batch, because XLA compiles each length."""
    data = (X[:30], {"alike": Y[:30]})
    whole = trained(lambda: of_whole_batches(["alike"]), data, micro_batch_size=None, eager=True)
    build = in_parts(lambda: of_whole_batches(["alike"], jit_compile=True))
    assert_same_training(whole, trained(build, data, micro_batch_size=None), 1e-5)


def test_exact_equals_whole_batch_in_half_precision():
    with dtype_policy_scope("mixed_float16"):
        model = assert_exact(of_whole_batches, (X, TARGETS_OF_ALL), tolerance=2e-3)
    assert float(model.optimizer.dynamic_scale) > 1


def test_exact_passes_masks_to_the_loss():
    tokens = np.random.default_rng(3).integers(1, 20, (94, 6))
    tokens[np.arange(6)[None] >= np.random.default_rng(4).integers(1, 7, (94, 1))] = 0

    def build():
        inputs = keras.Input((None,), dtype="int32")
        vectors = layers.Embedding(20, 4, mask_zero=True)(inputs)
        model = keras.Model(
            inputs, layers.Dense(1)(layers.SimpleRNN(4, return_sequences=True)(vectors))
        )

        def scaled(y_true, y_pred):
            return ops.square(y_true - y_pred) / (1e-2 + ops.std(y_pred))

        model.compile(sgd(), scaled)
        return model

    values = np.random.default_rng(5).normal(size=(94, 6, 1)).astype("float32")
    assert_exact(build, (tokens, values))


@pytest.mark.parametrize("eager", [False, True])
def test_exact_repeats_random_draws(eager):
    """The reference is one tape over all micro-batches, each of which draws once."""

    def build():
        keras.utils.set_random_seed(1)
        dense = [layers.Dense(16), Sampled(), layers.Dropout(0.5), layers.Dense(4)]
        model = keras.Sequential([layers.Input((8,)), *dense])
        model.compile(keras.optimizers.SGD(0.05), supervised_contrastive)
        built(model, X, Y)
        model.run_eagerly = eager
        return model

    model = build()
    with tf.GradientTape() as tape:
        outputs = [model(X[s : s + 8][: 30 - s], training=True) for s in (0, 8, 16, 24)]
        loss = supervised_contrastive(Y[:30], tf.concat(outputs, axis=0))
    gradients = tape.gradient(loss, model.trainable_weights)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    state = [np.asarray(one.value) for one in model.variables]

    parts = in_parts(build)()
    history = parts.fit(X[:30], Y[:30], batch_size=30, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
    for one, expected in zip(parts.variables, state, strict=True):
        np.testing.assert_allclose(np.asarray(one.value), expected, atol=1e-6, err_msg=one.path)


def test_exact_updates_moving_statistics_once():
    def build(**arguments):
        found = [layers.Input((8,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)]
        model = small_models.compiled(found, sgd(), "mse")
        return accumulating(model, 8, **arguments)

    targets = np.random.default_rng(6).normal(size=(94, 3)).astype("float32")
    plain = trained(build, (X, targets), micro_batch_size=None, eager=True)
    exact = trained(lambda: build(exact=True), (X, targets), micro_batch_size=None)
    for first, second in zip(plain[0].weights, exact[0].weights, strict=True):
        np.testing.assert_allclose(first, second, atol=2e-6, err_msg=first.path)


class DrawnElsewhere(layers.Layer):
    """Draws with TensorFlow or NumPy, which kbatch cannot repeat."""

    def __init__(self, by_numpy):
        super().__init__(name="drawn_elsewhere")
        self.by_numpy = by_numpy

    def call(self, x):
        if self.by_numpy:
            drawn = tf.numpy_function(lambda: np.float32(np.random.rand()), [], tf.float32)
            return x + tf.ensure_shape(drawn, [])
        return x + tf.map_fn(lambda row: tf.random.normal([8]), x)


@pytest.mark.parametrize(
    ("by_numpy", "eager", "said"),
    [(False, False, "random_normal"), (True, False, "differ"), (True, True, "differ")],
)
def test_exact_refuses_draws_that_do_not_repeat(by_numpy, eager, said):
    def build():
        found = [layers.Input((8,)), DrawnElsewhere(by_numpy), layers.Dense(4)]
        return small_models.compiled(found, sgd(), supervised_contrastive, run_eagerly=eager)

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=f"twice.*{said}"):
        in_parts(build)().fit(X[:30], Y[:30], verbose=0)


class Stepping(keras.Model):
    """A custom step: it updates one network before another, with a loss over all pairs."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([layers.Dense(6, activation="tanh"), Averaged()])
        self.second = layers.Dense(3)
        self.rate = keras.optimizers.SGD(0.1)
        self.shown = keras.metrics.Mean("shown")

    @property
    def metrics(self):
        return [self.shown]

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = supervised_contrastive(y, self.second(tf.stop_gradient(self.first(x))))
        weights = self.second.trainable_weights
        self.rate.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            hidden = self.first(x, training=True)
            loss = supervised_contrastive(y, self.second(hidden))
            loss += sum(tf.reduce_sum(one) for one in self.losses)
            loss += 0.01 * tf.reduce_mean(tf.square(self.first.trainable_weights[0]))
        self.shown.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"shown": self.shown.result()} | self.updated(tape, loss, self.first)

    def updated(self, tape, loss, part=None):
        weights = (part or self).trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def stepping(kind=Stepping, **arguments):
    model = small_models.compiled(kind(), keras.optimizers.Adam(0.01), **arguments)
    model(X[:2])
    return model


ROWS = X[:30], Y[:30]
XLA = pytest.param({"jit_compile": True}, marks=pytest.mark.slow)
EAGER = pytest.param(True, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def stepped():
    """The model with the custom step, trained on a whole batch."""
    return trained(stepping, ROWS, micro_batch_size=None, eager=True, batch_size=30)


@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}, XLA])
def test_exact_equals_whole_batch_for_custom_train_step(way, stepped):
    build = in_parts(lambda: stepping(**way))
    parts = trained(build, ROWS, micro_batch_size=None, batch_size=30)
    assert_same_training(stepped, parts, 1e-5)


class Diffusing(Stepping):
    """A step that draws with TensorFlow, before and after it calls a layer."""

    def train_step(self, data):
        noise = tf.random.normal(tf.shape(data[0]))
        with tf.GradientTape() as tape:
            hidden = self.first(data[0] + noise)
            hidden += tf.random.normal(tf.shape(hidden))
            loss = tf.reduce_mean(tf.square(self.second(hidden)))
        return self.updated(tape, loss)


@pytest.mark.parametrize("eager", [False, EAGER])
def test_exact_keeps_draws_of_custom_train_step(eager):
    def weights(build):
        keras.utils.set_random_seed(0)
        model = build()
        model.fit(X[:60], Y[:60], batch_size=30, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    found = functools.partial(stepping, Diffusing, run_eagerly=eager)
    for whole, parts in zip(weights(found), weights(in_parts(found)), strict=True):
        np.testing.assert_allclose(whole, parts, atol=1e-6)


class Penalised(Stepping):
    """A step whose loss contains a gradient."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = tf.reduce_sum(self(x))
            loss = tf.reduce_mean(tf.square(tape.gradient(found, x)))
        return self.updated(outer, loss)


class Early(Stepping):
    """A step that changes weights before it takes their gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = supervised_contrastive(y, self(x))
        self.second.bias.assign_add(tf.ones(3))
        return self.updated(tape, loss)


class Reduced(Stepping):
    """A model that returns one number for all rows."""

    def call(self, x):
        return tf.reduce_mean(super().call(x))

    def train_step(self, data):
        return {"loss": self(data[0])}


class Halved(Reduced):
    """A model that returns another number of rows."""

    def call(self, x):
        return Stepping.call(self, x)[::2]


class Ragged(Stepping):
    """A step that takes a gradient of ragged values."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            rows = tf.RaggedTensor.from_uniform_row_length(self.first(data[0]), 1)
            loss = tf.reduce_sum(layers.Lambda(lambda x: x.to_tensor()[:, 0])(rows))
        return self.updated(tape, loss, self.first)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Ragged, "a RaggedTensor that is passed to lambda"),
        (Penalised, "gradient penalty"),
        (Early, r"before an optimizer updates.*early.*\(Early\)"),
        (Reduced, r"the rows of the batch.*\(Reduced\) with shape \(\)"),
        (Halved, r"the rows of the batch.*\(Halved\) with shape"),
    ],
)
def test_exact_refuses_steps_it_cannot_repeat(kind, said):
    model = stepping(kind)
    with pytest.raises(
        (LookupError, ValueError, tf.errors.InvalidArgumentError), match=f"(?s){said}"
    ):
        in_parts(lambda: model)().fit(X[:30], Y[:30], batch_size=30, verbose=0)


class Seen(layers.Layer):
    """Records the number of its rows."""

    rows: tuple[int, ...] = ()

    def call(self, x):
        self.rows += (x.shape[0],)
        return x


def test_exact_does_not_cut_calls_of_other_threads():
    """For example a thread that reads data."""
    seen = Seen()

    class Reading(Stepping):
        def train_step(self, data):
            thread = threading.Thread(target=seen, args=(X[:30],))
            thread.start()
            thread.join()
            return super().train_step(data)

    build = in_parts(lambda: stepping(Reading, run_eagerly=True))
    build().fit(X[:30], Y[:30], batch_size=30, verbose=0)
    assert set(seen.rows) == {30}


class Compared(layers.Layer):
    """Compares rows with a table at a temperature. Both are arguments."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.seen = keras.metrics.Sum("seen")

    def call(self, table, x, temperature):
        self.seen.update_state(ops.ones_like(x[:, 0]))
        return ops.matmul(self.dense(x), ops.transpose(table)) * temperature


class Tied(keras.Model):
    """Layers that read arguments without rows, and weights of other layers."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(5, 4)
        self.codes = self.add_weight(shape=(5, 4))
        self.compared = Compared()
        self.back = layers.Lambda(lambda x: ops.matmul(x, self.table.embeddings))
        self.temperature = self.add_weight(shape=(), initializer="ones")
        self.frozen = layers.Dense(4)

    def call(self, x):
        return self.scores(x)

    def scores(self, x):
        """Compare with a tensor of another number of rows. The temperature is a variable."""
        table = tf.convert_to_tensor(self.codes)
        return self.compared(table, x, temperature=self.temperature)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            self.frozen.trainable = False
            scores = self.scores(x)
            vectors = self.frozen(self.back(scores))
            self.frozen.trainable = True
            loss = supervised_contrastive(y, vectors) + tf.reduce_mean(scores**2)
        frozen = set(map(id, self.frozen.weights))
        weights = [one for one in self.trainable_weights if id(one) not in frozen]
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "seen": self.compared.seen.result()}


def tied(**arguments):
    model = small_models.compiled(Tied(), sgd(), **arguments)
    model.table.build()
    model.frozen(model.back(model(X[:2])))
    model.compared.seen.reset_state()
    return model


@pytest.mark.parametrize("eager", [False, EAGER])
def test_exact_gradients_of_shared_tensors_and_foreign_weights(eager):
    """Metrics in a call count once, and a layer may be frozen for a single call."""
    data = X[:62], Y[:62]
    whole = trained(tied, data, micro_batch_size=None, eager=True, batch_size=31)
    build = in_parts(lambda: tied(run_eagerly=eager))
    parts = trained(build, data, micro_batch_size=None, batch_size=31)
    assert_same_training(whole, parts, 1e-5)


def test_exact_accepts_nan_weights():
    model = stepping(run_eagerly=True)
    model.second.bias.assign([np.nan] * 3)
    in_parts(lambda: model, 16)().fit(X[:30], Y[:30], batch_size=30, verbose=0)
    assert np.isnan(model.second.bias).all()
