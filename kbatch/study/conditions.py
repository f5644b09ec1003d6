"""The conditions behind a study's numbers, in a line that stands beside them."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.document.number_text import counted, setting
from kbatch.document.where_measured import UNKNOWN_DEVICE, clocks_text, versions_text
from kbatch.records.execution import ExecutionRecord
from kbatch.records.target import Budget
from kbatch.study.study_record import Study


class Conditions(NamedTuple):
    """What was compared, and where.

    Attributes:
        device: The device in a few words, None if it was not recorded.
        versions: Versions of TensorFlow and Keras, such as `"TensorFlow 2.21.0"`.
        policies: Dtype policies that were active.
        trials: Trials in the study.
        executions: Fewest and most executions of a trial.
        epochs: Fewest and most epochs of an execution that completed, None if none did.
        examples: Fewest and most training examples of a first epoch, None if none completed.
        ends: What ended the executions that completed, in words, where it was not the number of
            epochs.
        clocks: Between which GPU clocks the trials ran, in words, where they are far apart.
    """

    device: str | None
    versions: tuple[str, ...]
    policies: tuple[str, ...]
    trials: int
    executions: tuple[int, int]
    epochs: tuple[int, int] | None
    examples: tuple[int, int] | None
    ends: tuple[str, ...] = ()
    clocks: str = ""


def conditions_of(study: Study) -> Conditions:
    """Gathers the conditions of a study with at least one trial."""
    environment = study.search.environment if study.search else None
    completed = [e for t in study.trials for e in t.executions if e.status == "completed"]
    timed = [e for e in completed if e.epochs]
    examples = [e.epochs[0].examples for e in timed]
    return Conditions(
        device=environment.device if environment else None,
        versions=tuple(versions_text(environment)),
        policies=tuple(dict.fromkeys(t.dtype_policy for t in study.trials)),
        trials=len(study.trials),
        executions=_bounds(len(t.executions) for t in study.trials),
        epochs=_bounds(len(e.epochs) for e in timed) if timed else None,
        examples=_bounds(examples) if examples else None,
        ends=tuple(dict.fromkeys(filter(None, (end_text(e) for e in timed)))),
        clocks=clocks_text(
            (
                f"{trial.batch_size:,}",
                trial.mean(lambda e: None if e.usage is None else e.usage.sm_clock_mhz),
            )
            for trial in study.trials
            if trial.status == "completed"
        ),
    )


def caption(conditions: Conditions) -> str:
    """Writes the conditions as one line, parts separated by a middle dot."""
    parts = [
        conditions.device or UNKNOWN_DEVICE,
        *conditions.versions,
        ", ".join(conditions.policies),
        f"{counted(conditions.trials, 'trial')}, {executions_text(conditions)}",
    ]
    if conditions.epochs:
        parts.append(f"budget: {budget_text(conditions)} each")
    return " · ".join([*parts, conditions.clocks] if conditions.clocks else parts)


def executions_text(conditions: Conditions) -> str:
    """Says how often each trial was executed."""
    return f"{_range_text(conditions.executions, 'execution')} each"


def budget_text(conditions: Conditions) -> str:
    """Says how long the executions trained; they need to have completed."""
    epochs = epochs_text(conditions.epochs) if conditions.epochs else "no epoch"
    if conditions.ends:
        return f"{' or '.join(conditions.ends)} ({epochs})"
    if conditions.examples is None:
        return epochs
    return f"{epochs} of {examples_text(conditions.examples)}"


def end_text(execution: ExecutionRecord) -> str:
    """Says what ends an execution, an empty text where it is the number of epochs."""
    budget, target = execution.budget, execution.target
    limits = [] if budget is None else _limits(budget)
    if target is None:
        return " or ".join(limits)
    sign = "≥" if target.direction == "max" else "≤"
    until = f"until {target.metric} {sign} {setting(target.value)}"
    return f"{until}, at most {' or '.join(limits)}" if limits else until


def _limits(budget: Budget) -> list[str]:
    texts = []
    if budget.train_s is not None:
        texts.append(f"{setting(budget.train_s)} s of training")
    if budget.updates is not None:
        texts.append(counted(budget.updates, "update"))
    if budget.examples is not None:
        texts.append(counted(budget.examples, "example"))
    return texts


def examples_text(examples: tuple[int, int]) -> str:
    """Says how many examples an epoch trains on."""
    return _range_text(examples, "example")


def epochs_text(epochs: tuple[int, int]) -> str:
    """Says how many epochs the executions had."""
    return _range_text(epochs, "epoch")


def _range_text(bounds: tuple[int, int], noun: str) -> str:
    low, high = bounds
    return counted(low, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def _bounds(values: Iterable[int]) -> tuple[int, int]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]
