"""The names, conditions and values of a study's trials, as its texts and figures write them."""

from collections.abc import Iterable, Sequence

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import count_range, pluralize, setting, where_measured
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note
from kbatch.records.training_run import COST_NAMES, Budget, ExecutionRecord
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds

MOST_NAMED = 5


def differing(trials: Iterable[TrialRecord]) -> tuple[str, ...]:
    """Name what trials differ in beside the batch size: hyperparameters, and the dtype policy."""
    trials = tuple(trials)
    names = dict.fromkeys(name for trial in trials for name in trial.hyperparameters)
    own = (*OWN_COLUMNS, FACTOR_NAME)  # The rate itself has a column.
    chosen = (name for name in names if name not in own and not name.startswith("tuner/"))
    return tuple(
        name
        for name in (*chosen, "dtype_policy")
        if len({value_of(trial, name) for trial in trials}) > 1
    )


def value_of(trial: TrialRecord, name: str) -> bool | int | float | str | None:
    """Return a hyperparameter, or the dtype policy that was active."""
    return trial.dtype_policy if name == "dtype_policy" else trial.hyperparameters.get(name)


def setting_texts(trial: TrialRecord, names: Iterable[str]) -> list[str]:
    """List what a trial has beside its batch size, such as `["units=8", "float32"]`."""
    texts = ((name, value_text(value_of(trial, name))) for name in names)
    return [text if name == "dtype_policy" else f"{name}={text}" for name, text in texts]


def trial_name(trial: TrialRecord, names: Iterable[str]) -> str:
    """Name a trial, such as `"64 (units=8)"`."""
    settings = ", ".join(setting_texts(trial, names))
    return f"{trial.batch_size:,} ({settings})" if settings else f"{trial.batch_size:,}"


def value_text(value: bool | int | float | str | None) -> str:
    return setting(value) if isinstance(value, float) else str(value)


def missing_text(missing: int) -> str:
    """Say that trials of a study are missing, an empty text where none is."""
    return Note.of("trials_missing", count=missing) if missing else ""


def at_most(names: Sequence[str]) -> list[str]:
    """Return the first five names, and how many there are more."""
    more = len(names) - MOST_NAMED
    return [*names[:MOST_NAMED], *([f"{more:,} more"] if more > 0 else [])]


def outcome(trial: TrialRecord) -> str:
    """Describe how a trial ended: its status, or that the training diverged."""
    return "diverged" if diverged(trial) else trial.status.replace("_", " ")


def diverged(trial: TrialRecord) -> bool:
    """Return whether a trial failed because its loss did not stay finite."""
    return trial.status == "failed" and any(e.diverged for e in trial.executions)


def metric_words(name: str) -> str:
    """Spell out a metric's name, such as "validation accuracy" for `val_accuracy`."""
    words = name.removeprefix("val_").replace("_", " ")
    if name == "samples_per_second":
        return "throughput"
    if name in COST_NAMES:
        return words
    return f"{'validation' if name.startswith('val_') else 'training'} {words}"


def trained_runs(trials: Iterable[TrialRecord]) -> list[ExecutionRecord]:
    """List the executions that completed and have epochs."""
    return [e for t in trials for e in t.executions if e.status == "completed" and e.epochs]


def budget_text(trials: Iterable[TrialRecord]) -> str:
    """Describe how long the executions that completed trained, an empty text where none did."""
    runs = trained_runs(trials)
    if not runs:
        return ""
    epochs = count_range((len(run.epochs) for run in runs), "epoch")
    if ends := dict.fromkeys(filter(None, map(end_text, runs))):
        return f"{' or '.join(ends)} ({epochs})"
    return f"{epochs} of {count_range((run.epochs[0].examples for run in runs), 'example')}"


def end_text(execution: ExecutionRecord) -> str:
    """Describe what ends an execution, an empty text where it is the number of epochs."""
    budget, target, limits = execution.budget or Budget(), execution.target, []
    if budget.train_s is not None:
        limits.append(f"{setting(budget.train_s)} s of training")
    if budget.updates is not None:
        limits.append(pluralize(budget.updates, "update"))
    if budget.examples is not None:
        limits.append(pluralize(budget.examples, "example"))
    if target is None:
        return " or ".join(limits)
    sign = "≥" if target.direction == "max" else "≤"
    until = f"until {target.metric} {sign} {setting(target.value)}"
    return f"{until}, at most {' or '.join(limits)}" if limits else until


def caption(trials: Sequence[TrialRecord], environment: EnvironmentRecord | None) -> str:
    """Write where and on what trials were compared, parts separated by a middle dot."""
    where, kinds = where_measured(environment), device_kinds(trials)
    if len(kinds) > 1:
        where[0] = " and ".join(kinds)
    executions = count_range((len(trial.executions) for trial in trials), "execution")
    budget = budget_text(trials)
    parts = [
        *where,
        ", ".join(dict.fromkeys(trial.dtype_policy for trial in trials)),
        f"{pluralize(len(trials), 'trial')}, {executions} each",
        f"budget: {budget} each" if budget else "",
    ]
    return " · ".join(filter(None, parts))
