"""The other end of a `Worker`: reads a function, runs it, answers."""

import dis
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import IO, Any

import cloudpickle

from kbatch.device.worker import WorkerError, read_message, write_message

_PARENT_CHECK_S = 0.5


def main() -> None:
    """Answer calls until the parent closes the pipe or ends.

    Its arguments are the parent's process id, and a folder to remove if the parent cannot.
    """
    parent, folder = int(sys.argv[1]), sys.argv[2]
    # The parent decides what an interrupt ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = _take_pipes()
    watching = threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True)
    watching.start()
    desk = _Desk(answers)
    while True:
        try:
            message = read_message(calls)
        except EOFError:
            # The pipe of a parent that was killed closes somewhat before the parent is gone.
            watching.join(2 * _PARENT_CHECK_S)
            return
        write_message(answers, desk.answer(message))


class _Desk:
    """Answers calls and keeps the subject that they are about."""

    def __init__(self, answers: IO[bytes]):
        self._answers = answers
        self._subject: list[Any] = []

    def answer(self, message: bytes) -> bytes:
        try:
            kind, function, arguments = pickle.loads(message)
        except Exception as error:  # Whatever the objects' own code raises when they are made.
            return _error(error, "unreadable")
        try:
            if kind == "subject":
                self._subject = [function()]
                return _pickled("result", None)
            told = [self._tell] if kind == "call with events" else []
            return _pickled("result", function(*self._subject, *told, *arguments))
        except Exception as error:
            return _error(error)
        finally:
            sys.stdout.flush()

    def _tell(self, event: Any) -> None:
        write_message(self._answers, _pickled("event", event))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keep the pipes for the answers; what a function prints goes to stderr's file."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return calls, answers


def _end_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # With what was started here.


def _pickled(kind: str, value: Any, trace: str = "") -> bytes:
    return cloudpickle.dumps((kind, value, trace))


def _is_own_message(error: Exception) -> bool:
    """Return whether kbatch refused something in words of its own, which need no traceback."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, (TypeError, ValueError, MemoryError)):
        return False
    code, module = last.tb_frame.f_code, last.tb_frame.f_globals.get("__name__", "")
    # What an operation raised in code of kbatch is a fault of kbatch.
    raised = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and module.startswith("kbatch.")


def _error(error: Exception, kind: str = "error") -> bytes:
    trace = "" if _is_own_message(error) else "".join(traceback.format_exception(error))
    try:
        message = _pickled(kind, error, trace)
        pickle.loads(message)  # Some exceptions can be written and not read.
        return message
    except Exception:  # Whatever the exception's own pickling raises: its text is kept.
        return _pickled(kind, WorkerError(f"{type(error).__name__}: {error}"), trace)
