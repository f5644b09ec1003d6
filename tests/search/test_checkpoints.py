"""Which trial a tuner names first, and whose weights it keeps: those of the study's decision."""

import dataclasses

import keras_tuner
import pytest
import searches
from keras_tuner.src.engine.trial import Trial
from records_factory import make_execution, make_search, make_trial

import kbatch
from kbatch.records.json_codec import write_record
from kbatch.search.oracle import BatchSizeOracle
from kbatch.search.trial_files import CHECKPOINT_NAME
from kbatch.search.trial_states import write_trial

# 64 lies within 1 % of 16, the best mean, and is four times as fast; 32 is far worse.
VALUES = {16: (0.951, 0.953, 0.952), 32: (0.700, 0.702, 0.701), 64: (0.950, 0.952, 0.951)}
RATES = {16: 1_000.0, 32: 2_000.0, 64: 4_000.0}


def write_search(project, values, *, interrupted=None, **of_search):
    """Write the files of a search whose trials all have weights; one is interrupted."""
    write_record(make_search(tolerance=0.01, **of_search), project / "kbatch.json")
    for number, (size, accuracies) in enumerate(values.items()):
        runs = [
            make_execution(size, accuracies=(one,), rate=RATES[size], seed=seed)
            for seed, one in enumerate(accuracies)
        ]
        if size == interrupted:
            runs.append(make_execution(size, status="interrupted", seed=len(runs)))
        record = make_trial(size, *runs, trial_id=f"{number:04d}")
        folder = project / f"trial_{number:04d}"
        write_record(record, folder / "kbatch.json")
        (folder / CHECKPOINT_NAME).touch()
        space = keras_tuner.HyperParameters()
        space.Choice("batch_size", [16, 32, 64])
        space.values = dict(record.hyperparameters)
        state = "RUNNING" if size == interrupted else "COMPLETED"
        trial = Trial(space, f"{number:04d}", state)
        trial.score, trial.best_step = record.objective_value, 0
        write_trial(trial, project)


def oracle_of(project):
    objective = keras_tuner.Objective("val_accuracy", "max")
    oracle = BatchSizeOracle(objective, lambda *_: iter(()))
    oracle._set_project_dir(str(project.parent), project.name)
    oracle.reload()
    return oracle


def kept(project):
    trials = kbatch.load_study(project).trials
    folders = {t.batch_size: project / f"trial_{t.trial_id}" for t in trials}
    return {size for size, folder in folders.items() if (folder / CHECKPOINT_NAME).exists()}


def ended_once_more(oracle):
    """Let the last trial end now."""
    trial = oracle.trials[max(oracle.trials)]
    if not trial.metrics.exists("val_accuracy"):  # It was interrupted.
        trial.metrics.register("val_accuracy", direction="max")
        trial.metrics.update("val_accuracy", 0.95, step=0)
    oracle.ongoing_trials["tuner0"] = trial
    oracle.end_trial(trial)


def test_the_tuner_names_the_decided_trial_first_and_then_the_best(tmp_path):
    write_search(tmp_path / "search", VALUES)
    hypermodel = searches.stock(batch_sizes=(16, 32, 64))
    write_record(make_search(**hypermodel.settings), tmp_path / "search" / "kbatch.json")
    tuner = searches.tuner(tmp_path, hypermodel, kbatch.BatchSizeTuner, executions_per_trial=3)
    found = [hp.get("batch_size") for hp in tuner.get_best_hyperparameters(3)]
    assert found == [64, 16, 32]
    by_mean = [t.hyperparameters.get("batch_size") for t in tuner.oracle.get_best_trials(3)]
    assert by_mean == [16, 64, 32]
    assert tuner.get_best_hyperparameters(1)[0].get("batch_size") == 64


def test_a_race_that_is_interrupted_names_what_its_study_decides(tmp_path):
    hypermodel = searches.stock(batch_sizes=(16, 32, 64))
    raced = hypermodel.settings | {"strategy": "race"}
    write_search(tmp_path / "search", VALUES, interrupted=64, **raced)
    assert kbatch.load_study(tmp_path / "search").decide().batch_size == 64
    race = {"strategy": "race", "tolerance": 0.01}
    tuner = searches.tuner(tmp_path, hypermodel, kbatch.BatchSizeTuner, **race)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 64
    ended_once_more(tuner.oracle)
    assert 64 in kept(tmp_path / "search")


ONCE = {size: values[:1] for size, values in VALUES.items()}
MORE = {size: (*VALUES[size], VALUES[size][0]) for size in (16, 64)}


@pytest.mark.parametrize(
    ("values", "search", "while_it_runs", "at_its_end"),
    [
        # The best mean, and the decided; where both are one, that alone.
        (VALUES, {}, {16, 64}, {16, 64}),
        ({16: VALUES[64], 32: VALUES[32], 64: VALUES[16]}, {}, {16, 64}, {64}),
        # Of one execution no size counts as worse.
        (ONCE, {}, {16, 32, 64}, {16}),
        (VALUES | {32: (0.900,)}, {}, {16, 32, 64}, None),
        # A race trains on with all that are not worse after its first round.
        (VALUES, {"strategy": "race"}, {16, 32, 64}, None),
        (VALUES | MORE, {"strategy": "race"}, {16, 64}, None),
    ],
)
def test_what_may_be_decided_on_keeps_its_weights(
    tmp_path, values, search, while_it_runs, at_its_end
):
    write_search(tmp_path, values, **search)
    ended_once_more(oracle_of(tmp_path))
    assert kept(tmp_path) == while_it_runs
    if at_its_end is not None:
        assert oracle_of(tmp_path).create_trial("tuner0").status == "STOPPED"
        assert kept(tmp_path) == at_its_end


def test_a_damaged_record_takes_no_weights_of_others(tmp_path):
    write_search(tmp_path, VALUES)
    (tmp_path / "trial_0001" / "kbatch.json").write_text("{")
    ended_once_more(oracle_of(tmp_path))
    assert {16, 64} <= kept(tmp_path)


def test_a_size_that_epochs_in_turns_may_name_keeps_its_checkpoint(tmp_path, monkeypatch):
    decide = kbatch.Study.decide
    monkeypatch.setattr(
        kbatch.Study,
        "decide",
        lambda self, **settings: dataclasses.replace(
            decide(self, **settings), alike_in_time=(8, 16, 32)
        ),
    )
    hypermodel = searches.stock(batch_sizes=(8, 16, 32))
    searches.search(tmp_path, hypermodel, kbatch.BatchSizeTuner, objective="val_loss")
    kept = {path.parent.name for path in tmp_path.glob(f"search/trial_*/{CHECKPOINT_NAME}")}
    assert len(kept) == 3
