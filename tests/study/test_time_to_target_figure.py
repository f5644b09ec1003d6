import numpy as np
import pytest
from figure_samples import two_panels, words
from figure_studies import TARGET, learned_study, target_study, to_target
from records_factory import make_epochs, make_study, make_trial

from kbatch import plot_time_to_target
from kbatch.analysis.goodput import fit_steps_to_target
from kbatch.records.training_run import Target, epochs_to_target
from kbatch.study.figures.efficiency import fitted, target_of, target_points


def updates_to_target(run):
    needed = epochs_to_target(TARGET, run.epochs)
    return needed and updates_of(needed)


def updates_of(epochs):
    return sum(epoch.updates for epoch in epochs)


def test_target_points_are_costs_of_records():
    study = target_study()
    points = target_points(study, TARGET)
    met = {trial.batch_size: trial for trial in study.trials if trial.seconds_to_target}
    assert {size for size, (reached, _) in points.items() if reached} == set(met)
    for size, trial in met.items():
        (epochs,) = points[size][1]
        assert updates_of(epochs) == trial.mean(updates_to_target)
        assert sum(one.train_s for one in epochs) == pytest.approx(trial.seconds_to_target)


def test_fitted_uses_all_runs():
    study = target_study(3)
    fit, text = fitted(target_points(study, TARGET))
    costs = [(t.batch_size, updates_to_target(e)) for t in study.trials for e in t.executions]
    sizes, updates = zip(*((b, u) for b, u in costs if u is not None), strict=True)
    expected = fit_steps_to_target(sizes, updates)
    assert fit.fewest_steps == expected.fewest_steps
    assert fit.critical_batch_size == expected.critical_batch_size
    assert f"critical batch size: {expected.critical_batch_size.value:.0f} (" in text
    _, lower = two_panels(plot_time_to_target(study))
    curve = next(line for line in lower.lines if len(line.get_xdata()) == 100)
    x, y = np.asarray(curve.get_xdata(), float), np.asarray(curve.get_ydata(), float)
    np.testing.assert_allclose(y, fit.fewest_steps + fit.fewest_examples / x)
    assert f"B_crit {fit.critical_batch_size.value:,.0f}" in words(lower)
    decided, (ring,) = study.decide(), [line for line in lower.lines if line.get_ms() == 13]
    updates = study.to_dataframe().set_index("batch_size")["updates"]
    assert decided.batch_size == ring.get_xdata()[0] in updates
    assert f"the answer, batch size {decided.batch_size:,}" in words(lower)


def test_target_of_record_or_argument():
    study = target_study()
    assert target_of(study, None) == TARGET
    easy = target_of(study, 0.5)
    assert easy == Target("val_accuracy", 0.5, "max")
    assert updates_of(target_points(study, easy)[4][1][0]) == 360
    assert any(met for met, _ in target_points(learned_study(), easy).values())


def test_plot_time_to_target_without_target():
    with pytest.raises(ValueError, match=r"target=0\.95.*StopAtTarget.*target=None.*no target"):
        plot_time_to_target(learned_study())


def test_plot_time_to_target_missed_size_is_hollow():
    axes, lower = two_panels(plot_time_to_target(target_study()))
    for panel in (axes, lower):
        assert "not met" in words(panel)
        hollow = [line for line in panel.lines if line.get_markerfacecolor() == "#ffffff"]
        assert [line.get_xdata()[0] for line in hollow] == [2048]
    assert "out of memory" in words(lower)


def test_target_points_one_run_missed():
    executions = (to_target(64, 100), to_target(64, 0, met=False, epochs=9))
    met, (epochs,) = target_points(make_study(make_trial(64, *executions)), TARGET)[64]
    assert (met, updates_of(epochs)) == (False, 9 * 23)


def test_target_points_without_updates():
    epochs = [make_epochs((0.95,), updates=count) for count in (0, 20)]
    study = make_study(*(make_trial(16 << i, epochs=epochs[i], target=TARGET) for i in (0, 1)))
    assert list(target_points(study, TARGET)) == [32]
    _, lower = two_panels(plot_time_to_target(study))
    assert "no updates" in words(lower)
    # If marks are too close to each other, the reasons are in the caption.
    near = [make_trial(size, epochs=epochs[0], target=TARGET) for size in range(60, 76, 2)]
    _, lower = two_panels(plot_time_to_target(make_study(*study.trials, *near)))
    assert "batch size 16 (no updates), 60 (no updates)" in words(lower)


def test_plot_time_to_target_perfect_scaling():
    axes, lower = two_panels(plot_time_to_target(target_study(sizes=(16, 64, 256), missed=())))
    for panel, first in ((axes, None), (lower, 360)):
        (line,) = [line for line in panel.lines if line.get_linestyle() == "--"]
        (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
        assert (x0, x1) == (16, 256)
        assert y0 * x0 == pytest.approx(y1 * x1)
        assert first is None or y0 == first
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
