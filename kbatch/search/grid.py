"""The grid: every combination of a search space, in an order that never changes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras_tuner

Values = dict[str, Any]


def untried_in_grid(
    space: keras_tuner.HyperParameters, tried: Iterable[Values]
) -> Iterator[Values]:
    """Gives the combinations of a space that no trial has, in the order of the grid.

    It knows nothing but the space and the trials, so a search that goes on after an interruption
    goes the way of one that was never interrupted.

    Args:
        space: The hyperparameters, conditional ones after their parents.
        tried: Values of the trials there are. A hyperparameter that a trial lacks, because it was
            found later, counts as its default.

    Yields:
        Values of the active hyperparameters, by name.
    """
    taken = {_key(_completed(space, values)) for values in tried}
    return (values for values in grid(space) if _key(values) not in taken)


def grid(space: keras_tuner.HyperParameters) -> Iterator[Values]:
    """Gives every combination of a space: the last hyperparameter changes fastest.

    Each hyperparameter begins with its default. A range without a step gives the ten values that
    keras-tuner samples from it.

    Args:
        space: The hyperparameters, conditional ones after their parents.

    Yields:
        Values of the active hyperparameters, by name.
    """
    return _extensions({}, tuple(space.space))


def _extensions(values: Values, parameters: Sequence[Any]) -> Iterator[Values]:
    if not parameters:
        yield values
        return
    first, rest = parameters[0], parameters[1:]
    if first.name in values or not _active(first, values):
        yield from _extensions(values, rest)
        return
    for value in _ordered(first):
        yield from _extensions(values | {first.name: value}, rest)


def _completed(space: keras_tuner.HyperParameters, values: Values) -> Values:
    """Gives what a trial has of the active hyperparameters, defaults for what it lacks."""
    found: Values = {}
    for parameter in space.space:
        if parameter.name not in found and _active(parameter, found):
            found[parameter.name] = values.get(parameter.name, parameter.default)
    return found


def _active(parameter: Any, values: Values) -> bool:
    return all(condition.is_active(values) for condition in parameter.conditions)


def _ordered(parameter: Any) -> list[Any]:
    values = [_plain(value) for value in parameter.values]
    if hasattr(parameter, "min_value"):
        values.sort()  # keras-tuner's samples of a range come out of a set.
    return list(dict.fromkeys([_plain(parameter.default), *values]))


def _plain(value: Any) -> Any:
    """Gives one of NumPy's numbers as Python's, as it is read back from a file."""
    return value.item() if hasattr(value, "item") else value


def _key(values: Values) -> frozenset[tuple[str, str]]:
    # The text tells True from 1, which are equal as values.
    return frozenset((name, repr(value)) for name, value in values.items())
