"""Searches with optimizers, schedules and callbacks of the user's own."""

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import kbatch

TOKENS, TARGETS = np.arange(32).reshape(16, 2) % 8, np.arange(16) % 2 * 1.0


class Halved(keras.optimizers.SGD):
    """Halves gradients in `apply`, as rates by layer and clipping of one's own change them."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.math.scalar_mul(0.5, g) for g in grads], trainable_variables)


def words():
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(8, 2, embeddings_initializer="ones"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones", dtype="float32"),
        ]
    )
    model.compile(Halved(0.1), "mse")
    return model


@pytest.mark.parametrize(("micro_batch_size", "policy"), [(None, "mixed_float16"), (4, "float32")])
def test_an_apply_of_the_users_own_is_called_once_an_update(micro_batch_size, policy):
    plain = words()
    hypermodel = kbatch.BatchSizeHyperModel(
        words, (16,), micro_batch_size=micro_batch_size, dtype_policy=policy
    )
    model = hypermodel.build(keras_tuner.HyperParameters())
    for one in (plain, model):
        one.train_on_batch(TOKENS, TARGETS)
    moved = plain.get_weights()[-1]
    assert abs(moved).max() > 0.1
    np.testing.assert_allclose(model.get_weights()[-1], moved, rtol=1e-3)


ROWS = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
LABELS = (ROWS.sum(axis=1) > 0).astype("int32")


def classifier(optimizer):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="zeros", dtype="float32")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def built(optimizer, batch_size=32, *, rule="linear", **settings):
    """The optimizer of a trial of a search whose base is 8; `optimizer` makes it from a size."""
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda hp: classifier(optimizer(hp.get("batch_size"))),
        (8, 32),
        micro_batch_size=None,
        dtype_policy="float32",
        learning_rate_scaling=rule,
        base_batch_size=8,
        **settings,
    )
    hp = keras_tuner.HyperParameters()
    hp.Choice("batch_size", [8, 32])
    hp.values["batch_size"] = batch_size
    return hypermodel.build(hp).optimizer


def searched(folder, build, *, callbacks=(), rule="linear", **settings):
    hypermodel = kbatch.BatchSizeHyperModel(
        build,
        (8, 32),
        micro_batch_size=None,
        dtype_policy="float32",
        learning_rate_scaling=rule,
        base_batch_size=8,
        seed=0,
        **settings,
    )
    tuner = kbatch.BatchSizeTuner(hypermodel, "val_loss", directory=folder, project_name="search")
    data = {"validation_data": (ROWS, LABELS), "epochs": 3, "verbose": 0}
    tuner.search(ROWS, LABELS, callbacks=list(callbacks), **data)
    return tuner, kbatch.load_study(tuner)


def rates(study):
    return study.to_dataframe()["learning_rate"].round(6).tolist()


class Groups(keras.optimizers.Optimizer):
    """Trains the biases by one optimizer and all else by another."""

    def __init__(self, biases, others):
        super().__init__(learning_rate=7.0)  # Nothing trains with it.
        self.groups = [biases, others]

    def build(self, variables):
        super().build(variables)
        for optimizer, (_, own) in zip(self.groups, self.shared(variables), strict=True):
            optimizer.build(own)

    def shared(self, variables):
        biases = [i for i, one in enumerate(variables) if "bias" in one.path]
        parts = biases, [i for i in range(len(variables)) if i not in biases]
        return [(part, [variables[i] for i in part]) for part in parts]

    def apply(self, grads, trainable_variables=None):
        variables = list(trainable_variables)
        if not self.built:
            self.build(variables)
        for one, (part, own) in zip(self.groups, self.shared(variables), strict=True):
            one.apply([grads[i] for i in part], own)


def test_an_optimizer_that_holds_several_is_recorded_by_those_that_train(tmp_path):
    def build():
        sgd = keras.optimizers.SGD(0.1)
        return classifier(Groups(keras.optimizers.Adam(0.02), sgd))

    _, study = searched(tmp_path, build)
    assert rates(study) == [0.02, 0.08]
    run = study.trials[-1].executions[0]
    assert (run.optimizer, run.updates, run.scaling.beta_2) == ("Adam", 9, 0.999**4)
    groups = built(lambda _: Groups(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1))).groups
    assert [round(float(one.learning_rate), 6) for one in groups] == [0.08, 0.4]


def test_averages_of_weights_keep_their_half_life_in_examples():
    def averaging(batch_size):
        return keras.optimizers.SGD(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=10)

    for rule in ("linear", None):
        large = built(averaging, rule=rule)
        assert large.ema_momentum == pytest.approx(0.9**4)
        assert large.ema_overwrite_frequency == 2
    for kept in (built(averaging, 8), built(averaging, follow_batch_size=("beta_2",))):
        assert (kept.ema_momentum, kept.ema_overwrite_frequency) == (0.9, 10)


def test_averages_that_were_validated_are_kept_and_compared(tmp_path):
    def build():
        return classifier(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))

    swap = keras.callbacks.SwapEMAWeights()
    tuner, study = searched(tmp_path, build, callbacks=[swap])
    runs = [trial.executions[0] for trial in study.trials]
    assert [run.outcomes.reason for run in runs] == [None, None]
    assert runs[1].scaling.ema_momentum == pytest.approx(0.9**4)
    best = min(trial.objective_value for trial in study.trials)
    kept = tuner.get_best_models()[0].evaluate(ROWS, LABELS, verbose=0, return_dict=True)
    assert kept["loss"] == pytest.approx(best, rel=1e-5)


schedules = keras.optimizers.schedules


class Own(schedules.LearningRateSchedule):
    def __init__(self, updates):
        self.updates = updates

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") / self.updates)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # What the build function leaves follows the rule: the rate of a schedule over the steps.
        (lambda b: schedules.CosineDecay(0.1, 320 // b), (0.4, 0.2)),
        (lambda b: schedules.CosineDecay(0.1 * b / 8, 40), (0.4, 0.2)),
        (lambda b: schedules.CosineDecay(0.1, 40), (0.4, 0.2)),
        (lambda b: Own(40 / b), (0.1, 0.1 / 5)),
        (lambda b: Own(20), (0.4, 0.2)),
        (lambda b: 0.1 * b / 8, (0.4, 0.4)),
    ],
)
def test_what_build_fits_to_the_size_is_not_scaled_again(optimizer, expected):
    found, read = built(lambda b: keras.optimizers.SGD(optimizer(b))), []
    for step in (0, 5):
        found.iterations.assign(step)
        read.append(float(found.learning_rate))
    assert read == pytest.approx(expected, rel=1e-5)


def test_other_settings_that_build_fits_stay_too():
    adam = keras.optimizers.AdamW
    found = built(lambda b: adam(weight_decay=0.01 * b, beta_2=0.9 ** (b / 8), use_ema=True))
    assert (found.weight_decay, found.beta_2) == (0.32, 0.9**4)
    assert found.ema_momentum == pytest.approx(0.99**4)


def test_rates_that_a_callback_sets_are_recorded_and_told(tmp_path):
    def build():
        return classifier(keras.optimizers.SGD(0.1))

    scheduler = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate if epoch < 1 else 0.01
    )
    _, study = searched(tmp_path, build, callbacks=[scheduler])
    assert rates(study) == [0.01, 0.01]
    epochs = study.trials[1].executions[0].epochs
    assert [one.learning_rate for one in epochs] == pytest.approx([0.4, 0.01, 0.01])
    # The same factor at every size leaves the rule as it is.
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    _, study = searched(tmp_path / "halved", build, callbacks=[halving])
    assert rates(study) == [0.0125, 0.05]
