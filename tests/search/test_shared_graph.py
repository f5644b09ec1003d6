"""A search in one process traces the step once, and its trials train as fresh builds do."""

import gc

import keras
import numpy as np
import searches
import small_models as models

import kbatch


def compiled(loss, *, hidden=16):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def losses_by_size(tuner):
    study = kbatch.load_study(tuner)
    return {
        execution.batch_size: [epoch.metrics for epoch in execution.epochs]
        for trial in study.trials
        for execution in trial.executions
    }


def test_the_step_of_a_search_is_traced_once(tmp_path, monkeypatch):
    calls, seen, plain = [], [], keras.Model.compute_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    def build():
        seen.append(len(calls))
        return compiled("sparse_categorical_crossentropy")

    monkeypatch.setattr(keras.Model, "compute_loss", counted)
    searches.search(tmp_path, searches.stock(build), kbatch.BatchSizeTuner)
    traced = np.diff([*seen, len(calls)])  # By what was built before.
    assert sorted(traced) == [0] * (len(traced) - 1) + [traced.max()]
    assert traced.max() > 0


def test_trials_train_as_if_each_had_a_graph_of_its_own(tmp_path):
    def build():
        return compiled("sparse_categorical_crossentropy")

    def build_eagerly_described():
        model = build()
        model.add(keras.layers.Lambda(lambda x: x))  # So that nothing is shared.
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    found = {}
    for name, function in (("shared", build), ("apart", build_eagerly_described)):
        tuner = searches.search(
            tmp_path / name,
            searches.stock(function),
            kbatch.BatchSizeTuner,
            executions_per_trial=2,
        )
        metrics = losses_by_size(tuner)
        found[name] = {
            size: [{n: v for n, v in one.items() if n != "samples_per_second"} for one in epochs]
            for size, epochs in metrics.items()
        }
    assert found["shared"] == found["apart"]


def test_what_a_callback_changes_in_a_model_stays_in_its_trial(tmp_path):
    class Freeze(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.layers[0].trainable = False

    def build():
        return compiled("sparse_categorical_crossentropy")

    plain = searches.search(tmp_path / "plain", searches.stock(build), kbatch.BatchSizeTuner)
    frozen = searches.search(
        tmp_path / "frozen",
        searches.stock(build),
        kbatch.BatchSizeTuner,
        fit={"callbacks": [Freeze()]},
    )
    for size, epochs in losses_by_size(plain).items():
        for one, other in zip(epochs, losses_by_size(frozen)[size], strict=True):
            assert one["loss"] == other["loss"]


def test_collections_of_garbage_leave_out_what_lived_before_the_search(tmp_path):
    frozen = []

    def build():
        frozen.append(gc.get_freeze_count())
        return models.stock()

    gc.unfreeze()  # The suite leaves out what lived before each test.
    searches.quick(tmp_path, searches.stock(build, (8,)), kbatch.BatchSizeTuner)
    assert frozen[-1] > 0
    assert gc.get_freeze_count() == 0
