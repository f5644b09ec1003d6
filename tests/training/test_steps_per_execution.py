"""`steps_per_execution`: equal training, and its choice once per search."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from small_models import linear, normalised

import kbatch
from kbatch.errors import InputError
from kbatch.records.training_run import PLAN_NAME, Budget, Plan
from kbatch.search.plan import planned_steps
from kbatch.search.timed_fit import TimedFit
from kbatch.study.trial import Objective
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.model import updates_made
from kbatch.training.shared_graph import SharedGraph
from kbatch.training.steps_per_execution import Training, acts_on_batches, steps_within

VAL_LOSS = Objective("val_loss", "min")
PLAN = Plan(1, "float32", 16, "cut", 64, "", step_s=(1e-3, 1e-4))

# 94 rows make twelve batches of 8, the last one of 6.
X, Y = models.rows(94)


def training(**changed):
    plain = {"batch_size": 8, "epoch_steps": 100, "epochs": 2, "budget": None, "callbacks": ()}
    return Training(**(plain | changed))


def scheduled():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    return normalised(optimizer=keras.optimizers.SGD(schedule, momentum=0.9))


def accumulated():
    return kbatch.accumulate_gradients(scheduled(), 3)


def scaled():
    with dtype_policy_scope("mixed_float16"):
        model = normalised()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**24)  # The first updates overflow.
    return model


def trained(build, steps, *callbacks, epochs=2, data=None, steps_per_epoch=None, **plan):
    """Train as a search does, and return the model, its `TimedFit` and its history."""
    keras.utils.set_random_seed(0)
    model = build()
    x, y = data or (X, Y)
    with TimedFit(model, searches.plan(8, steps_per_execution=steps, **plan)) as fit:
        settings = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "verbose": 0}
        validation = None if y is None else (X, Y)
        history = fit(x, y, validation_data=validation, callbacks=list(callbacks), **settings)
    return model, fit, history.history


def assert_same(found, expected):
    (one, one_fit, history), (other, other_fit, reference) = found, expected
    for mine, its in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    for mine, its in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, its)
    for name in reference.keys() - {"samples_per_second"}:
        assert history[name] == reference[name], name
    assert updates_made(one) == updates_made(other)
    assert one_fit.clock.updates == other_fit.clock.updates
    counts = [(e.batches, e.updates, e.examples) for e in one_fit.clock.epochs]
    assert counts == [(e.batches, e.updates, e.examples) for e in other_fit.clock.epochs]


# The other two are `normalised` with more.
@pytest.mark.parametrize(
    "build", [pytest.param(normalised, marks=pytest.mark.slow), accumulated, scaled]
)
def test_several_steps_per_execution_train_like_one(build):
    found = trained(build, 5)
    assert found[1].steps_per_execution == 5
    assert_same(found, trained(build, 1))


@pytest.mark.parametrize(("build", "updates"), [(linear, 3), (linear, 20), (scaled, 20)])
def test_update_budget_ends_at_same_update_with_several_steps(build, updates):
    several = trained(build, 5, kbatch.UpdateBudget(updates), epochs=9)
    assert several[1].clock.updates == updates
    if build is linear:
        assert_same(several, trained(linear, 1, kbatch.UpdateBudget(updates), epochs=9))


def test_several_steps_with_data_of_unknown_length():
    def data(batch_size):
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
        return rows.filter(lambda x, y: True)

    runs = [trained(linear, n, data=(data, None)) for n in (5, 1)]
    assert [run[1].steps_per_execution for run in runs] == [5, 1]
    assert_same(*runs)


def examples():
    return tf.data.Dataset.from_tensor_slices((X, Y))


FORMS = {
    "arrays": lambda: (X, Y),
    "examples": lambda: (examples(), None),  # The length in batches is known.
    "batches": lambda: (examples().batch(8), None),
    "endless": lambda: (examples().batch(8).repeat(), None),
}


@pytest.mark.parametrize(("form", "asked", "steps", "updates"), [
    ("arrays", 9, 3, [9, 3, 9]),  # As in Keras 3.15. The data have 12 batches.
    pytest.param("arrays", 14, 4, [12, 12, 12], marks=pytest.mark.slow),
    ("examples", 10, 2, [10, 2, 10]),
    ("batches", 5, 1, [5, 5, 2]),  # The length is unknown.
    ("endless", 10, 2, [10, 10, 10]),
    pytest.param("endless", 11, 1, [11, 11, 11], marks=pytest.mark.slow),
])  # fmt: skip
def test_steps_per_epoch_makes_same_updates_with_several_steps(form, asked, steps, updates):
    data = FORMS[form]()
    several = trained(linear, 4, epochs=3, data=data, steps_per_epoch=asked)
    assert several[1].steps_per_execution == steps
    assert [epoch.updates for epoch in several[1].clock.epochs] == updates
    if form != "arrays":
        return
    assert_same(several, trained(linear, 1, epochs=3, data=data, steps_per_epoch=asked))
    # The model of a decision makes the same updates in a plain `fit`.
    model = linear()
    model.steps_per_execution = steps
    counts = [0]
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: counts.append(int(model.optimizer.iterations))
    )
    dataset = kbatch.training_dataset(X, Y, 8)
    model.fit(dataset, epochs=3, steps_per_epoch=asked, callbacks=[count], verbose=0)
    assert np.diff(counts).tolist() == updates


@pytest.mark.parametrize("budget", [None, Budget(updates=7), Budget(train_s=2.0)])
def test_steps_within_leaves_executions_to_time(budget):
    seconds, lengths = (1e-6, 1e-4, 1e-3, 0.03, 0.2, 3.0, math.inf), (1, 2, 10, 1000)
    for step_s, epoch_steps, epochs in itertools.product(seconds, lengths, (1, 3)):
        asked = training(epoch_steps=epoch_steps, epochs=epochs, budget=budget)
        steps, total = steps_within(step_s, asked), epoch_steps * epochs
        assert 1 <= steps <= epoch_steps
        assert steps == 1 or steps * step_s <= 0.2
        if budget is not None:
            total = min(total, budget.updates or budget.train_s / step_s)
        if steps > 1:
            assert total > 3 * steps or steps == epoch_steps
        elif step_s < 0.03:  # Two steps would leave too few executions.
            assert total < 12 or epoch_steps == 1


def test_planned_steps_uses_time_of_micro_batches():
    # A part takes 1 ms and an example 0.1 ms, so 4 parts of 16 take 10.4 ms.
    for batch_size, steps in ((64, 10), (8, 56)):
        asked = training(batch_size=batch_size, epoch_steps=1000)
        assert planned_steps("auto", PLAN, normalised(), asked)[0] == steps


class OnBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class OnEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


def lambda_callback(name):
    return keras.callbacks.LambdaCallback(**{name: lambda *_, **__: None})


ACTING = {
    "own": OnBatches,
    "lambda": lambda: lambda_callback("on_train_batch_end"),
    "nan": keras.callbacks.TerminateOnNaN,
    "checkpoint": lambda: keras.callbacks.ModelCheckpoint("a.weights.h5", save_freq=3),
    "board": lambda: keras.callbacks.TensorBoard(update_freq="batch"),
    "profile": lambda: keras.callbacks.TensorBoard(profile_batch=2),
}
RESTING = {
    "own": OnEpochs,
    "lambda": lambda: lambda_callback("on_epoch_end"),
    "checkpoint": lambda: keras.callbacks.ModelCheckpoint("a.weights.h5"),
    "board": keras.callbacks.TensorBoard,
    "stopping": keras.callbacks.EarlyStopping,
    "rate": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    "averages": keras.callbacks.SwapEMAWeights,
    "budget": lambda: kbatch.UpdateBudget(3),
    "target": lambda: kbatch.StopAtTarget("val_accuracy", 0.5),
    "plot": kbatch.LivePlot,
}


def test_acts_on_batches_by_callback():
    assert {name for name, make in ACTING.items() if acts_on_batches(make())} == set(ACTING)
    assert {name for name, make in RESTING.items() if acts_on_batches(make())} == set()


def test_callback_on_batches_needs_one_step():
    _, fit, _ = trained(linear, "auto", OnBatches())
    assert fit.steps_per_execution == 1
    assert any("`OnBatches` acts on each batch" in note for note in fit.notes)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    "build", [lambda: normalised(run_eagerly=True), OwnStep], ids=["eager", "own step"]
)
def test_planned_steps_is_one_if_eager_or_custom_step(build):
    found, notes = planned_steps("auto", PLAN, build(), training())
    assert found == 1
    assert len(notes) == 1


def test_steps_per_execution_of_build_function_wins():
    def build():
        model = linear()
        model.steps_per_execution = 3
        return model

    for steps in ("auto", None):
        assert trained(build, steps, epochs=1)[1].steps_per_execution == 3


def test_steps_per_execution_above_epoch_is_refused():
    with pytest.raises(InputError, match="epochs of 12 steps"):
        trained(linear, 13)


@pytest.mark.slow
def test_steps_are_timed_once_per_search(tmp_path):
    fit = {"epochs": 4}

    def trials(sizes, folder="search", **arguments):
        hypermodel = searches.stock(normalised, sizes, **arguments)
        tuner = searches.search(tmp_path / folder, hypermodel, kbatch.BatchSizeTuner, fit=fit)
        return kbatch.load_study(tuner).to_dataframe().set_index("batch_size")

    def values(sizes):
        found = trials(sizes, steps_per_execution="auto")
        for name in ("val_loss", "val_accuracy", "loss", "updates"):
            assert (found[name] == reference[name][list(sizes)]).all()
        return found.steps_per_execution.to_dict()

    reference = trials((8, 16, 32), "one")
    first = values((8, 16))
    assert all(steps > 1 for steps in first.values())
    file = tmp_path / "search" / "search" / PLAN_NAME
    kept = file.read_text()
    assert sum(json.loads(kept)["record"]["step_s"]) > 0
    assert values((8, 16, 32)).items() > first.items()
    assert file.read_text() == kept


class Validations(keras.callbacks.Callback):
    """Counts the executions of each validation."""

    def __init__(self):
        super().__init__()
        self.executions = []

    def on_test_begin(self, logs=None):
        self.executions.append(0)
        step, count = self.model.test_function, self.executions

        def counted(iterator):
            count[-1] += 1
            return step(iterator)

        self.model.test_function = counted

    def on_test_end(self, logs=None):
        self.model.test_function = None


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 5])
def test_validation_is_one_execution(steps):
    shapes, seen = [], Validations()

    def predicted(*_, **__):
        shapes.append(predict.model.predict(X, batch_size=8, verbose=0).shape)

    moments = ("on_train_batch_end", "on_test_begin", "on_test_end", "on_epoch_end")
    predict = keras.callbacks.LambdaCallback(**dict.fromkeys(moments, predicted))

    def build():
        return SharedGraph().model_for(normalised())

    found = trained(build, steps, predict, seen, epochs=2, objective=VAL_LOSS)
    assert seen.executions == [1, 1]
    assert set(shapes) == {(94, 3)}
    assert found[1].clock.reading.batches == 24
    assert_same(found, trained(normalised, 1, epochs=2, objective=VAL_LOSS))
