"""Pareto fronts: what no other choice beats in both of two qualities."""

from collections.abc import Sequence


def pareto_front(first: Sequence[float], second: Sequence[float]) -> tuple[int, ...]:
    """Finds the choices that no other one beats.

    One choice beats another if it is better in one quality and not worse in the other. Equal
    choices do not beat each other.

    Example:

    >>> pareto_front([1.0, 2.0, 3.0], [0.9, 0.8, 0.85])
    (0, 2)

    Args:
        first: A quality of every choice, more of it is better.
        second: Another one, more of it is better.

    Returns:
        Places of the choices on the front, in ascending order of the first quality.

    Raises:
        ValueError: If the lengths differ.
    """
    if len(first) != len(second):
        raise ValueError(
            "`first` and `second` must have one value a choice each. Received: "
            f"{len(first)} and {len(second)} values."
        )
    front: list[int] = []
    for place in sorted(range(len(first)), key=lambda i: (first[i], second[i]), reverse=True):
        best = front[-1] if front else None
        equal = best is not None and (first[place], second[place]) == (first[best], second[best])
        if best is None or equal or second[place] > second[best]:
            front.append(place)
    return tuple(reversed(front))
