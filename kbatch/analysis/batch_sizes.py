"""Lists of batch sizes, and checks of arguments that are batch sizes."""

import operator
from collections.abc import Iterable
from typing import Any, Literal


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """List the powers of two from `low` to `high`, both included, ascending.

    Example:

    >>> powers_of_two(16, 100)
    (16, 32, 64)

    Args:
        low: Integer. Smallest batch size, in examples.
        high: Integer. Largest batch size, in examples.

    Returns:
        The batch sizes as a tuple of `int`.

    Raises:
        TypeError: If a bound is not an integer.
        ValueError: If there is no power of two between the bounds.
    """
    low, high = check_size(low, "low"), check_size(high, "high")
    sizes = tuple(2**k for k in range((low - 1).bit_length(), high.bit_length()))
    if not sizes:
        raise ValueError(f"The range must hold a power of two. Received: low={low}, high={high}.")
    return sizes


def check_batch_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """Check that batch sizes are ascending integers, and return them as Python's `int`."""
    wrong = (
        "`batch_sizes` must be positive integers in ascending order without duplicates, such as "
        f"`kbatch.powers_of_two(16, 1024)`. Received: batch_sizes={batch_sizes!r}."
    )
    items: list[Any] = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [None]
    if not all(map(is_integer, items)):
        raise TypeError(wrong)
    sizes = tuple(map(operator.index, items))
    if not sizes or sizes[0] < 1 or sizes != tuple(sorted(set(sizes))):
        raise ValueError(wrong)
    return sizes


def check_size(size: int, name: str, *, unit: str = ", in examples") -> int:
    """Check that a number is a positive integer, and return it as Python's `int`."""
    wrong = f"`{name}` must be a positive integer{unit}. Received: {name}={size!r}."
    if not is_integer(size) or size < 1:
        raise (ValueError if is_integer(size) else TypeError)(wrong)
    return operator.index(size)


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of any library. A bool is not."""
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
    """Return the size of the fewest equal parts of a batch that are at most `largest`."""
    parts = -(-batch_size // largest)
    return -(-batch_size // parts)
