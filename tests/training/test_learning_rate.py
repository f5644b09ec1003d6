import keras
import numpy as np
import pytest

from kbatch.training.learning_rate import (
    peak_learning_rate,
    scale_optimizer,
    scaled_schedule,
)

schedules = keras.optimizers.schedules

EXAMPLES = {
    "exponential": schedules.ExponentialDecay(0.1, decay_steps=640, decay_rate=0.5),
    "cosine": schedules.CosineDecay(0.1, decay_steps=640, alpha=0.1),
    "warm-up": schedules.CosineDecay(0.01, decay_steps=640, warmup_target=0.1, warmup_steps=64),
    "restarts": schedules.CosineDecayRestarts(0.1, first_decay_steps=64),
    "polynomial": schedules.PolynomialDecay(0.1, decay_steps=640, end_learning_rate=0.01),
    "inverse time": schedules.InverseTimeDecay(0.1, decay_steps=64, decay_rate=0.5),
    "steps": schedules.PiecewiseConstantDecay([64, 320], [0.1, 0.05, 0.01]),
}


class Own(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") / 64.0)


@pytest.mark.parametrize("name", [*EXAMPLES, "own"])
def test_a_schedule_reads_ratio_times_the_rate_at_the_same_example(name):
    for ratio, kappa in ((4.0, 4), (2.0, 4), (1.0, 8)):
        schedule = EXAMPLES.get(name, Own())
        scaled = scaled_schedule(schedule, ratio=ratio, kappa=kappa)
        for step in (0, 8, 24, 72, 160):
            expected = ratio * float(schedule(step * kappa))
            assert float(scaled(step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_schedule_of_keras_stays_one_of_keras(name):
    scaled = scaled_schedule(EXAMPLES[name], ratio=2.0, kappa=4)
    assert type(scaled) is type(EXAMPLES[name])


@pytest.mark.parametrize("wrap", [lambda o: o, keras.optimizers.LossScaleOptimizer])
def test_a_constant_rate_is_scaled_also_under_a_loss_scale(wrap):
    optimizer = wrap(keras.optimizers.Adam(0.01))
    scale_optimizer(optimizer, ratio=3.0, kappa=9.0)
    np.testing.assert_allclose(peak_learning_rate(optimizer), 0.03, rtol=1e-6)


def test_a_callable_rate_is_scaled_when_it_is_read():
    rate = [0.1]
    optimizer = keras.optimizers.SGD(lambda: rate[0])
    scale_optimizer(optimizer, ratio=2.0, kappa=2.0)
    rate[0] = 0.5
    assert peak_learning_rate(optimizer) == pytest.approx(1.0)
