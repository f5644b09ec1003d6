"""Ranges of the numbers in a record."""

from collections.abc import Sequence

# No clock tells less apart.
SHORTEST_S = 1e-9


def check_ranges(least: float, /, **numbers: float | Sequence[float] | None) -> None:
    """Checks that numbers of a record are large enough; unknown ones (None, NaN) are.

    Args:
        least: The least that each may be.
        **numbers: The numbers by their names, or sequences of them.

    Raises:
        ValueError: If one is smaller.
    """
    for name, found in numbers.items():
        for number in found if isinstance(found, Sequence) else (found,):
            if number is not None and number < least:
                raise ValueError(f"`{name}` must be at least {least}. Received: {name}={number}.")
