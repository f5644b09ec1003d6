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
from kbatch.study.decision import Decision, decide, frame_of
from kbatch.study.limits import notes_of
from kbatch.study.page import (
    is_unfinished,
    rows_of,
    run_end,
    running_text,
    searched_text,
    with_page,
)
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

# A search on another host that has written nothing for so long no longer runs.
_SILENT_S = 600.0
# A clock that is set moves the time at which a process began by less than this.
_SAME_S = 5.0


@dataclasses.dataclass(frozen=True)
class Study(Result):
    """The trials of one search, read from files or from a tuner.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> study.to_dataframe().sort_values("val_accuracy")
    """

    name: str  #: Name of the search, the folder's name.
    trials: tuple[TrialRecord, ...]  #: The trials by batch size, then trial id.
    search: SearchRecord | None = None  #: What holds for all of them, None if its file is missing.
    #: What is missing, a line each: files that could not be read, and trials that failed before
    #: training, in building the model.
    problems: tuple[str, ...] = ()
    missing: int = 0  #: Trials among these with a damaged or lost record, which no answer knows.
    plan: Plan | None = None  #: What was settled before the first training; None before that.
    #: How far the search has come; None if it is not known.
    progress: Progress | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        """Sum the study up in a line: its records would fill pages."""
        completed = sum(trial.status == "completed" for trial in self.trials)
        missing = f", {self.missing} missing" if self.missing else ""
        size = self.decide().batch_size
        named = "" if size is None else f", batch size {size}"
        counts = f"{pluralize(len(self.trials), 'trial')}, {completed} completed"
        return f"<Study {self.name!r}: {counts}{missing}{named}>"

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Study {self.name}"

    @property
    def answer(self) -> str:
        """The batch size to take."""
        headline = self.decide().page.sentences[0] if self.trials else ""
        if not (running := running_text(self.trials, self.progress)):
            return headline
        so_far = f" So far: {headline[0].lower()}{headline[1:]}" if headline else ""
        return f"{running}{so_far}"

    def table(self) -> "pd.DataFrame":
        """Return a row a batch size: of several learning rates the best, and how it compares."""
        return frame_of(rows_of(self.decide(), as_compared(self.trials), self.quality_metric))

    @property
    def notes(self) -> tuple[Note, ...]:
        """What else was found, and what may change the answer, the most important first."""
        return self.decide().notes

    @property
    def use(self) -> str:
        """How sure the answer is, what it changes, and the lines that train with it."""
        page = self.decide().page
        head, *lines = page.use or ("",)
        code = ", then ".join(f"`{line.strip()}`" for line in lines)
        return " ".join((*page.sentences[1:], head, code)).strip()

    @property
    def settings(self) -> dict[str, str]:
        """What was searched and how, and what else was found."""
        if not self.trials:
            return {}
        given = self.search.settings if self.search else {}
        runs = [run for trial in self.trials for run in trial.executions]
        examples = [run.epochs[0].examples for run in trained_runs(self.trials)]

        def different(values: Iterable[object]) -> str:
            return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

        found = {
            "searched": searched_text(self.trials),
            "cost": self.decide().page.cost.partition(" Notes: ")[0],  # They follow.
            "compared": " · ".join(conditions(self.trials, self.environment)),
            "plan": "" if self.plan is None else _plan_text(self.plan),
            **{name: _value_text(value) for name, value in given.items()},
            "training data": f"{count_range(examples, 'example')} an epoch" if examples else "",
            "optimizer": different(run.optimizer for run in runs),
            "jit_compile": different(run.jit_compile for run in runs),
            "seeds of the executions": different(run.seed for run in runs),
        }
        return {name: text for name, text in found.items() if text}

    @property
    def environment(self) -> EnvironmentRecord | None:
        """The machine, None if it was not recorded."""
        return self.search.environment if self.search else None

    def _repr_html_(self) -> str:
        try:
            refuse_empty(self)
            return super()._repr_html_()
        except ValueError as error:  # What is looked at must not raise: it says what is missing.
            return f"<p>{html.escape(str(error))}</p>"

    @functools.cached_property
    def quality_metric(self) -> Objective | None:
        """The objective if it shows what a model learned, else a validation metric that does."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        return self.trials[0].objective.or_quality(names) if self.trials else None

    def decide(self, tolerance: float | None = None, confidence: float | None = None) -> Decision:
        """Decide which batch size to take, and which sizes are as good.

        Sizes are compared at equal budgets and at the settings with the best mean: run by run, and
        by blocks of validation examples if the metric adds up over examples. Reports, figures and
        tables show this decision.

        Example:

        >>> decision = kbatch.load_study("results/search").decide()
        >>> decision.batch_size, decision.tied, decision.certain

        Args:
            tolerance: How much worse than the best counts as equally good, in the metric's unit.
                Default: that of the search. If the search has none: 0.01 for a metric between 0
                and 1, and 2 % of the best for a loss, a cost or a throughput.
            confidence: Above 0.5 and below 1. Of all searches, at most 1 - `confidence` are certain
                although a compared size is better by more than the tolerance. Default: that of the
                search, or 0.95.

        Raises:
            ValueError: If `tolerance` or `confidence` cannot be used.
        """
        settings: Mapping[str, Any] = self.search.settings if self.search else {}
        sure: float = settings.get("confidence", DEFAULT_CONFIDENCE)
        sure = sure if confidence is None else confidence
        # That of the search was checked when it began.
        check_tolerance(tolerance, sure, self.trials[0].objective.name if self.trials else "")
        if tolerance is None:
            tolerance = settings.get("tolerance")
        # Every page asks for it several times.
        if (tolerance, sure) not in self._decisions:
            found = decide(self.trials, settings, tolerance=tolerance, confidence=sure)
            lost = {"missing": self.missing, "problems": self.problems}
            notes = by_importance(notes_of(found, self.trials, settings, **lost))
            if is_unfinished(self.trials, self.progress):  # A larger budget would change nothing.
                dropped = ("to_be_certain", "sizes_not_compared")
                notes = tuple(note for note in notes if note.code not in dropped)
            if self.trials:
                sizes = settings.get("batch_sizes", ())
                found = with_page(found, self.trials, sizes, notes, self.progress)
            self._decisions[tolerance, sure] = found
        return self._decisions[tolerance, sure]

    @functools.cached_property
    def _decisions(self) -> dict[tuple[float | None, float], Decision]:
        return {}

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table with one row for each trial.

        The columns are `trial_id`, `status`, `batch_size`, `micro_batch_size`,
        `accumulation_steps`, `steps_per_execution`, `batch_size_seen`, `dtype_policy`,
        `optimizer`, `learning_rate` (before callbacks, the highest of a schedule),
        `samples_per_second` with `samples_per_second_low` and `_high` (a 95 % interval over three
        runs or more, quartiles over the windows of a single one), `first_step_s`,
        `data_wait_share`, `train_s`, `total_s`, `examples_seen`, `updates`,
        `overflowed_updates` (skipped by the loss scale), `seconds_to_target`, `noise_scale` of the
        late half of training in examples, with `noise_scale_low` and `_high` (a 95 % interval; an
        unresolved one may have the lower bound alone), `joules_to_target`, `joules_per_sample`,
        `gpu_energy_j`, `gpu_power_w` and `gpu_utilization` (0 to 1) of all GPUs in use,
        `epochs`, `executions` (training runs), `failure`, then the metrics of the best
        epoch as Keras logged them, under Keras's names, then the value of a validation metric that
        decides (such as "val_accuracy_judged"), then the other hyperparameters (as `hp/name` if
        a name is taken). Numbers are means over the runs of a trial. A missing value is NaN or
        None.

        Returns:
            The trials by batch size, then trial id.
        """
        return _frame_of((trial, trial_row(trial)) for trial in self.trials)

    def runs_to_dataframe(self) -> "pd.DataFrame":
        """Make a table with one row for each training run, short and failed runs included.

        Instead of `executions` it has the columns `run` (number within the trial, from 0), `seed`
        and `length` ("complete", "short" if the run looked for a learning rate, or
        "stopped_early"). All other columns are those of `to_dataframe`, with the values of the
        run.

        Example:

        >>> runs = kbatch.load_study("results/search").runs_to_dataframe()
        >>> runs[runs["length"] == "complete"].groupby("batch_size")["val_accuracy"].mean()

        Returns:
            The training runs by batch size, then trial id, then number.
        """
        return _frame_of((run, trial_row(run, number)) for run, number in single_runs(self.trials))

    def runs_table(self) -> "pd.DataFrame":
        """Return what a report shows of each training run."""
        objective, runs = self.trials[0].objective, single_runs(self.trials)
        given = [
            *differing(self.trials),
            *([] if self.decide().rate_setters else ["learning_rate"]),
        ]
        judged = judged_column(objective) or ""
        names = ("trial_id", "run", "batch_size", *given, "seed", "epochs", objective.name, judged)
        titles = {name: name.replace("_", " ") for name in ("batch_size", "dtype_policy")}
        titles |= {"trial_id": "trial", "learning_rate": "learning rate", judged: "judged"}
        table = self.runs_to_dataframe().filter([*dict.fromkeys(names)]).rename(columns=titles)
        table["training time (s)"] = [training_seconds(run.last) for run, _ in runs]
        table["ended"] = [run_end(run.last) for run, _ in runs]
        table.attrs["digits"] = {objective.name: 4, "judged": 4}
        return table

    def log_to(self, tracker: Literal["mlflow", "wandb"]) -> str:
        """Write the study and its executions to an experiment tracker, as runs.

        Call it during a search and again after it: a run that is there is found again, and written
        again only where its record has changed. Executions that have not ended are left out. The
        tracker is set up as for other training, such as by `MLFLOW_TRACKING_URI`.

        Example:

        >>> kbatch.load_study("results/search").log_to("mlflow")

        Args:
            tracker: `"mlflow"` or `"wandb"`.

        Returns:
            Where it is shown.

        Raises:
            ValueError: If the tracker is another one, or the study is empty.
            ImportError: If the tracker is not installed.
        """
        from kbatch.study.trackers import check_tracker, log_runs, tracked_runs

        check_tracker(tracker)
        refuse_empty(self)
        runs = tracked_runs(self.name, self.trials, self.search, self.decide())
        return log_runs(tracker, runs, self.environment)


def _frame_of(rows: Iterable[tuple[TrialRecord, dict[str, object]]]) -> "pd.DataFrame":
    """Make a table of rows; metrics and hyperparameters cover no column of any of them."""
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
    """Raise a `ValueError` if a study has no trial or is none, with what to do."""
    if not isinstance(study, Study):
        raise InputTypeError(
            'A study is needed. `tuner.study` and `kbatch.load_study("results/search")` are '
            f"studies. Received: {study!r}."
        )
    if study.trials:
        return
    problems, running = " ".join(study.problems), running_text((), study.progress)
    if running:
        raise ValueError(
            f"The search of the study {study.name!r} has not begun a training run yet: load it "
            f"again later. {running} Received: study.trials=()."
        )
    raise ValueError(
        f"The study {study.name!r} has no trial: run `tuner.search(x, y)` of a "
        "`kbatch.BatchSizeTuner`, or `kbatch demo`, then load it again. "
        + (f"What is missing: {problems} " if problems else "")
        + "Received: study.trials=()."
    )


def _value_text(value: object) -> str:
    if isinstance(value, (list, tuple)) and any(isinstance(one, float) for one in value):
        return ", ".join(setting(one) for one in value)  # Measured numbers have many digits.
    return json.dumps(value, ensure_ascii=False)


def _plan_text(plan: Plan) -> str:
    """Say what a search settled before its first training."""
    most, cut = plan.micro_batch_size, plan.reason in ("given", "cut")
    size = f"micro-batches of up to {most:,}" if cut and most else "batches go through whole"
    why = {
        "given": "as given",
        "fits": "the largest fits",
        "cut": "the most that fit",
        "own_step": "the model has its own train step",
        "whole": "the model takes batches of one size",
    }
    parts = {None: "", True: ", seen to train as the whole batch does", False: ", not exact"}
    policy = plan.dtype_policy or "the policy of each trial"
    made = f"number {plan.number}, made in {plan.duration_s:.1f} s"
    return f"{made}: {policy}; {size} ({why[plan.reason]}){parts[plan.parts_equal]}"


class _HasProjectDir(Protocol):
    """A keras-tuner tuner; the settings of its hypermodel are read where it has any."""

    @property
    def project_dir(self) -> str: ...


def load_study(tuner_or_directory: "_HasProjectDir | str | Path") -> Study:
    """Read the study of a search.

    A trial whose file is broken (no number may exceed 1e100), of another trial or of a
    newer kbatch is left out and named in `Study.problems`; the others load. `Study.missing` counts
    it, and every report and figure says so.

    Args:
        tuner_or_directory: A keras-tuner tuner, its project directory
            (`directory/project_name`), or a file written by `Study.save`.

    Raises:
        FileNotFoundError: If there is no kbatch record, with what to run.
        RecordError: If a file written by `Study.save` cannot be read, or a tuner found an older
            search with other settings in its directory, whose trials are not its own.
    """
    tuner, path = None, tuner_or_directory
    if not isinstance(path, (str, Path)):
        tuner, path = path, path.project_dir
    json_codec.check_local(path)
    path = Path(path)
    if path.is_file():
        return _as_of_now(json_codec.read_record(Study, path))
    study = _read_project(path)
    if not (study.trials or study.problems or study.search):
        below = ""  # People often point to the folder above.
        for file in sorted(path.glob(f"*/{RECORD_NAME}")):
            with contextlib.suppress(RecordError, KeyError, TypeError):
                if json_codec.read_json(file)["kind"] == SearchRecord.__name__:
                    below = f"One lies in {file.parent}. "
                    break
        raise FileNotFoundError(
            f"There is no kbatch study in {path}: `load_study` needs the project directory "
            "(`directory/project_name`) of a `kbatch.BatchSizeTuner`, or of a keras-tuner that "
            f"searched a `kbatch.BatchSizeHyperModel`. {below}Received: {str(path)!r}."
        )
    settings = getattr(getattr(tuner, "hypermodel", None), "settings", None)
    difference = study.search.difference(settings) if study.search and settings else None
    if difference:
        # keras-tuner reloads a finished search without a word, and runs nothing.
        raise RecordError(
            f"{path} holds an older search with other settings, and the tuner ran none of its own: "
            "give another `project_name`, or `overwrite=True` to start over (`load_study` with the "
            f"directory reads the older one). Received: {difference}."
        )
    return study


def _read_project(path: Path) -> Study:
    problems: list[str] = []

    def read(kind, file):
        # A link that leads nowhere is a lost record, which no other test would see.
        if not os.path.lexists(file):
            return None
        try:
            return json_codec.read_record(kind, file)
        except RecordError as error:
            remedy = f" {SETTINGS_REMEDY}" if kind is SearchRecord else ""
            problems.append(f"{error}{remedy}")

    search = read(SearchRecord, path / RECORD_NAME)
    # Those of keras-tuner alone have no record.
    searched = (path / RECORD_NAME).exists()
    before, trials, failed = len(problems), [], []
    for folder in sorted(path.glob("trial_*")):
        file = folder / RECORD_NAME
        if not os.path.lexists(file):
            status, message = _end_of_lost(folder / "trial.json")
            if status in ("FAILED", "INVALID"):
                failed.append(f"{folder.name} failed before training: {message}")
            elif status in ("COMPLETED", "damaged") and searched:
                problems.append(f"{file} is missing, and with it the result of its trial.")
            continue
        trial = read(TrialRecord, file)
        if trial and folder.name != f"trial_{trial.trial_id}":
            problems.append(
                f"{file} is left out: it holds trial {json_codec.shown(trial.trial_id)}."
            )
        elif trial:
            trials.append(trial)
    trials.sort(key=lambda trial: (trial.batch_size, trial.trial_id))
    missing = len(problems) - before
    texts = map(printable, [*problems, *failed])
    # A folder's name may hold bytes that are no text, and lines that would break a title.
    name = " ".join(printable(os.path.basename(os.path.realpath(path))).split())
    plan = json_codec.load_if_readable(Plan, path / PLAN_NAME)
    progress = json_codec.load_if_readable(Progress, path / PROGRESS_NAME)
    return _as_of_now(Study(name, tuple(trials), search, tuple(texts), missing, plan, progress))


def _as_of_now(study: Study) -> Study:
    """Return a study with what is known now: a process may have been killed since it wrote."""
    progress, now = study.progress, time.time()
    if progress is not None and _is_alive(progress):
        left_s = progress.left_s and max(0.0, progress.left_s - (now - progress.written_at))
        progress = dataclasses.replace(progress, left_s=left_s, written_at=now)
        return dataclasses.replace(study, progress=progress)
    trials = []
    for trial in study.trials:
        if trial.status == "running":  # Only the last run of a trial can be.
            last = dataclasses.replace(trial.last, status="interrupted")
            trial = dataclasses.replace(trial, executions=(*trial.executions[:-1], last))
        trials.append(trial)
    ended = progress and dataclasses.replace(progress, process=None)
    return dataclasses.replace(study, trials=tuple(trials), progress=ended)


def _is_alive(progress: Progress) -> bool:
    """Return whether the process of a search lives; on another host, whether it wrote lately."""
    if progress.process is None:
        return False
    if progress.host != platform.node():
        return time.time() - progress.written_at < _SILENT_S
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(progress.process)
        began_at = progress.process_began_at or 0.0
        same = abs(process.create_time() - began_at) < _SAME_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _end_of_lost(file: Path) -> tuple[str, str]:
    """Return how a trial without a record ended, and its last line, by keras-tuner's file."""
    if not file.exists():
        return "", ""
    try:
        state = json_codec.read_json(file)
        lines = str(state.get("message") or "").splitlines()
        return str(state["status"]), ([""] + [one for one in lines if one.strip()])[-1][:200]
    except (RecordError, AttributeError, KeyError):
        return "damaged", ""
