"""Every figure as wide as a column, and as a page: described, and no text covered or cut."""

import matplotlib
import pytest
from figure_samples import SAMPLES, cut_texts, draw, text_overlaps
from figure_studies import learned_study
from matplotlib.figure import Figure

import kbatch
from kbatch.plotting.canvas import SMALL_PT, TEXT_PT

COLUMN_IN, PAGE_IN = 3.4, 7.0


def test_there_is_a_sample_of_every_figure():
    plots = {name.removeprefix("plot_") for name in kbatch.__all__ if name.startswith("plot_")}
    assert {name.split()[0] for name in SAMPLES} == plots


@pytest.mark.parametrize(
    ("name", "width_in"),
    [
        *((name, COLUMN_IN) for name in SAMPLES),
        *(
            pytest.param(name, PAGE_IN, marks=pytest.mark.slow)
            for name in SAMPLES
            if " of many" not in name
        ),
    ],
)
def test_no_text_covers_another_or_is_cut(name, width_in):
    before = dict(matplotlib.rcParams)
    axes = draw(name, width_in)
    figure = axes.get_figure(root=True)
    assert figure.get_figwidth() == width_in
    # For those who do not see it.
    assert len(axes.get_label().split()) > 5
    assert text_overlaps(figure) == []
    assert cut_texts(figure) == []
    assert dict(matplotlib.rcParams) == before


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


def test_panels_of_a_narrow_figure_stay_as_high_as_those_of_a_usual_one():
    usual, narrow = kbatch.plot_pareto(learned_study(3)), draw("pareto", COLUMN_IN)
    heights = []
    for axes in (usual, narrow):
        figure = axes.get_figure(root=True)
        figure.draw_without_rendering()
        heights.append(figure.get_figheight() * axes.get_position().height)
    assert heights[1] > 0.9 * heights[0]
