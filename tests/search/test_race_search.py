"""Searches by a race: real trainings of one epoch."""

import contextlib
import io
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
from kbatch.study.compared_trials import complete_trainings


def race(directory, hypermodel=None, *, fit=None, **arguments):
    """Run a race of one epoch, without short runs, at a tolerance that any answer satisfies."""
    return searches.quick(
        directory,
        hypermodel or searches.stock(),
        kbatch.BatchSizeTuner,
        fit={"validation_data": models.rows(64, seed=1)} | (fit or {}),
        **({"objective": "val_accuracy", "strategy": "race", "tolerance": 0.9} | arguments),
    )


def at_the_rule(directory, hypermodel=None, **arguments):
    return race(directory, hypermodel, search_learning_rate=False, **arguments)


@pytest.fixture(scope="module")
def with_rates(tmp_path_factory):
    """Return the tuner, the study and the output of a race with short runs."""
    fit = {"epochs": 4, "verbose": 1}
    given = {"data": models.rows(94), "fit": fit, "tolerance": 0.02, "max_trainings": 6}
    folder = tmp_path_factory.mktemp("rates")
    with contextlib.redirect_stdout(out := io.StringIO()):
        tuner = race(folder, searches.stock(shared, batch_sizes=(8, 32), seed=None), **given)
    return tuner, kbatch.load_study(tuner), out.getvalue()


def shared():
    """A model whose graph the training runs share."""
    return models.mlp(optimizer=keras.optimizers.SGD(0.01))


def test_race_finds_a_rate_by_short_runs_and_continues_the_best_one(with_rates):
    tuner, study, said = with_rates
    base = [t for t in study.trials if t.batch_size == 8]
    assert {0.25, 1.0, 4.0} <= {t.hyperparameters[FACTOR_NAME] for t in base}
    short = [t for t in base if t.last.length == "short"]
    assert short and {len(t.last.epochs) for t in short} == {2}
    whole = [e for t in study.trials for e in t.executions if e.length == "complete"]
    assert {len(e.epochs) for e in whole} == {4}
    assert not any(e.epochs_repeated for e in whole)
    assert 2 in {len(e.spans) for e in whole}  # A short run, and its continuation.
    first = tuner.hypermodel.seed
    for trial in study.trials:
        scaling = trial.executions[0].scaling
        expected = 0.01 * scaling.learning_rate_ratio
        assert trial.learning_rate == pytest.approx(expected, rel=1e-5)
        assert [e.seed - first for e in trial.executions] == [*range(len(trial.executions))]
    runs = [e for t in study.trials for e in t.executions]
    assert complete_trainings(study.trials) <= 6
    assert len({e.place for e in runs}) == len(runs)
    assert said.startswith("Plan: 2 batch sizes, about 4 complete trainings. ")
    assert "short: 2 of 4 epochs" in said and "fits in 6 complete trainings" in said


def test_race_and_tuner_name_the_same_complete_pair(with_rates):
    tuner, study, _ = with_rates
    decision = study.decide()
    assert decision.trial.last.length == "complete"
    scaling = decision.trial.executions[0].scaling
    assert decision.learning_rate == pytest.approx(scaling.learning_rate, rel=1e-6)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == decision.batch_size
    settings = study.search.settings
    assert (settings["strategy"], settings["epochs"], settings["short_runs"]) == ("race", 4, True)


def test_race_that_ended_trains_nothing_again(with_rates, capsys):
    tuner, study, _ = with_rates
    again = race(
        Path(tuner.project_dir).parent,
        searches.stock(shared, batch_sizes=(8, 32), seed=None),
        data=models.rows(94),
        fit={"epochs": 4, "verbose": 1},
        tolerance=0.02,
        max_trainings=6,
    )
    assert kbatch.load_study(again) == study
    told = "The search is complete: nothing to train.\nThe search has ended: "
    assert told in capsys.readouterr().out


def test_race_cut_off_by_its_budget_has_an_answer_and_continues(tmp_path):
    hypermodel = searches.stock(batch_sizes=(32, 47), steps_per_execution=2)
    given = {"fit": {"epochs": 4}, "max_trainings": 3, "hypermodel": hypermodel}
    study = kbatch.load_study(race(tmp_path, time_budget_s=1e-3, **given))
    (trial,) = study.trials
    assert (trial.last.length, study.decide().batch_size) == ("short", trial.batch_size)
    assert not study.decide().certain
    assert "too_short_to_time" not in {note.code for note in trial.last.notes}
    assert "sizes_not_compared" in {note.code for note in study.decide().notes}
    later = kbatch.load_study(race(tmp_path, **given))
    assert len(later.trials) > 1


@pytest.mark.parametrize(
    "changed", [{"strategy": "grid"}, {"search_learning_rate": False}], ids=str
)
def test_search_without_rates_refuses_to_continue_a_race(changed, with_rates):
    """It would train them at the rule's rate, and record a factor."""
    project = Path(with_rates[0].project_dir)
    given = {"directory": project.parent, "project_name": project.name, "strategy": "race"}
    with pytest.raises(InputError, match="searched for the learning rate"):
        kbatch.BatchSizeTuner(
            searches.stock(shared, (8, 32), seed=None), "val_accuracy", **(given | changed)
        )


def test_hypermodel_serves_several_searches(tmp_path):
    """The second search takes no rates, base size, seed or plan from the first one."""
    hypermodel = searches.stock(batch_sizes=(8, 32), base_batch_size=None, seed=None)
    settings = hypermodel.settings
    race(tmp_path / "race", hypermodel, max_trainings=4)
    grid = race(tmp_path / "grid", hypermodel, strategy="grid", tolerance=None)
    assert [len(t.executions) for t in kbatch.load_study(grid).trials] == [1, 1]
    assert hypermodel.settings == settings


def line():
    """Build a model that learns a slope in two updates at its rate. Others are worse."""
    parts = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
    return models.compiled(parts, keras.optimizers.SGD(0.4), "mse")


def test_race_continues_the_trials_of_a_grid(tmp_path, capsys):
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


def tuned(hp):
    model = models.stock()
    model.optimizer.learning_rate = hp.Choice("learning_rate", [0.001, 0.01])
    return model


def test_race_does_not_search_a_rate_that_the_build_function_tunes(tmp_path):
    tuner = race(tmp_path, searches.stock(tuned, (8, 32)))
    trials = kbatch.load_study(tuner).trials
    assert all(FACTOR_NAME not in trial.hyperparameters for trial in trials)
    # Both rates run at the base size, and the race continues with the better one.
    base = tuner.hypermodel.base_batch_size
    rates = [t.hyperparameters["learning_rate"] for t in trials if t.batch_size == base]
    assert sorted(rates) == [0.001, 0.01]
    (other,) = [t for t in trials if t.batch_size != base]
    assert other.hyperparameters["learning_rate"] in rates


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


def test_race_of_auc_leaves_out_sizes_that_fail_or_run_out(tmp_path):
    tuner = at_the_rule(
        tmp_path,
        searches.stock(ranked, (8, 16, 64)),
        objective=keras_tuner.Objective("val_auc", "max"),
        data=models.rows(94, classes=2),
        fit={"callbacks": [RunsOut(1)], "validation_data": models.rows(64, seed=1, classes=2)},
        max_trainings=30,
    )
    study = kbatch.load_study(tuner)
    found = {trial.batch_size: trial for trial in study.trials}
    assert found[64].status == "failed"
    assert (found[16].status, len(found[16].executions)) == ("out_of_memory", 1)
    assert (found[8].status, study.decide().batch_size) == ("completed", 8)
    assert 64 not in {size for size, _ in study.decide().judgement.pairs}
