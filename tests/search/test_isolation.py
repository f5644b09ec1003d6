"""Executions one after the other, each in a process of its own."""

import os
import re
import signal

import keras
import psutil
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch


def search(directory, hypermodel, kind=kbatch.BatchSizeTuner, **arguments):
    return searches.search(
        directory, hypermodel, kind, executor="local", max_parallel=1, **arguments
    )


class Notes(keras.callbacks.Callback):
    """Writes the number of the process that trains."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_begin(self, logs=None):
        with self.file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")


def a_dataset():
    return tf.data.Dataset.from_tensor_slices(models.rows(94))


def a_function(size):
    return a_dataset().batch(size)


class Kills(keras.callbacks.Callback):
    """Kills a process that trains the smaller size and is not the one that it was made in."""

    def __init__(self):
        super().__init__()
        self.spared = os.getpid()

    def on_epoch_end(self, epoch, logs=None):
        if self.params["steps"] > 3 and os.getpid() != self.spared:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_an_isolated_search_goes_on_after_a_killed_process_and_is_the_same_search(tmp_path, capfd):
    events = []

    class Watched(kbatch.BatchSizeTuner):
        def on_search_begin(self):
            show = self._progress.show

            def watched(**event):
                assert event["memory_bytes"] > 1e8
                if event["ended"] and self.trials[-1].hyperparameters.get("batch_size") == 32:
                    assert {"val_accuracy", "loss"} <= event["metrics"].keys()
                    events.append(event["share"])
                show(**event)

            self._progress.show = watched

        def on_trial_begin(self, trial):
            self.trials = [trial]
            super().on_trial_begin(trial)

    hypermodel = searches.stock(batch_sizes=(8, 32))
    same = {"data": (a_function,), "executions_per_trial": 2}
    fit = {"callbacks": [Kills()]}
    tuner = search(tmp_path, hypermodel, Watched, fit=fit | {"verbose": 1}, **same)
    kind, name = kbatch.BatchSizeTuner, "here"
    here = searches.search(tmp_path, hypermodel, kind, project_name=name, fit=fit, **same)
    (killed, isolated), (_, trial) = (kbatch.load_study(t).trials for t in (tuner, here))
    assert killed.status == "failed"
    signal_9 = "signal 9 ended its process"
    assert f"The execution was lost twice, by {signal_9} and by {signal_9}" in killed.failure
    assert killed.executions[0].optimizer == "SGD"
    assert isolated.metrics == trial.metrics
    assert isolated.notes == trial.notes
    assert len(isolated.executions) == 2
    scores = [t.oracle.get_trial(trial.trial_id).score for t in (tuner, here)]
    assert scores[0] == scores[1]
    assert events == [0.25, 0.5, 0.75, 1.0]
    (line,) = [text for text in capfd.readouterr().out.splitlines() if "trial 2/2" in text]
    assert re.search(r"batch    32, .* \d+ MB, .*val_accuracy", line)
    assert len(tuner.get_best_models()) == 1
    # In this process it is no other search, and at its end.
    again = searches.search(tmp_path, hypermodel, kind, fit=fit, **same)
    assert again.remaining_trials == 0


@pytest.mark.slow
def test_what_kills_its_process_is_a_result_and_the_search_goes_on_in_another(tmp_path):
    def build(hp):
        if hp.get("batch_size") == 32:
            os.kill(os.getpid(), signal.SIGKILL)
        return models.stock()

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            os._exit(3)

    fit = {"callbacks": [Notes(tmp_path / "pids"), Ends()], "epochs": 1}
    left, killed = kbatch.load_study(
        search(tmp_path, searches.stock(build, (16, 32), base_batch_size=16), fit=fit)
    ).trials
    assert (left.status, left.executions[0].optimizer) == ("failed", "SGD")
    assert "status 3" in left.failure
    assert (killed.status, killed.executions[0].optimizer) == ("failed", None)
    assert "lost twice" in killed.failure
    (pid,) = (tmp_path / "pids").read_text().split()
    assert int(pid) != os.getpid()
    assert not psutil.pid_exists(int(pid))


@pytest.mark.slow
def test_seven_trials_end_within_100_mb_of_where_the_third_stood(tmp_path):
    """In one process each of them would leave 30 MB."""
    sizes = tuple(range(1, 8))
    resident = []

    class Measures(kbatch.BatchSizeTuner):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            resident.append(psutil.Process().memory_info().rss)

    hypermodel = searches.stock(batch_sizes=sizes)
    tuner = search(tmp_path, hypermodel, Measures, fit={"epochs": 1})
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed"] * 7
    assert resident[6] - resident[2] < 100e6, resident
