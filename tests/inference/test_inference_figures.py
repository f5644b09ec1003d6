import numpy as np
import pytest
from figure_samples import text_overlaps, words
from inference_factory import make_check, make_failed, make_profile, make_timing, time_s

import kbatch

NAMES = ("throughput", "operating_curve", "memory")
PLOTS = {name: getattr(kbatch, f"plot_inference_{name}") for name in NAMES}


def test_every_point_is_drawn_within_its_interval():
    profile = make_profile()
    ax = kbatch.plot_inference_throughput(profile)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    for path in ("compiled", "xla"):
        rates = [t.rate.value for t in profile.select(call_path=path).answering]
        assert drawn[path] == rates
    for panel in ax.figure.axes:
        lines = [line for line in panel.lines if line.get_label()[0] != "_"]
        for line, each in zip(lines, panel.collections, strict=True):
            for value, segment in zip(line.get_ydata(), each.get_segments(), strict=True):
                assert segment[0][1] <= value <= segment[1][1]


def test_the_fit_is_drawn_where_a_line_holds_and_else_points_are_joined():
    stairs = [make_timing(size, path="xla", scale=1 + (size > 8)) for size in (1, 2, 4, 8, 16, 32)]
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4, 8, 16, 32)), *stairs)
    lower = kbatch.plot_inference_throughput(profile).figure.axes[1]
    styles = {drawn.get_label(): drawn.get_linestyle() for drawn in lower.lines}
    assert (styles["compiled"], styles["xla"]) == ("None", "-")
    (fitted,) = [line for line in lower.lines if len(line.get_xdata()) > 6]
    expected = [1000 * time_s(size) for size in fitted.get_xdata()]
    np.testing.assert_allclose(fitted.get_ydata(), expected, rtol=0.05)


def test_where_marks_lie_close_the_caption_says_why_there_is_no_result():
    failed = [make_failed(size) for size in range(60, 68)]
    figure = kbatch.plot_inference_throughput(make_profile(make_timing(1), *failed)).figure
    assert "✕: out of memory" in words(figure.axes[0])
    assert text_overlaps(figure) == []


def test_a_target_and_sizes_without_memory_are_drawn():
    unchecked = make_profile(make_timing(1), make_timing(8), make_failed(64))
    text = words(kbatch.plot_inference_throughput(unchecked))
    assert "within" not in text
    assert "out of memory" in text
    missed = make_profile(target_ms=5.0, checks=(make_check(33, outcome="missed"),))
    assert "no size verified" in words(kbatch.plot_inference_throughput(missed))
    # What the memory guard kept from running takes no place on the axis.
    assert kbatch.plot_inference_memory(make_profile()).get_xlim()[1] < 128
    found = make_profile(target_ms=5.0, checks=(make_check(33),))
    for part in ("knee: 10", "fastest: 64", "p95 within 5 ms: batch size 33", "8 rounds a point"):
        assert part in words(kbatch.plot_inference_throughput(found))


@pytest.mark.parametrize("name", PLOTS)
def test_a_figure_explains_what_it_draws_and_without_data_says_what_to_measure(name):
    text = words(PLOTS[name](make_profile()))
    assert ("bars:" in text, "dotted:" in text) == (name == "throughput", name == "memory")
    with pytest.raises(ValueError, match="Received"):
        PLOTS[name](make_profile(make_failed(1), memory=()))
    assert make_profile(make_failed(1), memory=()).figures() == ()
