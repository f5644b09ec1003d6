"""What holds for every figure of a study, and of the result of a search for the largest batch."""

import functools
import itertools

import pytest
from figure_samples import cut_texts, text_overlaps, words
from figure_studies import (
    LONG_NAME,
    TARGET,
    gpu_study,
    learned_study,
    max_batch_result,
    target_study,
    tuned_study,
)
from matplotlib.figure import Figure
from records_factory import make_study, make_trial

import kbatch
from kbatch.plotting.canvas import detached_axes
from kbatch.study.figures import STUDY_FIGURES
from kbatch.study.study import Study

SAMPLES = {
    "trials": lambda: learned_study(3),
    "pareto": lambda: learned_study(3),
    "learning-curves": lambda: learned_study(3),
    "time-to-target": lambda: target_study(3),
    "noise-scale": lambda: learned_study(3),
    "gpu-timeline": gpu_study,
    "memory": max_batch_result,
}
OF_STUDIES = [name for name in SAMPLES if name in STUDY_FIGURES]


def plot(name, data, **arguments):
    return getattr(kbatch, "plot_" + name.replace("-", "_"))(data, **arguments)


@functools.cache
def drawn(name):
    """The axes of a sample, for tests that only read them."""
    return plot(name, SAMPLES[name]())


# What the usual samples, which are drawn as wide as a column elsewhere, do not hold.
SMALL = {
    "pareto": (make_study,),
    "learning-curves": (lambda: learned_study(sizes=(16, 64)), make_study),
    "time-to-target": (lambda: target_study(sizes=(256, 512)),),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_figures_can_be_read(name):
    """A report has them as wide as a telephone: nothing is cut, no tick label covers another."""
    for data in SMALL[name]:
        figure = plot(name, data(), ax=detached_axes(6, width_in=3.6)).figure
        assert cut_texts(figure) == []
        assert text_overlaps(figure) == []


@pytest.mark.parametrize("name", ["pareto", "learning-curves", "noise-scale"])
def test_two_hundred_trials_with_long_names_fit(name):
    axes = plot(name, tuned_study(200, name=LONG_NAME))
    assert cut_texts(axes.figure) == []
    assert LONG_NAME[:20] in words(axes)


@pytest.mark.parametrize("name", ["trials", "learning-curves"])
def test_axes_without_a_grid_are_split_into_panels_that_do_not_cover_each_other(name):
    figure = Figure()
    first = plot(name, learned_study(), ax=figure.add_axes((0.2, 0.2, 0.7, 0.7)))
    boxes = [axes.get_position() for axes in figure.axes if axes.axison]
    assert len(boxes) > 1 and first.figure is figure
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("name", SAMPLES)
def test_device_and_what_was_done_are_named(name):
    text = words(drawn(name))
    if name == "gpu-timeline":
        assert "Example GPU (GPU:0)" in text
        return
    assert "CPU, 16 cores · TensorFlow 2.21.0 · Keras 3.15.1 · mixed_float16" in text
    assert "7 runs" in text if name == "memory" else "budget: " in text


@pytest.mark.parametrize("name", SAMPLES)
def test_every_axis_has_a_label_with_its_unit(name):
    figure = drawn(name).figure
    labels = {axis.get_label_text() for a in figure.axes if a.axison for axis in (a.xaxis, a.yaxis)}
    labels -= {""}
    assert len(labels) >= 2
    units = ("samples/s", "examples", "0 to 1", "(s)", "%", "GiB", "W)", "Epoch", "Updates")
    assert [label for label in labels if not any(unit in label for unit in units)] == []


@pytest.mark.parametrize("name", OF_STUDIES)
def test_an_empty_study_says_what_to_run(name):
    with pytest.raises(ValueError, match=r"tuner\.search.*kbatch demo.*study\.trials=\(\)"):
        plot(name, Study("digits", ()))


@pytest.mark.parametrize("name", ["pareto", "learning-curves", "time-to-target"])
def test_a_study_in_which_all_failed_has_no_such_figure(name):
    study = make_study(make_trial(64, status="out_of_memory", target=TARGET))
    with pytest.raises(ValueError, match=r"needs .*No trial completed: 1 out of memory"):
        plot(name, study)


@pytest.mark.parametrize("name", OF_STUDIES)
def test_one_trial_is_enough(name):
    study = {"time-to-target": target_study(sizes=(16,), missed=()), "gpu-timeline": gpu_study()}
    one = study.get(name, learned_study(sizes=(64,)))
    one = make_study(next(trial for trial in one.trials if trial.status == "completed"))
    assert cut_texts(plot(name, one).figure) == []


@pytest.mark.parametrize("name", [name for name in OF_STUDIES if name != "gpu-timeline"])
def test_a_trial_without_a_result_is_visible(name):
    assert "out of memory" in words(drawn(name))
