"""Thousands of marks: those that cover each other are drawn once, and no other is left out."""

import numpy as np
import pytest
from records_factory import make_study, make_trial

from kbatch.plotting import draw
from kbatch.plotting.canvas import detached_axes
from kbatch.study.figures.trials import trials_info


def drawn(count, *, apart=1.0):
    """Draw marks in two heaps, and one that stands alone; return their places and their bars."""
    panel = detached_axes(3)
    rng = np.random.default_rng(0)
    values = [*(1 + 1e-6 * rng.random(count)), *(2 + 1e-6 * rng.random(count)), 1.5]
    places = [16.0] * count + [16.0 + apart] * count + [16.0]
    bounds = [(v - 0.1, v + 0.1) for v in values]
    draw.series(panel, 0, places, values, label="a", bounds=bounds, joined=False)
    (line,), (bars,) = panel.lines, panel.collections
    spans = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    return list(zip(*line.get_data(), strict=True)), spans


def test_marks_that_cover_each_other_are_drawn_once_with_one_bar():
    marks, spans = drawn(1000)
    np.testing.assert_allclose(sorted(marks), [(16, 1), (16, 1.5), (17, 2)], atol=1e-5)
    np.testing.assert_allclose(sorted(spans), [(0.9, 1.1), (1.4, 1.6), (1.9, 2.1)], atol=1e-5)


def test_a_bar_covers_all_those_that_it_stands_for():
    panel = detached_axes(3)
    lows = np.linspace(0, 0.5, 1000)
    draw.bars(panel, [1.0] * 1000, [(low, low + 1) for low in lows], "black")
    (segment,) = panel.collections[0].get_segments()
    np.testing.assert_allclose(segment[:, 1], (0, 1.5))


def test_of_a_few_hundred_marks_each_is_drawn():
    marks, spans = drawn(200)
    assert len(marks) == len(spans) == 401


@pytest.mark.parametrize("policies", [1, 2])
def test_the_note_stands_where_marks_of_a_series_are_so_many(policies):
    """Of 600 trials of one series some are left out, of two series of 300 none."""
    study = make_study(
        *(
            make_trial(
                16 * 2 ** (number % 4),
                trial_id=f"{number:04d}",
                hyperparameters={"rate": number},
                dtype_policy=("float32", "mixed_float16")[number % policies],
            )
            for number in range(600)
        )
    )
    info = trials_info(study)
    assert len(info.series) == policies
    assert (draw.COVERED_NOTE in info.notes) == (policies == 1)
