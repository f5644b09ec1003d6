"""Why a study supports no decision, and what to do about it."""

from kbatch.document.number_text import counted, listed
from kbatch.records.target import COST_NAMES
from kbatch.study.outcomes import outcome
from kbatch.study.study_record import Study


def missing_reason(study: Study) -> str:
    """Words why no trial is the best, as the end of a sentence."""
    words = [outcome(trial) for trial in study.trials]
    if "completed" in words:
        return f"no completed trial has the objective {study.trials[0].objective.name}"
    kinds = listed(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
    return f"none of {counted(len(words), 'trial')} completed ({kinds})"


def what_to_do(study: Study) -> str:
    """Advises what to change before the next search."""
    outcomes = {outcome(trial) for trial in study.trials}
    if "completed" in outcomes:
        return _missing_objective(study)
    if outcomes == {"out of memory"}:
        return "Search again with a smaller `micro_batch_size`, which needs less memory."
    if outcomes == {"diverged"}:
        return "Search again with a smaller learning rate, or with a model that stays finite."
    if outcomes <= {"running", "interrupted"}:
        return "Let the search come to its end: run it again."
    memory = (
        " Those out of memory need a smaller `micro_batch_size`."
        if "out of memory" in outcomes
        else ""
    )
    return f"Read the failures below, mend their cause, then search again.{memory}"


def _missing_objective(study: Study) -> str:
    objective = study.trials[0].objective.name
    if objective == "samples_per_second":
        return "Training was too short for its speed to be measured: train longer."
    if objective in COST_NAMES:
        return "No trial met the target in its budget: train longer, or for a target nearer by."
    epochs = [p for t in study.trials for e in t.executions for p in e.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return f"The objective {objective} was not finite in any epoch: mend the metric."
    among = f"The objective {objective} was not among the metrics: {', '.join(names) or 'none'}."
    validated = any(name.startswith("val_") for name in names)
    if objective.startswith("val_") and not validated:
        return f"{among} Give `validation_data`, or search for another objective."
    return f"{among} Compile the model with that metric, or search for another objective."
