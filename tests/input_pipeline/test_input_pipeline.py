"""The experiment from end to end.

Delays are so far apart that no timing of the host matters, or pass on a clock of their own.
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

# Imported before any test replaces the machine's clock, which signatures keep as their default.
from kbatch.input_pipeline.measure import profile_input_pipeline

BUDGET_S = 0.3


def slow(delay_s, sleep=time.sleep):
    """A map that takes `delay_s` a batch."""

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
    model = keras.Sequential(
        [layers.Input((8,)), Slow(delay_s, sleep), layers.Dense(3, activation="softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def profile(model, data, **settings):
    return profile_input_pipeline(model, data, **({"time_budget_s": BUDGET_S} | settings))


@pytest.fixture
def clock(monkeypatch):
    """The machine's clock, moved on by who sleeps on it, and a little at every reading."""
    found = FakeClock(tick_s=1e-4)
    monkeypatch.setattr("time.perf_counter", found)
    return found


def codes(found):
    return {note.code for note in found.noted}


def read_in_turn(dataset):
    """Leave out the thread that reads ahead, which would move the clock of the step."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


@pytest.fixture(scope="module")
def starved():
    """A model that waits nearly all the time, before and after its profile.

    The clock is its own: on a busy machine the seconds may end before all changes were tried.
    """
    model = models.mlp()
    model.fit(*models.rows(32), verbose=0)
    before = models.state_of(model)
    clock = FakeClock(tick_s=1e-3)
    dataset = read_in_turn(examples(40).batch(8).map(slow(0.1, clock.sleep)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", clock)
        found = profile(model, dataset, time_budget_s=20.0)
    return before, model, dataset, found


def test_a_slow_pipeline_is_input_bound(starved):
    found = starved[-1]
    assert found.verdict == "input-bound"
    assert found.batch_size == 8
    assert found.wait_share > 0.5
    assert found.pipeline.samples_per_second.value < found.step.samples_per_second.value
    rounds = len(found.step.durations_s)
    assert rounds >= 3
    for rate in (found.pipeline, found.together):
        assert len(rate.durations_s) == rounds
    assert found.timeline[0].begin_s == 0
    assert found.environment.versions["keras"] == keras.__version__
    assert found.dtype_policy == "float32"


def test_changes_were_tried_and_what_was_not_has_a_reason(starved):
    found = starved[-1]
    assert {one.name for one in found.changes} == {"prefetch", "parallel_map", "cache_in_memory"}
    tried = {one.name for one in found.best_first}
    assert "prefetch" in tried
    assert all((one.reason is None) == (one.name in tried) for one in found.changes)
    assert all(one.gain.n >= 3 for one in found.best_first)
    gains = [one.gain.low for one in found.best_first]
    assert gains == sorted(gains, reverse=True)


def test_model_and_data_are_as_before(starved):
    before, model, dataset, _ = starved
    for one, other in zip(before, models.state_of(model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [len(x) for x, _ in dataset] == [8] * 5


def test_a_slow_step_is_compute_bound_and_nothing_is_tried_in_vain(clock):
    model = slow_model(0.05, clock.sleep)
    found = profile(model, examples(400).batch(8), time_budget_s=3.0)
    assert found.verdict == "compute-bound"
    assert found.changes == ()


def test_the_cache_of_a_pipeline_is_filled_first(clock):
    calls = []

    def count(v):
        calls.append(1)
        return v

    def counted(x, y):
        return tf.ensure_shape(tf.py_function(count, [x], x.dtype), [8]), y

    clock.tick_s = 0.001
    found = profile(models.linear(), examples(24).map(counted).cache().batch(8), remedies=False)
    assert "input_cache_unfilled" not in codes(found)
    # The first batch, which is read to see its shapes, ends before the cache is full.
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


def test_chunks_longer_than_a_round_are_not_taken_for_a_fast_pipeline(clock):
    # 60 steps take 240 ms, 60 batches 120 ms within a chunk and 420 ms with the pause before it.
    dataset = chunked(60, 0.3, 0.002, sleep=clock.sleep)
    found = profile(slow_model(0.004, clock.sleep), dataset, time_budget_s=4.0, remedies=False)
    # How many pauses a round or the long reading meets is up to the reading thread, which a busy
    # machine holds up.
    assert not found.is_even
    assert found.verdict == "input-bound"
    assert found.long_run is not None


def test_a_shuffle_of_all_the_data_is_measured_with_its_filling(clock):
    dataset = examples(40).map(slow(0.005, clock.sleep)).shuffle(40).batch(8)
    found = profile(slow_model(0.005, clock.sleep), dataset, time_budget_s=2.0, remedies=False)
    assert found.verdict == "input-bound"
    assert found.ratio.value < 0.5


def test_first_batches_smaller_than_the_others_are_not_compared_with_them(clock):
    def make():
        clock.sleep(0.5)
        for i in itertools.count():
            clock.sleep(0.002)
            yield models.rows(2 if i < 40 else 32)

    clock.tick_s = 1e-3
    specs = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(make, output_signature=specs)
    found = profile(models.linear(), dataset, time_budget_s=2.0, remedies=False)
    assert not found.together_comparable


def test_data_that_do_not_fit_the_model_are_told_so():
    wrong = tf.data.Dataset.from_tensor_slices((np.zeros((40, 8), "float32"), np.zeros((40, 5))))
    with pytest.raises(InputError, match=r"cannot be trained on these data.*Received"):
        profile(models.linear(), wrong.batch(8), remedies=False)


def test_a_change_that_fails_is_a_row_and_the_others_go_on(clock):
    def picky(x, y):
        if fails:
            raise RuntimeError("traced twice")
        return slow(0.1, clock.sleep)(x, y)

    fails = []
    dataset = read_in_turn(examples(40).batch(8).map(picky))
    fails.append(True)
    clock.tick_s = 1e-3
    found = profile(models.linear(), dataset, time_budget_s=20.0)
    reasons = {one.name: one.reason for one in found.changes}
    assert "failed: " in reasons["parallel_map"]
    assert "traced twice" in reasons["parallel_map"]
    assert "prefetch" in {one.name for one in found.best_first}


BATCHES = examples(20).batch(8)
TEXTS = models.rows(3)[0], np.array(["a", "b", "c"])


@pytest.mark.parametrize(
    ("given", "error", "words"),
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
def test_bad_input_says_what_to_give(given, error, words):
    given = {"model": models.linear, "data": BATCHES} | given
    with pytest.raises(error, match=words):
        profile(given.pop("model"), given.pop("data"), **given)


def test_blocks_fit_in_the_budget():
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


@pytest.mark.parametrize("budget_s", [3.0, 6.0, 12.0])
@pytest.mark.parametrize("remedies", [True, False])
def test_the_whole_call_keeps_to_its_time(clock, budget_s, remedies, monkeypatch):
    given_s = []

    def take_all(*_, budget_s, **__):  # Changed pipelines read in threads, which share no time.
        given_s.append(budget_s)
        clock.sleep(budget_s)
        return ()

    monkeypatch.setattr("kbatch.input_pipeline.measure.try_changes", take_all)
    data = read_in_turn(examples(64).batch(8).map(slow(0.05, clock.sleep)))
    profile(slow_model(0.02, clock.sleep), data, time_budget_s=budget_s, remedies=remedies)
    assert len(given_s) == remedies
    assert all(0 < one_s < budget_s for one_s in given_s)
    assert clock.now_s <= 1.05 * budget_s + 0.1
