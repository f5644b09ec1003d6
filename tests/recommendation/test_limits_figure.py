import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from recommendation_factory import (
    SIZES,
    make_check,
    make_fit_times,
    make_memory,
    make_pilot,
    make_recommendation,
    make_timings,
)

import kbatch
from kbatch.plotting.palette import ALARM_TEXT
from kbatch.plotting.saving import figure_bytes
from kbatch.recommendation.figure import (
    PROGRESS,
    THROUGHPUT,
    WORTH,
    alt_text,
    limits_info,
    plot_limits,
)

NOTHING = {"timings": (), "memory": None, "pilot": None, "pipeline": None, "fit_times": ()}
CASES = [
    {},
    NOTHING,
    {"pilot": make_pilot(scatter=30.0)},
    {"timings": make_timings(300, fits=32), "memory": make_memory(40)},
    {"timings": make_timings()[:1]},
    {"input_rate": 15_000.0},
    {"noise_scale": 0.5},
    {"checks": (make_check(128, 260), make_check(64, 400, "lost"))},
    {"checks": ()},
    {"older": True},
]


def panels(recommendation, ax=None):
    upper = plot_limits(recommendation, ax)
    (lower,) = [a for a in upper.figure.axes if a is not upper]
    return upper, lower


def test_progress_is_throughput_times_worth():
    info = limits_info(make_recommendation())
    sizes, throughput, _ = zip(*info.curves[THROUGHPUT], strict=True)
    worth, progress = ([value for _, value, _ in info.curves[name]] for name in (WORTH, PROGRESS))
    assert sizes == tuple(SIZES)
    product = np.array(throughput) * worth
    np.testing.assert_allclose(progress, product / product.max())
    assert max(throughput) == 1
    assert progress[SIZES.index(info.batch_size)] == 1


@pytest.mark.parametrize("checks", [(), (make_check(128, 260), make_check(512, 130))])
def test_progress_is_drawn_of_trained_sizes_and_peaks_at_the_answer(checks):
    found = make_recommendation(n_half=800.0, noise_scale=60.0, checks=checks)
    info = limits_info(found)
    drawn = {size: value for size, value, _ in info.curves[PROGRESS]}
    assert list(drawn) == [32, *(check.batch_size for check in checks)]
    assert max(drawn, key=drawn.get) == found.batch_size == info.batch_size
    assert drawn[found.batch_size] == 1
    assert all(value > 0 for _, value, _ in info.curves[THROUGHPUT])
    for _, value, interval in (*info.curves[PROGRESS], *info.curves[WORTH]):
        assert interval.low <= value <= interval.high
    assert info.rows[2].size == found.critical.value


def test_the_rows_are_the_limits():
    info = limits_info(make_recommendation())
    rows = {row.name: row for row in info.rows}
    assert list(rows) == ["memory", "hardware saturation", "gradient noise", "input pipeline"]
    assert rows["memory"].size == 1437
    assert rows["hardware saturation"].size == pytest.approx(900, abs=1)
    noise = rows["gradient noise"]
    assert noise.interval.low < noise.size < noise.interval.high
    assert rows["input pipeline"].size is None
    assert rows["input pipeline"].words == "data keep up at every size"
    assert [name for name, row in rows.items() if row.binds] == ["gradient noise"]
    assert info.title == "Batch size 128 (64 and 256 may be as good): gradient noise binds"


def test_slow_data_have_a_place_on_the_axis():
    row = limits_info(make_recommendation(input_rate=50_000.0)).rows[-1]
    # The device makes as much from 100 examples on.
    assert row.size in (64, 128)
    assert row.words == f"the device waits from {row.size} on"
    slow = make_recommendation(fit_times=make_fit_times(input_rate=1e3, epoch_s=10.0))
    assert limits_info(slow).rows[-1].words == "the device waits at every size"


def test_what_cannot_be_told_is_said():
    info = limits_info(make_recommendation(**NOTHING, unknown={"memory": "no limit is known"}))
    assert (info.batch_size, set(info.curves.values())) == (None, {()})
    assert info.title == "Batch size: cannot tell"
    assert [row.known for row in info.rows] == [False] * 4
    assert info.rows[0].words == "cannot tell: no limit is known"
    vague = limits_info(make_recommendation(pilot=make_pilot(scatter=30.0), checks=()))
    assert vague.rows[2].words == "cannot tell: the noise scale is unresolved"
    older = limits_info(make_recommendation(older=True))
    assert (len(older.curves[THROUGHPUT]), older.curves[PROGRESS]) == (len(SIZES), ())
    assert older.batch_size == 128


def test_the_drawing_has_labels_units_and_the_choice():
    upper, lower = panels(make_recommendation())
    title = upper.get_title(loc="left").replace("\n", " ")
    assert title == "Batch size 128 (64 and 256 may be as good): gradient noise binds"
    assert lower.get_xlabel() == "Batch size (examples)"
    assert upper.get_ylabel() == "Share of the largest"
    names = [tick.get_text().replace("\n", " ") for tick in lower.get_yticklabels()]
    assert names == ["Memory", "Hardware saturation", "Gradient noise", "Input pipeline"]
    assert [tick.get_color() == ALARM_TEXT for tick in lower.get_yticklabels()] == [
        *(False, False, True, False)
    ]
    labels = [text.get_text() for text in upper.get_legend().get_texts()]
    assert labels == ["samples/s", "worth of an example", "progress a second"]
    for panel in (upper, lower):
        assert 128 in [line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2]
        assert panel.get_xscale() == "log"
    words = " ".join(text.get_text() for text in lower.texts).replace("\xa0", " ")
    for part in ("1,437 examples fit", "Adam", "CPU, 16 cores", "pilot of 1,000 updates"):
        assert part in words


def test_given_axes_are_used_and_global_settings_stay():
    before = dict(matplotlib.rcParams)
    figure = Figure()
    ax = figure.add_subplot()
    assert kbatch.plot_limits(make_recommendation(), ax) is ax
    assert len(figure.axes) == 2
    free = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    assert plot_limits(make_recommendation(), free) is free
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("changed", CASES)
def test_every_recommendation_can_be_drawn(changed):
    upper, lower = panels(make_recommendation(**changed))
    upper.figure.draw_without_rendering()
    assert len(lower.get_yticklabels()) == 4


def test_the_same_recommendation_gives_the_same_bytes():
    pictures = [figure_bytes(plot_limits(make_recommendation()), ".svg") for _ in range(2)]
    assert pictures[0] == pictures[1]


def test_the_description_tells_the_limits():
    words = alt_text(limits_info(make_recommendation()))
    assert words.startswith(
        "Batch size 128 (64 and 256 may be as good): gradient noise binds. Limits on"
    )
    assert "memory: 1,437 examples fit at once" in words


def test_a_pipeline_alone_tells_where_the_device_waits():
    older = make_recommendation(input_rate=5_000.0, fit_times=())
    assert limits_info(older).rows[-1].words == "the device waits at every size"
