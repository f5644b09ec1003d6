"""A search whose executions are tasks of an executor, several at a time."""

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

# Large arrays of the data, in the project directory while the search runs.
_DATA_FOLDER = ".kbatch-data"
_CHECK_S = 0.05
_GPU_IN_USE = (
    "This process holds the GPU already, by a model, a tensor or a dataset that was made here: the "
    "process of each trial gets what that leaves, which may be too little for any. Restart the "
    "kernel or the script, and search before anything else uses TensorFlow."
)
# What engines say of a task that they ended for want of memory.
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|oom.?kill", re.IGNORECASE)

# A trial: it asks for its next task, and is sent the future of that when it is done.
Run = Generator[Task, Any, None]


class ParallelTrials:
    """Runs a search's trials as tasks of an executor, and alone writes to the project directory."""

    def __init__(self, tuner: Any, call: FitCall):
        if any(isinstance(value, tf.data.Dataset) for value in keras.tree.flatten(call.named)):
            raise InputError(
                "With `executor` a dataset cannot travel to another process: give a function "
                "`batch_size -> tf.data.Dataset` that makes it there, or arrays. "
                "Received: a tf.data.Dataset."
            )
        # The figure of a search is drawn where all trials are.
        travelling = [one for one in call.callbacks if not isinstance(one, LivePlot)]
        self._given = call.arguments, {**call.keywords, "verbose": 0, "callbacks": travelling}
        self._tuner, self._project = tuner, Path(tuner.project_dir)
        executor, max_parallel = tuner.executor, tuner.max_parallel
        self._own = LocalExecutor(max_parallel) if executor == "local" else None
        self._executor: Any = self._own or executor
        self._max_open = self._own.workers if self._own else max_parallel or sys.maxsize
        tuner.time.at_once = min(self._max_open, len(tuner.hypermodel.batch_sizes))
        self._search: Any = None  # What travels with each task, or the executor's reference to it.
        self._open: list[tuple[Any, Run]] = []  # Each with the future of its task.
        self._waiting: list[tuple[Task, Run]] = []

    @classmethod
    def of(
        cls, tuner: Any, call: FitCall
    ) -> "contextlib.AbstractContextManager[ParallelTrials | None]":
        """Open what runs the trials of a tuner in other processes, None where they run here."""
        if tuner.executor is None:
            return contextlib.nullcontext()
        if tuner.executor == "local" and gpu_in_use():
            tuner.progress.say(_GPU_IN_USE)
        return contextlib.closing(cls(tuner, call))

    def close(self) -> None:
        for future, _ in self._open:
            with contextlib.suppress(Exception):  # An engine may be gone.
                future.cancel()
        if self._own is not None:
            self._own.close()
        shutil.rmtree(self._project / _DATA_FOLDER, ignore_errors=True)

    def run(self) -> None:
        """Submit executions and keep their results, until no trial is left."""
        self._tuner.on_search_begin()
        self._search = self._pickle_search()
        self._tuner.oracle.ongoing_trials.clear()  # Of a search that was interrupted here.
        while self._submit():
            self._keep_ended()
        self._tuner.on_search_end()

    def _submit(self) -> bool:
        """Submit the next execution of each trial, and open further trials; False at the end."""
        while self._waiting:
            self._submit_task(*self._waiting.pop(0))
        while len(self._open) < self._max_open and not self._is_deciding():
            # None where results decide on it too.
            trial = self._tuner.oracle.create_trial(uuid.uuid4().hex)
            if trial.status != TrialStatus.RUNNING:
                break
            run = self._trial(trial)
            if (task := next(run, None)) is not None:
                self._submit_task(task, run)
        return bool(self._open)

    def _submit_task(self, task: Task, run: Run) -> None:
        try:
            self._open.append((self._executor.submit(run_task, self._search, task), run))
        except Exception as error:  # Whatever the engine raises.
            raise self._engine_error("accepts no more tasks", error) from error

    def _is_deciding(self) -> bool:
        """Return whether an execution runs that makes the plan for all."""
        if not self._open or self._completed() or (self._project / PLAN_NAME).exists():
            return False
        hypermodel = self._tuner.hypermodel
        asked = (hypermodel.micro_batch_size, hypermodel.steps_per_execution)
        return "auto" in asked or not hypermodel.dtype_policies

    def _completed(self) -> str | None:
        """Return a trial that has completed, whose record of the search holds for all."""
        return next((record.trial_id for record in completed_trials(self._project)), None)

    def _keep_ended(self) -> None:
        """Keep the results of the executions that have ended; wait a moment where none has."""
        ended, errors = [], []
        for future, run in self._open:
            try:
                if future.done():
                    ended.append((future, run))
            except (Exception, CancelledError) as error:  # Whatever the engine raises.
                errors.append(self._engine_error("does not answer", error))
        if not ended and not errors:
            time.sleep(_CHECK_S)
        ended_trials = len(self._tuner.oracle.ended_trials)
        self._tuner.progress.show_counts(len(self._open), ended=ended_trials)
        # All that has completed is written before more is asked of an executor that may fail.
        for future, run in ended:
            self._open = [one for one in self._open if one[1] is not run]
            try:
                self._waiting.append((run.send(future), run))
            except StopIteration:
                pass
            except Exception as error:  # After which no other trial would fare better.
                errors.append(error)
        if errors:
            raise errors[0]

    def _trial(self, trial: Any) -> Run:
        """Ask for the executions of a trial, one after the other, and keep what each gave."""
        tuner = self._tuner
        asked = tuner.plan_executions(trial)
        files, begun_s = TrialFiles(tuner, trial), time.monotonic()
        completed, lost, result = len(files.begin_attempt()), None, TaskResult({})
        tuner.on_trial_begin(trial)
        size = trial.hyperparameters.get("batch_size")
        while completed < files.executions:
            if completed and not tuner.time.fits(size):
                break  # A later search trains the others.
            submitted_s = time.monotonic()
            attempt = 0 if lost is None else 1
            sent = self._files_for(files)
            run = asked._replace(executions=completed + 1)
            result = self._result_of(
                (yield Task(sent, trial.trial_id, run, attempt)), again=lost is not None
            )
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
                    failure = _lost_twice(lost, result)
                files.record_failure(tuner.hypermodel, trial.hyperparameters, failure)
            tuner.forget_other_policies()
            lost, record = None, files.record()
            if record is None and result.status == "completed":
                completed = 0
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
        tuner.show_begun(trial, took_s=time.monotonic() - begun_s)
        tuner.conclude(trial, files)
        tuner.on_trial_end(trial)

    def _result_of(self, future: Any, *, again: bool) -> TaskResult:
        try:
            result = future.result()
            if not isinstance(result, TaskResult):
                raise TypeError(f"a task returned {type(result).__name__} instead of its result")
            return result
        except (Exception, CancelledError) as error:  # Whatever the engine raises.
            if again and isinstance(error, ConnectionError):
                raise self._engine_error("does not answer", error) from error
            text = f"{type(error).__name__}: {error}".strip(" :")
            known = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text) is not None
            return TaskResult({}, "lost", text, out_of_memory=known)

    def _files_for(self, files: TrialFiles) -> dict[str, bytes]:
        """Read what an execution needs: of the search, of its trial, and one that completed."""
        project, trial_ids = self._project, {files.trial_id, self._completed() or files.trial_id}
        found = [project / RECORD_NAME, project / PLAN_NAME]
        found += [project / f"trial_{i}" / n for i in trial_ids for n in (RECORD_NAME, STATE_NAME)]
        sent = {f.relative_to(project).as_posix(): f.read_bytes() for f in found if f.exists()}
        if (files.folder / CHECKPOINT_NAME).exists():  # A mark: its weights stay here.
            sent[f"{files.folder.name}/{CHECKPOINT_NAME}"] = b""
        return sent

    def _write(self, result: TaskResult) -> None:
        # A trial counts by its record, which is written after its weights.
        for name, content in sorted(result.files.items(), key=lambda file: RECORD_NAME in file[0]):
            path = Path(name)
            # The oracle's own, and the environment of the first execution that completed.
            earlier = name == RECORD_NAME and self._completed() is not None
            if name == PLAN_NAME:  # Tasks that ran at the same time may each have changed it.
                known = load_if_readable(Plan, self._project / path)
                number = json.loads(content)["record"]["number"]
                earlier = known is not None and number < known.number
            if path.name != STATE_NAME and not earlier:
                write_whole_file(self._project / path, content)

    def _engine_error(self, what: str, error: BaseException) -> RuntimeError:
        kind = type(self._executor)
        return RuntimeError(
            f"The executor {kind.__module__}.{kind.__qualname__} {what}: restart it and run the "
            f"same script again. Nothing that completed is lost: the search in {self._project} "
            f"continues from there. Received: {failure_text(error)}"
        )

    def _pickle_search(self) -> Any:
        """Pickle the tuner, without its trials, and the data: once for all tasks."""
        folder = (self._project / _DATA_FOLDER).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        tuner, (arguments, keywords) = self._tuner, self._given
        put = getattr(self._executor, "put", None)
        trials, tuner.oracle.trials = tuner.oracle.trials, {}
        whole = execute, tuner, arguments, keywords
        try:
            pickled = cloudpickle.dumps(whole) if put else mapped_pickle(whole, folder)
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
        try:
            return put(pickled) if put else pickled
        except Exception as error:  # Whatever the engine raises.
            raise self._engine_error("did not accept the data", error) from error


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # As above.
        return False
    return True


def _lost_twice(*lost: TaskResult) -> Exception:
    """Make the failure of an execution that was lost twice, with both causes."""
    causes = " and by ".join(textwrap.shorten(one.text, 120) for one in lost)
    kind = MemoryError if any(one.out_of_memory for one in lost) else RuntimeError
    error = kind(f"The training run was lost twice, by {causes}")
    error.add_note("\n".join(one.text for one in lost))
    return error


def execute(
    project: Path, task: Task, tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[str, str]:
    """Run a task in a folder with what it needs of the search; return its status, and an error."""
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
    except Exception as error:  # Whatever a training raises is recorded, and told to the search.
        TrialFiles(tuner, trial).record_failure(hypermodel, trial.hyperparameters, error)
        mistake = isinstance(error, (InputError, keras_tuner.errors.FatalError))
        return ("mistake", str(error)) if mistake else ("failed", failure_traceback(error))
    finally:
        write_trial(trial, project)  # Training may have declared more hyperparameters.
    return "completed", ""


def explored_space(tuner: Any) -> Any:
    """Find the search space in another process, so that this one never takes the device."""
    with Worker(worker_device()) as worker:
        return worker.call(tuner.explore)
