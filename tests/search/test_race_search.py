"""Searches by a race: real trainings of one epoch."""

from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.errors import InputError
from kbatch.search.oracle import read_trials


def race(directory, hypermodel=None, *, fit=None, **arguments):
    """A race with a tolerance that ends it at its first look, whatever is learnt."""
    return searches.quick(
        directory,
        hypermodel or searches.stock(),
        kbatch.BatchSizeTuner,
        fit={"validation_data": models.rows(64, seed=1)} | (fit or {}),
        **({"objective": "val_accuracy", "strategy": "race", "tolerance": 0.9} | arguments),
    )


def at_the_rule(directory, hypermodel=None, **arguments):
    return race(directory, hypermodel, search_learning_rate=False, **arguments)


def numbers(tuner):
    """The numbers of the executions of each size, whose seeds count up from the search's."""
    first = tuner.hypermodel.seed
    trials = kbatch.load_study(tuner).trials
    return {t.batch_size: [e.seed - first for e in t.executions] for t in trials}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A race of two sizes, with a seed that it drew."""
    hypermodel = searches.stock(batch_sizes=(8, 32), seed=None)
    return at_the_rule(tmp_path_factory.mktemp("race"), hypermodel)


def test_all_sizes_train_once_and_then_three_times_with_one_seed_a_round(ended):
    assert numbers(ended) == {8: [0, 1, 2, 3], 32: [0, 1, 2, 3]}
    settings = kbatch.load_study(ended).search.settings
    assert (settings["strategy"], settings["tolerance"]) == ("race", 0.9)
    states = read_trials(Path(ended.project_dir))
    assert [state.status for state in states] == ["COMPLETED"] * 2
    decision = kbatch.load_study(ended).decide()
    assert (decision.tolerance, decision.certain) == (0.9, True)
    assert set(decision.judgement.rounds.values()) == {3}


@pytest.fixture(scope="module")
def with_rates(tmp_path_factory):
    """A race that looks for the learning rate too, and what it said."""
    tuner = race(tmp_path_factory.mktemp("rates"), searches.stock(batch_sizes=(8, 32)))
    return tuner, kbatch.load_study(tuner)


def test_it_tries_rates_and_names_the_one_that_its_answer_holds_for(with_rates):
    tuner, study = with_rates
    factors = {trial.hyperparameters[FACTOR_NAME] for trial in study.trials}
    assert {0.25, 1.0, 4.0} <= factors
    assert sum(len(trial.executions) for trial in study.trials) <= 12
    for trial in study.trials:
        scaling = trial.executions[0].scaling
        expected = 0.01 * scaling.learning_rate_ratio
        assert trial.learning_rate == pytest.approx(expected, rel=1e-5)
    decision = study.decide()
    scaling = decision.trial.executions[0].scaling
    assert decision.learning_rate == pytest.approx(scaling.learning_rate, rel=1e-6)
    # What chose a pair does not judge it.
    raced = [t for t in study.trials if len(t.executions) > 1]
    assert sum(decision.judgement.rounds.values()) == sum(len(t.executions) - 1 for t in raced)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == decision.batch_size


class WarmsUp(keras.callbacks.Callback):
    """Sets absolute rates, by batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * (batch + 1)


def test_it_looks_for_no_rate_if_a_callback_sets_it(tmp_path):
    fit = {"callbacks": [keras.callbacks.History(), WarmsUp()]}
    tuner = race(tmp_path, searches.stock(batch_sizes=(8, 32)), fit=fit, max_trainings=6)
    study = kbatch.load_study(tuner)
    factors = [trial.hyperparameters[FACTOR_NAME] for trial in study.trials]
    assert sum(factor != 1 for factor in factors) <= 1
    assert {run.rate_callbacks for t in study.trials for run in t.executions} == {("WarmsUp",)}
    assert sum(len(trial.executions) for trial in study.trials) > len(factors)
    assert study.decide().learning_rate is None


@pytest.mark.parametrize(
    "changed", [{"strategy": "grid"}, {"search_learning_rate": False}], ids=str
)
def test_a_search_without_rates_does_not_go_on_with_those_of_a_race(changed, with_rates):
    """It would train them at the rule's rate, and record a factor."""
    project = Path(with_rates[0].project_dir)
    given = {"directory": project.parent, "project_name": project.name, "strategy": "race"}
    with pytest.raises(InputError, match="holds a race that looks for the learning rate"):
        kbatch.BatchSizeTuner(
            searches.stock(batch_sizes=(8, 32)), "val_accuracy", **(given | changed)
        )


def test_one_hypermodel_serves_several_searches(tmp_path):
    """Nothing of one is left in the next: rates, the base size, the seed, the plan."""
    hypermodel = searches.stock(batch_sizes=(8, 32), base_batch_size=None, seed=None)
    settings = hypermodel.settings
    race(tmp_path / "race", hypermodel, max_trainings=4)
    grid = race(tmp_path / "grid", hypermodel, strategy="grid", tolerance=None)
    assert [len(t.executions) for t in kbatch.load_study(grid).trials] == [1, 1]
    assert hypermodel.settings == settings


def line():
    """Learns a slope best at its own rate in two updates: at others it is slow, or diverges."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.4), "mse")
    return model


def test_a_race_goes_on_with_the_trials_of_a_grid_at_their_rate(tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((64, 1)).astype("float32")
    given = {"objective": "val_loss", "tolerance": 0.05, "data": (x, 9 * x)}
    fit = {"validation_data": (x, 9 * x)}

    def sized():
        return searches.stock(line, (16, 32), seed=5, learning_rate_scaling=None)

    race(tmp_path, sized(), strategy="grid", fit=fit, **given)
    grid = kbatch.load_study(tmp_path / "search").trials
    race(tmp_path, sized(), fit=fit | {"verbose": 1}, **given)
    lines = [one.split(", ") for one in capsys.readouterr().out.splitlines() if ", batch" in one]
    assert [line[0] for line in lines] == [f"training {n + 3}" for n in range(len(lines))]
    assert {line[2] for line in lines} >= {"learning rate 0.1", "learning rate 1.6"}
    study = kbatch.load_study(tmp_path / "search")
    for trial in study.trials:
        assert [run.seed for run in trial.executions] == [*range(5, 5 + len(trial.executions))]
    pairs = [(t.batch_size, t.hyperparameters.get(FACTOR_NAME, 1.0)) for t in study.trials]
    assert len(pairs) == len(set(pairs))
    found = {trial.trial_id: trial.executions for trial in study.trials}
    assert all(found[trial.trial_id][0] == trial.executions[0] for trial in grid)
    assert any(len(found[trial.trial_id]) > 1 for trial in grid)


def tuned(hp):
    model = models.stock()
    model.optimizer.learning_rate = hp.Choice("learning_rate", [0.001, 0.01])
    return model


def test_a_rate_that_the_build_function_tunes_is_not_searched_beside_it(tmp_path):
    tuner = race(tmp_path, searches.stock(tuned, (8, 32)))
    trials = kbatch.load_study(tuner).trials
    assert all(FACTOR_NAME not in trial.hyperparameters for trial in trials)
    # Both at the base size, and only the better one goes on.
    base = tuner.hypermodel.base_batch_size
    rates = [t.hyperparameters["learning_rate"] for t in trials if t.batch_size == base]
    assert sorted(rates) == [0.001, 0.01]
    repeated = {t.hyperparameters["learning_rate"] for t in trials if len(t.executions) > 1}
    assert len(repeated) == 1


class RunsOut(keras.callbacks.Callback):
    """Lets some trainings of batch size 16 run out of memory: they have 6 steps of 94 rows."""

    def __init__(self, *which):
        super().__init__()
        self.which, RunsOut.begun = which, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.params["steps"] == 6 and batch == 0:
            RunsOut.begun += 1
            if RunsOut.begun in self.which:
                self.model.train_function = self.run_out

    def run_out(self, *_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")


def ranked(hp):
    if hp.get("batch_size") == 64:
        raise RuntimeError("no model of this size")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def test_sizes_that_fail_or_run_out_are_out_and_what_is_no_mean_is_raced_too(tmp_path):
    tuner = at_the_rule(
        tmp_path,
        searches.stock(ranked, (8, 16, 64)),
        objective=keras_tuner.Objective("val_auc", "max"),
        data=models.rows(94, classes=2),
        fit={"callbacks": [RunsOut(2)], "validation_data": models.rows(64, seed=1, classes=2)},
        max_trainings=30,
    )
    study = kbatch.load_study(tuner)
    found = {trial.batch_size: trial for trial in study.trials}
    assert found[64].status == "failed"
    assert (found[16].status, len(found[16].executions)) == ("out_of_memory", 2)
    assert (found[8].status, study.decide().batch_size) == ("completed", 8)
    assert 64 not in {size for size, _ in study.decide().judgement.pairs}
