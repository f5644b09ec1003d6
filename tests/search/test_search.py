"""Searches with stock tuners, and what is recorded of them."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

import kbatch


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A grid of two sizes, with its study."""
    tuner = searches.search(
        tmp_path_factory.mktemp("grid"), searches.hypermodel(batch_sizes=(8, 32))
    )
    return tuner, kbatch.load_study(tuner)


def test_every_trial_holds_what_really_happened(grid):
    study, record = grid[1], grid[1].search
    assert study.problems == ()
    assert (record.settings["batch_sizes"], record.settings["seed"]) == ([8, 32], 0)
    assert record.environment.versions["keras"] == keras.__version__
    assert [trial.batch_size for trial in study.trials] == [8, 32]
    assert [trial.accumulation_steps for trial in study.trials] == [1, 4]
    for trial in study.trials:
        (run,) = trial.executions
        assert trial.hyperparameters["batch_size"] == trial.batch_size
        # The noise scale is measured where the batch is cut.
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


@pytest.mark.parametrize(
    ("tuner", "arguments"),
    [
        pytest.param(keras_tuner.RandomSearch, {"max_trials": 2}, marks=pytest.mark.slow),
        (keras_tuner.Hyperband, {"max_epochs": 2}),
    ],
)
def test_every_tuner_sees_batch_size_from_the_first_trial_on(tmp_path, tuner, arguments):
    study = kbatch.load_study(
        searches.quick(tmp_path, searches.stock(batch_sizes=(16, 32)), tuner, **arguments)
    )
    assert study.trials
    for trial in study.trials:
        assert trial.status == "completed"
        assert trial.hyperparameters["batch_size"] == trial.executions[0].batch_size_seen


def test_several_policies_are_a_hyperparameter(tmp_path):
    policies = ["float32", "mixed_bfloat16"]
    study = kbatch.load_study(
        searches.quick(tmp_path, searches.stock(batch_sizes=(32,), dtype_policy=policies))
    )
    assert sorted(trial.dtype_policy for trial in study.trials) == policies
    assert not any(trial.executions[0].loss_scaled for trial in study.trials)


def test_throughput_can_be_the_objective(tmp_path):
    tuner = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(8, 32)),
        objective=keras_tuner.Objective("samples_per_second", "max"),
    )
    study = kbatch.load_study(tuner)
    fastest = max(study.trials, key=lambda trial: trial.samples_per_second)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == fastest.batch_size
    assert study.quality_metric.name == "val_accuracy"


class OwnFit(keras_tuner.HyperModel):
    """A HyperModel that prepares its data and names its arguments."""

    def build(self, hp):
        units = hp.Choice("units", [4, 8])
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(units),
                keras.layers.Dense(3, activation="softmax", dtype="float32"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def fit(self, hp, model, x, y, validation_data, **kwargs):
        history = model.fit(
            x * 2, y, validation_data=validation_data, batch_size=hp.get("batch_size"), **kwargs
        )
        return {"val_accuracy": max(history.history["val_accuracy"]), "mine": 1.0}


def test_a_hypermodel_of_the_users_keeps_its_space_and_its_fit(tmp_path):
    tuner = searches.search(tmp_path, searches.stock(OwnFit(), (32,)), fit={"epochs": 2})
    study = kbatch.load_study(tuner)
    table = study.to_dataframe()
    assert sorted(zip(table.batch_size, table.units, strict=True)) == [(32, 4), (32, 8)]
    for trial in tuner.oracle.trials.values():
        assert trial.metrics.get_history("mine")[0].value == [1.0]
        assert trial.metrics.exists("samples_per_second")


class CountBatches(keras.callbacks.Callback):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_batch_end(self, batch, logs=None):
        with self.file.open("a") as lines:
            lines.write("batch\n")


def test_callbacks_weights_and_epochs_pass_through(tmp_path):
    file = tmp_path / "batches"
    weights = np.zeros(94)
    study = kbatch.load_study(
        searches.quick(
            tmp_path,
            searches.stock(batch_sizes=(32,)),
            fit={"callbacks": [CountBatches(file)], "epochs": 3, "sample_weight": weights},
        )
    )
    assert file.read_text().count("batch") == 3 * 3
    (trial,) = study.trials
    assert len(trial.executions[0].epochs) == 3
    assert trial.executions[0].epochs[-1].metrics["loss"] == 0.0


def test_what_cannot_be_cut_stands_in_the_record_where_it_was_cut(tmp_path):
    def build():
        model = models.mlp()
        model.add(keras.layers.BatchNormalization(name="last_norm"))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with pytest.warns(UserWarning, match="last_norm"):
        search = searches.hypermodel(build, (8, 16), dtype_policy="float32")
        tuner = searches.quick(tmp_path, search)
    study = kbatch.load_study(tuner)
    whole, cut = study.trials
    assert searches.noted(study) == {"batch_normalization_in_parts"}
    assert whole.notes == ()
    assert "last_norm" in cut.notes[0]


class KeepWeights(keras.callbacks.Callback):
    """Writes the weights at the start and at the end of training."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    def on_train_begin(self, logs=None):
        self.keep("start")

    def on_train_end(self, logs=None):
        self.keep("end")

    def keep(self, name):
        count = len(list(self.directory.glob(f"{name}-*")))
        np.save(self.directory / f"{name}-{count}.npy", self.model.get_weights()[0])


def kept(directory, name):
    return [np.load(file) for file in sorted(directory.glob(f"{name}-*.npy"))]


def test_a_trial_trains_as_a_plain_fit_of_the_whole_batch_does(tmp_path):
    """Accumulation, seed and scaled schedule, seen in the weights."""
    decay = keras.optimizers.schedules.ExponentialDecay

    def build(rate=0.1, steps=16):
        return models.mlp(optimizer=keras.optimizers.SGD(decay(rate, steps, 0.5)))

    hypermodel = searches.hypermodel(
        build, (32,), base_batch_size=8, learning_rate_scaling="linear", dtype_policy="float32"
    )
    fit = {"callbacks": [KeepWeights(tmp_path)], "shuffle": False}
    searches.search(tmp_path, hypermodel, fit=fit)
    keras.utils.set_random_seed(0)
    plain = build(rate=0.4, steps=4)
    np.testing.assert_array_equal(kept(tmp_path, "start")[1], plain.get_weights()[0])
    plain.fit(*models.rows(94), batch_size=32, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(kept(tmp_path, "end")[1], plain.get_weights()[0], rtol=1e-4)


def test_a_model_built_after_the_search_starts_from_the_weights_of_its_trial(tmp_path):
    hypermodel = searches.stock(batch_sizes=(8,))
    fit = {"callbacks": [KeepWeights(tmp_path)]}
    tuner = searches.quick(tmp_path, hypermodel, fit=fit)
    for trial in tuner.oracle.trials.values():
        model = hypermodel.build(trial.hyperparameters)
        np.testing.assert_array_equal(model.get_weights()[0], kept(tmp_path, "start")[0])


class Returns(keras_tuner.HyperModel):
    """Returns an objective of its own."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def build(self, hp):
        return models.stock()

    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        return self.results(hp.get("batch_size"))


def test_what_a_fit_of_the_users_returns_is_what_counts(tmp_path):
    hypermodel = searches.stock(Returns(lambda size: -float(size)), (8, 32))
    tuner = searches.search(tmp_path, hypermodel, objective=None)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 32
    assert kbatch.load_study(tuner).best_trial().batch_size == 32


def test_a_loop_of_the_users_is_recorded_as_not_measured(tmp_path):
    class Loop(Returns):
        def fit(self, hp, model, x, y, **kwargs):
            loss = model.train_on_batch(x[:8], y[:8])[0]
            return {"val_accuracy": float(loss)}

    hypermodel = searches.stock(Loop(None), (8,))
    study = kbatch.load_study(searches.search(tmp_path, hypermodel))
    assert "nothing_timed" in searches.noted(study)
    ((run,),) = (trial.executions for trial in study.trials)
    assert (run.examples_seen, run.updates, run.train_s, run.total_s) == (None,) * 4
    assert "nothing was timed" in run.notes[-1]


def test_a_fit_that_goes_on_by_itself_does_not_go_on_from_another_trial(tmp_path):
    class EpochByEpoch(Returns):
        def fit(self, hp, model, *args, epochs, **kwargs):
            for epoch in range(epochs):
                model.fit(*args, epochs=epoch + 1, initial_epoch=epoch, **kwargs)
            return {"val_accuracy": 0.5}

    (trial,) = kbatch.load_study(
        searches.search(tmp_path, searches.stock(EpochByEpoch(None), (32,)))
    ).trials
    assert [epoch.epoch for epoch in trial.executions[0].epochs] == [0, 1]
    assert trial.notes == ()


def test_skipped_updates_are_not_counted(tmp_path):
    def build():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=2.0**18
        )
        return models.mlp(optimizer=optimizer)

    hypermodel = searches.hypermodel(build, (8,))
    study = kbatch.load_study(searches.quick(tmp_path, hypermodel))
    (run,) = study.trials[0].executions
    assert run.batches == 12
    assert 6 < run.updates < 12
    assert study.to_dataframe()["overflowed_updates"].tolist() == [12 - run.updates]


def test_a_trial_whose_build_fails_is_named(tmp_path):
    def build(hp):
        if hp.get("batch_size") == 32 and len(list(tmp_path.glob("search/trial_*"))) > 1:
            raise MemoryError("too large")
        return models.stock()

    study = kbatch.load_study(searches.quick(tmp_path, searches.stock(build, (8, 32))))
    assert [trial.batch_size for trial in study.trials] == [8]
    assert "too large" in study.problems[0]


class BuiltLate(keras.layers.Layer):
    """Makes a layer, whose weights are drawn at random, when it sees its first batch."""

    def build(self, shape):
        self.inner = keras.layers.Dense(8)
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def test_a_seed_decides_the_weights_of_layers_built_by_their_first_batch(tmp_path):
    def build():
        model = keras.Sequential([BuiltLate(), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    found = [
        searches.quick(tmp_path / name, searches.stock(build, (16,)), objective="loss")
        for name in "ab"
    ]
    one, other = (kbatch.load_study(tuner).trials[0].metrics["loss"] for tuner in found)
    assert one == other


def test_layers_built_by_their_first_batch_are_built_under_the_policy(tmp_path):
    policies = []

    class Late(keras.Model):
        def build(self, shape):
            self.last = keras.layers.Dense(3, activation="softmax")
            self.last.build(shape)
            policies.append(self.last.dtype_policy.name)

        def call(self, x):
            return self.last(x)

    def build():
        model = Late()
        # Of the whole loss some gradients overflow in float16, and the trial would go to float32.
        loss = "sparse_categorical_crossentropy"
        model.compile("sgd", loss, loss_weights=0.01, metrics=["accuracy"])
        return model

    searches.quick(tmp_path, searches.hypermodel(build, (16,)))
    assert set(policies) == {"mixed_float16"}


def test_a_fit_that_returns_nothing_usable_is_no_completed_trial(tmp_path):
    hypermodel = searches.stock(Returns(lambda size: "good"), (8,))
    with pytest.raises(TypeError, match="good"):
        searches.quick(tmp_path, hypermodel)
    assert kbatch.load_study(tmp_path / "search").trials[0].status == "failed"


class Unfreezing(keras_tuner.HyperModel):
    """Trains with frozen statistics first, as a fine-tuning does, and goes on with its own."""

    def build(self, hp):
        layers = [keras.layers.BatchNormalization(trainable=False), keras.layers.Dense(3)]
        return compiled(keras.Sequential([keras.layers.Input((8,)), *layers]))

    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        model.layers[0].trainable = True
        return compiled(model).fit(*args, **kwargs)


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


def test_a_model_that_changes_between_two_trainings_is_looked_at_again(tmp_path):
    search = searches.hypermodel(Unfreezing(), (16,), dtype_policy="float32")
    with pytest.warns(UserWarning, match="batch_normalization"):
        tuner = searches.quick(tmp_path, search)
    (trial,) = kbatch.load_study(tuner).trials
    assert any("batch_normalization (BatchNorm" in note for note in trial.notes)
