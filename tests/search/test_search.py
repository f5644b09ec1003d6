"""Searches with stock tuners, and what is recorded of them."""

import json
import shutil
import time
from collections import Counter

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.page.numbers import percent

KINDS = {  # The grid is below.
    "random": (keras_tuner.RandomSearch, {"max_trials": 2}),
    "bayesian": (keras_tuner.BayesianOptimization, {"max_trials": 2}),
    "hyperband": (keras_tuner.Hyperband, {"max_epochs": 2}),
}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A grid of two sizes, with its study."""
    tuner = searches.search(
        tmp_path_factory.mktemp("grid"), searches.hypermodel(batch_sizes=(8, 32))
    )
    return tuner, kbatch.load_study(tuner)


def test_every_trial_holds_what_really_happened(grid):
    _, study = grid
    assert study.problems == ()
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


def test_keras_tuner_holds_the_same_figures(grid):
    tuner, study = grid
    for trial in study.trials:
        metrics = tuner.oracle.get_trial(trial.trial_id).metrics
        speed = metrics.get_history("samples_per_second")[0].value[0]
        assert speed == pytest.approx(trial.samples_per_second)
        accuracy = metrics.get_history("val_accuracy")[0].value[0]
        best = trial.executions[0].best_epoch("val_accuracy", "max")
        assert accuracy == pytest.approx(best.metrics["val_accuracy"])


def test_the_search_record_holds_settings_and_environment(grid):
    search = grid[1].search
    assert search.settings["batch_sizes"] == [8, 32]
    assert search.settings["seed"] == 0
    assert search.environment.versions["keras"] == keras.__version__


def test_best_hyperparameters_and_models_are_those_of_the_best_trial(grid):
    tuner, study = grid
    best = study.best_trial()
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size
    (model,) = tuner.get_best_models()
    result = model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True)
    assert result["accuracy"] == pytest.approx(best.best_objective_value)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(k, marks=pytest.mark.slow) for k in ("random", "bayesian")), "hyperband"],
)
def test_every_tuner_sees_batch_size_from_the_first_trial_on(tmp_path, kind):
    tuner, arguments = KINDS[kind]
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


def test_batches_of_a_dataset_are_cut_and_joined_to_the_size_of_the_trial(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(10)
    hypermodel = searches.stock(batch_sizes=(8, 32))
    study = kbatch.load_study(searches.quick(tmp_path, hypermodel, data=(data,)))
    for trial in study.trials:
        assert trial.executions[0].batch_size_seen == trial.batch_size
        assert trial.executions[0].examples_seen == 94


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


def test_class_weights_pass_through(tmp_path):
    study = kbatch.load_study(
        searches.quick(
            tmp_path,
            searches.stock(batch_sizes=(32,)),
            fit={"class_weight": {0: 0.0, 1: 0.0, 2: 0.0}},
        )
    )
    assert study.trials[0].executions[0].epochs[-1].metrics["loss"] == 0.0


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
    assert "Not equal to the whole batch" in cut.notes[0]
    assert "last_norm (BatchNormalization)" in cut.notes[0]


def test_validation_runs_at_one_batch_size_in_all_trials(tmp_path):
    lengths = []

    class Spy(keras.Model):
        def test_step(self, data):
            lengths.append(data[0].shape[0])
            return super().test_step(data)

    def build():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(4)(inputs)
        outputs = keras.layers.Dense(3, activation="softmax", dtype="float32")(hidden)
        model = Spy(inputs, outputs)
        model.compile(
            "sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True
        )
        return model

    hypermodel = searches.stock(build, (16, 32))
    searches.search(tmp_path, hypermodel, fit={"epochs": 1})
    # Each of the two trainings is validated once, on 40 examples in blocks of one.
    assert Counter(lengths) == {1: 2 * 40}


def test_a_failing_trial_is_recorded_with_its_cause(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("the disk is full\nand more")

    hypermodel = searches.stock(batch_sizes=(32,))
    tuner = searches.quick(tmp_path, hypermodel, fit={"callbacks": [Fails()]})
    (trial,) = kbatch.load_study(tuner).trials
    assert trial.status == "failed"
    assert trial.failure == "RuntimeError: the disk is full and more"


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, None])
def test_each_execution_starts_from_weights_of_its_own(tmp_path, seed):
    hypermodel = searches.stock(batch_sizes=(8,), seed=seed)
    fit = {"callbacks": [KeepWeights(tmp_path)]}
    searches.search(tmp_path, hypermodel, fit=fit, executions_per_trial=2)
    first, second = kept(tmp_path, "start")
    assert (first != second).any()


@pytest.mark.slow
def test_waiting_and_validation_are_told_apart_from_training(tmp_path):
    def slow(dataset):
        return dataset.map(lambda x, y: (tf.py_function(pause, [x], x.dtype), y)).map(
            lambda x, y: (tf.ensure_shape(x, (None, 8)), y)
        )

    def pause(x):
        time.sleep(0.2)
        return x

    def data(size):
        return slow(tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(size))

    tuner = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(32,)),
        data=(data,),
        fit={"validation_data": data},
    )
    study = kbatch.load_study(tuner)
    (run,) = study.trials[0].executions
    assert (run.batch_size_seen, run.examples_seen) == (32, 2 * 94)
    assert run.data_wait_s >= 0.5 * 6 * 0.2
    assert run.total_s >= run.train_s + 0.8 * 2 * 0.2
    # The first epoch compiles; in the second one there is little beside the waiting.
    assert run.data_wait_share > 0.3
    kbatch.write_report(study, tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert "input_binds" in {note.code for note in study.notes}
    assert percent(run.data_wait_share) in report


def test_an_interrupted_search_leaves_a_record(tmp_path):
    class Interrupts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    hypermodel = searches.stock(batch_sizes=(32,))
    with pytest.raises(KeyboardInterrupt):
        searches.quick(tmp_path, hypermodel, fit={"callbacks": [Interrupts()]})
    assert kbatch.load_study(tmp_path / "search").trials[0].status == "interrupted"


class FailsOnce(keras.callbacks.Callback):
    """Fails in the first run of all."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_end(self, logs=None):
        if not self.file.exists():
            self.file.touch()
            raise RuntimeError("once")


@pytest.mark.slow
def test_a_retried_trial_begins_again_with_its_first_execution(tmp_path):
    tuner = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(8,)),
        fit={"callbacks": [FailsOnce(tmp_path / "failed")]},
        executions_per_trial=2,
        max_retries_per_trial=1,
    )
    (trial,) = kbatch.load_study(tuner).trials
    assert [(run.status, run.seed) for run in trial.executions] == [
        ("completed", 0),
        ("completed", 1),
    ]


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


@pytest.mark.parametrize(
    ("results", "objective"),
    [
        pytest.param(
            lambda size: {"val_accuracy": size / 100}, "val_accuracy", marks=pytest.mark.slow
        ),
        (lambda size: -float(size), None),
    ],
    ids=["dict", "number"],
)
def test_what_a_fit_of_the_users_returns_is_what_counts(tmp_path, results, objective):
    hypermodel = searches.stock(Returns(results), (8, 32))
    tuner = searches.search(tmp_path, hypermodel, objective=objective)
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == 32
    assert kbatch.load_study(tuner).best_trial().batch_size == 32


@pytest.mark.slow
def test_several_objectives_are_weighed_as_keras_tuner_does(tmp_path):
    objective = ["val_accuracy", keras_tuner.Objective("val_loss", "min")]
    tuner = searches.search(tmp_path, searches.stock(batch_sizes=(8, 32)), objective=objective)
    best = kbatch.load_study(tuner).best_trial()
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size


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


def test_a_learning_rate_set_by_a_callback_is_noted(tmp_path):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01)
    hypermodel = searches.hypermodel(batch_sizes=(8,), dtype_policy="float32")
    study = kbatch.load_study(searches.quick(tmp_path, hypermodel, fit={"callbacks": [schedule]}))
    assert searches.noted(study) == {"first_learning_rate"}
    (trial,) = study.trials
    assert trial.learning_rate == pytest.approx(0.01)
    assert "0.01, not the 0.001" in trial.notes[0]


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


def test_what_a_hypermodel_declares_is_declared(tmp_path):
    class Declares(Returns):
        def declare_hyperparameters(self, hp):
            hp.Choice("units", [4, 8])

        def build(self, hp):
            assert hp.get("units") in (4, 8)
            return models.stock()

        def fit(self, hp, model, *args, **kwargs):
            return model.fit(*args, **kwargs)

    study = kbatch.load_study(searches.quick(tmp_path, searches.stock(Declares(None), (8,))))
    assert set(study.to_dataframe().units) == {4, 8}


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


def test_validation_in_a_batched_dataset_gives_no_warning(tmp_path, recwarn):
    validation = tf.data.Dataset.from_tensor_slices(models.rows(40, seed=1)).batch(7)
    searches.search(
        tmp_path, searches.stock(batch_sizes=(16,)), fit={"validation_data": validation}
    )
    assert not [w for w in recwarn if "ran out of data" in str(w.message)]


def test_a_damaged_record_leaves_the_other_trials(grid, tmp_path):
    project = shutil.copytree(grid[0].project_dir, tmp_path / "search")
    file = project / "trial_0000" / "kbatch.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"kbatch_schema": 999}))
    study = kbatch.load_study(project)
    assert [trial.batch_size for trial in study.trials] == [32]
    assert "trial_0000" in study.problems[0]
    assert "use the version of kbatch that wrote it" in study.problems[0]


class SummedPenalty(keras.layers.Layer):
    """Adds a sum over the batch: in parts it is another update."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x)))
        return x


def summed():
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(3), SummedPenalty(), keras.layers.Softmax()]
    )
    metrics = ["accuracy"]
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", metrics=metrics)
    return model


def test_a_cut_that_trains_otherwise_is_warned_of_and_noted(tmp_path):
    with pytest.warns(UserWarning, match=r"\(SummedPenalty\) adds differed by"):
        hypermodel = searches.hypermodel(summed, (16,), dtype_policy="float32")
        tuner = searches.quick(tmp_path, hypermodel)
    study = kbatch.load_study(tuner)
    assert searches.noted(study) == {"parts_differ"}
    assert "(SummedPenalty) adds differed by" in study.trials[0].notes[0]


class OfRagged(keras.Model):
    """Takes rows of varying length."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(3, activation="softmax", dtype="float32")

    def call(self, x):
        return self.head(x.to_tensor(shape=(None, 8)))


def test_data_whose_rows_cannot_be_taken_train_in_whole_batches(tmp_path):
    def build():
        model = OfRagged()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x, y = models.rows(94)
    rows = tf.data.Dataset.from_tensor_slices((tf.RaggedTensor.from_tensor(x), y)).batch(16)
    search = searches.stock(build, (32,), dtype_policy="float32")
    tuner = searches.quick(tmp_path, search, data=(rows,))
    (trial,) = kbatch.load_study(tuner).trials
    assert trial.status == "completed"


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
