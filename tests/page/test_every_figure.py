"""What holds for every public figure: in any Axes and at any width, described and readable."""

import matplotlib
import pytest
from figure_samples import SAMPLES, cut_texts, draw, text_overlaps
from matplotlib import pyplot
from matplotlib.figure import Figure

import kbatch
from kbatch.plotting.canvas import SMALL_PT, TEXT_PT, figure_bytes

COLUMN_IN, PAGE_IN = 3.4, 7.0
USUAL = [name for name in SAMPLES if " of many" not in name]


def test_there_is_a_sample_of_every_figure():
    plots = {name.removeprefix("plot_") for name in kbatch.__all__ if name.startswith("plot_")}
    assert {name.split()[0] for name in SAMPLES} == plots


@pytest.mark.parametrize(
    ("name", "width_in"),
    [
        *((name, COLUMN_IN) for name in SAMPLES),
        *(pytest.param(name, PAGE_IN, marks=pytest.mark.slow) for name in USUAL),
    ],
)
def test_no_text_covers_another_or_is_cut(name, width_in):
    axes = draw(name, width_in)
    figure = axes.get_figure(root=True)
    assert figure.get_figwidth() == width_in
    # For those who do not see it.
    assert len(axes.get_label().split()) > 5
    assert text_overlaps(figure) == []
    assert cut_texts(figure) == []


def plotted(name, ax=None):
    return getattr(kbatch, f"plot_{name}")(SAMPLES[name](), ax)


@pytest.mark.parametrize("name", USUAL)
def test_given_axes_are_used_beside_others_and_nothing_global_changes(name):
    before = dict(matplotlib.rcParams)
    figure = Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    assert plotted(name, left) is left
    figure.draw_without_rendering()
    ours = [axes for axes in figure.axes if axes is not right and axes.axison]
    assert max(axes.get_position().x1 for axes in ours) < right.get_position().x0
    free = Figure().add_axes((0.3, 0.3, 0.6, 0.6))
    assert plotted(name, free) is free
    free.figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("name", ["noise_scale", "trials"])
def test_the_same_data_give_the_same_bytes(name):
    first, second = (figure_bytes(plotted(name), ".svg") for _ in range(2))
    assert first == second


def test_the_overlap_of_two_texts_is_seen():
    axes = Figure().add_subplot()
    axes.text(0.5, 0.5, "one")
    axes.text(0.52, 0.5, "two")
    axes.text(0.95, 0.9, "a text that leaves the figure")
    assert text_overlaps(axes.figure) == [("one", "two")]
    assert cut_texts(axes.figure) == ["a text that leaves the figure"]


def test_texts_have_the_size_of_a_paper_at_every_width():
    assert (TEXT_PT, SMALL_PT) == (8, 7.5)
    figure = draw("trials", COLUMN_IN).get_figure(root=True)
    sizes = {text.get_fontsize() for axes in figure.axes for text in axes.texts}
    assert sizes <= {7.5, 8.0}
