"""A few batches of the many that were read, which stand for all of them."""

import math
from typing import Any

import tensorflow as tf

# Batches that the train step alone takes turns with: more where their shapes vary.
_HELD, _HELD_OF_ONE_SHAPE = 8, 4
_MOST_SHAPES = 2 * _HELD

Shapes = tuple[Any, ...]


class HeldBatches:
    """Keeps a few batches of many, and the shapes of them all.

    Every second or fourth batch would not stand for the others where lengths alternate. So the
    shapes of what is chosen are quantiles of all shapes, in the order of their size.
    """

    def __init__(self):
        self._shapes: list[Shapes] = []
        self._first: list[Any] = []
        self._by_shapes: dict[Shapes, Any] = {}

    @property
    def elements(self) -> list[int]:
        """Numbers in each batch that was added, in order."""
        return [_elements(shapes) for shapes in self._shapes]

    def add(self, batch: Any) -> None:
        """Counts a batch, and keeps it where its shapes are new and not much like kept ones."""
        shapes = _shapes_of(batch)
        self._shapes.append(shapes)
        if len(self._first) < _HELD_OF_ONE_SHAPE:
            self._first.append(batch)
        self._by_shapes.setdefault(shapes, batch)
        if len(self._by_shapes) > _MOST_SHAPES:
            del self._by_shapes[_most_like_neighbours(list(self._by_shapes))]

    def chosen(self, *, whole: bool) -> tuple[Any, ...]:
        """Gives up to eight batches, the one in the middle of the sizes first.

        Args:
            whole: Whether all of an epoch was added: the ragged batch at the end of many is left
                out then.
        """
        shapes = self._shapes
        if whole and len(shapes) > _HELD and shapes[-1] not in shapes[:-1]:
            shapes = shapes[:-1]
        if len(set(shapes)) == 1:
            return tuple(self._first)
        in_order = sorted(shapes, key=_size)
        count = min(_HELD, len(in_order))
        places = [(2 * i + 1) * len(in_order) // (2 * count) for i in range(count)]
        found = [self._nearest(in_order[place]) for place in places]
        return tuple(found[count // 2 :] + found[: count // 2])

    def _nearest(self, shapes: Shapes) -> Any:
        if shapes in self._by_shapes:
            return self._by_shapes[shapes]
        size = _elements(shapes)
        return self._by_shapes[min(self._by_shapes, key=lambda kept: abs(_elements(kept) - size))]


def numbers_in(batch: Any) -> int:
    """Counts the numbers in a batch, its own and those that tell where its ragged rows end."""
    return _elements(_shapes_of(batch))


def _shapes_of(batch: Any) -> Shapes:
    # A ragged or sparse part has no length of its own: those of its values tell how long it is.
    parts = tf.nest.flatten(batch, expand_composites=True)
    return tuple(tuple(part.shape) for part in parts if part is not None)


def _most_like_neighbours(shapes: list[Shapes]) -> Shapes:
    """Finds the shapes whose neighbours in size are nearest to each other; never an end."""
    in_order = sorted(shapes, key=_size)
    gaps = [
        _elements(after) - _elements(before)
        for before, after in zip(in_order, in_order[2:], strict=False)
    ]
    return in_order[1 + gaps.index(min(gaps))]


def _size(shapes: Shapes) -> tuple[int, str]:
    return _elements(shapes), repr(shapes)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
