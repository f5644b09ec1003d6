"""What a measurement that could not be made leaves; `test_recommend` makes them all."""

import dataclasses

import pytest
import tensorflow as tf
from recommendation_factory import make_memory, make_recommendation, make_timings

from kbatch.analysis.binding_limit import INPUT
from kbatch.profiling.loads import DataEnded
from kbatch.training.errors import InputError
from kbatch.tuning.ledger import Ledger
from kbatch.tuning.recommend import sizes_to_time


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
    ledger = Ledger(None)
    assert ledger.try_run(INPUT, raising(error)) is None
    assert ledger.unknown == {INPUT: reason}
    assert list(ledger.durations_s) == [INPUT]


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="a mistake"):
        Ledger(None).try_run(INPUT, raising(RuntimeError("a mistake")))


def test_fit_runs_no_batch_that_did_not_go_through_the_device_whole():
    free = make_recommendation(noise_scale=2000.0)
    assert sizes_to_time(free) == (32, 256)
    # Larger batches are faster, in parts.
    timings = [
        dataclasses.replace(one, durations_s=tuple(s / 3 for s in one.durations_s))
        if one.batch_size > 64
        else one
        for one in make_timings(fits=64)
    ]
    few = make_recommendation(noise_scale=2000.0, timings=tuple(timings), memory=make_memory(70))
    assert few.batch_size > 64
    assert sizes_to_time(few) == (8, 64)
