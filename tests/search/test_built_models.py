"""Models of a search: settings that follow the batch size, and parts that must be new."""

import functools

import keras
import keras_tuner
import numpy as np
import pytest
import searches

import kbatch
from kbatch.analysis.learning_rate import FACTOR_NAME

layers, optimizers = keras.layers, keras.optimizers
schedules = optimizers.schedules
ROWS = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
LABELS = (ROWS.sum(axis=1) > 0).astype("int32")


def classifier(optimizer):
    dense = layers.Dense(2, kernel_initializer="zeros", dtype="float32")
    model = keras.Sequential([keras.Input((4,)), dense])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def built(build, batch_size=32, *, factor=None, **settings):
    """Build the model of a trial, by a function of the batch size. The base size is 8.

    If a factor of the learning rate is given, a race tries it.
    """
    settings = {"learning_rate_scaling": "linear", "base_batch_size": 8} | settings
    hypermodel = searches.stock(lambda hp: build(hp.get("batch_size")), (8, 32), **settings)
    hp = keras_tuner.HyperParameters()
    hp.Choice("batch_size", [8, 32])
    hp.values["batch_size"] = batch_size
    if factor is not None:
        hypermodel.searches_rate = True
        hp.values[FACTOR_NAME] = factor
    return hypermodel.build(hp)


def optimizer_of(make, batch_size=32, **settings):
    return built(lambda size: classifier(make(size)), batch_size, **settings).optimizer


@pytest.mark.parametrize(
    ("batch_sizes", "chosen", "base", "tried"),
    [
        ((16, 64), None, 32, (16, 32, 64)),
        ((8, 16), None, 16, (8, 16)),
        ((64, 128), None, 64, (64, 128)),
        ((16, 32), np.int64(8), 8, (8, 16, 32)),
    ],
)
def test_base_batch_size_is_32_or_nearest_and_always_tried(batch_sizes, chosen, base, tried):
    hypermodel = searches.stock(batch_sizes=batch_sizes, base_batch_size=chosen)
    assert (hypermodel.base_batch_size, hypermodel.batch_sizes) == (base, tried)
    assert hypermodel.base_added == (base not in batch_sizes)


def test_build_scales_ema_to_keep_half_life_in_examples():
    def averaging(batch_size):
        return optimizers.SGD(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=10)

    for rule in ("linear", None):
        large = optimizer_of(averaging, learning_rate_scaling=rule)
        assert large.ema_momentum == pytest.approx(0.9**4)
        assert large.ema_overwrite_frequency == 2
    unscaled = optimizer_of(averaging, 8), optimizer_of(averaging, follow_batch_size=("beta_2",))
    for one in unscaled:
        assert (one.ema_momentum, one.ema_overwrite_frequency) == (0.9, 10)


def test_search_with_swap_ema_and_scheduler_keeps_validated_weights(tmp_path):
    callbacks = [
        keras.callbacks.SwapEMAWeights(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else 0.01),
    ]
    tuner = searches.search(
        tmp_path,
        searches.stock(
            lambda: classifier(optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)),
            (8, 32),
            learning_rate_scaling="linear",
            base_batch_size=8,
        ),
        kbatch.BatchSizeTuner,
        data=(ROWS, LABELS),
        fit={"validation_data": (ROWS, LABELS), "epochs": 3, "callbacks": callbacks},
        objective="val_loss",
    )
    study = tuner.study
    assert study.to_dataframe()["learning_rate"].round(6).tolist() == [0.1, 0.4]
    runs = [trial.executions[0] for trial in study.trials]
    assert [epoch.learning_rate for epoch in runs[1].epochs] == pytest.approx([0.4, 0.01, 0.01])
    assert runs[1].rate_callbacks == ("LearningRateScheduler",)
    assert [run.outcomes.reason for run in runs] == [None, None]
    assert runs[1].scaling.made["ema_momentum"] == (pytest.approx(0.9**4),)
    best = study.decide().trial.metrics["val_loss"]
    evaluated = tuner.get_best_models()[0].evaluate(ROWS, LABELS, verbose=0, return_dict=True)
    assert evaluated["loss"] == pytest.approx(best, rel=1e-5)


class Own(schedules.LearningRateSchedule):
    def __init__(self, updates):
        self.updates = updates

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") / self.updates)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # Only the part that does not read the size is scaled: the rates, the steps, or both.
        (lambda b: schedules.CosineDecay(0.1, 320 // b), (0.4, 0.2)),
        (lambda b: schedules.CosineDecay(0.1 * b / 8, 40), (0.4, 0.2)),
        (lambda b: schedules.CosineDecay(0.1, 40), (0.4, 0.2)),
        (lambda b: Own(40 / b), (0.1, 0.1 / 5)),
        (lambda b: Own(20), (0.4, 0.2)),
        (lambda b: 0.1 * b / 8, (0.4, 0.4)),
    ],
)
def test_build_does_not_scale_rates_that_read_the_batch_size(optimizer, expected):
    scaled, read = optimizer_of(lambda b: optimizers.SGD(optimizer(b))), []
    for step in (0, 5):
        scaled.iterations.assign(step)
        read.append(float(scaled.learning_rate))
    assert read == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "rule", "ratio"),
    [(optimizers.SGD, "auto", 4.0), (optimizers.AdamW, "auto", 2.0), (optimizers.SGD, None, 1.0)],
)
def test_build_multiplies_the_scaled_rate_by_the_factor(optimizer, rule, ratio):
    for factor in (0.25, 8.0):
        settings = {"factor": factor, "learning_rate_scaling": rule}
        scaled = optimizer_of(lambda b: optimizer(0.01, weight_decay=0.01), **settings)
        np.testing.assert_allclose(float(scaled.learning_rate), 0.01 * ratio * factor, rtol=1e-6)
        # The weight decay per example does not change.
        decay = float(scaled.learning_rate) * scaled.weight_decay
        assert decay == pytest.approx(0.01 * 0.01 * 4)
        # The peak of a schedule is scaled, and its steps cover the same number of examples.
        scaled = optimizer_of(lambda b: optimizer(schedules.CosineDecay(0.1, 80)), **settings)
        config = scaled._learning_rate.get_config()
        assert config["initial_learning_rate"] == pytest.approx(0.1 * ratio * factor)
        assert config["decay_steps"] == (20 if rule else 80)


class Holder(keras_tuner.HyperModel):
    """A HyperModel whose models share a part."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def build(self, hp):
        return holding(self.part)


PRETRAINED = []


def holding(part):
    """A model with a given layer, optimizer or metric."""
    is_layer = isinstance(part, keras.layers.Layer)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(part(inputs) if is_layer else inputs))
    optimizer = part if isinstance(part, optimizers.Optimizer) else "sgd"
    metrics = [part] if isinstance(part, keras.Metric) else []
    model.compile(optimizer, "mse", metrics=metrics, run_eagerly=True)  # Nothing is traced.
    return model


def dense():
    layer = layers.Dense(4)
    layer.build((None, 4))
    return layer


def base(*more, trainable=True):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), *more])
    model.trainable = trainable
    return model


def adapted():
    layer = layers.Normalization()
    layer.adapt(ROWS)
    return layer


def of_global():
    PRETRAINED[:] = [dense()]
    return lambda: holding(PRETRAINED[0])


def of(make):
    part = make()
    return lambda: holding(part)


def of_model():
    return functools.cache(lambda: holding(dense()))


def unfrozen_later():
    part, built = base(trainable=False), []

    def build():
        part.trainable = bool(built)
        built.append(part)
        return holding(part)

    return build


# Functions that make a build function with a shared part, and the words that name it.
TRAINED = {
    "model": (of_model, "must make a new model at each call.*Functional 'functional"),
    "layer": (lambda: of(dense), "layer 'dense"),
    "layer without weights yet": (lambda: of(lambda: layers.Dense(4, name="late")), "layer 'late'"),
    "base": (lambda: of(base), "layer 'sequential"),
    "list in a global": (of_global, "layer 'dense"),
    "attribute": (lambda: Holder(base()), "layer 'sequential"),
    "unfrozen later": (unfrozen_later, "layer 'sequential"),
    "optimizer": (lambda: of(lambda: optimizers.Adam(name="shared")), "Adam 'shared'"),
}
UNCHANGED = {
    "frozen base": lambda: of(lambda: base(layers.BatchNormalization(), trainable=False)),
    "layer without weights": lambda: of(layers.ReLU),
    "adapted": lambda: of(adapted),
    "metric": lambda: of(lambda: keras.metrics.MeanAbsoluteError()),
    "dropout in a frozen base": lambda: of(lambda: base(layers.Dropout(0.5), trainable=False)),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_build_refuses_to_train_a_part_of_an_earlier_model(name, policy):
    make, message = TRAINED[name]
    hypermodel = searches.stock(make(), (8, 32), dtype_policy=policy)
    hypermodel.build(keras_tuner.HyperParameters())
    with pytest.raises(ValueError, match=message):
        hypermodel.build(keras_tuner.HyperParameters())


@pytest.mark.parametrize("name", UNCHANGED)
def test_build_with_a_frozen_shared_part_starts_each_trial_equally(name):
    hypermodel, started = searches.stock(UNCHANGED[name](), (8, 32)), []
    for _ in range(3):
        model = hypermodel.build(keras_tuner.HyperParameters())
        started.append([np.array(one.value) for one in model.variables])
        model.fit(ROWS, LABELS[:, None], verbose=0)
    for values in zip(*started, strict=True):
        assert all(np.array_equal(values[0], one) for one in values)


def test_build_refuses_shared_statistics_that_training_changed():
    norm = layers.BatchNormalization(center=False, scale=False)
    hypermodel = searches.stock(of(lambda: norm), (8, 32))
    for _ in range(2):
        model = hypermodel.build(keras_tuner.HyperParameters())
    model.fit(ROWS, LABELS[:, None], verbose=0)
    with pytest.raises(ValueError, match="layer 'batch_normalization"):
        hypermodel.build(keras_tuner.HyperParameters())
