"""Sizes of memory as people write them."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}I": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([\d.]+)\s*([KMGT]?I?)B?")


def memory_size(text: str) -> int:
    """Reads a size of memory.

    Example:

    >>> memory_size("2GiB"), memory_size("500MB")
    (2147483648, 500000000)

    Raises:
        ValueError: If it is none.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    try:
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise ValueError(
            f"A size of memory is a number with a unit, such as 2GiB or 500MB. Received: {text}."
        )
    return size
