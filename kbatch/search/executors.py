"""Where executions of trials run: the task that an engine is given, this host, and Ray.

Nothing here starts TensorFlow: an engine imports this module in its worker, and the task trains in
a process of its own that ends with it.
"""

import contextlib
import importlib
import io
import os
import queue
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kbatch.device.gpus import device_environments, usable_gpus
from kbatch.device.worker import Worker, WorkerDied

if sys.platform != "win32":
    import fcntl

# Signals by which an engine ends a job: preemption, time limit, shutdown.
_ENGINE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Task(NamedTuple):
    """An execution of a trial, or what is measured before them, in plain types."""

    files: dict[str, bytes]  # What it reads of the project directory, by relative path.
    trial_id: str | None = None  # None where memory is measured.
    executions: int = 1  # Of the trial, this one included: those before it have completed.
    trials_left: float = 1  # That the search may still run, this one included.
    attempt: int = 0  # Some engines take equal tasks for one, and return the result of the first.
    result_file: str = ""  # Where it leaves its result too, if a worker can reach that folder.


class TaskResult(NamedTuple):
    """The result of a task, in plain types, so that nothing of the worker's is unpickled."""

    files: dict[str, bytes]  # What it wrote in the project directory, by relative path.
    # "completed"; "failed", which its record says too; "mistake", which ends the search; "died".
    status: str = "completed"
    text: str = ""  # What was raised, or the end of the output of a process that died.
    exit_code: int = 0  # Of a process that died.
    host: str = ""


def run_task(search: bytes, task: Task, worker: Worker | None = None) -> TaskResult:
    """Run a task in a process of its own, in a temporary folder; an engine calls it."""
    # A job of an earlier driver may have completed the task, or still run it.
    with _left_result(task.result_file, wait=True) as left:
        result = left or _run_task(search, task, worker)
        if left is None and result.status == "completed":
            whole = io.BytesIO()
            with zipfile.ZipFile(whole, "w") as archive:
                for name, content in result.files.items():
                    archive.writestr(zipfile.ZipInfo(name), content)  # Whatever the clock says.
            # If it cannot be written, the engine still returns it.
            with contextlib.suppress(OSError):
                Path(task.result_file).write_bytes(whole.getbuffer())
        return result


def _run_task(search: bytes, task: Task, worker: Worker | None) -> TaskResult:
    with contextlib.closing(worker or Worker()) as own:
        project = own.folder / "project"
        for name, content in task.files.items():
            path = project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            status, text, exit_code = *own.call(_train, str(project), search, task), 0
        except WorkerDied as error:
            if -error.exit_code in _ENGINE_SIGNALS:  # The same task may complete elsewhere.
                raise InterruptedError(f"Signal {-error.exit_code} ended the process.") from None
            status, text, exit_code = "died", error.tail, error.exit_code
        found = {
            path.relative_to(project).as_posix(): path.read_bytes()
            for path in project.rglob("*")
            if path.is_file() and not path.name.startswith(("draft.", "."))
        }
        changed = {name: data for name, data in found.items() if task.files.get(name) != data}
        return TaskResult(changed, status, text, exit_code, socket.gethostname())


def _train(project: str, search: bytes, task: Task) -> tuple[str, str]:
    # TensorFlow starts here, in the process of the task.
    from kbatch.search.trial_process import execute

    return execute(Path(project), search, task)


class LeftResult:
    """A future of an execution that a job of an earlier driver has completed, or still runs."""

    def __init__(self, path: Path):
        self._path = path
        self._result: TaskResult | None = None
        self.exists = path.exists() and (not self.done() or self._result is not None)

    def done(self) -> bool:
        """Return whether no job runs it now."""
        try:
            with _left_result(str(self._path)) as self._result:
                return True
        except BlockingIOError:
            return False

    def result(self) -> TaskResult:
        if self._result is None:
            raise InterruptedError("The job that ran it ended without a result.")
        return self._result


@contextlib.contextmanager
def _left_result(path: str, *, wait: bool = False) -> Iterator[TaskResult | None]:
    """Lock and read a result's file; BlockingIOError if another process has locked it."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    except OSError:
        yield None
        return
    with file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:  # Others mostly mean that there are no locks.
                if isinstance(error, BlockingIOError):
                    raise
        result = None
        # A damaged file raises whatever its bytes lead the reader to.
        with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
            result = TaskResult({name: archive.read(name) for name in archive.namelist()})
        yield result


class LocalExecutor:
    """Runs tasks on this host: `workers` at a time, None for one a GPU or for every two cores."""

    def __init__(self, workers: int | None = None):
        gpus, cores = usable_gpus(), len(os.sched_getaffinity(0))
        most = len(gpus) or max(1, cores // 2)
        self.workers = min(workers or most, most)
        self._environments: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for variables in device_environments(self.workers, gpus):
            threads = str(max(1, cores // self.workers))
            for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
                variables.setdefault(name, os.environ.get(name, threads))
            self._environments.put(variables)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="kbatch-executor")
        self._running: set[Worker] = set()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run `function(*arguments, worker)` in a thread, when a worker is free."""
        return self._threads.submit(self._run, function, arguments)

    def close(self) -> None:
        """Cancel queued tasks and end running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._running:  # One may just be starting its process.
            for worker in list(self._running):
                worker.restart()
            time.sleep(0.05)

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with contextlib.ExitStack() as stack:
            variables = self._environments.get()
            stack.callback(self._environments.put, variables)
            worker = Worker(variables)
            self._running.add(worker)
            stack.callback(self._running.discard, worker)
            return function(*arguments, worker)


def ray_executor(**options: Any) -> Any:
    """Make an executor for `BatchSizeTuner` that runs each execution as a task of Ray.

    Ray must have been started (`ray.init`). Arrays that `search` is given go into its object store
    once. A task that Ray loses is tried once more by the tuner, not by Ray, unless `max_retries`
    says so.

    Example:

    >>> ray.init()
    >>> executor = kbatch.ray_executor(num_gpus=1)
    >>> tuner = kbatch.BatchSizeTuner(hypermodel, "val_accuracy", executor=executor)

    Args:
        **options: What `ray.remote` takes for each task, such as `num_cpus`, `num_gpus` and
            `memory` in bytes.

    Raises:
        ImportError: If Ray is not installed.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            f"`kbatch.ray_executor` needs Ray: pip install ray. Received: {error}."
        ) from error
    return _RayExecutor(ray, {"max_retries": 0} | options)


class _RayExecutor:
    def __init__(self, ray: Any, options: Mapping[str, Any]):
        self._ray, self._options = ray, options

    def put(self, value: Any) -> Any:
        """Hold a value once for all tasks, which get it in place of the reference."""
        return self._ray.put(value)

    def with_resources(self, needed: Any) -> "_RayExecutor":
        """Return an executor that asks for this; a MemoryError says that no node has it."""
        asked = {"memory": needed.host_memory_bytes, "num_gpus": needed.gpus, **self._options}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        able = [node.get("memory", 0) for node in nodes if node.get("GPU", 0) >= asked["num_gpus"]]
        if max(able, default=0) < asked["memory"]:
            raise MemoryError(f"Ray's nodes with that many GPUs have {able} bytes of memory.")
        return _RayExecutor(self._ray, asked)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "_RayFuture":
        task = self._ray.remote(**self._options)(function)
        return _RayFuture(self._ray, task.remote(*arguments))


class _RayFuture:
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Any:
        return self._ray.get(self._reference)

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)
