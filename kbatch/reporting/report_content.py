"""What a report says, computed before it is rendered."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from kbatch.records.environment import EnvironmentRecord
from kbatch.records.study import Study
from kbatch.reporting.caveats import caveats
from kbatch.reporting.conditions import caption, conditions_of, examples_text
from kbatch.reporting.decision import Decision, decision
from kbatch.reporting.empty_study import refuse_empty
from kbatch.reporting.figures.trials_info import alt_text, trials_info
from kbatch.reporting.number_text import gibibytes
from kbatch.reporting.trial_table import TrialTable, trial_table


class Fact(NamedTuple):
    """A name with its value.

    Attributes:
        name: What it is.
        value: Its value as text.
    """

    name: str
    value: str


class ReportContent(NamedTuple):
    """What a report says.

    Attributes:
        name: Name of the study.
        decision: The decision in sentences.
        conditions: Device, versions and budget in a line.
        alt_text: Description of the figure.
        table: The trials.
        caveats: What limits the conclusions.
        environment: Machine and software.
        command: The command line that ran the search, None if it was not recorded.
        settings: Arguments of the hypermodel, the number of training examples and the seeds.
    """

    name: str
    decision: Decision
    conditions: str
    alt_text: str
    table: TrialTable
    caveats: tuple[str, ...]
    environment: tuple[Fact, ...]
    command: str | None
    settings: tuple[Fact, ...]


def report_content(study: Study) -> ReportContent:
    """Computes what a report of a study says.

    Args:
        study: A study with at least one trial.

    Returns:
        The content.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    refuse_empty(study)
    environment = study.search.environment if study.search else None
    return ReportContent(
        name=study.name,
        decision=decision(study),
        conditions=caption(conditions_of(study)),
        alt_text=alt_text(trials_info(study)),
        table=trial_table(study),
        caveats=caveats(study),
        environment=_environment_facts(environment) if environment else (),
        command=environment.command if environment else None,
        settings=_settings(study),
    )


def _environment_facts(environment: EnvironmentRecord) -> tuple[Fact, ...]:
    memory, load = environment.memory_bytes, environment.load_average
    unknown = "n/a (the system does not tell)"
    return (
        Fact("Started", environment.created_at),
        Fact("Device", environment.device),
        Fact("Processor", f"{environment.cpu}, {environment.cpu_count} usable"),
        Fact("Host memory", gibibytes(memory) if memory else unknown),
        Fact("Load average at the start", unknown if load is None else f"{load:.2f}"),
        Fact("Platform", environment.platform),
        *(Fact(name, version) for name, version in environment.versions.items()),
    )


def _settings(study: Study) -> tuple[Fact, ...]:
    settings = study.search.settings if study.search else {}
    executions = [e for trial in study.trials for e in trial.executions]
    examples = conditions_of(study).examples
    seeds = dict.fromkeys("none" if e.seed is None else str(e.seed) for e in executions)
    return (
        *(Fact(name, json.dumps(value, ensure_ascii=False)) for name, value in settings.items()),
        Fact(
            "training data",
            f"{examples_text(examples)} an epoch" if examples else "n/a (no trial completed)",
        ),
        Fact("optimizer", _different(e.optimizer for e in executions)),
        Fact("jit_compile", _different(e.jit_compile for e in executions)),
        Fact("seeds of the executions", ", ".join(seeds)),
    )


def _different(values: Iterable[object]) -> str:
    known = dict.fromkeys(str(value) for value in values if value is not None)
    return ", ".join(known) or "n/a (no model was built)"
