"""Data and metrics in the forms that Keras takes, searched as `fit` trains them."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches

import kbatch

RNG = np.random.default_rng(0)
X = RNG.normal(size=(94, 6)).astype("float32")
SIDES = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


def judged_by_f1():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.F1Score(threshold=0.5)])
    return model


def test_a_metric_that_is_an_array_of_one_number_is_a_metric(tmp_path):
    objective = keras_tuner.Objective("val_f1_score", "max")
    stop = kbatch.StopAtTarget("val_f1_score", 1.1, mode="max")
    fit = {"validation_split": 0.25, "validation_data": None, "callbacks": [stop]}
    tuner = searches.search(
        tmp_path,
        searches.stock(judged_by_f1, (8, 16)),
        kbatch.BatchSizeTuner,
        data=(X, SIDES),
        fit=fit,
        objective=objective,
    )
    trials = kbatch.load_study(tuner).trials
    assert [trial.status for trial in trials] == ["completed"] * 2
    assert all(0 < trial.objective_value < 1 for trial in trials)
    assert tuner.oracle.get_best_trials(1)[0].score == max(t.objective_value for t in trials)


def test_a_metric_of_several_numbers_is_no_objective(tmp_path):
    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        return model

    objective = keras_tuner.Objective("f1_score", "max")
    data = (X, np.concatenate([SIDES, 1 - SIDES], axis=1))
    with pytest.raises(ValueError, match=r"f1_score.* one number"):
        searches.quick(
            tmp_path,
            searches.stock(build, (8,)),
            kbatch.BatchSizeTuner,
            data=data,
            objective=objective,
        )
