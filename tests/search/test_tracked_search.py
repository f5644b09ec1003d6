"""Searches that a tracker follows: the driver writes, and a tracker that fails costs nothing."""

import os
import sys
import warnings

import pytest
import searches
import small_models as models
from stub_executor import StubExecutor
from tracker_stub import stub_trackio

import kbatch


@pytest.fixture
def trackio(monkeypatch):
    return stub_trackio(monkeypatch)


@pytest.fixture
def explored_here(monkeypatch):
    """The model that shows the search space is built in this process, which is quicker."""

    def explored(tuner):
        found = tuner._explore()
        return tuner.oracle.get_space(), found

    monkeypatch.setattr("kbatch.search.tuner.explored_space", explored)


def tuner(directory, *, sizes=(8, 16), **arguments):
    hypermodel = searches.stock(batch_sizes=sizes, learning_rate_scaling=None)
    kind = kbatch.BatchSizeTuner
    return searches.tuner(directory, hypermodel, kind, trackers=["trackio"], **arguments)


def names(trackio):
    return [name.partition(" (")[0] for name in trackio.runs]


def test_each_execution_is_written_when_it_has_ended(tmp_path, trackio, explored_here):
    seen = []

    def accuracy(size, number):
        seen.append(len(trackio.runs))
        return 0.5

    found = tuner(
        tmp_path,
        executor=StubExecutor(accuracy=accuracy),
        max_parallel=1,
        executions_per_trial=2,
    )
    found.search(*models.rows(94), epochs=1, verbose=0)
    assert seen == [0, 1, 2, 3]
    executions = [
        f"batch {s}, trial 000{t}, execution {n}" for t, s in enumerate((8, 16)) for n in (0, 1)
    ]
    assert names(trackio) == [*executions, "search"]


def test_a_tracker_that_is_down_is_warned_of_once_and_written_later(
    tmp_path, trackio, explored_here
):
    trackio.down, runs = True, []

    def accuracy(size, number):
        trackio.down = size < 32
        runs.append(len(trackio.runs))
        return 0.5

    found = tuner(
        tmp_path, sizes=(8, 16, 32), executor=StubExecutor(accuracy=accuracy), max_parallel=1
    )
    with pytest.warns(UserWarning, match="'trackio' could not be written") as caught:
        found.search(*models.rows(94), epochs=1, verbose=0)
    (said,) = [str(one.message) for one in caught if "trackio" in str(one.message)]
    assert f"`kbatch export {tmp_path / 'search'} --to trackio`" in said
    assert said.endswith("Received: ConnectionError: no server at localhost")
    assert runs == [0, 0, 0]
    assert len(trackio.runs) == 4
    assert [t.status for t in kbatch.load_study(found).trials] == ["completed"] * 3


def test_a_finished_search_that_is_run_again_writes_what_is_missing(
    tmp_path, trackio, explored_here
):
    trackio.down = True
    with pytest.warns(UserWarning, match="could not be written"):
        tuner(tmp_path, executor=StubExecutor()).search(*models.rows(94), epochs=1, verbose=0)
    trackio.down = False
    tuner(tmp_path, executor=StubExecutor()).search(*models.rows(94), epochs=1, verbose=0)
    assert len(trackio.runs) == 3


@pytest.mark.parametrize("executor", [None, pytest.param("local", marks=pytest.mark.slow)])
def test_the_driver_alone_writes_between_executions_and_after_them(tmp_path, trackio, executor):
    recorded, finish = [], trackio.Run.finish

    def note(run):
        recorded.append(len(kbatch.load_study(tmp_path / "search").trials[0].executions))
        finish(run)

    trackio.Run.finish = note
    found = tuner(
        tmp_path, sizes=(8,), executions_per_trial=2, executor=executor, objective="accuracy"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The tracker")
        found.search(*models.rows(94), epochs=1, verbose=0)
    first, second, study = trackio.runs.values()
    assert trackio.processes == {os.getpid()}
    assert [run.given["config"].get("seed") for run in (first, second)] == [0, 1]
    trial = kbatch.load_study(found).trials[0]
    accuracy = trial.executions[0].epochs[0].metrics["accuracy"]
    assert first.log_calls[-1][1]["best_epoch/accuracy"] == accuracy
    assert recorded == [1, 2, 2]
    assert study.log_calls[-1][1]["executions"] == 2


def test_trackers_are_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    hypermodel = searches.stock()
    for given, error in ((["mlflow"], ImportError), (["comet"], ValueError)):
        with pytest.raises(error, match="mlflow"):
            kbatch.BatchSizeTuner(hypermodel, "accuracy", trackers=given, directory=tmp_path / "d")
    assert not (tmp_path / "d").exists()
