"""The answer, the table and the figure of a training profile."""

import itertools

import numpy as np
import pytest
from figure_samples import words
from training_profile_factory import HICCUPS, in_executions, left_out, training_profile, update

import kbatch
from kbatch.throughput.result import TimedUpdate, choose_micro_batch, fastest_ways


def test_timed_update_median_interval_and_rate():
    timed = update(64, 0.5)
    assert (timed.time_s.n, timed.time_s.value, timed.measured) == (7, 0.5, True)
    assert timed.time_s.ends == (0.5 * min(HICCUPS), 0.5 * max(HICCUPS))
    assert timed.rate.value == 128
    assert timed.rate.ends == pytest.approx((64 / timed.time_s.high, 64 / timed.time_s.low))
    assert update(8, 1.0, hiccups=(1.0, 2.0, 3.0)).time_s.ends is None
    assert (left_out(8).rate, left_out(8).time_s, left_out(8).measured) == (None, None, False)


def test_training_profile_without_a_line_uses_measured_sizes():
    """Beyond 32 examples each example takes twice as long, as with a cache that is full."""
    times_s = {8: 9e-3, 16: 16e-3, 32: 30e-3, 64: 120e-3, 128: 240e-3}
    profile = training_profile(*(update(b, s) for b, s in times_s.items()))
    assert profile.latency.line.holds is False
    assert profile.efficient.value <= 16
    assert profile.micro_batch_size == 32
    assert "off by up to 33 %" in profile.line_text


def test_training_profile_fastest_steps_per_execution():
    profile = in_executions()
    ways = [(way.batch_size, way.steps_per_execution) for way in fastest_ways(profile.updates)]
    assert ways == [(8, 12_500), (32, 3_125), (128, 1)]
    assert (profile.micro_batch_size, profile.steps_per_execution) == (32, 3_125)
    assert profile.gain.value == pytest.approx((2.28e-3 / 128) / (5.2e-4 / 32))
    table = profile.table()
    assert table["steps per execution"].tolist() == [1, 12_500, 1, 3_125, 1]
    assert table["samples/s"][3] == pytest.approx(32 / 5.2e-4)
    assert table.attrs["answer"] == [3]
    upper = profile.plot()
    assert "one step per execution" in words(upper)
    assert "Fit of the faster of both at each size: t = " in words(upper)
    slow = TimedUpdate(batch_size=8, steps_per_execution=9, outcome="not_run")
    alone = words(training_profile(update(8, 1e-3), update(32, 2e-3), slow).plot())
    assert "several steps per execution" not in alone
    labels = [panel.get_ylabel().split("\n")[-1] for panel in upper.figure.axes]
    assert labels == ["(samples/s)", "(ms)", "(weights included)"]
    # Each number of steps has its own line, from its smallest size to its largest.
    lines = [line.get_xdata() for line in upper.lines if len(line.get_xdata()) == 100]
    assert [(round(sizes[0]), round(sizes[-1])) for sizes in lines] == [(8, 128), (8, 32)]


def test_training_profile_ignores_sizes_without_times():
    profile = training_profile(left_out(1), update(2, 1.0), left_out(4, "out_of_memory"))
    assert [u.batch_size for u in fastest_ways(profile.updates)] == [2]
    assert profile.micro_batch_size == 2
    with pytest.raises(ValueError, match=r"two or more batch sizes.*sizes: 1"):
        _ = profile.efficient
    nothing = training_profile(left_out(8, "out_of_memory"))
    assert nothing.answer == "No step could be timed."
    assert nothing.figures() == ()
    with pytest.raises(ValueError, match=r"nothing to plot.*Received: 1 settings"):
        kbatch.plot_training_profile(nothing)


def test_training_profile_table():
    table = training_profile().table()
    assert list(table["micro-batch size"]) == [1, 4, 16, 64, 256, 1024]
    assert list(table["outcome"]) == 5 * ["measured"] + ["out of memory"]
    measured, failed = table.iloc[4], table.iloc[5]
    assert measured["samples/s"] == pytest.approx(256 / 27.6e-3)
    assert (measured["rounds"], failed["rounds"]) == (7, 0)
    assert failed[["samples/s", "micro-batch time (ms)", "peak memory (MiB)"]].isna().all()


SIZES = (8, 16, 32, 64)


def way(size, seconds):
    """Return a size with the seconds of an example in each round."""
    return TimedUpdate(batch_size=size, times_s=tuple(size * s for s in seconds))


def steady(size, seconds, count=5):
    """Return times that vary by half a percent, as on a quiet machine."""
    return way(size, (seconds * (1 + 0.005 * (-1) ** number) for number in range(count)))


def chosen(*ways):
    way, gain = choose_micro_batch(ways)
    return way.batch_size, gain


def test_choose_micro_batch_largest_within_two_percent():
    for speeds in itertools.product((1.0, 1.01, 1.3), repeat=4):
        size, gain = chosen(*itertools.starmap(steady, zip(SIZES, speeds, strict=True)))
        least = min(speeds)
        assert size == max(s for s, t in zip(SIZES, speeds, strict=True) if t <= 1.02 * least)
        if size == SIZES[-1]:
            assert gain is None
        else:
            exact = speeds[-1] / speeds[SIZES.index(size)]
            assert gain.value == pytest.approx(exact, rel=1e-9)
            assert gain.value > 1.02


def test_choose_micro_batch_on_a_drifting_machine():
    drift = (1.0, 3.0, 0.5, 2.0, 1.0)
    size, gain = chosen(way(8, drift), way(16, (1.2 * d for d in drift)))
    assert (size, gain.value) == (8, pytest.approx(1.2))


def test_choose_micro_batch_ties():
    assert chosen(steady(8, 1.0), way(16, [1.0, 2.0, 0.7, 1.6, 1.1]))[0] == 16
    for common in (1, 2):
        assert chosen(way(8, [1.0] * common), way(16, [3.0] * 5))[0] == 16


def test_choose_micro_batch_uses_common_rounds():
    # The larger size ended early, before the machine got slower.
    small = way(8, (1.0 if number < 4 else 9.0 for number in range(9)))
    size, gain = chosen(small, way(16, [2.0] * 4))
    assert (size, gain.value, gain.n) == (8, 2.0, 4)
    assert chosen(way(4, [1.0])) == (4, None)
    for none in ([], [way(8, [1.0]), way(16, [])]):
        with pytest.raises(ValueError, match=r"timed at least once.*Received: "):
            choose_micro_batch(none)


def test_choose_micro_batch_equal_sizes_with_noise():
    rng = np.random.default_rng(0)
    sizes = [
        chosen(*(way(size, np.exp(rng.normal(0, 0.05, 9)).tolist()) for size in SIZES))[0]
        for _ in range(400)
    ]
    assert sizes.count(64) > 0.9 * len(sizes)
