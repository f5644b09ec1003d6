"""The figures of quality: by learning rate, against throughput, and over training."""

import dataclasses
import math

import numpy as np
import pytest
from figure_samples import OF_SEVERAL, panels, words
from figure_studies import learned, learned_study, rates_study
from records_factory import make_diverged, make_epochs, make_execution, make_study, make_trial

import kbatch
from kbatch.analysis.intervals import mean_interval
from kbatch.plotting.canvas import PAPER
from kbatch.study.figures.quality import learning_curves, pareto_points, rate_lines
from kbatch.study.trial import Objective

# Slow and good, fast and bad, one that is beaten by both, and one that is as fast and worse.
TRIALS = {16: (1000, 0.98), 64: (4000, 0.9), 32: (900, 0.89), 128: (4000, 0.8)}


def study(direction="max", **changed):
    objective = Objective("val_accuracy" if direction == "max" else "val_loss", direction)
    trials = [
        make_trial(size, objective=objective, rate=rate, accuracies=(value,), **changed)
        for size, (rate, value) in TRIALS.items()
    ]
    return make_study(*trials, make_trial(4096, status="out_of_memory"))


def test_rate_lines_separate_short_complete_and_diverged_runs():
    continued = [(rate, kind) for rate in (0.004, 0.008) for kind in ("short", "complete")]
    _, lines = rate_lines(rates_study())
    assert {key: [(rate, length) for rate, length, _ in line] for key, line in lines.items()} == {
        (32, ""): [(0.00025, "short"), (0.001, "short"), *continued],
        (128, ""): [(0.008, "complete"), (0.016, "short"), (0.064, "diverged")],
    }
    short, _, first, repeated, _, single = (value for *_, value in lines[32, ""])
    assert (first.value, first.ends) == (0.95, None)  # The first epochs of a complete run.
    assert (short.value, short.ends, single.value, single.ends) == (0.5, None, 0.9, None)
    assert repeated.ends == pytest.approx(mean_interval([0.95, 0.96, 0.97]).ends, abs=0.02)
    # Short and complete runs are separate points, and each dtype policy has a line.
    both = make_execution(32, accuracies=(0.2,), length="short"), make_execution(32)
    mixed = make_trial(32, make_execution(32, dtype_policy="float32"), trial_id="f")
    _, lines = rate_lines(make_study(make_trial(32, *both[::-1]), mixed))
    assert [text for _, text in lines] == ["mixed_float16", "float32"]
    tuned = [make_trial(32, trial_id=str(v), hyperparameters={"base_lr": v}) for v in (0.1, 0.2)]
    assert [*rate_lines(make_study(*tuned))[1]] == [(32, "")]
    assert [value.value for *_, value in lines[32, "mixed_float16"]] == [0.2, 0.935]


def test_rate_lines_leave_out_negative_rates():
    good, bad = make_trial(32), make_trial(64, learning_rate=-1.0)
    assert [size for size, _ in rate_lines(make_study(good, bad))[1]] == [32]


@pytest.mark.parametrize(("name", "edge"), [("val_accuracy", 0.04), ("val_loss", 0.96)])
def test_plot_learning_rates_marks(name, edge):
    found = rates_study(Objective(name, "max" if name == "val_accuracy" else "min"))
    panel, decided = kbatch.plot_learning_rates(found), found.decide()
    crosses = [line.get_xydata().tolist() for line in panel.lines if line.get_marker() == "X"]
    assert crosses == [[[0.064, edge]]]
    judged = decided.as_judged(decided.trial).judged().value
    (ring,) = [line for line in panel.lines if line.get_markersize() == 13]
    assert ring.get_xydata().tolist() == [[decided.learning_rate, pytest.approx(judged)]]
    assert "your rate, 0.001" in words(panel) and "diverged" in words(panel)
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == PAPER]
    assert [len(line.get_xdata()) for line in hollow] == [4, 1]


def test_plot_learning_rates_log_axis_of_loss():
    objective = Objective("val_loss", "min")
    values = {1e-3: 1.0, 1e-2: 0.9, 1.0: -39.0}  # The loss is 1.1 less the accuracy.
    trials = [
        make_trial(32, trial_id=str(rate), learning_rate=rate, accuracies=(v,), objective=objective)
        for rate, v in values.items()
    ]
    assert kbatch.plot_learning_rates(make_study(*trials)).get_yscale() == "log"
    assert kbatch.plot_learning_rates(make_study(*trials[:2])).get_yscale() == "linear"


@pytest.mark.parametrize(("direction", "edge"), [("max", 0), ("min", 1)])
def test_plot_pareto_steps_follow_front(direction, edge):
    panel = kbatch.plot_pareto(study(direction))
    (steps,) = [line for line in panel.lines if line.get_drawstyle() == "steps-pre"]
    # The loss is 1.1 less the accuracy, so the same trials are best.
    points = [(trial.batch_size, best) for trial, _, _, best in pareto_points(study(direction))[1]]
    assert points == [(32, False), (16, True), (64, True), (128, False)]
    xs, ys = list(steps.get_xdata()), list(steps.get_ydata())
    assert xs == pytest.approx([panel.get_xlim()[0], 1000, 4000, 4000])
    qualities = [value.value for *_, value, best in pareto_points(study(direction))[1] if best]
    assert ys == pytest.approx([qualities[0], *qualities, panel.get_ylim()[edge]])


def test_plot_pareto_axis_contains_bars():
    slow, fast = (
        make_trial(s, *(make_execution(s, rate=s * f, seed=n) for n, f in enumerate((30, 40, 50))))
        for s in (32, 64)
    )
    study = make_study(slow, fast)
    _, (*_, (_, rate, *_)) = pareto_points(study)
    assert 1.12 * rate.value < rate.high < kbatch.plot_pareto(study).get_xlim()[1]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0.5, 0.8, 0.9)], {1: 0.5, 2: 0.8, 3: 0.9}),
        # The mean is over the epochs that all runs have.
        ([(0.5, 0.8, 0.9), (0.6, 0.8), (0.4, 0.7, 0.8)], {1: 0.5, 2: 2.3 / 3}),
        ([(0.5, math.nan, 0.9, 0.9), (0.7, 0.1, 0.7, 0.9)], {1: 0.6, 3: 0.8, 4: 0.9}),
    ],
)
def test_learning_curves_accumulate_cost_and_average_runs(runs, expected):
    each = {"examples": 100, "updates": 4, "train_s": 0.25}
    executions = [make_execution(32, epochs=make_epochs(values, **each)) for values in runs]
    _, ((_, curve),) = learning_curves(make_study(make_trial(32, *executions)))
    assert [spent for spent, _ in curve] == [(4 * n, 100 * n, 0.25 * n) for n in expected]
    assert [value.value for _, value in curve] == pytest.approx(list(expected.values()))
    interval = mean_interval([values[0] for values in runs])
    assert curve[0][1].ends == (interval.ends if len(runs) > 2 else None)


@pytest.mark.parametrize("against", [None, "seconds"])
def test_plot_learning_curves_panels(against):
    axes = kbatch.plot_learning_curves(study := learned_study(sizes=(32, 256)), against=against)
    labels = ["Updates", "Training examples", "Training time (s)"]
    assert f"over {'training time' if against else 'training'}, by" in axes.get_label()
    assert [p.get_xlabel() for p in panels(axes)] == labels[2 if against else 0 :]
    points = learning_curves(study)[1][0][1]
    for panel in panels(axes):
        curve, place = panel.lines[0], labels.index(panel.get_xlabel())
        assert list(curve.get_xdata()) == [spent[place] for spent, _ in points]
        assert list(curve.get_ydata()) == [value.value for _, value in points]
        assert panel.get_xscale() == "log"
        assert panel.get_ylim() == axes.get_ylim()
    with pytest.raises(ValueError, match=r"updates, examples, seconds.*against='epochs'"):
        kbatch.plot_learning_curves(study, against="epochs")


def test_plot_learning_curves_axis_of_loss():
    losses = (0.01, 0.02), (0.5, 0.3), (0.9, 0.8)  # The intervals of their means include 0.
    runs = [make_execution(32, epochs=make_epochs([1.1 - v for v in run])) for run in losses]
    study = make_study(make_trial(32, *runs, objective=Objective("val_loss", "min")))
    panel = kbatch.plot_learning_curves(study, against="updates")
    low, high = panel.get_ylim()
    (band,) = panel.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert low < ends.min() == 0 < 1.41 / 3 < 1 < ends.max() < high


def test_figures_without_updates():
    study = make_study(make_trial(32, epochs=make_epochs((0.5, 0.9), updates=0)))
    names = [figure.name for figure in study.figures() if "learning" in figure.name]
    assert names == ["learning-curves-seconds"]


def test_plot_learning_curves_diverged_trial():
    diverged = make_diverged(512)
    epochs = (*learned(512).epochs[:3], *diverged.executions[0].epochs)
    execution = dataclasses.replace(diverged.executions[0], epochs=epochs)
    study = make_study(make_trial(32, learned(32)), make_trial(512, execution))
    axes = kbatch.plot_learning_curves(study)
    assert [line.get_marker() for line in axes.lines][3] == "X"
    assert len(learning_curves(study)[1][1][1]) == 3


@pytest.mark.parametrize("metric", ["val_accuracy", "val_loss"])
@pytest.mark.parametrize("plot", [getattr(kbatch, f"plot_{name}") for name in OF_SEVERAL])
def test_axes_contain_bars_and_marks(plot, metric):
    objective = Objective(metric, "max" if metric == "val_accuracy" else "min")
    trials = []
    for size, center in ((16, 0.7), (32, 0.72), (512, 0.71)):
        runs = [
            make_execution(
                size,
                rate=size * size * (10 + n),
                seed=n,
                learning_rate=1e-3 * size,
                epochs=make_epochs((center - 0.1 * n, center - 0.01 * n)),
            )
            for n in range(3)
        ]
        trials.append(make_trial(size, *runs, objective=objective))
    study = make_study(*trials)
    options = {"target": 0.6} if plot is kbatch.plot_time_to_target else {}
    for shown in (study, {"one": study, "other": study}):
        for panel in panels(plot(shown, **options)):
            (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
            paths = [path.vertices for c in panel.collections for path in c.get_paths()]
            lines = [line.get_xydata() for line in panel.lines if line.get_marker() != "None"]
            places = np.concatenate([*paths, *(line for line in lines if len(line))])
            assert len(places) > 6
            assert left < places[:, 0].min() <= places[:, 0].max() < right
            assert low < places[:, 1].min() <= places[:, 1].max() < high


def test_plot_learning_rates_names_sizes_of_studies():
    sizes, rates = (16, 64, 256), (1e-3, 3e-2)
    trials = [[make_trial(n, learning_rate=n * rate) for n in sizes] for rate in rates]
    one, other = (make_study(*row) for row in trials)
    panel = kbatch.plot_learning_rates({"one": one, "other": other})
    texts = sorted(t.get_text() for t in panel.texts if t.get_text().isdigit())
    assert texts == ["16", "16", "256", "256", "64", "64"]
    assert "Numbers: batch sizes." in panel.get_label()
