"""Errors of invalid arguments, at once or before the second trial."""

import math
import threading
import traceback
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from stub_executor import StubExecutor

import kbatch


class Mine(keras_tuner.HyperModel):
    """Has no `build`."""


class Held:
    """Has a lock, so it cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, logs=None):
        pass


def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])


def without_optimizer():
    return models.compiled(uncompiled(), optimizer=None, loss="mse")


def hypermodel(**arguments):
    return lambda folder: searches.hypermodel(**arguments)


def explored(build):
    return lambda folder: searches.tuner(folder, searches.hypermodel(build))


def tuner(**arguments):
    plain = {"build": searches.stock(), "objective": "val_accuracy", "strategy": "grid"}
    return lambda folder: kbatch.BatchSizeTuner(**({"directory": folder} | plain | arguments))


def race(**arguments):
    return tuner(**({"strategy": "race"} | arguments))


def live(*arguments, **keywords):
    return lambda folder: kbatch.LivePlot(*arguments, **keywords)


AT_ONCE = [
    (hypermodel(batch_sizes=()), ValueError, "ascending"),
    (hypermodel(micro_batch_size=0), ValueError, "micro_batch_size=0"),
    (hypermodel(micro_batch_size="large"), ValueError, "micro_batch_size='large'"),
    (hypermodel(steps_per_execution=0), ValueError, "steps_per_execution"),
    (hypermodel(memory_limit_bytes=5), ValueError, "memory_limit_bytes=5"),
    (hypermodel(dtype_policy="float12"), ValueError, "mixed_float16"),
    (hypermodel(dtype_policy=()), ValueError, "one or more"),
    (hypermodel(learning_rate_scaling="cubic"), ValueError, "'linear'"),
    (hypermodel(follow_batch_size=("momentum",)), ValueError, "momentum"),
    (hypermodel(seed=-1), ValueError, "seed=-1"),
    (hypermodel(base_batch_size=0), ValueError, "base_batch_size=0"),
    (hypermodel(build=3), TypeError, "build=3"),
    (hypermodel(build=Mine), TypeError, r"Mine\(\)"),
    (explored(lambda: None), ValueError, "return model"),
    (explored(uncompiled), ValueError, "compiled"),
    (explored(without_optimizer), ValueError, "optimizer=None"),
    (tuner(build=models.mlp()), TypeError, "not a model"),
    (tuner(batch_sizes=(8, 16)), ValueError, "leave them out"),
    (tuner(build=models.mlp, batch_sizes=(16, 8)), ValueError, "ascending"),
    (tuner(objective=None), ValueError, "objective=None"),
    (tuner(objective="val_acuracy"), ValueError, r"'val_accuracy'.*Objective\('val_acuracy', "),
    (tuner(objective="val_neg_mean_squared_error"), ValueError, "larger or smaller"),
    (tuner(objective="val_minus_loss"), ValueError, "larger or smaller"),
    (tuner(objective="val_score_mean"), ValueError, "larger or smaller"),
    (tuner(search_learning_rate=True), ValueError, "search_learning_rate=True"),
    (tuner(strategy="random"), ValueError, "strategy='random'"),
    (tuner(executions_per_trial=0), ValueError, "executions_per_trial=0"),
    (tuner(max_trainings=9), ValueError, "max_trainings=9"),
    (tuner(directory="/proc/nothing"), ValueError, "/proc/nothing"),
    (tuner(directory="s3://bucket/results"), ValueError, "must be local"),
    (tuner(executor="slurm"), ValueError, "submit"),
    (tuner(executor=StubExecutor(), max_parallel=0), ValueError, "positive"),
    (tuner(max_parallel=2), ValueError, "give an executor"),
    (tuner(executor=StubExecutor(), distribution_strategy=3), ValueError, "_strategy=3"),
    (race(executions_per_trial=3), ValueError, "executions_per_trial"),
    (race(max_trainings=0), ValueError, "max_trainings"),
    *((race(time_budget_s=s), ValueError, "time_budget_s") for s in (-1, "600", math.inf, True)),
    (race(tolerance=-0.1), ValueError, "tolerance"),
    (race(confidence=1.0), ValueError, "confidence"),
    (live("live.gif"), ValueError, "live.gif"),
    (live(interval_s=-1), ValueError, "interval_s=-1"),
]


@pytest.mark.parametrize(("call", "error", "word"), AT_ONCE)
def test_invalid_argument_raises_before_any_trial(tmp_path, call, error, word):
    with pytest.raises(error, match=word):
        call(tmp_path)
    assert not list(tmp_path.glob("search/trial_*"))


def dataset():
    return tf.data.Dataset.from_tensor_slices(models.rows(94))


def searched(
    *,
    build=models.stock,
    data=None,
    fit=None,
    sizes=(8, 32, 128),
    kind=keras_tuner.GridSearch,
    **tuner,
):
    def search(folder):
        tuned = searches.stock(build, batch_sizes=sizes)
        return searches.search(folder, tuned, kind, data=data and data(), fit=fit, **tuner)

    return search


def raced(**arguments):
    given = {"kind": kbatch.BatchSizeTuner, "sizes": (8, 32), "strategy": "race"}
    return searched(**(given | arguments))


def five(hp):
    hp.Choice("units", [1, 2, 3, 4, 5])
    return models.stock()


def one_hot():
    x, y = models.rows(94)
    return x, np.eye(3)[y]


SMALL, ALONE = {"sizes": (8, 32)}, {"validation_data": None}
OWN = {"kind": kbatch.BatchSizeTuner} | SMALL
SENT = OWN | {"executor": StubExecutor()}
HOLDS = keras.callbacks.LambdaCallback(on_train_end=Held())
TO_TARGET = keras_tuner.Objective("seconds_to_target", "min")
ENDED = [
    (searched(data=lambda: ((models.rows(8) for _ in range(2)),)), "cannot cut"),
    (searched(fit={"batch_size": 8}, **OWN), "batch_size=8"),
    (searched(fit={"callbacks": 3}, **OWN), "callbacks=3"),
    (searched(), "batch_size=128 for 94"),
    (searched(data=lambda: (dataset().take(90).batch(10),)), "batch_size=128 for 90"),
    (searched(data=lambda: ()), "`x` are required"),
    (searched(data=lambda: (dataset().repeat(),), **SMALL), "steps_per_epoch"),
    (searched(data=lambda: (lambda size: dataset().batch(50),), **SMALL), "50 examples"),
    (searched(build=models.linear, data=one_hot, **SMALL), "argmax"),
    (searched(fit={"epochs": 0}, **SMALL), "epochs=0"),
    (searched(fit={"initial_epoch": 2}, **SMALL), "initial_epoch=2"),
    (searched(fit={"steps_per_epoch": 0}, **SMALL), "steps_per_epoch=0"),
    (searched(fit=ALONE | {"validation_split": 1.5}, **SMALL), "split=1.5"),
    (searched(fit=ALONE | {"validation_split": "0.2"}, **SMALL), "split='0.2'"),
    (searched(fit={"epoch": 5}, **OWN), "argument 'epoch'"),
    (searched(fit={"verbose": "loud"}, **OWN), "verbose='loud'"),
    (searched(fit=ALONE, **SMALL), "val_accuracy"),
    (searched(objective=TO_TARGET, **SMALL), "StopAtTarget"),
    (searched(data=lambda: (dataset().batch(8),), fit=ALONE, **SENT), "must not be a dataset"),
    (searched(fit={"callbacks": [HOLDS]}, **SENT), "Received: callbacks: "),
    (raced(build=five), "at most 4 combinations"),
    (raced(fit={"callbacks": [kbatch.StopAtTarget("val_accuracy", 0.5)]}), "StopAtTarget"),
]


@pytest.mark.parametrize(("search", "word"), ENDED)
def test_search_ends_before_second_trial_if_no_size_can_train(tmp_path, monkeypatch, search, word):
    # Exploring the space in this process is faster.
    monkeypatch.setattr("kbatch.search.tuner.explored_space", lambda tuner: tuner.explore())
    with pytest.raises(ValueError, match=word):
        search(tmp_path)
    assert not list(tmp_path.glob("search/trial_0001"))


def dense_of_four():
    return keras.Sequential([keras.layers.Dense("four")])


@pytest.mark.parametrize(
    ("call", "last"),
    [
        (tuner(build=dense_of_four, batch_sizes=(8,)), "dense_of_four"),
        (searched(fit={"epochs": 0}, **OWN), "search"),
    ],
)
def test_error_traceback_has_only_frames_of_the_user(tmp_path, call, last):
    with pytest.raises(ValueError) as raised:
        call(tmp_path)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert {Path(frame.filename).parent for frame in frames} == {Path(__file__).parent}
    assert frames[-1].name == last
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("place", ["file", "project"])
def test_tuner_refuses_a_file_as_directory(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "search").write_text("")
    directory = tmp_path if place == "project" else tmp_path / place
    with pytest.raises(ValueError, match="must be a folder"):
        searches.tuner(directory, searches.stock(), kbatch.BatchSizeTuner)


def test_search_ends_if_directory_cannot_be_written(tmp_path):
    tuner = searches.tuner(tmp_path, searches.hypermodel())
    (tmp_path / "search" / "kbatch.json").mkdir()
    with pytest.raises((OSError, ValueError), match=r"kbatch\.json"):
        tuner.search(*models.rows(94), validation_data=models.rows(40), verbose=0)


@pytest.mark.parametrize("sizes", [(8, 64), (64, 128)])
def test_batch_sizes_can_change_until_a_trial_has_a_result(tmp_path, sizes):
    def searched(sizes):
        found = searches.stock(batch_sizes=sizes, base_batch_size=None)
        return searches.quick(tmp_path, found, kbatch.BatchSizeTuner, data=models.rows(40))

    with pytest.raises(ValueError, match="leave out the batch sizes above 40"):
        searched(sizes)
    study = searched((8,)).study
    assert [(trial.batch_size, trial.status) for trial in study.trials] == [(8, "completed")]
    with pytest.raises(ValueError, match="another search"):
        searched((16,))


def test_hypermodel_fit_refuses_callbacks_without_a_trial():
    hypermodel, hp = searches.stock(), keras_tuner.HyperParameters()
    with pytest.raises(ValueError, match="TunerCallback"):
        hypermodel.fit(hp, hypermodel.build(hp), *models.rows(16))


def test_tuner_refuses_chief_of_keras_tuner(tmp_path, monkeypatch):
    for name in ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT", "KERASTUNER_TUNER_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="executor="):
        tuner()(tmp_path)


def test_objective_samples_per_second_fails_with_too_few_steps(tmp_path):
    objective = keras_tuner.Objective("samples_per_second", "max")
    hypermodel = searches.stock(batch_sizes=(94,))
    tuner = searches.search(tmp_path, hypermodel, objective=objective, fit={"epochs": 1})
    (trial,) = kbatch.load_study(tuner).trials
    assert trial.status == "failed"
    assert "samples/s" in trial.failure
