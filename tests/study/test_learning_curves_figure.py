import dataclasses

import pytest
from figure_studies import learned, learned_study, tuned_study
from matplotlib.text import Text
from records_factory import make_diverged, make_epochs, make_execution, make_study, make_trial

from kbatch.analysis.intervals import mean_interval
from kbatch.plotting.palette import ordered_color
from kbatch.study.figures.learning_curves import learning_curves, plot_learning_curves


def panels(axes):
    return [a for a in axes.figure.axes if a.axison]


def test_a_curve_sums_up_what_was_spent():
    epochs = make_epochs((0.5, 0.8, 0.9), examples=100, updates=4, train_s=0.25)
    _, (curve,) = learning_curves(make_study(make_trial(32, epochs=epochs)))
    assert [p.updates for p in curve.points] == [4, 8, 12]
    assert [p.examples for p in curve.points] == [100, 200, 300]
    assert [p.seconds for p in curve.points] == pytest.approx([0.25, 0.5, 0.75])
    assert [p.value for p in curve.points] == [0.5, 0.8, 0.9]
    assert curve.points[0].bar is None


def test_executions_are_averaged_as_far_as_all_of_them_go():
    runs = [(0.5, 0.8, 0.9), (0.6, 0.8), (0.4, 0.7, 0.8)]
    executions = [make_execution(32, epochs=make_epochs(values)) for values in runs]
    _, (curve,) = learning_curves(make_study(make_trial(32, *executions)))
    points = curve.points
    assert [p.value for p in points] == pytest.approx([0.5, 2.3 / 3])
    interval = mean_interval([0.5, 0.6, 0.4])
    assert points[0].bar == pytest.approx((interval.low, interval.high))


def test_each_batch_size_shows_its_best_trial():
    study = tuned_study(60)
    _, curves = learning_curves(study)
    best = {}
    for trial in study.trials:
        if trial.status == "completed":
            old = best.get(trial.batch_size)
            if old is None or trial.objective_value > old.objective_value:
                best[trial.batch_size] = trial
    assert {c.batch_size: c.trial_id for c in curves} == {
        size: trial.trial_id for size, trial in best.items()
    }
    texts = [t.get_text() for t in plot_learning_curves(study).figure.findobj(Text)]
    (caption,) = [" ".join(text.split()) for text in texts if "Shown" in text]
    assert f"each batch size, {len(best)} of 60 trials" in caption


def test_three_panels_show_the_same_values_against_what_was_spent():
    study = learned_study(sizes=(32, 256))
    axes = plot_learning_curves(study)
    found = panels(axes)
    assert [a.get_xlabel() for a in found] == ["Updates", "Training examples", "Training time (s)"]
    points = learning_curves(study)[1][0].points
    for panel, spent in zip(found, ("updates", "examples", "seconds"), strict=True):
        curve = panel.lines[0]
        assert list(curve.get_xdata()) == [getattr(p, spent) for p in points]
        assert list(curve.get_ydata()) == [p.value for p in points]
        assert panel.get_xscale() == "log"
        assert panel.get_shared_y_axes().joined(panel, axes)


def test_one_panel_can_be_asked_for():
    axes = plot_learning_curves(learned_study(), against="seconds")
    assert [a.get_xlabel() for a in panels(axes)] == ["Training time (s)"]
    with pytest.raises(ValueError, match=r"updates, examples, seconds.*against='epochs'"):
        plot_learning_curves(learned_study(), against="epochs")


def test_colours_are_in_the_order_of_the_batch_sizes_and_marks_differ():
    axes = plot_learning_curves(learned_study(sizes=(16, 64, 1024)))
    legend = axes.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["16", "64", "1,024"]
    handles = legend.legend_handles
    assert [h.get_color() for h in handles] == [ordered_color(share) for share in (0, 1 / 3, 1)]
    assert len({h.get_marker() for h in handles}) == 3


def test_colours_grow_darker_with_the_batch_size():
    def lightness(color):
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), color, strict=True))

    shades = [lightness(ordered_color(share / 10)) for share in range(11)]
    assert shades == sorted(shades, reverse=True)
    assert shades[0] < 0.75


def test_a_diverged_trial_ends_with_a_cross():
    diverged = make_diverged(512)
    epochs = (*learned(512).epochs[:3], *diverged.executions[0].epochs)
    execution = dataclasses.replace(diverged.executions[0], epochs=epochs)
    study = make_study(make_trial(32, learned(32)), make_trial(512, execution))
    axes = plot_learning_curves(study)
    assert [line.get_marker() for line in axes.lines][3] == "X"
    assert len(learning_curves(study)[1][1].points) == 3


def test_a_study_without_epochs_says_so():
    study = make_study(make_trial(64, epochs=(), reported={"val_accuracy": 1.0}))
    with pytest.raises(ValueError, match=r"epochs with a metric.*Trials completed without them"):
        learning_curves(study)
