"""The meter of replicas on one of them; two are tested in a process of their own."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating

from kbatch.training.clock import ReplicaMeter, TrainingClock
from kbatch.training.model import replica_count


def classifier(**arguments):
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **arguments)
    return model


def trained(*, batch_size=32, epochs=2, micro_batch_size=None, callbacks=(), **compile_arguments):
    model = classifier(**compile_arguments)
    if micro_batch_size is not None:
        accumulating(model, micro_batch_size)
    step = vars(model).get("train_step")
    meter = ReplicaMeter(model)
    # What is taken ahead of the steps must not count.
    data = tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(batch_size).prefetch(9)
    with meter.counting(data) as data:
        clock = TrainingClock(meter)
        callbacks = [clock.last, *(callback(meter) for callback in callbacks)]
        model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    assert vars(model).get("train_step") == step
    return model, meter


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "eager"),
    [(32, None, False), (47, 16, True), (94, 20, False)],
)
def test_it_counts_the_steps_and_their_rows(batch_size, micro_batch_size, eager):
    model, meter = trained(
        batch_size=batch_size, micro_batch_size=micro_batch_size, run_eagerly=eager
    )
    reading = meter.read()
    assert reading[:3] == (2 * -(-94 // batch_size), 2 * 94, batch_size)
    assert int(model.optimizer.iterations) == reading.batches
    assert getattr(meter.how, "micro_batch_size", None) == micro_batch_size
    assert reading.wait_s >= 0
    assert replica_count(model) == 1


def test_the_counts_go_on_and_the_largest_batch_begins_anew():
    model, meter = trained()
    data = tf.data.Dataset.from_tensor_slices(models.rows(10)).batch(4)
    with meter.counting(data):
        model.fit(data, verbose=0)
    assert meter.read()[:3] == (6 + 3, 188 + 10, 4)
    model.fit(*models.rows(10), verbose=0)
    assert meter.read()[:2] == (9, 198)


def test_a_step_that_is_traced_counts_as_one_that_waited_for_nothing():
    waits = []

    def reading(meter):
        return keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: waits.append(meter.read().wait_s > 0)
        )

    trained(batch_size=94, callbacks=[reading])
    assert waits == [False, True]


@pytest.mark.parametrize("micro_batch_size", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_it_changes_nothing_that_is_learned(micro_batch_size):
    keras.utils.set_random_seed(3)
    metered, _ = trained(epochs=1, micro_batch_size=micro_batch_size)
    keras.utils.set_random_seed(3)
    plain = classifier()
    if micro_batch_size is not None:
        accumulating(plain, micro_batch_size)
    plain.run_eagerly = True
    plain.fit(*models.rows(94), batch_size=32, shuffle=False, verbose=0)
    for mine, other in zip(metered.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_waiting_is_not_known_where_an_execution_has_several_steps():
    _, meter = trained(steps_per_execution=3)
    assert meter.read()[:3] == (6, 188, 32)
    assert meter.read().wait_s is None
