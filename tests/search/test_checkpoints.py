"""The order of the best trials, and the checkpoints that a search keeps."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
from keras_tuner.src.engine.trial import Trial
from records_factory import make_execution, make_search, make_trial

import kbatch
from kbatch.records.json_codec import write_record
from kbatch.search.best_epoch import BestEpoch
from kbatch.search.files import CHECKPOINT_NAME
from kbatch.search.oracle import write_trial
from kbatch.study.trial import Objective

# 16 has the best mean. 64 is within 0.01 of it and four times as fast. 32 is much worse.
VALUES = {16: (0.951, 0.953, 0.952), 32: (0.700, 0.702, 0.701), 64: (0.950, 0.952, 0.951)}
RATES = {16: 1_000.0, 32: 2_000.0, 64: 4_000.0}


def write_search(project, values, *, interrupted=None, **of_search):
    """Write the files of a search with a checkpoint for each trial. One may be interrupted."""
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
        trial.score, trial.best_step = record.judged_value, 0
        write_trial(trial, project)


def kept(project):
    trials = kbatch.load_study(project).trials
    folders = {t.batch_size: project / f"trial_{t.trial_id}" for t in trials}
    return {size for size, folder in folders.items() if (folder / CHECKPOINT_NAME).exists()}


@pytest.mark.parametrize("strategy", ["grid", "race"])
def test_get_best_hyperparameters_returns_decided_trial_first(tmp_path, strategy):
    hypermodel = searches.stock(batch_sizes=(16, 32, 64))
    settings = hypermodel.settings | ({"strategy": "race"} if strategy == "race" else {})
    interrupted = 64 if strategy == "race" else None
    write_search(tmp_path / "search", VALUES, interrupted=interrupted, **settings)
    given = {"race": {"tolerance": 0.01}, "grid": {"executions_per_trial": 3}}[strategy]
    tuner = searches.tuner(tmp_path, hypermodel, kbatch.BatchSizeTuner, strategy=strategy, **given)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 64
    if strategy == "race":
        return
    found = [hp.get("batch_size") for hp in tuner.get_best_hyperparameters(3)]
    assert found == [64, 16, 32]
    by_mean = [t.hyperparameters.get("batch_size") for t in tuner.oracle.get_best_trials(3)]
    assert by_mean == [16, 64, 32]


@pytest.mark.parametrize(
    ("values", "at_its_end"),
    [
        # The trials with the best mean and of the decision, which may be the same.
        (VALUES, {16, 64}),
        ({16: VALUES[64], 32: VALUES[32], 64: VALUES[16]}, {64}),
    ],
)
def test_delete_checkpoints_keeps_best_and_decided_trial(tmp_path, values, at_its_end):
    hypermodel = searches.stock(batch_sizes=(16, 32, 64))
    write_search(tmp_path / "search", values, **hypermodel.settings)
    tuner = searches.tuner(tmp_path, hypermodel, kbatch.BatchSizeTuner, executions_per_trial=3)
    tuner._delete_checkpoints()
    assert kept(tmp_path / "search") == at_its_end


def test_checkpoint_of_custom_fit_leaves_model_at_last_epoch(tmp_path):
    ended = []

    class Watches(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert not list(tmp_path.glob("**/*.h5"))

    class Own(keras_tuner.HyperModel):
        """Computes the objective after training."""

        def build(self, hp):
            return models.stock()

        def fit(self, hp, model, *args, **kwargs):
            model.fit(*args, **kwargs)
            ended.append(model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True))
            return {"mine": float(hp.get("batch_size"))}

    fit, objective = {"callbacks": [Watches()], "epochs": 4}, keras_tuner.Objective("mine", "max")
    hypermodel = searches.stock(Own(), (8,))
    tuner = searches.search(
        tmp_path, hypermodel, kbatch.BatchSizeTuner, objective=objective, fit=fit
    )
    (trial,) = kbatch.load_study(tuner).trials
    assert trial.failure is None
    assert len(list(tmp_path.glob("**/*.h5"))) == 1
    assert len(tuner.get_best_models()) == 1
    last = trial.executions[0].epochs[-1]
    assert ended[0]["loss"] == pytest.approx(last.metrics["val_loss"], rel=1e-5)


ACCURACY, LOSS = Objective("val_accuracy", "max"), Objective("val_loss", "min")
ACCURACIES = [{"val_accuracy": value} for value in (0.3, 0.5, 0.4, float("nan"))]
LATE = [{"val_loss": 0.1}, {"val_loss": 0.2, "f1": 0.7}, {"val_loss": 0.3, "f1": 0.6}]
# The best accuracy, the best loss, the least sum (-1.2), and the last epoch.
BOTH = [
    {"val_accuracy": accuracy, "val_loss": loss}
    for accuracy, loss in ((0.9, 0.5), (0.2, -0.6), (0.8, -0.4), (0.5, -0.5))
]
SUM = (Objective("multi_objective", "min"), (ACCURACY, LOSS))


@pytest.mark.parametrize(
    ("objective", "epochs", "before", "kept"),
    [
        ((ACCURACY,), ACCURACIES, 0.4, 1.0),
        ((ACCURACY,), ACCURACIES, 0.5, None),
        # The last epoch, because the objective is known only after training.
        ((Objective("mine", "max"),), ACCURACIES, 0.4, 3.0),
        ((Objective("f1", "max"),), LATE, None, 1.0),
        (SUM, BOTH, -1.1, 2.0),
        (SUM, BOTH, -1.3, None),
    ],
)
def test_best_epoch_writes_weights_of_best_epoch_of_all_runs(
    tmp_path, objective, epochs, before, kept
):
    assert checkpoint_of(BestEpoch(*objective), epochs, tmp_path, before) == kept


def checkpoint_of(best, epochs, folder, before):
    """Return the epoch whose weights are written. If none are, return None."""
    model = models.mlp()
    best.set_model(model)
    for epoch, logs in enumerate(epochs):
        for variable in model.trainable_variables:
            variable.assign(keras.ops.full(variable.shape, float(epoch)))
        best.on_epoch_end(epoch, logs)
    best.write_weights(model, folder, before)
    last = float(len(epochs) - 1)
    assert all(np.all(w == last) for w in model.get_weights())
    if not (folder / CHECKPOINT_NAME).exists():
        return None
    model.load_weights(folder / CHECKPOINT_NAME)
    (kept,) = {float(value) for w in model.get_weights() for value in w.ravel()}
    return kept
