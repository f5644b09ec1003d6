"""What a measurement that could not be made leaves; `test_recommend` makes them all."""

import keras
import own_steps
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock
from recommendation_factory import make_timings
from task_factory import make_task

from kbatch.errors import InputError
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE
from kbatch.recommendation.measure import Budget, measure_input, measure_noise
from kbatch.throughput.updates import time_updates
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


def test_each_part_is_a_share_of_what_is_left_and_never_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    budget = Budget(100.0)
    assert budget.part_s(MEMORY) == pytest.approx(30)
    now[0] = 30.0
    assert budget.part_s(NOISE) == pytest.approx(30)
    assert budget.part_s(INPUT) == pytest.approx(70)
    now[0] = 300.0
    assert [budget.part_s(name) for name in (MEMORY, NOISE, INPUT)] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(("fits", "size"), [(1024, 256), (64, 64), (8, 8)])
def test_the_pipeline_is_read_in_batches_that_went_through_the_device_whole(fits, size):
    x, y = models.rows(300)
    task = make_task(x, y, budget_s=2.0)
    found = measure_input(task, task.load.start().model, make_timings(fits=fits))
    assert found.batch_size == size
    # No epoch of the few rows ends: a reading has no start of one in it.
    assert found.long_run.basis != "whole epochs"


def test_data_are_not_measured_where_updates_take_too_long():
    with pytest.raises(InputError, match="it takes 39 s at least"):
        measure_input(make_task(*models.rows(8), budget_s=20.0), None, make_timings(130_000)[2:3])


def test_a_pilot_needs_halves_and_a_step_that_can_be_cut():
    with pytest.raises(InputError, match="two examples at least"):
        measure_noise(make_task(*models.rows(8), base_batch_size=1), models.mlp())
    with pytest.raises(InputError, match="has a `train_step` of its own"):
        measure_noise(make_task(*models.rows(8)), own_steps.vae())


def updates(task, model, *, fits):
    return time_updates(
        model,
        task.source,
        batch_sizes=(8, 16),
        largest_whole=fits,
        budget_s=2.0,
        first=8,
    )


def test_what_fits_whole_is_not_cut(monkeypatch):
    # On a slow machine the second size would be left out for its time.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    task = make_task(*models.rows(64), budget_s=2.0)
    timings = updates(task, model, fits=16)
    assert [(t.batch_size, t.micro_batch_size) for t in timings] == [(8, 8), (16, 16)]
