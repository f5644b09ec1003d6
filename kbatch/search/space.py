"""The space of a search: its grid, and keys by which combinations are compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras_tuner

Values = dict[str, Any]
Key = frozenset[tuple[str, str]]


def untried_in_grid(
    space: keras_tuner.HyperParameters, tried: Iterable[Values]
) -> Iterator[Values]:
    """Return the combinations of a space that no trial has, in the order of the grid."""
    taken = {in_grid(space, values) for values in tried}
    return (values for values in grid(space) if in_grid(space, values) not in taken)


def in_grid(space: keras_tuner.HyperParameters, values: Mapping[str, Any]) -> Key:
    """Return the combination of a space that a trial is: defaults stand for what it lacks."""
    found: Values = {}
    for parameter in space.space:
        if parameter.name not in found and _active(parameter, found):
            found[parameter.name] = values.get(parameter.name, parameter.default)
    return key_of(found)


def grid(space: keras_tuner.HyperParameters) -> Iterator[Values]:
    """Return every combination of a space, defaults first, the last name changing fastest."""
    return _extensions({}, tuple(space.space))


def _extensions(values: Values, parameters: Sequence[Any]) -> Iterator[Values]:
    if not parameters:
        yield values
        return
    first, rest = parameters[0], parameters[1:]
    choices = [values]
    if first.name not in values and _active(first, values):
        # keras-tuner's samples of a range come out of a set.
        own = sorted(first.values) if hasattr(first, "min_value") else first.values
        # A file gives back numbers of Python's, not NumPy's.
        own = (one.item() if hasattr(one, "item") else one for one in (first.default, *own))
        choices = [values | {first.name: value} for value in dict.fromkeys(own)]
    for choice in choices:
        yield from _extensions(choice, rest)


def _active(parameter: Any, values: Values) -> bool:
    return all(condition.is_active(values) for condition in parameter.conditions)


def key_of(values: Mapping[str, Any]) -> Key:
    # By their text True differs from 1, which are equal as values.
    return frozenset((name, repr(value)) for name, value in values.items())
