"""A worker process: what may end a process is tried there."""

import contextlib
import functools
import gc
import io
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from kbatch.errors import DeviceLostError, InputError, OutOfMemoryError, UnsendableError, WorkerDied

_LARGE_BYTES = 1_000_000


def mapped_pickle(value: Any, folder: Path) -> bytes:
    """Pickle by value (cloudpickle), with large NumPy arrays in files that all readers map."""
    buffer = io.BytesIO()
    _Pickler(buffer, folder).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, folder: Path):
        super().__init__(buffer)
        self._files = (folder / f"array-{number}.npy" for number in itertools.count())

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
            if obj.nbytes >= _LARGE_BYTES:
                path = next(self._files)
                np.save(path, obj, allow_pickle=False)
                # Copy on write: what a function does stays its own.
                return functools.partial(np.load, mmap_mode="c"), (path,)
            return NotImplemented
        return super().reducer_override(obj)


def _read_message(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except OSError as error:  # The other end closed within a message.
        raise EOFError from error


def _kill_group(number: int) -> None:
    # The process leads its session, so that its id is the group's, which may have ended already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


# A child that a process forked holds its pipe open: while a call waits, it looks for its end.
_LOOK_S = 0.2
_TAIL_CHARACTERS = 4000


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Python process that runs one function after the other, respawned only when it died.

    It is started by the first call, needs no `__main__` guard, and ends with its parent, whose
    folder it removes then. What its functions start ends with it.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, subject: Callable[[], Any] | None = None
    ):
        self._environment = dict(environment or {})  # Beside the variables of this process.
        self._subject = subject  # Makes what functions get as their first argument.
        # The process and its pipes, for calls and answers: they close with the last who reads them.
        self._running: tuple[subprocess.Popen[bytes], Connection, Connection] | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="kbatch-")
        #: For files that the worker reads; it is removed when the worker is closed.
        self.folder = Path(self._temporary.name)

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_output(self) -> str:
        """Return what the present process wrote to stdout and stderr."""
        try:
            return (self.folder / "output.txt").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(*arguments)` in the worker; the subject, if any, comes first."""
        if self._running is None or self._running[0].poll() is not None:
            self.restart()
            self._start()
        return self._ask("call", function, arguments)

    def restart(self) -> None:
        """End the process: the next call gets a fresh one."""
        running, self._running = self._running, None
        if running is not None:
            _kill_group(running[0].pid)  # What it started may outlive it.
            running[0].wait()

    def close(self) -> None:
        self.restart()
        self._temporary.cleanup()

    def _start(self) -> None:
        # `python -m` searches the working directory before the standard library: a `pickle.py`
        # there would run.
        path = [os.path.abspath(entry) for entry in sys.path]
        code = f"import sys; sys.path[:] = {path!a}; from {__name__} import main; main()"
        words = (sys.executable, "-P", "-c", code, str(os.getpid()), str(self.folder))
        # TensorFlow writes source code there, which a process that is killed does not remove.
        environment = {**os.environ, "TMPDIR": str(self.folder), **self._environment}
        with open(self.folder / "output.txt", "wb") as output:
            process: Any = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        with process.stdin as given, process.stdout as taken:
            calls = Connection(os.dup(given.fileno()), readable=False)
            answers = Connection(os.dup(taken.fileno()), writable=False)
        self._running = process, calls, answers
        if self._subject is not None:
            try:
                self._ask("subject", self._subject)
            except BaseException:
                self.restart()  # Without its subject it is of no use.
                raise

    def _ask(self, kind: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        if (running := self._running) is None:  # Another thread ended it just as it had started.
            raise WorkerDied(-signal.SIGKILL, "ended while it started")
        process, calls, answers = running
        for file in self.folder.glob("array-*.npy"):  # Of the call before.
            file.unlink()
        try:
            message = mapped_pickle((kind, function, arguments), self.folder)
        except (OSError, MemoryError):  # Not the value's fault.
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            raise UnsendableError(f"It cannot be sent to another process: {error}") from error
        try:
            calls.send_bytes(message)
            while not answers.poll(_LOOK_S):
                if process.poll() is not None and not answers.poll():
                    raise EOFError
            answer = pickle.loads(_read_message(answers))
        except (EOFError, BrokenPipeError):
            self._running = None
            exit_code = process.wait()
            _kill_group(process.pid)  # What it started.
            raise WorkerDied(exit_code, self.read_output()[-_TAIL_CHARACTERS:]) from None
        except BaseException:
            self.restart()  # It still works on what nobody waits for.
            raise
        kind, value, trace = answer
        if kind == "unreadable":
            raise UnsendableError(
                f"It cannot be read in another process: {type(value).__name__}: {value}"
            ) from value
        if kind == "error":
            if trace:
                value.add_note(f"In the worker process:\n{trace}")
            raise value
        return value


# The other end, in the process of the worker.

_PARENT_CHECK_S = 0.5


def main() -> None:
    """Answer the calls of a `Worker` until it closes the pipe or its process ends."""
    parent, folder = int(sys.argv[1]), sys.argv[2]  # The folder goes if the parent cannot do it.
    # The parent decides what an interrupt ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pipes are kept for the answers: what a function prints goes to the file of stderr.
    calls = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    watching = threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True)
    watching.start()
    subject: list[Any] = []
    gc.disable()  # Until the first call is read: that imports TensorFlow, a fifth faster without.
    while True:
        try:
            message = _read_message(calls)
        except EOFError:
            # The pipe of a parent that was killed closes somewhat before the parent is gone.
            watching.join(2 * _PARENT_CHECK_S)
            return
        answers.send_bytes(_answer(message, subject))


def _end_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # With what was started here.


def _answer(message: bytes, subject: list[Any]) -> bytes:
    """Run what was asked for; `subject` holds what the calls are about."""
    try:
        kind, function, arguments = pickle.loads(message)
    except Exception as error:  # Whatever the objects' own code raises when they are made.
        return _error(error, "unreadable")
    finally:
        if not gc.isenabled():
            gc.freeze()  # What was imported stays: no collection need look at it.
            gc.enable()

    try:
        if kind == "subject":
            subject[:] = [function()]
            return _pickled("result", None)
        return _pickled("result", function(*subject, *arguments))
    except Exception as error:  # Whatever the function raises is raised where it was called.
        return _error(error, "error")
    finally:
        sys.stdout.flush()


def _pickled(kind: str, value: Any, trace: str = "") -> bytes:
    return cloudpickle.dumps((kind, value, trace))


def _error(error: Exception, kind: str) -> bytes:
    # What kbatch says of the caller's own input needs no traceback.
    own = isinstance(error, (DeviceLostError, InputError, OutOfMemoryError))
    trace = "" if own else "".join(traceback.format_exception(error))
    try:
        message = _pickled(kind, error, trace)
        pickle.loads(message)  # Some exceptions can be written and not read.
        return message
    except Exception:  # Whatever the exception's own pickling raises: its text is kept.
        return _pickled(kind, RuntimeError(f"{type(error).__name__}: {error}"), trace)
