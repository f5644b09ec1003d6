import dataclasses

import pytest
from input_profile_factory import make_profile, make_rate, make_remedy
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from kbatch.input_pipeline.record import StepSpan
from kbatch.input_pipeline.report import input_pipeline_info, plot_input_pipeline
from kbatch.plotting.palette import ALARM, series_style


def panels(profile, ax=None):
    upper = plot_input_pipeline(profile, ax)
    (lower,) = [a for a in upper.figure.axes if a is not upper]
    return upper, lower


def test_the_timeline_is_one_second_without_gaps():
    info = input_pipeline_info(make_profile())
    assert len(info.waiting) == len(info.computing) == 13
    for (begin_ms, wait_ms), (computes_ms, _) in zip(info.waiting, info.computing, strict=True):
        assert begin_ms + wait_ms == pytest.approx(computes_ms)
    assert max(begin_ms for begin_ms, _ in info.waiting) < 1000
    assert sum(duration_ms for _, duration_ms in info.waiting) == pytest.approx(13 * 50)
    assert sum(duration_ms for _, duration_ms in info.computing) == pytest.approx(13 * 30)


def test_the_bars_are_the_rates_and_the_clear_gains():
    remedies = tuple(make_remedy(f"change {g}", g) for g in (1.0, 3.0, 1.5, 2.0, 2.5, 0.5))
    info = input_pipeline_info(make_profile(remedies=remedies))
    assert [bar.label for bar in info.bars] == [
        *("pipeline alone", "train step alone", "both together"),
        *("with change 3.0", "with change 2.5", "with change 2.0"),
    ]
    assert all(bar.bounds[0] < bar.rate < bar.bounds[1] for bar in info.bars)
    colors = [bar.color for bar in info.bars]
    assert len(set(colors[:3])) == 3
    assert colors[3:] == [series_style(2).color] * 3
    assert info.bars[0].rate == pytest.approx(800)
    unclear = make_profile(remedies=(make_remedy("prefetch", 1.0), make_remedy("any order", 0.9)))
    assert len(input_pipeline_info(unclear).bars) == 3


def test_what_follows_the_first_second_is_left_out():
    spans = tuple(StepSpan(0.4 * i, 0.3, 0.1) for i in range(5))
    assert len(input_pipeline_info(make_profile(timeline=spans)).waiting) == 3


def test_few_rounds_have_bars_without_intervals():
    profile = make_profile(smaller_steps=(), remedies=())
    few = {name: make_rate(800, rounds=2) for name in ("pipeline", "step", "together")}
    profile = dataclasses.replace(profile, **few)
    assert {bar.bounds for bar in input_pipeline_info(profile).bars} == {None}
    upper, lower = panels(profile)
    assert len(lower.patches) == 3
    assert upper.get_xlabel() == "Time (ms)"


def test_the_drawing_has_labels_units_and_the_verdict():
    profile = make_profile()
    upper, lower = panels(profile)
    assert upper.get_title(loc="left").replace("\n", " ").startswith("input-bound: training waits")
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("Time (ms)", "Throughput (samples/s)")
    labels = [tick.get_text() for tick in lower.get_yticklabels()]
    assert labels == [bar.label for bar in input_pipeline_info(profile).bars]
    assert [bar.get_width() for bar in lower.patches][:2] == pytest.approx([800, 2400])
    computing, waiting = upper.collections
    assert to_hex(waiting.get_facecolor()[0]) == ALARM
    assert to_hex(computing.get_facecolor()[0]) == series_style(0).color
    assert len(waiting.get_paths()) == 13
    words = " ".join(t.get_text() for t in (*upper.texts, *lower.texts)).replace("\xa0", " ")
    for part in ("waiting for data (66 %)", "computing", "CPU, 16 cores", "5 rounds", "float32"):
        assert part in words


@pytest.mark.parametrize("width_in", [3.2, 6.4])
def test_the_title_lies_within_the_figure_beside_long_names(width_in):
    profile = make_profile(remedies=(make_remedy("private thread pool", 2.0),))
    figure = Figure(figsize=(width_in, 4.2), layout="constrained")
    upper = plot_input_pipeline(profile, figure.add_subplot())
    figure.draw_without_rendering()
    words = (one for one in upper.get_children() if isinstance(one, Text))
    (title,) = (one for one in words if one.get_text().startswith("input-bound"))
    assert title.get_window_extent().x1 <= figure.bbox.x1
