"""Checks of the arguments of a tuner."""

import os
from pathlib import Path
from typing import Any

from keras_tuner.src.distribute.utils import has_chief_oracle

from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.study.trial import Objective

STRATEGIES = ("grid", "goodput")


def check_hypermodel(hypermodel: Any) -> None:
    """Checks that batch size is what a hypermodel tunes.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(hypermodel, BatchSizeHyperModel):
        raise TypeError(
            "`hypermodel` must be a `kbatch.BatchSizeHyperModel`: wrap what builds the model, "
            "`BatchSizeHyperModel(build, kbatch.powers_of_two(16, 1024))`. "
            f"Received: hypermodel={hypermodel!r}."
        )


def check_strategy(strategy: Any, distribution_strategy: Any) -> None:
    """Checks that a strategy exists, and can be used here.

    Raises:
        ValueError: If not.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"`strategy` must be one of {list(STRATEGIES)}. Received: strategy={strategy!r}."
        )
    if strategy == "goodput" and distribution_strategy is not None:
        raise ValueError(
            'The throughput sweep of `strategy="goodput"` is measured on one device: leave out '
            '`distribution_strategy`, or take "grid". Received: both.'
        )
    if strategy == "goodput" and has_chief_oracle():
        raise ValueError(
            'With `strategy="goodput"` one trial decides on the next: run the script without '
            '`kbatch distribute`, or take "grid" for several workers. Received: a worker or chief.'
        )


def check_isolation(isolate: bool, distribution_strategy: Any) -> None:
    """Checks that trials can run in processes of their own, where they are to.

    Raises:
        ValueError: If they cannot.
    """
    if isolate and distribution_strategy is not None:
        raise ValueError(
            "A `distribution_strategy` holds the devices of this process: leave it out, or "
            "`isolate=True`. Received: isolate=True and a distribution_strategy."
        )


def check_resume(resume: Any) -> None:
    """Checks that a way to go on exists.

    Raises:
        ValueError: If it does not.
    """
    if resume not in ("checked", "unchecked"):
        raise ValueError(f'`resume` must be "checked" or "unchecked". Received: resume={resume!r}.')


def check_count(count: Any, name: str, *, least: int) -> int:
    """Checks a number of things.

    Raises:
        ValueError: If it is no integer, or too small.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}. Received: {name}={count!r}."
        )
    return count


def check_directory(directory: str | Path | None, project_name: str | None) -> None:
    """Checks that the folder of a search can be made and written.

    Raises:
        ValueError: If not.
    """
    if "://" in str(directory):
        return  # `check_local` refuses it.
    folder = Path(directory or ".", project_name or "untitled_project")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        raise ValueError(
            "`directory` must be a folder in which the search can make its own: give another "
            f"`directory` or `project_name`. Received: directory={str(directory)!r}, "
            f"project_name={project_name!r} ({error.strerror or error})."
        ) from error


def check_verbose(verbose: Any) -> int:
    """Checks how much a search shows; "auto" is 1.

    Raises:
        ValueError: If it is something else.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(f'`verbose` must be "auto", 0, 1 or 2. Received: verbose={verbose!r}.')
    return 1 if verbose == "auto" else int(verbose)


def check_objective(objective: Objective, recorded: Objective, *, project: str) -> None:
    """Checks that a search goes on with the objective of its records.

    Raises:
        ValueError: If it does not.
    """
    if objective != recorded:
        raise ValueError(
            f"The project directory {project} holds a search with another objective: give another "
            "`project_name`, or `overwrite=True` to start over. Received: "
            f"objective={objective}, there: {recorded}."
        )
