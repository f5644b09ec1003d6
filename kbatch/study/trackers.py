"""Writing the records of a study to an experiment tracker, MLflow or Weights & Biases.

The study is one run of the tracker, and each training run that has ended is another one. kbatch
finds a run again by its study, trial and number, so it does not write a run twice.
"""

import hashlib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kbatch.records.machine import EnvironmentRecord
from kbatch.records.training_run import SearchRecord
from kbatch.study.decision import Decision, speed_of
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, judged_column, single_runs, trial_row

# Columns that are known before training. All other numbers are measurements.
_SETTINGS = ("trial_id", "run", "seed", "batch_size", "micro_batch_size")
_SETTINGS += ("accumulation_steps", "steps_per_execution", "dtype_policy", "optimizer")
_SETTINGS += ("learning_rate",)


class TrackedRun(NamedTuple):
    """A run of a tracker: a study or one of its training runs."""

    key: str  # Within the study: "" for the study, "0003-0" for the first run of trial 0003.
    name: str
    settings: dict[str, object]
    metrics: dict[str, float]
    status: str  # As in a record.
    text: str  # The decision of a study, or why training failed.
    duration_s: float
    # For each epoch: seconds of training until its end, and metrics.
    epochs: tuple[tuple[float, dict[str, float]], ...] = ()


def tracked_runs(
    name: str, trials: Sequence[TrialRecord], search: SearchRecord | None, decision: Decision
) -> list[TrackedRun]:
    """List the study and its training runs. Runs that have not ended are left out."""
    executions = [
        _execution_run(trial, number)
        for trial, number in single_runs(trials)
        if trial.status not in ("running", "interrupted")
    ]
    settings: dict[str, object] = {}
    if search is not None:
        machine = search.environment
        settings = {**search.settings, "device": machine.device, **machine.versions}
    metrics = {}
    if (answer := decision.trial) is not None:
        row = trial_row(answer, rates=speed_of(decision, answer)[1])
        metrics = _measured(answer, row) | {"batch_size": float(answer.batch_size)}
    metrics |= {"trials": float(len(trials)), "executions": float(len(executions))}
    text = " ".join(decision.page.sentences)
    duration_s = sum(run.duration_s for run in executions)
    return [TrackedRun("", name, settings, metrics, "completed", text, duration_s), *executions]


def _execution_run(trial: TrialRecord, number: int) -> TrackedRun:
    """Return the tracker's run of a trial with a single training run, which has this number."""
    row, (execution,) = trial_row(trial, number), trial.executions
    settings = {name: row[name] for name in _SETTINGS}
    settings["learning_rate_scaling"] = execution.scaling and execution.scaling.rule
    tuned = {n: v for n, v in trial.hyperparameters.items() if n not in OWN_COLUMNS}
    settings |= {f"hp/{_allowed(name)}": value for name, value in tuned.items()}
    metrics, epochs, spent_s = _measured(trial, row), [], 0.0
    for epoch in execution.epochs:
        spent_s += epoch.train_s
        values = {_allowed(name): epoch.finite(name) for name in epoch.metrics}
        values["epoch/noise_scale"] = execution.noise_scale_curve.get(epoch.epoch)
        if epoch.train_s:
            values["epoch/samples_per_second"] = epoch.examples / epoch.train_s
        # Names of columns, such as `samples_per_second`, are values of all epochs.
        known = {n: float(v) for n, v in values.items() if v is not None and n not in metrics}
        epochs.append((spent_s, known))
    return TrackedRun(
        key=f"{trial.trial_id}-{number}",
        name=f"batch {trial.batch_size}, trial {trial.trial_id}, run {number}",
        settings=settings,
        metrics=metrics,
        status=trial.status,
        text=trial.failure or "",
        duration_s=execution.total_s or execution.train_s or 0.0,
        epochs=tuple(epochs),
    )


def _measured(trial: TrialRecord, row: Mapping[str, object]) -> dict[str, float]:
    """Return the measurements of a row, and the metrics of the best epoch."""
    metrics = {f"best_epoch/{_allowed(name)}": value for name, value in trial.metrics.items()}
    if (column := judged_column(trial.objective)) and trial.judged_value is not None:
        metrics[_allowed(column)] = trial.judged_value
    numbers = {n: v for n, v in row.items() if n not in _SETTINGS and isinstance(v, (int, float))}
    return {n: float(v) for n, v in (metrics | numbers).items() if math.isfinite(v)}


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in a name."""
    return re.sub(r"[^\w\-. ]", "_", name)[:200]


def check_tracker(tracker: str) -> None:
    """Check the name of a tracker, and that it is installed."""
    if tracker not in ("mlflow", "wandb"):
        raise ValueError(f"`tracker` must be 'mlflow' or 'wandb'. Received: tracker={tracker!r}.")
    spec = importlib.util.find_spec(tracker)
    # A folder of that name, such as the folder of W&B's runs, has no origin.
    if spec is None or spec.origin is None:
        raise ImportError(f"The tracker {tracker!r} is not installed: pip install {tracker}.")


def log_runs(tracker: str, runs: Sequence[TrackedRun], machine: EnvironmentRecord | None) -> str:
    """Write the new runs of a study to a tracker, and return their server or project."""
    # The identity of a study stays when its search continues. Searches that begin in the same
    # second on many hosts may differ only in the load average.
    env: Any = machine
    begin = env and (env.created_at, env.command, env.platform, env.load_average)
    began_ms = env and round(1000 * datetime.fromisoformat(env.created_at).timestamp())
    identity = hashlib.sha256(repr((runs[0].name, begin)).encode()).hexdigest()[:12]
    if tracker == "mlflow":
        return _log_to_mlflow(runs, identity, began_ms)
    return _log_to_wandb(runs, identity)


def _log_to_mlflow(runs: Sequence[TrackedRun], identity: str, began_ms: int | None) -> str:
    mlflow = importlib.import_module("mlflow")
    client, entities = mlflow.MlflowClient(), mlflow.entities  # The user's active run stays active.
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or runs[0].name
    if experiment := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        name = client.get_experiment(experiment).name
    else:
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
    if client.get_experiment(experiment).lifecycle_stage == "deleted":
        raise ValueError(
            f"The MLflow experiment {name!r} was deleted, and MLflow reserves its name. Restore it "
            f"with `mlflow experiments restore -x {experiment}`, or set the environment variable "
            f"MLFLOW_EXPERIMENT_NAME to another name. Received: experiment {experiment}."
        )
    query = f"tags.`kbatch.study` = '{identity}'"
    listed = mlflow.search_runs([experiment], query, output_format="list")
    logged = {run.data.tags["kbatch.run"]: run for run in listed}
    for run in runs:
        written = logged.get(run.key)
        if written is not None and run.key:
            if written.data.tags.get("kbatch.status") == run.status:
                continue
            # The run was trained again or written in part, and MLflow changes no parameter.
            client.delete_run(written.info.run_id)
        if written is None or run.key:
            tags = {"kbatch.study": identity, "kbatch.run": run.key}
            tags |= {"mlflow.parentRunId": logged[""].info.run_id} if run.key else {}
            # Records have no times of day, so every run begins when the search began.
            written = client.create_run(experiment, began_ms, tags, run_name=run.name)
            logged[run.key] = written
        run_id, start_ms = written.info.run_id, written.info.start_time
        end_ms = start_ms + round(1000 * run.duration_s)
        metrics = [
            entities.Metric(*metric, start_ms + round(1000 * spent_s), step)
            for step, (spent_s, values) in enumerate(run.epochs)
            for metric in values.items()
        ]
        # The steps of a study's metrics are its numbers of training runs.
        step = max(len(run.epochs) - 1, 0) if run.key else int(run.metrics["executions"])
        metrics += [entities.Metric(*metric, end_ms, step) for metric in run.metrics.items()]
        tags = {"mlflow.note.content": run.text[:5000]}
        settings = {n: str(value)[:5000] for n, value in run.settings.items() if value is not None}
        if not run.key:  # A resumed search may change its settings, but parameters cannot change.
            tags, settings = tags | settings, {}
        params = [entities.Param(*item) for item in settings.items()]
        client.log_batch(run_id, metrics, params, [entities.RunTag(*item) for item in tags.items()])
        client.set_terminated(run_id, "FINISHED" if run.status == "completed" else "FAILED", end_ms)
        client.set_tag(run_id, "kbatch.status", run.status)  # Last: it marks a complete run.
    return f"{mlflow.get_tracking_uri()}, experiment {name}"


def _log_to_wandb(runs: Sequence[TrackedRun], identity: str) -> str:
    wandb = importlib.import_module("wandb")
    name = runs[0].name
    project = os.environ.get("WANDB_PROJECT") or re.sub(r"[^\w\-.]", "-", name)[:100]
    group = f"{name} ({identity[:6]})"
    folder = Path(os.environ.get("WANDB_DIR", "."), "wandb")
    for run in runs:
        run_id = f"{identity}-{run.key or 'study'}"
        # W&B may be offline, so a file in its folder marks a run that was written.
        marks = folder.glob(f"*run-*-{run_id}/kbatch.txt")
        if run.key and any(mark.read_text(encoding="utf-8") == run.status for mark in marks):
            continue
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        names = {"project": project, "group": group, "name": run.name, "id": run_id}
        # "create_new" leaves an active run of the user alone.
        with wandb.init(**names, resume="allow", reinit="create_new", settings=settings) as live:
            end = {"status": run.status, "text": run.text}
            live.config.update(run.settings | end, allow_val_change=True)
            live.define_metric("*", step_metric="epoch")
            for number, (_, values) in enumerate(run.epochs):
                live.log({"epoch": number, **values})
            live.summary.update(run.metrics)
        Path(live.dir).with_name("kbatch.txt").write_text(run.status, encoding="utf-8")
    return f"project {project}, group {group}"
