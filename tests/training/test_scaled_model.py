import json

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.library_internals import rate_of
from kbatch.training.learning_rate import (
    peak_learning_rate,
    scale_late_layers,
    scale_model,
    scale_optimizer,
    scaled_schedule,
    set_momenta,
    set_scaling,
)

layers = keras.layers
optimizers = keras.optimizers
SIZES = {"batch_size": 64, "base_batch_size": 16}
MOMENTUM = "batch_norm_momentum"


def normalised(part=None, optimizer="sgd"):
    """A classifier with a BatchNormalization of momentum 0.9 in an inner model."""
    part = part or keras.Sequential([layers.Dense(4), layers.BatchNormalization(momentum=0.9)])
    return models.compiled(
        [layers.Input((8,)), layers.BatchNormalization(), part, layers.Dense(3)], optimizer, "mse"
    )


def momenta(model):
    found = [one for one in model._flatten_layers() if isinstance(one, layers.BatchNormalization)]
    return [one.momentum for one in found]


def scaled(model, *, rule=None, follow=FOLLOWERS, sizes=SIZES, **base):
    return scale_model(model, **sizes, rule=rule, follow_batch_size=follow, **base)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optimizers.Adam, "beta_2"),
        (optimizers.AdamW, "beta_2"),
        (optimizers.Nadam, "beta_2"),
        (optimizers.RMSprop, "rho"),
        (optimizers.Adadelta, "rho"),
        (optimizers.Muon, "adam_beta_2"),
    ],
)
def test_scale_model_keeps_half_life_of_second_moment(optimizer, name):
    for rule in ("sqrt", "linear", None) if optimizer is optimizers.Adam else ("sqrt",):
        model = models.mlp(optimizer=optimizers.LossScaleOptimizer(optimizer(0.01)))
        before = getattr(model.optimizer.inner_optimizer, name)
        scaling = scaled(model, rule=rule)
        assert getattr(model.optimizer.inner_optimizer, name) == pytest.approx(before**4)
        assert (scaling.rule, scaling.made["beta_2"]) == (rule, (pytest.approx(before**4),))
        assert peak_learning_rate(model.optimizer) == pytest.approx(scaling.learning_rate)


DECAYING = (optimizers.AdamW, optimizers.Adafactor, optimizers.Lion)
DECAYING += (optimizers.Muon, optimizers.RMSprop, optimizers.SGD)


def left_over(optimizer, updates):
    """Apply weight decay without gradients, and return what is left of a weight of 1."""
    weight = keras.Variable(np.ones((2, 2), "float32"))
    for _ in range(updates):
        optimizer.apply([np.zeros((2, 2), "float32")], [weight])
    return float(np.mean(keras.ops.convert_to_numpy(weight)))


@pytest.mark.parametrize("optimizer", [optimizers.Adam, optimizers.Muon, optimizers.RMSprop])
def test_scale_model_keeps_beta_2_above_square_of_beta_1(optimizer):
    sizes = {"batch_size": 8192, "base_batch_size": 16}
    model = models.mlp(optimizer=optimizer())
    (found,) = scaled(model, sizes=sizes).made["beta_2"]
    if optimizer is optimizers.RMSprop:  # It has no first moment.
        assert found == pytest.approx(0.9**512)
        return
    name = "beta_1" if optimizer is optimizers.Adam else "adam_beta_1"
    beta_1 = getattr(model.optimizer, name)
    assert beta_1**2 < found < beta_1**2 + 0.01


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (optimizers.SGD, "linear"),
        (optimizers.AdamW, "sqrt"),
        (optimizers.RMSprop, "sqrt"),
        (optimizers.Lion, None),
        (optimizers.Adagrad, None),
    ],
)
def test_scale_model_auto_rule_by_optimizer(optimizer, rule):
    found, same = (models.mlp(optimizer=optimizer(0.01)) for _ in range(2))
    assert scaled(found, rule="auto") == scaled(same, rule=rule)
    assert peak_learning_rate(found.optimizer) == peak_learning_rate(same.optimizer)


def test_set_scaling_keeps_rate_scaled_by_build_function():
    def built(rate):
        schedule = optimizers.schedules.ExponentialDecay(rate, 640, 0.5)
        return models.mlp(optimizer=optimizers.SGD(schedule))

    model = built(0.04)
    found = scale_model(model, **SIZES, rule="auto", follow_batch_size=(), base_model=built(0.01))
    assert found.rule is None
    other = built(0.04)
    for _ in range(2):
        set_scaling(other, found)
        assert rate_of(other.optimizer).get_config() == rate_of(model.optimizer).get_config()
    assert rate_of(other.optimizer).decay_steps == 160


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *((kind, "linear") for kind in DECAYING),
        *((kind, rule) for kind in (optimizers.SGD, optimizers.AdamW) for rule in ("sqrt", None)),
    ],
)
def test_scale_model_keeps_weight_decay_per_example(kind, rule):
    def compiled():
        rate = optimizers.schedules.ExponentialDecay(0.01, 1_000_000, 0.5)
        inner = kind(rate, weight_decay=0.2)
        return models.mlp(optimizer=optimizers.LossScaleOptimizer(inner))

    base, model = compiled(), compiled()
    scaled(model, rule=rule)
    kept = left_over(base.optimizer.inner_optimizer, 8)
    assert kept < 0.985
    assert left_over(model.optimizer.inner_optimizer, 2) == pytest.approx(kept, abs=1e-4)


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.AdamW])
def test_scale_model_limits_weight_decay_to_the_weight(kind):
    model = models.mlp(optimizer=kind(0.5, weight_decay=0.5))
    scaling = scaled(model, rule="linear", sizes={"batch_size": 4096, "base_batch_size": 64})
    assert left_over(model.optimizer, 1) == pytest.approx(0, abs=1e-6)
    assert scaling.made["weight_decay"] == (model.optimizer.weight_decay,)


def test_scale_model_scales_shared_part_once_per_model():
    part = keras.Sequential([layers.Dense(4), layers.BatchNormalization(momentum=0.9)])
    for size in (64, 32, 64):
        model = normalised(part)
        scaling = scaled(model, sizes={"batch_size": size, "base_batch_size": 16})
        kappa = size / 16
        np.testing.assert_allclose(sorted(momenta(model)), [0.9**kappa, 0.99**kappa])
        np.testing.assert_allclose(scaling.made[MOMENTUM], [0.9**kappa, 0.99**kappa])
    scaled(model, follow=())
    assert sorted(momenta(model)) == [0.9, pytest.approx(0.99)]
    part.layers[-1].momentum = 0.5  # The user sets it.
    assert min(scaled(model).made[MOMENTUM]) == 0.5**4


class Later(layers.Layer):
    """Creates a BatchNormalization when it is built."""

    def build(self, shape):
        self.norm = layers.BatchNormalization(momentum=0.9)

    def call(self, x, training=False):
        return self.norm(x, training=training)


def unbuilt():
    return models.compiled([Later(), layers.Dense(3)], "sgd", "mse")


ONES = tf.data.Dataset.from_tensors((np.ones((8, 4), "float32"), np.ones((8, 3), "float32")))


def test_scale_late_layers_scales_layers_created_in_build():
    model = unbuilt()
    scaling = scaled(model)
    assert MOMENTUM not in scaling.made
    for _ in range(2):
        scaling = scale_late_layers(model, ONES, scaling)
        np.testing.assert_allclose(momenta(model), [0.9**4])
        np.testing.assert_allclose(scaling.made[MOMENTUM], [0.9**4])
    model.fit(ONES, verbose=0)
    np.testing.assert_allclose(model.layers[0].norm.moving_mean, np.full(4, 1 - 0.9**4), rtol=1e-5)


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_scale_model_leaves_settings_that_are_not_named(follower):
    model = normalised(optimizer=optimizers.AdamW(use_ema=True))
    others = tuple(name for name in FOLLOWERS if name != follower)
    scaling = scaled(model, rule="sqrt", follow=others)
    stays = {
        "beta_2": model.optimizer.beta_2 == 0.999,
        "weight_decay": model.optimizer.weight_decay == 0.004,
        "batch_norm_momentum": sorted(momenta(model)) == [0.9, 0.99],
        "ema_momentum": model.optimizer.ema_momentum == 0.99,
    }
    assert {name: scaling.made[name] == scaling.given[name] for name in FOLLOWERS} == stays
    assert stays == {name: name == follower for name in FOLLOWERS}
    assert scaling.follow_batch_size == others


def test_scale_model_drops_traced_train_function():
    x = np.ones((64, 8), "float32")
    model = keras.Sequential([layers.Input((8,)), layers.BatchNormalization(momentum=0.5)])
    model.compile("sgd", "mse")
    model.fit(x, x, batch_size=16, epochs=1, verbose=0)
    model.layers[0].moving_mean.assign(np.zeros(8))
    scaled(model)
    model.fit(x, x, batch_size=64, epochs=1, verbose=0)
    np.testing.assert_allclose(model.layers[0].moving_mean, 1 - 0.5**4)


@pytest.mark.parametrize("rule", ["sqrt", "linear", None])
def test_set_scaling_equals_scale_model_repeatedly(rule):
    def build():
        schedule = optimizers.schedules.CosineDecay(0.1, 640, warmup_target=0.4, warmup_steps=64)
        return normalised(optimizer=optimizers.AdamW(schedule, weight_decay=0.01, use_ema=True))

    def values(model):
        inner = model.optimizer
        rates = [float(inner._learning_rate(step)) for step in (0, 3, 20, 100)]
        return [*rates, inner.beta_2, inner.weight_decay, inner.ema_momentum, *momenta(model)]

    large, small = build(), build()
    scalings = [
        scaled(large, rule=rule),
        scaled(small, rule=rule, sizes={"batch_size": 4, "base_batch_size": 16}),
    ]
    model = build()
    for scaling, as_one in ((scalings[0], large), (scalings[1], small), (scalings[0], large)):
        for _ in range(2):
            set_scaling(model, scaling)
            set_momenta(model, scaling)
            np.testing.assert_allclose(values(model), values(as_one), rtol=1e-6)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_set_scaling_uses_rule_of_each_optimizer():
    def build(beta_2=0.9):
        rates = [optimizers.schedules.ExponentialDecay(0.1, 640, 0.5) for _ in range(2)]
        model = OwnStep([layers.Input((8,)), layers.Dense(3)])
        model.compile(optimizers.SGD(rates[0]), "mse")
        model.other = optimizers.Lion(rates[1])
        model.others = [optimizers.Adam(beta_2=one) for one in (beta_2, 0.99)]
        return model

    def configs(model):
        return [rate_of(one).get_config() for one in (model.optimizer, model.other)]

    model, as_one = build(), build()
    set_scaling(model, scaled(as_one, rule="auto"))
    assert configs(model) == configs(as_one)
    assert [config["decay_steps"] for config in configs(model)] == [160, 640]
    # `beta_2` follows the batch size in the optimizer that the build function does not scale.
    made = scaled(build(0.95), rule="auto", base_model=build()).made["beta_2"]
    assert made == (0.95, pytest.approx(0.99**4))


def test_set_scaling_refuses_other_optimizers():
    scaling = scaled(normalised())
    model = OwnStep([layers.Dense(4)])
    model.compile(optimizers.SGD(), "mse")
    model.others = [optimizers.Adam() for _ in range(3)]
    with pytest.raises(ValueError, match=f"4 optimizers with.*{len(scaling.values)} values"):
        set_scaling(model, scaling)


schedules = keras.optimizers.schedules

EXAMPLES = {
    "exponential": schedules.ExponentialDecay(0.1, decay_steps=640, decay_rate=0.5),
    "cosine": schedules.CosineDecay(0.1, decay_steps=640, alpha=0.1),
    "warm-up": schedules.CosineDecay(0.01, decay_steps=640, warmup_target=0.1, warmup_steps=64),
    "no warm-up": schedules.CosineDecay(0.0, decay_steps=640, warmup_target=0.1, warmup_steps=0),
    "restarts": schedules.CosineDecayRestarts(0.1, first_decay_steps=64),
    "polynomial": schedules.PolynomialDecay(0.1, decay_steps=640, end_learning_rate=0.01),
    "inverse time": schedules.InverseTimeDecay(0.1, decay_steps=64, decay_rate=0.5),
    "steps": schedules.PiecewiseConstantDecay([64, 320], [0.1, 0.05, 0.01]),
    # Stages of a few steps, or of less than one step at a larger batch size.
    "short": schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.9),
    "stairs": schedules.ExponentialDecay(0.1, decay_steps=6, decay_rate=0.5, staircase=True),
    "by step": schedules.InverseTimeDecay(0.1, decay_steps=1, decay_rate=0.01),
    "cycle": schedules.PolynomialDecay(0.1, 6, end_learning_rate=0.01, cycle=True),
    "few restarts": schedules.CosineDecayRestarts(0.1, first_decay_steps=5),
    "short warm-up": schedules.CosineDecay(0.01, 7, warmup_target=0.1, warmup_steps=3),
    "few steps": schedules.PiecewiseConstantDecay([1, 2, 24], [0.1, 0.05, 0.02, 0.01]),
}


class Own(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") / 64.0)

    def get_config(self):
        return {}


@pytest.mark.parametrize("name", [*EXAMPLES, "own"])
def test_scaled_schedule_has_scaled_rate_at_same_example(name):
    schedule = EXAMPLES.get(name, Own())
    for ratio, kappa in ((4.0, 4), (2.0, 3), (1.0, 16)):
        scaled = scaled_schedule(schedule, ratio=ratio, kappa=kappa)
        assert name == "own" or type(scaled) is type(schedule)
        for step in (0, 1, 2, 8, 24, 72, 160):
            expected = ratio * float(schedule(step * kappa))
            assert float(scaled(step)) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["few steps", "own"])
def test_scaled_schedule_survives_serialization(name):
    optimizer = optimizers.SGD(EXAMPLES.get(name, Own()))
    scale_optimizer(optimizer, ratio=2.0, kappa=4.0)
    text = json.dumps(keras.optimizers.serialize(optimizer))
    kinds = {one.__name__: one for one in (Own, type(rate_of(optimizer)))}
    loaded = keras.optimizers.deserialize(json.loads(text), custom_objects=kinds)
    assert [float(rate_of(one)(5)) for one in (loaded, optimizer)] == [
        pytest.approx(2 * float(EXAMPLES.get(name, Own())(20)))
    ] * 2


def test_scaled_schedule_of_integer_rate_uses_floats():
    for ratio in (1, 2):
        optimizer = optimizers.SGD(schedules.ExponentialDecay(1, 1000, 0.9))
        scale_optimizer(optimizer, ratio=ratio, kappa=ratio)
        assert float(rate_of(optimizer)(500 / ratio)) == pytest.approx(ratio * 0.9**0.5)


def test_scale_optimizer_scales_callable_rate():
    rate = [0.1]
    optimizer = keras.optimizers.SGD(lambda: rate[0])
    scale_optimizer(optimizer, ratio=2.0, kappa=2.0)
    rate[0] = 0.5
    assert peak_learning_rate(optimizer) == pytest.approx(1.0)
