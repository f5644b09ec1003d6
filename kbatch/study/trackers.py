"""A study in an experiment tracker, MLflow or Weights & Biases, written from its records.

The study is a run, and so is each execution that has ended. A run is found again by its study, its
trial and the number of its execution: an execution that is there is not written again.
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
from kbatch.study.decision import Decision
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, judged_column, single_runs, trial_row

# Columns of an execution that were given or found before training; the other numbers were measured.
_SETTINGS = ("trial_id", "run", "seed", "batch_size", "micro_batch_size")
_SETTINGS += ("accumulation_steps", "steps_per_execution", "dtype_policy", "optimizer")
_SETTINGS += ("learning_rate",)


class TrackedRun(NamedTuple):
    """A study or an execution, as a tracker shows it in a run."""

    key: str  # Within the study: "" for itself, "0003-0" for the first execution of trial 0003.
    name: str
    settings: dict[str, object]
    metrics: dict[str, float]
    status: str  # As in a record.
    text: str  # The decision of a study, or why training failed.
    took_s: float
    epochs: tuple[tuple[float, dict[str, float]], ...] = ()  # Seconds until its end, and metrics.


def tracked_runs(
    name: str, trials: Sequence[TrialRecord], search: SearchRecord | None, decision: Decision
) -> list[TrackedRun]:
    """List the study and its executions; one that trains, or will again, is left out."""
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
    if (chosen := decision.trial) is not None:
        metrics = _measured(chosen, trial_row(chosen)) | {"batch_size": float(chosen.batch_size)}
    metrics |= {"trials": float(len(trials)), "executions": float(len(executions))}
    text = " ".join(decision.page.sentences)
    took_s = sum(run.took_s for run in executions)
    return [TrackedRun("", name, settings, metrics, "completed", text, took_s), *executions]


def _execution_run(trial: TrialRecord, number: int) -> TrackedRun:
    """Make the run of the only execution of a trial, which has this number."""
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
        # A column of the table, such as `samples_per_second`, is of the whole execution.
        known = {n: float(v) for n, v in values.items() if v is not None and n not in metrics}
        epochs.append((spent_s, known))
    return TrackedRun(
        key=f"{trial.trial_id}-{number}",
        name=f"batch {trial.batch_size}, trial {trial.trial_id}, run {number}",
        settings=settings,
        metrics=metrics,
        status=trial.status,
        text=trial.failure or "",
        took_s=execution.total_s or execution.train_s or 0.0,
        epochs=tuple(epochs),
    )


def _measured(trial: TrialRecord, row: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a row that are no settings, and the metrics of the best epoch."""
    found = {f"best_epoch/{_allowed(name)}": value for name, value in trial.metrics.items()}
    if (column := judged_column(trial.objective)) and trial.judged_value is not None:
        found[_allowed(column)] = trial.judged_value
    numbers = {n: v for n, v in row.items() if n not in _SETTINGS and isinstance(v, (int, float))}
    return {n: float(v) for n, v in (found | numbers).items() if math.isfinite(v)}


def _allowed(name: str) -> str:
    """Replace what MLflow does not allow in a name."""
    return re.sub(r"[^\w\-. ]", "_", name)[:200]


def check_tracker(tracker: str) -> None:
    """Check that kbatch writes to a tracker, and that it is installed."""
    if tracker not in ("mlflow", "wandb"):
        raise ValueError(f"`tracker` must be 'mlflow' or 'wandb'. Received: tracker={tracker!r}.")
    found = importlib.util.find_spec(tracker)
    # A folder of that name, such as W&B makes for its runs, has no origin.
    if found is None or found.origin is None:
        raise ImportError(f"The tracker {tracker!r} is not installed: pip install {tracker}.")


def log_runs(tracker: str, runs: Sequence[TrackedRun], machine: EnvironmentRecord | None) -> str:
    """Write what a tracker does not have yet of a study and its runs; return where it is shown."""
    # What no other study has, and what stays when this one continues. Searches that begin in one
    # second on many hosts may differ in their load alone.
    begun: Any = machine
    of_begin = begun and (begun.created_at, begun.command, begun.platform, begun.load_average)
    begun_ms = begun and round(1000 * datetime.fromisoformat(begun.created_at).timestamp())
    identity = hashlib.sha256(repr((runs[0].name, of_begin)).encode()).hexdigest()[:12]
    if tracker == "mlflow":
        return _log_to_mlflow(runs, identity, begun_ms)
    return _log_to_wandb(runs, identity)


def _log_to_mlflow(runs: Sequence[TrackedRun], identity: str, begun_ms: int | None) -> str:
    mlflow = importlib.import_module("mlflow")
    client, entities = mlflow.MlflowClient(), mlflow.entities  # The user's active run stays.
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or runs[0].name
    if experiment := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        name = client.get_experiment(experiment).name
    else:
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
    if client.get_experiment(experiment).lifecycle_stage == "deleted":
        raise ValueError(
            f"The MLflow experiment {name!r} was deleted, and MLflow keeps its name: restore it "
            f"with `mlflow experiments restore -x {experiment}`, or set the environment variable "
            f"MLFLOW_EXPERIMENT_NAME to another name. Received: experiment {experiment}."
        )
    its = f"tags.`kbatch.study` = '{identity}'"
    listed = mlflow.search_runs([experiment], its, output_format="list")
    there = {run.data.tags["kbatch.run"]: run for run in listed}
    for run in runs:
        found = there.get(run.key)
        if found is not None and run.key:
            if found.data.tags.get("kbatch.status") == run.status:
                continue
            # It trained again, or writing it was cut off: MLflow changes no parameter or point.
            client.delete_run(found.info.run_id)
        if found is None or run.key:
            tags = {"kbatch.study": identity, "kbatch.run": run.key}
            tags |= {"mlflow.parentRunId": there[""].info.run_id} if run.key else {}
            # Records have durations and no times of day: each begins with the search.
            found = client.create_run(experiment, begun_ms, tags, run_name=run.name)
            there[run.key] = found
        run_id, start_ms = found.info.run_id, found.info.start_time
        end_ms = start_ms + round(1000 * run.took_s)
        points = [
            (*one, start_ms + round(1000 * spent_s), step)
            for step, (spent_s, values) in enumerate(run.epochs)
            for one in values.items()
        ]
        # The numbers of a study change with its executions.
        step = max(len(run.epochs) - 1, 0) if run.key else int(run.metrics["executions"])
        points += [(*one, end_ms, step) for one in run.metrics.items()]
        tags = {"mlflow.note.content": run.text[:5000]}
        settings = {n: str(value)[:5000] for n, value in run.settings.items() if value is not None}
        if not run.key:  # A resumed search may change them, and no parameter can change.
            tags, settings = tags | settings, {}
        kinds = (entities.Metric, points), (entities.Param, settings.items())
        metrics, params = ([kind(*one) for one in found] for kind, found in kinds)
        client.log_batch(run_id, metrics, params, [entities.RunTag(*one) for one in tags.items()])
        client.set_terminated(run_id, "FINISHED" if run.status == "completed" else "FAILED", end_ms)
        client.set_tag(run_id, "kbatch.status", run.status)  # The last, so that all is there.
    return f"{mlflow.get_tracking_uri()}, experiment {name}"


def _log_to_wandb(runs: Sequence[TrackedRun], identity: str) -> str:
    wandb = importlib.import_module("wandb")
    name = runs[0].name
    project = os.environ.get("WANDB_PROJECT") or re.sub(r"[^\w\-.]", "-", name)[:100]
    group = f"{name} ({identity[:6]})"
    folder = Path(os.environ.get("WANDB_DIR", "."), "wandb")
    for run in runs:
        run_id = f"{identity}-{run.key or 'study'}"
        # W&B answers without a server too, so what was written stands in its folders.
        marks = folder.glob(f"*run-*-{run_id}/kbatch.txt")
        if run.key and any(mark.read_text(encoding="utf-8") == run.status for mark in marks):
            continue
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        given = {"project": project, "group": group, "name": run.name, "id": run_id}
        # Beside any run of the user's own.
        with wandb.init(**given, resume="allow", reinit="create_new", settings=settings) as live:
            ended = {"status": run.status, "text": run.text}
            live.config.update(run.settings | ended, allow_val_change=True)
            live.define_metric("*", step_metric="epoch")
            for number, (_, values) in enumerate(run.epochs):
                live.log({"epoch": number, **values})
            live.summary.update(run.metrics)
        Path(live.dir).with_name("kbatch.txt").write_text(run.status, encoding="utf-8")
    return f"project {project}, group {group}"
