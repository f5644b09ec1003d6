"""The executions of a trial, here or in a process of their own that returns what they took."""

import pickle
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import tensorflow as tf

from kbatch.device.memory import worker_device
from kbatch.device.worker import MappedPickles, UnsendableError, Worker
from kbatch.errors import InputError
from kbatch.library_internals import build_and_fit, move_project, trial_callbacks, tuner_callback
from kbatch.records.training_run import COST_NAMES
from kbatch.search.executors import Task
from kbatch.search.progress import FitProgress, FitReporter
from kbatch.search.resources import measure_memory
from kbatch.search.trial_files import TrialFiles, write_trial_state
from kbatch.study.trial import TrialRecord


class IsolatedTrials:
    """Runs each trial of a search in a fresh process, with the data of the search mapped."""

    def __init__(self, arguments: Sequence[Any], keywords: Mapping[str, Any]):
        check_no_dataset(arguments, keywords, given="isolate=True")
        self._worker = Worker(worker_device())
        # A folder of its own: the worker's pickles replace one another.
        folder = self._worker.folder / "search"
        folder.mkdir()
        try:
            self._data = MappedPickles(folder).dumps((tuple(arguments), dict(keywords)))
        except BaseException as error:
            self._worker.close()
            if not isinstance(error, UnsendableError):
                raise
            raise InputError(
                "With `isolate=True` data and callbacks travel to another process: give arrays or "
                f"a function `batch_size -> tf.data.Dataset`. Received: {error}"
            ) from error

    def close(self) -> None:
        self._worker.close()

    def run(self, tuner: Any, trial: Any, on_event: Callable[[Any], None]) -> Any:
        return self._in_process(_run, tuner, trial, on_event=on_event)

    def _in_process(self, function: Callable[..., Any], *arguments: Any, **on_event: Any) -> Any:
        try:
            return self._worker.call(function, self._data, *arguments, **on_event)
        finally:
            self._worker.restart()


def check_no_dataset(arguments: Sequence[Any], keywords: Mapping[str, Any], *, given: str) -> None:
    """Check that what trials train on can travel to another process."""
    values = keras.tree.flatten([list(arguments), dict(keywords)])
    if any(isinstance(value, tf.data.Dataset) for value in values):
        raise InputError(
            f"With `{given}` a dataset cannot travel to another process: give a function "
            "`batch_size -> tf.data.Dataset` that makes it there, or arrays. "
            "Received: a tf.data.Dataset."
        )


def explored_space(tuner: Any) -> tuple[keras_tuner.HyperParameters, Any]:
    """Find the search space in another process, so that this one never takes the device."""
    with Worker(worker_device()) as worker:
        return worker.call(_explore, tuner)


def _run(tell: Callable[[Any], None], data: bytes, tuner: Any, trial: Any) -> Any:
    arguments, keywords = pickle.loads(data)
    tuner.hypermodel._take_over(Path(tuner.project_dir))
    run_executions(tell, tuner, trial, arguments, keywords)
    return trial.hyperparameters


def execute(project: Path, search: bytes, task: Task) -> tuple[str, str]:
    """Run a task in a folder with what it needs of the search; return its status, and an error."""
    try:
        tuner, arguments, keywords = pickle.loads(search)
    except (FileNotFoundError, PermissionError) as error:
        return "mistake", (
            "Large arrays of a search are read from its project directory, which a worker of the "
            "executor cannot do: give a `directory` on a file system that all hosts share, a "
            "function `batch_size -> tf.data.Dataset` that loads the data there, or an executor "
            f"that holds data, as `kbatch.ray_executor()` does. Received: {error} on "
            f"{socket.gethostname()}."
        )
    except (ImportError, AttributeError) as error:
        return "mistake", (
            "The model, data or callbacks of a search need a module that a worker of the executor "
            "cannot import: install it there, or define their functions and classes in the script "
            f"itself, which travel with it. Received: {type(error).__name__}: {error} on "
            f"{socket.gethostname()}."
        )
    oracle, hypermodel = tuner.oracle, tuner.hypermodel
    move_project(tuner, project)
    oracle.reload()
    oracle.remaining_trials = lambda: task.trials_left
    hypermodel._take_over(project)
    tuner.executions_per_trial = task.executions
    trial = oracle.trials.get(task.trial_id)
    if trial is None and task.trial_id is not None:
        return "failed", f"The state of trial {task.trial_id} could not be read."
    try:
        if trial is None:
            measure_memory(tuner, arguments, keywords)
        else:
            run_executions(lambda _: None, tuner, trial, arguments, keywords)
    except Exception as error:
        if trial is not None:
            TrialFiles(tuner, trial).record_failure(hypermodel, trial.hyperparameters, error)
        mistake = isinstance(error, (InputError, keras_tuner.errors.FatalError))
        return ("mistake", str(error)) if mistake else ("failed", traceback.format_exc())
    finally:
        if trial is not None:  # Training may have declared more hyperparameters.
            write_trial_state(trial, project)
    return "completed", ""


def _explore(tuner: Any) -> Any:
    explored = tuner._explore()
    return tuner.oracle.get_space(), explored


def run_executions(
    tell: Callable[[FitProgress | None], None],
    tuner: Any,
    trial: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> None:
    """Train the model of a trial in the executions that have not completed, until one fails."""
    files = TrialFiles(tuner, trial)
    completed = files.begin_attempt()
    keywords = dict(keywords)
    given = keras.tree.flatten(keywords.pop("callbacks", None) or [])
    for number in range(len(completed), files.executions):
        callbacks = trial_callbacks(tuner, trial, given, number)
        reporter = FitReporter(tell, execution=number, executions=files.executions)
        callbacks += [tuner_callback(tuner, trial), reporter]
        tuner.hypermodel._begin_execution(trial.hyperparameters, number)
        build_and_fit(tuner, trial, *arguments, callbacks=callbacks, **keywords)
        record = files.record()
        if record is None or record.status != "completed":
            return
        if number + 1 < files.executions:  # The end of the last one is that of the trial.
            tell(None)


def trial_result(record: TrialRecord | None) -> tuple[dict[str, float], int] | str:
    """Return the metrics of a trial's best epoch, with its number from 0, or why there is none."""
    if record is None:
        return "Nothing was recorded."
    if record.status != "completed":
        return record.failure or f"The trial ended as {record.status}."
    name, direction = record.objective.name, record.objective.direction
    if record.objective_value is None:
        if name in COST_NAMES:
            return f"The target was never met, so {name} is not known."
        return f"The objective {name} was not finite or not measured."
    measured = {"samples_per_second": record.samples_per_second}
    measured |= {cost: record.cost(cost) for cost in COST_NAMES}
    known = {name: float(value) for name, value in measured.items() if value is not None}
    best = [execution.best_epoch(name, direction) for execution in record.executions]
    step = int(sum(epoch.epoch for epoch in best if epoch) / len(best))
    return record.metrics | known, step
