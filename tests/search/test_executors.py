"""Searches by an executor: which executions it is given, and what becomes of its faults."""

import concurrent.futures
import importlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import keras
import pytest
import searches
import small_models as models
import tensorflow as tf
from rich.console import Console
from stub_executor import StubExecutor

import kbatch
from kbatch.device.worker import WorkerDied
from kbatch.search.executors import LocalExecutor, Task, TaskResult, run_task, train
from kbatch.search.progress import ConsoleLine, SearchProgress
from kbatch.search.trial_files import CHECKPOINT_NAME
from kbatch.study.study import RECORD_NAME

SIZES = (8, 16, 32, 64)


@pytest.fixture(autouse=True)
def explored_here(monkeypatch):
    """The model that shows the search space is built in this process, which is quicker."""
    monkeypatch.setattr("kbatch.search.tuner.explored_space", _explored)


def _explored(tuner):
    explored = tuner._explore()
    return tuner.oracle.get_space(), explored


def tuner(directory, executor, sizes=SIZES, hypermodel=None, **arguments):
    return searches.tuner(
        directory,
        hypermodel or searches.stock(batch_sizes=sizes, learning_rate_scaling=None),
        kbatch.BatchSizeTuner,
        executor=executor,
        **arguments,
    )


def search(directory, executor, sizes=SIZES, *, fit=None, **arguments):
    found = tuner(directory, executor, sizes, **arguments)
    found.search(*models.rows(94), **({"epochs": 1, "verbose": 0} | (fit or {})))
    return found


def statuses(found):
    return {t.batch_size: t.status for t in kbatch.load_study(found).trials}


def test_trials_run_beside_each_other_and_the_executions_of_one_in_order(tmp_path):
    executor = StubExecutor(turn=-1, accuracy=lambda size, number: size / 100)
    found = search(tmp_path, executor, executions_per_trial=2)
    assert executor.most_open == 4
    assert sorted(executor.ran) == [(size, number) for size in SIZES for number in (0, 1)]
    for size in SIZES:
        assert [number for one, number in executor.ran if one == size] == [0, 1]
    study = kbatch.load_study(found)
    assert [(t.status, len(t.executions)) for t in study.trials] == [("completed", 2)] * 4
    assert found.get_best_hyperparameters()[0].get("batch_size") == 64
    assert found.remaining_trials == 0
    # The data have gone with the search.
    assert [path.name for path in tmp_path.rglob(".*") if path.is_dir()] == []


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_trials_are_open_than_asked_for(tmp_path, most):
    executor = StubExecutor()
    search(tmp_path, executor, max_parallel=most)
    assert executor.most_open == most
    assert executor.ran == [(size, 0) for size in SIZES]


def test_what_one_execution_decides_for_all_is_decided_first(tmp_path):
    hypermodel = searches.stock(batch_sizes=SIZES, dtype_policy=None)
    failed = {0: TaskResult({}, "failed", "Traceback: no room")}
    executor = StubExecutor(outcomes=failed)
    search(tmp_path, executor, hypermodel=hypermodel)
    assert executor.log == [(8, 0, 0), (16, 0, 0), (32, 0, 0), (64, 0, 1)]


@pytest.mark.parametrize("turn", [0, -1])
def test_the_executions_of_a_race_run_beside_each_other(tmp_path, turn):
    executor = StubExecutor(turn=turn, accuracy=lambda size, number: size / 100 + number / 1000)
    arguments = {"strategy": "race", "tolerance": 0.1, "search_learning_rate": False}
    search(tmp_path, executor, **arguments)
    assert executor.most_open == 4
    assert sorted(executor.ran[:4]) == [(size, 0) for size in SIZES]
    assert len(set(executor.ran)) == len(executor.ran)
    # The first three rounds are whole before anything is judged.
    rounds = [number for _, number in executor.ran]
    assert max(rounds) == 3
    assert (64, 3) in executor.ran


def test_a_race_looks_for_the_rate_with_several_at_a_time(tmp_path):
    hypermodel = searches.stock(batch_sizes=SIZES)
    executor = StubExecutor(accuracy=lambda size, number: size / 100 + number / 1000)
    arguments = {"strategy": "race", "max_parallel": 3, "max_executions": 14}
    found = search(tmp_path, executor, hypermodel=hypermodel, **arguments)
    assert executor.most_open == 3
    trials = kbatch.load_study(found).trials
    assert sum(len(trial.executions) for trial in trials) == len(executor.ran) <= 14
    assert len({trial.hyperparameters["learning_rate_factor"] for trial in trials}) > 1


def test_a_lost_execution_is_tried_once_more_and_nothing_else_is_lost(tmp_path, capsys):
    executor = StubExecutor(outcomes={1: EOFError("the worker is gone")})
    found = search(tmp_path, executor, executions_per_trial=2, fit={"verbose": 1})
    assert executor.ran.count((16, 0)) == 2
    lost, again = (executor.tasks[i] for i, ran in enumerate(executor.ran) if ran == (16, 0))
    assert (lost.attempt, again.attempt) == (0, 1)
    assert len(executor.ran) == 9
    assert set(statuses(found).values()) == {"completed"}
    assert (
        "An execution of batch size 16 was lost and is submitted again: EOFError"
        in capsys.readouterr().out
    )


class RenamingExecutor(StubExecutor):
    """Renames the folder of the results when the second task is submitted."""

    def __init__(self, folder, **given):
        super().__init__(**given)
        self.folder = folder

    def submit(self, function, search, task):
        future = super().submit(function, search, task)
        if len(self.tasks) == 2:
            self.folder.rename(self.folder.with_name("renamed"))
        return future


def test_a_directory_that_is_renamed_stops_the_search_and_is_not_made_again(tmp_path):
    folder = tmp_path / "results"
    with pytest.raises(ValueError, match=f"{folder}/search was moved, renamed or deleted"):
        search(folder, RenamingExecutor(folder), max_parallel=2)
    assert [file.name for file in folder.rglob("kbatch.json")] == []


def test_a_lost_execution_of_many_words_is_told_in_one_line(tmp_path, capsys):
    executor = StubExecutor(outcomes={1: EOFError("x y " * 1_000_000)})
    search(tmp_path, executor, fit={"verbose": 1})
    assert max(map(len, capsys.readouterr().out.splitlines())) < 1000


KILLED = TaskResult({}, "lost", "signal 9 ended its process", -9)


@pytest.mark.parametrize(
    ("first", "second", "causes"),
    [
        (EOFError("gone"), concurrent.futures.CancelledError(), "EOFError: gone and by Cancelled"),
        (3, KILLED, "TypeError: a task returned int .* and by signal 9 ended its process"),
    ],
)
def test_an_execution_that_is_lost_twice_has_failed_with_both_causes(
    tmp_path, first, second, causes
):
    executor = StubExecutor(outcomes={1: first, 4: second})
    found = search(tmp_path, executor)
    assert statuses(found) == {8: "completed", 16: "failed", 32: "completed", 64: "completed"}
    (failed,) = [t for t in kbatch.load_study(found).trials if t.batch_size == 16]
    assert re.search(f"The execution was lost twice, by {causes}", failed.failure)


class OutOfMemoryError(Exception):
    """As Ray names it."""


@pytest.mark.parametrize(
    "outcome",
    [
        KILLED._replace(out_of_memory=True),
        MemoryError("no room"),
        OutOfMemoryError("the node ran low on memory"),
        RuntimeError("has not produced any output (state: OUT_OF_MEMORY)"),
    ],
)
def test_an_execution_that_is_lost_twice_for_want_of_memory_ran_out_of_it(tmp_path, outcome):
    executor = StubExecutor(outcomes={1: EOFError("gone"), 4: outcome})
    assert statuses(search(tmp_path, executor))[16] == "out_of_memory"


def test_what_a_killed_process_had_recorded_is_kept(tmp_path):
    class Dies(StubExecutor):
        """Its tasks are killed when they have written a record of what they had done."""

        def submit(self, function, search, task):
            future = super().submit(function, search, task)
            (file,) = future._outcome.files
            document = json.loads(future._outcome.files[file])
            document["record"]["executions"][0]["status"] = "running"
            future._outcome = KILLED._replace(files={file: json.dumps(document).encode()})
            return future

    search(tmp_path, executor := Dies(), (8,))
    first, again = executor.tasks
    assert first.files == again.files
    ((execution,),) = [t.executions for t in kbatch.load_study(tmp_path / "search").trials]
    assert (execution.status, len(execution.epochs)) == ("failed", 1)


def test_a_process_that_crashed_is_a_result_and_is_not_tried_again(tmp_path):
    executor = StubExecutor(outcomes={2: TaskResult({}, "died", "Segmentation fault", -11)})
    found = search(tmp_path, executor)
    assert executor.ran == [(size, 0) for size in SIZES]
    assert statuses(found)[32] == "out_of_memory"


class Broken(StubExecutor):
    """Takes four tasks, the second of which is lost with its pool."""

    def submit(self, *arguments):
        if len(self.tasks) == 4:
            raise BrokenProcessPool("a child process terminated abruptly")
        return super().submit(*arguments)


def test_a_broken_executor_ends_the_search_which_goes_on_with_another(tmp_path):
    broken = Broken(turn=-1, outcomes={1: BrokenProcessPool("terminated")})
    with pytest.raises(
        RuntimeError, match=r"restart it and run the same script again.*BrokenProcess"
    ):
        search(tmp_path, broken)
    # The newest two had ended, and are kept.
    second = StubExecutor()
    found = search(tmp_path, second)
    assert second.ran == [(8, 0), (16, 0)]
    assert set(statuses(found).values()) == {"completed"}
    assert [future.cancelled for future in broken.open] == [True]


def test_what_had_completed_when_an_executor_broke_is_kept(tmp_path):
    with pytest.raises(RuntimeError, match="accepts no more tasks"):
        search(tmp_path, Broken(turn=None, outcomes={0: BrokenProcessPool("terminated")}))
    search(tmp_path, second := StubExecutor())
    assert second.ran == [(8, 0)]


def test_a_driver_that_died_runs_no_completed_execution_again(tmp_path):
    class Killed(StubExecutor):
        def submit(self, *arguments):
            if len(self.tasks) == 6:
                raise KeyboardInterrupt
            return super().submit(*arguments)

    first = Killed()
    with pytest.raises(KeyboardInterrupt, match="run the same script again"):
        search(tmp_path, first, executions_per_trial=2)
    done = [(8, 0), (16, 0), (32, 0)]
    assert first.ran == [*((size, 0) for size in SIZES), (8, 1), (16, 1)]
    second = StubExecutor()
    found = search(tmp_path, second, executions_per_trial=2)
    assert sorted(second.ran) == sorted({(s, n) for s in SIZES for n in (0, 1)} - {*done})
    assert set(statuses(found).values()) == {"completed"}


def test_the_same_tuner_goes_on_after_an_interruption(tmp_path):
    class Interrupted(StubExecutor):
        def submit(self, *arguments):
            if len(self.tasks) == 2:
                self.tasks.append(None)
                raise KeyboardInterrupt
            return super().submit(*arguments)

    found = tuner(tmp_path, executor := Interrupted())
    with pytest.raises(KeyboardInterrupt):
        found.search(*models.rows(94), epochs=1, verbose=0)
    executor.open.clear()  # They were cancelled.
    found.search(*models.rows(94), epochs=1, verbose=0)
    assert statuses(found) == dict.fromkeys(SIZES, "completed")


def test_an_engine_that_is_gone_is_named_also_where_it_cancels_nothing(tmp_path):
    class Gone(Broken):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            future.cancel = lambda: 1 / 0
            return future

    with pytest.raises(RuntimeError, match="accepts no more tasks"):
        search(tmp_path, Gone(turn=-1, outcomes={1: BrokenProcessPool("terminated")}))
    assert not (tmp_path / "search" / ".kbatch-data").exists()


class Gone(StubExecutor):
    """Its engine is gone: one of its methods raises, from the third task on."""

    def __init__(self, method, error, **stub):
        super().__init__(**stub)
        self._method, self._error = method, error

    def submit(self, *arguments):
        future = super().submit(*arguments)
        if len(self.tasks) > 2:
            setattr(future, self._method, self._raise)
        return future

    def _raise(self):
        raise self._error


@pytest.mark.parametrize(
    ("method", "error"),
    [("done", OSError("no scheduler")), ("result", ConnectionError("no scheduler"))],
)
def test_an_engine_that_does_not_answer_is_named_and_nothing_is_blamed_on_trials(
    tmp_path, method, error
):
    with pytest.raises(RuntimeError) as raised:
        search(tmp_path, Gone(method, error, turn=None))
    assert (
        "The executor test_executors.Gone does not answer: restart it and run the same script "
        "again. Nothing that completed is lost"
    ) in str(raised.value)
    assert "no scheduler" in str(raised.value)
    assert statuses(tmp_path / "search") == {8: "completed", 16: "completed"}
    found = search(tmp_path, second := StubExecutor())
    assert second.ran == [(32, 0), (64, 0)]
    assert statuses(found) == dict.fromkeys(SIZES, "completed")


def test_an_executor_that_takes_no_data_is_not_blamed_on_the_data(tmp_path):
    class Full(StubExecutor):
        def put(self, value):
            raise MemoryError("the object store is full")

    with pytest.raises(RuntimeError, match=r"Full did not accept the data: restart.*store is full"):
        search(tmp_path, Full())


def test_a_mistake_ends_the_search_and_what_had_completed_is_kept(tmp_path):
    executor = StubExecutor(turn=-1, outcomes={1: TaskResult({}, "mistake", "no such metric")})
    with pytest.raises(ValueError, match="no such metric"):
        search(tmp_path, executor)
    assert statuses(tmp_path / "search") == {32: "completed", 64: "completed"}
    assert [future.cancelled for future in executor.open] == [True]


def test_a_worker_writes_into_the_project_directory_alone(tmp_path):
    outside = f"trial_0000/{CHECKPOINT_NAME}/../../../../outside"
    files = {f"trial_0000/{RECORD_NAME}": b"{}", outside: b"x"}
    executor = StubExecutor(outcomes={0: TaskResult(files)})
    with pytest.raises(ValueError, match="outside"):
        search(tmp_path, executor, (8,))
    assert not (tmp_path / "outside").exists()
    # The record of a trial is written when its weights are there.
    assert not list(tmp_path.rglob(f"trial_*/{RECORD_NAME}"))


def test_a_task_is_sent_few_records_however_many_trials_there_are(tmp_path):
    executor = StubExecutor()
    search(tmp_path, executor, tuple(range(1, 31)), max_parallel=1)
    counts = [sum(name.endswith(RECORD_NAME) for name in task.files) for task in executor.tasks]
    assert counts[0] == 0
    assert max(counts) <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"executor": "slurm"}, 'must be "local", or have `submit'),
        ({"executor": object()}, 'must be "local", or have `submit'),
        ({"executor": concurrent.futures.ProcessPoolExecutor}, "or have `submit"),
        ({"executor": StubExecutor(), "max_parallel": 0}, "at least 1"),
        ({"executor": None, "max_parallel": 2}, "give one too"),
        ({"executor": StubExecutor(), "distribution_strategy": 3}, "leave it out"),
    ],
)
def test_a_bad_executor_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tuner(tmp_path, **arguments)


def test_what_cannot_travel_is_named(tmp_path):
    held = keras.callbacks.LambdaCallback()
    held.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"open what holds a file, a lock.*Received: callbacks: "):
        search(tmp_path, StubExecutor(), fit={"callbacks": [held]})
    dataset = tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(8)
    with pytest.raises(ValueError, match="a dataset cannot travel"):
        tuner(tmp_path, StubExecutor()).search(dataset)
    with pytest.raises(ValueError, match="a dataset cannot travel"):
        search(tmp_path, StubExecutor(), fit={"validation_data": dataset})
    held = keras.callbacks.LambdaCallback()
    held.dataset = dataset
    with pytest.raises(ValueError, match="travel to the workers"):
        search(tmp_path, StubExecutor(), fit={"callbacks": [held]})
    assert not list(tmp_path.glob("search/trial_*"))


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path, monkeypatch):
    def fails(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", fails)
    with pytest.raises(OSError, match="No space left"):
        search(tmp_path, StubExecutor(), fit=LARGE)
    assert not (tmp_path / "search" / ".kbatch-data").exists()


def test_a_gpu_that_this_process_holds_is_told_before_the_first_trial(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("kbatch.search.tuner.gpu_in_use", lambda: True)
    dataset = tf.data.Dataset.from_tensor_slices(models.rows(94))
    with pytest.raises(ValueError, match="cannot travel"):
        tuner(tmp_path, "local").search(dataset, epochs=1, verbose=1)
    assert "This process holds the GPU already" in capsys.readouterr().out
    assert not list(tmp_path.glob("search/trial_*"))


def test_two_searches_in_one_directory_exclude_each_other(tmp_path):
    class Second(StubExecutor):
        def submit(self, *arguments):
            with pytest.raises(ValueError, match="Another search runs in the project directory"):
                search(tmp_path, StubExecutor())
            return super().submit(*arguments)

    assert set(statuses(search(tmp_path, Second(), (8,))).values()) == {"completed"}


def test_keras_tuners_chief_is_refused(tmp_path, monkeypatch):
    for name in ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT", "KERASTUNER_TUNER_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="by `executor=`, without keras-tuner's chief"):
        tuner(tmp_path, None)


def test_the_workers_of_this_host_share_its_devices_and_end_with_the_executor(monkeypatch):
    monkeypatch.setattr("kbatch.search.executors.usable_gpus", lambda: ("GPU-a", "GPU-b"))
    executor = LocalExecutor()
    both = threading.Barrier(2)

    def device(worker, tell):
        both.wait(60)
        return worker.call(lambda: os.environ["CUDA_VISIBLE_DEVICES"])

    futures = [executor.submit(device) for _ in range(2)]
    assert sorted(future.result() for future in futures) == ["GPU-a", "GPU-b"]
    started = threading.Event()

    def sleeps(worker, tell):
        started.set()
        worker.call(time.sleep, 600)

    running, waiting = executor.submit(sleeps), [executor.submit(sleeps) for _ in range(2)][1]
    started.wait(60)
    executor.close()
    with pytest.raises(WorkerDied):
        running.result(60)
    assert waiting.cancelled()


def test_no_more_workers_than_devices_share_this_host(monkeypatch):
    monkeypatch.setattr("kbatch.search.executors.usable_gpus", lambda: ("GPU-a", "GPU-b"))
    assert [LocalExecutor(most).workers for most in (None, 1, 8)] == [2, 1, 2]


def test_a_worker_that_cannot_start_leaves_its_device_to_the_next(monkeypatch, tmp_path):
    executor = LocalExecutor(1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    with pytest.raises(FileNotFoundError):
        executor.submit(lambda worker, tell: 1).result(60)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert executor.submit(lambda worker, tell: 1).result(60) == 1
    executor.close()


A_TASK = Task({"trial_0000/trial.json": b"{}"}, "0000")


class Ends:
    """A worker whose process ends by a signal, after it wrote a record."""

    def __init__(self, folder, number):
        self.folder, self._number, self.closed = folder, number, False

    def call(self, function, project, search, task, on_event):
        (self.folder / "project" / "kbatch.json").write_text("{}")
        raise WorkerDied(-self._number, "the end of its output")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("number", [9, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_process_that_is_ended_from_outside_is_lost(tmp_path, number):
    """SLURM sends SIGTERM and SIGUSR2 to all processes of a job."""
    found = run_task(b"", A_TASK, worker := Ends(tmp_path, number))
    assert worker.closed
    assert (found.status, found.out_of_memory) == ("lost", False)
    assert found.text == f"signal {number:d} ended its process"
    assert found.files == {"kbatch.json": b"{}"}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_process_that_crashes_has_died(tmp_path, number):
    found = run_task(b"", A_TASK, Ends(tmp_path, number))
    assert found[1:4] == ("died", "the end of its output", -number)


@pytest.mark.parametrize(("number", "known"), [(9, True), (signal.SIGTERM, False)])
def test_a_kill_that_the_kernel_counted_was_for_want_of_memory(
    tmp_path, monkeypatch, number, known
):
    kills = itertools.count(4)
    monkeypatch.setattr("kbatch.search.executors.read_memory_kills", lambda: next(kills))
    found = run_task(b"", A_TASK, Ends(tmp_path, number))
    assert found.out_of_memory == known
    assert ("for want of memory" in found.text) == known


class Looks(StubExecutor):
    """Keeps what lies in the project directory, and what travels, while a search runs."""

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


def test_large_arrays_are_read_from_the_project_directory(tmp_path):
    executor = Looks(tmp_path / "search")
    search(tmp_path, executor, fit=LARGE)
    assert executor.files == [["array-0.npy"]] * 4
    (travelling,) = set(executor.searches)
    assert len(travelling) < 1e6
    # The directory is gone by now, as it is for a worker on another host.
    status, text = train(print, tmp_path / "project", travelling, Task({}, "0000"))
    assert status == "mistake"
    assert "give a `directory` on a file system that all hosts share" in text


def test_an_executor_that_holds_data_is_given_them_once(tmp_path):
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


def test_a_module_that_a_worker_lacks_is_named(tmp_path, monkeypatch):
    file = tmp_path / "only_here.py"
    file.write_text("import small_models\ndef build(): return small_models.stock()")
    monkeypatch.syspath_prepend(tmp_path)
    build = importlib.import_module("only_here").build
    executor = Looks(tmp_path / "search")
    hypermodel = searches.stock(build, (8,), learning_rate_scaling=None)
    search(tmp_path, executor, hypermodel=hypermodel)
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "only_here")
    status, text = train(print, tmp_path / "project", executor.searches[0], Task({}, "0000"))
    assert status == "mistake"
    assert "install it there" in text
    assert "No module named 'only_here'" in text


def test_an_engine_that_cannot_say_what_runs_ends_no_search(tmp_path):
    class Silent(StubExecutor):
        def submit(self, *task):
            future = super().submit(*task)
            future.running = lambda: 1 / 0
            return future

    found = search(tmp_path, Silent())
    assert set(statuses(found).values()) == {"completed"}


def test_progress_counts_what_runs_waits_and_has_ended():
    lines = []

    class Line(ConsoleLine):
        def update(self, name, share, figures):
            lines.append((name, figures))

    with SearchProgress(1, open_line=lambda: Line(Console())) as progress:
        progress.show_counts(submitted=5, running=2, ended=3)
        progress.show_counts(submitted=5, running=None, ended=3)
    assert lines == [
        ("search", "2 running, 3 queued, 3 done"),
        ("search", "5 submitted, 3 done"),
    ]


def test_the_line_of_a_trial_says_where_it_ran_and_how_much_is_left(tmp_path, capsys):
    done = TaskResult({}, "failed", "Traceback", host="node7")
    executor = StubExecutor(outcomes={0: done})
    search(tmp_path, executor, max_parallel=1, fit={"verbose": 1})
    first, *others = [line for line in capsys.readouterr().out.splitlines() if "batch" in line]
    assert first.startswith("trial 1/4, batch     8 on node7, ")
    assert others[0].startswith("trial 2/4, batch    16, ")
