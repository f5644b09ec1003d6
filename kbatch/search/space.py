"""The hyperparameter space of a search: its grid, and keys that compare combinations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras_tuner

Values = dict[str, Any]
Key = frozenset[tuple[str, str]]


def untried_in_grid(
    space: keras_tuner.HyperParameters, tried: Iterable[Values]
) -> Iterator[Values]:
    """Return the combinations of a space that no trial has, in the order of the grid."""
    keys_tried = {in_grid(space, values) for values in tried}
    return (values for values in grid(space) if in_grid(space, values) not in keys_tried)


def in_grid(space: keras_tuner.HyperParameters, values: Mapping[str, Any]) -> Key:
    """Return the key of a trial's combination, with defaults for parameters that it lacks."""
    combination: Values = {}
    for parameter in space.space:
        if parameter.name not in combination and _is_active(parameter, combination):
            combination[parameter.name] = values.get(parameter.name, parameter.default)
    return key_of(combination)


def grid(space: keras_tuner.HyperParameters) -> Iterator[Values]:
    """Return every combination of a space: defaults first, and the last name changes fastest."""
    return _extensions({}, tuple(space.space))


def _extensions(values: Values, parameters: Sequence[Any]) -> Iterator[Values]:
    if not parameters:
        yield values
        return
    first, rest = parameters[0], parameters[1:]
    choices = [values]
    if first.name not in values and _is_active(first, values):
        # keras-tuner samples a range into a set, which has no order.
        samples = sorted(first.values) if hasattr(first, "min_value") else first.values
        # Trials that are read from files have numbers of Python, not of NumPy.
        samples = (v.item() if hasattr(v, "item") else v for v in (first.default, *samples))
        choices = [values | {first.name: value} for value in dict.fromkeys(samples)]
    for choice in choices:
        yield from _extensions(choice, rest)


def _is_active(parameter: Any, values: Values) -> bool:
    return all(condition.is_active(values) for condition in parameter.conditions)


def key_of(values: Mapping[str, Any]) -> Key:
    # `True == 1`, but their texts differ.
    return frozenset((name, repr(value)) for name, value in values.items())
