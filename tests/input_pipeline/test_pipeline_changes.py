"""Pipelines walked, put together again, and changed without changing their examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.input_pipeline.changes import cached_pipeline, fill_cache, pipeline_changes
from kbatch.input_pipeline.tf_data_graph import Pipeline, is_stateless
from kbatch.training.data.batch_source import first_batch, source_of_dataset

GIB = 2**30


def double(x):
    return 2 * x


def noisy(x):
    return tf.cast(x, tf.float32) + tf.random.uniform([])


def in_python(x):
    return tf.ensure_shape(tf.py_function(lambda v: v + 1, [x], tf.int64), [])


def numbers(count=20):
    return tf.data.Dataset.range(count)


def with_options(dataset, **changed):
    options = tf.data.Options()
    for name, value in changed.items():
        setattr(options, name, value)
    return dataset.with_options(options)


PIPELINES = {
    "map": lambda: numbers().map(double).batch(4),
    "two maps": lambda: numbers().map(double).map(in_python).batch(4).prefetch(2),
    "shuffled": lambda: numbers().shuffle(20).map(in_python).batch(4, drop_remainder=True),
    "fixed order": lambda: (
        numbers().shuffle(8, seed=3, reshuffle_each_iteration=False).map(double).batch(4)
    ),
    "parallel": lambda: numbers().map(double, num_parallel_calls=2, deterministic=False).batch(4),
    "parallel batch": lambda: numbers().map(double).batch(4, num_parallel_calls=2),
    "cut and repeated": lambda: numbers().skip(2).map(in_python).take(8).repeat(2).batch(4),
    "rebatched": lambda: numbers().map(double).batch(5).rebatch(4),
    "unbatched": lambda: numbers().map(double).batch(5).unbatch().batch(3),
    "padded": lambda: numbers().map(lambda x: tf.ones([1 + x % 3])).padded_batch(4),
    "padded with its own": lambda: (
        numbers().map(lambda x: tf.ones([1 + x % 3])).padded_batch(6, [5], -1.0, True)
    ),
    "filtered": lambda: numbers().map(double).filter(lambda x: x > 6).batch(4),
    "options": lambda: with_options(numbers().map(double), deterministic=True).batch(4),
}


def values(dataset):
    return np.concatenate([np.ravel(batch) for batch in dataset])


def sizes(dataset):
    return [len(batch) for batch in dataset]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_put_together_anew_gives_the_same_batches(name):
    dataset = PIPELINES[name]()
    pipeline = Pipeline(dataset)
    for parallel in (False, True):
        lowest = len(pipeline.stages) - 1
        again = pipeline.rebuilt(lowest, pipeline.stages[-1], parallel=parallel)
        assert again.element_spec == dataset.element_spec
        assert again.cardinality() == dataset.cardinality()
        assert sizes(again) == sizes(dataset)
        np.testing.assert_array_equal(np.sort(values(again)), np.sort(values(dataset)))
        if name not in ("shuffled", "fixed order", "parallel"):
            np.testing.assert_array_equal(values(again), values(dataset))
        changed = {"Map": "ParallelMap"} if parallel else {}
        assert Pipeline(again).kinds == [changed.get(kind, kind) for kind in pipeline.kinds]


@pytest.mark.parametrize("name", PIPELINES)
def test_every_change_keeps_the_examples_and_the_original(name):
    dataset = PIPELINES[name]()
    before = np.sort(values(dataset))
    tried = [c for c in pipeline_changes(dataset) if c.reason is None]
    assert tried
    for change in tried:
        assert sizes(change.source.given) == sizes(dataset)
        np.testing.assert_array_equal(np.sort(values(change.source.given)), before)
        assert change.code
    np.testing.assert_array_equal(np.sort(values(dataset)), before)


def changes(dataset):
    found = pipeline_changes(dataset)
    tried = {c.name: c for c in found if c.reason is None}
    return tried, {c.name: c.reason for c in found if c.reason is not None}


def test_a_stage_that_is_not_known_is_left_alone():
    dataset = numbers().map(double).batch(4).ragged_batch(2)
    pipeline = Pipeline(dataset)
    assert pipeline.rebuilt(len(pipeline.stages) - 1, pipeline.stages[-1]) is None
    tried, untried = changes(dataset)
    assert "parallel map" not in tried
    assert "cannot be put together again" in untried["parallel map"]


def test_what_is_there_already_is_not_tried():
    dataset = numbers().map(double, num_parallel_calls=2).batch(4).prefetch(2)
    tried, untried = changes(with_options(dataset, deterministic=False))
    assert "already" in untried["prefetch"]
    assert "already" in untried["any order"]
    assert "no map that makes one call at a time" in untried["parallel map"]
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    assert "already" in changes(dataset.with_options(options))[1]["private thread pool"]
    assert set(tried) == {"private thread pool"}


def test_the_code_names_the_functions_in_the_order_they_run():
    tried, untried = changes(numbers().map(double).map(in_python).map(lambda x: x).batch(4))
    parallel = ", num_parallel_calls=tf.data.AUTOTUNE)"
    assert tried["parallel map"].code == "; ".join(
        f".map({name}{parallel}" for name in ("double", "in_python", "function")
    )
    assert "take whole batches" in untried["batch before a vectorised map"]
    assert "batch before a vectorised map" not in changes(numbers().batch(4).map(double))[1]


def test_a_map_with_state_has_a_condition_and_one_without_has_none():
    for function, stateless in ((double, True), (noisy, False), (in_python, False)):
        dataset = numbers().map(function).batch(4)
        assert is_stateless(Pipeline(dataset).stages[1]) is stateless
        condition = changes(dataset)[0]["parallel map"].condition
        assert (condition is None) is stateless
        assert stateless or "several threads" in condition


def test_an_order_is_given_up_only_where_a_stage_is_parallel():
    assert "any order" in changes(numbers().map(double, num_parallel_calls=2).batch(4))[0]
    assert "no parallel stage" in changes(numbers().map(double).batch(4))[1]["any order"]


def seldom_noisy(x):
    return tf.cond(
        tf.random.uniform(()) < 1e-6, lambda: x + tf.random.uniform((), 0, 9, x.dtype), lambda: x
    )


def noisy_in_python(x):
    return tf.numpy_function(lambda x: x + np.random.randint(10**6), [x], tf.int64)


def cached(dataset, *, budget_bytes=GIB, budget_s=30.0):
    return cached_pipeline(dataset, budget_bytes=budget_bytes, budget_s=budget_s)


class Counted:
    """A function for maps that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        def count(v):
            self.calls += 1
            return v

        return tf.ensure_shape(tf.py_function(count, [x], tf.int64), [])


def endless_numbers():
    return tf.data.Dataset.random(seed=1)


def test_data_of_unknown_length_are_cached_where_what_they_take_turns_out_to_fit():
    counted = Counted()
    dataset = numbers().map(counted).filter(lambda x: x > 3).batch(4)
    before = values(dataset)
    change = cached(dataset, budget_bytes=8 * 16)
    assert "it takes 128 B of memory" in change.condition
    calls = counted.calls
    np.testing.assert_array_equal(values(change.source.given), before)
    assert counted.calls == calls
    many = Counted()
    found = cached(numbers(4000).map(many).filter(lambda x: x > 3).batch(4), budget_bytes=100)
    assert "more than the 100 B" in found.reason
    assert many.calls < 400  # It is not filled any further.


def test_maps_above_a_cache_are_made_parallel_and_those_below_it_stay():
    dataset = numbers().map(in_python).cache().map(double).shuffle(20).batch(4)
    change = changes(dataset)[0]["parallel map"]
    assert change.code == ".map(double, num_parallel_calls=tf.data.AUTOTUNE)"
    assert change.condition is None
    assert Pipeline(change.source.given).kinds[2:5] == ["ParallelMap", "Cache", "Map"]


@pytest.mark.parametrize(
    ("above", "place"),
    [
        (lambda d: d.batch(4), "as the last stage"),
        (lambda d: d.shuffle(20).batch(4), "before .shuffle(...)"),
        (lambda d: d.shuffle(20).repeat(2).batch(4), "before .shuffle(...)"),
        (lambda d: d.repeat(2).batch(4), "before .repeat(...)"),
    ],
)
def test_a_filled_cache_gives_the_same_examples_without_the_work(above, place):
    counted = Counted()
    dataset = above(numbers().map(counted))
    before = np.sort(values(dataset))
    change = cached(dataset)
    assert change.reason is None
    assert place in change.code
    calls = counted.calls
    first, second = values(change.source.given), values(change.source.given)
    assert counted.calls == calls
    np.testing.assert_array_equal(np.sort(first), before)
    np.testing.assert_array_equal(np.sort(second), before)
    if "shuffle" in place:
        assert not np.array_equal(first, second)


def test_missing_values_are_not_taken_for_random_ones():
    def with_gaps(x):
        return tf.where(x % 2 == 0, np.nan, tf.cast(x, "float32"))

    assert cached(numbers().map(with_gaps).batch(4)).reason is None


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (lambda: numbers().map(noisy).batch(4), {}, "draws random numbers"),
        # So seldom that the first elements of two passes agree.
        (lambda: numbers().map(seldom_noisy).batch(4), {}, "draws random numbers"),
        (lambda: numbers().map(noisy_in_python).batch(4), {}, "two passes gave different elements"),
        (lambda: numbers().map(double).cache().batch(4), {}, "a cache already"),
        (
            lambda: tf.data.Dataset.zip(numbers().map(double).cache(), numbers()).batch(4),
            {},
            "a cache already",
        ),
        (
            lambda: numbers().interleave(lambda x: numbers(2).map(double).cache()).batch(4),
            {},
            "a cache already",
        ),
        (lambda: numbers().shuffle(20).map(double).batch(4), {}, "shuffle or repeat stands below"),
        (lambda: numbers(), {}, "does nothing that a cache would save"),
        (lambda: endless_numbers().map(double).batch(4), {}, "the data have no end"),
        (
            lambda: numbers(10**6).map(double).batch(1000),
            {"budget_bytes": 7 * 10**6},
            "would take 7.63 MiB, more than the 6.68 MiB",
        ),
        (
            lambda: numbers(10**4).map(double).filter(lambda x: x > 3).batch(100),
            {"budget_bytes": 2**10},
            "it takes more than the 1.00 KiB of `cache_bytes`",
        ),
        (lambda: numbers(10**7).map(in_python).batch(4), {}, "filling it would take about"),
        (
            lambda: numbers().map(double).shuffle(20).batch(4).ragged_batch(2),
            {},
            "cannot be put together again",
        ),
    ],
)
def test_no_cache_where_it_would_change_the_data_or_exceed_a_budget(make, settings, reason):
    found = cached(make(), **settings)
    assert reason in found.reason


def two_branches(*caches):
    zipped = tf.data.Dataset.zip(*(numbers().map(one).cache() for one in caches))
    return zipped.batch(4)


BRANCHES = {
    "zip": two_branches,
    "concatenate": lambda one, other: (
        numbers().map(one).cache().concatenate(numbers().map(other).cache()).batch(4)
    ),
    "sample": lambda one, other: tf.data.Dataset.sample_from_datasets(
        [numbers().map(one).cache(), numbers().map(other).cache()]
    ).batch(4),
    "above each other": lambda one, other: numbers().map(one).cache().map(other).cache().batch(4),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_caches_in_every_branch_are_filled_first(name):
    counted = Counted(), Counted()
    dataset = BRANCHES[name](*counted)
    (note,) = fill_cache(source_of_dataset(dataset), 30.0)
    assert "filled it first" in note
    assert [one.calls for one in counted] == [20, 20]
    values(dataset.map(lambda *elements: elements[0]))
    assert [one.calls for one in counted] == [20, 20]


def test_a_cache_that_cannot_be_filled_beforehand_is_told():
    inner = numbers().interleave(lambda x: numbers(2).map(double).cache()).batch(4)
    assert "in a function of `interleave`" in fill_cache(source_of_dataset(inner), 30.0)[0]
    assert fill_cache(source_of_dataset(numbers().interleave(lambda x: numbers(2))), 30.0) == ()
    endless = numbers().repeat().cache().batch(4)
    assert "not full after 0.05 s" in fill_cache(source_of_dataset(endless), 0.05)[0]


def test_a_cache_that_takes_longer_than_its_first_elements_foretold_is_given_up(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock)

    def slower(x):
        return tf.numpy_function(lambda v: (clock.sleep(0.02 * (v > 40)), v)[1], [x], tf.int64)

    found = cached(numbers(400).map(slower).batch(4), budget_s=0.5)
    assert "not full after 0.5 s" in found.reason


def below_15(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(15, tf.int64))]):
        return tf.identity(x)


@pytest.mark.parametrize("batch_size", [4, 1], ids=["in a sample", "later"])
def test_data_that_raise_while_the_cache_is_filled_are_told(batch_size):
    found = cached(numbers().map(below_15).batch(batch_size))
    assert "raised an error while it was filled" in found.reason


def test_a_broken_element_below_a_cache_may_be_left_out_above_it():
    dataset = numbers().map(below_15).cache().ignore_errors().batch(5)
    (note,) = fill_cache(source_of_dataset(dataset), 30.0)
    assert "not filled first, since the data below it raised an error" in note
    assert len(values(dataset)) > 0


def test_a_changed_pipeline_can_be_read_like_any_source():
    tried, _ = changes(numbers().map(double).batch(4))
    batch, seconds = first_batch(tried["prefetch"].source)
    assert keras.tree.flatten(batch)[0].shape == (4,)
    assert seconds > 0
