import contextlib
import functools
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kbatch.device.worker import Worker
from kbatch.errors import InputError, UnsendableError, WorkerDied


@pytest.fixture(scope="module")
def worker():
    with Worker({"KBATCH_TEST": "there"}) as started:
        yield started


def test_worker_runs_a_closure(worker):
    base = 40
    pid, value = worker.call(lambda x: (os.getpid(), base + x), 2)
    assert value == 42
    assert pid != os.getpid()
    assert worker.call(os.getpid) == pid
    assert worker.call(gc.isenabled)
    assert worker.call(os.getenv, "KBATCH_TEST") == "there"


def test_worker_is_ended_if_a_call_takes_too_long():
    with Worker() as worker:
        worker.ends_s = time.perf_counter() + 0.5
        with pytest.raises(TimeoutError):
            worker.call(time.sleep, 60)
        worker.ends_s = math.inf
        assert worker.call(abs, -1) == 1


def test_worker_maps_a_large_array(worker):
    array = np.arange(300_000, dtype="float64").reshape(300, 1000)

    def overwrite(a, b):
        total = float(a.sum())
        a[:] = 0
        return type(a).__name__, total, b.tolist()

    small = np.arange(3)
    assert worker.call(overwrite, array, small) == ("memmap", array.sum(), [0, 1, 2])
    assert array[-1, -1] == 299_999
    array[0, 0] = 5.0  # A later call sends the new values.
    assert worker.call(lambda a: float(a[0, 0]), array) == 5.0


def test_worker_function_that_prints(worker):
    assert worker.call(lambda: print("hello") or 1) == 1
    assert "hello" in worker.read_output()


def test_worker_raises_the_exception_with_its_traceback(worker):
    def fails():
        return {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        worker.call(fails)
    assert "in fails" in caught.value.__notes__[0]
    assert worker.call(int, "3") == 3


def refused():
    raise InputError("y must match x")


def test_worker_raises_input_error_without_traceback(worker):
    with pytest.raises(InputError, match="y must match x") as caught:
        worker.call(refused)
    assert not hasattr(caught.value, "__notes__")


def test_worker_exception_that_cannot_be_unpickled(worker):
    class Strange(Exception):
        def __init__(self, one, two):
            super().__init__("two arguments")

    def fails():
        raise Strange(1, 2)

    with pytest.raises(RuntimeError, match="Strange: two arguments"):
        worker.call(fails)


def test_worker_value_that_cannot_be_pickled(worker):
    with pytest.raises(TypeError, match="must be picklable"):
        worker.call(print, threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        worker.call(threading.Lock)
    assert worker.call(int, "3") == 3


class OnlyHere:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def test_worker_value_that_cannot_be_unpickled(worker):
    with pytest.raises(UnsendableError, match=r"ValueError.*no number") as caught:
        worker.call(print, OnlyHere())
    assert isinstance(caught.value.__cause__, ValueError)
    with (
        pytest.raises(UnsendableError, match="no number"),
        Worker(subject=functools.partial(print, OnlyHere())) as fresh,
    ):
        fresh.call(print)
    assert worker.call(int, "3") == 3


@pytest.mark.parametrize(
    ("end", "message", "out_of_memory"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGABRT), "status -6", True),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "status -9", True),
        (lambda: print("last words", flush=True) or os._exit(3), "last words", False),
    ],
)
def test_worker_that_died_is_restarted(worker, end, message, out_of_memory):
    pid = worker.call(os.getpid)
    with pytest.raises(WorkerDied, match=message) as caught:
        worker.call(end)
    assert caught.value.out_of_memory == out_of_memory
    assert worker.call(os.getpid) != pid


def wait_for_the_end_of(process):
    deadline = time.monotonic() + 300
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fork_a_sleeper(slept=None):
    child = os.fork()
    if not child:
        time.sleep(600)
        if slept is not None:
            slept.touch()
        os._exit(0)
    return child


def test_worker_died_while_a_forked_child_holds_the_pipe(tmp_path):
    def dies(folder):
        (folder / "child").write_text(str(fork_a_sleeper(folder / "slept")))
        os.kill(os.getpid(), signal.SIGKILL)

    with Worker() as fresh:
        with pytest.raises(WorkerDied, match="status -9"):
            fresh.call(dies, tmp_path)
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_for_the_end_of(psutil.Process(int((tmp_path / "child").read_text())))
    assert not (tmp_path / "slept").exists()


def test_worker_died_between_calls_with_a_forked_child():
    with Worker() as fresh:
        dead, child = map(psutil.Process, fresh.call(lambda: (os.getpid(), fork_a_sleeper())))
        dead.kill()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # Wait for all its threads.
        assert fresh.call(os.getpid) != dead.pid
        wait_for_the_end_of(child)


@pytest.mark.parametrize("busy", [True, False])
def test_worker_ends_with_a_killed_parent(tmp_path, busy):
    code = f"""
import os, time
from kbatch.device.worker import Worker
def fork_a_sleeper():
    child = os.fork()
    if not child:
        time.sleep(600)
    return child
worker = Worker()
print(worker.call(fork_a_sleeper), flush=True)
worker.call(time.sleep, 600) if {busy} else time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert list(tmp_path.iterdir())
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for_the_end_of(child)
    assert not list(tmp_path.iterdir())


def test_worker_ends_when_it_is_garbage_collected():
    process = psutil.Process(Worker().call(os.getpid))
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for_the_end_of(process)


def test_worker_close_ends_process_and_removes_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Worker() as worker:
        process = psutil.Process(worker.call(os.getpid))
        worker.call(tempfile.mkstemp)  # A killed process leaves such files of TensorFlow.
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for_the_end_of(process)


def test_worker_subject_is_kept_between_calls():
    with Worker(subject=list) as worker:
        worker.call(lambda subject, item: subject.append(item), "first")
        assert worker.call(lambda subject: subject) == ["first"]
        worker.restart()
        assert worker.call(lambda subject: subject) == []


def test_worker_subject_that_fails():
    with Worker(subject=lambda: 1 / 0) as worker:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                worker.call(print)


# Python's own modules that unpickling and tracebacks import.
HIDING = ("pickle", "tokenize", "struct", "copyreg", "linecache")
CODE = """
import sys
sys.path.append("")
from kbatch.device.worker import Worker
import beside
with Worker() as worker:
    print(worker.call(beside.answer))
"""


@pytest.mark.parametrize("place", ["shared", "."])
def test_worker_imports_user_modules_after_the_standard_library(tmp_path, place):
    """The module is in the working directory, which is last on the path, or beside the script."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in HIDING:
        (folder / f"{name}.py").write_text(
            f"import pathlib; pathlib.Path({str(folder)!r}, {name!r} + ' ran').touch()"
        )
    (tmp_path / place / "beside.py").write_text("def answer():\n    return 42\n")
    (tmp_path / "script.py").write_text(CODE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert list(folder.glob("* ran")) == []
