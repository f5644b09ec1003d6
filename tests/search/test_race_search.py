"""Searches by a race: real trainings of one epoch."""

from pathlib import Path

import keras
import keras_tuner
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.errors import InputError
from kbatch.search.trial_files import read_trial_states


def race(directory, hypermodel=None, *, callbacks=(), validation_data=None, **arguments):
    """A race with a tolerance that ends it at its first look, whatever is learnt."""
    return searches.quick(
        directory,
        hypermodel or searches.stock(),
        kbatch.BatchSizeTuner,
        fit={
            "validation_data": validation_data or models.rows(64, seed=1),
            "callbacks": list(callbacks),
        },
        **({"objective": "val_accuracy", "strategy": "race", "tolerance": 0.9} | arguments),
    )


def seeds(tuner):
    """The seeds of the executions of each size."""
    study = kbatch.load_study(tuner)
    return {t.batch_size: [e.seed for e in t.executions] for t in study.trials}


class Stopping(keras.callbacks.Callback):
    """Interrupts the search when a training begins; the same one whenever it does, or never."""

    begins = 0

    def on_train_begin(self, logs=None):
        Stopping.begins -= 1
        if Stopping.begins == 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A race that was interrupted in its fourth execution: the study it left, and the directory."""
    directory = tmp_path_factory.mktemp("race")
    Stopping.begins = 4
    with pytest.raises(KeyboardInterrupt):
        race(directory, two_sizes(), callbacks=[Stopping()])
    return kbatch.load_study(directory / "search"), directory


def two_sizes():
    return searches.stock(batch_sizes=(8, 32), seed=None)


@pytest.fixture(scope="module")
def ended(interrupted):
    """The race when it has gone on to its end."""
    return race(interrupted[1], two_sizes(), callbacks=[Stopping()])


def test_all_sizes_train_three_times_with_one_seed_a_round(ended):
    settings = kbatch.load_study(ended).search.settings
    rounds = [settings["seed"] + number for number in range(3)]
    assert seeds(ended) == {8: rounds, 32: rounds}
    assert (settings["strategy"], settings["tolerance"]) == ("race", 0.9)
    states = read_trial_states(Path(ended.project_dir))
    assert [state.status for state in states] == ["COMPLETED"] * 2


def test_the_study_decides_by_the_rule_of_the_race(ended):
    decision = kbatch.load_study(ended).decide()
    assert (decision.tolerance, decision.certain) == (0.9, True)
    assert decision.executions == 3


def test_it_goes_on_where_it_was_interrupted(interrupted, ended):
    before, _ = interrupted
    assert before.decide().executions == 2
    # Two rounds, of which the last execution was cut off.
    assert [len(trial.executions) for trial in before.trials] == [2, 2]
    assert before.trials[1].status != "completed"
    for old, new in zip(before.trials, kbatch.load_study(ended).trials, strict=True):
        kept = 1 if old is before.trials[1] else 2
        assert new.executions[:kept] == old.executions[:kept]


def test_a_search_that_has_ended_trains_no_more(ended):
    before = kbatch.load_study(ended).trials
    again = race(Path(ended.project_dir).parent, two_sizes(), callbacks=[Stopping()])
    assert kbatch.load_study(again).trials == before


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


def test_sizes_that_fail_or_run_out_are_out_and_what_is_no_mean_is_raced_by_example(tmp_path):
    tuner = race(
        tmp_path,
        searches.stock(ranked, (8, 16, 32, 64)),
        callbacks=[RunsOut(2)],
        objective=keras_tuner.Objective("val_auc", "max"),
        data=models.rows(94, classes=2),
        validation_data=models.rows(64, seed=1, classes=2),
    )
    study = kbatch.load_study(tuner)
    assert seeds(tuner) == {8: [0, 1, 2], 16: [0, 1], 32: [0, 1, 2], 64: [0]}
    statuses = [trial.status for trial in study.trials]
    assert statuses == ["completed", "out_of_memory", "completed", "failed"]
    decision = study.decide()
    assert (decision.certain, decision.executions) == (True, 3)
    assert decision.unpaired == ""


def test_a_size_that_runs_out_late_goes_on_with_half_the_micro_batch(tmp_path):
    auto = {"micro_batch_size": "auto", "memory_limit_bytes": 10**8}
    tuner = race(tmp_path, searches.stock(models.Locked(), (8, 16), **auto), callbacks=[RunsOut(2)])
    (_, first), (_, second), (_, third) = (
        [trial.executions[k] for trial in kbatch.load_study(tuner).trials] for k in range(3)
    )
    sizes = [run.micro_batch_size for run in (first, second, third)]
    assert (sizes, second.examples_seen) == ([16, 8, 8], 94)
    assert kbatch.load_study(tuner).decide().certain


def test_a_generator_to_validate_on_is_refused_before_anything_trains(tmp_path):
    batches = (models.rows(8, seed=k) for k in range(9))
    with pytest.raises(ValueError, match=r"validation_data.*from_generator.*Received: a generator"):
        race(tmp_path, validation_data=batches)
    assert len(list(batches)) == 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"executions_per_trial": 3}, "leave out `executions_per_trial`"),
        ({"max_executions": 0}, "`max_executions`"),
        ({"max_executions": 8}, "at least 9"),
        ({"tolerance": -0.1}, "`tolerance`"),
        ({"tolerance": 1.5}, "`tolerance`"),
        ({"confidence": 1.0}, "`confidence`"),
        ({"objective": ["val_accuracy", "val_loss"]}, "one objective that"),
    ],
)
def test_what_no_race_can_use_is_refused(changed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        race(tmp_path, **changed)
    assert not list(tmp_path.glob("search/trial_*"))


def test_executions_are_limited_only_where_the_search_counts_them(tmp_path):
    with pytest.raises(InputError, match=r'`max_executions`.*strategy="race".*max_executions=9'):
        race(tmp_path, strategy="grid", max_executions=9)


def test_joint_learning_rates_are_too_many_for_a_race(tmp_path):
    with pytest.raises(ValueError, match="joint learning rates"):
        race(tmp_path, searches.stock(learning_rate_scaling="joint"))


@pytest.mark.slow
def test_each_execution_may_have_a_process_of_its_own(tmp_path):
    tuner = race(tmp_path, searches.stock(batch_sizes=(16, 32)), executor="local", max_parallel=1)
    assert seeds(tuner) == {16: [0, 1, 2], 32: [0, 1, 2]}
