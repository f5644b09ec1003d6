"""Damage to the JSON of a record: by a broken disk, another program or somebody hostile."""

import copy

HOSTILE = (
    *(None, True, 0, -1, 2**70, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 1e99),
    *("", "x", "../../x", "$\\frac$", "$a$ _b", "a\ud800b", "\x00\x1b[2J", "=1+1", "9" * 300),
    *([], {}, [1], {"a": 1}, [[]], [None], {"": None}),
)


def damaged(document, rng):
    """A copy of a record's document with one to three of its values changed, missing or doubled."""
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
    match rng.randrange(6):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.append(owner[key])
        case 2 | 3 if isinstance(owner[key], (int, float)):
            owner[key] *= rng.choice((-1, 0, 10, 10**6, 10**30))
        case _:
            owner[key] = rng.choice(HOSTILE)
