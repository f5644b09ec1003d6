"""What a measurement that could not be made leaves; `test_recommend` makes them all."""

import keras
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock
from recommendation_factory import make_pilot, make_timings
from task_factory import make_task

from kbatch.errors import InputError
from kbatch.recommendation.budget import Budget
from kbatch.recommendation.limits import INPUT
from kbatch.recommendation.measure import (
    measure_input,
    pilot_notes,
    sizes_to_time,
)
from kbatch.throughput.update_timing import time_updates
from kbatch.training.data.sample_rows import DataEnded


def raising(error):
    def measure():
        raise error

    return measure


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InputError("Give more rows."), "give more rows"),
        (DataEnded(5), "the data ended after 5 examples of a batch"),
        (MemoryError(), "it ran out of memory"),
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), "it ran out of memory"),
    ],
)
def test_data_and_memory_that_do_not_allow_it_are_a_reason(error, reason):
    budget = Budget(60.0)
    assert budget.try_run(INPUT, raising(error)) is None
    assert budget.unknown == {INPUT: reason}
    assert list(budget.durations_s) == [INPUT]


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="a mistake"):
        Budget(60.0).try_run(INPUT, raising(RuntimeError("a mistake")))


@pytest.mark.parametrize(
    ("fits", "sizes"), [(1024, (32, 256)), (64, (8, 64)), (8, (1, 8)), (4, (4, 32))]
)
def test_fit_runs_no_batch_that_did_not_go_through_the_device_whole(fits, sizes):
    timings = [one for one in make_timings() if one.batch_size <= fits or one.micro_batch_size < 8]
    assert sizes_to_time(timings, 32) == sizes


def test_data_are_not_measured_where_updates_take_too_long():
    x, y = models.rows(8)
    with pytest.raises(InputError, match="measuring `fit` takes 130 s at least"):
        measure_input(make_task(x, y, budget_s=20.0), None, timings=make_timings(130_000 - 32)[2:3])


class Tally:
    """No plain value, so that it does not tell one model from another."""

    calls = 0


TALLY = Tally()


class Counting(keras.layers.Layer):
    """Counts how often it is called by Python."""

    def call(self, x):
        TALLY.calls += 1
        return x


def test_a_batch_is_compared_with_its_parts_once():
    model = keras.Sequential([keras.layers.Input((8,)), Counting(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x, _ = models.rows(64)
    task = make_task(x, x[:, :3], budget_s=2.0)
    updates(task, model, fits=8)
    calls = TALLY.calls
    assert pilot_notes(task, model, make_pilot()) == ()
    assert TALLY.calls == calls > 0


def updates(task, model, *, fits):
    sizes, checks = (8, 16), task.checks
    return time_updates(
        model, task.source, batch_sizes=sizes, largest_whole=fits, budget_s=2.0, checks=checks
    )


class Refusing:
    """Checks that are not to be made."""

    def may_cut(self, *given, **options):
        return True

    def find(self, *given, **options):
        raise AssertionError("Nothing was to be compared.")


def test_what_fits_whole_is_not_compared(monkeypatch):
    # On a slow machine the second size would be left out for its time.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    task = make_task(*models.rows(64), budget_s=2.0, checks=Refusing())
    timings, _ = updates(task, model, fits=16)
    assert [(t.batch_size, t.micro_batch_size) for t in timings] == [(8, 8), (16, 16)]


def test_what_the_pilot_trains_otherwise_is_said_by_how_much():
    x, _ = models.rows(64)
    task = make_task(x, x[:, :3], budget_s=2.0)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.BatchNormalization()])
    model.add(keras.layers.Dense(3))
    model.compile("sgd", "mse")
    (note,) = pilot_notes(task, model, make_pilot())
    assert "The pilot trains in parts of" in note
    assert "(BatchNormalization); the loss mse differed by" in note
