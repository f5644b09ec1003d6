"""The policy of a search: mixed_float16, or float32 if that cannot train or is too slow."""

import contextlib
import types

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models
import tensorflow as tf

import kbatch
from kbatch.errors import PolicyUnsupported
from kbatch.records.training_run import EpochRecord
from kbatch.search.first_updates import check_large_inputs, lost_updates, slowdown, why_not_finite
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import dtype_policy_scope, overflows, skips_all_updates

layers = keras.layers
FIVE = {"epochs": 5, "validation_data": None}
CHOSEN = {"dtype_policy": None, "micro_batch_size": None}


class Shifted(layers.Layer):
    """Adds a float32 constant, as examples on the web do."""

    def call(self, x):
        return x + tf.constant(0.5, tf.float32)


class Late(keras.Model):
    """A subclass whose `call` runs only when it has data."""

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
    """Return a build function whose scaled gradients overflow in float16."""

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
    """Let the plan see a GPU, so that it does not compare times with float32."""
    monkeypatch.setattr("kbatch.search.plan.gpu_visible", lambda: True)


@pytest.mark.parametrize("layer", ["Shifted", "Late"])
def test_search_trains_in_float32_if_a_layer_refuses_float16(request, tmp_path, layer):
    build, kind = early, kbatch.BatchSizeTuner
    if layer == "Late":
        request.getfixturevalue("gpu")
        build, kind = late, keras_tuner.GridSearch
    with pytest.warns(UserWarning, match=f"mixed_float16: `{layer}.call` "):
        tuner = search(tmp_path, build, kind)
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    assert {trial.dtype_policy for trial in study.trials} == {"float32"}
    for trial in study.trials:
        (note,) = [note for note in trial.notes if note.code == "float32_instead"]
        assert "tf.cast(constant, x.dtype)" in note
    assert study.search.settings["dtype_policy"] is None
    assert (study.plan.dtype_policy, study.plan.notes) == ("float32", (note,))


@pytest.mark.parametrize(
    ("times", "policy"),
    [
        pytest.param(1.04, "mixed_float16", marks=pytest.mark.slow),
        (1.9, "mixed_float16"),
        (2.1, "float32"),
    ],
)
def test_search_trains_in_float32_if_float16_is_slow(monkeypatch, tmp_path, times, policy):
    monkeypatch.setattr("kbatch.search.first_updates.slowdown", lambda *_: times)
    study = kbatch.load_study(search(tmp_path / "chosen", small_models.stock, sizes=(8,)))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", policy)}
    code = "float32_instead" if policy == "float32" else "half_slower"
    for trial in study.trials:
        texts = [str(note) for note in trial.notes if note.code == code]
        assert [f"{times} times as long" in text for text in texts] == [True] * (times > 1.1)
    if policy == "mixed_float16":
        return
    # The results equal a search with the policy given.
    given = {"sizes": (8,), "dtype_policy": policy}
    named = kbatch.load_study(search(tmp_path / "named", small_models.stock, **given))
    for one, other in zip(study.trials, named.trials, strict=True):
        assert one.judged_value == other.judged_value


@pytest.mark.parametrize(
    ("lost", "since", "found"),
    [
        ([0, 0, 0], 300, 0),
        ([7, 0, 0], 293, 0),  # The loss scale finds its start.
        ([70, 8, 0], 222, 78),  # It would be below 1.
        ([3, 5, 4], 10, 12),  # Again in each epoch.
        ([3, 1, 0], 150, 0),
        ([4, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0], 650, 0),  # It falls for half of the epochs.
        ([9], 91, 0),
        ([9], 20, 9),  # The last one after the middle of the epoch.
    ],
)
def test_lost_updates_counts_overflows_after_the_start(lost, since, found):
    epochs = [EpochRecord(k, {}, 800, 100 - n, 1.0, None, 100) for k, n in enumerate(lost)]
    optimizer = types.SimpleNamespace(built=True, step_counter=since)
    assert lost_updates(types.SimpleNamespace(optimizer=optimizer), epochs) == found


def test_loss_scale_of_a_mirrored_strategy_is_read():
    scale = keras.optimizers.LossScaleOptimizer
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), dtype_policy_scope("mixed_float16"):
        model = small_models.stock(optimizer=scale(keras.optimizers.SGD(), initial_scale=2.0**10))
        model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**7)
    assert overflows(model) == 3
    assert skips_all_updates(model)
    model.optimizer.step_counter.assign(20)
    lost = EpochRecord(0, {}, 800, 91, 1.0, None, 100)
    assert lost_updates(model, [lost]) == 9


class Looked(keras.Model):
    """A subclass casts its inputs to float16 before its `Embedding` reads them as ids."""

    def __init__(self):
        super().__init__()
        self.table, self.outer = layers.Embedding(5000, 4), layers.Dense(3, dtype="float32")

    def call(self, x):
        return self.outer(self.table(x)[:, 0])


def functional(*inner):
    return keras.Sequential([layers.Input((1,)), *inner, layers.Dense(3, dtype="float32")])


@pytest.mark.parametrize(
    ("build", "largest", "dtype", "why"),
    [
        (Looked, 4990, "float32", "give integers"),
        (Looked, 4999, "float32", "give integers"),  # Rounded up, it is out of range.
        (Looked, 4990, "int32", None),
        (lambda: functional(layers.Embedding(5000, 4), layers.Flatten()), 4990, "float32", None),
        (lambda: functional(layers.Rescaling(1e-3)), 60_000, "float32", None),
        (lambda: functional(layers.Rescaling(1e-3)), 70_000, "float32", "'rescal.* overflows"),
        (lambda: functional(layers.Rescaling(1e-3, dtype="float32")), 70_000, "float32", None),
    ],
)
def test_check_large_inputs_refuses_rounded_ids_and_overflows(build, largest, dtype, why):
    x = np.random.default_rng(0).integers(0, largest, (500, 1)).astype(dtype)
    x[3] = largest
    models = {}
    for policy in ("mixed_float16", "float32"):
        with dtype_policy_scope(policy):
            models[policy] = build()
    rows = TrainingData(x, x[:, 0]).largest_rows(2048, None)
    assert (rows is None) == (dtype == "int32")
    raised = pytest.raises(PolicyUnsupported, match=why) if why else contextlib.nullcontext()
    with raised:
        if rows is not None:
            check_large_inputs(*models.values(), rows)


def logarithm(y, p):
    return -keras.ops.mean(keras.ops.log(p * 0 + y))


def unbounded(y, p):
    return -logarithm(y, p)  # Minus infinity.


def falling(y, p):
    return keras.ops.mean(keras.ops.log(p))  # It pushes `p` below 0.


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        ("x", "1 of 40 rows of `x`['a']"),
        ("y", "1 of 40 rows of `y`"),
        ("validation", "2 of 20 rows of validation `x`['a']"),
        ("layer", "layer 'reciprocal'"),
        ("loss", "the loss 'logarithm'"),
        ("unbounded", "the loss 'unbounded'"),
        ("later", "the loss 'falling'"),
        (None, None),
    ],
)
def test_why_not_finite_names_the_cause(cause, found):
    x, y, xv = np.ones((40, 2), "f4"), np.ones((40, 1), "f4"), np.ones((20, 2), "f4")
    if cause in ("x", "y"):
        {"x": x, "y": y}[cause][3] = np.nan
    elif cause == "validation":
        xv[:2] = np.inf
    elif cause in ("loss", "unbounded"):
        y[7] = 0
    divisor = 0 if cause == "layer" else 1
    inner = [layers.Lambda(lambda x: 1 / (divisor * x), name="reciprocal")]
    inner.append(layers.Dense(1, kernel_initializer="ones"))
    inputs = keras.Input((2,), name="a")
    model = keras.Model({"a": inputs}, inner[1](inner[0](inputs)))
    loss = {"later": falling, "unbounded": unbounded}.get(cause, logarithm)
    model.compile(keras.optimizers.SGD(0.2), loss)
    data = TrainingData({"a": x}, y, validation_data=({"a": xv}, np.ones((20, 1))))
    note = why_not_finite(model, data)
    assert cause != "later" or "after" in note.values["when"]
    assert (note and (note.values.get("found") or note.values["part"])) == found


@pytest.mark.parametrize(
    ("half_s", "times", "sizes"),
    [
        # Two examples, some examples, then the batch until two more rounds agree.
        ([0.01, 0.01, 0.015, 0.015], 1.5, [2, 32, 128, 128]),
        ([0.01, 0.01, 0.09, 0.015, 0.015, 0.015], 1.5, [2, 32, 128, 128, 128, 128]),
        ([0.01, 0.1, 0.09, 0.09], 9.0, [2, 32, 64, 64]),  # More would take too long.
        ([0.4], 40.0, [2]),
    ],
    ids=["twice", "one outlier", "large", "very slow"],
)
def test_slowdown_needs_several_rounds(half_s, times, sizes):
    seconds, asked = iter(half_s), []

    def half_step_s(rows):
        asked.append(rows)
        return next(seconds)

    assert slowdown(half_step_s, lambda rows: 0.01, 128) == pytest.approx(times)
    assert asked == sizes


def test_slowdown_out_of_memory_times_fewer_rows():
    asked = []

    def step_s(rows):
        asked.append(rows)
        if rows > 64:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return 0.01

    assert slowdown(step_s, lambda rows: 0.01, 128) == 1.0
    assert asked == [2, 32, 128, 2, 32, 64, 64]


@pytest.mark.parametrize(
    ("refused", "cause"),
    [(1, "no such weights"), (2, "no weights in float16")],
    ids=["always", "in_a_trial"],
)
def test_build_function_that_refuses_float16_by_its_own_error(
    monkeypatch, tmp_path, refused, cause
):
    monkeypatch.setattr("kbatch.search.first_updates.slowdown", lambda *_: 1.0)
    calls = []

    def build():
        if keras.config.dtype_policy().name == "mixed_float16":
            calls.append(1)
            if len(calls) >= refused:
                raise KeyError(cause)
        return small_models.stock()

    if refused == 1:
        with pytest.warns(UserWarning, match=cause):
            (trial,) = search(tmp_path, build, sizes=(8,)).study.trials
        assert (trial.failure, trial.dtype_policy) == (None, "float32")
    else:
        (trial,) = search(tmp_path, build, sizes=(8,)).study.trials
        assert trial.failure == f"KeyError: {cause!r}"


@pytest.mark.parametrize("build", [early, overflowing(2.0**120)], ids=["early", "overflowing"])
def test_given_policy_is_obeyed(tmp_path, build):
    study = kbatch.load_study(search(tmp_path, build, sizes=(8,), dtype_policy="mixed_float16"))
    (trial,) = study.trials
    assert trial.status == "failed"
    assert study.plan is None or study.plan.notes == ()
    what = "tf.cast(constant, x.dtype)" if build is early else '`dtype_policy="float32"`'
    assert what in trial.executions[0].failure


def whole():
    return compiled(keras.Sequential([layers.Input((8,)), layers.Dense(3, dtype="float32")]))


def test_model_with_float32_layers_only_trains_in_float32(tmp_path):
    with pytest.warns(UserWarning, match="Trained in float32.*every layer with weights has"):
        study = kbatch.load_study(search(tmp_path, whole, sizes=(8,)))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", "float32")}


def squared(hp):
    """A model in which large inputs overflow at batch size 16 only."""
    at_16 = hp.get("batch_size") == 16
    first = layers.Lambda(lambda x: x * x * 1e-3 if at_16 else tf.clip_by_value(x, -1, 1))
    parts = [first, layers.Dense(8), layers.Dense(3, dtype="float32")]
    return compiled(keras.Sequential([layers.Input((8,)), *parts]))


def late_at_16(hp):
    return late() if hp.get("batch_size") == 16 else small_models.stock()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("build", "why", "kind"),
    [
        (late_at_16, "`Late.call` cannot", keras_tuner.GridSearch),
        (squared, "5 of 30 updates were lost, first in layer", kbatch.BatchSizeTuner),
    ],
)
def test_late_overflow_moves_the_search_to_float32(tmp_path, build, why, kind):
    """The model of the second trial overflows, after the first has trained in half precision."""
    x, y = small_models.rows(94)
    x[80:88] *= 300 if build is squared else 1  # Beyond the rows that the plan looks at.
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    with pytest.warns(UserWarning, match=why):
        study = kbatch.load_study(search(tmp_path, build, kind, data=(rows,), fit=FIVE))
    assert [trial.status for trial in study.trials] == ["completed"] * 2
    of_kbatch = kind is kbatch.BatchSizeTuner  # It trains the first one again.
    policies = ["float32" if of_kbatch else "mixed_float16", "float32"]
    assert [trial.dtype_policy for trial in study.trials] == policies


@pytest.mark.usefixtures("gpu")
def test_search_trains_in_float32_if_all_updates_overflow(tmp_path):
    with pytest.warns(UserWarning, match="the gradients of every batch overflowed"):
        study = kbatch.load_study(search(tmp_path, overflowing(2.0**120), sizes=(8,)))
    assert {(one.status, one.dtype_policy) for one in study.trials} == {("completed", "float32")}
    assert all(one.executions[0].updates for one in study.trials)


def test_search_traces_mixed_float16_once(monkeypatch, tmp_path):
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


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (kbatch.BatchSizeTuner, "mixed_bfloat16"),
        (keras_tuner.GridSearch, "float64"),
        (keras_tuner.GridSearch, "float16"),
    ],
)
def test_global_policy_is_obeyed_and_restored(tmp_path, kind, policy):
    config, before = keras.config, keras.config.dtype_policy()
    try:
        # Keras keeps the policy that a layer was made under when the float type is set.
        config.set_floatx("float64") if policy == "float64" else config.set_dtype_policy(policy)
        tuner = search(tmp_path, small_models.stock, kind, sizes=(8,))
        assert policy == "float64" or config.dtype_policy().name == policy
    finally:
        config.set_floatx("float32")
        config.set_dtype_policy(before)
    study = kbatch.load_study(tuner)
    assert {one.dtype_policy for one in study.trials} == {policy}
    assert f" under {policy}." in str(study.decide())
    # The weights have 16 bits.
    noted = [note for note in study.trials[0].notes if note.code == "updates_rounded"]
    assert ["mixed_bfloat16" in note for note in noted] == [True] * (policy == "float16")
