"""Trials that failed: their record, and what is said where none completed."""

import dataclasses
from pathlib import Path
from typing import Any

from kbatch.device.failures import failure_status, failure_text, failure_traceback
from kbatch.records.training_run import ExecutionRecord
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.search.trial_files import TrialFiles
from kbatch.study.decision import missing_reason, what_to_do
from kbatch.study.loading import load_study
from kbatch.study.names import outcome
from kbatch.study.study import Study


def record_failure(
    files: TrialFiles, hypermodel: BatchSizeHyperModel, hp: Any, error: BaseException
) -> None:
    """Record why a trial ended, unless its last execution has done so.

    It has not where the model could not be built, or where its process died.
    """
    record = files.record()
    executions = record.executions if record else ()
    last = executions[-1] if executions else None
    ended = {
        "status": failure_status(error),
        "failure": failure_text(error),
        "traceback": failure_traceback(error),
    }
    if last is not None and last.status == "running":
        files.write(len(executions) - 1, dataclasses.replace(last, **ended))
    elif last is None or last.status == "completed":
        unbuilt = _unbuilt(hypermodel, hp, len(executions))
        files.write(len(executions), dataclasses.replace(unbuilt, **ended))


def _unbuilt(hypermodel: BatchSizeHyperModel, hp: Any, number: int) -> ExecutionRecord:
    """Return what is known of an execution without its model."""
    batch_size = hp.get("batch_size")
    # Under "auto" it is found when the training begins.
    micro_batch_size = (
        None
        if hypermodel.micro_batch_size == "auto"
        else min(batch_size, hypermodel.micro_batch_size or batch_size)
    )
    return ExecutionRecord(
        status="running",
        seed=None if hypermodel.seed is None else hypermodel.seed + number,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        dtype_policy=hp.values.get("dtype_policy", hypermodel.dtype_policies[0]),
        optimizer=None,
        loss_scaled=None,
        learning_rate=None,
        learning_rate_scaling=hypermodel.learning_rate_scaling,
        jit_compile=None,
    )


_MOST_CAUSES = 5


def no_best_trial(project: Path) -> str:
    """Word why a project has no best trial, and what to do."""
    try:
        study = load_study(project)
    except FileNotFoundError:
        study = Study(project.name, ())
    if not study.trials:
        return f"There is no best trial: call `search` first. Received: no trial in {project}."
    return (
        f"There is no best trial: {missing_reason(study)}. {what_to_do(study)} Trials that failed "
        "are kept as results: give another `project_name`, or `overwrite=True`, to run them again. "
        f"Received: {'; '.join(_causes(study))}."
    )


def _causes(study: Study) -> list[str]:
    causes = [f"batch size {t.batch_size}: {t.failure or outcome(t)}" for t in study.trials]
    more = len(causes) - _MOST_CAUSES
    return causes[:_MOST_CAUSES] + ([f"{more} more"] if more > 0 else [])
