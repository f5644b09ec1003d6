import keras
import models
import numpy as np
import pytest

import kbatch


def trained(build, data, *, batch_size, micro_batch_size, epochs=2, **fit):
    """Weights and history after training, accumulated or (None) with Keras's own step."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    if micro_batch_size is not None:
        kbatch.accumulate_gradients(model, micro_batch_size)
    history = model.fit(
        *data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **fit
    )
    return model, history.history


def assert_equal_training(build, data, *, micro_batch_size, tolerance=1e-6, **fit):
    whole, expected = trained(build, data, micro_batch_size=None, **fit)
    parts, found = trained(build, data, micro_batch_size=micro_batch_size, **fit)
    for w, p in zip(whole.get_weights(), parts.get_weights(), strict=True):
        assert np.linalg.norm(w - p) <= tolerance * np.linalg.norm(w)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=max(10 * tolerance, 1e-5))


@pytest.mark.parametrize(
    ("count", "batch_size", "micro_batch_size"),
    [(96, 32, 8), (94, 32, 8), (94, 32, 5), (65, 32, 8), (94, 32, 32), (94, 32, 200)],
    ids=["equal", "ragged tail", "ragged cut", "tail of one", "one cut", "no cut"],
)
def test_for_every_way_to_cut(count, batch_size, micro_batch_size):
    assert_equal_training(
        models.mlp,
        models.rows(count),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_for_every_optimizer(optimizer):
    assert_equal_training(
        lambda: models.mlp(optimizer=optimizer),
        models.rows(94),
        batch_size=32,
        micro_batch_size=8,
    )


def test_with_sample_weights():
    weights = np.random.default_rng(2).random(94)
    assert_equal_training(
        models.mlp, models.rows(94), batch_size=32, micro_batch_size=8, sample_weight=weights
    )


def test_in_mixed_float16():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert_equal_training(
            models.mlp, models.rows(94), batch_size=32, micro_batch_size=8, tolerance=2e-3
        )
    finally:
        keras.config.set_dtype_policy(policy)


def test_optimizer_counts_updates_not_micro_batches():
    model, _ = trained(models.mlp, models.rows(94), batch_size=32, micro_batch_size=8, epochs=2)
    assert int(model.optimizer.iterations) == 2 * 3


def test_changing_the_micro_batch_rebuilds_the_train_function():
    model, _ = trained(models.mlp, models.rows(32), batch_size=32, micro_batch_size=8)
    before = model.train_function
    kbatch.accumulate_gradients(model, 4)
    model.fit(*models.rows(32), batch_size=32, verbose=0)
    assert model.train_function is not before


def own_train_step():
    class OwnStep(keras.Sequential):
        def train_step(self, data):
            return {}

    model = OwnStep([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])


def frozen():
    model = models.mlp()
    model.trainable = False
    return model


def accumulating():
    return models.mlp(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (uncompiled, "must be compiled"),
        (own_train_step, "`train_step` of its own"),
        (frozen, "no trainable weights"),
        (accumulating, "gradient_accumulation_steps=4"),
    ],
)
def test_a_model_that_cannot_be_accumulated_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        kbatch.accumulate_gradients(build(), 8)


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-4, ValueError), (2.5, TypeError), (True, TypeError)]
)
def test_a_micro_batch_is_a_positive_integer(size, error):
    with pytest.raises(error, match=f"micro_batch_size={size}"):
        kbatch.accumulate_gradients(models.mlp(), size)


def test_parts_of_different_length_are_refused():
    model = kbatch.accumulate_gradients(models.mlp(), 8)
    x, y = models.rows(32)
    with pytest.raises(ValueError, match="same number of rows"):
        model.train_on_batch(x, y[:30])
