import pytest
from figure_samples import words
from training_profile_factory import left_out, point, training_profile

import kbatch
from kbatch.throughput.report import (
    training_lines,
    training_profile_alt_text,
    training_profile_info,
)

CACHE = {8: 9e-3, 16: 16e-3, 32: 30e-3, 64: 120e-3, 128: 240e-3}


def test_the_info_holds_every_size_and_what_was_measured():
    info = training_profile_info(training_profile())
    assert info.sizes == (1, 4, 16, 64, 256, 1024)
    assert info.failed == (1024,)
    assert [p.micro_batch_size for p in info.profile.measured] == [1, 4, 16, 64, 256]
    assert info.profile.memory_bytes[16] == 4_600_000
    assert info.answers == (("90 % of peak", 180, True), ("fastest", 256, True))
    assert info.line_s[0] == pytest.approx((1, 2.1e-3), rel=0.02)
    assert info.line_s[-1] == pytest.approx((256, 27.6e-3), rel=0.02)


def test_the_figure_has_units_conditions_and_what_failed():
    ax = kbatch.plot_training_profile(training_profile())
    text = words(ax)
    for expected in (
        "Throughput (samples/s)",
        "Time of a step (ms)",
        "Peak memory (weights included)",
        "Micro-batch size (examples at once)",
        "digits, mixed_float16",
        "out of memory",
        "fastest: 256",
        "limit 64.0 MiB",
        "7 rounds a point",
        "without XLA",
        "TensorFlow",
    ):
        assert expected in text
    lowest = ax.figure.axes[-1]
    assert lowest.get_xscale() == "log"
    assert list(lowest.get_xticks()) == [1, 4, 16, 64, 256, 1024]


def test_without_memory_there_are_two_panels():
    bare = training_profile(points=(point(4, 0.1), point(8, 0.2)), memory_limit_bytes=None)
    assert len(kbatch.plot_training_profile(bare).figure.axes) == 2


def times(seconds, **changed):
    """A profile of steps of so many seconds, by size."""
    return training_profile(points=tuple(point(b, s, **changed) for b, s in seconds.items()))


NO_LINE = times(CACHE)
IN_PARTS = times({b: 0.1 + 1 / b for b in (8, 16, 32, 64)}, batch_size=64)
ONE_ROUND = times({8: 8e-3, 16: 16e-3}, hiccups=(1.0,))
UNTIMED = training_profile(points=(left_out(8, "out_of_memory", "memory ran out"),))


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (training_profile(), "Fastest: 9,280 ("),
        (training_profile(), "90 % of the peak throughput is reached from 180 ("),
        (training_profile(), "2.01 ms + 0.100 ms x B."),
        (training_profile(), "of 64.0 MiB that may be taken"),
        (training_profile(), "Micro-batches of 1,024 ran out of memory."),
        (NO_LINE, "does not hold: measured times are up to 33 % off"),
        (times({8: 0.0995, 16: 0.2}), "16 are as fast within the noise"),
        (ONE_ROUND, "Fastest: 1,000 samples/s"),
        (UNTIMED, "No step could be timed."),
    ],
)
def test_what_a_reader_must_know_is_said(profile, words):
    assert words in " ".join(training_lines(profile))


def test_what_is_not_so_is_not_said():
    assert "x B" not in str(training_lines(ONE_ROUND))
    assert "Fit" not in words(kbatch.plot_training_profile(ONE_ROUND))


def test_a_line_is_drawn_where_one_holds():
    bent, cut, short = map(training_profile_info, (NO_LINE, IN_PARTS, ONE_ROUND))
    assert bent.line_s == cut.line_s == short.line_s == ()
    assert "No line holds" in bent.fit
    assert "33 %" in bent.fit
    assert "steps accumulate 64 examples" in cut.conditions
    with pytest.raises(ValueError, match=r"nothing to plot.*Received: 1 sizes"):
        kbatch.plot_training_profile(UNTIMED)


def test_an_answer_beyond_the_measured_sizes_is_marked_as_not_measured():
    profile = training_profile(points=tuple(point(b, 2e-3 + 1e-4 * b) for b in (1, 4, 16)))
    size = profile.efficient.value
    assert size > 16
    info = training_profile_info(profile)
    assert info.answers == (("90 % of peak", size, False), ("fastest", 16, True))
    assert f"Marked as 90 % of peak, not measured: {size}." in training_profile_alt_text(info)
    assert f"90 % of peak, not measured: {size}" in words(kbatch.plot_training_profile(profile))
