"""The policy of a search: mixed_float16, or float32 where that cannot train or takes long."""

import keras
import keras_tuner
import pytest
import searches
import small_models
import tensorflow as tf

import kbatch
from kbatch.search.first_updates import slowdown

layers = keras.layers
CHOSEN = {"dtype_policy": None, "micro_batch_size": None}


class Shifted(layers.Layer):
    """Adds a constant in float32, as many an example does."""

    def call(self, x):
        return x + tf.constant(0.5, tf.float32)


class Late(keras.Model):
    """A subclass, whose `call` runs only when its data are known."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8, activation="relu")
        self.outer = layers.Dense(3, dtype="float32")

    def call(self, x):
        return self.outer(self.inner(x) * tf.constant(2.0))


def compiled(model, **arguments):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **({"metrics": ["accuracy"]} | arguments))
    return model


def early():
    """Its layer is called when it is built."""
    parts = [layers.Input((8,)), layers.Dense(8), Shifted(), layers.Dense(3, dtype="float32")]
    return compiled(keras.Sequential(parts))


def late():
    return compiled(Late())


def overflowing(initial_scale):
    """Its scaled gradients overflow in half precision, as those of a CTC loss do."""

    def build():
        optimizer = keras.optimizers.SGD(0.01)
        if keras.config.dtype_policy().name != "float32":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial_scale)
        return small_models.stock(optimizer=optimizer)

    return build


def search(directory, build, kind=kbatch.BatchSizeTuner, sizes=(8, 16), **arguments):
    arguments = {"objective": "loss", "fit": {"epochs": 1, "validation_data": None}} | arguments
    settings = CHOSEN | {key: arguments.pop(key) for key in CHOSEN if key in arguments}
    hypermodel = searches.hypermodel(build, sizes, **settings)
    return searches.search(directory, hypermodel, kind, **arguments)


@pytest.fixture
def gpu(monkeypatch):
    """Lets the first model be built under mixed_float16, as on a GPU, and not under float32."""
    monkeypatch.setattr("kbatch.search.plan.gpu_visible", lambda: True)


@pytest.mark.parametrize("where", ["Shifted", "Late"])
def test_the_whole_search_trains_in_float32(request, tmp_path, where):
    build, kind = early, kbatch.BatchSizeTuner
    if where == "Late":
        request.getfixturevalue("gpu")
        build, kind = late, keras_tuner.GridSearch
    with pytest.warns(UserWarning, match=f"mixed_float16: `{where}.call` "):
        tuner = search(tmp_path, build, kind)
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    assert {trial.dtype_policy for trial in study.trials} == {"float32"}
    for trial in study.trials:
        (note,) = [note for note in trial.notes if note.code == "float32_instead"]
        assert "tf.cast(constant, x.dtype)" in note
    assert study.search.settings["dtype_policy"] is None
    assert (study.plan.dtype_policy, study.plan.notes) == ("float32", (note,))


@pytest.mark.parametrize(("times", "policy"), [(1.9, "mixed_float16"), (2.1, "float32")])
def test_a_processor_that_takes_long_for_it_trains_in_float32(monkeypatch, tmp_path, times, policy):
    monkeypatch.setattr("kbatch.search.first_updates.slowdown", lambda *_: times)
    study = kbatch.load_study(search(tmp_path / "chosen", small_models.stock))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", policy)}
    for trial in study.trials:
        texts = [str(note) for note in trial.notes if note.code == "float32_instead"]
        assert ["2.1 times as long" in text for text in texts] == [True] * (policy == "float32")
    if policy == "mixed_float16":
        return
    # As if it had been given.
    named = kbatch.load_study(search(tmp_path / "named", small_models.stock, dtype_policy=policy))
    for one, other in zip(study.trials, named.trials, strict=True):
        assert one.judged_value == other.judged_value


@pytest.mark.parametrize(
    ("half_s", "times", "sizes"),
    [
        # Of two examples, of some, then of the batch until two more rounds say the same.
        ([0.01, 0.01, 0.015, 0.015], 1.5, [2, 32, 128, 128]),
        ([0.01, 0.01, 0.09, 0.015, 0.015, 0.015], 1.5, [2, 32, 128, 128, 128, 128]),
        ([0.01, 0.1, 0.09, 0.09], 9.0, [2, 32, 64, 64]),  # More would take too long.
        ([0.4], 40.0, [2]),
    ],
    ids=["twice", "one outlier", "large", "very slow"],
)
def test_no_single_round_decides_how_long_an_update_takes(half_s, times, sizes):
    seconds, asked = iter(half_s), []

    def half_step_s(rows):
        asked.append(rows)
        return next(seconds)

    assert slowdown(half_step_s, lambda rows: 0.01, 128) == pytest.approx(times)
    assert asked == sizes


@pytest.mark.parametrize("build", [early, overflowing(2.0**120)], ids=["early", "overflowing"])
def test_a_policy_that_was_given_is_obeyed(tmp_path, build):
    study = kbatch.load_study(search(tmp_path, build, sizes=(8,), dtype_policy="mixed_float16"))
    (trial,) = study.trials
    assert trial.status == "failed"
    assert study.plan is None or study.plan.notes == ()
    what = "tf.cast(constant, x.dtype)" if build is early else '`dtype_policy="float32"`'
    assert what in trial.executions[0].failure


def whole():
    return compiled(keras.Sequential([layers.Input((8,)), layers.Dense(3, dtype="float32")]))


def test_a_model_whose_layers_are_all_float32_trains_so(tmp_path):
    with pytest.warns(UserWarning, match="Trained in float32.*every layer with weights has"):
        study = kbatch.load_study(search(tmp_path, whole, sizes=(8,)))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", "float32")}


def test_no_trial_alone_trains_in_float32(monkeypatch, tmp_path):
    """The model of the second trial is another one, and the first has trained in half precision."""
    monkeypatch.setattr("kbatch.search.plan.gpu_visible", lambda: True)

    def build(hp):
        return late() if hp.get("batch_size") == 16 else small_models.stock()

    study = kbatch.load_study(search(tmp_path, build))
    assert [trial.status for trial in study.trials] == ["completed", "failed"]
    assert {trial.dtype_policy for trial in study.trials} == {"mixed_float16"}
    assert "`Late.call` cannot compute under mixed_float16" in study.trials[1].failure


@pytest.mark.usefixtures("gpu")
def test_where_all_updates_overflow_the_search_trains_in_float32(tmp_path):
    with pytest.warns(UserWarning, match="the gradients of every batch overflowed"):
        study = kbatch.load_study(search(tmp_path, overflowing(2.0**120)))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", "float32")}
    assert all(one.executions[0].updates for one in study.trials)


def test_each_policy_is_traced_once_in_a_search(monkeypatch, tmp_path):
    """The update by which mixed_float16 is tried leaves its graph to the trials."""
    monkeypatch.setattr("kbatch.search.first_updates.slowdown", lambda *_: 1.0)
    own, seen = keras.Model.train_step, []

    def step(model, data):
        seen.append(model.dtype_policy.name)
        return own(model, data)

    monkeypatch.setattr(keras.Model, "train_step", step)
    settings = CHOSEN | {"steps_per_execution": 1}
    hypermodel = searches.hypermodel(small_models.stock, (8, 16), **settings)
    study = kbatch.load_study(searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner))
    assert {trial.status for trial in study.trials} == {"completed"}
    assert len(seen) == 1
