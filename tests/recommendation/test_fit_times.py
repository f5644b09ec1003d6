import itertools
import time

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.memory.find import data_source
from kbatch.recommendation.pilot import EpochWatch, time_fit
from kbatch.recommendation.pilot_record import fit_lines
from kbatch.training.data.forms import FitData

EXAMPLES = 16
SLOW_S = 0.002


def slow(size):
    """Batches of which each example takes two milliseconds."""

    def wait(x, y):
        time.sleep(SLOW_S)
        return x, y

    x, y = models.rows(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    types = (x.dtype, y.dtype)
    waiting = dataset.map(lambda a, b: tf.numpy_function(wait, (a, b), types))
    spec = dataset.element_spec
    shaped = waiting.map(lambda a, b: (tf.ensure_shape(a, spec[0].shape), tf.ensure_shape(b, [])))
    return shaped.batch(size)


def fast(size):
    return tf.data.Dataset.from_tensor_slices(models.rows(EXAMPLES)).batch(size)


def classifier(**arguments):
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **arguments)
    return model


@pytest.fixture(scope="module")
def model():
    return classifier()


def timed(model, x, y=None, sizes=(2, 8)):
    return time_fit(model, FitData(x, y), source=data_source(x, y), sizes=sizes, budget_s=0.5)


def test_epochs_of_arrays_are_counted_and_the_model_stays(model):
    before = [np.array(v) for v in model.variables]
    found = timed(model, *models.rows(EXAMPLES))
    assert [time.batch_size for time in found] == [2, 8]
    assert [time.epoch_batches for time in found] == [8, 2]
    for kept, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(kept, np.array(variable))
    for one in found:
        assert len(one.step_times_s) >= 3
        assert min(one.update_times_s) > 0


def test_several_batches_at_once_are_counted_one_by_one():
    model = classifier(steps_per_execution=4)
    found = timed(model, fast, sizes=(2, 3))
    assert [one.epoch_batches for one in found] == [8, 8]
    arrays = timed(model, *models.rows(EXAMPLES), sizes=(3,))
    assert arrays[0].epoch_batches == 6


def test_the_pauses_of_bursts_are_in_the_time_of_a_batch():
    watch = EpochWatch(60.0, 1)
    # Four batches a burst: between bursts 37 ms, within them 1 ms.
    gaps_s = [0.05, *[0.001, 0.001, 0.001, 0.037] * 3, 0.002]
    watch.times_s = [0.0, *itertools.accumulate(gaps_s)]
    assert watch.batch_s == pytest.approx(0.01)
    assert watch.epoch_s == pytest.approx(0.04)
    assert watch.batches == 13
    several = EpochWatch(60.0, 10)
    several.times_s = watch.times_s
    assert several.batch_s == pytest.approx(0.001)
    assert several.epoch_s == pytest.approx(0.04)
    assert several.batches == 130


class SlowEnds(keras.Sequential):
    """Epochs that start in some seconds, make three batches of 1 s and end in half a second."""

    start_s = 0.01
    fits = 0

    def fit(self, x, y, *, batch_size, callbacks, **_):
        (watch,) = callbacks
        watch.whole = len(x) <= 2 * batch_size
        times_s = (1.0, 2.0, 3.0, 3.5 if watch.whole else 3.0)
        watch.times_s = [0.0, *(self.start_s + at_s for at_s in times_s)]
        watch.end_s = watch.times_s[-1] - watch.times_s[-2]
        self.fits += 1


@pytest.mark.parametrize(("start_s", "epoch_s", "more"), [(0.01, 0.51, 2), (2.0, 2.0, 0)])
def test_an_epoch_that_was_cut_short_has_the_end_of_a_whole_one_where_that_starts_soon(
    start_s, epoch_s, more
):
    model = SlowEnds([keras.layers.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    model.start_s = start_s
    found = timed(model, *models.rows(EXAMPLES), sizes=(2, 4))
    for one in found:
        assert one.epoch_times_s == pytest.approx([epoch_s] * len(one.epoch_times_s))
    # Once to trace a size, and once a round; the end of a whole epoch is read once a size.
    assert model.fits == more + sum(1 + len(one.step_times_s) for one in found)


def test_the_wait_for_data_is_seen(model):
    found = timed(model, slow)
    assert [one.batch_times_s[0] > 0.5 * one.batch_size * SLOW_S for one in found] == [True] * 2
    lines = fit_lines(found)
    # What Keras does for an update is no larger than the smaller wait.
    assert lines.own.time_s(8) < lines.line.time_s(8)
