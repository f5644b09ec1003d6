"""A series of readings of any length, kept as a bounded number of means."""

from collections.abc import Sequence

MOST_PIECES = 100


class ThinnedSeries:
    """Keeps the means of consecutive pieces of a series, all of one length but the last.

    Whenever the number of pieces reaches the bound, neighbours are joined: memory and record
    stay small however long the series grows, and the mean of the whole is kept.

    Example:

    >>> series = ThinnedSeries(columns=1, most=2)
    >>> for reading in (1, 2, 3, 4):
    ...     series.add((reading,))
    >>> series.means
    [(1.5,), (3.5,)]

    Args:
        columns: Numbers in a reading.
        most: Largest number of pieces, even.
    """

    def __init__(self, *, columns: int, most: int = MOST_PIECES):
        if most < 2 or most % 2:
            raise ValueError(f"`most` must be even and positive. Received: most={most}.")
        self._most = most
        self._columns = columns
        self._pieces: list[list[tuple[float, int]]] = []
        self._length = 1
        self._room = 0
        self.readings = 0

    def add(self, reading: Sequence[float | None]) -> None:
        """Takes one more reading.

        Args:
            reading: A number a column, None where it is not known.
        """
        self.readings += 1
        if not self._room:
            if len(self._pieces) == self._most:
                self._join_neighbours()
            self._pieces.append([(0.0, 0)] * self._columns)
            self._room = self._length
        self._room -= 1
        last = self._pieces[-1]
        for column, value in enumerate(reading):
            if value is not None:
                total, count = last[column]
                last[column] = (total + value, count + 1)

    @property
    def means(self) -> list[tuple[float | None, ...]]:
        """The mean of each piece, a number a column, None where none is known."""
        return [tuple(_mean(sums) for sums in piece) for piece in self._pieces]

    @property
    def mean(self) -> tuple[float | None, ...]:
        """The mean of all readings, a number a column, None where none is known."""
        return tuple(_mean(_joined(column)) for column in self._by_column())

    def _by_column(self) -> list[list[tuple[float, int]]]:
        return [[piece[column] for piece in self._pieces] for column in range(self._columns)]

    def _join_neighbours(self) -> None:
        pairs = zip(self._pieces[::2], self._pieces[1::2], strict=True)
        self._pieces = [[_joined(sums) for sums in zip(*pair, strict=True)] for pair in pairs]
        self._length *= 2


def _joined(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return sum(total for total, _ in sums), sum(count for _, count in sums)


def _mean(sums: tuple[float, int]) -> float | None:
    total, count = sums
    return total / count if count else None
