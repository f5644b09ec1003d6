"""Run the trials of a search as tasks of an executor, several at a time."""

import contextlib
import json
import re
import shutil
import sys
import textwrap
import time
import uuid
from asyncio import CancelledError
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import keras_tuner
import tensorflow as tf
from keras_tuner.engine.trial import TrialStatus

from kbatch.device.failures import failure_text, failure_traceback
from kbatch.device.memory import gpu_in_use, worker_device
from kbatch.device.worker import Worker, mapped_pickle
from kbatch.errors import InputError, WorkerDied
from kbatch.library_internals import fail_at_once_without_memory, move_project
from kbatch.records.json_codec import load_if_readable, write_whole_file
from kbatch.records.training_run import PLAN_NAME, RECORD_NAME, Plan
from kbatch.search.executors import LocalExecutor, Task, TaskResult, run_task
from kbatch.search.files import CHECKPOINT_NAME, STATE_NAME, TrialFiles, completed_trials
from kbatch.search.live_plot import LivePlot
from kbatch.search.oracle import write_trial
from kbatch.training.data.training_data import FitCall

# Large arrays of the data are in this folder of the project directory while the search runs.
_DATA_FOLDER = ".kbatch-data"
_CHECK_S = 0.05  # Seconds between two checks whether a task has ended.
_GPU_IN_USE = (
    "This process already uses the GPU for a model, a tensor or a dataset, so the processes of "
    "trials may not get enough GPU memory. Restart the kernel or the script, and search before "
    "anything else uses TensorFlow."
)
# The error that an executor raises for a task that ran out of memory contains one of these.
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|oom.?kill", re.IGNORECASE)

# A generator that yields the next task of a trial. Send it the future of this task when it is done.
TrialTasks = Generator[Task, Any, None]


class ParallelTrials:
    """Runs trials as tasks of an executor. Only this process writes to the project directory."""

    def __init__(self, tuner: Any, call: FitCall):
        if any(isinstance(value, tf.data.Dataset) for value in keras.tree.flatten(call.named)):
            raise InputError(
                "With `executor`, data must not be a dataset, because it cannot be sent to "
                "another process: give arrays, or a function `batch_size -> tf.data.Dataset`. "
                "Received: a tf.data.Dataset."
            )
        # A `LivePlot` draws in this process, so the tasks do not need it.
        callbacks = [item for item in call.callbacks if not isinstance(item, LivePlot)]
        self._arguments = call.arguments
        self._keywords = {**call.keywords, "verbose": 0, "callbacks": callbacks}
        self._tuner, self._project = tuner, Path(tuner.project_dir)
        self._executor, self._max_open = tuner.executor, tuner.max_parallel or sys.maxsize
        if self._executor == "local":
            if gpu_in_use():
                tuner.progress.say(_GPU_IN_USE)
            self._executor = LocalExecutor(tuner.max_parallel)
            self._max_open = self._executor.workers
        tuner.time.at_once = min(self._max_open, len(tuner.hypermodel.batch_sizes))
        self._search: Any = None  # The pickled search for each task, or the executor's reference.
        # Trials with a submitted task and its future, and trials whose next task is not submitted.
        self._open: list[tuple[Any, TrialTasks]] = []
        self._waiting: list[tuple[Task, TrialTasks]] = []

    def close(self) -> None:
        for future, _ in self._open:
            with contextlib.suppress(Exception):  # The executor may be gone.
                future.cancel()
        if isinstance(self._executor, LocalExecutor):
            self._executor.close()
        shutil.rmtree(self._project / _DATA_FOLDER, ignore_errors=True)

    def run(self) -> None:
        """Submit the training runs of all trials, and write their results."""
        self._tuner.on_search_begin()
        self._search = self._pickle_search()
        self._tuner.oracle.ongoing_trials.clear()  # An interrupted search may have left some.
        while self._submit():
            self._keep_ended()
        self._tuner.on_search_end()

    def _submit(self) -> bool:
        """Submit tasks of begun trials, then of new trials. Return whether any task is open."""
        while self._waiting:
            self._submit_task(*self._waiting.pop(0))
        while len(self._open) < self._max_open and not self._is_planning():
            trial = self._tuner.oracle.create_trial(uuid.uuid4().hex)
            if trial.status != TrialStatus.RUNNING:  # The race waits for results, or has ended.
                break
            tasks = self._tasks_of(trial)
            if (task := next(tasks, None)) is not None:
                self._submit_task(task, tasks)
        return bool(self._open)

    def _submit_task(self, task: Task, tasks: TrialTasks) -> None:
        try:
            self._open.append((self._executor.submit(run_task, self._search, task), tasks))
        except Exception as error:  # An executor may raise anything.
            raise self._executor_error("accepts no more tasks", error) from error

    def _is_planning(self) -> bool:
        """Return whether a task is making the plan. All other tasks wait for the plan."""
        if not self._open or self._completed() or (self._project / PLAN_NAME).exists():
            return False
        hypermodel = self._tuner.hypermodel
        settings = (hypermodel.micro_batch_size, hypermodel.steps_per_execution)
        return "auto" in settings or not hypermodel.dtype_policies

    def _completed(self) -> str | None:
        """Return the id of a trial that has a completed run, or None if there is none."""
        return next((record.trial_id for record in completed_trials(self._project)), None)

    def _keep_ended(self) -> None:
        """Write the results of the tasks that have ended. If no task has ended, wait a moment."""
        ended, errors = [], []
        for future, tasks in self._open:
            try:
                if future.done():
                    ended.append((future, tasks))
            except (Exception, CancelledError) as error:  # An executor may raise anything.
                errors.append(self._executor_error("does not answer", error))
        if not ended and not errors:
            time.sleep(_CHECK_S)
        ended_trials = len(self._tuner.oracle.ended_trials)
        self._tuner.progress.show_counts(len(self._open), ended=ended_trials)
        # Write all results before an error ends the search.
        for future, tasks in ended:
            self._open = [entry for entry in self._open if entry[1] is not tasks]
            try:
                self._waiting.append((tasks.send(future), tasks))
            except StopIteration:
                pass
            except Exception as error:  # It would end every other trial, too.
                errors.append(error)
        if errors:
            raise errors[0]

    def _tasks_of(self, trial: Any) -> TrialTasks:
        """Yield the training runs of a trial as tasks, one by one, and write their results."""
        tuner = self._tuner
        asked = tuner.plan_executions(trial)
        files, begun_s = TrialFiles(tuner, trial), time.monotonic()
        completed, lost, result = len(files.begin_attempt()), None, TaskResult({})
        tuner.on_trial_begin(trial)
        size = trial.hyperparameters.get("batch_size")
        while completed < files.executions:
            if completed and not tuner.time.fits(size):
                break  # A later call of `search` trains the other runs.
            submitted_s = time.monotonic()
            run, is_repeated = asked._replace(executions=completed + 1), lost is not None
            future = yield Task(self._files_for(files), trial.trial_id, run, int(is_repeated))
            result = self._result_of(future, is_repeated=is_repeated)
            if result.status == "lost" and lost is None:
                lost = result
                tuner.progress.say(
                    f"A training run of batch size {size} was lost and is submitted again: "
                    f"{textwrap.shorten(result.text, 300)}"
                )
                continue
            files.check_not_moved()
            self._write(result)
            if state := result.files.get(f"{files.folder.name}/{STATE_NAME}"):
                config = json.loads(state)["hyperparameters"]
                trial.hyperparameters = keras_tuner.HyperParameters.from_config(config)
            if result.status == "mistake":
                raise keras_tuner.errors.FatalValueError(result.text)
            if result.status in ("lost", "died"):
                failure: Exception = WorkerDied(result.exit_code, result.text)
                if result.status == "lost" and lost is not None:
                    failure = _error_of_lost(lost, result)
                files.record_failure(tuner.hypermodel, trial.hyperparameters, failure)
            tuner.oracle.reopen_other_policies()
            lost, record = None, files.record()
            if record is None and result.status == "completed":
                completed = 0  # The search has changed to float32, so all runs train again.
                continue
            if record is not None:
                share = len(record.last.epochs) / (record.last.epochs_asked or 1)
                took_s = time.monotonic() - submitted_s
                run_s = record.last.total_s or took_s
                tuner.time.ended(size, share, run_s, took_s - run_s)
            completed += result.status == "completed"
            if record is None or record.status != "completed":
                break
        trial.message = result.text if result.status == "failed" else None
        tuner.show_trial_begins(trial, took_s=time.monotonic() - begun_s)
        tuner.oracle.conclude(trial)
        tuner.on_trial_end(trial)

    def _result_of(self, future: Any, *, is_repeated: bool) -> TaskResult:
        try:
            result = future.result()
            if not isinstance(result, TaskResult):
                raise TypeError(f"a task returned {type(result).__name__} instead of its result")
            return result
        except (Exception, CancelledError) as error:  # An executor may raise anything.
            if is_repeated and isinstance(error, ConnectionError):
                raise self._executor_error("does not answer", error) from error
            text = f"{type(error).__name__}: {error}".strip(" :")
            ran_out = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text) is not None
            return TaskResult({}, "lost", text, out_of_memory=ran_out)

    def _files_for(self, files: TrialFiles) -> dict[str, bytes]:
        """Read the files that a task needs, from its search, its trial and a completed trial."""
        project, trial_ids = self._project, {files.trial_id, self._completed() or files.trial_id}
        paths = [project / RECORD_NAME, project / PLAN_NAME]
        paths += [project / f"trial_{i}" / n for i in trial_ids for n in (RECORD_NAME, STATE_NAME)]
        contents = {p.relative_to(project).as_posix(): p.read_bytes() for p in paths if p.exists()}
        if (files.folder / CHECKPOINT_NAME).exists():  # A task needs to know that the file exists.
            contents[f"{files.folder.name}/{CHECKPOINT_NAME}"] = b""
        return contents

    def _write(self, result: TaskResult) -> None:
        """Write the files of a task, unless this process has newer ones."""
        # A record says that its trial has weights, so write the weights first.
        for name, content in sorted(result.files.items(), key=lambda file: RECORD_NAME in file[0]):
            path = Path(name)
            # The record of the search keeps the environment of the first completed run.
            is_old = name == RECORD_NAME and self._completed() is not None
            if name == PLAN_NAME:  # Tasks that ran at the same time may each have changed it.
                plan = load_if_readable(Plan, self._project / path)
                number = json.loads(content)["record"]["number"]
                is_old = plan is not None and number < plan.number
            if path.name != STATE_NAME and not is_old:  # The oracle writes the state itself.
                write_whole_file(self._project / path, content)

    def _executor_error(self, failure: str, error: BaseException) -> RuntimeError:
        kind = type(self._executor)
        return RuntimeError(
            f"The executor {kind.__module__}.{kind.__qualname__} {failure}: restart it and run the "
            f"same script again. The search in {self._project} keeps all completed runs. "
            f"Received: {failure_text(error)}"
        )

    def _pickle_search(self) -> Any:
        """Pickle the tuner, without its trials, and the data, once for all tasks."""
        folder = (self._project / _DATA_FOLDER).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        tuner, arguments, keywords = self._tuner, self._arguments, self._keywords
        put = getattr(self._executor, "put", None)
        trials, tuner.oracle.trials = tuner.oracle.trials, {}
        search = execute, tuner, arguments, keywords
        try:
            pickled = cloudpickle.dumps(search) if put else mapped_pickle(search, folder)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # The code of a pickled object may raise anything.
            parts = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            parts |= keywords | {"the hypermodel": tuner.hypermodel}
            names = [name for name, value in parts.items() if not _can_be_pickled(value)]
            raise InputError(
                "With `executor`, model, data and callbacks must be picklable: give arrays or a "
                "function `batch_size -> tf.data.Dataset`, and create locks, file objects and "
                f"connections inside functions. Received: {' and '.join(names)}: {error}"
            ) from error
        finally:
            tuner.oracle.trials = trials
        try:
            return put(pickled) if put else pickled
        except Exception as error:  # An executor may raise anything.
            raise self._executor_error("did not accept the data", error) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # The code of a pickled object may raise anything.
        return False
    return True


def _error_of_lost(*results: TaskResult) -> Exception:
    """Return an error with both causes, for a training run that was lost twice."""
    causes = " and by ".join(textwrap.shorten(result.text, 120) for result in results)
    kind = MemoryError if any(result.out_of_memory for result in results) else RuntimeError
    error = kind(f"The training run was lost twice, by {causes}")
    error.add_note("\n".join(result.text for result in results))
    return error


def execute(
    project: Path, task: Task, tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[str, str]:
    """Run a task in a folder with its files. Return the `status` and `text` of its `TaskResult`."""
    fail_at_once_without_memory()
    oracle, hypermodel = tuner.oracle, tuner.hypermodel
    move_project(tuner, project)
    oracle.reload()
    hypermodel.restore(project)
    tuner.executions_per_trial = task.asked.executions
    trial = oracle.trials.get(task.trial_id)
    if trial is None:
        return "failed", f"The state of trial {task.trial_id} could not be read."
    try:
        tuner.run_executions(trial, FitCall.of_search(arguments, keywords), task.asked)
    except Exception as error:  # A training may raise anything. `_tasks_of` decides what to do.
        TrialFiles(tuner, trial).record_failure(hypermodel, trial.hyperparameters, error)
        mistake = isinstance(error, (InputError, keras_tuner.errors.FatalError))
        return ("mistake", str(error)) if mistake else ("failed", failure_traceback(error))
    finally:
        write_trial(trial, project)  # Training may have declared more hyperparameters.
    return "completed", ""


def explored_space(tuner: Any) -> Any:
    """Find the search space in another process, so that this process does not use the GPU."""
    with Worker(worker_device()) as worker:
        return worker.call(tuner.explore)
