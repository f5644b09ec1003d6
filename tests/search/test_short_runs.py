"""Short runs that are continued or repeated, and runs that the search stops early."""

import math

import keras
import pytest
import searches
import small_models as models

import kbatch
from kbatch.records.training_run import AskedRun
from kbatch.search.files import TrialFiles
from kbatch.training.data.training_data import FitCall

SHORT, WHOLE = AskedRun(epochs=2), AskedRun()


class Counts(keras.callbacks.Callback):
    """Lists the epochs, and counts them in its own state."""

    def __init__(self):
        super().__init__()
        self.count, self.epochs = 0, []

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.epochs = self.epochs
        return copy

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        self.epochs.append((epoch, self.count))


class Restarts(Counts):
    def on_train_begin(self, logs=None):
        self.count = 0


class Halves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate / 2)


class OfTheirOwn(keras.layers.Dropout):
    """A layer of a class for which no graph is shared."""


def dropping(layer=keras.layers.Dropout, optimizer="adam"):
    layers = [keras.Input((8,)), keras.layers.Dense(8, "relu"), layer(0.5), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def runs(directory, *asked, build=dropping, callbacks=(), epochs=4, objective="val_loss", **fit):
    """Makes training runs of a trial of batch size 8, a short one followed by another of 32."""
    tuner = kbatch.BatchSizeTuner(
        searches.stock(build, (8, 32)),
        objective,
        strategy="grid",
        directory=directory,
        overwrite=True,
    )
    given = {"validation_data": models.rows(40, seed=1), "callbacks": [*callbacks], "verbose": 0}
    call = FitCall.of_search(models.rows(94), given | {"epochs": epochs} | fit, stock_fit=True)
    without = call.with_callbacks([])
    tuner._compare_search(call)
    trial, other = (tuner.oracle.create_trial(name) for name in "ab")
    for one in asked:
        tuner.executions_per_trial = one.executions
        tuner.run_executions(trial, call, one)
        if one.epochs:  # Another training run in between.
            tuner.run_executions(other, without, one)
    return TrialFiles(tuner, trial).record().executions


def learnt(run):
    """Return the metrics and counts of each epoch, without times."""
    times = ("samples_per_second",)
    metrics = [
        {name: value for name, value in epoch.metrics.items() if name not in times}
        for epoch in run.epochs
    ]
    counts = [(epoch.epoch, epoch.examples, epoch.updates) for epoch in run.epochs]
    totals = run.examples_seen, run.batches, run.updates, run.epochs_asked, run.learning_rate
    return metrics, counts, totals, run.outcomes, run.initial_weights, run.first_order


@pytest.mark.parametrize("layer", [keras.layers.Dropout, OfTheirOwn])
def test_continued_short_run_equals_a_complete_run(layer, tmp_path):
    """The runs share a graph, or each has its own. Callbacks set rates and count."""
    given = {"build": lambda: dropping(layer), "callbacks": [Halves(), counts := Counts()]}
    (continued,) = runs(tmp_path, SHORT, WHOLE, **given)
    assert counts.epochs == [(0, 1), (1, 2), (2, 3), (3, 4)]
    (whole,) = runs(tmp_path, WHOLE, **given)
    assert (continued.length, continued.epochs_repeated) == ("complete", 0)
    assert learnt(continued) == learnt(whole)
    reported = [{**run.reported, "samples_per_second": 0} for run in (continued, whole)]
    assert reported[0] == reported[1]


def averaged():
    return dropping(optimizer=keras.optimizers.Adam(0.01, use_ema=True))


@pytest.mark.parametrize(
    "given",
    [
        {"callbacks": [Restarts()]},
        pytest.param({"build": averaged}, marks=pytest.mark.slow),
        pytest.param({"steps_per_epoch": 3}, marks=pytest.mark.slow),
    ],
    ids=["callback", "averages", "cut epochs"],
)
def test_short_run_that_cannot_be_continued_is_repeated(given, tmp_path):
    (run,) = runs(tmp_path, SHORT, WHOLE, **given)
    for restarts in given.get("callbacks", ()):
        assert restarts.epochs == [(0, 1), (1, 2), (0, 1), (1, 2), (2, 3), (3, 4)]
    assert (run.length, len(run.epochs), run.epochs_repeated) == ("complete", 4, 2)


class Interrupts(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_interrupted_continuation_leaves_the_short_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        runs(tmp_path, SHORT, WHOLE, callbacks=[Interrupts()])
    trial, _ = kbatch.load_study(tmp_path / "search").trials
    assert [(run.status, run.length) for run in trial.executions] == [("completed", "short")]


def test_run_that_is_too_far_behind_is_stopped(tmp_path):
    (run,) = runs(tmp_path, AskedRun(least=(-math.inf, -1e6, 1e6, 1e6, 1e6)), epochs=6)
    assert (run.status, run.length) == ("completed", "stopped_early")
    assert len(run.epochs) == 3
