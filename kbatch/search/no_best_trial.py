"""What is said where no trial completed."""

from pathlib import Path

from kbatch.study.loading import load_study
from kbatch.study.no_decision import missing_reason, what_to_do
from kbatch.study.outcomes import outcome
from kbatch.study.study_record import Study

_MOST_CAUSES = 5


def no_best_trial(project: Path) -> str:
    """Words why a project has no best trial, and what to do.

    Args:
        project: The project directory.
    """
    try:
        study = load_study(project)
    except FileNotFoundError:
        study = Study(project.name, ())
    if not study.trials:
        return f"There is no best trial: call `search` first. Received: no trial in {project}."
    return (
        f"There is no best trial: {missing_reason(study)}. {what_to_do(study)} Trials that failed "
        "are kept as results: give another `project_name`, or `overwrite=True`, to run them again. "
        f"Received: {'; '.join(_causes(study))}."
    )


def _causes(study: Study) -> list[str]:
    causes = [f"batch size {t.batch_size}: {t.failure or outcome(t)}" for t in study.trials]
    more = len(causes) - _MOST_CAUSES
    return causes[:_MOST_CAUSES] + ([f"{more} more"] if more > 0 else [])
