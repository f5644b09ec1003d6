"""A study: the trials of one search, and loading them."""

import contextlib
import dataclasses
import functools
import html
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kbatch.analysis.judge import DEFAULT_CONFIDENCE
from kbatch.errors import InputTypeError, RecordError
from kbatch.page.numbers import count_range, pluralize, setting
from kbatch.page.result import Result
from kbatch.records import json_codec
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, by_importance, printable
from kbatch.records.training_run import (
    PLAN_NAME,
    PROGRESS_NAME,
    RECORD_NAME,
    SETTINGS_REMEDY,
    Plan,
    Progress,
    SearchRecord,
)
from kbatch.study.compared_trials import (
    as_compared,
    check_tolerance,
    conditions,
    differing,
    trained_runs,
    training_seconds,
)
from kbatch.study.decision import Decision, decide, frame_of, seconds_of, speed_of
from kbatch.study.limits import notes_of
from kbatch.study.page import is_unfinished, rows_of, run_end, running_text, runs_text, with_page
from kbatch.study.trial import (
    OWN_COLUMNS,
    Objective,
    TrialRecord,
    judged_column,
    quality_columns,
    single_runs,
    trial_row,
)

if TYPE_CHECKING:
    import pandas as pd

_SILENT_S = 600.0  # A search on another host has probably ended if it wrote nothing for this time.
_JUDGED = "mean over the best fifth of the epochs, at least two: sizes are compared by this value"
_CORRECTED = "corrected for changes of the machine's speed, except in the table of all runs"
_SAME_START_S = 5.0  # Start times of a process may differ by this much if the clock was set.


@dataclasses.dataclass(frozen=True)
class Study(Result):
    """The trials of one search, read from its files or from a tuner.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> study.to_dataframe().sort_values("val_accuracy")
    """

    name: str  #: Name of the search, which is the name of its folder.
    trials: tuple[TrialRecord, ...]  #: The trials by batch size, then trial id.
    search: SearchRecord | None = None  #: Settings of the search; None if their file is missing.
    #: Files that could not be read, and trials that failed before training, a line for each.
    problems: tuple[str, ...] = ()
    missing: int = 0  #: Number of trials with a damaged or lost record.
    plan: Plan | None = None  #: The plan of all trainings; None before it is made.
    #: Progress of the search; None if it is unknown.
    progress: Progress | None = dataclasses.field(default=None, compare=False)
    source = None  # The path that `load_study` read. It is no field, because no file holds it.

    def __repr__(self) -> str:
        """Summarize the study in one line, because its records would fill pages."""
        completed = sum(trial.status == "completed" for trial in self.trials)
        missing = f", {self.missing} missing" if self.missing else ""
        size = self.decide().batch_size
        answer = "" if size is None else f", batch size {size}"
        counts = f"{pluralize(len(self.trials), 'trial')}, {completed} completed"
        return f"<Study {self.name!r}: {counts}{missing}{answer}>"

    @property
    def title(self) -> str:
        """The name of the study."""
        return f"Study {self.name}"

    @property
    def answer(self) -> str:
        """The batch size to take, and the progress of a running search."""
        headline = self.decide().page.sentences[0] if self.trials else ""
        if not (running := running_text(self.trials, self.progress)):
            return headline
        so_far = f" So far: {headline[0].lower()}{headline[1:]}" if headline else ""
        return f"{running}{so_far}"

    def table(self) -> "pd.DataFrame":
        """Return a row for each batch size and setting, at its best learning rate."""
        return frame_of(rows_of(self.decide(), as_compared(self.trials), self.quality_metric))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Facts that may change the answer or its use, the most important first."""
        return self.decide().notes

    @property
    def use(self) -> str:
        """How sure the answer is, its gain, and the lines that train with it."""
        page = self.decide().page
        code = [*page.use]
        if code[1:] and self.source:
            path = json.dumps(self.source, ensure_ascii=False)
            code.insert(1, f"  decision = kbatch.load_study({path}).decide()")
        return "\n".join((" ".join(page.sentences[1:]), *code))

    @property
    def settings(self) -> dict[str, str]:
        """The settings, data, machine and cost of the search."""
        if not self.trials:
            return {}
        settings = self.search.settings if self.search else {}
        runs = [run for trial in self.trials for run in trial.executions]
        examples = [run.epochs[0].examples for run in trained_runs(self.trials)]

        def different(values: Iterable[object]) -> str:
            return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

        texts = {
            "searched": runs_text(self.trials),
            "cost": self.decide().page.cost.partition(" Notes: ")[0],  # A report lists the notes.
            "compared": " · ".join(conditions(self.trials, self.environment)),
            "plan": "" if self.plan is None else _plan_text(self.plan),
            "judged": _JUDGED if judged_column(self.trials[0].objective) else "",
            "training time, samples/s": _CORRECTED if seconds_of(self.decide()) else "",
            **{name: _value_text(value) for name, value in settings.items()},
            "training data": f"{count_range(examples, 'example')} per epoch" if examples else "",
            "optimizer": different(run.optimizer for run in runs),
            "jit_compile": different(run.jit_compile for run in runs),
            "seeds of the training runs": different(run.seed for run in runs),
        }
        return {name: text for name, text in texts.items() if text}

    @property
    def environment(self) -> EnvironmentRecord | None:
        """The machine of the search; None if it was not recorded."""
        return self.search.environment if self.search else None

    def _repr_html_(self) -> str:
        try:
            refuse_empty(self)
            return super()._repr_html_()
        except ValueError as error:  # A notebook shows the reason instead of a traceback.
            return f"<p>{html.escape(str(error))}</p>"

    @functools.cached_property
    def quality_metric(self) -> Objective | None:
        """The objective if it shows how good a model is, else a validation metric."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        return self.trials[0].objective.or_quality(names) if self.trials else None

    def decide(self, tolerance: float | None = None, confidence: float | None = None) -> Decision:
        """Decide which batch size to take, and which sizes are as good.

        Sizes are compared at equal budgets and at the settings of the trial with the best mean.
        kbatch compares them run by run, and by blocks of validation examples if the metric adds up
        over examples. Reports, figures and tables show this decision.

        Example:

        >>> decision = kbatch.load_study("results/search").decide()
        >>> decision.batch_size, decision.tied, decision.certain

        Args:
            tolerance: Float. Difference from the best that counts as equally good, in the metric's
                unit. Default: the tolerance of the search. If it has none: 0.01 for a metric
                between 0 and 1, and 2 % of the best value for a loss, a time or a throughput.
            confidence: Float above 0.5 and below 1. At most a share 1 - `confidence` of all
                searches report an answer as certain although a compared size is better by more than
                the tolerance. Default: the confidence of the search, or 0.95.

        Returns:
            A `kbatch.Decision`. `print` shows its page.

        Raises:
            ValueError: If `tolerance` or `confidence` is out of range.
        """
        settings: Mapping[str, Any] = self.search.settings if self.search else {}
        level: float = settings.get("confidence", DEFAULT_CONFIDENCE)
        level = level if confidence is None else confidence
        check_tolerance(tolerance, level, self.trials[0].objective.name if self.trials else "")
        if tolerance is None:
            tolerance = settings.get("tolerance")
        key = tolerance, level
        if key not in self._decisions:  # Each page reads the decision several times.
            decision = decide(self.trials, settings, tolerance=tolerance, confidence=level)
            lost = {"missing": self.missing, "problems": self.problems}
            notes = by_importance(notes_of(decision, self.trials, settings, **lost))
            if is_unfinished(self.trials, self.progress):  # It continues without a larger budget.
                dropped = ("to_be_certain", "sizes_not_compared")
                notes = tuple(note for note in notes if note.code not in dropped)
            if self.trials:
                sizes = settings.get("batch_sizes", ())
                decision = with_page(decision, self.trials, sizes, notes, self.progress)
            self._decisions[key] = decision
        return self._decisions[key]

    @functools.cached_property
    def _decisions(self) -> dict[tuple[float | None, float], Decision]:
        return {}

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table with one row for each trial.

        The columns are `trial_id`, `status`, `batch_size`, `micro_batch_size`,
        `accumulation_steps`, `steps_per_execution`, `batch_size_seen`, `dtype_policy`,
        `optimizer`, `learning_rate` (before callbacks, the highest of a schedule),
        `samples_per_second` with `samples_per_second_low` and `_high` (a 95 % interval over three
        runs or more, quartiles over the windows of a single one; corrected, as in `table()`, for
        changes of the machine's speed), `first_step_s`, `data_wait_share`, `train_s`, `total_s`,
        `examples_seen`, `updates`, `overflowed_updates` (skipped by the loss scale),
        `seconds_to_target`, `noise_scale` of the late half of training in examples, with
        `noise_scale_low` and `_high` (a 95 % interval, or only its lower end), `joules_to_target`,
        `joules_per_sample`, `gpu_energy_j`, `gpu_power_w` and `gpu_utilization` (0 to 1) of all
        GPUs in use, `epochs`, `executions` (training runs) and `failure`.

        Then come the metrics of the best epoch under Keras's names, the value of a validation
        metric that decides (such as "val_accuracy_judged"), and the other hyperparameters (as
        `hp/name` if a name is taken). Numbers are means over the runs of a trial. A missing value
        is NaN or None.

        Returns:
            A `pandas.DataFrame`, in the order of batch size and trial id.
        """
        rates = {t.trial_id: speed_of(self.decide(), t)[1] for t in self.trials}
        return _frame_of((t, trial_row(t, rates=rates[t.trial_id])) for t in self.trials)

    def runs_to_dataframe(self) -> "pd.DataFrame":
        """Make a table with one row for each training run, short and failed runs included.

        Instead of `executions` it has the columns `run` (number within the trial, from 0), `seed`
        and `length` ("complete", "short" if the run looked for a learning rate, or
        "stopped_early"). All other columns are as in `to_dataframe`, as measured in the run.

        Example:

        >>> runs = kbatch.load_study("results/search").runs_to_dataframe()
        >>> runs[runs["length"] == "complete"].groupby("batch_size")["val_accuracy"].mean()

        Returns:
            A `pandas.DataFrame`, in the order of batch size, trial id and number of the run.
        """
        return _frame_of((run, trial_row(run, number)) for run, number in single_runs(self.trials))

    def runs_table(self) -> "pd.DataFrame":
        """Return the table of training runs in a report."""
        objective, runs = self.trials[0].objective, single_runs(self.trials)
        rate = () if self.decide().rate_setters else ("learning_rate",)
        names = ("trial_id", "run", "batch_size", *differing(self.trials), *rate, "seed", "epochs")
        names += (objective.name, judged := judged_column(objective) or "")
        titles = {name: name.replace("_", " ") for name in ("batch_size", "dtype_policy")}
        titles |= {"trial_id": "trial", "learning_rate": "learning rate", judged: "judged"}
        table = self.runs_to_dataframe().filter([*dict.fromkeys(names)]).rename(columns=titles)
        table["training time (s)"] = [training_seconds(run.last) for run, _ in runs]
        table["ended"] = [run_end(run.last) for run, _ in runs]
        table.attrs["digits"] = {objective.name: 4, "judged": 4}
        return table

    def log_to(self, tracker: Literal["mlflow", "wandb"]) -> str:
        """Write the study and its training runs to an experiment tracker.

        You can call it during a search and again after it. kbatch finds runs that it wrote before,
        and writes them again only if they have changed. Runs that have not ended are left out.
        Configure the tracker as for other training, such as by `MLFLOW_TRACKING_URI`.

        Example:

        >>> kbatch.load_study("results/search").log_to("mlflow")

        Args:
            tracker: `"mlflow"` or `"wandb"`.

        Returns:
            String: the server or the project, and the experiment or the group.

        Raises:
            ValueError: If `tracker` is another string, or if the study is empty.
            ImportError: If the tracker is not installed.
        """
        from kbatch.study.trackers import check_tracker, log_runs, tracked_runs

        check_tracker(tracker)
        refuse_empty(self)
        runs = tracked_runs(self.name, self.trials, self.search, self.decide())
        return log_runs(tracker, runs, self.environment)


def _frame_of(rows: Iterable[tuple[TrialRecord, dict[str, object]]]) -> "pd.DataFrame":
    """Make a table of rows. Add metrics and hyperparameters as columns with free names."""
    import pandas as pd

    rows = list(rows)
    taken = {name for trial, _ in rows for name in quality_columns(trial)}
    for trial, row in rows:
        row |= {name: value for name, value in quality_columns(trial).items() if name not in row}
        for name, value in trial.hyperparameters.items():
            if name not in OWN_COLUMNS:
                row[f"hp/{name}" if name in row or name in taken else name] = value
    return pd.DataFrame([row for _, row in rows])


def refuse_empty(study: Study) -> None:
    """Raise a `ValueError` with advice if a value is no study, or a study without a trial."""
    if not isinstance(study, Study):
        raise InputTypeError(
            'Give a study, such as `tuner.study` or `kbatch.load_study("results/search")`. '
            f"Received: {study!r}."
        )
    if study.trials:
        return
    problems, running = " ".join(study.problems), running_text((), study.progress)
    if running:
        raise ValueError(
            f"The search of the study {study.name!r} has not begun a training run yet. Load the "
            f"study again later. {running} Received: study.trials=()."
        )
    raise ValueError(
        f"The study {study.name!r} has no trial. Run `tuner.search(x, y)` of a "
        "`kbatch.BatchSizeTuner`, or `kbatch demo`, then load it again. "
        + (f"Problems: {problems} " if problems else "")
        + "Received: study.trials=()."
    )


def _value_text(value: object) -> str:
    if isinstance(value, (list, tuple)) and any(isinstance(item, float) for item in value):
        return ", ".join(map(setting, value))  # Measured numbers have many digits.
    return json.dumps(value, ensure_ascii=False)


def _plan_text(plan: Plan) -> str:
    """Describe a plan for the settings of a report."""
    most, cut = plan.micro_batch_size, plan.reason in ("given", "cut")
    size = f"micro-batches of up to {most:,}" if cut and most else "batches are not split"
    why = {
        "given": "as given",
        "fits": "the largest batch fits",
        "cut": "the most examples that fit",
        "own_step": "the model has a custom train step",
        "whole": "the model takes batches of one size",
    }
    parts = {None: "", True: ", which give the same result", False: ", which change the result"}
    policy = plan.dtype_policy or "the policy of each trial"
    plan_text = f"version {plan.number}, made in {plan.duration_s:.1f} s"
    return f"{plan_text}: {policy}; {size} ({why[plan.reason]}){parts[plan.parts_equal]}"


class _HasProjectDir(Protocol):  # A keras-tuner tuner.
    @property
    def project_dir(self) -> str: ...


def load_study(tuner_or_directory: "_HasProjectDir | str | Path") -> Study:
    """Read the study of a search.

    If the file of a trial is damaged, belongs to another trial or was written by a newer kbatch,
    this trial is left out and named in `Study.problems`. `Study.missing` counts such trials, and
    every report and figure mentions them. A number above 1e100 counts as damage.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> print(study.decide())

    Args:
        tuner_or_directory: A keras-tuner tuner, its project directory
            (`directory/project_name`), or a file written by `Study.save`.

    Returns:
        A `kbatch.Study`.

    Raises:
        FileNotFoundError: If there is no kbatch record.
        RecordError: If a file of `Study.save` cannot be read, or if the directory of a tuner holds
            an older search with other settings.
    """
    tuner, path = None, tuner_or_directory
    if not isinstance(path, (str, Path)):
        tuner, path = path, path.project_dir
    json_codec.check_local(path)
    path = Path(path)
    is_file = path.is_file()
    study = _as_of_now(json_codec.read_record(Study, path)) if is_file else _read_project(path)
    object.__setattr__(study, "source", printable(str(path)))
    if not (is_file or study.trials or study.problems or study.search):
        hint = ""  # Users often give the parent folder.
        for file in sorted(path.glob(f"*/{RECORD_NAME}")):
            with contextlib.suppress(RecordError, KeyError, TypeError):
                if json_codec.read_json(file)["kind"] == SearchRecord.__name__:
                    hint = f"The folder {file.parent} holds a study: load that folder. "
                    break
        raise FileNotFoundError(
            f"There is no kbatch study in {path}: give the project directory "
            "(`directory/project_name`) of a `kbatch.BatchSizeTuner`, or of a keras-tuner tuner "
            f"that searched a `kbatch.BatchSizeHyperModel`. {hint}Received: {str(path)!r}."
        )
    settings = getattr(getattr(tuner, "hypermodel", None), "settings", None)
    difference = study.search.difference(settings) if study.search and settings else None
    if difference:
        # keras-tuner reloads a finished search without a message, and trains nothing.
        raise RecordError(
            f"The tuner trained nothing, because {path} holds an older search with other settings: "
            "give another `project_name`, or `overwrite=True` to start over. To read the older "
            f"search, call `load_study` with the directory. Received: {difference}."
        )
    return study


def _read_project(path: Path) -> Study:
    problems: list[str] = []

    def read(kind, file):
        # A broken link is a lost record.
        if not os.path.lexists(file):
            return None
        try:
            return json_codec.read_record(kind, file)
        except RecordError as error:
            remedy = f" {SETTINGS_REMEDY}" if kind is SearchRecord else ""
            problems.append(f"{error}{remedy}")

    search = read(SearchRecord, path / RECORD_NAME)
    # Without this file, the trials may be from a keras-tuner search without kbatch.
    is_kbatch = (path / RECORD_NAME).exists()
    problems_of_search, trials, failed = len(problems), [], []
    for folder in sorted(path.glob("trial_*")):
        file = folder / RECORD_NAME
        if not os.path.lexists(file):
            status, message = _status_without_record(folder / "trial.json")
            if status in ("FAILED", "INVALID"):
                failed.append(f"{folder.name} failed before training: {message}")
            elif status in ("COMPLETED", "damaged") and is_kbatch:
                problems.append(f"{file} is missing, so its trial has no result.")
            continue
        trial = read(TrialRecord, file)
        if trial and folder.name != f"trial_{trial.trial_id}":
            other = json_codec.shown(trial.trial_id)
            problems.append(f"{file} holds the record of trial {other}, so it is left out.")
        elif trial:
            trials.append(trial)
    trials.sort(key=lambda trial: (trial.batch_size, trial.trial_id))
    missing = len(problems) - problems_of_search
    texts = map(printable, [*problems, *failed])
    # The name of a folder may have unprintable bytes and line breaks.
    name = " ".join(printable(os.path.basename(os.path.realpath(path))).split())
    plan = json_codec.load_if_readable(Plan, path / PLAN_NAME)
    progress = json_codec.load_if_readable(Progress, path / PROGRESS_NAME)
    return _as_of_now(Study(name, tuple(trials), search, tuple(texts), missing, plan, progress))


def _as_of_now(study: Study) -> Study:
    """Update the progress of a study: its process may have been killed since it wrote."""
    progress, now = study.progress, time.time()
    if progress is not None and _is_alive(progress):
        left_s = progress.left_s and max(0.0, progress.left_s - (now - progress.written_at))
        progress = dataclasses.replace(progress, left_s=left_s, written_at=now)
        return dataclasses.replace(study, progress=progress)
    trials = []
    for trial in study.trials:
        if trial.status == "running":  # Only the last run of a trial can be running.
            last = dataclasses.replace(trial.last, status="interrupted")
            trial = dataclasses.replace(trial, executions=(*trial.executions[:-1], last))
        trials.append(trial)
    ended = progress and dataclasses.replace(progress, process=None)
    return dataclasses.replace(study, trials=tuple(trials), progress=ended)


def _is_alive(progress: Progress) -> bool:
    """Return whether the process of a search runs. On another host, it must have written lately."""
    if progress.process is None:
        return False
    if progress.host != platform.node():
        return time.time() - progress.written_at < _SILENT_S
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(progress.process)
        began_at = progress.process_began_at or 0.0
        same = abs(process.create_time() - began_at) < _SAME_START_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _status_without_record(file: Path) -> tuple[str, str]:
    """Return keras-tuner's status and last message of a trial that has no record."""
    if not file.exists():
        return "", ""
    try:
        state = json_codec.read_json(file)
        lines = str(state.get("message") or "").splitlines()
        return str(state["status"]), ([""] + [line for line in lines if line.strip()])[-1][:200]
    except (RecordError, AttributeError, KeyError):
        return "damaged", ""
