"""Searches whose runs have their own processes, one by one or as tasks of a pool."""

import concurrent.futures
import multiprocessing
import os
import re
import signal

import keras
import numpy as np
import psutil
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch

pytestmark = pytest.mark.slow
LOCAL = {"executor": "local", "max_parallel": 1}


def search(directory, hypermodel, kind=kbatch.BatchSizeTuner, **arguments):
    return searches.search(directory, hypermodel, kind, **arguments)


def a_function(size):
    return tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(size)


class Kills(keras.callbacks.Callback):
    """Kills a process that trains the smaller size, but not the process that made it."""

    def __init__(self):
        super().__init__()
        self.spared = os.getpid()

    def on_epoch_end(self, epoch, logs=None):
        if self.params["steps"] > 3 and os.getpid() != self.spared:
            os.kill(os.getpid(), signal.SIGKILL)


def test_isolated_search_continues_after_killed_process(tmp_path, capfd):
    hypermodel = searches.stock(batch_sizes=(8, 32))
    same = {"data": (a_function,), "executions_per_trial": 2}
    fit = {"callbacks": [Kills()]}
    tuner = search(tmp_path, hypermodel, fit=fit | {"verbose": 1}, **same, **LOCAL)
    here = search(tmp_path, hypermodel, project_name="here", fit=fit, **same)
    (killed, isolated), (_, trial) = (kbatch.load_study(t).trials for t in (tuner, here))
    assert killed.status == "failed"
    signal_9 = "signal 9 ended its process"
    assert f"The training run was lost twice, by {signal_9} and by {signal_9}" in killed.failure
    assert killed.executions[0].optimizer == "SGD"
    assert isolated.metrics == trial.metrics
    assert isolated.notes == trial.notes
    assert len(isolated.executions) == 2
    scores = [t.oracle.get_trial(trial.trial_id).score for t in (tuner, here)]
    assert scores[0] == scores[1]
    (line,) = [text for text in capfd.readouterr().out.splitlines() if "trial 2/2" in text]
    assert re.search(r"batch    32, .*val_accuracy", line)
    assert len(tuner.get_best_models()) == 1
    # The search can continue in this process, and has nothing left to do.
    assert search(tmp_path, hypermodel, fit=fit, **same).remaining_trials == 0


def test_isolated_trials_whose_processes_end_fail_and_free_memory(tmp_path):
    """In one process each trial would leave 30 MB."""
    resident = []

    def build(hp):
        if hp.get("batch_size") == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return models.stock()

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            (tmp_path / "pid").write_text(str(os.getpid()))
            if self.params["steps"] == 94:  # Batches of one.
                os._exit(3)

    class Measures(kbatch.BatchSizeTuner):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            resident.append(psutil.Process().memory_info().rss)

    hypermodel = searches.stock(build, tuple(range(1, 8)), base_batch_size=7)
    fit = {"epochs": 1, "callbacks": [Ends()]}
    study = kbatch.load_study(search(tmp_path, hypermodel, Measures, fit=fit, **LOCAL))
    left, killed, *others = study.trials
    assert (left.status, left.executions[0].optimizer) == ("failed", "SGD")
    assert "status 3" in left.failure
    assert (killed.status, killed.executions[0].optimizer) == ("failed", None)
    assert "lost twice" in killed.failure
    assert [trial.status for trial in others] == ["completed"] * 5
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)
    assert resident[6] - resident[2] < 100e6, resident


def test_process_pool_trains_as_this_process(tmp_path):
    hypermodel = searches.hypermodel(batch_sizes=(32,), dtype_policy="float32")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as processes:
        there = search(tmp_path, hypermodel, fit={"epochs": 1}, executor=processes)
    here = search(tmp_path, hypermodel, fit={"epochs": 1}, project_name="here")
    for one, other in zip(*(kbatch.load_study(t).trials for t in (there, here)), strict=True):
        assert one.status == "completed", one.failure
        assert one.metrics == other.metrics
        assert one.notes == other.notes
        assert one.executions[0].device == other.executions[0].device
        assert one.executions[0].device.endswith(f", {len(os.sched_getaffinity(0))} cores")
    # The decided trials may differ, because the decision depends on the time.
    best = [t.oracle.get_best_trials(1)[0] for t in (there, here)]
    assert best[0].score == best[1].score
    models_of_both = [t.load_model(trial) for t, trial in zip((there, here), best, strict=True)]
    for one, other in zip(*(model.get_weights() for model in models_of_both), strict=True):
        np.testing.assert_array_equal(one, other)
