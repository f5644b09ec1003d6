import pytest
from figure_studies import learned_study, tuned_study
from records_factory import make_execution, make_study, make_trial

from kbatch.study.figures.ranking import plot_ranking, ranking_info
from kbatch.study.trial import Objective


def scores(info):
    return [row.objective.value for row in info.rows if row.objective]


@pytest.mark.parametrize(("name", "direction"), [("val_accuracy", "max"), ("val_loss", "min")])
def test_the_best_stand_first_and_those_without_a_result_last(name, direction):
    values = {16: 0.9, 32: 0.98, 64: 0.95}
    objective = Objective(name, direction)
    trials = [
        make_trial(size, objective=objective, accuracies=(value,)) for size, value in values.items()
    ]
    failed = make_trial(8, status="failed", objective=objective)
    info = ranking_info(make_study(failed, *trials), most=10)
    assert info.columns[0].cells == ["32", "64", "16", "8"]
    assert scores(info) == sorted(scores(info), reverse=direction == "max")
    assert (info.rows[-1].objective, info.rows[-1].outcome) == (None, "failed")


def test_it_shows_so_many_rows_and_counts_the_rest():
    study = tuned_study(60)
    info = ranking_info(study, most=10)
    failed = sum(trial.status != "completed" for trial in study.trials)
    assert len(info.rows) == 10
    assert f"Not shown: 50 trials that follow, {failed} of them without a result." in info.notes
    assert (
        scores(info)
        == sorted(
            (t.objective_value for t in study.trials if t.status == "completed"), reverse=True
        )[:10]
    )
    with pytest.raises(ValueError, match="most=0"):
        ranking_info(study, most=0)


def test_hyperparameters_that_differ_are_columns_before_what_follows_from_them():
    info = ranking_info(tuned_study(60), most=10)
    titles = [column.title for column in info.columns]
    assert titles[:3] == ["Batch", "units", "learning_rate"]
    assert sum(column.width + 2 for column in info.columns) <= 46 + 2
    assert any("a_hyperparamet…" in note for note in info.notes) or "a_hyperparamet…" in titles
    alone = ranking_info(learned_study(), most=10)
    titles = [column.title for column in alone.columns]
    assert titles == ["Batch", "Samples/s", "Learning rate", "Micro-batch"]
    assert alone.columns[1].cells[-1] == "n/a"


def test_a_text_keeps_its_brackets_and_a_number_loses_its_spread():
    kinds = ("relu (leaky)", "relu (plain)", None)
    trials = (make_trial(16, trial_id=f"{k}", hyperparameters={"kind": k}) for k in kinds)
    _, kind, rate, *_ = ranking_info(make_study(*trials), most=9).columns
    assert (kind.numeric, sorted(kind.cells)) == (False, ["n/a", "relu (leaky)", "relu (plain)"])
    assert (rate.numeric, rate.cells) == (True, ["1,000"] * 3)


def test_rows_cells_and_dots_are_drawn_at_one_height():
    executions = [make_execution(accuracies=(a,)) for a in (0.9, 0.92, 0.94)]
    study = make_study(make_trial(64, *executions), make_trial(32), make_trial(16, status="failed"))
    panel = plot_ranking(study)
    table = next(
        axes for axes in panel.figure.axes if any(t.get_text() == "Batch" for t in axes.texts)
    )
    heights = {
        t.get_text(): t.get_position()[1] for t in table.texts if t.get_text() in {"64", "32", "16"}
    }
    assert heights == {"32": 0, "64": 1, "16": 2}
    dots = {line.get_ydata()[0]: line for line in panel.lines if len(line.get_xdata()) == 1}
    assert dots[0].get_xdata()[0] == pytest.approx(0.97)
    assert dots[1].get_xdata()[0] == pytest.approx(0.92)
    assert dots[2].get_marker() == "X"
    (bar,) = panel.collections
    interval = study.trials[-1].objective_interval
    assert bar.get_segments()[0][:, 0] == pytest.approx([interval.low, interval.high])
    assert panel.get_ylim()[0] > panel.get_ylim()[1]


def test_single_executions_are_said_to_have_no_interval():
    notes = ranking_info(learned_study(), most=9).notes
    assert notes == (
        "One execution a trial, no bars: whether the order would repeat is not known.",
    )
    assert ranking_info(learned_study(3), most=9).notes == (
        "Bars: 95 % interval of the mean over executions.",
    )
