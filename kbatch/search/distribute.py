"""A chief and workers of one search, watched until the search ends."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kbatch.device.gpus import NO_GPU, device_environments, usable_gpus
from kbatch.device.worker import program_words
from kbatch.search.distributed_script import ChiefAddress, RemoteChief, free_local_address

_DRAIN_S = 5.0
_CHECK_S = 0.2
# A worker that traces or compiles a model is interrupted when that is done.
_INTERRUPT_S = 60.0
_CHIEF_ENDS_S = 5.0
_WORKERS_END_S = 30.0
# A progress bar goes back to the start of its line instead of ending it.
_LINE_ENDS = re.compile(rb"[\r\n]+")


class LabelledProcess:
    """Runs a command in a process group of its own, so that Ctrl-C reaches its starter alone.

    `write` receives each of its lines, with `name` before it. `write_error` is the error of the
    line after which none could be written; the process goes on.
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

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, and return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the process and all that it started, and write what is left of its lines."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._copying.join(_DRAIN_S)

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        # Its id is the group's; the group may have ended already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _copy(self) -> None:
        stream, rest = self._process.stdout, b""
        while stream is not None and (data := os.read(stream.fileno(), 65536)):
            *lines, rest = _LINE_ENDS.split(rest + data)
            for line in lines:
                self._write_line(line)
        self._write_line(rest)

    def _write_line(self, line: bytes) -> None:
        # The pipe is read to its end all the same: a process waits when it is full.
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


class DistributionPlan(NamedTuple):
    """What is to run."""

    words: tuple[str, ...]  # The script and its arguments.
    workers: int  # On this host.
    restarts: int = 3  # How often each worker that dies is started again.
    chief_address: ChiefAddress | None = None  # None for a free port of this host alone.
    chief_here: bool = True
    name: str = "tuner"  # The names of the workers begin with it, and differ between hosts.


def run_distributed(plan: DistributionPlan, write: Callable[[str], None]) -> None:
    """Run a script as the chief and the workers of a search until the search ends.

    A worker that dies is started again under its own name, for which the oracle keeps the trial it
    was running.
    """
    with _terminated_as_interrupted(), _Processes(plan, write) as processes:
        while not processes.ended():
            time.sleep(_CHECK_S)


class _Processes:
    def __init__(self, plan: DistributionPlan, write: Callable[[str], None]):
        address = plan.chief_address or free_local_address()
        self._plan = plan
        self._write = write
        self._variables = {
            "KERASTUNER_ORACLE_IP": address.host,
            "KERASTUNER_ORACLE_PORT": str(address.port),
            "PYTHONUNBUFFERED": "1",
        }
        names = [f"{plan.name}{i}" for i in range(plan.workers)]
        devices = device_environments(plan.workers, usable_gpus())
        self._devices = dict(zip(names, devices, strict=True))
        self._deaths = dict.fromkeys(names, 0)
        self._running: dict[str, LabelledProcess] = {}
        self._remote = None if plan.chief_here else RemoteChief(lambda: address.answers)

    def __enter__(self) -> "_Processes":
        try:
            if self._remote is None:
                self._start("chief", NO_GPU)
            for name, variables in self._devices.items():
                self._start(name, variables)
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end_all()

    def ended(self) -> bool:
        for error in [one.write_error for one in self._running.values() if one.write_error]:
            raise OSError(
                "The output cannot be written, and the chief and its workers were ended: run the "
                "same command again with its output in a file, and the search goes on. "
                f"Received: {error}."
            ) from error
        chief = self._remote or self._running["chief"]
        status = chief.status
        if status:
            raise ChildProcessError(
                f"The chief ended with {_status_text(status)}, and its workers were ended: run the "
                "same command again, and the search goes on where the chief stood."
            )
        if status == 0:
            _wait(self._running.values(), _WORKERS_END_S)  # They end by themselves.
            return True
        for name in self._devices:
            self._look_at(name)
        return self._remote is not None and all(
            self._running[name].status == 0 for name in self._devices
        )

    def _look_at(self, name: str) -> None:
        status = self._running[name].status
        if not status:
            return
        self._running.pop(name).close()
        if status > 0:
            raise ChildProcessError(
                f"Worker {name} ended with {_status_text(status)}, for the cause above, and all "
                "others were ended: fix it, then run the same command again, and the search goes "
                "on."
            )
        self._deaths[name] += 1
        if self._deaths[name] > self._plan.restarts:
            raise ChildProcessError(
                f"Worker {name} died {self._deaths[name]} times, last by {_status_text(status)}: a "
                "trial may end every process that runs it, as where memory runs out. Leave it out, "
                "or search with `kbatch.BatchSizeTuner(isolate=True)`, for which that is a result. "
                f"Received: restarts={self._plan.restarts}."
            )
        self._write(f"[kbatch] {name} died by {_status_text(status)} and is started again")
        self._start(name, self._devices[name])

    def _start(self, name: str, variables: Mapping[str, str]) -> None:
        module = "kbatch.search.distributed_script"
        self._running[name] = LabelledProcess(
            name,
            program_words(module, str(os.getpid()), *self._plan.words),
            environment={**self._variables, **variables, "KERASTUNER_TUNER_ID": name},
            write=self._write,
        )

    def _end_all(self) -> None:
        """Let each write how far it came, then end what is left."""
        # A worker that asks a chief which has ended would record its trial as failed.
        workers = [process for name, process in self._running.items() if name != "chief"]
        chiefs = [process for process in self._running.values() if process not in workers]
        with contextlib.ExitStack() as stack:  # To the end, also where that is interrupted.
            for process in self._running.values():
                stack.callback(process.close)
            stack.callback(_interrupt, chiefs, _CHIEF_ENDS_S)
            _interrupt(workers, _INTERRUPT_S)


def _interrupt(processes: Sequence[LabelledProcess], most_s: float) -> None:
    """Interrupt those that run, and leave them time to end."""
    alive = [process for process in processes if process.status is None]
    for process in alive:
        process.signal(signal.SIGINT)  # As Ctrl-C does.
    _wait(alive, most_s)


def _wait(processes: Iterable[LabelledProcess], most_s: float) -> None:
    end_s = time.monotonic() + most_s
    for process in processes:
        process.wait(max(0.0, end_s - time.monotonic()))


def _status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """End in order also where a batch system terminates it or its terminal is closed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ended_by = (signal.SIGTERM, signal.SIGHUP)
    # `nohup` and its like have some ignored, which stay so.
    heeded = [number for number in ended_by if signal.getsignal(number) != signal.SIG_IGN]
    numbers = (signal.SIGINT, *heeded)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
