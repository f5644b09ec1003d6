"""Experiment trackers: MLflow, Weights & Biases and trackio show a study, from its records."""

import contextlib
import contextvars
import dataclasses
import hashlib
import importlib
import importlib.util
import io
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kbatch.study.answer import answer
from kbatch.study.study import (
    IDENTITY_NAME,
    RECORD_NAME,
    Study,
    ended_part,
    load_study,
    trial_row,
)
from kbatch.study.trial import OWN_COLUMNS, TrialRecord

TRACKERS = ("mlflow", "wandb", "trackio")


def check_trackers(trackers: Any) -> tuple[str, ...]:
    """Return the names of trackers, which must be known and installed."""
    listed = isinstance(trackers, (list, tuple))
    if not listed or not all(name in TRACKERS for name in trackers):
        raise ValueError(
            f"`trackers` must be a list of names out of {', '.join(map(repr, TRACKERS))}. "
            f"Received: trackers={trackers!r}."
        )
    for name in trackers:
        found = importlib.util.find_spec(name)
        # A folder of that name, such as W&B makes for its runs, has no origin.
        if found is None or found.origin is None:
            raise ImportError(
                f"The tracker {name!r} is not installed: pip install {name}. "
                f"Received: trackers={list(trackers)}."
            )
    return tuple(dict.fromkeys(trackers))


class TrackedRun(NamedTuple):
    """A study, a trial or an execution, as a tracker shows it in a run."""

    key: str  # Within the study: "" for itself, "0003" for a trial, "0003/0" for an execution.
    name: str
    settings: dict[str, Any]
    metrics: dict[str, float]
    step: int  # Of these metrics: the last epoch, or how many executions they are of.
    status: str  # As in a record.
    text: str | None  # The answer of a study, or why training failed.
    begun_s: float  # Since 1970, as is the end.
    ended_s: float
    epochs: tuple[tuple[float, dict[str, float]], ...] = ()  # Seconds until its end, and metrics.
    files: tuple[Path, ...] = ()

    @property
    def is_execution(self) -> bool:  # It changes no more, unless it failed and trains again.
        return "/" in self.key


def tracked_runs(
    study: Study, source: Path, *, files: Sequence[Path] = (), ended: bool = True
) -> list[TrackedRun]:
    """List the study, its trials and their executions that have ended, each behind its parent."""
    runs: list[TrackedRun] = []
    for trial in ended_part(study).trials:
        record = source / f"trial_{trial.trial_id}" / RECORD_NAME
        kept = (record,) if record.exists() else ()
        # A record is written when an execution ends.
        ended_s = (record if kept else source).stat().st_mtime
        took_s = [e.total_s or e.train_s or 0.0 for e in trial.executions]
        begun_s = ended_s - sum(took_s)
        runs.append(_trial_run(trial, None, begun_s, ended_s)._replace(files=kept))
        for number, (execution, seconds) in enumerate(zip(trial.executions, took_s, strict=True)):
            alone = dataclasses.replace(trial, executions=(execution,))
            runs.append(_trial_run(alone, number, begun_s, begun_s + seconds))
            begun_s += seconds
    if not runs:
        return []
    settings: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    text = None
    if study.search is not None:
        machine = study.search.environment
        settings = {**study.search.settings, "device": machine.device, **machine.versions}
    if ended:  # To decide takes the longer the more trials there are.
        text = " ".join(filter(None, answer(study)))
        chosen = study.decide().trial
        if chosen is not None:
            metrics = next(run.metrics for run in runs if run.key == chosen.trial_id)
            metrics = {**metrics, "batch_size": chosen.batch_size}
    executions = sum(run.is_execution for run in runs)
    own = [source / name for name in (RECORD_NAME, IDENTITY_NAME)]
    own = [source] if source.is_file() else [file for file in own if file.exists()]
    whole_study = TrackedRun(
        key="",
        name=study.name,
        settings={name: value for name, value in settings.items() if value is not None},
        metrics=metrics | {"trials": len(study.trials), "executions": executions},
        step=executions,
        status="completed" if ended else "running",
        text=text,
        begun_s=min(run.begun_s for run in runs),
        ended_s=max(run.ended_s for run in runs),
        files=(*own, *files),
    )
    return [whole_study, *runs]


# Columns of a trial that were given or found before training; the other numbers were measured.
_SETTINGS = ("batch_size", "micro_batch_size", "accumulation_steps", "dtype_policy", "optimizer")
_SETTINGS += ("learning_rate", "seed")


def _trial_run(
    trial: TrialRecord, number: int | None, begun_s: float, ended_s: float
) -> TrackedRun:
    """Make the run of a trial, or of its only execution, which has this number."""
    row, first = trial_row(trial, number), trial.executions[0]
    settings = {name: row[name] for name in _SETTINGS if row.get(name) is not None}
    if rule := trial.executions[-1].learning_rate_scaling:
        settings["learning_rate_scaling"] = rule
    for name, value in trial.hyperparameters.items():
        if name not in OWN_COLUMNS:
            settings[f"hp/{name}" if name in row else name] = value
    numbers = {n: v for n, v in row.items() if n not in (*_SETTINGS, "execution")}
    metrics = {f"best_epoch/{name}": value for name, value in trial.metrics.items()}
    metrics |= {n: float(v) for n, v in numbers.items() if isinstance(v, (int, float))}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    key, name = trial.trial_id, f"batch {trial.batch_size}, trial {trial.trial_id}"
    step, epochs = len(trial.executions), []
    if number is not None:
        key, name = f"{key}/{number}", f"{name}, execution {number}"
        step, noise, spent_s = max(len(first.epochs) - 1, 0), dict(first.noise_scale_curve), 0.0
        for epoch in first.epochs:
            spent_s += epoch.train_s
            known = {each: epoch.finite(each) for each in epoch.metrics if each not in metrics}
            known["epoch/noise_scale"] = noise.get(epoch.epoch)
            if epoch.train_s:
                known["epoch/samples_per_second"] = epoch.examples / epoch.train_s
            epochs.append((spent_s, {n: float(v) for n, v in known.items() if v is not None}))
    ends = trial.status, trial.failure, begun_s, ended_s
    return TrackedRun(key, name, settings, metrics, step, *ends, tuple(epochs))


# A server that is down is tried again after the next execution: minutes of tries would delay it.
_SHORT_TRIES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def sync(
    study: Study,
    tracker: str,
    source: Path,
    *,
    files: Sequence[Path] = (),
    ended: bool = True,
    written: set[str] | None = None,
) -> str:
    """Write what a tracker has not of a study loaded from `source`; return where it is shown."""
    # A run is found again by the identity of the study and its key, so none is written twice; what
    # `written` holds is not even looked for.
    runs = tracked_runs(study, source, files=files, ended=ended)
    # What no other study has, and what stays when the study is continued.
    parts: list[object] = [study.name]
    if study.search is not None:
        found = study.search.environment
        # Searches that begin in one second on many hosts may differ in their load alone.
        parts += [found.created_at, found.command, found.platform, found.load_average]
    given = study.name, _digest(parts), runs, set() if written is None else written
    missing = _SHORT_TRIES.keys() - os.environ.keys()
    os.environ.update({name: _SHORT_TRIES[name] for name in missing})
    try:
        return _write_to_mlflow(*given) if tracker == "mlflow" else _write_runs(tracker, *given)
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


_STUDY_TAG, _RUN_TAG = "kbatch.study", "kbatch.run"


def _write_to_mlflow(
    name: str, identity: str, runs: Sequence[TrackedRun], written: set[str]
) -> str:
    """Write nested runs by MLflow's client, which leaves its active run and experiment alone."""
    mlflow = importlib.import_module("mlflow")
    client, shown = mlflow.MlflowClient(), mlflow.get_tracking_uri()
    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if experiment:
        name = client.get_experiment(experiment).name
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
    its = f"tags.`{_STUDY_TAG}` = '{identity}'"
    listed = mlflow.search_runs([experiment], its, output_format="list")
    there = {run.data.tags[_RUN_TAG]: run for run in listed}
    for run in runs:
        found, mark = there.get(run.key), _digest(run)
        if found is not None and run.is_execution:
            whole = found.info.status != "RUNNING"  # Else writing it was cut off.
            if whole and found.data.tags.get("kbatch.status") == run.status:
                continue
            client.delete_run(found.info.run_id)
            found = None
        elif found is not None and mark in written:
            continue
        if found is None:
            tags = {_STUDY_TAG: identity, _RUN_TAG: run.key}
            if run.key:
                parent = there[run.key.rpartition("/")[0]]
                tags["mlflow.parentRunId"] = parent.info.run_id
            found = client.create_run(experiment, _ms(run.begun_s), tags, run_name=run.name)
            there[run.key] = found
        _update_mlflow_run(mlflow.entities, client, found, run)
        written.add(mark)
    return f"{shown}, experiment {name}"


def _update_mlflow_run(entities: Any, client: Any, found: Any, run: TrackedRun) -> None:
    """Log what a run of MLflow lacks; the end comes last, so that it shows that all is there."""
    run_id, known = found.info.run_id, found.data
    points = [
        (name, value, _ms(run.begun_s + spent_s), step)
        for step, (spent_s, values) in enumerate(run.epochs)
        for name, value in values.items()
    ]
    points += [(name, value, _ms(run.ended_s), run.step) for name, value in run.metrics.items()]
    metrics = [entities.Metric(_allowed(name), *point) for name, *point in points]
    metrics = [one for one in metrics if known.metrics.get(one.key) != one.value]
    params = {_allowed(name): str(value) for name, value in run.settings.items()}
    new = [entities.Param(name, text) for name, text in params.items() if name not in known.params]
    tags = {"kbatch.status": run.status, "mlflow.note.content": run.text or ""}
    for name, text in params.items():
        # A parameter cannot change, as the sizes of a search that is continued do.
        tag = f"kbatch.now.{name}"
        if known.tags.get(tag, known.params.get(name, text)) != text:
            tags[tag] = text
    client.log_batch(run_id, metrics, new, [entities.RunTag(*tag) for tag in tags.items()])
    listed = client.list_artifacts(run_id) if run.files else ()
    sizes = {file.path: file.file_size for file in listed}
    for file in run.files:
        if sizes.get(file.name) != file.stat().st_size:
            client.log_artifact(run_id, str(file))
    status = {"completed": "FINISHED", "running": "RUNNING"}.get(run.status, "FAILED")
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status, _ms(run.ended_s))


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _allowed(name: str) -> str:
    """Replace what MLflow does not allow in the name of a parameter or metric."""
    parts = re.sub(r"[^\w\-. /]", "_", name).split("/")
    found = "/".join(part for part in parts if part.strip(". "))
    # Names that differ stay different.
    return found if found == name and len(name) <= 250 else f"{found[:240]}_{_digest(name)[:6]}"


def _write_runs(
    tracker: str, name: str, identity: str, runs: Sequence[TrackedRun], written: set[str]
) -> str:
    """Write each execution as a run of a group, and so the study when it has ended."""
    project = os.environ.get("WANDB_PROJECT") if tracker == "wandb" else None
    project = project or re.sub(r"[^\w\-.]", "-", name)[:100]
    group = f"{name} ({identity[:6]})"
    for run in runs:
        ended = not run.key and run.status == "completed"
        if not (run.is_execution or ended):
            continue
        files = {
            f"trial_{one.key}/{file.name}" if one.key else file.name: file
            for one in (runs if ended else ())
            for file in one.files
        }
        # W&B changes no run: a study that was continued is another one, as is an execution that
        # failed and trained again.
        version = _digest((run.metrics, run.text, sorted(files))) if ended else identity
        failed = "" if run.status == "completed" else run.status
        given = {
            "project": project,
            "group": group,
            "name": f"{', '.join(filter(None, (run.name, failed)))} ({version[:6]})",
            "id": "-".join(filter(None, (identity, run.key.replace("/", "-") or version, failed))),
            "config": {**run.settings, "status": run.status, "text": run.text},
        }
        if given["id"] not in written:
            # In a context of its own: trackio ends the run that it finds in the present one.
            contextvars.Context().run(_write_run, tracker, given, run, files)
            written.add(given["id"])
    return f"project {project}, group {group}"


def _write_run(
    tracker: str, given: dict[str, Any], run: TrackedRun, files: Mapping[str, Path]
) -> None:
    module: Any = importlib.import_module(tracker)
    # Its lines about each run would break the display of a search.
    with contextlib.redirect_stdout(io.StringIO()):
        if tracker == "wandb":
            # Without a server nothing but its folder shows that a run was written.
            folder = Path(os.environ.get("WANDB_DIR", "."), "wandb")
            if any(folder.glob(f"offline-run-*-{given['id']}")):
                return
            short = {"init_timeout": 20, "finish_timeout": 30}
            settings = module.Settings(silent=True, console="off", x_disable_stats=True, **short)
            # Beside any run of the user's own.
            live = module.init(**given, resume="allow", reinit="create_new", settings=settings)
            if live.resumed:
                live.finish()
                return
        else:
            config = module.config
            # It knows a run by its name.
            given = {name: value for name, value in given.items() if name != "id"}
            given |= {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            try:
                module.init(**given, resume="must").finish()
                return
            except ValueError:  # It is not there.
                live = module.init(**given)
            finally:
                module.config = config
        try:
            steps = [values for _, values in run.epochs] or [{}]
            steps[-1] = steps[-1] | run.metrics
            for step, values in enumerate(steps):
                live.log(values, step=step)
            if files:
                artifact = module.Artifact(f"{live.id}-files", type="study")
                for name, file in files.items():
                    artifact.add_file(str(file), name=name)
                live.log_artifact(artifact)
        finally:
            live.finish()


class TrackerLog:
    """Keeps trackers up to date with a search; a failure is warned of once and tried again."""

    def __init__(self, trackers: Any):
        self._written: dict[str, set[str]] = {name: set() for name in check_trackers(trackers)}
        self._warned: set[str] = set()

    def update(self, project: Path, *, ended: bool = False) -> None:
        """Write what the records in a project directory have, and each tracker has not."""
        if not self._written:
            return
        try:
            study = load_study(project)
        except FileNotFoundError:
            return
        # Until an execution has completed, an executor may replace what the search is known by.
        completed = any(e.status == "completed" for t in study.trials for e in t.executions)
        if not (completed or ended):
            return
        for tracker, written in self._written.items():
            try:
                sync(study, tracker, project, ended=ended, written=written)
            except Exception as error:  # Whatever a tracker raises: a search goes on without it.
                if tracker in self._warned:
                    continue
                self._warned.add(tracker)
                warnings.warn(
                    f"The tracker {tracker!r} could not be written. kbatch tries again after the "
                    "next execution. If the search ends before that succeeds, run "
                    f"`kbatch export {project} --to {tracker}`. "
                    f"Received: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
