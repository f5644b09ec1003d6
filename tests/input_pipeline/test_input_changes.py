"""Changes to pipelines: they keep the examples, and some of them are not tried."""

import numpy as np
import pytest
import tensorflow as tf
from batch_data import Step, examples
from fake_clock import FakeClock

from kbatch.input_pipeline.blocks import InputPass
from kbatch.input_pipeline.changes import (
    chain_of,
    dataset_changes,
    fill_cache,
    is_stateless,
    kind_of,
    python_note,
    try_changes,
    with_parallel_maps,
)
from kbatch.input_pipeline.result import LongRun

GIB = 2**30
AUTOTUNE = ", num_parallel_calls=tf.data.AUTOTUNE)"


def double(x):
    return 2 * x


def noisy(x):
    return tf.cast(x, tf.float32) + tf.random.uniform([])


def in_python(x):
    return tf.ensure_shape(tf.py_function(lambda v: v + 1, [x], tf.int64), [])


def numbers(count=20):
    return tf.data.Dataset.range(count)


def with_options(dataset):
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


PIPELINES = {
    "map": lambda: numbers().map(double).batch(4),
    "two maps": lambda: numbers().map(double).map(in_python).batch(4).prefetch(2),
    "shuffled": lambda: numbers().shuffle(20).map(in_python).batch(4, drop_remainder=True),
    "map before a shuffle": lambda: numbers().map(in_python).shuffle(20).batch(4).prefetch(1),
    "fixed order": lambda: (
        numbers().shuffle(8, seed=3, reshuffle_each_iteration=False).map(double).batch(4)
    ),
    "repeated": lambda: numbers().map(in_python).repeat(2).batch(4),
    "padded": lambda: numbers().map(lambda x: tf.ones([1 + x % 3])).padded_batch(4),
    "padded with arguments": lambda: (
        numbers().map(lambda x: tf.ones([1 + x % 3])).padded_batch(6, [5], -1.0, True)
    ),
    "options": lambda: with_options(numbers().map(double)).batch(4),
}


def values(dataset):
    return np.concatenate([np.ravel(batch) for batch in dataset])


def changes(dataset, *, cache_bytes=GIB, budget_s=100.0):
    result = dataset_changes(dataset, cache_bytes=cache_bytes, budget_s=budget_s)
    assert all((source is None) == (record.reason is not None) for record, source in result)
    return {record.name: (record, source) for record, source in result}


@pytest.mark.parametrize("name", PIPELINES)
def test_dataset_changes_keep_the_examples(name):
    dataset = PIPELINES[name]()
    before = np.sort(values(dataset))
    sources = {name: source for name, (_, source) in changes(dataset).items() if source is not None}
    assert "parallel_map" in sources
    for changed in sources.values():
        assert changed.element_spec == dataset.element_spec
        assert changed.cardinality() == dataset.cardinality()
        assert [len(batch) for batch in changed] == [len(batch) for batch in dataset]
        np.testing.assert_array_equal(np.sort(values(changed)), before)
    np.testing.assert_array_equal(np.sort(values(dataset)), before)
    changed, _ = with_parallel_maps(dataset)
    kinds = [kind_of(stage) for stage in chain_of(dataset)]
    parallel = ["ParallelMap" if kind == "Map" else kind for kind in kinds]
    assert [kind_of(stage) for stage in chain_of(changed)] == parallel
    if not any("huffle" in kind for kind in kinds):
        np.testing.assert_array_equal(values(changed), values(dataset))


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers().map(double, num_parallel_calls=2).batch(4),
        lambda: numbers().map(double).filter(lambda x: x > 6).batch(4),
        lambda: numbers().batch(4),
    ],
)
def test_parallel_map_is_not_possible(make):
    assert changes(make())["parallel_map"][1] is None


def test_parallel_map_changes_only_maps_after_a_cache():
    dataset = numbers().map(in_python).cache().map(double).shuffle(20).batch(4)
    change, source = changes(dataset)["parallel_map"]
    assert (change.code, change.condition) == (f".map(double{AUTOTUNE}", None)
    kinds = [kind_of(stage) for stage in chain_of(source)]
    assert kinds[2:5] == ["ParallelMap", "Cache", "Map"]


@pytest.mark.parametrize(
    ("function", "code"),
    [(double, None), (noisy, "called_by_threads"), (in_python, "threads_share_lock")],
)
def test_parallel_map_condition_of_state_and_python(function, code):
    dataset = numbers().map(function).batch(4)
    assert is_stateless(chain_of(dataset)[1]) is (code is None)
    condition = changes(dataset)["parallel_map"][0].condition
    assert (condition and condition.code) == code
    note = python_note(dataset.map(double, num_parallel_calls=2).prefetch(1))
    assert (note is None) == (function is not in_python)
    assert note is None or "(in_python)" in note


def test_prefetch_is_not_tried_twice():
    assert changes(with_options(numbers().batch(4).prefetch(2)))["prefetch"][1] is None
    assert changes(numbers().prefetch(2).batch(4))["prefetch"][1] is not None


def rarely_noisy(x):
    return tf.cond(
        tf.random.uniform(()) < 1e-6, lambda: x + tf.random.uniform((), 0, 9, x.dtype), lambda: x
    )


def noisy_in_python(x):
    return tf.numpy_function(lambda x: x + np.random.randint(10**6), [x], tf.int64)


class Counted:
    """A function for maps that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        def count(v):
            self.calls += 1
            return v

        return tf.ensure_shape(tf.py_function(count, [x], tf.int64), [])


def cache(dataset, **settings):
    return changes(dataset, **settings)["cache_in_memory"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers().map(double).shuffle(20).batch(4),
        lambda: numbers().map(noisy).batch(4).prefetch(2),
        # So rarely that the first elements of two passes are equal.
        lambda: numbers().map(rarely_noisy).batch(4),
        lambda: numbers().map(noisy_in_python).batch(4),
        lambda: numbers().interleave(lambda x: numbers(4).shuffle(4)).batch(4),
        lambda: tf.data.Dataset.random(seed=1).take(40).map(double).batch(4),
    ],
    ids=["shuffle", "random map", "rarely random", "in Python", "in interleave", "random numbers"],
)
def test_cache_of_random_data_is_not_tried(make):
    change, source = cache(make())
    assert (source, change.reason.code) == (None, "cache_freezes")


@pytest.mark.parametrize("batched", [True, False], ids=["known length", "unknown length"])
def test_cache_gives_the_same_examples_without_the_work(batched):
    counted = Counted()
    dataset = numbers().map(counted)
    dataset = (dataset if batched else dataset.filter(lambda x: x > 3)).batch(4)
    before = values(dataset)
    _, source = cache(dataset)
    calls = counted.calls
    for _ in range(2):
        np.testing.assert_array_equal(values(source), before)
    assert counted.calls == calls


def below_15(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(15, tf.int64))]):
        return tf.identity(x)


def zipped_with_a_cache():
    return tf.data.Dataset.zip(numbers().map(double).cache(), numbers()).batch(4)


@pytest.mark.parametrize(
    ("make", "cache_bytes", "reason"),
    [
        (zipped_with_a_cache, GIB, "has a"),
        (
            lambda: numbers().interleave(lambda x: numbers(2).map(double).cache()).batch(4),
            GIB,
            "has a",
        ),
        (lambda: numbers().map(double).repeat().batch(4), GIB, "without end"),
        (lambda: numbers(10**4).map(double).batch(100), 2**10, "more than the 1.00 KiB"),
        (lambda: numbers().map(below_15).batch(4), GIB, "raised an error"),
    ],
)
def test_cache_that_cannot_be_filled(make, cache_bytes, reason):
    change, source = cache(make(), cache_bytes=cache_bytes)
    assert source is None
    assert reason in change.reason


def test_cache_that_takes_too_long_to_fill(monkeypatch):
    clock, many = FakeClock(), Counted()
    monkeypatch.setattr("time.perf_counter", clock)

    def slower(x):
        return tf.numpy_function(lambda v: (clock.sleep(0.02), v)[1], [many(x)], tf.int64)

    change, _ = cache(numbers(4000).map(slower).batch(4), budget_s=2.0)
    assert "not full after 0.6 s" in change.reason
    assert many.calls < 400


BRANCHES = {
    "zip": lambda f, g: tf.data.Dataset.zip(
        numbers().map(f).cache(), numbers().map(g).cache()
    ).batch(4),
    "one after the other": lambda f, g: numbers().map(f).cache().map(g).cache().batch(4),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_fill_cache_in_every_branch(name):
    first, second = Counted(), Counted()
    dataset = BRANCHES[name](first, second)
    assert fill_cache(dataset, 30.0) is None
    assert (first.calls, second.calls) == (20, 20)
    values(dataset.map(lambda *elements: elements[0]))
    assert (first.calls, second.calls) == (20, 20)


def test_fill_cache_reasons():
    inner = numbers().interleave(lambda x: numbers(2).map(double).cache()).batch(4)
    assert "`interleave`" in fill_cache(inner, 30.0)
    assert fill_cache(numbers().interleave(lambda x: numbers(2)), 30.0) is None
    endless = numbers().repeat().cache().batch(4)
    assert "0.05 s" in fill_cache(endless, 0.05)
    broken = numbers().map(below_15).cache().ignore_errors().batch(5)
    assert "raised an error" in fill_cache(broken, 30.0)
    assert len(values(broken)) > 0


def tried(*, batch_s, budget_s, even=True, duration_s=1.0):
    dataset = examples(80).map(lambda x, y: (x, y)).batch(8)
    record = LongRun("whole_epochs", round(8 * duration_s / batch_s), duration_s, 0, 0.0, 0.0)
    source, batches = dataset, (next(iter(dataset)),)
    reading = InputPass(source, record, batches, None, duration_s, 64.0)
    records = try_changes(dataset, reading, Step(), even=even, cache_bytes=GIB, budget_s=budget_s)
    return {record.name: record for record in records}


def test_try_changes_as_time_allows(monkeypatch):
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))
    records = tried(batch_s=0.05, budget_s=0.7)
    assert [name for name, change in records.items() if change.changed is not None] == ["prefetch"]
    late = tried(batch_s=1e-3, budget_s=-1.0)  # The time was spent before.
    assert "about 0.018 s" in late["prefetch"].reason
    assert "after 0 s" in late["cache_in_memory"].reason
    assert all(change.gain is not None for change in tried(batch_s=1e-3, budget_s=2.0).values())
