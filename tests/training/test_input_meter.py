import time

import pytest
import small_models as models
import tensorflow as tf

from kbatch.search.timed_fit import StepMeter
from kbatch.training.data.batches import InputMeter


def metered(rows, batch_size):
    meter = InputMeter()
    return meter, meter.attach(
        tf.data.Dataset.from_tensor_slices(models.rows(rows)[0]).batch(batch_size)
    )


def test_input_meter_counts_batches_across_datasets():
    meter, dataset = metered(94, 32)
    for rows, counts in (
        (lambda: dataset.take(2), (2, 64, 32)),
        (lambda: dataset, (5, 158, 32)),
        (lambda: meter.attach(tf.data.Dataset.range(10).batch(4)), (8, 168, 4)),
    ):
        for _ in rows():
            pass
        assert meter.read()[:3] == counts


def test_input_meter_wait_excludes_time_between_requests():
    meter, dataset = metered(94, 32)
    between_s, began_s = 0.0, time.perf_counter()
    for _ in dataset:
        asked_s = time.perf_counter()
        time.sleep(0.1)
        between_s += time.perf_counter() - asked_s
    assert meter.read().wait_s > 0
    # The clock of the graph may differ by a little.
    assert meter.read().wait_s <= time.perf_counter() - began_s - between_s + 0.01


@pytest.mark.parametrize(
    "rows",
    [
        lambda: tf.RaggedTensor.from_row_lengths(tf.range(9), [2, 0, 3, 3, 1]),
        lambda: tf.sparse.from_dense(tf.eye(5, 3)),
    ],
    ids=["ragged", "sparse"],
)
def test_input_meter_counts_ragged_and_sparse_rows(rows):
    dataset = tf.data.Dataset.from_tensor_slices((rows(), tf.zeros(5))).batch(2)
    meter = InputMeter()
    for (x, _), (y, _) in zip(meter.attach(dataset), dataset, strict=True):
        parts = (tf.nest.flatten(one, expand_composites=True) for one in (x, y))
        for a, b in zip(*parts, strict=True):
            tf.debugging.assert_equal(a, b)
    assert meter.read()[:3] == (3, 5, 2)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: (x, x[:, 0]),
        tf.strings.as_string,
        lambda x: tf.RaggedTensor.from_row_lengths(x[:, 0], [1] * len(x)),
        tf.sparse.from_dense,
    ],
    ids=["dense", "strings", "ragged", "sparse"],
)
def test_input_meter_order_differs_between_orders(form):
    x, _ = models.rows(40)
    meter, found = InputMeter(), []
    meter.see_order = True
    # The third dataset shows that later batches do not count.
    for places in (range(40), range(40), range(8), [1, 0, *range(2, 40)]):
        meter.reset()
        rows = tf.data.Dataset.from_tensor_slices(form(x[list(places)]))
        for _ in meter.attach(rows.batch(8)):
            pass
        found.append(meter.read().order)
    assert found[0] == found[1] == found[2] != found[3]
    assert None not in found
    meter.reset()
    assert meter.read().order is None


def test_step_meter_counts_rest_of_epoch_in_last_step():
    """Batches that a strategy reads ahead of the steps must not count."""
    meter = StepMeter(32)
    data = tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(32)
    for _ in meter.attach(data, 94).repeat(3):
        pass
    readings = []
    for steps in (2, 3):
        meter.begin_epoch()
        for _ in range(steps):
            meter.end_step()
        readings.append(meter.read())
    assert readings == [(2, 64, 32, None, 32.0, None), (5, 158, 32, None, 30.0, None)]
