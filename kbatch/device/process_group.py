"""A process and all that it started, which ends with it."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any


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
        """Ends the group where it still runs, and closes the pipes.

        Returns:
            The exit status of the process, minus the signal that ended it.
        """
        if not self.ended:
            _kill_group(self._process.pid)
        return self.wait()

    def wait(self) -> int:
        """Waits for the end of the process and of its group, and closes the pipes.

        Returns:
            The exit status of the process, minus the signal that ended it.
        """
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
