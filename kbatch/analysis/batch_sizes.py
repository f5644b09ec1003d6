"""The batch sizes that a search may try."""

import operator
from collections.abc import Iterable
from typing import Any, Literal


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """List the powers of two from `low` to `high`, both included, ascending.

    Example:

    >>> powers_of_two(16, 100)
    (16, 32, 64)

    Args:
        low: Smallest batch size, in examples.
        high: Largest batch size, in examples.

    Raises:
        TypeError: If a bound is no integer.
        ValueError: If no power of two lies between the bounds.
    """
    low, high = check_size(low, "low"), check_size(high, "high")
    sizes = tuple(2**k for k in range((low - 1).bit_length(), high.bit_length()))
    if not sizes:
        raise ValueError(
            "`powers_of_two(low, high)` needs a power of two from `low` to `high`: widen the "
            f"range. Received: low={low}, high={high}."
        )
    return sizes


def check_batch_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """Check that these are ascending integers, and return them as Python's."""
    given = list(batch_sizes) if isinstance(batch_sizes, Iterable) else None
    if given is None or not all(map(is_integer, given)):
        raise TypeError(
            "`batch_sizes` must be a sequence of integers, such as "
            f"`kbatch.powers_of_two(16, 1024)`. Received: batch_sizes={batch_sizes!r}."
        )
    sizes = tuple(map(operator.index, given))
    if not sizes or sizes[0] < 1 or sizes != tuple(sorted(set(sizes))):
        raise ValueError(
            "`batch_sizes` must be positive and ascending, each size once, such as "
            f"`kbatch.powers_of_two(16, 1024)`. Received: batch_sizes={list(sizes)}."
        )
    return sizes


def check_size(size: int, name: str, *, unit: str = ", in examples") -> int:
    """Check that a number is a positive integer, and return it as Python's."""
    wrong = f"`{name}` must be a positive integer{unit}. Received: {name}={size!r}."
    if not is_integer(size):
        raise TypeError(wrong)
    if size < 1:
        raise ValueError(wrong)
    return operator.index(size)


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number of any library; a bool is none."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_size_or_auto(
    size: int | str | None, name: str, *, unit: str = ", in examples"
) -> int | Literal["auto"] | None:
    if not isinstance(size, str):
        return None if size is None else check_size(size, name, unit=unit)
    if size == "auto":
        return "auto"
    raise ValueError(
        f'`{name}` must be "auto", a positive integer or None. Received: {name}={size!r}.'
    )


def equal_parts(batch_size: int, largest: int) -> int:
    """Return the size of the fewest parts of a batch that are at most `largest` and about equal."""
    parts = -(-batch_size // largest)
    return -(-batch_size // parts)
