import numpy as np
import pytest
from figure_studies import TARGET, learned_study, target_study, to_target
from records_factory import make_study, make_trial

from kbatch.analysis.goodput import fit_steps_to_target
from kbatch.plotting.canvas import detached_axes
from kbatch.records.training_run import Target
from kbatch.study.figures.time_to_target import plot_time_to_target, time_to_target_info


def panels(axes):
    (lower,) = [a for a in axes.figure.axes if a.get_xlabel()]
    return axes, lower


def texts(panel):
    return " ".join(text.get_text().replace("\n", " ") for text in panel.texts).replace("\xa0", " ")


def test_the_points_are_the_costs_in_the_records():
    study = target_study()
    info = time_to_target_info(study)
    met = {trial.batch_size: trial for trial in study.trials if trial.cost("updates_to_target")}
    assert {p.batch_size for p in info.met} == set(met)
    for point in info.met:
        trial = met[point.batch_size]
        assert point.updates.value == trial.cost("updates_to_target")
        assert point.seconds.value == pytest.approx(trial.cost("seconds_to_target"))
    assert info.incomplete_sizes == ((4096, "out of memory"),)


def test_the_fit_is_that_of_every_execution_and_names_the_critical_batch_size():
    study = target_study(3)
    info = time_to_target_info(study)
    costs = [
        (t.batch_size, e.cost("updates_to_target")) for t in study.trials for e in t.executions
    ]
    sizes, updates = zip(*((b, u) for b, u in costs if u is not None), strict=True)
    expected = fit_steps_to_target(sizes, updates)
    assert info.fit.fewest_steps == expected.fewest_steps
    assert info.fit.critical_batch_size == expected.critical_batch_size
    assert f"B_crit {expected.critical_batch_size.value:.0f} (" in info.fit_text


def test_a_target_of_the_record_needs_no_argument_and_another_one_can_be_given():
    study = target_study()
    assert time_to_target_info(study).target == TARGET
    easy = time_to_target_info(study, target=0.5)
    assert easy.target == Target("val_accuracy", 0.5, "max")
    assert {p.updates.value for p in easy.met if p.batch_size == 4} == {360}
    assert time_to_target_info(learned_study(), target=0.5).met


def test_without_a_target_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"target=0\.95.*StopAtTarget.*target=None.*no target"):
        plot_time_to_target(learned_study())


def test_a_size_that_missed_the_target_is_hollow_and_said_to_take_more():
    axes, lower = panels(plot_time_to_target(target_study()))
    for panel in (axes, lower):
        assert "not met" in texts(panel)
        hollow = [line for line in panel.lines if line.get_markerfacecolor() == "#ffffff"]
        assert [line.get_xdata()[0] for line in hollow] == [2048]
    assert "Batch size 2,048 did not meet it." in axes.get_label()
    assert "out of memory" in texts(lower)


def test_one_execution_that_misses_makes_a_size_that_misses():
    executions = (to_target(64, 100), to_target(64, 0, met=False, epochs=9))
    info = time_to_target_info(make_study(make_trial(64, *executions)))
    (point,) = info.points
    assert (point.met, point.updates.value) == (False, 9 * 23)


def test_perfect_scaling_halves_with_the_batch_from_the_smallest_on():
    axes, lower = panels(plot_time_to_target(target_study(sizes=(16, 64, 256), missed=())))
    for panel, first in ((axes, None), (lower, 360)):
        (line,) = [line for line in panel.lines if line.get_linestyle() == "--"]
        (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
        assert (x0, x1) == (16, 256)
        assert y0 * x0 == pytest.approx(y1 * x1)
        assert first is None or y0 == first
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


@pytest.mark.parametrize("width_in", [6.4, 3.6])
def test_what_was_measured_and_perfect_scaling_are_named_above_the_panels(width_in):
    study = target_study(3, sizes=(256, 512), missed=(2048,))
    upper, _ = panels(plot_time_to_target(study, detached_axes(6.0, width_in=width_in)))
    upper.figure.draw_without_rendering()
    legend = upper.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["target met", "perfect scaling"]
    box = legend.get_window_extent()
    assert upper.get_window_extent().y1 <= box.y0
    assert box.x1 <= upper.figure.bbox.x1


def test_the_curve_is_the_fit_and_the_critical_size_is_marked():
    study = target_study(3)
    fit = time_to_target_info(study).fit
    _, lower = panels(plot_time_to_target(study))
    curve = next(line for line in lower.lines if len(line.get_xdata()) == 100)
    x, y = np.asarray(curve.get_xdata(), float), np.asarray(curve.get_ydata(), float)
    np.testing.assert_allclose(y, fit.fewest_steps + fit.fewest_examples / x)
    assert f"B_crit {fit.critical_batch_size.value:,.0f}" in texts(lower)


def test_two_sizes_give_no_curve():
    info = time_to_target_info(target_study(sizes=(16, 64), missed=()))
    assert info.fit is None
    assert info.fit_text.endswith("and 2 sizes did.")


def test_of_several_trials_of_a_size_the_one_with_fewest_updates_is_shown():
    trials = [
        make_trial(
            64, to_target(64, updates), trial_id=str(updates), hyperparameters={"u": updates}
        )
        for updates in (200, 100, 300)
    ]
    info = time_to_target_info(make_study(*trials))
    assert [point.trial_id for point in info.points] == ["100"]
    assert any("fewest updates" in note for note in info.notes)


def test_one_learning_rate_for_all_sizes_is_pointed_out():
    unscaled = [make_trial(s, to_target(s, 90), learning_rate_scaling=None) for s in (16, 64)]
    scaled = make_study(*unscaled)
    assert not any("One learning rate" in note for note in time_to_target_info(scaled).notes)
