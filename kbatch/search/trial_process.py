"""The executions of a trial, in this process or in that of a task."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.device.memory import worker_device
from kbatch.device.worker import Worker
from kbatch.errors import InputError
from kbatch.library_internals import build_and_fit, move_project, trial_callbacks, tuner_callback
from kbatch.records.training_run import COST_NAMES
from kbatch.search.executors import Task
from kbatch.search.progress import FitProgress, FitReporter
from kbatch.search.trial_files import TrialFiles, write_trial_state
from kbatch.study.trial import TrialRecord


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
    oracle, hypermodel = tuner.oracle, tuner.hypermodel
    move_project(tuner, project)
    oracle.reload()
    oracle.remaining_trials = lambda: task.trials_left
    hypermodel._take_over(project)
    tuner.executions_per_trial = task.executions
    trial = oracle.trials.get(task.trial_id)
    if trial is None:
        return "failed", f"The state of trial {task.trial_id} could not be read."
    try:
        run_executions(lambda p: p and tell(vars(p)), tuner, trial, arguments, keywords)
    except Exception as error:
        TrialFiles(tuner, trial).record_failure(hypermodel, trial.hyperparameters, error)
        mistake = isinstance(error, (InputError, keras_tuner.errors.FatalError))
        return ("mistake", str(error)) if mistake else ("failed", traceback.format_exc())
    finally:
        write_trial_state(trial, project)  # Training may have declared more hyperparameters.
    return "completed", ""


def _explore(tuner: Any) -> Any:
    explored = tuner._explore()
    return tuner.oracle.get_space(), explored


def run_executions(
    tell: Callable[[FitProgress], None],
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
