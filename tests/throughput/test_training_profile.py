import dataclasses

import numpy as np
import pytest
from training_profile_factory import HICCUPS, left_out, point, training_profile

from kbatch.throughput.record import TimedRounds, TrainingPoint


def test_rates_are_examples_over_the_median_step_time():
    one = point(64, 0.5)
    assert one.step_time_s == 0.5
    assert one.samples_per_second == 128
    interval, rate = one.step_time_interval_s, one.samples_per_second_interval
    assert (interval.low, interval.high) == (0.5 * min(HICCUPS), 0.5 * max(HICCUPS))
    np.testing.assert_allclose([rate.low, rate.high], [64 / interval.high, 64 / interval.low])
    assert one.compile_s == pytest.approx(1.5)


def test_a_micro_batch_of_an_accumulated_step_has_its_share_of_the_time():
    one = point(16, 0.8, batch_size=64)
    assert one.accumulated
    assert not point(64, 0.8).accumulated
    assert one.samples_per_second == 80
    np.testing.assert_allclose(one.micro_batch_times_s, 0.2 * np.array(HICCUPS))


def test_the_fit_of_accumulated_steps_is_that_of_their_micro_batches():
    plain = [point(b, 2e-3 + 1e-4 * b) for b in (16, 32, 64)]
    steps = [point(b, 64 / b * (2e-3 + 1e-4 * b), batch_size=64) for b in (16, 32, 64)]
    one, other = (training_profile(points=tuple(p)).step_time for p in (plain, steps))
    assert one.intercept == pytest.approx(other.intercept)
    assert one.slope == pytest.approx(other.slope)


def test_the_fit_gives_the_line_back_and_what_follows_from_it():
    profile = training_profile()
    fit = profile.step_time
    assert fit.intercept == pytest.approx(2e-3, rel=0.02)
    assert fit.slope == pytest.approx(1e-4, rel=0.02)
    assert fit.holds
    assert profile.peak_samples_per_second.value == pytest.approx(1e4, rel=0.02)
    assert profile.knee.value == pytest.approx(20, abs=1)
    assert profile.efficient.value == pytest.approx(180, abs=6)
    assert profile.fastest.value == 256


def test_where_no_line_holds_it_says_so_and_sizes_are_read_off_what_was_measured():
    """A cache that ends at 32 examples: beyond, an example takes twice as long."""
    times_s = {8: 9e-3, 16: 16e-3, 32: 30e-3, 64: 120e-3, 128: 240e-3}
    profile = training_profile(points=tuple(point(b, s) for b, s in times_s.items()))
    assert profile.step_time.holds is False
    assert profile.fastest.value == 32
    assert profile.efficient.value <= 16
    assert profile.choice.micro_batch_size == 32


def test_the_choice_is_by_time_an_example_whatever_the_steps():
    profile = training_profile(points=(point(16, 0.2, batch_size=64), point(64, 0.3)))
    assert profile.choice.micro_batch_size == 16
    assert profile.choice.gain.value == pytest.approx(1.5)
    assert training_profile(points=(point(16, 0.1), point(64, 0.3))).choice.micro_batch_size == 64


def test_what_was_not_measured_takes_no_part():
    points = (left_out(1), point(2, 1.0), left_out(4, "out_of_memory", "memory ran out"))
    profile = training_profile(points=points)
    assert [p.micro_batch_size for p in profile.measured] == [2]
    assert profile.choice.micro_batch_size == 2
    for value in (points[0].step_time_s, points[0].samples_per_second, points[0].compile_s):
        assert value is None
    for answer in ("step_time", "knee", "efficient", "fastest", "peak_samples_per_second"):
        with pytest.raises(ValueError, match=r"two measured micro-batch sizes.*1 sizes with 7"):
            getattr(profile, answer)


def test_memory_is_predicted_by_the_line():
    profile = training_profile()
    assert profile.predict_memory_bytes(100) == pytest.approx(13e6, rel=1e-6)
    assert 1024 not in profile.memory_bytes
    bare = training_profile(points=(point(2, 1.0, peak=10),))
    with pytest.raises(ValueError, match=r"memory of two sizes.*memory of 1 sizes"):
        bare.predict_memory_bytes(4)


def test_the_table_has_a_row_a_size_with_what_is_unknown_missing():
    table = training_profile().to_dataframe()
    assert list(table["micro_batch_size"]) == [1, 4, 16, 64, 256, 1024]
    assert list(table["outcome"]) == 5 * ["measured"] + ["out_of_memory"]
    measured, failed = table.iloc[4], table.iloc[5]
    assert measured["samples_per_second"] == pytest.approx(256 / 27.6e-3)
    assert measured["samples_per_second_low"] < measured["samples_per_second"]
    assert (measured["steps"], measured["rounds"]) == (28, 7)
    assert failed[["samples_per_second", "step_time_s", "peak_memory_bytes"]].isna().all()
    assert failed["reason"] == "memory ran out when it was probed"


REFUSED = {
    "`outcome` must be one of": lambda: dataclasses.replace(point(64, 1.0), outcome="slow"),
    "if, and only if": lambda: dataclasses.replace(point(64, 1.0), outcome="not_run"),
    "if, and only if.*": lambda: TrainingPoint(8, 8, "measured"),
    "`micro_batch_size` must be at least 1": lambda: point(0, 1.0, batch_size=64),
    "`batch_size` must be at least 64": lambda: point(64, 1.0, batch_size=32),
    "one a round": lambda: dataclasses.replace(point(64, 1.0), rounds=(0,)),
    "ascend": lambda: training_profile(points=(point(4, 1.0), point(2, 1.0))),
    "ascend.*": lambda: training_profile(points=(point(2, 1.0), point(2, 1.0))),
    "a duration in each of its rounds": lambda: TimedRounds(64, 64, (0, 1, 2), (0.01,)),
    "a duration in each of its rounds.*": lambda: TimedRounds(64, 64, (), ()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_contradicts_itself_is_refused(words):
    with pytest.raises(ValueError, match=rf"{words}.*Received: "):
        REFUSED[words]()
