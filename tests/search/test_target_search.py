"""Searches whose budget is no number of epochs, and whose objective is the way to a target."""

import keras_tuner
import searches

import kbatch
from kbatch.records.training_run import Budget, Target

FEWEST_UPDATES = keras_tuner.Objective("updates_to_target", "min")
EASY, HARD = kbatch.StopAtTarget("accuracy", 0.35), kbatch.StopAtTarget("accuracy", 1.1)


def search(directory, target, *, updates=40):
    callbacks = [target, kbatch.UpdateBudget(updates)]
    return searches.search(
        directory,
        searches.stock(batch_sizes=(16, 32), dtype_policy="float32"),
        kbatch.BatchSizeTuner,
        objective=FEWEST_UPDATES,
        fit={"epochs": 100, "callbacks": callbacks},
    )


def test_the_cost_of_a_target_is_an_objective(tmp_path):
    tuner = search(tmp_path, EASY)
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    for trial in study.trials:
        (run,) = trial.executions
        assert run.target == Target("accuracy", 0.35, "max")
        assert run.budget == Budget(updates=40)
        score = tuner.oracle.get_trial(trial.trial_id).score
        assert score == trial.objective_value == run.to_target.updates <= 40
        assert run.to_target.examples == len(run.epochs) * 94
    best = min(study.trials, key=lambda trial: trial.objective_value)
    assert study.best_trial() is best
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size
    frame = study.to_dataframe()
    assert list(frame.updates_to_target) == [trial.objective_value for trial in study.trials]
    assert (frame.seconds_to_target > 0).all()


def test_a_target_never_met_is_a_result_and_the_search_goes_on(tmp_path):
    tuner = search(tmp_path, HARD, updates=4)
    study = kbatch.load_study(tuner)
    assert len(study.trials) == 2
    for trial in study.trials:
        assert trial.status == "completed"
        assert trial.executions[0].updates == 4
        assert trial.objective_value is None
    assert study.best_trial() is None
