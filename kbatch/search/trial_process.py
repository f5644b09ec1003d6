"""The executions of a trial, in this process or in that of a task."""

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.device.failures import failure_traceback
from kbatch.device.memory import worker_device
from kbatch.device.worker import Worker
from kbatch.errors import InputError
from kbatch.library_internals import (
    build_and_fit,
    fail_at_once_without_memory,
    move_project,
    trial_callbacks,
    tuner_callback,
)
from kbatch.search.executors import Task
from kbatch.search.plan import PlanHalved
from kbatch.search.progress import FitReporter
from kbatch.search.trial_files import TrialFiles
from kbatch.search.trial_states import write_trial


def explored_space(tuner: Any) -> tuple[keras_tuner.HyperParameters, Any]:
    """Find the search space in another process, so that this one never takes the device."""
    with Worker(worker_device()) as worker:
        return worker.call(_explore, tuner)


def execute(
    tell: Callable[[Mapping[str, Any]], None],
    project: Path,
    task: Task,
    tuner: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> tuple[str, str]:
    """Run a task in a folder with what it needs of the search; return its status, and an error."""
    fail_at_once_without_memory()
    oracle, hypermodel = tuner.oracle, tuner.hypermodel
    move_project(tuner, project)
    oracle.reload()
    hypermodel._take_over(project)
    tuner.executions_per_trial = task.executions
    trial = oracle.trials.get(task.trial_id)
    if trial is None:
        return "failed", f"The state of trial {task.trial_id} could not be read."
    try:
        run_executions(tell, tuner, trial, arguments, keywords)
    except Exception as error:
        TrialFiles(tuner, trial).record_failure(hypermodel, trial.hyperparameters, error)
        mistake = isinstance(error, (InputError, keras_tuner.errors.FatalError))
        return ("mistake", str(error)) if mistake else ("failed", failure_traceback(error))
    finally:
        write_trial(trial, project)  # Training may have declared more hyperparameters.
    return "completed", ""


def _explore(tuner: Any) -> Any:
    explored = tuner._explore()
    return tuner.oracle.get_space(), explored


def run_executions(
    tell: Callable[[Mapping[str, Any]], None],
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
        ran_out = True
        while ran_out:
            callbacks = trial_callbacks(tuner, trial, given, number)
            reporter = FitReporter(tell, execution=number, executions=files.executions)
            callbacks += [tuner_callback(tuner, trial), reporter]
            tuner.hypermodel._begin_execution(trial.hyperparameters, number)
            with contextlib.suppress(PlanHalved):
                build_and_fit(tuner, trial, *arguments, callbacks=callbacks, **keywords)
                ran_out = False
            if ran_out:  # It is gone, with the frames that hold what its last step held.
                gc.collect()
                files.begin_attempt()
        record = files.record()
        if record is None or record.status != "completed":
            return
