"""The metric of the best epoch by blocks of validation examples, and what it leaves as it was."""

import functools
import itertools
import re

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models
import tensorflow as tf
from small_models import rows

import kbatch
from kbatch.search.timed_fit import TimedFit
from kbatch.study.trial import Objective
from kbatch.training.one_graph import OneGraph

VAL_ACCURACY = Objective("val_accuracy", "max")
VAL_LOSS = Objective("val_loss", "min")
VALIDATION = rows(40, seed=1)
layers = keras.layers


def dataset(arrays=VALIDATION):
    return tf.data.Dataset.from_tensor_slices(arrays)


class Timed(TimedFit):
    def outcomes(self):
        return self.best_epoch.outcomes(self._model)


@functools.cache
def shared():
    """A classifier that is traced once: what is compared holds whatever it has learnt."""
    return small_models.stock()


def trained(model=None, objective=VAL_LOSS, *, fits=1, plan=None, **fit):
    """A timed `fit` of two epochs that has ended, with 40 rows to validate on."""
    model = model or shared()
    timed = Timed(model, searches.plan(16, objective=objective, **(plan or {})))
    given = {"epochs": 2, "verbose": 0, "validation_data": VALIDATION} | fit
    with timed:
        for _ in range(fits):
            model.fit(*rows(48), **given)
    return timed


def best_value(timed, objective=VAL_LOSS):
    sign = -1 if objective.direction == "max" else 1
    known = [e for e in timed.clock.epochs if objective.name in e.metrics]
    best = min(known, key=lambda e: sign * e.metrics[objective.name])
    return best.epoch, best.metrics[objective.name]


def mean_of(outcomes):
    whole = outcomes.examples // outcomes.block_examples
    counts = [outcomes.block_examples] * whole + [outcomes.examples % outcomes.block_examples]
    return np.average(outcomes.values, weights=counts[: len(outcomes.values)])


def compiled(**arguments):
    model = small_models.stock()
    settings = {"loss": small_models.own_loss, "metrics": ["accuracy"]}
    model.compile("sgd", **(settings | arguments))
    model.compute_metrics = model.compute_metrics
    return model


class OwnTestStep(keras.Model):
    def test_step(self, data):
        x, y = data
        self.compute_loss(x=x, y=y, y_pred=(predicted := self(x, training=False)))
        return self.compute_metrics(x, y, predicted)


def own_test_step():
    given, found = keras.Input((8,)), layers.Dense(3, activation="softmax")
    model = OwnTestStep(given, found(given))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


WEIGHTS = np.linspace(0.5, 1.5, 40).astype("float32")
FORMS = {
    "arrays": {},
    "weights": {"fit": {"validation_data": (*VALIDATION, WEIGHTS)}},
    "examples": {"fit": {"validation_data": dataset()}},
    "batches": {"fit": {"validation_data": dataset().batch(16)}},
    "function": {"fit": {"validation_data": lambda size: dataset().batch(size)}},
    "steps_per_execution": {"model": lambda: compiled(steps_per_execution=3)},
    "xla": {"model": lambda: compiled(jit_compile=True)},
    "own test step": {"model": own_test_step},
    "every second epoch": {"fit": {"validation_freq": 2}},
    "two fits": {"fits": 2},
    "restored": {
        "fit": {
            "epochs": 4,
            "callbacks": [
                keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
            ],
        }
    },
}


@pytest.mark.parametrize(
    "form",
    [pytest.param(one, marks=pytest.mark.slow) if one == "xla" else one for one in FORMS],
)
def test_the_mean_over_blocks_is_the_metric_of_the_best_epoch(form):
    case = FORMS[form]
    timed = trained(case.get("model", shared)(), fits=case.get("fits", 1), **case.get("fit", {}))
    outcomes = timed.outcomes()
    assert outcomes.reason is None
    assert (outcomes.metric, outcomes.examples, len(outcomes.values)) == ("val_loss", 40, 40)
    epoch, value = best_value(timed)
    assert outcomes.epoch == epoch
    assert mean_of(outcomes) == pytest.approx(value, rel=1e-4)
    # The same rows in the same order, whatever they came in.
    assert outcomes.key == trained().outcomes().key if form == "batches" else True


def test_copies_of_the_best_weights_count_in_no_total():
    class Slow(keras.callbacks.Callback):
        """Lets the copy of the first epoch take a thousand seconds."""

        def on_epoch_end(self, epoch, logs=None):
            timed.best_epoch.copy_s += 1000.0 * (epoch == 0)

    model = small_models.stock()
    timed = Timed(model, searches.plan(16, objective=VAL_LOSS))
    with timed:
        model.fit(*rows(48), validation_data=VALIDATION, verbose=0, callbacks=[Slow()])
    assert timed.best_epoch.copy_s > 1000.0
    assert -1000.0 < timed.total_s < 0.0


def test_a_part_of_the_data_is_what_validation_took():
    split = trained(validation_data=None, validation_split=0.25).outcomes()
    assert (split.examples, split.reason) == (12, None)
    for data in (VALIDATION, dataset()):
        taken = {"validation_data": data, "validation_steps": 2, "epochs": 1}
        steps = trained(plan={"validation_batch_size": 8}, **taken).outcomes()
        assert (steps.examples, steps.reason) == (16, None)


def test_the_values_are_those_of_the_weights_of_the_best_epoch():
    class Spoiled(keras.callbacks.Callback):
        """Spoils the last epoch."""

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.set_weights([10 * one for one in self.model.get_weights()])

        def on_epoch_end(self, epoch, logs=None):
            weights[epoch] = self.model.get_weights()

    weights, model = {}, small_models.stock()
    x, y = rows(600, seed=1)
    timed = trained(model, validation_data=(x, y), epochs=3, callbacks=[Spoiled()])
    outcomes = timed.outcomes()
    for last, now in zip(weights[2], model.get_weights(), strict=True):
        np.testing.assert_array_equal(last, now)
    assert outcomes.epoch == best_value(timed)[0] < 2
    model.set_weights(weights[outcomes.epoch])
    losses = small_models.own_loss(y, model.predict(x, verbose=0)).numpy()
    expected = losses.reshape(-1, outcomes.block_examples).mean(1)
    np.testing.assert_allclose(outcomes.values, expected, rtol=1e-4)


def test_a_block_is_never_larger_than_a_validation_batch_and_takes_several():
    settings = {"validation_batch_size": 2}
    timed = trained(model := small_models.stock(), validation_data=rows(600, seed=1), plan=settings)
    seen, evaluate = [], model.test_function

    def watched(batches):
        batch = next(batches)
        seen.append(len(batch[1]))
        return evaluate(iter((batch,)))

    model.test_function = watched
    outcomes = timed.outcomes()
    assert (max(seen), outcomes.block_examples, len(outcomes.values)) == (2, 4, 150)
    assert mean_of(outcomes) == pytest.approx(best_value(timed)[1], rel=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("batch_size", [2, 32])
def test_blocks_of_arrays_take_the_graph_by_which_fit_validated(steps, batch_size):
    traced = []

    def counted(y, p):
        traced.append(len(traced))
        return small_models.own_loss(y, p)

    model = small_models.stock()
    model.compile("sgd", counted, metrics=["accuracy"], steps_per_execution=steps)
    # The count of steps is read by the graph, as in a search.
    assert OneGraph().model(model) is model
    x, y = rows(601, seed=1)
    settings = {"validation_batch_size": batch_size}
    timed = trained(model, validation_data=(x, y), plan=settings, epochs=1)
    before = len(traced)
    outcomes = timed.outcomes()
    assert len(traced) == before
    count = model.steps_per_execution
    assert int(count) == int(tf.convert_to_tensor(count)) == steps
    size = outcomes.block_examples
    losses = small_models.own_loss(y, model.predict(x, verbose=0)).numpy()
    expected = [losses[start : start + size].mean() for start in range(0, 601, size)]
    np.testing.assert_allclose(outcomes.values, expected, rtol=1e-4)
    traced.clear()
    model.evaluate(x, y, batch_size=batch_size, verbose=0)
    assert not traced


def test_the_model_is_as_before():
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    timed = trained(model)

    def state():
        held = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        return [np.array(one) for one in held]

    before, draw = state(), np.random.get_state()[1].copy()
    assert timed.outcomes().reason is None
    for was, now in zip(before, state(), strict=True):
        np.testing.assert_array_equal(was, now)
    np.testing.assert_array_equal(draw, np.random.get_state()[1])


def test_its_time_is_in_no_timing():
    timed = trained()
    before = (timed.total_s, timed.clock.train_s)
    timed.outcomes()
    assert (timed.total_s, timed.clock.train_s) == before


class Failing(keras.callbacks.Callback):
    """Lets memory run out in all that comes after training."""

    def on_train_end(self, logs=None):
        def fail(data):
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

        self.model.test_step, self.model.test_function = fail, None


class Largest(keras.metrics.Metric):
    """A metric that is no mean: the largest target."""

    def __init__(self):
        super().__init__(name="largest")
        self.found = self.add_weight(initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.found.assign(tf.maximum(self.found, tf.cast(tf.reduce_max(y), "float32")))

    def result(self):
        return self.found


@pytest.mark.parametrize(
    ("objective", "fit", "model", "reason"),
    [
        (VAL_LOSS, {"validation_data": None}, shared, "no epoch was validated"),
        (Objective("loss", "min"), {}, shared, "loss is a metric of training"),
        (VAL_LOSS, {"callbacks": [Failing()]}, small_models.stock, "not be measured: Resource"),
        (
            Objective("val_largest", "max"),
            {},
            lambda: compiled(metrics=[Largest()]),
            r"largest is no mean over validation examples, .*: 0\.\d+ by blocks of them, 2 in",
        ),
    ],
)
def test_why_there_are_none_is_said(objective, fit, model, reason):
    outcomes = trained(model(), objective, **fit).outcomes()
    assert outcomes.values is None
    assert re.search(reason, outcomes.reason)


@pytest.mark.parametrize(
    ("name", "model", "quality"),
    [
        ("samples_per_second", shared, "val_accuracy"),
        ("seconds_to_target", shared, "val_accuracy"),
        ("default_objective", lambda: compiled(metrics=[]), "val_loss"),
    ],
)
def test_an_objective_that_no_epoch_has_leaves_the_metric_of_quality(name, model, quality):
    timed = trained(model(), Objective(name, "max"), epochs=1)
    outcomes = timed.outcomes()
    assert (outcomes.metric, outcomes.reason) == (quality, None)


def padded(size):
    """Texts of up to 9 numbers, each batch as long as its longest."""
    x, y = VALIDATION
    lengths = np.arange(40) % 5 + 5
    texts = tf.data.Dataset.from_generator(
        lambda: ((x[k, 0].repeat(lengths[k]), y[k]) for k in range(40)),
        output_signature=(tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)),
    )
    return texts.padded_batch(size)


def test_batches_that_cannot_be_joined_are_blocks_themselves():
    model = keras.Sequential(
        [
            layers.Input((None,)),
            layers.Reshape((-1, 1)),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    timed = Timed(model, searches.plan(8, objective=VAL_LOSS, validation_batch_size=8))
    with timed:
        model.fit(padded, epochs=1, verbose=0, validation_data=padded)
    outcomes = timed.outcomes()
    assert (outcomes.reason, len(outcomes.values), outcomes.block_examples) == (None, 5, 8)


def runs_of(study):
    return [run for trial in study.trials for run in trial.executions]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search in half precision with two executions of each size."""
    hypermodel = searches.stock(batch_sizes=(8, 16), dtype_policy="mixed_float16")
    directory = tmp_path_factory.mktemp("search")
    tuner = searches.search(directory, hypermodel, executions_per_trial=2)
    return kbatch.load_study(tuner)


def test_executions_of_a_search_are_paired_by_example(searched):
    runs = runs_of(searched)
    assert len(runs) == 4
    assert {run.outcomes.reason for run in runs} == {None}
    assert len({(run.outcomes.key, run.outcomes.block_examples) for run in runs}) == 1
    for run in runs:
        best = run.best_epoch("val_accuracy", "max")
        assert (run.outcomes.metric, run.outcomes.epoch) == ("val_accuracy", best.epoch)
        assert mean_of(run.outcomes) == pytest.approx(best.metrics["val_accuracy"], rel=1e-4)


def test_a_shuffled_validation_set_is_noted_and_not_paired(tmp_path):
    shuffled = {"validation_data": dataset().shuffle(40).batch(16), "epochs": 1}
    hypermodel = searches.stock(batch_sizes=(8, 16))
    study = kbatch.load_study(searches.search(tmp_path, hypermodel, fit=shuffled))
    first, *others = runs_of(study)
    assert "validation_shuffled" not in [note.code for note in first.notes]
    for run in others:
        assert run.outcomes.reason is None
        assert run.outcomes.key != first.outcomes.key
        assert run.outcomes.set_key == first.outcomes.set_key
        assert "validation_shuffled" in [note.code for note in run.notes]


def test_other_validation_rows_in_another_trial_are_refused(tmp_path):
    calls = itertools.count()

    def other_rows(size):
        return dataset(rows(40, seed=next(calls))).batch(size)

    with pytest.raises(ValueError, match=r"other rows than an earlier one.*`drop_remainder`"):
        hypermodel = searches.stock(batch_sizes=(16, 32))
        searches.search(tmp_path, hypermodel, fit={"validation_data": other_rows, "epochs": 1})
    first, second = runs_of(kbatch.load_study(tmp_path / "search"))
    assert (first.status, second.status) == ("completed", "failed")
    assert second.outcomes is None


def test_data_that_follow_another_hyperparameter_are_no_other_rows(tmp_path):
    class Folds(keras_tuner.HyperModel):
        def build(self, hp):
            hp.Int("fold", 0, 1)
            return small_models.stock()

        def fit(self, hp, model, x, y, **kwargs):
            kwargs["validation_data"] = rows(40, seed=hp.get("fold"))
            return model.fit(x, y, **kwargs)

    tuner = searches.search(tmp_path, searches.stock(Folds(), (16,)), fit={"epochs": 1})
    runs = runs_of(kbatch.load_study(tuner))
    assert len(runs) == 2
    assert len({run.outcomes.key for run in runs}) == 2
