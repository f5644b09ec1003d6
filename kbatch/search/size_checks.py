"""Checks of the sizes that a search is given."""

from typing import Literal

import keras_tuner

from kbatch.analysis.batch_sizes import check_size
from kbatch.errors import InputError

_LARGEST_DEFAULT_VALIDATION_BATCH = 256


def check_space(hp: keras_tuner.HyperParameters, batch_sizes: tuple[int, ...]) -> None:
    """Checks that a search space has no other batch sizes already.

    Raises:
        InputError: If it has.
    """
    for parameter in hp.space:
        values = getattr(parameter, "values", batch_sizes)
        if parameter.name == "batch_size" and tuple(values) != batch_sizes:
            raise InputError(
                "The search space has another `batch_size` already, from the project directory "
                "or from `hyperparameters=`: give another `project_name`, or `overwrite=True` "
                f"to start over. Received: batch_sizes={batch_sizes}, there: {tuple(values)}."
            )


def check_base_batch_size(
    base_batch_size: int, batch_sizes: tuple[int, ...], *, rule: str | None
) -> None:
    """Checks that the noise scale of the base batch size is measured, where a rule needs it.

    Raises:
        ValueError: If it is not.
    """
    if rule == "noise" and base_batch_size not in batch_sizes:
        raise ValueError(
            '`learning_rate_scaling="noise"` measures the noise scale in the trial of '
            "`base_batch_size`: it must be one of `batch_sizes`. Received: "
            f"base_batch_size={base_batch_size}, batch_sizes={batch_sizes}."
        )


def replica_rows(batch_size: int, replicas: int) -> int:
    """Gives the rows that a replica has of a batch, the most where they differ by one.

    Raises:
        InputError: If a replica had none.
    """
    if batch_size < replicas:
        raise InputError(
            "A batch is shared by all replicas, each of which needs an example: leave the sizes "
            f"below {replicas} out of `batch_sizes`. Received: batch_size={batch_size}."
        )
    return -(-batch_size // replicas)


def size_or_none(size: int | None, name: str) -> int | None:
    """Checks a size that may be left out.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is not positive.
    """
    return None if size is None else check_size(size, name)


def check_micro_batch_size(size: int | str | None) -> int | Literal["auto"] | None:
    """Checks a micro-batch size.

    Raises:
        TypeError: If it is neither "auto", None nor an integer.
        ValueError: If it is not positive, or another word.
    """
    if size is None or size == "auto":
        return size
    if isinstance(size, str):
        raise ValueError(
            '`micro_batch_size` must be "auto", a positive integer or None. '
            f"Received: micro_batch_size={size!r}."
        )
    return check_size(size, "micro_batch_size")


def default_validation_batch_size(
    batch_sizes: tuple[int, ...], micro_batch_size: int | None
) -> int:
    """Gives the size of a validation batch where none was chosen."""
    moderate = [size for size in batch_sizes if size <= _LARGEST_DEFAULT_VALIDATION_BATCH]
    return micro_batch_size or max(moderate, default=_LARGEST_DEFAULT_VALIDATION_BATCH)
