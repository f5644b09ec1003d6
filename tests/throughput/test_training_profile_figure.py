import pytest
from figure_samples import words
from records_factory import make_gpu
from training_profile_factory import left_out, point, training_profile

import kbatch
from kbatch.throughput.report import (
    training_lines,
    training_profile_alt_text,
    training_profile_info,
    training_section,
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


def test_where_no_line_holds_none_is_drawn_and_it_says_so():
    info = training_profile_info(
        training_profile(points=tuple(point(b, s) for b, s in CACHE.items()))
    )
    assert info.line_s == ()
    assert "No line holds" in info.fit
    assert "33 %" in info.fit


def test_accumulated_steps_have_no_line_of_micro_batches():
    points = tuple(point(b, 0.1 + 1 / b, batch_size=64) for b in (8, 16, 32, 64))
    info = training_profile_info(training_profile(points=points))
    assert info.line_s == ()
    assert "steps accumulate 64 examples" in info.conditions


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


def test_the_description_has_the_numbers():
    text = training_profile_alt_text(training_profile_info(training_profile()))
    assert "At most 9,280 samples/s, at 256." in text
    assert "1,024 ran out of memory." in text


def test_a_profile_without_times_has_no_figure_but_words():
    bare = training_profile(points=(left_out(8, "out_of_memory", "memory ran out"),))
    with pytest.raises(ValueError, match=r"nothing to plot.*Received: 1 sizes"):
        kbatch.plot_training_profile(bare)
    assert training_lines(bare)[0] == "No step could be timed."


def test_a_round_of_two_sizes_is_told_without_a_fit():
    points = tuple(point(size, 1e-3 * size, hiccups=(1.0,)) for size in (8, 16))
    short = training_profile(points=points)
    assert not short.has_fit
    assert training_lines(short)[0].startswith("Fastest: 1,000 samples/s")
    assert "x B" not in " ".join(training_lines(short))
    assert training_profile_info(short).line_s == ()
    assert "Fit" not in words(kbatch.plot_training_profile(short))


def test_the_words_tell_saturation_fit_memory_and_what_is_missing():
    lines = training_lines(training_profile())
    text = " ".join(lines)
    assert lines[0].startswith("Fastest: 9,280 (")
    assert "90 % of the peak throughput is reached from 180 (" in text
    assert "2.01 ms + 0.100 ms x B." in text
    assert "of 64.0 MiB that may be taken" in text
    assert "Micro-batches of 1,024 ran out of memory." in text
    notes = [note.text for note in training_section(training_profile()).notes]
    assert notes == ["Rows of the dataset differ in length."]


def test_lack_of_fit_and_ties_are_said():
    lines = training_lines(training_profile(points=tuple(point(b, s) for b, s in CACHE.items())))
    assert any("does not hold: measured times are up to 33 % off" in line for line in lines)
    tied = training_profile(points=(point(8, 0.0995), point(16, 0.2)))
    assert "16 are as fast within the noise" in training_lines(tied)[0]


def test_a_row_a_size():
    rows = [row.texts for row in training_section(training_profile()).tables[0].rows]
    assert [row[0] for row in rows] == ["1", "4", "16", "64", "256", "1,024"]
    assert rows[-1] == ("1,024", "n/a", "n/a", "n/a", "memory ran out when it was probed")


def test_an_answer_beyond_the_measured_sizes_is_marked_as_not_measured():
    profile = training_profile(points=tuple(point(b, 2e-3 + 1e-4 * b) for b in (1, 4, 16)))
    size = profile.efficient.batch_size
    assert size > 16
    info = training_profile_info(profile)
    assert info.answers == (("90 % of peak", size, False), ("fastest", 16, True))
    assert f"Marked as 90 % of peak, not measured: {size}." in training_profile_alt_text(info)
    assert f"90 % of peak, not measured: {size}" in words(kbatch.plot_training_profile(profile))


def test_a_throttled_gpu_is_a_line():
    (line,) = [
        line
        for line in training_lines(training_profile(gpus=(make_gpu(throttled=("temperature",)),)))
        if "throttled" in line
    ]
    assert "(temperature)" in line
    assert "throttled" not in str(training_lines(training_profile(gpus=(make_gpu(),))))
