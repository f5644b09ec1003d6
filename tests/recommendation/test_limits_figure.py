import numpy as np
import pytest
from recommendation_factory import (
    NOTHING,
    SIZES,
    make_pilot,
    make_recommendation,
)

from kbatch.plotting.palette import ALARM_TEXT
from kbatch.recommendation.figure import PROGRESS, THROUGHPUT, WORTH, limit_curves, plot_limits


def panels(recommendation, ax=None):
    upper = plot_limits(recommendation, ax)
    (lower,) = [a for a in upper.figure.axes if a is not upper]
    return upper, lower


def test_progress_is_throughput_times_worth():
    found = make_recommendation()
    curves = limit_curves(found)
    throughput, worth, progress = (
        [value for value, _ in curves[name].values()] for name in (THROUGHPUT, WORTH, PROGRESS)
    )
    assert all(tuple(curve) == tuple(SIZES) for curve in curves.values())
    product = np.array(throughput) * worth
    np.testing.assert_allclose(progress, product / product.max())
    assert max(throughput) == worth[0] == 1
    assert progress[SIZES.index(found.batch_size)] >= 1 / 1.05
    for value, (low, high) in curves[WORTH].values():
        assert low <= value <= high


def test_without_a_noise_scale_throughput_is_drawn_alone():
    curves = limit_curves(make_recommendation(pilot=make_pilot(scatter=30.0)))
    assert len(curves[THROUGHPUT]) == len(SIZES)
    assert curves[WORTH] == curves[PROGRESS] == {}
    nothing = make_recommendation(**NOTHING)
    assert not any(limit_curves(nothing).values())
    assert plot_limits(nothing).get_title(loc="left") == "Batch size: cannot tell"


def test_the_limits_have_their_places_on_the_axis():
    found = make_recommendation()
    rows = {limit.name: limit for limit in found.limits}
    assert list(rows) == ["memory", "hardware saturation", "gradient noise", "input pipeline"]
    assert rows["memory"].begins.value == 1437
    assert rows["hardware saturation"].begins.value == pytest.approx(900, abs=1)
    noise = rows["gradient noise"].begins
    assert noise.low < noise.value < noise.high
    assert rows["input pipeline"].begins.value is None
    # The device makes as much from 100 examples on.
    slow = make_recommendation(input_rate=50_000.0).limits[-1]
    assert slow.begins.value == 128
    assert all(limit.begins for limit in found.limits)
    assert not any(limit.begins for limit in make_recommendation(**NOTHING).limits)


def test_the_drawing_has_labels_units_the_start_and_the_range():
    found = make_recommendation()
    upper, lower = panels(found)
    title = upper.get_title(loc="left").replace("\n", " ")
    assert title == f"Start with batch size {found.batch_size}: gradient noise binds"
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
        lines = [line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2]
        assert found.batch_size in lines
        assert panel.get_xscale() == "log"
        ends = [patch.get_bbox().intervalx.tolist() for patch in panel.patches]
        assert [found.batch_sizes[0], found.batch_sizes[-1]] in ends
    words = " ".join(text.get_text() for text in lower.texts).replace("\xa0", " ")
    for part in ("1,437 examples or more", "Adam", "CPU, 16 cores", "pilot of 1,000 updates"):
        assert part in words
    described = upper.get_label()
    assert described.startswith(f"{title}. Limits on a common batch axis: memory: 1,437 examples")
