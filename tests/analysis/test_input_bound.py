import numpy as np
import pytest

from kbatch.analysis.input_bound import (
    VERDICTS,
    crossing_batch_size,
    input_verdict,
    overlapped_rate,
    serial_rate,
)
from kbatch.analysis.intervals import Interval
from kbatch.analysis.round_ratios import RoundEstimate, ratio_over_rounds


def estimate(low, high):
    return RoundEstimate((low * high) ** 0.5, Interval(low, high), 7)


def noisy(rate, seed=0, rounds=7):
    return rate * np.random.default_rng(seed).lognormal(0, 0.03, rounds)


OPPOSITE = {
    "input-bound": "compute-bound",
    "compute-bound": "input-bound",
    "undetermined": "undetermined",
}


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8, 0.97, 1.0, 1.03, 1.25, 2.0, 5.0])
def test_swapping_pipeline_and_step_turns_the_verdict_round(ratio):
    pipeline, step = noisy(1000 * ratio, 1), noisy(1000, 2)
    one = input_verdict(ratio_over_rounds(pipeline, step))
    assert input_verdict(ratio_over_rounds(step, pipeline)) == OPPOSITE[one]
    assert input_verdict(ratio_over_rounds(7 * pipeline, 7 * step)) == one


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.4, 0.6, "input-bound"),
        (1.6, 2.4, "compute-bound"),
        (0.8, 1.2, "undetermined"),
        (0.96, 0.99, "undetermined"),
        (1.01, 1.04, "undetermined"),
        (0.94, 0.951, "input-bound"),
        (1.051, 1.06, "compute-bound"),
        (0.2, 3.0, "undetermined"),
    ],
)
def test_the_verdict_needs_the_whole_interval_on_one_side(low, high, verdict):
    assert input_verdict(estimate(low, high)) == verdict
    assert verdict in VERDICTS


def test_a_narrower_interval_never_takes_a_verdict_back():
    for middle in (0.5, 0.9, 1.0, 1.1, 2.0):
        seen = [input_verdict(estimate(middle / w, middle * w)) for w in (2.5, 1.5, 1.1, 1.01)]
        decided = [v for v in seen if v != "undetermined"]
        assert len(set(decided)) <= 1
        assert seen == ["undetermined"] * (4 - len(decided)) + decided


def test_without_an_interval_nothing_is_determined():
    assert input_verdict(None) == "undetermined"
    assert input_verdict(RoundEstimate(0.1, None, 2)) == "undetermined"


@pytest.mark.parametrize("fixed_s", [1e-3, 5e-2])
@pytest.mark.parametrize("slope_s", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("example_s", [2e-3, 1e-2])
def test_both_take_as_long_at_the_crossing(fixed_s, slope_s, example_s):
    def step_s(size):
        return fixed_s + slope_s * size

    found = crossing_batch_size(
        batch_size=64,
        smaller_size=16,
        step_s=[step_s(64)] * 5,
        smaller_step_s=[step_s(16)] * 5,
        example_s=[example_s] * 5,
    )
    size = found.batch_size
    assert step_s(size) == pytest.approx(example_s * size)
    assert step_s(2 * size) < example_s * 2 * size
    assert step_s(size / 2) > example_s * size / 2
    assert found.slower_above == "pipeline"
    assert (found.interval.low, found.interval.high) == pytest.approx((size, size))


def test_a_pipeline_faster_than_the_steps_slope_never_crosses():
    found = crossing_batch_size(
        batch_size=64, smaller_size=16, step_s=[0.07], smaller_step_s=[0.022], example_s=[5e-4]
    )
    assert (found.batch_size, found.interval, found.slower_above) == (None, None, "step")


def test_a_step_without_a_fixed_part_is_outrun_at_every_size():
    found = crossing_batch_size(
        batch_size=64, smaller_size=16, step_s=[0.064], smaller_step_s=[0.015], example_s=[2e-3]
    )
    assert (found.batch_size, found.slower_above) == (0.0, "pipeline")


def test_a_step_that_is_faster_on_the_larger_batch_has_no_slope():
    found = crossing_batch_size(
        batch_size=64, smaller_size=16, step_s=[0.064], smaller_step_s=[0.07], example_s=[2e-3]
    )
    assert found.batch_size == pytest.approx(32)


def test_a_round_without_a_crossing_takes_the_interval_away():
    found = crossing_batch_size(
        batch_size=64,
        smaller_size=16,
        step_s=[0.064] * 5,
        smaller_step_s=[0.034] * 5,
        example_s=[1e-3, 1e-3, 1e-3, 1.1e-3, 1e-4],
    )
    assert found.interval is None
    assert found.batch_size == pytest.approx(0.024 / (1e-3 - 6.25e-4))


def test_no_rounds_no_crossing_and_one_size_is_refused():
    empty = {"step_s": [], "smaller_step_s": [], "example_s": []}
    assert crossing_batch_size(batch_size=8, smaller_size=2, **empty) is None
    with pytest.raises(ValueError, match="two batch sizes"):
        crossing_batch_size(batch_size=8, smaller_size=8, **empty)


@pytest.mark.parametrize(("pipeline", "step"), [(100, 100), (100, 300), (300, 100), (1, 1e6)])
def test_serial_training_lies_between_half_and_the_whole_of_overlapped(pipeline, step):
    overlapped, serial = overlapped_rate(pipeline, step), serial_rate(pipeline, step)
    assert overlapped / 2 <= serial < overlapped
    assert serial == pytest.approx(pipeline * step / (pipeline + step))
