"""A model after `decision.apply` trains as the model of the decided trial."""

import dataclasses

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
from batch_data import Rows, examples
from records_factory import make_execution, make_study, make_trial

import kbatch
from kbatch.records.notes import Note
from kbatch.training.dtype_policy import dtype_policy_scope

layers, optimizers, schedules = keras.layers, keras.optimizers, keras.optimizers.schedules
KEPT = {}  # The last weights of trials, by the number of steps per epoch.


class Keep(keras.callbacks.Callback):
    """Keeps the last weights of a trial."""

    def on_train_end(self, logs=None):
        KEPT[self.params["steps"]] = [np.array(one) for one in self.model.get_weights()]


def classifier(optimizer, *inner):
    return models.mlp(inner=inner, optimizer=optimizer, loss=models.own_loss)


def normalised(optimizer):
    inner = layers.BatchNormalization(momentum=0.7), layers.BatchNormalization()
    return classifier(optimizer, *inner)


def decaying(rate=1e-2, decay=0.1, **settings):
    return classifier(optimizers.AdamW(rate, weight_decay=decay, **settings))


def averaging():
    warming = schedules.CosineDecay(0.0, 40, warmup_target=0.2, warmup_steps=8)
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 8}
    return classifier(optimizers.SGD(warming, **averages))


def decided(directory, build, **arguments):
    """Search with a size of 4 times the base; return its decision and the weights of its trial."""
    KEPT.clear()
    given = {"base_batch_size": 8, "micro_batch_size": None} | arguments
    tuner = searches.search(
        directory,
        searches.stock(build, (32,), **given),
        kbatch.BatchSizeTuner,
        fit={"shuffle": False, "callbacks": [Keep()]},
    )
    study = kbatch.load_study(tuner)
    (trial,) = (trial for trial in study.trials if trial.batch_size == 32)
    return dataclasses.replace(study.decide(), trial=trial), KEPT[3]  # 94 rows


def trains_as(model, decision, weights):
    """Train a model after `decision.apply`, and compare its weights."""
    size = decision.trial.batch_size  # `decided` has replaced the trial.
    dataset = kbatch.training_dataset(*models.rows(94), size, shuffle=False)
    model.fit(dataset, shuffle=False, verbose=0, **decision.fit_arguments)
    for mine, its in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "micro_batch_size"),
    [(averaging, None), pytest.param(lambda: normalised("adam"), 8, marks=pytest.mark.slow)],
    ids=["averages of a schedule", "BatchNormalization in parts"],
)
def test_apply_model_trains_as_the_trial(tmp_path, build, micro_batch_size):
    given = {"micro_batch_size": micro_batch_size, "steps_per_execution": "auto"}
    decision, weights = decided(tmp_path, build, **given)
    assert decision.fit_arguments == {"epochs": 2}
    assert decision.settings.get("micro_batch_size") == micro_batch_size
    keras.utils.set_random_seed(0)
    model = build()
    assert decision.apply(model) is model
    decision.apply(model)  # A second call changes nothing.
    trains_as(model, decision, weights)


@pytest.fixture(scope="module")
def decay(tmp_path_factory):
    """A decision for a model with weight decay and micro-batches, and the weights of its trial."""
    return decided(tmp_path_factory.mktemp("decay"), decaying, micro_batch_size=16)


def test_apply_replaces_other_settings_of_a_traced_model(decay):
    decision, weights = decay
    assert decision.learning_rate == 2e-2
    assert decision.settings == {
        "learning_rate": pytest.approx(2e-2),
        "beta_2": pytest.approx(0.999**4),
        "weight_decay": pytest.approx(0.2),
        "micro_batch_size": 16,
    }
    model = decaying(0.3, 0.7, beta_2=0.5)
    model.fit(*models.rows(94), verbose=0)  # Traces the step with other settings.
    keras.utils.set_random_seed(0)
    fresh = decaying(0.3, 0.7, beta_2=0.5)
    model.set_weights(fresh.get_weights())
    model.compile(fresh.optimizer, models.own_loss, metrics=["accuracy"])
    trains_as(decision.apply(model), decision, weights)


def test_apply_refuses_another_dtype_policy(decay):
    with dtype_policy_scope("mixed_float16"):
        model = decaying()
    with pytest.raises(ValueError, match="set_dtype_policy"):
        decay[0].apply(model)


class Block(layers.Layer):
    """Makes its layers for the first batch."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.inner = [layers.Dense(self.units), layers.BatchNormalization(momentum=0.8)]

    def call(self, inputs, training=False):
        return self.inner[1](self.inner[0](inputs), training=training)


class Net(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.block, self.head = Block(units), layers.Dense(3, "softmax")

    def call(self, inputs, training=False):
        return self.head(self.block(inputs, training=training))


def late(units=4):
    model = Net(units)
    model.compile("adam", models.own_loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def late_decision(tmp_path_factory):
    return decided(tmp_path_factory.mktemp("late"), late)[0]


def as_it_is(model):
    pass


def built_by_shape(model):
    model.build((None, 8))  # Keras marks the model as built, but the layers of `Block` are not.


def called(model):
    model(models.rows(2)[0])


@pytest.mark.parametrize("prepare", [as_it_is, built_by_shape, called])
def test_apply_sets_layers_that_the_first_batch_builds(late_decision, prepare):
    model = late()
    prepare(model)
    late_decision.apply(late_decision.apply(model))
    model.fit(*models.rows(32), batch_size=32, verbose=0)
    assert late_decision.settings["batch_norm_momentum"] == pytest.approx(0.8**4)
    assert model.block.inner[1].momentum == pytest.approx(0.8**4)


@pytest.mark.parametrize("prepare", [as_it_is, called])
def test_apply_refuses_a_model_with_other_weights(late_decision, prepare):
    model = late(5)
    prepare(model)
    with pytest.raises(ValueError, match=r"decision\.trial\.hyperparameters"):
        late_decision.apply(model).fit(*models.rows(32), batch_size=32, verbose=0)


class Units(keras_tuner.HyperModel):
    def build(self, hp):
        return models.mlp(inner=(layers.Dense(hp.Int("units", 1, 64)),), optimizer="adam")


@pytest.mark.parametrize(
    "build",
    [Units().build, Units(), kbatch.BatchSizeHyperModel(Units(), (16, 32))],
    ids=["function", "HyperModel", "BatchSizeHyperModel"],
)
def test_apply_builds_under_the_policy_and_the_hyperparameters_of_the_trial(build):
    run = make_execution(32, steps_per_execution=8)
    decision = make_study(make_trial(32, run, hyperparameters={"units": 5})).decide()
    model = decision.apply(build)
    policies = model.dtype_policy.name, keras.config.dtype_policy().name
    assert policies == ("mixed_float16", "float32")
    assert [layer.units for layer in model.layers if layer.weights][-2] == 5
    assert model.steps_per_execution == 8
    # If `fit` builds a `ScheduleFreeAdamW`, its average of the weights starts at 0.
    assert model.optimizer.built
    assert decision.apply(build, steps_per_execution=False).steps_per_execution == 1
    with pytest.raises(TypeError, match="`build`"):
        decision.apply(3)


# Forms of data, and arguments of `search`.
FORMS = {
    "arrays": lambda: models.rows(94),
    "examples": lambda: (examples(94),),
    "batches": lambda: (examples(94).batch(10),),
    "PyDataset": lambda: (Rows(94),),
    "function": lambda: (lambda size: examples(94).batch(size).filter(lambda *_: True),),
}
CALLS = {
    "plain": {},
    "steps": {"steps_per_epoch": 3, "epochs": 4},
    "continued": {"initial_epoch": 1, "epochs": 3},
    "updates": {"epochs": 50, "callbacks": lambda: [kbatch.UpdateBudget(10)]},
    "stopping": {
        "epochs": 8,
        "callbacks": lambda: [keras.callbacks.EarlyStopping("accuracy", min_delta=2.0)],
    },
}


SLOW = ("examples", "function", "continued", "stopping")


@pytest.mark.parametrize(
    ("form", "call"),
    [
        pytest.param(form, call, marks=[pytest.mark.slow] * (form in SLOW or call in SLOW))
        for form in FORMS
        for call in CALLS
        if form == "arrays" or call == "plain"
    ],
)
def test_printed_lines_make_the_updates_of_the_trial(tmp_path, form, call):
    def fit():
        return CALLS[call] | {"callbacks": CALLS[call].get("callbacks", list)()}

    # With several steps per execution, data of unknown length could not end after each update.
    steps = 2 if form == "arrays" else 1
    hypermodel = searches.stock(lambda: classifier("sgd"), (16,), steps_per_execution=steps)
    arguments = {"data": FORMS[form](), "fit": fit()}
    tuner = searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, **arguments)
    decision = tuner.study.decide()
    run = decision.trial.last
    if call == "plain":  # Run the lines of the printed page.
        names = {"kbatch": kbatch, "decision": decision, "build": lambda: classifier("sgd")}
        names |= dict(zip("xy" if form == "arrays" else ("data",), FORMS[form](), strict=True))
        exec("\n".join(line.strip() for line in decision.page.use[1:]), names)
        model = names["model"]
    else:
        model = decision.apply(classifier("sgd"))
        dataset = kbatch.training_dataset(*FORMS[form](), batch_size=16)
        model.fit(dataset, callbacks=fit()["callbacks"], verbose=0, **decision.fit_arguments)
    assert model.steps_per_execution == (1 if call == "steps" else steps)
    assert int(model.optimizer.iterations) == run.updates
    asked = CALLS[call].get("epochs", 1) - CALLS[call].get("initial_epoch", 0)
    assert decision.fit_arguments["epochs"] == asked
    assert decision.fit_arguments.keys() - {"epochs"} == CALLS[call].keys() & {"steps_per_epoch"}
    ended = call in ("updates", "stopping")
    assert ("callbacks_needed" in [note.code for note in decision.notes]) is ended
    assert (len(run.epochs) < asked) is ended


def test_apply_sets_jit_compile_of_the_trial():
    noted = (Note.of("compiled_by_xla", speedup="2.1"),)
    for compiled, notes in ((False, ()), (True, noted)):
        run = make_execution(
            optimizer="Adam", dtype_policy="float32", jit_compile=compiled, notes=notes
        )
        decision = make_study(make_trial(64, run)).decide()
        assert decision.apply(models.mlp).jit_compile is compiled
        assert decision.settings.get("jit_compile", False) is compiled
        assert ("Compiled by XLA: 2.1 times as fast." in decision.page.cost) is compiled
