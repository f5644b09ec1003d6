"""A worker process that runs functions which may crash or run out of memory."""

import contextlib
import functools
import gc
import io
import itertools
import math
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
    """Pickle with cloudpickle. Large NumPy arrays go to files that the reader maps to memory."""
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
                # Copy on write, so that a function cannot change the caller's array.
                return functools.partial(np.load, mmap_mode="c"), (path,)
            return NotImplemented
        return super().reducer_override(obj)


def _read_message(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except OSError as error:  # The other end closed the pipe within a message.
        raise EOFError from error


def _kill_group(pid: int) -> None:
    # A worker leads its session, so its process id is also the id of its group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# How often a waiting call checks whether the process has ended. The pipe alone does not show it,
# because a child that the process forked keeps the pipe open.
_POLL_S = 0.2
_TAIL_CHARACTERS = 4000


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Python process that runs functions one after the other.

    The first call starts the process, and a call after its death starts a new one. It needs no
    `__main__` guard. It ends with its parent, together with all processes that it started.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, subject: Callable[[], Any] | None = None
    ):
        self._environment = dict(environment or {})  # Added to the variables of this process.
        self._subject = subject  # Makes an object in the worker, which all functions take first.
        # The process, the pipe for calls and the pipe for answers.
        self._running: tuple[subprocess.Popen[bytes], Connection, Connection] | None = None
        self.ends_s = math.inf  # Time of `time.perf_counter` at which a call is given up.
        self._temporary = tempfile.TemporaryDirectory(prefix="kbatch-")
        #: Folder for files that the worker reads. It is removed when the worker is closed.
        self.folder = Path(self._temporary.name)

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_output(self) -> str:
        """Return the output of the present process on stdout and stderr."""
        try:
            return (self.folder / "output.txt").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the worker. If there is a subject, it is the first argument."""
        if self._running is None or self._running[0].poll() is not None:
            self.restart()
            self._start()
        return self._ask("call", function, arguments)

    def restart(self) -> None:
        """End the process. The next call starts a new one."""
        running, self._running = self._running, None
        if running is not None:
            _kill_group(running[0].pid)
            running[0].wait()

    def close(self) -> None:
        self.restart()
        self._temporary.cleanup()

    def _start(self) -> None:
        # `python -m` would search the working directory first, and run a `pickle.py` there.
        path = [os.path.abspath(entry) for entry in sys.path]
        code = f"import sys; sys.path[:] = {path!a}; from {__name__} import main; main()"
        command = (sys.executable, "-P", "-c", code, str(os.getpid()), str(self.folder))
        # If the process is killed, TensorFlow's temporary files remain, so they go to this folder.
        environment = {**os.environ, "TMPDIR": str(self.folder), **self._environment}
        with open(self.folder / "output.txt", "wb") as output:
            process: Any = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        with process.stdin as stdin, process.stdout as stdout:
            calls = Connection(os.dup(stdin.fileno()), readable=False)
            answers = Connection(os.dup(stdout.fileno()), writable=False)
        self._running = process, calls, answers
        if self._subject is not None:
            try:
                self._ask("subject", self._subject)
            except BaseException:
                self.restart()  # The next call tries to make the subject again.
                raise

    def _ask(self, kind: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        if (running := self._running) is None:  # Another thread has ended it.
            raise WorkerDied(-signal.SIGKILL, "unknown, because another thread ended the worker")
        process, calls, answers = running
        for file in self.folder.glob("array-*.npy"):  # Files of the previous call.
            file.unlink()
        try:
            message = mapped_pickle((kind, function, arguments), self.folder)
        except (OSError, MemoryError):  # A fault of the machine, not of the value.
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            raise UnsendableError(f"Model and data must be picklable. Received: {error}") from error
        try:
            calls.send_bytes(message)
            while not answers.poll(_POLL_S):
                if time.perf_counter() > self.ends_s:
                    raise TimeoutError("A worker process did not answer in time.")
                if process.poll() is not None and not answers.poll():
                    raise EOFError
            answer = pickle.loads(_read_message(answers))
        except (EOFError, BrokenPipeError):
            self._running = None
            exit_code = process.wait()
            _kill_group(process.pid)  # Processes that it started.
            raise WorkerDied(exit_code, self.read_output()[-_TAIL_CHARACTERS:]) from None
        except BaseException:
            self.restart()  # Otherwise it would continue a call whose answer is not read.
            raise
        kind, value, trace = answer
        if kind == "unreadable":
            raise UnsendableError(
                "A worker process cannot unpickle the model or the data: define their classes in a "
                f"module that any process can import. Received: {type(value).__name__}: {value}"
            ) from value
        if kind == "error":
            if trace:
                value.add_note(f"In the worker process:\n{trace}")
            raise value
        return value


# The functions below run in the worker process.

_PARENT_CHECK_S = 0.5


def main() -> None:
    """Answer the calls of a `Worker` until it closes the pipe or its process ends."""
    parent, folder = int(sys.argv[1]), sys.argv[2]
    # On Ctrl-C the parent decides whether the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A function that prints must not write into the pipe, so stdout goes to the file of stderr.
    calls = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    watching = threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True)
    watching.start()
    subject: list[Any] = []
    gc.disable()  # Without it TensorFlow's import, at the first call, takes a fifth less time.
    while True:
        try:
            message = _read_message(calls)
        except EOFError:
            # If the parent was killed, its pipe closes shortly before the process is gone.
            watching.join(2 * _PARENT_CHECK_S)
            return
        answers.send_bytes(_answer(message, subject))


def _end_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # Also ends the processes that functions started.


def _answer(message: bytes, subject: list[Any]) -> bytes:
    """Run a call and return its answer. `subject` is a list with the subject, or empty."""
    try:
        kind, function, arguments = pickle.loads(message)
    except Exception as error:  # Unpickling runs the objects' own code, which may raise anything.
        return _error(error, "unreadable")
    finally:
        if not gc.isenabled():
            gc.freeze()  # Imported modules stay, so the collector can skip them.
            gc.enable()

    try:
        if kind == "subject":
            subject[:] = [function()]
            return _pickled("result", None)
        return _pickled("result", function(*subject, *arguments))
    except Exception as error:  # The parent raises the function's error again.
        return _error(error, "error")
    finally:
        sys.stdout.flush()


def _pickled(kind: str, value: Any, trace: str = "") -> bytes:
    return cloudpickle.dumps((kind, value, trace))


def _error(error: Exception, kind: str) -> bytes:
    # kbatch's own errors are about the input and need no traceback.
    expected = isinstance(error, (DeviceLostError, InputError, OutOfMemoryError))
    trace = "" if expected else "".join(traceback.format_exception(error))
    try:
        message = _pickled(kind, error, trace)
        pickle.loads(message)  # Some exceptions can be pickled but not unpickled.
        return message
    except Exception:  # Pickling runs the exception's own code. If it fails, the text is sent.
        return _pickled(kind, RuntimeError(f"{type(error).__name__}: {error}"), trace)
