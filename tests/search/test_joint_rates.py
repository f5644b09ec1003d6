"""Searches of batch size and learning rate together."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

import kbatch
from kbatch.analysis.joint_search import FACTORS
from kbatch.errors import InputError

schedules = keras.optimizers.schedules


def built(optimizer, batch_size, factor, **arguments):
    hypermodel = searches.stock(
        lambda: models.stock(optimizer=optimizer()), learning_rate_scaling="joint", **arguments
    )
    hp = keras_tuner.HyperParameters()
    hp.values = {"batch_size": batch_size, "learning_rate_factor": factor}
    return hypermodel.build(hp).optimizer


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize(
    ("optimizer", "ratio"), [(keras.optimizers.SGD, 4.0), (keras.optimizers.Adam, 2.0)]
)
def test_a_rate_is_its_factor_times_the_one_by_the_optimizers_rule(optimizer, ratio, policy):
    for factor in (0.25, 1.0, 8.0):
        found = built(lambda: optimizer(0.01), 32, factor, dtype_policy=policy)
        np.testing.assert_allclose(float(found.learning_rate), 0.01 * ratio * factor, rtol=1e-6)
    at_base = built(lambda: optimizer(0.01), 8, 2.0, dtype_policy=policy)
    np.testing.assert_allclose(float(at_base.learning_rate), 0.02, rtol=1e-6)


def test_the_peak_of_a_schedule_is_scaled_and_its_examples_stay():
    found = built(lambda: keras.optimizers.SGD(schedules.CosineDecay(0.1, 80)), 32, 0.5)
    config = found._learning_rate.get_config()
    assert config["initial_learning_rate"] == pytest.approx(0.1 * 4 * 0.5)
    assert config["decay_steps"] == 20


def test_the_weight_decay_of_an_example_stays_whatever_the_rate():
    for factor in (0.5, 4.0):
        found = built(lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01), 32, factor)
        decay = float(found.learning_rate) * found.weight_decay
        assert decay == pytest.approx(1e-3 * 0.01 * 4)


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"'joint'.*Received: learning_rate_scaling='both'"):
        searches.hypermodel(learning_rate_scaling="both")


def test_a_tuner_of_keras_tuner_takes_the_rate_as_a_hyperparameter(tmp_path):
    joint = searches.stock(batch_sizes=(8, 16), learning_rate_scaling="joint")
    tuner = searches.tuner(tmp_path, joint, keras_tuner.RandomSearch, max_trials=2)
    space = {p.name: tuple(p.values) for p in tuner.oracle.get_space().space}
    assert space == {"batch_size": (8, 16), "learning_rate_factor": FACTORS}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("joint")


def joint_search(directory, **arguments):
    hypermodel = searches.stock(batch_sizes=(8, 32), learning_rate_scaling="joint")
    return searches.search(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def test_it_runs_pairs_and_repeats_what_it_compares(directory, capsys):
    joint_search(directory, max_executions=7, fit={"verbose": 1})
    study = kbatch.load_study(directory / "search")
    assert sum(len(trial.executions) for trial in study.trials) == 7
    for trial in study.trials:
        scaling = trial.executions[0].scaling
        assert scaling.factor == trial.hyperparameters["learning_rate_factor"]
        expected = 0.01 * scaling.kappa * scaling.factor
        assert trial.learning_rate == pytest.approx(expected, rel=1e-5)
        assert [run.seed for run in trial.executions] == list(range(len(trial.executions)))
    shown = capsys.readouterr().out
    assert "at most 7 executions" in shown
    assert "Stopped: its executions are spent" in shown


def test_it_goes_on_from_its_records(directory):
    before = kbatch.load_study(directory / "search")
    joint_search(directory, max_executions=9)
    after = kbatch.load_study(directory / "search")
    assert sum(len(trial.executions) for trial in after.trials) == 9
    for trial in before.trials:
        again = next(t for t in after.trials if t.trial_id == trial.trial_id)
        assert again.executions[: len(trial.executions)] == trial.executions
    assert max(len(trial.executions) for trial in after.trials) > 1


def test_its_report_has_the_rates(directory):
    kbatch.write_report(kbatch.load_study(directory / "search"), directory / "report.md")
    assert "Learning rate of each batch size" in (directory / "report.md").read_text()


def test_other_strategies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="joint"):
        joint_search(tmp_path, strategy="race")


def test_an_objective_that_no_rate_changes_is_refused(tmp_path):
    objective = keras_tuner.Objective("samples_per_second", "max")
    with pytest.raises(InputError, match="samples_per_second"):
        joint_search(tmp_path, objective=objective)
