"""Searches with the forms of data and metrics that Keras takes."""

import re

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models
import tensorflow as tf
from batch_data import Rows
from tensorflow.python.framework.config import disable_op_determinism

import kbatch

RNG = np.random.default_rng(0)
X = RNG.normal(size=(94, 6)).astype("float32")
SIDES = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


def line():
    start = keras.initializers.GlorotUniform(3)
    parts = [keras.Input((6,)), keras.layers.Dense(1, kernel_initializer=start)]
    return small_models.compiled(parts, keras.optimizers.SGD(0.1), "mse")


def test_search_pydataset_trains_as_plain_fit(tmp_path):
    fit = {"validation_data": Rows((X, SIDES), 94), "shuffle": False}
    hypermodel = searches.hypermodel(
        line, (8, 16), micro_batch_size="auto", dtype_policy="float32", learning_rate_scaling=None
    )

    def search():
        arguments = {"data": (Rows((X, SIDES), 16),), "objective": "val_loss", "fit": fit}
        return searches.search(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)

    tuner = search()
    model = line()
    first, plain = model.get_weights(), {}
    for size in (8, 16):
        model.set_weights(first)
        plain[size] = model.fit(Rows((X, SIDES), size), epochs=2, verbose=0, **fit)
    study = kbatch.load_study(tuner)
    assert {trial.batch_size for trial in study.trials} == {8, 16}
    for trial in study.trials:
        losses = [epoch.metrics["val_loss"] for epoch in trial.executions[0].epochs]
        np.testing.assert_allclose(losses, plain[trial.batch_size].history["val_loss"], rtol=1e-5)
    # In a second search equal data have equal descriptions, so nothing is left to do.
    assert search().remaining_trials == 0


def judged_by_f1():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.F1Score(threshold=0.5)])
    return model


def test_search_objective_may_be_an_array_of_one_number(tmp_path):
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
    assert all(0 < trial.judged_value < 1 for trial in trials)
    logged = max(trial.metrics["val_f1_score"] for trial in trials)  # The value that Keras logs.
    assert tuner.oracle.get_best_trials(1)[0].score == logged


def text_net(vocabulary=30, length=6):
    def build():
        model = keras.Sequential(
            [
                keras.Input((length,), dtype="int32"),
                keras.layers.Embedding(vocabulary, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(5),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    return build


TOKENS, LABELS = np.arange(94 * 6).reshape(94, 6) % 30, np.arange(94) % 5


def of_generator(rows, *shapes):
    spec = tuple(tf.TensorSpec(shape, tf.int64) for shape in shapes)
    return tf.data.Dataset.from_generator(rows, output_signature=spec)


def broken_at(example):
    def rows():
        for i in range(94):
            if i == example:
                raise OSError(f"image {i} is broken")
            yield TOKENS[i], LABELS[i]

    return of_generator(rows, (6,), ())


def of_different_lengths():
    rows = [(np.ones(3 + i // 4, int), i % 5) for i in range(94)]
    return of_generator(lambda: iter(rows), (None,), ())


def two_f1_scores():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    return model


BOTH = (X, np.concatenate([SIDES, 1 - SIDES], axis=1))
TEXTS = (TOKENS, LABELS)


@pytest.mark.parametrize(
    ("build", "data", "objective", "cause"),
    [
        (text_net(vocabulary=20), TEXTS, "loss", r"every batch size: .*= 2\d is not in \[0, 20\)"),
        (text_net(), (broken_at(70),), "loss", "every batch size: .*OSError: image 70 is broken$"),
        (
            text_net(length=None),
            (of_different_lengths().padded_batch(4),),
            "loss",
            "give a function `batch_size -> dataset.padded_batch",
        ),
        (two_f1_scores, BOTH, keras_tuner.Objective("f1_score", "max"), "f1_score.* one number"),
    ],
    ids=["token in parts", "generator", "lengths", "metric"],
)
def test_search_ends_with_cause_if_no_size_can_train(
    tmp_path, build, data, objective, cause, request
):
    parts = 4 if "parts" in request.node.name else None
    hypermodel = searches.hypermodel(build, dtype_policy="float32", micro_batch_size=parts)
    arguments = {"data": data, "objective": objective}
    with pytest.raises(ValueError, match=cause):
        searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    (trial,) = kbatch.load_study(tmp_path / "search").trials
    if cause.startswith("every batch size: "):
        assert re.search(cause.removeprefix("every batch size: "), trial.failure)


class Tagger(keras.Model):
    """Declares no inputs, so only the data have shapes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = keras.layers.Embedding(30, 4), keras.layers.Dense(5)

    def call(self, x):
        return self.head(self.embed(x))


def tagger():
    model = Tagger()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


TAGS = tf.data.Dataset.from_tensor_slices((TOKENS, TOKENS % 5))
WHOLE = TAGS.batch(16, drop_remainder=True)


def flow(batch_size):
    """Keras's iterator over images, which `fit` can read again."""
    images = RNG.random((94, 2, 3, 1), "float32")
    generator = keras.src.legacy.preprocessing.image.ImageDataGenerator()
    return generator.flow(images, SIDES, batch_size=batch_size)


def of_images():
    parts = [keras.Input((2, 3, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
    return small_models.compiled(parts, "sgd", "mse")


class Undescribed(keras.optimizers.schedules.ExponentialDecay):
    def get_config(self):
        raise KeyError("decay")


def undescribed():
    return small_models.compiled(line(), keras.optimizers.SGD(Undescribed(0.1, 10, 0.9)), "mse")


FORMS = {
    "dataset without remainder": lambda: (tagger, (WHOLE.cache(),), WHOLE),
    "legacy iterator": lambda: (of_images, (flow(8),), flow(16)),
    "schedule whose get_config raises": lambda: (undescribed, (X, SIDES), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_search_takes_form_of_data_or_model(tmp_path, form):
    build, data, validation = FORMS[form]()
    arguments = {"data": data, "objective": "loss", "fit": {"validation_data": validation}}
    hypermodel = searches.stock(build, (8,))
    tuner = searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    assert [trial.failure for trial in tuner.study.trials] == [None]


def test_search_undeclared_model_follows_the_advice_for_single_examples(tmp_path):
    def search(data):
        arguments = {"data": (data,), "objective": "loss"}
        hypermodel = searches.stock(tagger, (8,))
        return searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)

    with pytest.raises(ValueError, match="a function `batch_size -> dataset"):
        search(TAGS)
    assert search(lambda batch_size: TAGS.batch(batch_size)).study.trials[0].failure is None


@pytest.fixture
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
def test_search_with_deterministic_operations_repeats_its_metrics(tmp_path):
    def metrics(name):
        hypermodel = searches.stock(line, (8,))
        arguments = {"data": (X, SIDES), "objective": "loss"}
        tuner = searches.quick(tmp_path / name, hypermodel, kbatch.BatchSizeTuner, **arguments)
        (run,) = tuner.study.trials[0].executions
        assert run.data_wait_s is None
        return run.epochs[0].metrics["loss"]

    keras.utils.set_random_seed(0)  # Deterministic operations need a seed.
    assert metrics("first") == metrics("second")


@pytest.mark.parametrize("broken", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_search_records_data_errors_for_each_size(tmp_path, broken):
    rows = tf.data.Dataset.from_tensor_slices((X, SIDES))

    def data(batch_size):
        if batch_size not in (8, 16) or batch_size == broken:
            raise KeyError(f"no file for {batch_size}")
        return rows.batch(batch_size)

    hypermodel = searches.hypermodel(line, (8, 16), micro_batch_size="auto", dtype_policy=None)
    arguments = {"data": (data,), "objective": "val_loss", "fit": {"validation_data": data}}
    tuner = searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    failures = {trial.batch_size: trial.failure for trial in tuner.study.trials}
    assert failures == {24 - broken: None, broken: f"KeyError: 'no file for {broken}'"}


# Rows that training does not read are not cached.
@pytest.mark.parametrize(("steps", "full"), [(6, True), (1, False)])
def test_search_fills_dataset_cache_before_timing(tmp_path, steps, full):
    rows_made, at_start = [], []

    def make(row):
        rows_made.append(row)
        return X[row], SIDES[row]

    def example(row):
        x, y = tf.numpy_function(make, [row], [tf.float32, tf.float32])
        return tf.ensure_shape(x, (6,)), tf.ensure_shape(y, (1,))

    class Begun(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            at_start.append(len(rows_made))

    data = tf.data.Dataset.range(94).map(example).cache().repeat()
    fit = {"callbacks": [Begun()], "steps_per_epoch": steps}
    hypermodel = searches.stock(line, (8, 16))
    searches.quick(tmp_path, hypermodel, data=(data,), objective="loss", fit=fit)
    # The search reads some rows before.
    assert (at_start[0] >= 94 and set(at_start) == {len(rows_made)}) is full
