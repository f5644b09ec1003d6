"""A worker process: what may end a process is tried there."""

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kbatch.device.mapped_pickles import MappedPickles, UnsendableError
from kbatch.device.messages import read_message, write_message
from kbatch.device.process_group import ProcessGroup
from kbatch.device.python_program import program_words

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
        """Runs `function(*arguments)` in the worker; the subject, if any, comes first.

        Args:
            function: Any function that cloudpickle can send.
            *arguments: Its arguments.
            on_event: Receives what the function tells; it gets an argument `tell` before the
                others then.

        Returns:
            What the function returns.

        Raises:
            UnsendableError: If the function, its arguments or the subject cannot be pickled, or
                not be read in the worker.
            WorkerDied: If the process ended; the next call starts another one.
            Exception: What the function raised; with the worker's traceback as a note, unless it
                is kbatch's own message of what it was given.
        """
        process = self._running()
        kind = "call" if on_event is None else "call with events"
        return self._ask(process, (kind, function, arguments), on_event)

    def restart(self) -> None:
        """Ends the process: the next call gets a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process and removes its files."""
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
