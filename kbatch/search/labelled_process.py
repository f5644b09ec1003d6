"""A process whose lines come out with its name before them."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

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

    Attributes:
        write_error: The error of the line after which none could be written; the process goes on.
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
        self.write_error: OSError | None = None
        self._write = write
        with _interruptible_children():
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
        # The pipe is read to its end all the same: a process waits when it is full.
        for line in lines:
            if line.strip() and self.write_error is None:
                try:
                    self._write(f"[{self.name}] {line.decode(errors='replace')}")
                except OSError as error:
                    self.write_error = error


@contextlib.contextmanager
def _interruptible_children() -> Iterator[None]:
    """Let processes started meanwhile be interrupted, though this one may ignore Ctrl-C."""
    # A background job and `nohup` ignore it, and a process inherits what is ignored, while a
    # handler ends with its `exec`. Only the main thread may set one.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
