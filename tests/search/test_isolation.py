"""Trials in processes of their own."""

import os
import signal

import keras
import models
import numpy as np
import psutil
import pytest
import searches
import tensorflow as tf

import kbatch
from kbatch.search.trial_process import IsolatedTrials


def search(directory, hypermodel=None, **arguments):
    hypermodel = hypermodel or searches.stock(batch_sizes=(8, 32))
    return searches.search(directory, hypermodel, kbatch.BatchSizeTuner, isolate=True, **arguments)


class Notes(keras.callbacks.Callback):
    """Writes the number of the process that trains."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_begin(self, logs=None):
        with self.file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")


def test_an_isolated_search_is_the_same_search(tmp_path, capfd):
    fit = {"callbacks": [Notes(tmp_path / "pids")], "verbose": 1}
    tuner = search(tmp_path, fit=fit, executions_per_trial=2)
    here = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(8, 32)),
        kbatch.BatchSizeTuner,
        executions_per_trial=2,
        project_name="here",
    )
    pairs = zip(kbatch.load_study(tuner).trials, kbatch.load_study(here).trials, strict=True)
    for isolated, trial in pairs:
        assert isolated.metrics == trial.metrics
        assert isolated.notes == trial.notes
    scores = [[trial.score for trial in t.oracle.ended_trials] for t in (tuner, here)]
    assert scores[0] == scores[1]
    first, second = (tmp_path / "pids").read_text().split()[::2]
    assert len({first, second, str(os.getpid())}) == 3
    assert not psutil.pid_exists(int(first))
    assert not psutil.pid_exists(int(second))
    assert "trial 2/2, batch    32" in capfd.readouterr().out
    assert len(tuner.get_best_models()) == 1


def test_what_kills_its_process_is_a_result_and_the_search_goes_on(tmp_path):
    def build(hp):
        if hp.get("batch_size") == 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return models.stock()

    class Kills(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if self.params["steps"] == 3:
                os._exit(3)

    hypermodel = searches.stock(build)
    tuner = search(tmp_path, hypermodel, fit={"callbacks": [Kills()]})
    completed, killed, left = kbatch.load_study(tuner).trials
    assert completed.status == "completed"
    assert (killed.status, killed.executions[0].optimizer) == ("out_of_memory", None)
    assert "status -9" in killed.failure
    assert (left.status, left.executions[0].optimizer) == ("failed", "SGD")
    assert "status 3" in left.failure


def test_events_arrive_while_the_trial_runs(tmp_path):
    tuner = searches.tuner(
        tmp_path, searches.stock(batch_sizes=(8,)), kbatch.BatchSizeTuner, isolate=True
    )
    trial = tuner.oracle.create_trial("one")
    fit = {"validation_data": models.rows(40, seed=1), "epochs": 2, "verbose": 0}
    statuses = []

    def show(event):
        assert event.memory_bytes > 1e8
        if event.epoch_ended:
            assert {"val_accuracy", "loss"} <= event.metrics.keys()
            statuses.append((event.share, kbatch.load_study(tuner).trials[0].status))

    with IsolatedTrials(models.rows(94), fit) as isolated:
        isolated.run(tuner, trial, show)
    assert statuses == [(0.5, "running"), (1.0, "running")]
    assert kbatch.load_study(tuner).trials[0].status == "completed"


def a_dataset():
    return tf.data.Dataset.from_tensor_slices(models.rows(94))


def a_function(size):
    return a_dataset().batch(size)


def test_what_cannot_travel_is_refused_and_functions_travel(tmp_path):
    tuner = searches.tuner(
        tmp_path, searches.stock(batch_sizes=(8,)), kbatch.BatchSizeTuner, isolate=True
    )
    message = r"cannot travel .* give a function `batch_size -> tf.data.Dataset`"
    with pytest.raises(ValueError, match=message):
        tuner.search(a_dataset(), validation_data=models.rows(40))
    with pytest.raises(ValueError, match=message):
        tuner.search(a_function, validation_data=a_dataset())
    holds = keras.callbacks.LambdaCallback()
    holds.dataset = a_dataset()
    with pytest.raises(ValueError, match="travel to another process"):
        tuner.search(*models.rows(94), callbacks=[holds])
    assert not list(tmp_path.glob("search/trial_*"))
    tuner.search(a_function, validation_data=models.rows(40), verbose=0)
    assert kbatch.load_study(tuner).trials[0].status == "completed"


@pytest.mark.slow
def test_a_mistake_that_a_trial_shows_ends_the_search(tmp_path):
    with pytest.raises(ValueError, match="val_accuracy"):
        search(tmp_path, searches.stock(batch_sizes=(8,)), fit={"validation_data": None})


def test_the_data_lie_in_the_folder_that_the_worker_removes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    large = np.zeros(1_000_000)
    with IsolatedTrials([large], {}):
        (folder,) = tmp_path.iterdir()
        assert [path.stat().st_size > large.nbytes for path in folder.rglob("*.npy")] == [True]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path, monkeypatch):
    def fails(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("numpy.save", fails)
    with pytest.raises(OSError, match="No space left"):
        IsolatedTrials([np.zeros(1_000_000)], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_twelve_trials_end_within_100_mb_of_where_the_third_stood(tmp_path):
    """In one process each of them would leave 30 MB."""
    sizes = tuple(range(1, 13))
    resident = []

    class Measures(kbatch.BatchSizeTuner):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            resident.append(psutil.Process().memory_info().rss)

    hypermodel = searches.stock(batch_sizes=sizes)
    tuner = searches.search(tmp_path, hypermodel, Measures, isolate=True, fit={"epochs": 1})
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 12
    assert resident[11] - resident[2] < 100e6, resident


def test_a_gpu_that_this_process_holds_is_told_before_the_first_trial(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("kbatch.search.tuner.gpu_in_use", lambda: True)
    tuner = searches.tuner(
        tmp_path, searches.stock(batch_sizes=(8,)), kbatch.BatchSizeTuner, isolate=True
    )
    with pytest.raises(ValueError, match="cannot travel"):
        tuner.search(a_dataset(), epochs=1, verbose=1)
    assert "This process holds the GPU already" in capsys.readouterr().out
