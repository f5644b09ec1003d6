"""The figures of quality: by learning rate, against throughput, and over training."""

import dataclasses
import math

import pytest
from figure_samples import panels, words
from figure_studies import learned, learned_study, rates_study
from records_factory import make_diverged, make_epochs, make_execution, make_study, make_trial

from kbatch.analysis.intervals import mean_interval
from kbatch.plotting.canvas import PAPER
from kbatch.study.figures.quality import (
    learning_curves,
    pareto_points,
    plot_learning_curves,
    plot_learning_rates,
    plot_pareto,
    rate_lines,
)
from kbatch.study.trial import Objective

# Fast and bad, slow and good, one that both beat, and one that is as fast and worse.
TRIALS = {16: (1000, 0.98), 64: (4000, 0.9), 32: (900, 0.89), 128: (4000, 0.8)}


def study(direction="max", **changed):
    objective = Objective("val_accuracy" if direction == "max" else "val_loss", direction)
    return make_study(
        *(
            make_trial(size, objective=objective, rate=rate, accuracies=(value,), **changed)
            for size, (rate, value) in TRIALS.items()
        ),
        make_trial(4096, status="out_of_memory"),
    )


def test_rate_lines_keep_short_complete_and_diverged_runs_apart():
    _, lines = rate_lines(rates_study())
    assert {key: [(rate, length) for rate, length, _ in line] for key, line in lines.items()} == {
        (32, ""): [(0.00025, "short"), (0.001, "short"), (0.004, "complete"), (0.008, "complete")],
        (128, ""): [(0.008, "complete"), (0.016, "short"), (0.064, "diverged")],
    }
    short, _, repeated, single = (value for *_, value in lines[32, ""])
    assert (short.value, short.ends, single.value, single.ends) == (0.5, None, 0.9, None)
    assert repeated.ends == pytest.approx(mean_interval([0.95, 0.96, 0.97]).ends, abs=0.02)
    # Short runs do not count where complete ones do, and each dtype policy has a line.
    both = make_execution(32, accuracies=(0.2,), length="short"), make_execution(32)
    mixed = make_trial(32, make_execution(32, dtype_policy="float32"), trial_id="f")
    _, lines = rate_lines(make_study(make_trial(32, *both[::-1]), mixed))
    assert [text for _, text in lines] == ["mixed_float16", "float32"]
    tuned = [make_trial(32, trial_id=str(v), hyperparameters={"base_lr": v}) for v in (0.1, 0.2)]
    assert [*rate_lines(make_study(*tuned))[1]] == [(32, "")]
    assert [value.value for *_, value in lines[32, "mixed_float16"]] == [0.2, 0.935]


def test_rate_lines_leave_out_rates_that_have_no_logarithm():
    good, bad = make_trial(32), make_trial(64, learning_rate=-1.0)
    assert [size for size, _ in rate_lines(make_study(good, bad))[1]] == [32]


@pytest.mark.parametrize(("name", "edge"), [("val_accuracy", 0.04), ("val_loss", 0.96)])
def test_plot_learning_rates_marks_the_answer_the_given_rate_and_what_diverged(name, edge):
    found = rates_study(Objective(name, "max" if name == "val_accuracy" else "min"))
    panel, decided = plot_learning_rates(found), found.decide()
    crosses = [line.get_xydata().tolist() for line in panel.lines if line.get_marker() == "X"]
    assert crosses == [[[0.064, edge]]]
    judged = decided.as_judged(decided.trial).judged().value
    (ring,) = [line for line in panel.lines if line.get_markersize() == 13]
    assert ring.get_xydata().tolist() == [[decided.learning_rate, pytest.approx(judged)]]
    assert "your rate, 0.001" in words(panel) and "diverged" in words(panel)
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == PAPER]
    assert [len(line.get_xdata()) for line in hollow] == [2, 1]


def test_plot_learning_rates_has_a_logarithmic_loss_if_one_rate_is_far_too_high():
    objective = Objective("val_loss", "min")
    values = {1e-3: 1.0, 1e-2: 0.9, 1.0: -39.0}  # The loss is 1.1 less the accuracy.
    trials = [
        make_trial(32, trial_id=str(rate), learning_rate=rate, accuracies=(v,), objective=objective)
        for rate, v in values.items()
    ]
    assert plot_learning_rates(make_study(*trials)).get_yscale() == "log"
    assert plot_learning_rates(make_study(*trials[:2])).get_yscale() == "linear"


@pytest.mark.parametrize(("direction", "edge"), [("max", 0), ("min", 1)])
def test_the_steps_bound_what_some_trial_beats(direction, edge):
    panel = plot_pareto(study(direction))
    (steps,) = [line for line in panel.lines if line.get_drawstyle() == "steps-pre"]
    # The loss is 1.1 less the accuracy: the same trials are best.
    points = [(trial.batch_size, best) for trial, _, _, best in pareto_points(study(direction))[1]]
    assert points == [(32, False), (16, True), (64, True), (128, False)]
    xs, ys = list(steps.get_xdata()), list(steps.get_ydata())
    assert xs == pytest.approx([panel.get_xlim()[0], 1000, 4000, 4000])
    qualities = [value.value for *_, value, best in pareto_points(study(direction))[1] if best]
    assert ys == pytest.approx([qualities[0], *qualities, panel.get_ylim()[edge]])


def test_bars_of_throughput_end_within_the_axis():
    runs = [make_execution(64, rate=rate, accuracies=(0.9,)) for rate in (1500.0, 2000.0, 2500.0)]
    fast = make_trial(64, *runs)
    panel = plot_pareto(make_study(make_trial(32, rate=900.0), fast))
    assert 1.12 * fast.throughput.value < fast.throughput.high < panel.get_xlim()[1]


def test_a_curve_sums_up_what_was_spent():
    epochs = make_epochs((0.5, 0.8, 0.9), examples=100, updates=4, train_s=0.25)
    _, ((_, curve),) = learning_curves(make_study(make_trial(32, epochs=epochs)))
    assert [spent for spent, _ in curve] == [(4, 100, 0.25), (8, 200, 0.5), (12, 300, 0.75)]
    assert [value.value for _, value in curve] == [0.5, 0.8, 0.9]
    assert curve[0][1].ends is None


def test_executions_are_averaged_as_far_as_all_of_them_go():
    runs = [(0.5, 0.8, 0.9), (0.6, 0.8), (0.4, 0.7, 0.8)]
    executions = [make_execution(32, epochs=make_epochs(values)) for values in runs]
    _, ((_, curve),) = learning_curves(make_study(make_trial(32, *executions)))
    assert [value.value for _, value in curve] == pytest.approx([0.5, 2.3 / 3])
    assert curve[0][1] == mean_interval([0.5, 0.6, 0.4])


def test_an_epoch_that_one_execution_has_no_value_of_is_left_out_for_all():
    runs = [(0.5, math.nan, 0.9, 0.9), (0.7, 0.1, 0.7, 0.9)]
    executions = [make_execution(32, epochs=make_epochs(values, updates=10)) for values in runs]
    _, ((_, curve),) = learning_curves(make_study(make_trial(32, *executions)))
    found = [(spent[0], value.value) for spent, value in curve]
    assert found == [(10, pytest.approx(0.6)), (30, pytest.approx(0.8)), (40, pytest.approx(0.9))]


def test_three_panels_show_the_same_values_against_what_was_spent():
    study = learned_study(sizes=(32, 256))
    axes = plot_learning_curves(study)
    found = panels(axes)
    assert [a.get_xlabel() for a in found] == ["Updates", "Training examples", "Training time (s)"]
    points = learning_curves(study)[1][0][1]
    for place, panel in enumerate(found):
        curve = panel.lines[0]
        assert list(curve.get_xdata()) == [spent[place] for spent, _ in points]
        assert list(curve.get_ydata()) == [value.value for _, value in points]
        assert panel.get_xscale() == "log"
        assert panel.get_ylim() == axes.get_ylim()


def test_plot_learning_curves_of_a_loss_ends_where_the_means_do():
    losses = (0.01, 0.02), (0.5, 0.3), (0.9, 0.8)  # Their intervals reach below zero.
    runs = [make_execution(32, epochs=make_epochs([1.1 - v for v in run])) for run in losses]
    study = make_study(make_trial(32, *runs, objective=Objective("val_loss", "min")))
    panel = plot_learning_curves(study, against="updates")
    low, high = panel.get_ylim()
    assert 0 < low < 1.12 / 3 < 1.41 / 3 < high < 0.6
    (band,) = panel.collections
    assert band.get_paths()[0].vertices[:, 1].min() == 0


def test_one_panel_can_be_asked_for():
    axes = plot_learning_curves(learned_study(), against="seconds")
    assert [a.get_xlabel() for a in panels(axes)] == ["Training time (s)"]
    with pytest.raises(ValueError, match=r"updates, examples, seconds.*against='epochs'"):
        plot_learning_curves(learned_study(), against="epochs")


def test_a_report_has_no_curves_over_updates_where_none_were_made():
    study = make_study(make_trial(32, epochs=make_epochs((0.5, 0.9), updates=0)))
    names = [figure.name for figure in study.figures() if "learning" in figure.name]
    assert names == ["learning-curves-seconds"]


def test_a_diverged_trial_ends_with_a_cross():
    diverged = make_diverged(512)
    epochs = (*learned(512).epochs[:3], *diverged.executions[0].epochs)
    execution = dataclasses.replace(diverged.executions[0], epochs=epochs)
    study = make_study(make_trial(32, learned(32)), make_trial(512, execution))
    axes = plot_learning_curves(study)
    assert [line.get_marker() for line in axes.lines][3] == "X"
    assert len(learning_curves(study)[1][1][1]) == 3
