"""A worker process: what may end a process is tried there."""

import contextlib
import io
import os
import pickle
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np

from kbatch.device.python_program import program_words

_LARGE_BYTES = 1_000_000


class UnsendableError(TypeError):
    """What cannot be pickled and so cannot go to another process."""


class MappedPickles:
    """Pickles by value (cloudpickle), with large NumPy arrays in files beside.

    An array is read by mapping, so that all readers hold it once.

    Args:
        folder: Where the files lie: those of one pickle, until the next one is made.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: list[Path] = []

    def dumps(self, value: Any) -> bytes:
        """Pickle a value."""
        while self._files:
            self._files.pop().unlink(missing_ok=True)  # One that was never begun.
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._file_of).dump(value)
        except (OSError, MemoryError):  # Not the value's fault.
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            raise UnsendableError(f"It cannot be sent to another process: {error}") from error
        return buffer.getvalue()

    def _file_of(self, array: np.ndarray) -> Path:
        path = self._folder / f"array-{len(self._files)}.npy"
        self._files.append(path)
        np.save(path, array, allow_pickle=False)
        return path


class _Pickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, file_of: Any):
        super().__init__(buffer)
        self._file_of = file_of

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
            if obj.nbytes >= _LARGE_BYTES:
                return _mapped, (self._file_of(obj),)
            return NotImplemented
        return super().reducer_override(obj)


def _mapped(path: Path) -> np.ndarray:
    # Copy on write: what a function does to its argument stays its own.
    return np.load(path, mmap_mode="c")


_LENGTH = struct.Struct(">Q")


def write_message(pipe: IO[bytes] | Any, message: bytes) -> None:
    """Write a message with its length before it."""
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes] | Any) -> bytes:
    """Read a message."""
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size))
    return _read(pipe, length)


def _read(pipe: IO[bytes] | Any, length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError("The other end of the pipe is closed.")
    return data


class ProcessGroup:
    """Runs a command in a session of its own; when it ends, what it started is killed.

    Else a child that it forked would hold its pipes open, and a reader would wait for the child.

    Args:
        words: The command.
        environment: All its variables.
        errors: File that receives its stderr.

    Attributes:
        requests: Pipe to its stdin.
        answers: Pipe from its stdout.
    """

    requests: IO[bytes] | Any
    answers: IO[bytes] | Any

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]):
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        # The thread keeps the process: the pipes close with this object, not with that.
        self.requests, self._process.stdin = self._process.stdin, None
        self.answers, self._process.stdout = self._process.stdout, None
        self._waiting = threading.Thread(
            target=_end_with, args=(self._process,), name="kbatch-process-group", daemon=True
        )
        self._waiting.start()

    @property
    def ended(self) -> bool:
        """Whether the process, and so its group, has ended."""
        return self._process.poll() is not None

    def kill(self) -> int:
        """End the group where it still runs, and closes the pipes."""
        if not self.ended:
            _kill_group(self._process.pid)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the process and of its group, and closes the pipes."""
        self._waiting.join()
        for pipe in (self.requests, self.answers):
            # What was not sent yet is lost with the process.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return self._process.wait()


def _end_with(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    _kill_group(process.pid)


def _kill_group(number: int) -> None:
    # The process leads its session, so that its id is the group's, which may have ended already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


# SIGABRT, SIGKILL and SIGSEGV, as Popen tells them and as a shell between the two does.
_MEMORY_EXITS = (-6, -9, -11, 134, 137, 139)
_TAIL_CHARACTERS = 4000
_PROGRAM = "kbatch.device.worker_process"


class WorkerDied(RuntimeError):
    """The worker process ended while it worked.

    Attributes:
        exit_code: Its exit status; a signal's number, negative, where one ended it.
        out_of_memory: Whether the status is one that running out of memory leaves.
        tail: The end of what it wrote.
    """

    def __init__(self, exit_code: int, tail: str):
        super().__init__(
            f"The worker process ended with status {exit_code} while it worked. "
            f"The end of what it wrote:\n{tail}"
        )
        self.exit_code = exit_code
        self.tail = tail
        self.out_of_memory = exit_code in _MEMORY_EXITS


class WorkerError(RuntimeError):
    """An exception of the worker whose own class could not be sent; its text is kept."""


class Worker:
    """A Python process that runs one function after the other, respawned only when it died.

    Functions, closures and what a notebook defines travel by value (cloudpickle), large arrays as
    memory-mapped files. It is started by the first call, needs no `__main__` guard, and ends with
    its parent, whose folder it removes then. What its functions start ends with it.

    Example:

    >>> with Worker({"TF_CPP_MIN_LOG_LEVEL": "2"}) as worker:
    ...     worker.call(train, model, x)

    Args:
        environment: Variables to set beside those of this process.
        subject: Makes an object in each new process; functions get it as their first argument.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        subject: Callable[[], Any] | None = None,
    ):
        self._environment = dict(environment or {})
        self._subject = subject
        self._process: ProcessGroup | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kbatch-")
        self._pickles = MappedPickles(self.folder)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """A folder for files that the worker reads; it goes when the worker is closed."""
        return Path(self._folder.name)

    @property
    def output(self) -> str:
        """What the present process wrote to stdout and stderr."""
        try:
            return self._output_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        on_event: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run `function(*arguments)` in the worker; the subject, if any, comes first."""
        process = self._running()
        kind = "call" if on_event is None else "call with events"
        return self._ask(process, (kind, function, arguments), on_event)

    def restart(self) -> None:
        """End the process: the next call gets a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and remove its files."""
        self.restart()
        self._folder.cleanup()

    def _ask(
        self,
        process: ProcessGroup,
        request: tuple[Any, ...],
        on_event: Callable[[Any], None] | None = None,
    ) -> Any:
        message = self._pickles.dumps(request)
        try:
            write_message(process.requests, message)
            kind, value, trace = self._answer(process, on_event)
        except (EOFError, BrokenPipeError):
            self._process = None
            raise WorkerDied(process.wait(), self.output[-_TAIL_CHARACTERS:]) from None
        except BaseException:
            self.restart()  # It still works on what nobody waits for.
            raise
        if kind == "unreadable":
            raise UnsendableError(
                f"It cannot be read in another process: {type(value).__name__}: {value}"
            ) from value
        if kind == "error":
            if trace:
                value.add_note(f"In the worker process:\n{trace}")
            raise value
        return value

    def _answer(
        self, process: ProcessGroup, on_event: Callable[[Any], None] | None
    ) -> tuple[str, Any, str]:
        while True:
            answer = pickle.loads(read_message(process.answers))
            if answer[0] != "event":
                return answer
            if on_event is not None:
                on_event(answer[1])

    @property
    def _output_path(self) -> Path:
        return self.folder / "output.txt"

    def _running(self) -> ProcessGroup:
        if self._process is None or self._process.ended:
            with open(self._output_path, "wb") as output:
                self._process = ProcessGroup(
                    program_words(_PROGRAM, str(os.getpid()), str(self.folder)),
                    {**os.environ, **self._environment},
                    output,
                )
            if self._subject is not None:
                self._make_subject(self._process, self._subject)
        return self._process

    def _make_subject(self, process: ProcessGroup, subject: Callable[[], Any]) -> None:
        try:
            self._ask(process, ("subject", subject, ()))
        except BaseException:
            self.restart()  # Without its subject it is of no use.
            raise
