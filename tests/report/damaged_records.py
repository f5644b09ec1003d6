"""Damage to the JSON of a record: fields that are missing, or hold something else."""

import copy

OTHERS = (None, True, "x", {"a": 1})


def damaged(document, rng):
    """A copy of a record's document with one to three of its fields changed or missing."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        by_field = {}
        for place in _places(document["record"], ("record",)):
            by_field.setdefault(tuple(k for k in place if isinstance(k, str)), []).append(place)
        # Each field as often as the others: most values are those of epochs.
        *parents, key = rng.choice(by_field[rng.choice(sorted(by_field))])
        owner = document
        for parent in parents:
            owner = owner[parent]
        _damage(owner, key, rng)
    return document


def _places(value, place):
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))


def _damage(owner, key, rng):
    if isinstance(owner, dict) and rng.random() < 0.3:
        del owner[key]
    else:
        owner[key] = rng.choice(OTHERS)
