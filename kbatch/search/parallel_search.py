"""A search whose executions are tasks of an executor, several at a time."""

import contextlib
import dataclasses
import json
import shutil
import socket
import sys
import time
from asyncio import CancelledError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import keras_tuner
from keras_tuner.engine.trial import TrialStatus

from kbatch.device.worker import MappedPickles, WorkerDied
from kbatch.errors import InputError
from kbatch.records.json_codec import write_whole_file
from kbatch.search.executors import LocalExecutor, Task, TaskResult, run_task
from kbatch.search.live_plot import LivePlot
from kbatch.search.trial_files import TrialFiles, readable_trials, same_settings
from kbatch.search.trial_process import check_no_dataset
from kbatch.search.trial_states import CHECKPOINT_NAME, STATE_NAME
from kbatch.study.study import RECORD_NAME, GoodputRecord, read_goodput
from kbatch.training.dtype_policy import PolicyUnsupported

# Large arrays of the data, in the project directory while the search runs.
_DATA_FOLDER = ".kbatch-data"
_CHECK_S = 0.05
# Records of other trials that an execution is compared with.
_COMPARED = 3


@dataclasses.dataclass(eq=False)
class _OpenTrial:
    """A trial that was handed out and has not ended."""

    trial: Any
    files: TrialFiles
    completed: int  # Executions, of those that it is to have.
    time_cap_s: float | None
    begun_s: float
    future: Any = None  # Of the present execution.
    lost: int = 0  # How often that was.


class ParallelTrials:
    """Runs the executions of a search's trials as tasks of an executor.

    Trials run beside each other, the executions of one in order. The driver alone writes to the
    project directory: what has completed there never runs again.
    """

    def __init__(
        self,
        tuner: Any,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        *,
        executor: Any,
        max_parallel: int | None,
    ):
        check_no_dataset(arguments, keywords, given="executor=...")
        given = keras.tree.flatten(keywords.get("callbacks") or [])
        # The figure of a search is drawn where all trials are.
        travelling = [one for one in given if not isinstance(one, LivePlot)]
        self._given = tuple(arguments), {**keywords, "verbose": 0, "callbacks": travelling}
        self._tuner, self._project = tuner, Path(tuner.project_dir)
        self._own = LocalExecutor(max_parallel) if executor == "local" else None
        self._executor: Any = self._own or executor
        self._max_open = max_parallel or (self._own.workers if self._own else sys.maxsize)
        self._search: Any = None  # What travels with each task, or the executor's reference to it.
        self._open: list[_OpenTrial] = []  # Those whose execution was submitted.
        # A trial with an execution that completed: it has found what decides for the others.
        self._first_completed: str | None = None
        self._mistake: str | None = None  # In what was given: no other trial would fare better.

    def __enter__(self) -> "ParallelTrials":
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._open:
            with contextlib.suppress(Exception):  # Of an engine that is gone.
                one.future.cancel()
        if self._own is not None:
            self._own.close()
        shutil.rmtree(self._project / _DATA_FOLDER, ignore_errors=True)

    def sweep(self, tuner: Any) -> GoodputRecord:
        """Time an update of each batch size, in a task of its own."""
        self._search = self._pickle_search()
        try:
            result = self._sweep_result(attempt=0)
        except (Exception, CancelledError) as error:  # Whatever the engine raises: tried once more.
            said = f"The executor lost the throughput sweep, which is submitted again: {error}"
            self._tuner._progress.say(said)
            result = self._sweep_result(attempt=1)
        if result.status == "unsupported":
            raise PolicyUnsupported(result.text)
        if result.status == "died":
            raise WorkerDied(result.exit_code, result.text)
        self._write(result)
        found = read_goodput(self._project)
        if result.status != "completed" or found is None:
            raise InputError(result.text)
        return found

    def _sweep_result(self, attempt: int) -> TaskResult:
        future = self._submit(Task(self._files_for(()), attempt=attempt))
        try:
            while not future.done():
                time.sleep(_CHECK_S)
            return future.result()
        except BaseException:
            with contextlib.suppress(Exception):
                future.cancel()
            raise

    def run(self) -> None:
        """Run all trials that the oracle hands out."""
        self._search = self._pickle_search()
        self._tuner.oracle.ongoing_trials.clear()  # Of a search that was interrupted here.
        trials = readable_trials(self._project)
        completed = (trial.trial_id for trial in trials if _completed(trial))
        self._first_completed = next(completed, None)
        waiting: _OpenTrial | None = None  # For the trial whose noise scale it needs.
        while True:
            while len(self._open) < self._max_open and not (self._open and self._first_decides()):
                one, waiting = waiting or self._open_next_trial(), None
                if one is None:
                    break
                if self._needs_base(one):
                    waiting = one
                    break
                self._submit_next(one)
            if not self._open:
                return
            self._show_counts()
            ended = [one for one in self._open if one.future.done()]
            if not ended:
                time.sleep(_CHECK_S)
            # All that has completed is written before more is asked of an executor that may fail.
            self._open = [one for one in self._open if one not in ended]
            again = [one for one in ended if self._record_result(one)]
            if self._mistake is not None:
                raise keras_tuner.errors.FatalValueError(self._mistake)
            for one in again:
                self._submit_next(one)

    def _open_next_trial(self) -> _OpenTrial | None:
        """Open the next trial; None where there is none, or results decide on it."""
        oracle = self._tuner.oracle
        taken, number = oracle.ongoing_trials, 0
        while f"execution{number}" in taken:
            number += 1
        trial = oracle.create_trial(f"execution{number}")
        if trial.status != TrialStatus.RUNNING:
            return None
        self._tuner._plan_executions(trial)
        files = TrialFiles(self._tuner, trial)
        completed = len(files.begin_attempt())
        self._tuner.on_trial_begin(trial)
        return _OpenTrial(trial, files, completed, self._tuner._time_cap_s, time.monotonic())

    def _submit_next(self, one: _OpenTrial) -> None:
        """Submit the next execution of a trial, or end the trial."""
        number, executions = one.completed + 1, one.files.executions
        if number > executions:
            self._end_trial(one)
            return
        # What is left, as a process sees it that knows of so many executions a trial.
        left = self._tuner.oracle.remaining_trials() * executions / number
        sent = self._files_for(self._trials_to_send(one.trial))
        if (one.files.folder / CHECKPOINT_NAME).exists():  # A mark: its weights stay here.
            sent[f"{one.files.folder.name}/{CHECKPOINT_NAME}"] = b""
        task = Task(sent, one.trial.trial_id, number, left, one.time_cap_s, attempt=one.lost)
        one.future = self._submit(task)
        self._open.append(one)

    def _record_result(self, one: _OpenTrial) -> bool:
        """Record the result of an execution; return whether the trial continues."""
        files, trial, hypermodel = one.files, one.trial, self._tuner.hypermodel
        try:
            result = one.future.result()
            if not isinstance(result, TaskResult):
                raise TypeError(f"a task returned {type(result).__name__} instead of its result")
        except (Exception, CancelledError) as error:  # Whatever the engine raises.
            one.lost += 1
            what = f"{type(error).__name__}: {error}".strip(" :")
            if one.lost == 1:
                size = f"batch size {trial.hyperparameters.get('batch_size')}"
                said = f"The executor lost an execution of {size}, which is submitted again: {what}"
                self._tuner._progress.say(said)
                return True
            gone = RuntimeError(f"The executor lost this execution twice, last by {what}")
            files.record_failure(hypermodel, trial.hyperparameters, gone)
            self._end_trial(one)
            return False
        one.lost = 0
        self._write(result)
        state = result.files.get(f"{files.folder.name}/{STATE_NAME}")
        if state is not None:
            config = json.loads(state)["hyperparameters"]
            trial.hyperparameters = keras_tuner.HyperParameters.from_config(config)
        if result.status == "mistake":
            self._mistake = result.text
            return False
        if result.status == "died":
            died = WorkerDied(result.exit_code, result.text)
            files.record_failure(hypermodel, trial.hyperparameters, died)
        record = files.record()
        if record is not None and _completed(record):
            self._first_completed = self._first_completed or trial.trial_id
        one.completed += result.status == "completed"
        if record is not None and record.status == "completed" and one.completed < files.executions:
            self._tuner._trackers.update(self._project)
            return True
        trial.message = result.text if result.status == "failed" else None
        self._end_trial(one, result.host)
        return False

    def _end_trial(self, one: _OpenTrial, host: str = "") -> None:
        """End a trial by its record."""
        self._tuner._show_begun(
            one.trial,
            took_s=time.monotonic() - one.begun_s,
            at_once=len(self._open) + 1,
            where=f" on {host}" if host not in ("", socket.gethostname()) else "",
        )
        self._tuner._conclude(one.trial, one.files)
        self._tuner.on_trial_end(one.trial)

    def _show_counts(self) -> None:
        running = [getattr(one.future, "running", lambda: None)() for one in self._open]
        self._tuner._progress.show_counts(
            submitted=len(running),
            running=None if None in running else sum(map(bool, running)),
            ended=len(self._tuner.oracle.ended_trials),
        )

    def _first_decides(self) -> bool:
        """Return whether the first execution must complete alone: it decides for all others."""
        hypermodel = self._tuner.hypermodel
        falls_back = hypermodel.dtype_policies in (("mixed_float16",), ("float16",))
        decides = hypermodel.micro_batch_size == "auto" or falls_back
        return decides and self._first_completed is None

    def _needs_base(self, one: _OpenTrial) -> bool:
        """Return whether a trial must wait for the noise scale of one that runs."""
        hypermodel = self._tuner.hypermodel
        return hypermodel.learning_rate_scaling == "noise" and any(
            other.trial.hyperparameters.get("batch_size") == hypermodel.base_batch_size
            and same_settings(other.trial, one.trial)
            for other in self._open
        )

    def _trials_to_send(self, trial: Any) -> list[str]:
        """List the trials whose records an execution reads, its own first."""
        base = self._tuner.hypermodel.base_batch_size
        others = [
            other
            for trial_id, other in sorted(self._tuner.oracle.trials.items())
            if trial_id != trial.trial_id
            and same_settings(other, trial)
            and (self._project / f"trial_{trial_id}" / RECORD_NAME).exists()
        ]
        bases = [one for one in others if one.hyperparameters.get("batch_size") == base]
        named = [one.trial_id for one in (trial, *others[:_COMPARED], *bases)]
        if self._first_completed is not None:
            named.append(self._first_completed)
        return list(dict.fromkeys(named))

    def _files_for(self, trial_ids: Iterable[str]) -> dict[str, bytes]:
        """Read what a task needs of the project directory."""
        folders = [self._project / f"trial_{trial_id}" for trial_id in trial_ids]
        paths = [
            self._project / RECORD_NAME,
            *self._project.glob("kbatch-micro-batches/*.json"),
            *(folder / name for folder in folders for name in (RECORD_NAME, STATE_NAME)),
        ]
        found = [path for path in paths if path.exists()]
        return {path.relative_to(self._project).as_posix(): path.read_bytes() for path in found}

    def _write(self, result: TaskResult) -> None:
        for name, content in result.files.items():
            path = Path(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(
                    "A task may return only files inside the project directory: use the same "
                    f"version of kbatch on all workers. Received: {name}."
                )
            # The oracle's own, and the environment of the first execution that completed.
            earlier = self._first_completed is not None and name == RECORD_NAME
            if path.name != STATE_NAME and not earlier:
                write_whole_file(self._project / path, content)

    def _submit(self, task: Task) -> Any:
        try:
            return self._executor.submit(run_task, self._search, task)
        except Exception as error:  # Whatever the engine raises.
            raise RuntimeError(
                "The executor accepts no more tasks: restart it and run the same script again; "
                f"the search in {self._project} continues from what has completed. Received: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _pickle_search(self) -> Any:
        """Pickle the tuner, without its trials, and the data: once for all tasks."""
        folder = (self._project / _DATA_FOLDER).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        tuner, (arguments, keywords) = self._tuner, self._given
        put = getattr(self._executor, "put", None)
        trials, tuner.oracle.trials = tuner.oracle.trials, {}
        whole = tuner, arguments, keywords
        try:
            return put(cloudpickle.dumps(whole)) if put else MappedPickles(folder).dumps(whole)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            parts = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            parts |= keywords | {"the hypermodel": tuner.hypermodel}
            names = [name for name, value in parts.items() if not _travels(value)]
            raise InputError(
                "Model, data and callbacks travel to the workers of an executor: give arrays or a "
                "function `batch_size -> tf.data.Dataset`, and let functions open what holds a "
                f"file, a lock or a connection themselves. Received: {' and '.join(names)}: {error}"
            ) from error
        finally:
            tuner.oracle.trials = trials


def _completed(trial: Any) -> bool:
    return any(execution.status == "completed" for execution in trial.executions)


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # As above.
        return False
    return True
