"""Which trials of a search count as completed, and by which value sizes are compared."""

import functools

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models
from keras_tuner.engine.trial import TrialStatus

import kbatch
from kbatch.records.training_run import Budget, Target
from kbatch.search.plan import loss_is_sum
from kbatch.training.data.training_data import TrainingData

layers = keras.layers
HALF = {"dtype_policy": "mixed_float16", "micro_batch_size": None}


def test_trial_without_an_update_fails(tmp_path):
    def overflowing(hp):
        """A classifier whose scaled gradients overflow in every step of batch size 16."""
        sgd, scale = keras.optimizers.SGD(0.01), 2.0 ** (120 if hp.get("batch_size") == 16 else 10)
        return small_models.mlp(optimizer=keras.optimizers.LossScaleOptimizer(sgd, scale))

    hypermodel = searches.hypermodel(overflowing, (8, 16), **HALF)
    tuner = searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, objective="loss")
    completed, failed = (study := kbatch.load_study(tuner)).trials
    assert (failed.status, failed.executions[0].updates) == ("failed", 0)
    assert "the gradients of every batch overflowed" in failed.failure
    assert completed.status == "completed" and completed.executions[0].updates > 0
    assert study.decide().best == completed
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 8
    statuses = {t.hyperparameters.get("batch_size"): t.status for t in tuner.oracle.trials.values()}
    assert statuses == {8: TrialStatus.COMPLETED, 16: TrialStatus.FAILED}


def penalised():
    """Build a model with a mean loss and a larger penalty on weights."""
    return regression("mse", kernel_regularizer=keras.regularizers.L2(10.0))


def summed():
    return regression(keras.losses.MeanSquaredError(reduction="sum"))


def regression(loss, **arguments):
    parts = [layers.Input((8,)), layers.Dense(1, **arguments)]
    return small_models.compiled(parts, keras.optimizers.SGD(1e-6), loss)


X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.arange(64, dtype="float32")[:, None] % 5


@pytest.mark.parametrize("build", [summed, penalised])
def test_search_compares_a_summed_loss_by_row(tmp_path, build):
    hypermodel = searches.stock(build, (8, 32))
    arguments = {"objective": "loss", "data": (X, Y)}
    tuner = searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    study = kbatch.load_study(tuner)
    small, large = (trial.judged_value for trial in study.trials)
    assert small == pytest.approx(large, rel=0.02)
    scores = [tuner.oracle.trials[trial.trial_id].score for trial in study.trials]
    assert scores == pytest.approx([small, large])


def test_loss_is_sum_of_a_loss_that_compares_rows_is_false():
    def of_others(y_true, y_pred):
        others = keras.ops.cast(keras.ops.shape(y_pred)[0] - 1, "float32")
        return keras.ops.log(others) + 0.0 * keras.ops.mean(y_pred)

    assert not loss_is_sum(regression(of_others), TrainingData(X, Y))
    assert loss_is_sum(summed(), TrainingData(X, Y))


def to_target(directory, target, *callbacks, build=small_models.stock, sizes=(32,), **arguments):
    """Search for the size that needs the least time to a target."""
    return searches.search(
        directory,
        searches.stock(build, sizes),
        kbatch.BatchSizeTuner,
        objective=keras_tuner.Objective("seconds_to_target", "min"),
        fit={"epochs": 100, "callbacks": [target, *callbacks], "validation_data": None},
        **arguments,
    )


def test_target_of_a_summed_loss_is_by_row(tmp_path):
    target = kbatch.StopAtTarget("loss", 100.0)
    (trial,) = kbatch.load_study(to_target(tmp_path, target, build=summed, data=(X, Y))).trials
    assert trial.last.updates == 2  # One epoch: the sum over 32 rows is above it, the mean below.


def test_seconds_to_target_is_an_objective(tmp_path):
    easy = kbatch.StopAtTarget("accuracy", 0.35), kbatch.UpdateBudget(40)
    build = functools.partial(small_models.mlp, optimizer="sgd")
    tuner = to_target(tmp_path, *easy, build=build, sizes=(16, 32))
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    for trial in study.trials:
        (run,) = trial.executions
        assert run.target == Target("accuracy", 0.35, "max")
        assert run.budget == Budget(updates=40)
        score = tuner.oracle.get_trial(trial.trial_id).score
        # The run ends with the epoch that meets the target.
        assert score == trial.judged_value == sum(epoch.train_s for epoch in run.epochs) > 0
        assert run.updates <= 40
    best = min(study.trials, key=lambda trial: trial.judged_value)
    assert study.decide().best is best
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size
    frame = study.to_dataframe()
    assert list(frame.seconds_to_target) == [trial.judged_value for trial in study.trials]


def test_target_never_met_is_a_result(tmp_path):
    hard = kbatch.StopAtTarget("accuracy", 1.1), kbatch.UpdateBudget(4)
    study = kbatch.load_study(to_target(tmp_path, *hard, sizes=(16, 32)))
    found = [(trial.status, trial.executions[0].updates) for trial in study.trials]
    assert found == [("completed", 4)] * 2
    assert [trial.judged_value for trial in study.trials] == [None] * 2
    assert study.decide().best is None
