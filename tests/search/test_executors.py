"""Searches with an executor: the order of its tasks, and its errors."""

import concurrent.futures
import itertools
import os
import re
import signal
import sys
import threading
import time
import types

import pytest
import searches
import small_models as models
from stub_executor import StubExecutor

import kbatch
from kbatch.errors import WorkerDied
from kbatch.search.executors import LocalExecutor, Task, TaskResult, run_task, train

SIZES = (8, 16, 32, 64)


@pytest.fixture(autouse=True)
def explored_here(monkeypatch):
    """Explore the space in this process, which is faster."""
    monkeypatch.setattr("kbatch.search.tuner.explored_space", lambda tuner: tuner.explore())


def tuner(directory, executor, sizes=SIZES, hypermodel=None, **arguments):
    return searches.tuner(
        directory,
        hypermodel or searches.stock(batch_sizes=sizes, learning_rate_scaling=None),
        kbatch.BatchSizeTuner,
        executor=executor,
        **arguments,
    )


def search(directory, executor, sizes=SIZES, *, fit=None, **arguments):
    searched = tuner(directory, executor, sizes, **arguments)
    searched.search(*models.rows(94), **({"epochs": 1, "verbose": 0} | (fit or {})))
    return searched


def statuses(searched):
    return {t.batch_size: t.status for t in kbatch.load_study(searched).trials}


def test_executor_runs_trials_in_parallel_and_runs_of_a_trial_in_order(tmp_path):
    executor = StubExecutor(turn=-1, accuracy=lambda size, number: size / 100)
    searched = search(tmp_path, executor, executions_per_trial=2)
    assert executor.most_open == 4
    assert sorted(executor.ran) == [(size, number) for size in SIZES for number in (0, 1)]
    for size in SIZES:
        assert [number for one, number in executor.ran if one == size] == [0, 1]
    study = kbatch.load_study(searched)
    assert [(t.status, len(t.executions)) for t in study.trials] == [("completed", 2)] * 4
    assert searched.get_best_hyperparameters()[0].get("batch_size") == 64
    assert searched.remaining_trials == 0
    # The folder of the data is deleted at the end.
    assert [path.name for path in tmp_path.rglob(".*") if path.is_dir()] == []


def test_max_parallel_limits_open_trials(tmp_path):
    executor = StubExecutor()
    search(tmp_path, executor, max_parallel=3)
    assert executor.most_open == 3
    assert executor.ran == [(size, 0) for size in SIZES]


def test_executor_makes_the_plan_before_it_opens_further_trials(tmp_path):
    hypermodel = searches.stock(batch_sizes=SIZES, dtype_policy=None)
    failed = {0: TaskResult({}, "failed", "Traceback: no room")}
    executor = StubExecutor(outcomes=failed)
    search(tmp_path, executor, hypermodel=hypermodel)
    assert executor.log == [(8, 0, 0), (16, 0, 0), (32, 0, 0), (64, 0, 1)]


def test_executor_runs_a_race_in_parallel(tmp_path, capsys):
    executor = StubExecutor(turn=-1, accuracy=lambda size, number: size / 100 + number / 1000)
    arguments = {"strategy": "race", "tolerance": 0.1, "search_learning_rate": False}
    search(tmp_path, executor, fit={"verbose": 1}, **arguments)
    assert executor.most_open > 1
    assert len(set(executor.ran)) == len(executor.ran)
    # The base size and the largest are among the first three runs.
    assert {8, 64} < {size for size, _ in executor.ran[:3]}
    assert "search has ended" in capsys.readouterr().out.splitlines()[-1]


def test_lost_run_is_submitted_once_more(tmp_path):
    executor = StubExecutor(outcomes={1: EOFError("the worker is gone")})
    searched = search(tmp_path, executor, executions_per_trial=2)
    assert executor.ran.count((16, 0)) == 2
    lost, again = (executor.tasks[i] for i, ran in enumerate(executor.ran) if ran == (16, 0))
    assert (lost.attempt, again.attempt) == (0, 1)
    assert len(executor.ran) == 9
    assert set(statuses(searched).values()) == {"completed"}


KILLED = TaskResult({}, "lost", "signal 9 ended its process", -9)
GONE = EOFError("gone")


@pytest.mark.parametrize(
    ("outcomes", "status", "causes"),
    [
        ((GONE, concurrent.futures.CancelledError()), "failed", "by EOFError: gone and by C"),
        ((GONE, KILLED._replace(out_of_memory=True)), "out_of_memory", "signal 9"),
        ((GONE, RuntimeError("no output (state: OUT_OF_MEMORY)")), "out_of_memory", "OUT_OF"),
        # A run whose process crashed is not repeated.
        ((TaskResult({}, "died", "Segmentation fault", -11),), "out_of_memory", "Segmentation"),
    ],
)
def test_run_that_is_lost_twice_or_crashes_fails_its_trial(tmp_path, outcomes, status, causes):
    executor = StubExecutor(outcomes=dict(zip((1, 4), outcomes, strict=False)))
    searched = search(tmp_path, executor)
    assert len(executor.ran) == 3 + len(outcomes)
    assert statuses(searched) == dict.fromkeys(SIZES, "completed") | {16: status}
    (failed,) = [t for t in kbatch.load_study(searched).trials if t.batch_size == 16]
    assert re.search(causes, failed.failure)


class Gone(StubExecutor):
    """One of its methods raises, from the third task on."""

    def __init__(self, method, error, **stub):
        super().__init__(**stub)
        self._method, self._error = method, error

    def submit(self, *arguments):
        if self._method == "submit" and len(self.tasks) > 2:
            raise self._error
        future = super().submit(*arguments)
        if len(self.tasks) > 2:
            setattr(future, self._method, self._raise)
        return future

    def _raise(self):
        raise self._error


@pytest.mark.parametrize(("method", "completed"), [("submit", 0), ("done", 2), ("result", 2)])
def test_broken_executor_ends_the_search_without_failed_trials(tmp_path, method, completed):
    with pytest.raises(RuntimeError, match=r"Gone .*run the same script again.*no scheduler"):
        search(tmp_path, Gone(method, ConnectionError("no scheduler"), turn=None))
    if completed:
        assert statuses(tmp_path / "search") == dict.fromkeys(SIZES[:completed], "completed")
    resumed = search(tmp_path, second := StubExecutor())
    assert second.ran == [(size, 0) for size in SIZES[completed:]]
    assert statuses(resumed) == dict.fromkeys(SIZES, "completed")


def test_mistake_in_a_task_ends_the_search_and_keeps_completed_runs(tmp_path):
    executor = StubExecutor(turn=-1, outcomes={1: TaskResult({}, "mistake", "no such metric")})
    with pytest.raises(ValueError, match="no such metric"):
        search(tmp_path, executor)
    assert statuses(tmp_path / "search") == {32: "completed", 64: "completed"}
    assert [future.cancelled for future in executor.open] == [True]


def test_local_executor_shares_gpus_and_ends_its_workers(monkeypatch):
    monkeypatch.setattr("kbatch.search.executors.usable_gpus", lambda: ("GPU-a", "GPU-b"))
    executor = LocalExecutor()
    both = threading.Barrier(2)

    def device(worker):
        both.wait(600)
        return worker.call(lambda: os.environ["CUDA_VISIBLE_DEVICES"])

    futures = [executor.submit(device) for _ in range(2)]
    assert sorted(future.result() for future in futures) == ["GPU-a", "GPU-b"]
    started = threading.Event()

    def sleeps(worker):
        started.set()
        worker.call(time.sleep, 600)

    running, waiting = executor.submit(sleeps), [executor.submit(sleeps) for _ in range(2)][1]
    started.wait(600)
    executor.close()
    with pytest.raises(WorkerDied):
        running.result(600)
    assert waiting.cancelled()


A_TASK = Task({"trial_0000/trial.json": b"{}"}, "0000")


class Ends:
    """A worker whose process writes a record and ends by a signal."""

    def __init__(self, folder, number):
        self.folder, self._number, self.closed = folder, number, False

    def call(self, function, project, search, task):
        (self.folder / "project" / "kbatch.json").write_text("{}")
        raise WorkerDied(-self._number, "the end of its output")

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("number", "status", "memory"),
    [
        (9, "lost", True),
        # SLURM sends these two signals to all processes of a job.
        (signal.SIGTERM, "lost", False),
        (signal.SIGUSR2, "lost", False),
        (signal.SIGSEGV, "died", False),
    ],
)
def test_run_task_returns_lost_or_died_by_the_signal(tmp_path, monkeypatch, number, status, memory):
    """The kernel counts a kill if memory ran out."""
    kills = itertools.count(4)
    monkeypatch.setattr("kbatch.search.executors.read_memory_kills", lambda: next(kills))
    result = run_task(b"", A_TASK, worker := Ends(tmp_path, number))
    assert worker.closed
    assert (result.status, result.out_of_memory) == (status, memory)
    assert result.files == {"kbatch.json": b"{}"}


class Looks(StubExecutor):
    """Lists the files of the data, and the pickled searches, while a search runs."""

    def __init__(self, project):
        super().__init__()
        self.project, self.searches, self.files = project, [], []

    def submit(self, function, search, task):
        folder = self.project / ".kbatch-data"
        assert folder.stat().st_mode & 0o777 == 0o700
        self.files.append([path.name for path in folder.iterdir()])
        self.searches.append(search)
        return super().submit(function, search, task)


LARGE = {"validation_data": models.rows(40_000)}


def test_executor_maps_large_arrays_from_the_project_directory(tmp_path):
    executor = Looks(tmp_path / "search")
    search(tmp_path, executor, fit=LARGE)
    assert executor.files == [["array-0.npy"]] * 4
    (travelling,) = set(executor.searches)
    assert len(travelling) < 1e6
    # The data are deleted now, so a worker cannot read them.
    status, text = train(tmp_path / "project", travelling, Task({}, "0000"))
    assert (status, "`directory`" in text) == ("mistake", True)


def test_executor_with_put_receives_data_once(tmp_path):
    held = []

    class Holds(Looks):
        def put(self, value):
            held.append(len(value))
            return "a reference"

    executor = Holds(tmp_path / "search")
    search(tmp_path, executor, fit=LARGE)
    assert executor.files == [[]] * 4
    assert executor.searches == ["a reference"] * 4
    assert [size > 1.2e6 for size in held] == [True]


@pytest.mark.parametrize(
    ("gpus", "options", "asked"), [(2.0, {}, 1), (2.0, {"num_gpus": 0.5}, 0.5), (0.0, {}, None)]
)
def test_ray_executor_asks_for_one_gpu_if_there_is_any(monkeypatch, gpus, options, asked):
    options_of_tasks = []
    task = types.SimpleNamespace(remote=lambda *arguments: arguments)
    fake = types.SimpleNamespace(
        cluster_resources=lambda: {"CPU": 2.0} | ({"GPU": gpus} if gpus else {}),
        remote=lambda **named: lambda function: options_of_tasks.append(named) or task,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    kbatch.ray_executor(**options).submit(print, 1)
    assert [one.get("num_gpus") for one in options_of_tasks] == [asked]
