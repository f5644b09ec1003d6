"""Run training runs in other processes: the task, an executor for this host, and one for Ray.

This module does not import TensorFlow. An executor imports it in its worker, and each task trains
in a new process that ends with the task.
"""

import contextlib
import importlib
import os
import pickle
import queue
import signal
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kbatch.device.machine import device_environments, read_memory_kills, usable_cores, usable_gpus
from kbatch.device.worker import Worker
from kbatch.errors import WorkerDied
from kbatch.records.training_run import AskedRun

# Signals by which a system ends a process: out of memory, preemption, a time limit, shutdown.
_KILL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Task(NamedTuple):
    """A training run of a trial, in plain types."""

    files: dict[str, bytes]  # Files of the project directory that it reads, by relative path.
    trial_id: str
    asked: AskedRun = AskedRun()
    attempt: int = 0  # Makes a repeated task differ, because some executors run equal tasks once.


class TaskResult(NamedTuple):
    """The result of a task, in plain types, so that the search need not unpickle other objects."""

    files: dict[str, bytes]  # Files of the project directory that it wrote, by relative path.
    # "completed"; "failed": training raised an error, which the record has too; "mistake": the
    # search has to end; "died": the process crashed; "lost": the process was ended from outside.
    status: str = "completed"
    text: str = ""  # The error, or the end of the output of a process that died.
    exit_code: int = 0  # The exit code of a process that died.
    out_of_memory: bool = False  # Whether a lost task is known to have run out of memory.


def run_task(search: bytes, task: Task, worker: Worker | None = None) -> TaskResult:
    """Run a task in a new process and a temporary folder. An executor calls this."""
    kills_before = read_memory_kills()
    exit_code, out_of_memory = 0, False
    with contextlib.closing(worker or Worker()) as process:
        project = process.folder / "project"
        for name, content in task.files.items():
            path = project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            status, text = process.call(train, str(project), search, task)
        except WorkerDied as error:
            status, text, exit_code = "died", error.tail, error.exit_code
            if -exit_code in _KILL_SIGNALS:
                status, text = "lost", f"signal {-exit_code} ended its process"
                kills = read_memory_kills() - kills_before
                if out_of_memory := exit_code == -signal.SIGKILL and kills > 0:
                    text += ", because the host ran out of memory"
        files = {
            path.relative_to(project).as_posix(): path.read_bytes()
            for path in project.rglob("*")
            if path.is_file() and not path.name.startswith(("draft.", "."))
        }
        changed = {name: data for name, data in files.items() if task.files.get(name) != data}
        return TaskResult(changed, status, text, exit_code, out_of_memory)


def train(project: str, search: bytes, task: Task) -> tuple[str, str]:
    """Run a task in this process. Return the `status` and the `text` of its `TaskResult`."""
    try:
        execute, *arguments = pickle.loads(search)
    except (FileNotFoundError, PermissionError) as error:
        return "mistake", (
            "A worker of the executor cannot read the project directory, which holds the data. "
            "Give a `directory` that all hosts share, or a function `batch_size -> "
            "tf.data.Dataset` that loads the data on the worker, or an executor that sends data, "
            "such as `kbatch.ray_executor()`. "
            f"Received: {error} on {socket.gethostname()}."
        )
    except (ImportError, AttributeError) as error:
        return "mistake", (
            "A worker of the executor cannot import a module that the model, data or callbacks "
            "need: install the module there, or define their functions and classes in the script "
            "itself, because these are sent to the worker. "
            f"Received: {type(error).__name__}: {error} on {socket.gethostname()}."
        )
    return execute(Path(project), task, *arguments)


class LocalExecutor:
    """Runs tasks on this host: at most `workers` at a time, one per GPU or per two cores."""

    def __init__(self, workers: int | None = None):
        gpus, cores = usable_gpus(), usable_cores()
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
        """Call `function(*arguments, worker)` in a thread, as soon as a device is free."""
        return self._threads.submit(self._run, function, arguments)

    def close(self) -> None:
        """Cancel queued tasks and end running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._running:  # A loop, because a worker may just be starting its process.
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
    """Make an executor for `BatchSizeTuner` that runs each training run as a task of Ray.

    Call `ray.init` first. The arrays of `search` are put into the object store of Ray once. If Ray
    loses a task, the tuner submits it once more. Ray itself retries only if you set `max_retries`.

    Example:

    >>> ray.init()
    >>> executor = kbatch.ray_executor(memory=8e9)  # One GPU a task, if Ray has any.
    >>> tuner = kbatch.BatchSizeTuner(hypermodel, "val_accuracy", executor=executor)

    Args:
        **options: Options of `ray.remote` for each task, such as `num_cpus`, `num_gpus` and
            `memory` in bytes. Default of `num_gpus`: 1 if the cluster has GPUs.

    Returns:
        An executor, for the argument `executor` of `BatchSizeTuner`.

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
    def __init__(self, ray: Any, options: dict[str, Any]):
        self._ray, self._options = ray, options

    def put(self, value: Any) -> Any:
        """Store a value once. Tasks receive it in place of the returned reference."""
        return self._ray.put(value)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "_RayFuture":
        if self._ray.cluster_resources().get("GPU"):  # Without `num_gpus`, each task sees all GPUs.
            self._options.setdefault("num_gpus", 1)
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
