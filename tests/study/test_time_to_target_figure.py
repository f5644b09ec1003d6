import numpy as np
import pytest
from figure_samples import two_panels, words
from figure_studies import TARGET, learned_study, target_study, to_target
from records_factory import make_epochs, make_study, make_trial

from kbatch.analysis.goodput import fit_steps_to_target
from kbatch.records.training_run import Target, epochs_to_target
from kbatch.study.figures.time_to_target import (
    fitted,
    plot_time_to_target,
    target_of,
    target_points,
)


def updates_to_target(run):
    needed = epochs_to_target(TARGET, run.epochs)
    return needed and sum(epoch.updates for epoch in needed)


def test_the_points_are_the_costs_in_the_records():
    study = target_study()
    points = target_points(study, TARGET)
    met = {trial.batch_size: trial for trial in study.trials if trial.seconds_to_target}
    assert {p.batch_size for p in points if p.met} == set(met)
    for point in (point for point in points if point.met):
        trial = met[point.batch_size]
        assert point.updates.value == trial.mean(updates_to_target)
        assert point.seconds.value == pytest.approx(trial.seconds_to_target)


def test_the_fit_is_that_of_every_execution_and_names_the_critical_batch_size():
    study = target_study(3)
    fit, text = fitted(target_points(study, TARGET))
    costs = [(t.batch_size, updates_to_target(e)) for t in study.trials for e in t.executions]
    sizes, updates = zip(*((b, u) for b, u in costs if u is not None), strict=True)
    expected = fit_steps_to_target(sizes, updates)
    assert fit.fewest_steps == expected.fewest_steps
    assert fit.critical_batch_size == expected.critical_batch_size
    assert f"B_crit {expected.critical_batch_size.value:.0f} (" in text
    _, lower = two_panels(plot_time_to_target(study))
    curve = next(line for line in lower.lines if len(line.get_xdata()) == 100)
    x, y = np.asarray(curve.get_xdata(), float), np.asarray(curve.get_ydata(), float)
    np.testing.assert_allclose(y, fit.fewest_steps + fit.fewest_examples / x)
    assert f"B_crit {fit.critical_batch_size.value:,.0f}" in words(lower)


def test_a_target_of_the_record_needs_no_argument_and_another_one_can_be_given():
    study = target_study()
    assert target_of(study, None) == TARGET
    easy = target_of(study, 0.5)
    assert easy == Target("val_accuracy", 0.5, "max")
    assert {p.updates.value for p in target_points(study, easy) if p.batch_size == 4} == {360}
    assert any(point.met for point in target_points(learned_study(), easy))


def test_without_a_target_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"target=0\.95.*StopAtTarget.*target=None.*no target"):
        plot_time_to_target(learned_study())


def test_a_size_that_missed_the_target_is_hollow_and_said_to_take_more():
    axes, lower = two_panels(plot_time_to_target(target_study()))
    for panel in (axes, lower):
        assert "not met" in words(panel)
        hollow = [line for line in panel.lines if line.get_markerfacecolor() == "#ffffff"]
        assert [line.get_xdata()[0] for line in hollow] == [2048]
    assert "out of memory" in words(lower)


def test_one_execution_that_misses_makes_a_size_that_misses():
    executions = (to_target(64, 100), to_target(64, 0, met=False, epochs=9))
    (point,) = target_points(make_study(make_trial(64, *executions)), TARGET)
    assert (point.met, point.updates.value) == (False, 9 * 23)


def test_a_trial_that_met_the_target_without_an_update_has_no_point():
    none, some = (make_epochs((0.95,), updates=count) for count in (0, 20))
    study = make_study(
        *(make_trial(16 * k, epochs=e, target=TARGET) for k, e in ((1, none), (2, some)))
    )
    assert [point.batch_size for point in target_points(study, TARGET)] == [32]
    _, lower = two_panels(plot_time_to_target(study))
    assert "no updates" in words(lower)
    # Where marks stand too near to each other, the reasons are below.
    near = [make_trial(size, epochs=none, target=TARGET) for size in range(60, 76, 2)]
    _, lower = two_panels(plot_time_to_target(make_study(*study.trials, *near)))
    assert "batch size 16 (no updates), 60 (no updates)" in words(lower)


def test_perfect_scaling_halves_with_the_batch_from_the_smallest_on():
    axes, lower = two_panels(plot_time_to_target(target_study(sizes=(16, 64, 256), missed=())))
    for panel, first in ((axes, None), (lower, 360)):
        (line,) = [line for line in panel.lines if line.get_linestyle() == "--"]
        (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
        assert (x0, x1) == (16, 256)
        assert y0 * x0 == pytest.approx(y1 * x1)
        assert first is None or y0 == first
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
