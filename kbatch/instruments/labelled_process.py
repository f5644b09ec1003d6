"""A process whose lines come out with its name before them."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

_DRAIN_S = 5.0
# A progress bar goes back to the start of its line instead of ending it.
_LINE_ENDS = re.compile(rb"[\r\n]+")


class LabelledProcess:
    """Runs a command in a process group of its own, so that Ctrl-C reaches its starter alone.

    Args:
        name: What stands before each line.
        words: The command.
        environment: Variables to set beside those of this process.
        write: Receives each line, without its end.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        write: Callable[[str], None],
    ):
        self.name = name
        self._write = write
        self._process = subprocess.Popen(
            words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._copying = threading.Thread(target=self._copy, daemon=True)
        self._copying.start()

    @property
    def status(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Sends what Ctrl-C sends to the process and all that it started."""
        self._signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end, and tells whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends the process and all that it started, and writes what is left of its lines."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._copying.join(_DRAIN_S)

    def _signal(self, number: int) -> None:
        # Its id is the group's; the group may have ended already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _copy(self) -> None:
        stream, rest = self._process.stdout, b""
        while stream is not None and (data := os.read(stream.fileno(), 65536)):
            *lines, rest = _LINE_ENDS.split(rest + data)
            self._write_lines(lines)
        self._write_lines([rest])

    def _write_lines(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if line.strip():
                self._write(f"[{self.name}] {line.decode(errors='replace')}")
