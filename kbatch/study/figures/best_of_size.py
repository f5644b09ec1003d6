"""One trial for each batch size: the best one, which figures over batch size show."""

from kbatch.document.number_text import counted
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord


def best_of_size(study: Study) -> dict[int, TrialRecord]:
    """Picks the trial of each batch size with the best objective, completed ones first."""
    found: dict[int, TrialRecord] = {}
    for trial in sorted(study.trials, key=_rank):
        found.setdefault(trial.batch_size, trial)
    return dict(sorted(found.items()))


def best_of_size_note(study: Study) -> tuple[str, ...]:
    """Says that the best trials are shown, nothing where each size has one trial."""
    sizes = {trial.batch_size for trial in study.trials}
    if len(sizes) == len(study.trials):
        return ()
    return (
        f"Shown: the best trial of each batch size, {len(sizes):,} of "
        f"{counted(len(study.trials), 'trial')}.",
    )


def _rank(trial: TrialRecord) -> tuple[bool, bool, float]:
    value = trial.objective_value
    sign = -1 if trial.objective.direction == "max" else 1
    return (trial.status != "completed", value is None, sign * (value or 0.0))
