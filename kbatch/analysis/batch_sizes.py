"""The batch sizes that a search may try."""

import operator
from collections.abc import Iterable
from typing import Literal

# Beyond it a float does not hold every integer, and indices of the rows overflow.
LARGEST_SIZE = 2**53


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
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(
                f"`{name}` must be an integer, in examples. Received: {name}={value!r}."
            )
    low, high = operator.index(low), operator.index(high)
    sizes = tuple(2**k for k in range(max(0, low - 1).bit_length(), max(0, high).bit_length()))
    if low < 1 or not sizes:
        raise ValueError(
            "`powers_of_two(low, high)` needs 1 <= low <= high with a power of two between "
            f"them: widen the range. Received: low={low}, high={high}."
        )
    return sizes


def check_batch_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Iterable):
        raise TypeError(
            "`batch_sizes` must be a sequence of integers, such as "
            f"`kbatch.powers_of_two(16, 1024)`. Received: batch_sizes={batch_sizes!r}."
        )
    received = list(batch_sizes)

    def refusal(wrong: str) -> str:
        hint = "Pass ascending positive integers, such as `kbatch.powers_of_two(16, 1024)`."
        return f"`batch_sizes` {wrong}. {hint} Received: batch_sizes={received}."

    try:
        sizes = tuple(operator.index(size) for size in received)
    except TypeError as error:
        raise TypeError(refusal("must be integers")) from error
    if any(isinstance(size, bool) for size in received):
        raise TypeError(refusal("must be integers"))
    faults = {
        "is empty": not sizes,
        "must be positive": min(sizes, default=1) < 1,
        "must be at most 2**53": max(sizes, default=1) > LARGEST_SIZE,
        "repeats a size": len(set(sizes)) < len(sizes),
        "must be in ascending order": sizes != tuple(sorted(sizes)),
    }
    for wrong, found in faults.items():
        if found:
            raise ValueError(refusal(wrong))
    return sizes


def check_size(size: int, name: str, *, unit: str = ", in examples") -> int:
    message = f"`{name}` must be a positive integer{unit}. Received: {name}={size!r}."
    try:
        whole = operator.index(size)
    except TypeError as error:
        raise TypeError(message) from error
    if isinstance(size, bool):
        raise TypeError(message)
    if whole < 1:
        raise ValueError(message)
    if whole > LARGEST_SIZE:
        raise ValueError(f"`{name}` must be at most 2**53. Received: {name}={size!r}.")
    return whole


def check_auto(
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
