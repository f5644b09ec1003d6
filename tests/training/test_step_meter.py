"""The meter of several replicas, by the steps that Keras says have ended; two train elsewhere."""

import small_models as models
import tensorflow as tf

from kbatch.training.input_meter import StepMeter


def metered(rows=94, batch_size=32, *, examples=None):
    meter = StepMeter(batch_size)
    data = tf.data.Dataset.from_tensor_slices(models.rows(rows)).batch(batch_size)
    taken = meter.attach(data, examples)
    for _ in taken.repeat(3):  # What is taken ahead of the steps must not count.
        pass
    return meter


def epoch(meter, *ends):
    meter.begin_epoch()
    for batch in ends:
        meter.end_step(batch)
    return meter.read()


def test_the_last_batch_of_an_epoch_has_the_rows_that_are_left():
    meter = metered(examples=94)
    assert epoch(meter, 0, 1) == (2, 64, 32, None, 32.0)
    assert epoch(meter, 0, 1, 2) == (5, 158, 32, None, 30.0)


def test_batches_are_full_where_the_examples_are_not_known():
    assert epoch(metered(), 0, 1, 2)[:3] == (3, 96, 32)


def test_an_execution_of_several_steps_ends_with_the_data():
    assert epoch(metered(examples=94), 1, 3)[:3] == (3, 94, 32)


def test_the_largest_batch_is_seen_in_the_data():
    meter = StepMeter(64)
    for _ in meter.attach(tf.data.Dataset.range(94).batch(32)):
        pass
    assert epoch(meter, 0).largest_batch == 32
