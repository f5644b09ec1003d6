"""A search whose executions are tasks of an executor, several at a time."""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import socket
import sys
import textwrap
import time
import uuid
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import keras_tuner
import tensorflow as tf
from keras_tuner.engine.trial import TrialStatus

from kbatch.device.failures import failure_text
from kbatch.device.worker import MappedPickles, WorkerDied
from kbatch.errors import InputError
from kbatch.records.json_codec import load_if_readable, write_whole_file
from kbatch.records.search import PLAN_NAME, RECORD_NAME, Plan
from kbatch.search.executors import LocalExecutor, Task, TaskResult, run_task
from kbatch.search.live_plot import LivePlot
from kbatch.search.trial_files import (
    CHECKPOINT_NAME,
    STATE_NAME,
    TrialFiles,
    check_not_moved,
    completed_trials,
    same_settings,
)
from kbatch.search.trial_process import execute
from kbatch.training.fit_call import FitCall

# Large arrays of the data, in the project directory while the search runs.
_DATA_FOLDER = ".kbatch-data"
_CHECK_S = 0.05
# Records of other trials that an execution is compared with.
_COMPARED = 3
# What engines say of a task that they ended for want of memory.
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|oom.?kill", re.IGNORECASE)


@dataclasses.dataclass(eq=False)
class _OpenTrial:
    """A trial that was handed out and has not ended."""

    trial: Any
    files: TrialFiles
    completed: int  # Executions, of those that it is to have.
    begun_s: float
    future: Any = None  # Of the execution that runs; None where the next is to be submitted.
    lost: TaskResult | None = None  # How the present execution was lost, the first time.


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
        executor, max_parallel = tuner._executor, tuner._max_parallel
        self._own = LocalExecutor(max_parallel) if executor == "local" else None
        self._executor: Any = self._own or executor
        self._max_open = self._own.workers if self._own else max_parallel or sys.maxsize
        self._search: Any = None  # What travels with each task, or the executor's reference to it.
        self._open: list[_OpenTrial] = []
        self._first_completed: str | None = None  # Its record of the search holds for all.
        self._error: Exception | None = None  # After which no other trial would fare better.

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(Exception):  # An engine may be gone.
                one.future.cancel()
        if self._own is not None:
            self._own.close()
        shutil.rmtree(self._project / _DATA_FOLDER, ignore_errors=True)

    def run(self) -> None:
        """Submit executions and keep their results, until no trial is left."""
        self._search = self._pickle_search()
        self._tuner.oracle.ongoing_trials.clear()  # Of a search that was interrupted here.
        completed = next(completed_trials(self._project), None)
        self._first_completed = completed and completed.trial_id
        while self._submit():
            # All that has completed is written before more is asked of an executor that may fail.
            for one in self._ended():
                self._keep_result(one)
            if self._error is not None:
                raise self._error

    def _submit(self) -> bool:
        """Submit the next execution of each trial, and open further trials; False at the end."""
        for one in list(self._open):
            if one.future is None:
                self._submit_next(one)
        while len(self._open) < self._max_open and not self._is_deciding():
            # None where results decide on it too.
            trial = self._tuner.oracle.create_trial(uuid.uuid4().hex)
            if trial.status != TrialStatus.RUNNING:
                break
            self._tuner._plan_executions(trial)
            files = TrialFiles(self._tuner, trial)
            completed = len(files.begin_attempt())
            self._tuner.on_trial_begin(trial)
            self._open.append(_OpenTrial(trial, files, completed, time.monotonic()))
            self._submit_next(self._open[-1])
        return bool(self._open)

    def _is_deciding(self) -> bool:
        """Return whether an execution runs that makes the plan for all."""
        known = self._first_completed or (self._project / PLAN_NAME).exists()
        if not self._open or known:
            return False
        hypermodel = self._tuner.hypermodel
        asked = (hypermodel.micro_batch_size, hypermodel.steps_per_execution)
        return "auto" in asked or not hypermodel.dtype_policies

    def _submit_next(self, one: _OpenTrial) -> None:
        """Submit the next execution of a trial, or end the trial."""
        number, executions = one.completed + 1, one.files.executions
        if number > executions:
            self._end_trial(one)
            return
        task = Task(
            self._files_for(one),
            one.trial.trial_id,
            executions=number,
            attempt=0 if one.lost is None else 1,
        )
        try:
            one.future = self._executor.submit(run_task, self._search, task)
        except Exception as error:  # Whatever the engine raises.
            raise self._engine_error("accepts no more tasks", error) from error

    def _ended(self) -> list[_OpenTrial]:
        """Find the trials whose execution has ended; wait a moment where there is none."""
        ended = []
        for one in self._open:
            try:
                if one.future.done():
                    ended.append(one)
            except (Exception, CancelledError) as error:  # Whatever the engine raises.
                self._error = self._engine_error("does not answer", error)
        if not ended and self._error is None:
            time.sleep(_CHECK_S)
        self._show()
        return ended

    def _show(self) -> None:
        """Show how far the one trial is that this host runs, or how many there are."""
        progress = self._tuner._progress
        if self._own is None or self._own.workers > 1:
            progress.show_counts(len(self._open), ended=len(self._tuner.oracle.ended_trials))
            return
        while not self._own.told.empty():
            told, (one,) = self._own.told.get(), self._open
            # Its process knows of no later execution.
            part = (one.completed + 1) / one.files.executions
            progress.show(**{**told, "share": told["share"] * part})

    def _keep_result(self, one: _OpenTrial) -> None:
        """Keep the result of an execution, and end its trial where none follows."""
        files, trial = one.files, one.trial
        result, one.future = self._result_of(one), None
        if result is None:
            return
        if result.status == "lost" and one.lost is None:
            one.lost = result
            size = f"batch size {trial.hyperparameters.get('batch_size')}"
            cause = textwrap.shorten(result.text, 300)
            self._tuner._progress.say(
                f"An execution of {size} was lost and is submitted again: {cause}"
            )
            return
        check_not_moved(self._project, trial.trial_id)
        self._write(result)
        if state := result.files.get(f"{files.folder.name}/{STATE_NAME}"):
            config = json.loads(state)["hyperparameters"]
            trial.hyperparameters = keras_tuner.HyperParameters.from_config(config)
        if result.status == "mistake":
            self._error = keras_tuner.errors.FatalValueError(result.text)
            return
        if result.status in ("lost", "died"):
            failure = WorkerDied(result.exit_code, result.text)
            if result.status == "lost" and one.lost is not None:
                failure = _lost_twice(one.lost, result)
            files.record_failure(self._tuner.hypermodel, trial.hyperparameters, failure)
        record = files.record()
        if record is not None and any(run.status == "completed" for run in record.executions):
            self._first_completed = self._first_completed or trial.trial_id
        one.lost = None
        one.completed += result.status == "completed"
        whole = record is not None and record.status == "completed"
        if not whole or one.completed == files.executions:
            trial.message = result.text if result.status == "failed" else None
            self._end_trial(one, result.host)

    def _result_of(self, one: _OpenTrial) -> TaskResult | None:
        """Return the result of a task; None where its engine is gone."""
        try:
            result = one.future.result()
            if not isinstance(result, TaskResult):
                raise TypeError(f"a task returned {type(result).__name__} instead of its result")
            return result
        except (Exception, CancelledError) as error:  # Whatever the engine raises.
            if one.lost is not None and isinstance(error, ConnectionError):
                self._error = self._engine_error("does not answer", error)
                return None
            text = f"{type(error).__name__}: {error}".strip(" :")
            known = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text) is not None
            return TaskResult({}, "lost", text, out_of_memory=known)

    def _end_trial(self, one: _OpenTrial, host: str = "") -> None:
        self._tuner._show_begun(
            one.trial,
            took_s=time.monotonic() - one.begun_s,
            at_once=len(self._open),
            where=f" on {host}" if host not in ("", socket.gethostname()) else "",
        )
        self._open.remove(one)
        self._tuner._conclude(one.trial, one.files)
        self._tuner.on_trial_end(one.trial)

    def _files_for(self, one: _OpenTrial) -> dict[str, bytes]:
        """Read what an execution needs: of its trial, and of few that it is compared with."""
        project, own = self._project, one.trial.trial_id
        alike = (
            trial_id
            for trial_id, other in sorted(self._tuner.oracle.trials.items())
            if trial_id != own
            and same_settings(other, one.trial)
            and (project / f"trial_{trial_id}" / RECORD_NAME).exists()
        )
        # Few are looked for on disk, however many trials there are.
        trial_ids = {own, *itertools.islice(alike, _COMPARED), self._first_completed or own}
        found = [project / RECORD_NAME, project / PLAN_NAME]
        found += [project / f"trial_{i}" / n for i in trial_ids for n in (RECORD_NAME, STATE_NAME)]
        sent = {f.relative_to(project).as_posix(): f.read_bytes() for f in found if f.exists()}
        if (one.files.folder / CHECKPOINT_NAME).exists():  # A mark: its weights stay here.
            sent[f"{one.files.folder.name}/{CHECKPOINT_NAME}"] = b""
        return sent

    def _write(self, result: TaskResult) -> None:
        # A trial counts by its record, which is written after its weights.
        for name, content in sorted(result.files.items(), key=lambda file: RECORD_NAME in file[0]):
            path = Path(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(
                    "A task may return only files inside the project directory: use the same "
                    f"version of kbatch on all workers. Received: {name}."
                )
            # The oracle's own, and the environment of the first execution that completed.
            earlier = self._first_completed is not None and name == RECORD_NAME
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
            f"goes on from there. Received: {failure_text(error)}"
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
            pickled = cloudpickle.dumps(whole) if put else MappedPickles(folder).dumps(whole)
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
    known = any(one.out_of_memory for one in lost)
    error = (MemoryError if known else RuntimeError)(f"The execution was lost twice, by {causes}")
    error.add_note("\n".join(one.text for one in lost))
    return error
