"""What a report says of a study."""

import json
from collections.abc import Iterable

from kbatch.document.content import Fact, Section
from kbatch.document.environment import environment_facts
from kbatch.study.caveats import caveats
from kbatch.study.conditions import caption, conditions_of, examples_text
from kbatch.study.decision import decision
from kbatch.study.empty_study import refuse_empty
from kbatch.study.marks import marked_notes, marked_table
from kbatch.study.study_figures import left_out, study_figures
from kbatch.study.study_record import Study
from kbatch.study.trial_table import trial_table


def study_section(study: Study) -> Section:
    """Computes what a report says of a study.

    Args:
        study: A study with at least one trial.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    refuse_empty(study)
    environment = study.search.environment if study.search else None
    words, found, table = decision(study), caveats(study), trial_table(study)
    return Section(
        kind="study",
        name=study.name,
        headline=words.headline,
        lead=tuple(filter(None, (words.speed, words.limit, words.certainty))),
        details=(words.compared,),
        conditions=caption(conditions_of(study)),
        figures=study_figures(study, found, table),
        tables=(marked_table(table, found),),
        notes=(*marked_notes(found, table), *left_out(study)),
        command=environment.command if environment else None,
        settings=_settings(study),
        environment=environment_facts(environment),
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
