"""The metric by blocks of validation examples, and notes on it."""

import functools

import keras
import numpy as np
import pytest
import searches
import small_models
import tensorflow as tf
from small_models import rows

import kbatch
from kbatch.search import best_epoch
from kbatch.search.timed_fit import TimedFit
from kbatch.search.validation_outcomes import BlockSums
from kbatch.study.compared_trials import runs_of as compared_runs
from kbatch.study.trackers import tracked_runs
from kbatch.study.trial import Objective
from kbatch.training.shared_graph import SharedGraph

VAL_LOSS = Objective("val_loss", "min")
VALIDATION = rows(90, seed=1)
WEIGHTS = np.linspace(0.5, 1.5, 90).astype("float32")
layers = keras.layers


def dataset(arrays=VALIDATION):
    return tf.data.Dataset.from_tensor_slices(arrays)


@functools.cache
def shared():
    """Return a classifier that is traced once for tests that hold for any weights."""
    return small_models.stock()


def trained(model=None, objective=VAL_LOSS, *, data=None, fits=1, plan=None, **fit):
    """Return a timed `fit` of two epochs, with 90 rows for validation."""
    model = model or shared()
    timed = TimedFit(model, searches.plan(16, objective=objective, **(plan or {})))
    given = {"epochs": 2, "verbose": 0, "validation_data": VALIDATION} | fit
    with timed:
        for _ in range(fits):
            model.fit(*(data or rows(48)), **given)
    return timed


def outcomes_of(*arguments, **fit):
    return trained(*arguments, **fit).best_epoch.outcomes({})


def compiled(**arguments):
    model = small_models.stock()
    model.compile("sgd", **({"loss": small_models.own_loss, "metrics": ["accuracy"]} | arguments))
    return model


def binary(**arguments):
    """Return a binary classifier with metrics that are not means over examples."""
    model = keras.Sequential([layers.Input((8,)), layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1", threshold=0.5)]
    model.compile("sgd", "binary_crossentropy", metrics=metrics, **arguments)
    return model


X, Y = VALIDATION
LABELS = (Y > 0).astype("float32")[:, None]
HISTORIES = {
    "weights": (
        lambda: compiled(weighted_metrics=["accuracy"]),
        (*VALIDATION, WEIGHTS),
        (*VALIDATION, WEIGHTS),
    ),
    "auc in batches, several steps an execution": (
        lambda: binary(steps_per_execution=7),
        dataset((X, LABELS)).batch(7),
        (X, LABELS),
    ),
}


@pytest.mark.parametrize("form", HISTORIES)
def test_history_equals_a_plain_fit(form):
    build, given, validation = HISTORIES[form]
    data = keras.tree.map_structure(lambda part: part[:48], validation[:2])
    model = build()
    weights = model.get_weights()
    timed = TimedFit(model, searches.plan(48, objective=VAL_LOSS))
    with timed:
        history = model.fit(*data, epochs=2, verbose=0, validation_data=given, shuffle=False)
    plain = build()
    plain.set_weights(weights)
    # 90 rows in at most 50 blocks are 45 of 2 rows.
    sizes = {"batch_size": 48, "validation_batch_size": 2, "epochs": 2}
    expected = plain.fit(*data, **sizes, verbose=0, validation_data=validation, shuffle=False)
    names = [name for name in expected.history if name.startswith("val_")]
    assert len(names) > 1
    for name in names:
        assert history.history[name] == expected.history[name], name
    outcomes = timed.best_epoch.outcomes({})
    assert (outcomes.reason, outcomes.examples, len(outcomes.values)) == (None, 90, 45)


@pytest.mark.filterwarnings("ignore:.*available")
def test_callbacks_on_validation_leave_the_model_of_a_plain_fit(tmp_path):
    found, data = [], rows(48)
    for form in ("timed", "plain"):
        keras.utils.set_random_seed(0)
        model = small_models.stock(optimizer=keras.optimizers.Adam(0.1))
        path = tmp_path / f"{form}.weights.h5"
        fit = {"epochs": 10, "verbose": 0, "shuffle": False, "validation_freq": 2}
        fit["validation_data"] = VALIDATION
        fit["callbacks"] = [
            keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True),
            keras.callbacks.ReduceLROnPlateau(patience=1),
        ]
        if form == "timed":
            with TimedFit(model, searches.plan(16, objective=VAL_LOSS)):
                history = model.fit(*data, **fit)
        else:
            history = model.fit(*data, batch_size=16, validation_batch_size=2, **fit)
        logs = {key: history.history[key] for key in history.history if key.startswith("val_")}
        state = [np.array(one) for one in (*model.variables, *model.optimizer.variables)]
        model.load_weights(path)
        state += model.get_weights()
        found.append((history.epoch, logs, state))
    (epochs, logs, state), plain = found
    assert (epochs, logs) == plain[:2]
    assert len(logs["val_loss"]) >= 3
    for one, other in zip(state, plain[2], strict=True):
        np.testing.assert_array_equal(one, other)
    rate, *_ = (one for one in model.optimizer.variables if one.path.endswith("learning_rate"))
    assert len(epochs) < 10
    assert float(rate) < 0.1


FORMS = {
    "function": {"validation_data": lambda size: dataset().batch(size)},
    "every second epoch": {"validation_freq": 2, "epochs": 3},
    "two fits": {"fits": 2, "epochs": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_outcomes_have_blocks_of_equal_examples(form):
    timed = trained(**({"epochs": 1} | FORMS[form]))
    outcomes = timed.best_epoch.outcomes({})
    assert (outcomes.reason, outcomes.metric, outcomes.block_examples) == (None, "val_loss", 2)
    assert (outcomes.examples, len(outcomes.values)) == (90, 45)
    assert outcomes.key == outcomes_of(epochs=1).key
    if len(timed.clock.epochs) == 1:
        logged = timed.clock.epochs[0].metrics["val_loss"]
        assert np.mean(outcomes.values) == pytest.approx(logged, rel=1e-5)


def test_outcomes_of_auc_are_pseudo_values():
    model = binary()
    objective = Objective("val_auc", "max")
    data = X, LABELS
    found = outcomes_of(model, objective, data=data, epochs=1, validation_data=data)
    metric = keras.metrics.AUC()
    predicted = model.predict(X, verbose=0)

    def of(chosen):
        metric.reset_state()
        metric.update_state(LABELS[chosen], predicted[chosen])
        return np.asarray(metric.result()).item()

    blocks, whole = np.arange(90).reshape(45, 2), of(np.arange(90))
    without = [of(np.delete(blocks, k, 0).ravel()) for k in range(45)]
    values = 45 * whole - 44 * np.array(without)
    values += whole - values.mean()
    np.testing.assert_allclose(found.values, values, rtol=1e-3, atol=1e-4)


def test_outcomes_are_averaged_over_the_best_epochs_of_all_calls():
    accuracy = Objective("val_accuracy", "max")
    model = small_models.stock(optimizer=keras.optimizers.SGD(0.5))
    timed = trained(model, accuracy, epochs=7, fits=2, validation_freq=1)
    logged = [epoch.metrics["val_accuracy"] for epoch in timed.clock.epochs]
    # The best fifth of 14 epochs is three.
    expected = np.mean(sorted(logged)[-3:])
    assert np.ptp(sorted(logged)[-3:]) > 0
    values = timed.best_epoch.outcomes({}).values
    assert np.mean(values) == pytest.approx(expected, rel=1e-5)


def test_outcomes_of_many_sums_keep_few_epochs(monkeypatch):
    monkeypatch.setattr(best_epoch, "_MOST_KEPT", 0)
    given = {"epochs": 14, "shuffle": False}
    keras.utils.set_random_seed(0)
    timed = trained(small_models.stock(), **given)
    assert len(timed.best_epoch._blocks) == 3
    losses = sorted(epoch.metrics["val_loss"] for epoch in timed.clock.epochs)
    values = timed.best_epoch.outcomes({}).values
    assert np.mean(values) == pytest.approx(np.mean(losses[:3]), rel=1e-5)


def classes(kind):
    """Return labels of 90 examples. Nine have the rarest class: the first ones, or spread."""
    rare = (np.arange(90) % 10 == 0) if "spread" in kind else (np.arange(90) < 9)
    numbers = np.where(rare, 1, 0 if "two" in kind else 2 * (np.arange(90) % 2))
    if "columns" in kind:
        return np.eye(3, dtype="float32")[numbers]
    return numbers.astype("float32" if "two" in kind else "int32")[:, None]


KINDS = keras.metrics
STEPS = {
    "auc, two": (KINDS.AUC, {}, 1 / 9),
    "precision, two, spread": (KINDS.Precision, {}, 1 / 9),
    "squared error, two": (KINDS.MeanSquaredError, {}, None),
    "recall of a class, columns": (KINDS.Recall, {"class_id": 0}, 1 / 40),
    "macro f1, columns": (KINDS.F1Score, {"average": "macro"}, 1 / 27),
    "accuracy, columns": (KINDS.CategoricalAccuracy, {}, 1 / 90),
    "iou, classes": (KINDS.MeanIoU, {"num_classes": 3, "sparse_y_pred": False}, 1 / 9),
}


SLOW = ("precision, two, spread", "iou, classes")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in STEPS]
)
def test_outcomes_step_is_one_over_the_rarest_class(kind):
    metric, given, step = STEPS[kind]
    outputs = 1 if "two" in kind else 3
    activation = "sigmoid" if outputs == 1 else "softmax"
    model = keras.Sequential([layers.Input((8,)), layers.Dense(outputs, activation=activation)])
    loss = "mse" if outputs == 1 or "columns" in kind else "sparse_categorical_crossentropy"
    model.compile("sgd", loss, metrics=[metric(name="own", **given)])
    data = X, classes(kind)
    fit = {"data": data, "validation_data": data, "epochs": 1}
    found = outcomes_of(model, Objective("val_own", "max"), **fit)
    assert found.reason is None
    assert found.step == (step and pytest.approx(step))
    lacks = step is not None and step >= 1 / 27
    assert (found.lacking_blocks > 30) == lacks


class Hits(keras.metrics.Metric):
    """A custom metric that adds up."""

    def __init__(self):
        super().__init__(name="hits")
        self.hit, self.all = (self.add_weight(initializer="zeros") for _ in range(2))

    def update_state(self, y, p, sample_weight=None):
        hits = tf.equal(tf.cast(tf.reshape(y, [-1]), tf.int64), tf.argmax(p, axis=1))
        self.hit.assign_add(tf.reduce_sum(tf.cast(hits, tf.float32)))
        self.all.assign_add(tf.cast(tf.size(hits), tf.float32))

    def result(self):
        return self.hit / self.all


def test_outcomes_of_a_custom_metric_that_adds_up():
    model = compiled(metrics=["accuracy", Hits()])
    own = trained(model, Objective("val_hits", "max"))
    assert own.best_epoch.outcomes({}).reason is None
    # A batch that is checked alone counts once.
    right = model.predict(X, verbose=0).argmax(1) == Y
    assert own.clock.epochs[-1].metrics["val_hits"] == pytest.approx(right.mean())


def test_block_sums_share_one_graph_in_a_search(monkeypatch):
    step, traced = keras.Model.test_step, []
    monkeypatch.setattr(keras.Model, "test_step", lambda *a: traced.append(1) or step(*a))
    graph, found, counts = SharedGraph(), [], []
    for _ in range(3):
        keras.utils.set_random_seed(0)
        model = graph.model_for(compiled(steps_per_execution=3))
        found.append(outcomes_of(model, epochs=1, shuffle=False))
        counts.append(len(traced))
    assert counts[0] == counts[1] == counts[2] > 0
    assert found[0] == found[1] == found[2]


def test_outcomes_block_of_several_batches():
    settings = {"validation_batch_size": 5}
    data = rows(601, seed=1)
    found = outcomes_of(small_models.stock(), validation_data=data, plan=settings, epochs=1)
    # A block has three batches of at most 5 rows.
    assert (found.block_examples, len(found.values), found.examples) == (15, 41, 601)


class Largest(keras.metrics.Metric):
    """A metric that is not a function of sums: the largest target."""

    def __init__(self):
        super().__init__(name="largest")
        self.found = self.add_weight(initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.found.assign(tf.maximum(self.found, tf.cast(tf.reduce_max(y), "float32")))

    def result(self):
        return self.found


class Changed(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] *= 2.0


class Lost(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        self.model.set_weights([np.nan * one for one in self.model.get_weights()])


MOST = Objective("val_largest", "max")


@pytest.mark.parametrize(
    ("objective", "fit", "model", "reason"),
    [
        (VAL_LOSS, {"validation_data": None}, shared, "no_validation"),
        (Objective("loss", "min"), {}, shared, "of_training"),
        (VAL_LOSS, {"callbacks": [Changed()]}, shared, "no_metric"),
        (VAL_LOSS, {"callbacks": [Lost()]}, small_models.stock, "not_finite"),
        (VAL_LOSS, {"validation_data": rows(3)}, shared, "few_blocks"),
        (VAL_LOSS, {"validation_data": dataset().shuffle(90)}, shared, "shuffled"),
        (MOST, {}, lambda: compiled(metrics=[Largest()]), "no_sums"),
    ],
)
def test_outcomes_give_the_reason_if_there_are_none(objective, fit, model, reason):
    outcomes = outcomes_of(model(), objective, **fit)
    assert (outcomes.reason, outcomes.values) == (reason, ())


OUTPUTS = {
    "equal": (lambda x: 0 * x + 0.3, True),
    "equal up to rounding": (lambda x: 1e-8 * x + 0.3, True),
    "equal in float16": (lambda x: tf.cast(1e-5 * x + 0.3, tf.float16), True),
    "equal in a dict": (lambda x: {"a": 0 * x, "b": 0 * x + 2}, True),
    "some not a number": (lambda x: tf.where(x > 1, np.nan, x), True),
    "some infinite": (lambda x: tf.where(x > 1, np.inf, x), True),
    "masked": (lambda x: tf.concat([x[:, :1], 0 * x[:, :1] - np.inf], 1), False),
    "masked elsewhere": (lambda x: tf.where(x > 0, -np.inf, 1.0), False),
    "rare": (lambda x: 1e-6 * tf.sigmoid(x), False),
    "near one": (lambda x: 1 - 1e-4 * tf.sigmoid(x), False),
    "one of a list": (lambda x: [0 * x, x], False),
    "one example differs": (lambda x: tf.cast(x == X.max(), tf.float32), False),
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_is_dead_if_outputs_are_equal_or_not_finite(form):
    function, dead = OUTPUTS[form]
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Lambda(function, dtype="float32")(inputs))
    model.compile("sgd", keras.tree.map_structure(lambda _: "mse", model.output))
    sums, x = BlockSums.of(model, "loss"), X[X.max(1).argsort()[::-1]]
    for count, size in ((12, 1), (12, 5), (3, 3)):  # Three examples are too few.
        sums.begin(None)
        for part in np.split(x[:count], range(size, count, size)):
            y = keras.tree.map_structure(tf.zeros_like, model(part))
            sums.run((tf.constant(part), y))
        assert sums.is_dead() == (dead and (count > 3 or "some" in form))


@pytest.mark.parametrize(("name", "bias"), [("top", 0.0), ("top", -1e6), ("auc", -1e6)])
def test_is_dead_for_dead_units_with_any_metric(name, bias):
    hidden = layers.Dense(4, activation="relu", bias_initializer=keras.initializers.Constant(bias))
    several = name == "top"
    last = layers.Dense(3 if several else 1, "softmax" if several else "sigmoid")
    model = keras.Sequential([layers.Input((8,)), hidden, last])
    loss = "sparse_categorical_crossentropy" if several else "binary_crossentropy"
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
    model.compile("sgd", loss, metrics=[top if several else keras.metrics.AUC(name="auc")])
    data = VALIDATION if several else (X, LABELS)
    objective = Objective(f"val_{name}", "max")
    timed = trained(model, objective, data=data, validation_data=data)
    assert timed.best_epoch.is_dead() == (bias < 0)


# At 0.0077 about a quarter of the positives are below the first threshold.
@pytest.mark.parametrize("scale", [1.0, 0.0077, 1e-3])
def test_notes_of_an_auc_with_predictions_below_its_thresholds(scale):
    """The order of all predictions is right."""
    inputs = keras.Input((8,))
    outputs = layers.Lambda(lambda x: scale * tf.sigmoid(x[:, :1]))(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    data = X, (X[:, :1] > 0.5).astype("float32")
    found = trained(model, Objective("val_auc", "max"), data=data, validation_data=data, epochs=1)
    values, notes = found.best_epoch.outcomes({}).values, found.best_epoch.notes()
    if scale > 1e-3:
        assert (np.mean(values) > (0.99 if scale == 1.0 else 0.8), notes) == (True, ())
    else:
        assert np.mean(values) == pytest.approx(0.5)
        assert [(one.code, one.values["share"]) for one in notes] == [("auc_thresholds", "100 %")]


@pytest.mark.parametrize(
    ("rare", "separates", "noted"), [(3, False, True), (3, True, False), (30, False, False)]
)
def test_notes_of_an_accuracy_that_the_most_common_class_reaches(rare, separates, noted):
    border = np.sort(X[:, 0])[-rare - 1 : 1 - rare].mean()
    labels = (X[:, :1] > border).astype("float32")
    model = keras.Sequential([layers.Input((8,)), layers.Dense(1, "sigmoid")])
    kernel = 50.0 * separates * np.eye(8, 1)
    model.set_weights([kernel, np.array([-50.0 * border if separates else -9.0])])
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=["accuracy"])
    given = {"data": (X, labels), "validation_data": (X, labels), "epochs": 1}
    timed = trained(model, Objective("val_accuracy", "max"), **given)
    notes = timed.best_epoch.notes()
    assert [note.code for note in notes] == ["most_common_class"] * noted
    assert all(note.values["share"] == note.values["value"] == "0.9667" for note in notes)


class Dying(keras.callbacks.Callback):
    """Makes all outputs equal in the validation of some epochs."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs, self.epoch, self.kept = epochs, 0, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_test_begin(self, logs=None):
        self.kept = self.model.get_weights()
        if self.epoch in self.epochs:
            self.model.set_weights([0 * one for one in self.kept])

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)


@pytest.mark.parametrize(
    ("epochs", "best", "dead"), [((0,), "max", False), ((0,), "min", True), ((3,), "max", True)]
)
def test_is_dead_at_the_end_and_in_judged_epochs(epochs, best, dead):
    # With equal outputs the loss is lower than with weights that have hardly been trained.
    objective = Objective("val_loss", best)
    timed = trained(objective=objective, epochs=4, callbacks=[Dying(epochs)])
    assert timed.best_epoch.is_dead() == dead


def runs_of(study):
    return [run for trial in study.trials for run in trial.executions]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Search in mixed_float16 with two runs of each size."""
    hypermodel = searches.stock(batch_sizes=(8, 16), dtype_policy="mixed_float16")
    directory = tmp_path_factory.mktemp("search")
    return searches.search(directory, hypermodel, executions_per_trial=2, fit={"epochs": 6})


def test_search_pairs_runs_by_example(searched):
    runs = runs_of(kbatch.load_study(searched))
    assert len(runs) == 4
    assert {run.outcomes.reason for run in runs} == {None}
    assert len({(run.outcomes.key, run.outcomes.block_examples) for run in runs}) == 1
    for run in runs:
        # The mean of the best two of six epochs, over all validation examples.
        logged = sorted(epoch.metrics["val_accuracy"] for epoch in run.epochs)
        assert run.outcomes.metric == "val_accuracy"
        judged = run.judged("val_accuracy", "max")
        assert judged == pytest.approx(np.mean(logged[-2:]), rel=1e-5)
        assert judged == pytest.approx(np.mean(run.outcomes.values))


def test_val_accuracy_is_logged_and_judged_value_is_separate(searched):
    study = kbatch.load_study(searched)
    frame, table = study.to_dataframe(), study.table().set_index("batch size")
    tracked = [r.metrics for r in tracked_runs("", study.trials, study.search, study.decide())[1:]]
    assert any(abs(t.metrics["val_accuracy"] - t.judged_value) > 1e-3 for t in study.trials)
    for number, trial in enumerate(study.trials):
        runs = trial.executions
        logged = [max(epoch.metrics["val_accuracy"] for epoch in run.epochs) for run in runs]
        judged = [np.mean(run.outcomes.values) for run in runs]
        both = pytest.approx((np.mean(logged), np.mean(judged)))
        assert (trial.metrics["val_accuracy"], trial.judged_value) == both
        assert (frame.val_accuracy[number], frame.val_accuracy_judged[number]) == both
        row = table.loc[trial.batch_size]
        assert (row["val_accuracy"], row["judged (95 % interval)"]) == both
        assert searched.oracle.get_trial(trial.trial_id).score == pytest.approx(np.mean(logged))
        assert f"val_accuracy {np.mean(logged):.4g}" in repr(trial)
        for one, two in zip(logged, judged, strict=True):
            found = tracked.pop(0)
            assert found["best_epoch/val_accuracy"] == pytest.approx(one)
            assert found["val_accuracy_judged"] == pytest.approx(two)
        # The judge compares the judged values.
        values = [
            run.value
            for run in compared_runs(study.trials)[0]
            if run.batch_size == trial.batch_size
        ]
        assert values == pytest.approx(judged)


@pytest.mark.parametrize(("offset", "reason"), [(0.0, None), (0.1, "no_metric")])
def test_outcomes_are_unknown_if_a_fit_computes_the_objective_itself(offset, reason):
    timed = trained()
    value = timed.clock.epochs[-1].metrics["val_loss"] + offset
    assert timed.best_epoch.outcomes({"val_loss": value}).reason == reason


def test_seeds_draw_different_weights_and_orders(searched):
    for field in ("initial_weights", "first_order"):
        of_seed = {(run.seed, getattr(run, field)) for run in runs_of(kbatch.load_study(searched))}
        assert len(of_seed) == len({found for _, found in of_seed}) == 2


def pinned():
    keras.utils.set_random_seed(0)
    return small_models.stock()


def test_pinned_seeds_are_recorded_and_never_certain(tmp_path):
    data = (dataset(rows(94)).batch(8),)
    fit = {"epochs": 1, "shuffle": False}
    kind = {"kind": kbatch.BatchSizeTuner, "executions_per_trial": 3}
    hypermodel = searches.stock(pinned, (8, 16))
    study = kbatch.load_study(searches.search(tmp_path, hypermodel, data=data, fit=fit, **kind))
    runs = runs_of(study)
    assert len({run.seed for run in runs}) == 3
    (weights,) = {run.initial_weights for run in runs}
    orders = {(run.batch_size, run.first_order) for run in runs}
    assert len(orders) == 2
    assert None not in (weights, *(order for _, order in orders))
    decision = study.decide(tolerance=0.9)
    assert not decision.certain
    assert decision.judgement.obstacle == "pinned"
