import numpy as np
import pytest
from figure_samples import words
from inference_factory import (
    make_check,
    make_failed,
    make_memory,
    make_profile,
    make_timing,
    time_s,
)

import kbatch
from kbatch.inference.figures import (
    inference_alt_text,
    inference_info,
    memory_series,
    noise_deviations,
    noise_reach,
    path_ratios,
    tail_bounds,
)
from kbatch.inference.report import inference_section

PLOTS = {
    "throughput": kbatch.plot_inference_throughput,
    "operating_curve": kbatch.plot_inference_operating_curve,
    "paths": kbatch.plot_inference_paths,
    "memory": kbatch.plot_inference_memory,
    "tails": kbatch.plot_inference_tails,
    "noise": kbatch.plot_inference_noise,
}


KEPT = make_check(33, [0.004] * 59)
WORDS = {
    "throughput": ("(samples/s)", "(ms)", "xla", "knee: 10", "fastest: 64", "p95 within 5 ms"),
    "operating_curve": ("1 2 4 8 16 32 64", "p95 within 5 ms: batch size 33", "batch (ms)"),
}


def test_the_info_holds_every_series_and_size():
    info = inference_info(make_profile(*(make_timing(s) for s in (1, 8, 64)), make_failed(512)))
    assert info.batch_sizes == (1, 8, 64, 512)
    (series,) = info.series
    assert series.label == "compiled"
    assert series.failed == (512,)
    assert [point.batch_size for point in series.points] == [1, 8, 64]
    assert series.times_ms[1] == pytest.approx(1000 * time_s(8), rel=0.02)
    assert series.rates[1] == pytest.approx(8 / time_s(8), rel=0.02)
    assert [name for name, _ in info.answers] == ["knee", "efficient", "fastest"]


def test_policies_are_named_where_they_differ():
    info = inference_info(make_profile(make_timing(1), make_timing(1, policy="int8")))
    assert [s.label for s in info.series] == ["compiled, float32", "compiled, int8"]


@pytest.mark.parametrize("name", PLOTS)
def test_each_figure_names_its_axes_and_conditions(name):
    text = words(PLOTS[name](make_profile(checks=(KEPT,))))
    conditions = ("net", "CPU, 16 cores", "TensorFlow 2.21.0", "8 rounds a point")
    for part in (*conditions, *WORDS.get(name, ("(examples per call)",))):
        assert part in text, part


def test_every_point_is_drawn():
    ax = kbatch.plot_inference_throughput(make_profile())
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    for series in inference_info(make_profile()).series:
        assert drawn[series.label] == series.rates
    upper, lower = ax.figure.axes
    for panel, bars in ((upper, upper.collections), (lower, lower.collections)):
        lines = [line for line in panel.lines if line.get_label()[0] != "_"]
        for line, each in zip(lines, bars, strict=True):
            for value, segment in zip(line.get_ydata(), each.get_segments(), strict=True):
                assert segment[0][1] <= value <= segment[1][1]


def test_the_fit_is_drawn_where_a_line_holds_and_else_points_are_joined():
    stairs = [make_timing(size, path="xla", scale=1 + (size > 8)) for size in (1, 2, 4, 8, 16, 32)]
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4, 8, 16, 32)), *stairs)
    line, none = (series.line_s for series in inference_info(profile).series)
    assert none == ()
    assert (line[0][0], line[-1][0]) == (1, 32)
    for size, fitted_s in line:
        assert fitted_s == pytest.approx(time_s(size), rel=0.05)
    styles = {
        drawn.get_label(): drawn.get_linestyle()
        for drawn in kbatch.plot_inference_throughput(profile).lines
    }
    assert (styles["compiled"], styles["xla"]) == ("None", "-")


def test_targets_that_were_checked_are_drawn():
    profile = make_profile(checks=(KEPT, KEPT))
    assert inference_info(profile).targets == ((5.0, "p95 within 5 ms: batch size 33"),)
    unchecked = make_profile(make_timing(1), make_timing(8), make_failed(64))
    text = words(kbatch.plot_inference_throughput(unchecked))
    assert "within" not in text
    assert "out of memory" in text
    missed = make_check(33, [0.006] * 59, best=False)
    ((_, found),) = inference_info(make_profile(checks=(missed,))).targets
    assert found == "p95 within 5 ms: no size verified"


def test_paths_are_compared_round_by_round():
    drifting = [
        make_timing(8, block_medians_s=tuple(0.01 * 2**i for i in range(8))),
        make_timing(8, path="xla", block_medians_s=tuple(0.005 * 2**i for i in range(8))),
    ]
    (ratio,) = path_ratios(make_profile(*drifting))
    assert ratio.label == "xla"
    assert (ratio.times_as_fast, *ratio.bounds) == pytest.approx((2, 2, 2))
    other = make_timing(8, path="xla", block_rounds=tuple(range(20, 28)))
    with pytest.raises(ValueError, match="two of them"):
        path_ratios(make_profile(drifting[0], other))
    with pytest.raises(ValueError, match="needs two of them"):
        kbatch.plot_inference_paths(make_profile(make_timing(1), make_timing(2)))
    assert "Times as fast as compiled" in words(kbatch.plot_inference_paths(make_profile()))


def test_the_last_ratio_of_each_path_is_written_where_it_covers_no_other():
    scales = {"compiled": 1.0, "xla": 0.80, "eager": 0.79, "predict_on_batch": 0.4}
    profile = make_profile(
        *(
            make_timing(size, path=path, scale=scale)
            for path, scale in scales.items()
            for size in (1, 8, 64)
        )
    )
    ax = kbatch.plot_inference_paths(profile)
    ax.figure.canvas.draw()
    last = [ratio.times_as_fast for ratio in path_ratios(profile) if ratio.batch_size == 64]
    written = [text for text in ax.texts if text.get_text() and text.get_label() != "_caption"]
    assert [float(text.get_text()) for text in written] == pytest.approx(last, rel=0.01)
    boxes = [text.get_window_extent().padded(-2.0) for text in written]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_memory_has_the_limit_and_the_size_that_is_expected_to_reach_it():
    (series,) = memory_series(make_profile())
    assert list(series.peak_bytes) == [1, 2, 4, 8, 16, 32, 64]
    assert series.guarded == (128,)
    assert series.largest_expected == int((0.8 * 2**26 - 2**24) / 2**18)
    text = words(kbatch.plot_inference_memory(make_profile()))
    assert "limit 64.0 MiB" in text
    assert "up to 140 are expected" in text
    with pytest.raises(ValueError, match="measure_memory=True"):
        kbatch.plot_inference_memory(make_profile(memory=()))


def test_no_size_is_expected_to_fit_that_took_more():
    memory = [make_memory(size) for size in (1, 2, 4, 8, 16, 32, 64)]
    more = [make_memory(112, fixed=2**24 + 2**23), make_memory(128)]
    (series,) = memory_series(make_profile(memory=(*memory, *more)))
    assert series.fit.largest_within(0.8 * 2**26) > 112
    assert series.largest_expected == 111


def test_memory_of_a_limit_that_does_not_bind_has_no_size():
    flat = tuple(make_memory(size, fixed=2**24 + size // 1000, each=0) for size in (1, 1000, 4000))
    assert memory_series(make_profile(memory=flat))[0].largest_expected is None


def test_tails_are_shown_where_enough_calls_were_made_and_else_counted():
    profile = make_profile(make_timing(1, calls=300), make_timing(8, calls=60))
    bounds = tail_bounds(profile)
    assert bounds[1, 0.99] is not None
    assert bounds[1, 0.5] < bounds[1, 0.95] < bounds[1, 0.99]
    assert bounds[8, 0.99] is None
    ax = kbatch.plot_inference_tails(profile)
    assert "p99 at batch size 8 needs up to 239 more calls." in words(ax)
    drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert drawn["p95"] == pytest.approx([1000 * bounds[size, 0.95] for size in (1, 8)])
    few = make_profile(make_timing(1, calls=3), make_timing(8, calls=3))
    assert "too few calls" in words(kbatch.plot_inference_tails(few))
    bulk = make_profile(make_timing(1, path="predict"))
    with pytest.raises(ValueError, match=r"profile\.select"):
        kbatch.plot_inference_tails(bulk)


def test_noise_is_the_distance_of_each_round_from_the_median():
    profile = make_profile(make_timing(8, block_medians_s=(1.0, 1.0, 1.1, 1.0, 0.9, 1.0, 1.0, 1.0)))
    (deviations,) = noise_deviations(profile).values()
    assert deviations == pytest.approx([0, 0, 0.1, 0, -0.1, 0, 0, 0])
    (line,) = (
        line for line in kbatch.plot_inference_noise(profile).lines if line.get_marker() == "o"
    )
    assert list(line.get_ydata()) == pytest.approx(list(deviations))
    assert sorted(line.get_xdata()) == list(line.get_xdata())
    assert "noise floor 3 %" in words(kbatch.plot_inference_noise(profile))
    assert "noise floor" not in words(kbatch.plot_inference_noise(make_profile(twin=None)))


def test_few_rounds_far_beyond_the_others_are_marked_at_the_edge_and_told():
    usual = make_timing(8)
    slow = make_timing(8, block_medians_s=(*usual.block_medians_s[:7], 10 * usual.batch_time_s))
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4)), slow)
    distances = np.abs(np.concatenate(list(noise_deviations(profile).values())))
    reach = noise_reach(distances, 0.03)
    assert sorted(distances)[-2] <= reach < 0.1 < max(distances)
    ax = kbatch.plot_inference_noise(profile)
    triangles = [line for line in ax.lines if line.get_marker() == "^"]
    assert len(triangles) == 1
    assert reach < triangles[0].get_ydata()[0] < ax.get_ylim()[1]
    assert "1 round lies beyond the axis (triangles), the farthest at +" in words(ax)
    assert "beyond the axis" not in words(kbatch.plot_inference_noise(make_profile()))
    assert noise_reach(np.zeros(8), None) > 0


def test_names_of_answers_and_targets_stand_above_all_points():
    profile = make_profile(checks=(KEPT,))
    for plot, starts in (
        (kbatch.plot_inference_throughput, ("knee", "fastest")),
        (kbatch.plot_inference_operating_curve, ("p95",)),
    ):
        ax = plot(profile)
        ax.figure.canvas.draw()
        highest = max(max(line.get_ydata()) for line in ax.lines if line.get_label()[0] != "_")
        named = [text for text in ax.texts if text.get_text().startswith(starts)]
        assert len(named) == len(starts)
        for text in named:
            lowest = ax.transData.inverted().transform(text.get_window_extent())[0, 1]
            assert lowest > highest, text.get_text()


@pytest.mark.parametrize("name", ["throughput", "operating_curve", "tails", "noise"])
def test_nothing_timed_is_told(name):
    with pytest.raises(ValueError, match="Received"):
        PLOTS[name](make_profile(make_failed(1)))


def test_an_answer_beyond_the_measured_sizes_is_marked_as_not_measured():
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4, 8)))
    size = profile.efficient.batch_size
    assert size > 8
    assert f"efficient, not measured: {size}" in words(kbatch.plot_inference_throughput(profile))
    text = inference_alt_text(inference_info(profile))
    assert "compiled: at most " in text
    assert f"Marked as efficient: {size}, which was not measured." in text
    section = inference_section(profile)
    assert section.headline.endswith("by the fit: it was not measured.")
    (row,) = (row for row in section.tables[0].rows if row.key == "90 % of the peak throughput")
    assert row.cells[1].text == f"{size} (not measured)"
    far = make_profile(*(make_timing(size) for size in (1, 8, 64, 256)))
    measured = words(kbatch.plot_inference_throughput(far))
    assert "not measured" not in measured
