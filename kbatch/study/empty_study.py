"""The refusal of a study without trials."""

from kbatch.study.study_record import Study


def refuse_empty(study: Study) -> None:
    """Raises when there is nothing to show.

    Raises:
        ValueError: If the study has no trial, with what to run.
    """
    if study.trials:
        return
    problems = " ".join(study.problems)
    raise ValueError(
        f"The study {study.name!r} has no trial: run `tuner.search(x, y)` with a "
        "`kbatch.BatchSizeHyperModel`, or `kbatch demo`, then load it again. "
        + (f"What is missing: {problems} " if problems else "")
        + "Received: study.trials=()."
    )
