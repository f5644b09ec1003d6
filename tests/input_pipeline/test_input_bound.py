import itertools

import numpy as np
import pytest
from input_profile_factory import make_profile

from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.input_pipeline.rates import (
    crossing_batch_size,
    input_verdict,
)


def estimate(low, high):
    return Estimate((low * high) ** 0.5, low, high, 7)


def noisy(rate, seed=0, rounds=7):
    return rate * np.random.default_rng(seed).lognormal(0, 0.03, rounds)


OPPOSITE = {
    "input-bound": "compute-bound",
    "compute-bound": "input-bound",
    "undetermined": "undetermined",
}


def test_swapping_pipeline_and_step_turns_the_verdict_round():
    for ratio in (0.2, 0.5, 0.8, 0.97, 1.0, 1.03, 1.25, 2.0, 5.0):
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


def test_a_narrower_interval_never_takes_a_verdict_back():
    for middle in (0.5, 0.9, 1.0, 1.1, 2.0):
        seen = [input_verdict(estimate(middle / w, middle * w)) for w in (2.5, 1.5, 1.1, 1.01)]
        decided = [v for v in seen if v != "undetermined"]
        assert len(set(decided)) <= 1
        assert seen == ["undetermined"] * (4 - len(decided)) + decided


@pytest.mark.parametrize(
    ("middle", "low", "high", "verdict"),
    [
        (2.0, 1.9, 2.1, "compute-bound"),  # They agree: the rounds decide.
        (1.15, 0.95, 1.3, "compute-bound"),
        (2.0, 0.5, 0.7, "input-bound"),  # Chunks: a short round saw the batches of one.
        (2.0, 0.5, 2.0, "undetermined"),
        (2.0, 0.7, 0.95, "undetermined"),
        (0.5, 1.2, 1.4, "compute-bound"),  # Short rounds of a pipeline that starts slowly.
        (3.0, 1.2, 3.0, "compute-bound"),
        (0.93, 0.1, 0.93, "undetermined"),
        (0.8, 0.1, 0.8, "input-bound"),
        (1.15, 0.9, 0.97, "undetermined"),  # They agree within 1.3, and not on the side.
        (1.15, 0.9, 1.01, "compute-bound"),
    ],
)
def test_where_a_long_reading_differs_its_bounds_decide(middle, low, high, verdict):
    ratio = estimate(middle / 1.02, middle * 1.02)
    assert input_verdict(ratio, long_run=(low, high)) == verdict
    turned = estimate(1 / middle / 1.02, 1.02 / middle)
    assert input_verdict(turned, long_run=(1 / high, 1 / low)) == OPPOSITE[verdict]


def test_without_an_interval_nothing_is_determined():
    assert input_verdict(None) == "undetermined"
    assert input_verdict(Estimate(0.1, n=2)) == "undetermined"


SIZES = (64, 16, 4)


def crossing(step_s, example_s, *, rounds=9, sizes=SIZES):
    """The crossing of rounds without noise."""
    measured = [size for size in sizes for _ in range(rounds)]
    return crossing_batch_size(
        measured, [step_s(size) for size in measured], example_s=[example_s] * rounds
    )


CROSSINGS = itertools.product((1e-3, 5e-2), (0.0, 1e-5, 1e-3), (2e-3, 1e-2), (SIZES, (64, 16)))


def test_both_take_as_long_at_the_crossing():
    for fixed_s, slope_s, example_s, sizes in CROSSINGS:

        def step_s(size, fixed_s=fixed_s, slope_s=slope_s):
            return fixed_s + slope_s * size

        found = crossing(step_s, example_s, sizes=sizes)
        size = found.batch_size.value
        assert step_s(size) == pytest.approx(example_s * size)
        assert step_s(2 * size) < example_s * 2 * size
        assert step_s(size / 2) > example_s * size / 2
        assert not found.never
        assert found.batch_size.ends == pytest.approx((size, size))
        assert found.step.holds is (True if len(sizes) == 3 else None)


def test_a_pipeline_faster_than_the_steps_slope_never_crosses():
    found = crossing(lambda size: 0.006 + 0.001 * size, 5e-4)
    assert found.never
    assert (found.batch_size.value, found.batch_size.low) == (None, None)


def test_a_step_without_a_fixed_part_is_outrun_at_every_size():
    found = crossing(lambda size: 1e-3 * size - 1e-3, 2e-3)
    assert found.batch_size.value == 0.0
    assert found.batch_size.high == pytest.approx(0.0, abs=1e-6)
    assert not found.never


def test_a_step_that_is_no_line_is_told():
    assert crossing(lambda size: 1e-3 * size**0.5, 2e-3).step.holds is False


def measured_rounds(rng, *, example_s, drift, noise=0.03, rounds=9):
    """A step of 5 ms and 0.1 ms an example, and a pipeline; a round's drift slows both."""
    slowed = rng.lognormal(0, drift, rounds)
    sizes = [size for size in SIZES for _ in range(rounds)]
    times_s = [
        (5e-3 + 1e-4 * size) * factor * rng.lognormal(0, noise)
        for size in SIZES
        for factor in slowed
    ]
    return sizes, times_s, example_s * slowed * rng.lognormal(0, noise, rounds)


@pytest.mark.parametrize(("example_s", "drift"), [(2e-4, 0.1), (1e-3, 0.0)])
def test_intervals_cover_the_crossing_in_95_of_100_cases(example_s, drift):
    rng = np.random.default_rng(0)
    truth = 5e-3 / (example_s - 1e-4)
    held = []
    for _ in range(150):
        sizes, times_s, examples_s = measured_rounds(rng, example_s=example_s, drift=drift)
        ratio = crossing_batch_size(sizes, times_s, example_s=examples_s).batch_size
        held.append(ratio.low <= truth <= ratio.high if ratio.ends else truth >= (ratio.low or 0))
    assert np.mean(held) >= 0.93


def test_the_interval_is_that_of_draws_from_the_fit():
    rng = np.random.default_rng(2)
    sizes, times_s, _ = measured_rounds(rng, example_s=2e-4, drift=0.0)
    found = crossing_batch_size(sizes, times_s, example_s=[2e-4] * 9)
    line = found.step
    # Student's t of the eight degrees of freedom of nine rounds.
    shrunk = np.sqrt(8 / rng.chisquare(8, 100_000))[:, None]
    middle = [line.intercept, line.slope]
    drawn = middle + shrunk * rng.multivariate_normal([0, 0], line.covariance, 100_000)
    low, high = np.percentile(drawn[:, 0] / (2e-4 - drawn[:, 1]), [2.5, 97.5])
    np.testing.assert_allclose(found.batch_size.ends, [low, high], rtol=0.01)


def test_where_the_rates_approach_each_other_there_is_a_lower_bound():
    sizes, times_s, examples_s = measured_rounds(
        np.random.default_rng(1), example_s=1.02e-4, drift=0.0
    )
    found = crossing_batch_size(sizes, times_s, example_s=examples_s)
    assert found.batch_size.value is None
    assert 0 < found.batch_size.low < 5e-3 / 2e-6
    assert not found.never


def test_too_few_rounds_have_no_crossing_and_one_size_is_refused():
    assert crossing(lambda size: 0.01, 1e-3, rounds=2) is None
    assert crossing_batch_size([], [], example_s=[]) is None
    with pytest.raises(ValueError, match="two or more sizes"):
        crossing(lambda size: 0.01, 1e-3, sizes=(8,))


@pytest.mark.parametrize(("pipeline", "step"), [(100, 100), (100, 300), (300, 100), (1, 1e6)])
def test_serial_training_lies_between_half_and_the_whole_of_overlapped(pipeline, step):
    profile = make_profile(pipeline=pipeline, step=step, together=pipeline / 9)
    overlapped, serial = profile.overlapped, profile.serial
    assert overlapped / 2 <= serial < overlapped
    assert serial == pytest.approx(pipeline * step / (pipeline + step))
