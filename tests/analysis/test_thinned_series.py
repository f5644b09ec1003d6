import numpy as np
import pytest

from kbatch.analysis.throughput import ThinnedSeries


def series(readings, most):
    found = ThinnedSeries(columns=len(readings[0]) if readings else 1, most=most)
    for reading in readings:
        found.add(reading)
    return found


def known_mean(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def naive_means(readings, most):
    """Cuts the whole series into pieces of the shortest power of two that leaves few enough."""
    length = 1
    while len(readings) > most * length:
        length *= 2
    pieces = [readings[start : start + length] for start in range(0, len(readings), length)]
    return [tuple(known_mean(column) for column in zip(*piece, strict=True)) for piece in pieces]


def as_floats(rows):
    return [[np.nan if value is None else value for value in row] for row in rows]


@pytest.mark.parametrize("most", [2, 4, 10])
@pytest.mark.parametrize("count", [1, 3, 9, 41, 333])
def test_the_pieces_are_those_of_the_whole_series(count, most):
    rng = np.random.default_rng(count)
    readings = [
        tuple(None if rng.random() < 0.2 else float(rng.normal()) for _ in range(3))
        for _ in range(count)
    ]
    found = series(readings, most)
    np.testing.assert_allclose(as_floats(found.means), as_floats(naive_means(readings, most)))
    np.testing.assert_allclose(as_floats([found.mean]), as_floats(naive_means([*readings], 1)[:1]))
    assert found.readings == count


def test_there_are_never_more_than_the_bound_and_never_needlessly_few():
    for count in range(1, 70):
        assert min(count, 4) <= len(series([(1.0,)] * count, 8).means) <= 8


@pytest.mark.parametrize("most", [0, 3, -2])
def test_a_bound_that_cannot_be_halved_is_refused(most):
    with pytest.raises(ValueError, match=f"even.*Received: most={most}"):
        ThinnedSeries(columns=1, most=most)
