"""A search whose executions are tasks of a pool of processes."""

import concurrent.futures
import contextlib
import multiprocessing
import os

import numpy as np
import pytest
import searches

import kbatch

FIT = {"epochs": 1}


@contextlib.contextmanager
def pool():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as processes:
        yield processes


def search(directory, sizes=(32,), **arguments):
    hypermodel = searches.hypermodel(batch_sizes=sizes, dtype_policy="float32")
    return searches.search(directory, hypermodel, kbatch.BatchSizeTuner, fit=FIT, **arguments)


@pytest.mark.slow
def test_a_pool_of_processes_trains_as_this_process_does(tmp_path):
    with pool() as processes:
        there = search(tmp_path, executor=processes)
    here = search(tmp_path, project_name="here")
    for one, other in zip(*(kbatch.load_study(t).trials for t in (there, here)), strict=True):
        assert one.status == "completed", one.failure
        assert one.metrics == other.metrics
        assert one.notes == other.notes
        assert one.executions[0].device == other.executions[0].device
        assert one.executions[0].device.endswith(f", {len(os.sched_getaffinity(0))} cores")
    # The one that a study decides on may be another: of sizes that tie, the faster one.
    best = [t.oracle.get_best_trials(1)[0] for t in (there, here)]
    assert best[0].score == best[1].score
    weights = [
        t.load_model(trial).get_weights() for t, trial in zip((there, here), best, strict=True)
    ]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
