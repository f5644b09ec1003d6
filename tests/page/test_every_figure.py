"""All public figures: any Axes, any width, a description, readable texts."""

import functools
import itertools
import re

import matplotlib
import pytest
from figure_samples import SAMPLES, cut_texts, draw, several, shown_texts, text_overlaps, words
from figure_studies import TARGET, gpu_study, learned_study, target_study, timed, tuned_study
from matplotlib import pyplot
from matplotlib.figure import Figure
from records_factory import make_study, make_trial

import kbatch
from kbatch.cli.main import STUDY_FIGURES
from kbatch.plotting.canvas import figure_bytes
from kbatch.study.study import Study

COLUMN_IN, PAGE_IN, SLOW = 3.4, 7.0, pytest.mark.slow
USUAL = [name for name in SAMPLES if " of many" not in name]
OF_STUDIES = [name.replace("-", "_") for name in STUDY_FIGURES]


def plot(name, data, ax=None, **options):
    return getattr(kbatch, f"plot_{name}")(data, ax, **options)


def test_samples_cover_every_figure():
    plots = {name.removeprefix("plot_") for name in kbatch.__all__ if name.startswith("plot_")}
    assert {name.split()[0] for name in SAMPLES} == plots


@pytest.mark.parametrize(
    ("name", "width_in"),
    [
        *((name, COLUMN_IN) for name in SAMPLES),
        *(pytest.param(name, PAGE_IN, marks=SLOW) for name in USUAL),
    ],
)
def test_figure_texts_do_not_overlap(name, width_in):
    axes = draw(name, width_in)
    figure = axes.get_figure(root=True)
    assert figure.get_figwidth() == width_in
    assert len(axes.get_label().split()) > 5  # The description of the figure.
    boxes = shown_texts(figure)
    assert text_overlaps(boxes) == []
    assert cut_texts(figure, boxes) == []
    if "studies" in name:  # Their names are whole.
        legend = " ".join(text.get_text() for text in axes.get_legend().get_texts())
        assert all(each in " ".join(legend.split()) for each in SAMPLES[name]())
    # All thousands have a comma.
    assert not re.search(r"(?<![\d.,])\d{4,}", " ".join(text.get_text() for text in boxes))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width_in", [3.4, *(pytest.param(w, marks=SLOW) for w in (6.0, 10.0))])
def test_figure_of_given_size_has_room_for_its_texts(name, width_in):
    figure = Figure(figsize=(width_in, 2.6 if width_in < 6 else 4.0), layout="constrained")
    few = "studies" in name and width_in < 6  # The names of five studies need more height.
    plot(
        name.split()[0],
        several(name.split()[0], 3) if few else SAMPLES[name](),
        figure.add_subplot(),
    )
    boxes, shown = shown_texts(figure), [axes for axes in figure.axes if axes.axison]
    assert (text_overlaps(boxes), cut_texts(figure, boxes)) == ([], [])
    assert min(axes.get_position().height for axes in shown) * figure.get_figheight() > 0.2


@pytest.mark.parametrize("name", SAMPLES)
def test_figure_caption(name):
    plotted = functools.partial(plot, name.split()[0], SAMPLES[name]())
    (caption,) = (axes := plotted()).figure.texts
    assert "digits" not in axes.get_title(loc="left")  # The name of the study is not in the title.
    _, *lines = axes.get_label().split("\n")
    said = caption.get_text().replace("\N{NO-BREAK SPACE}", " ")
    assert said.split() == " ".join(lines).replace("`", "").split()  # No note is left out.
    assert 1 <= len(said.split("\n")) <= 6
    if name in USUAL:
        assert plotted(caption=False).figure.texts == []
        assert plotted(Figure().add_subplot()).figure.texts == []


@pytest.mark.parametrize("name", USUAL)
def test_figure_in_given_axes(name):
    before = dict(matplotlib.rcParams)
    figure = Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    assert plot(name, SAMPLES[name](), left) is left
    figure.draw_without_rendering()
    ours = [axes for axes in figure.axes if axes is not right and axes.axison]
    assert max(axes.get_position().x1 for axes in ours) < right.get_position().x0
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []
    if len(ours) > 1:  # Panels in Axes without a grid do not overlap either.
        free = Figure().add_axes((0.3, 0.3, 0.6, 0.6))
        assert plot(name, SAMPLES[name](), free) is free
        boxes = [axes.get_position() for axes in free.figure.axes if axes.axison]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        free.figure.draw_without_rendering()


@pytest.mark.parametrize("name", [*OF_STUDIES, "memory"])
def test_figure_names_device_units_and_failures(name):
    axes = plot(name, SAMPLES[name]())
    text, figure = words(axes), axes.get_figure(root=True)
    if name == "gpu_timeline":
        assert "Example GPU (GPU:0)" in text
    else:
        assert "CPU, 16 cores · TensorFlow 2.21.0 · Keras 3.15.1 · mixed_float16" in text
        assert re.search(r"7 runs" if name == "memory" else r"trials? of \d.* (epoch|until)", text)
        assert "out of memory" in text
    labels = {axis.get_label_text() for a in figure.axes if a.axison for axis in (a.xaxis, a.yaxis)}
    labels -= {""}
    assert len(labels) >= 2
    units = ("samples/s", "examples", "0 to 1", "(s)", "%", "GiB", "W)", "Epoch", "Updates", "rate")
    assert [label for label in labels if not any(unit in label for unit in units)] == []


@pytest.mark.parametrize("name", OF_STUDIES)
def test_figure_of_one_trial_and_of_an_empty_study(name):
    given = {"time_to_target": target_study(sizes=(16,), missed=()), "gpu_timeline": gpu_study()}
    given["search"] = timed(learned_study(sizes=(64,)))
    one = given.get(name, learned_study(sizes=(64,)))
    one = make_study(next(trial for trial in one.trials if trial.status == "completed"))
    assert cut_texts(plot(name, one).figure) == []
    with pytest.raises(ValueError, match=r"tuner\.search.*kbatch demo.*study\.trials=\(\)"):
        plot(name, Study("digits", ()))


@pytest.mark.parametrize("name", ["pareto", "learning_curves", "learning_rates", "time_to_target"])
def test_figure_of_a_study_without_completed_trials(name):
    study = make_study(make_trial(64, status="out_of_memory", target=TARGET))
    with pytest.raises(ValueError, match=r"needs .*No trial completed: 1 out of memory"):
        plot(name, study)


@pytest.mark.parametrize("name", ["pareto", "learning_curves", "noise_scale"])
def test_figure_of_200_trials(name):
    assert cut_texts(plot(name, tuned_study(200)).figure) == []


@pytest.mark.parametrize("name", [pytest.param("noise_scale", marks=pytest.mark.slow), "trials"])
def test_figure_bytes_are_reproducible(name):
    first, second = (figure_bytes(plot(name, SAMPLES[name]()), ".svg") for _ in range(2))
    assert first == second
