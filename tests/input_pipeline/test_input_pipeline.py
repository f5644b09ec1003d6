"""`profile_input_pipeline` from end to end.

The delays differ by so much that the speed of the machine does not matter, or pass on a fake clock.
"""

import itertools
import time

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from batch_data import examples
from fake_clock import FakeClock

from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import block_length

# Imported before a test replaces the machine's clock, because default arguments hold the clock.
from kbatch.input_pipeline.measure import profile_input_pipeline

BUDGET_S = 0.3


def slow(delay_s, sleep=time.sleep):
    """Return a function for maps that takes `delay_s` for each batch."""

    def wait(x, y):
        waited = tf.py_function(lambda v: (sleep(delay_s), v)[1], [x], x.dtype)
        return tf.ensure_shape(waited, x.shape), y

    return wait


class Slow(keras.layers.Layer):
    """Takes `delay_s` a step."""

    def __init__(self, delay_s, sleep):
        super().__init__()
        self.delay_s, self.sleep = delay_s, sleep

    def call(self, x):
        waited = tf.py_function(lambda v: (self.sleep(self.delay_s), v)[1], [x], tf.float32)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(waited, x.shape))


def slow_model(delay_s=0.05, sleep=time.sleep):
    layers = keras.layers
    parts = [layers.Input((8,)), Slow(delay_s, sleep), layers.Dense(3, activation="softmax")]
    return models.compiled(parts, "sgd", "sparse_categorical_crossentropy")


def profile(model, data, **settings):
    return profile_input_pipeline(model, data, **({"time_budget_s": BUDGET_S} | settings))


@pytest.fixture
def clock(monkeypatch):
    """A clock in place of the machine's. It advances by sleeping, and a little when it is read."""
    fake_clock = FakeClock(tick_s=1e-4)
    monkeypatch.setattr("time.perf_counter", fake_clock)
    return fake_clock


def without_prefetch(dataset):
    """Remove the thread that reads ahead, which would advance the clock during a step."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


@pytest.fixture(scope="module")
def starved():
    """A model that waits for data most of the time, its state before, its data and its profile."""
    model = models.linear()
    model.fit(*models.rows(32), verbose=0)
    before = models.state_of(model)
    clock = FakeClock(tick_s=1e-3)
    dataset = without_prefetch(examples(40).batch(8).map(slow(0.1, clock.sleep)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", clock)
        result = profile(model, dataset, time_budget_s=12.0)
    return before, model, dataset, result


def test_profile_input_pipeline_of_a_slow_pipeline(starved):
    result = starved[-1]
    assert result.verdict == "input-bound"
    assert result.batch_size == 8
    assert result.wait_share > 0.5
    assert result.pipeline.samples_per_second.value < result.step.samples_per_second.value
    rounds = len(result.step.durations_s)
    assert rounds >= 3
    for rate in (result.pipeline, result.together):
        assert len(rate.durations_s) == rounds
    assert result.timeline[0].begin_s == 0
    assert result.environment.versions["keras"] == keras.__version__
    assert result.dtype_policy == "float32"


def test_profile_input_pipeline_tries_changes(starved):
    result = starved[-1]
    names = {change.name for change in result.changes}
    assert names == {"prefetch", "parallel_map", "cache_in_memory"}
    tried = {change.name for change in result.best_first}
    assert "prefetch" in tried
    assert all((change.reason is None) == (change.name in tried) for change in result.changes)
    assert all(change.gain.n >= 3 for change in result.best_first)
    gains = [change.gain.low for change in result.best_first]
    assert gains == sorted(gains, reverse=True)


def test_profile_input_pipeline_restores_the_model(starved):
    before, model, dataset, _ = starved
    for expected, values in zip(before, models.state_of(model), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert [len(x) for x, _ in dataset] == [8] * 5


def test_profile_input_pipeline_of_a_slow_step_tries_no_change(clock):
    model = slow_model(0.05, clock.sleep)
    result = profile(model, examples(400).batch(8), time_budget_s=3.0)
    assert result.verdict == "compute-bound"
    assert result.changes == ()


def test_profile_input_pipeline_fills_the_cache_of_the_data(clock):
    calls = []

    def count(v):
        calls.append(1)
        return v

    def counted(x, y):
        return tf.ensure_shape(tf.py_function(count, [x], x.dtype), [8]), y

    clock.tick_s = 0.001
    result = profile(models.linear(), examples(24).map(counted).cache().batch(8), remedies=False)
    assert "input_cache_unfilled" not in {note.code for note in result.noted}
    # Before the cache is full, kbatch reads the first batch for its shapes.
    assert len(calls) < 2 * 24


def chunked(burst, pause_s, batch_s, *, sleep):
    """Batches that come in chunks, with a pause before each."""

    def make():
        batch = models.rows(8)
        while True:
            sleep(pause_s)
            for _ in range(burst):
                sleep(batch_s)
                yield batch

    specs = (tf.TensorSpec((8, 8), tf.float32), tf.TensorSpec((8,), tf.int64))
    return tf.data.Dataset.from_generator(make, output_signature=specs)


def test_profile_input_pipeline_of_long_chunks(clock):
    # 60 steps take 240 ms, 60 batches 120 ms within a chunk and 420 ms with the pause before it.
    dataset = chunked(60, 0.3, 0.002, sleep=clock.sleep)
    result = profile(slow_model(0.004, clock.sleep), dataset, time_budget_s=4.0, remedies=False)
    assert not result.is_even
    assert result.verdict == "input-bound"
    assert result.long_run is not None


def test_profile_input_pipeline_counts_filling_a_shuffle_buffer(clock):
    dataset = examples(40).map(slow(0.005, clock.sleep)).shuffle(40).batch(8)
    result = profile(slow_model(0.005, clock.sleep), dataset, time_budget_s=2.0, remedies=False)
    assert result.verdict == "input-bound"
    assert result.ratio.value < 0.5


def test_profile_input_pipeline_of_smaller_first_batches(clock):
    def make():
        clock.sleep(0.5)
        for i in itertools.count():
            clock.sleep(0.002)
            yield models.rows(2 if i < 40 else 32)

    clock.tick_s = 1e-3
    specs = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(make, output_signature=specs)
    result = profile(models.linear(), dataset, time_budget_s=2.0, remedies=False)
    assert not result.together_comparable


def test_profile_input_pipeline_data_must_match_the_model():
    wrong = tf.data.Dataset.from_tensor_slices((np.zeros((40, 8), "float32"), np.zeros((40, 5))))
    with pytest.raises(InputError, match=r"shapes and dtypes that the model.*Received"):
        profile(models.linear(), wrong.batch(8), remedies=False)


def test_profile_input_pipeline_continues_after_a_failed_change(clock):
    def picky(x, y):
        if fails:
            raise RuntimeError("traced twice")
        return slow(0.1, clock.sleep)(x, y)

    fails = []
    dataset = without_prefetch(examples(40).batch(8).map(picky))
    fails.append(True)
    clock.tick_s = 1e-3
    result = profile(models.linear(), dataset, time_budget_s=12.0)
    reasons = {change.name: change.reason for change in result.changes}
    assert "failed: " in reasons["parallel_map"]
    assert "traced twice" in reasons["parallel_map"]
    assert "prefetch" in {change.name for change in result.best_first}


BATCHES = examples(20).batch(8)
TEXTS = models.rows(3)[0], np.array(["a", "b", "c"])


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"model": 3}, TypeError, "that builds one.*Received: 3, a int"),
        ({"model": lambda: None}, TypeError, "return model"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, ValueError, "must be compiled"),
        ({"data": TEXTS}, InputError, "give the index"),
        ({"time_budget_s": 0}, ValueError, "time_budget_s=0"),
        ({"cache_bytes": -1}, ValueError, "cache_bytes=-1"),
        ({"data": models.rows(9), "batch_size": 1.5}, TypeError, r"batch_size=1\.5"),
    ],
)
def test_profile_input_pipeline_refuses(changed, error, words):
    with pytest.raises(error, match=words):
        profile(**{"model": models.linear, "data": BATCHES, **changed})


def test_block_length_fits_in_the_budget():
    for time_budget_s, first_batch_s, contenders in itertools.product(
        (0.1, 2.0, 60.0), (0.0, 0.01, 5.0), (2, 4, 7.5)
    ):
        starts_s = contenders * first_batch_s
        length = block_length(time_budget_s, contenders=contenders, starts_s=starts_s)
        assert 0 < length.settle_s < length.measure_s
        block_s = length.settle_s + length.measure_s
        floor_s = 9 * contenders * 0.1
        assert 9 * contenders * block_s <= max(1.001 * time_budget_s, floor_s)
        assert 3 * contenders * length.longest_s <= max(1.001 * time_budget_s, floor_s)
        quicker = block_length(time_budget_s, contenders=contenders, starts_s=0.0)
        assert quicker.measure_s >= length.measure_s


@pytest.mark.parametrize(("budget_s", "remedies"), [(3.0, True), (6.0, False)])
def test_profile_input_pipeline_keeps_to_its_budget(clock, budget_s, remedies, monkeypatch):
    budgets_s = []

    def take_all(*_, budget_s, **__):  # Threads of changed pipelines would all advance the clock.
        budgets_s.append(budget_s)
        clock.sleep(budget_s)
        return ()

    monkeypatch.setattr("kbatch.input_pipeline.measure.try_changes", take_all)
    data = without_prefetch(examples(64).batch(8).map(slow(0.05, clock.sleep)))
    profile(slow_model(0.02, clock.sleep), data, time_budget_s=budget_s, remedies=remedies)
    assert len(budgets_s) == remedies
    assert all(0 < part_s < budget_s for part_s in budgets_s)
    assert clock.now_s <= 1.05 * budget_s + 0.1
