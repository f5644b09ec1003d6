"""A model with an embedding makes the same update for a whole batch and in parts."""

import keras
import numpy as np
import pytest
from equal_training import accumulating, built
from small_models import compiled

from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.accumulation.train_step import SummingTrainStep

layers, optimizers = keras.layers, keras.optimizers
WORDS, ROWS = 40, 64
RNG = np.random.default_rng(0)
# A few words make most of the tokens, as in texts.
TOKENS = np.minimum(RNG.zipf(1.3, (4 * ROWS, 12)), WORDS) - 1
LABELS = RNG.integers(0, 3, 4 * ROWS)

# Large rates move the weights by about their size, so that rounding is small in comparison.
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.05),
    "clipped": lambda: optimizers.SGD(10.0, global_clipnorm=0.05),
}


def classifier(optimizer, *, dense=False):
    """Classify means of embeddings. With `dense`, compute these as matrix products in float64."""
    dtype = "float64" if dense else "float32"
    inputs = keras.Input((12,), dtype="int32")
    if dense:
        one_hot = layers.CategoryEncoding(WORDS, output_mode="one_hot", dtype=dtype)
        vectors = layers.Dense(4, use_bias=False, dtype=dtype)(one_hot(inputs[..., None]))
    else:
        vectors = layers.Embedding(WORDS, 4)(inputs)
    pooled = layers.GlobalAveragePooling1D(dtype=dtype)(vectors)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", dtype=dtype)(pooled))
    model.compile(optimizer(), "sparse_categorical_crossentropy")
    return model


def updated(model, state, batch):
    """Make one update from a state, and return the new state and the change of each weight."""
    built(model, *batch)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    for variable, value in zip(variables, state, strict=True):
        variable.assign(np.asarray(value, variable.dtype))
    model.train_on_batch(*batch)
    after = [np.asarray(variable, "float64") for variable in variables]
    count = len(model.trainable_variables)
    return after, [new - old for new, old in zip(after[:count], state[:count], strict=True)]


def in_float32(values):
    """Round values to float32."""
    return [np.asarray(np.asarray(value, "float32"), "float64") for value in values]


WAYS = {
    "whole": lambda model: model,
    "in parts": lambda model: accumulating(model, 16, moments_every=8),
    "with a rest": lambda model: accumulating(model, 5),
}


@pytest.mark.parametrize("name", ["adam", pytest.param("clipped", marks=pytest.mark.slow)])
def test_embedding_update_equals_dense_reference(name):
    keras.utils.set_random_seed(1)
    reference = classifier(OPTIMIZERS[name], dense=True)
    reference.run_eagerly = True  # A few eager steps take less time than tracing one.
    reference.optimizer.build(reference.trainable_variables)
    state = [*reference.trainable_variables, *reference.optimizer.variables]
    batches = [(TOKENS[i : i + ROWS], LABELS[i : i + ROWS]) for i in range(0, 4 * ROWS, ROWS)]
    for batch in batches[:3]:
        state, _ = updated(reference, in_float32(state), batch)
    state = in_float32(state)
    # After many updates Adam's bias correction is exact. At first 1 - beta^t has an error of 1e-5.
    state[len(reference.trainable_variables)] = np.float64(10_000)
    _, expected = updated(reference, state, batches[3])
    for way, cut in WAYS.items():
        model = cut(sum_sparse_gradients(classifier(OPTIMIZERS[name])))
        _, found = updated(model, state, batches[3])
        for one, other in zip(expected, found, strict=True):
            error = np.linalg.norm(one - other) / np.linalg.norm(one)
            assert error <= 1e-6, (way, one.shape, error)


class OwnLookup(layers.Layer):
    """Looks up rows as `Embedding` does."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, 4))

    def call(self, tokens):
        return keras.ops.take(self.table, tokens, axis=0)


def test_sum_sparse_gradients_leaves_keras_step_if_equal():
    def step_of(model):
        return type(getattr(vars(sum_sparse_gradients(model)).get("train_step"), "__self__", None))

    def of(layer, optimizer):
        tokens = layers.Input((12,), dtype="int32")
        return compiled([tokens, layer, layers.Flatten(), layers.Dense(3)], optimizer, "mse")

    assert step_of(of(layers.Dense(4), "adam")) is type(None)
    assert step_of(of(layers.Embedding(WORDS, 4), "sgd")) is type(None)
    frozen = layers.Embedding(WORDS, 4)
    frozen.trainable = False
    assert step_of(of(frozen, "adam")) is type(None)
    assert step_of(of(layers.Embedding(WORDS, 4), "adam")) is SummingTrainStep
    assert step_of(of(OwnLookup(), "adam")) is SummingTrainStep
