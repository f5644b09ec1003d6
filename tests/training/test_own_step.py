"""A `train_step` of the user's own: measured whole, and left as it was."""

import keras
import numpy as np
import own_steps
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating, batches_of_lengths
from fake_clock import FakeClock

import kbatch
from kbatch.training.accumulation.parts_check import check_parts
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import build_on, sample_of
from kbatch.training.state import inner_optimizers, updates_made

X, Y = models.rows(64)
KINDS = {"gan": (own_steps.gan, None), "kd": (own_steps.distiller, Y)}


def values(model):
    return [np.array(tf.convert_to_tensor(v.value)) for v in model.variables]


def assert_untouched(model, before):
    assert all(map(np.array_equal, values(model), before))
    assert updates_made(model) == 0
    assert "train_step" not in vars(model)


def test_a_profile_of_the_input_runs_it_whole_and_leaves_the_model_as_it_was():
    model = own_steps.gan()
    before, data = values(model), tf.data.Dataset.from_tensor_slices(X).batch(16)
    found = kbatch.profile_input_pipeline(model, data, budget_s=0.3, remedies=False)
    assert found.batch_size == 16
    assert_untouched(model, before)


def test_a_profile_of_training_runs_it_whole_and_leaves_the_model_as_it_was():
    model = own_steps.distiller()
    before = values(model)
    found = kbatch.profile_training(
        model, X, Y, batch_sizes=(8, 16), time_budget_s=0.5, measure_memory=False
    )
    assert [point.outcome for point in found.points[:1]] == ["measured"]
    assert_untouched(model, before)


@pytest.mark.parametrize("kind", ["gan", pytest.param("kd", marks=pytest.mark.slow)])
def test_the_largest_batch_is_found(kind):
    build, y = KINDS[kind]

    def eager():
        model = build()
        model.run_eagerly = True  # A graph for each size takes longer than its steps.
        return model

    found = kbatch.find_max_batch_size(
        own_steps.Here(eager), X, y, max_batch_size=2, memory_limit_bytes=10**8
    )
    assert found.max_batch_size == 2


def test_recommend_trains_it_whole_and_says_what_that_leaves_unknown(monkeypatch):
    # The seconds of the budget are counted in readings: a slow machine makes as many updates.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=2e-2))
    found = kbatch.recommend(own_steps.vae, X, budget_s=2.0, seed=0, base_batch_size=8)
    assert (found.pilot.micro_batch_size, found.noise_scale.value) == (8, None)
    assert "has its own `train_step`" in " ".join(str(found).split())


@pytest.mark.slow
def test_a_pilot_needs_a_loss():
    found = kbatch.recommend(own_steps.gan, X, budget_s=2.0, seed=0, base_batch_size=8)
    assert found.timings
    assert "must return its `loss`" in found.unknown["gradient noise"]


def test_updates_are_those_of_the_optimizers_that_train():
    model = own_steps.gan()
    model.fit(X, batch_size=16, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 0
    assert updates_made(model) == 8
    assert inner_optimizers(model)[0] is model.d_optimizer


class ByHand(keras.Model):
    """Changes its weights without an optimizer."""

    def __init__(self):
        super().__init__()
        self.dense = own_steps.dense(8, 1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.dense(data) ** 2)
        weights = self.dense.trainable_weights
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}


def test_without_an_optimizer_each_batch_is_an_update():
    model = ByHand()
    model.compile()
    assert updates_made(model, batches=5) == 5


def trained(model, size=None):
    """Train two epochs of three batches."""
    if size is not None:
        accumulating(model, size)
    data = batches_of_lengths([12, 20, 32], X).map(lambda x: x)
    return model.get_weights(), model.fit(data, epochs=2, verbose=0).history


def largest_difference(one, other):
    return max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(one, other, strict=True))


# A micro-batch of 20 is larger than the first batch, as large as the second, and cuts the third.
CASES = {
    "graph": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), 20, {}),
    "eager": (lambda: keras.optimizers.Adam(0.01), 16, {"run_eagerly": True}),
    "xla": (lambda: keras.optimizers.Adam(0.01), 12, {"jit_compile": True}),
}


@pytest.mark.parametrize("case", ["graph", "eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_micro_batches_update_as_the_whole_batch_does(case):
    optimizer, size, arguments = CASES[case]
    found = []
    for micro_batch_size in (None, size):
        keras.utils.set_random_seed(3)
        runs = arguments if micro_batch_size else {"run_eagerly": True}
        model = own_steps.vae(optimizer=optimizer(), noise=0.0, **runs)
        found.append(trained(model, micro_batch_size))
        assert int(model.optimizer.iterations) == 6
    (whole, history), (parts, of_parts) = found
    assert largest_difference(whole, parts) < 1e-5
    # Of a metric the last result counts, of another value the mean over rows.
    assert of_parts["loss"] == pytest.approx(history["loss"], rel=1e-5)
    assert of_parts["batch_loss"] == pytest.approx(history["batch_loss"], rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_is_traced_as_often_as_alone(steps):
    """Once for all micro-batches, where its batches are of one length."""
    traces = {}

    class Counted(own_steps.VAE):
        def train_step(self, data):
            traces[cut] += 1
            return super().train_step(data)

    for cut in (False, True):
        traces[cut] = 0
        model = own_steps.vae(kind=Counted, steps_per_execution=steps)
        if cut:
            accumulating(model, 5)
        model.fit(X[:48], batch_size=16, verbose=0)
    assert traces[True] == traces[False]


def test_each_optimizer_of_a_step_applies_once():
    model = own_steps.gan()
    with pytest.warns(UserWarning, match="applies gradients several times"):
        trained(model, 12)
    assert [int(one.iterations) for one in (model.d_optimizer, model.g_optimizer)] == [6, 6]
    assert int(model.optimizer.iterations) == 0


def test_an_overflow_in_one_part_skips_the_whole_update(policy):
    model = accumulating(own_steps.vae(noise=0.0), 8)
    before = model.get_weights()
    x = X[:32].copy()
    x[0] = 6e4  # Beyond float16 in its products.
    model.fit(x, batch_size=32, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), before))
    assert int(model.optimizer.iterations) == 0
    model.fit(X[:32], batch_size=32, epochs=8, verbose=0)  # Until the loss scale fits.
    assert 0 < int(model.optimizer.iterations) <= 8
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.fixture
def policy():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


class Averaging(own_steps.VAE):
    """Keeps an average of weights that it has just updated, as a diffusion model does."""

    def __init__(self, noise):
        super().__init__(noise)
        self.average = own_steps.dense(8, 4)

    def train_step(self, data):
        logs = super().train_step(data)
        for kept, weight in zip(self.average.weights, self.encoder.weights, strict=True):
            kept.assign(0.9 * kept + 0.1 * weight)
        return logs


@pytest.mark.parametrize(
    ("build", "equal"),
    [
        (own_steps.vae, True),  # Its noise is held still.
        pytest.param(own_steps.distiller, True, marks=pytest.mark.slow),
        (lambda: own_steps.vae(kind=Averaging), False),
    ],
    ids=["vae", "distiller", "averaging"],
)
def test_a_comparison_tells_whether_parts_train_as_the_whole_step(build, equal):
    model = build()
    rows = (X[:32], Y[:32]) if isinstance(model, own_steps.Distiller) else X[:32]
    build_on(model, sample_of(FitData(*rows) if isinstance(rows, tuple) else FitData(rows)))
    before = values(model)
    found = check_parts(model, rows)
    assert found.difference is not None, found.reason
    assert found.difference < 1e-5 if equal else found.difference > 1e-3
    assert "the update of" in found.where
    assert all(map(np.array_equal, values(model), before))


def test_only_the_optimizers_that_train_count_and_each_once():
    teacher = models.mlp(run_eagerly=True)
    teacher.train_on_batch(X, Y)
    inputs = keras.Input((8,))
    student = keras.Model(inputs, keras.layers.Dense(3)(teacher(inputs)))
    student.compile(keras.optimizers.SGD(0.25), "mse")
    assert inner_optimizers(student) == [student.optimizer]
    assert updates_made(student) == 0
    network = own_steps.gan()
    network.also = [network.d_optimizer]
    assert len(inner_optimizers(network)) == len(set(map(id, inner_optimizers(network))))
