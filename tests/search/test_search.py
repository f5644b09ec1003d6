"""Searches with keras-tuner's own tuners and with custom `fit` methods."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

import kbatch

layers = keras.layers


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The study of a grid of two sizes."""
    hypermodel = searches.hypermodel(batch_sizes=(8, 32))
    return kbatch.load_study(searches.search(tmp_path_factory.mktemp("grid"), hypermodel))


def test_grid_search_records_settings_and_counts_of_each_run(grid):
    record = grid.search
    assert grid.problems == ()
    assert (record.settings["batch_sizes"], record.settings["seed"]) == ([8, 32], 0)
    assert record.environment.versions["keras"] == keras.__version__
    assert [trial.batch_size for trial in grid.trials] == [8, 32]
    assert [trial.last.accumulation_steps for trial in grid.trials] == [1, 4]
    for trial in grid.trials:
        (run,) = trial.executions
        assert trial.hyperparameters["batch_size"] == trial.batch_size
        # The noise scale is measured only if the batch is cut.
        assert ("gradient_variance" in trial.metrics) == (trial.batch_size == 32)
        assert (run.status, run.seed) == ("completed", 0)
        assert run.batch_size_seen == trial.batch_size
        assert (run.dtype_policy, run.loss_scaled, run.optimizer) == ("mixed_float16", True, "Adam")
        assert run.micro_batch_size == 8
        assert run.examples_seen == 2 * 94
        assert run.batches == 2 * -(-94 // trial.batch_size)
        assert 0 < run.updates <= run.batches
        assert [epoch.examples for epoch in run.epochs] == [94, 94]
        assert {"accuracy", "loss", "val_accuracy", "val_loss"} <= run.epochs[0].metrics.keys()
        assert 0 <= run.data_wait_s <= run.train_s <= run.total_s
        assert 0 < run.first_step_s < run.total_s
        assert run.learning_rate == pytest.approx(1e-3 * (trial.batch_size / 8) ** 0.5, rel=1e-5)


def test_hyperband_sees_batch_size_from_first_trial(tmp_path):
    hypermodel = searches.stock(batch_sizes=(16, 32))
    study = kbatch.load_study(
        searches.quick(tmp_path, hypermodel, keras_tuner.Hyperband, max_epochs=2)
    )
    assert study.trials
    for trial in study.trials:
        assert trial.status == "completed"
        assert trial.hyperparameters["batch_size"] == trial.executions[0].batch_size_seen


class Returns(keras_tuner.HyperModel):
    """Returns a function of the batch size from `fit`."""

    def __init__(self, results=None):
        super().__init__()
        self.results = results

    def build(self, hp):
        return models.stock()

    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        return self.results(hp.get("batch_size"))


def test_custom_hypermodel_keeps_space_and_fit(tmp_path):
    class OwnFit(Returns):
        """Prepares its data and names its arguments."""

        def build(self, hp):
            hp.Choice("units", [4, 8])
            return models.stock()

        def fit(self, hp, model, x, y, validation_data, **kwargs):
            own = {"validation_data": validation_data, "batch_size": hp.get("batch_size")}
            history = model.fit(x * 2, y, **own, **kwargs)
            return {"val_accuracy": max(history.history["val_accuracy"]), "mine": 1.0}

    tuner = searches.search(tmp_path, searches.stock(OwnFit(), (32,)))
    table = kbatch.load_study(tuner).to_dataframe()
    assert sorted(zip(table.batch_size, table.units, strict=True)) == [(32, 4), (32, 8)]
    for trial in tuner.oracle.trials.values():
        assert trial.metrics.get_history("mine")[0].value == [1.0]
        assert trial.metrics.exists("samples_per_second")


def test_search_without_objective_minimises_number_of_custom_fit(tmp_path):
    hypermodel = searches.stock(Returns(lambda size: -float(size)), (8, 32))
    tuner = searches.quick(tmp_path, hypermodel, objective=None)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 32
    assert kbatch.load_study(tuner).decide().best.batch_size == 32


def test_custom_fit_epoch_by_epoch_records_one_run(tmp_path):
    class EpochByEpoch(Returns):
        def fit(self, hp, model, *args, epochs, **kwargs):
            for epoch in range(epochs):
                model.fit(*args, epochs=epoch + 1, initial_epoch=epoch, **kwargs)
            return {"val_accuracy": 0.5}

    study = kbatch.load_study(searches.search(tmp_path, searches.stock(EpochByEpoch(), (32,))))
    (trial,) = study.trials
    assert [epoch.epoch for epoch in trial.executions[0].epochs] == [0, 1]
    assert trial.notes == ()


class HistoryOfNumbers(Returns):
    def fit(self, hp, model, *args, **kwargs):
        history = model.fit(*args, **kwargs)
        history.history["val_accuracy"] = max(history.history["val_accuracy"])
        return history


class FitOfDict(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs).history


@pytest.mark.parametrize("kind", [HistoryOfNumbers, FitOfDict])
def test_search_refuses_history_without_lists(tmp_path, kind):
    def build():
        layers = keras.layers.Input((8,)), keras.layers.Dense(3, activation="softmax")
        return models.compiled(kind(layers), "sgd", models.own_loss, metrics=["accuracy"])

    custom = kind() if issubclass(kind, Returns) else build
    with pytest.raises(ValueError, match=r"custom `fit`.*Received: .*val_accuracy"):
        searches.search(tmp_path, searches.stock(custom, (32,)))
    (trial,) = kbatch.load_study(tmp_path / "search").trials
    assert trial.status == "failed"


KEPT = []


class KeepWeights(keras.callbacks.Callback):
    """Keeps the first weights at the start and at the end of each training."""

    def on_train_begin(self, logs=None):
        KEPT.append(self.model.get_weights()[0])

    on_train_end = on_train_begin


def test_trial_with_micro_batches_trains_as_plain_fit(tmp_path):
    """The weights show accumulation, seed and scaled schedule."""
    decay = keras.optimizers.schedules.ExponentialDecay

    def build(rate=0.1, steps=16):
        return models.mlp(optimizer=keras.optimizers.SGD(decay(rate, steps, 0.5)))

    hypermodel = searches.hypermodel(
        build, (32,), base_batch_size=8, learning_rate_scaling="linear", dtype_policy="float32"
    )
    fit = {"callbacks": [KeepWeights()], "shuffle": False}
    tuner = searches.search(tmp_path, hypermodel, fit=fit)
    keras.utils.set_random_seed(0)
    plain = build(rate=0.4, steps=4)
    np.testing.assert_array_equal(KEPT[2], plain.get_weights()[0])
    plain.fit(*models.rows(94), batch_size=32, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(KEPT[3], plain.get_weights()[0], rtol=1e-4)
    # A model that is built after the search has the first weights of its trial.
    (trial,) = (t for t in tuner.oracle.trials.values() if t.hyperparameters["batch_size"] == 32)
    np.testing.assert_array_equal(hypermodel.build(trial.hyperparameters).get_weights()[0], KEPT[2])


def test_record_counts_overflowed_updates(tmp_path):
    def build():
        sgd = keras.optimizers.SGD(0.01)
        return models.mlp(optimizer=keras.optimizers.LossScaleOptimizer(sgd, 2.0**18))

    study = kbatch.load_study(searches.quick(tmp_path, searches.hypermodel(build, (8,))))
    (run,) = study.trials[0].executions
    assert run.batches == 12
    assert 6 < run.updates < 12
    assert study.to_dataframe()["overflowed_updates"].tolist() == [12 - run.updates]
