"""Values measured once a round, and the ratio of two contenders over the rounds.

Contenders that take turns within a round meet the same machine, so the ratio of a round holds
where the machine drifts. Ratios are averaged as logarithms: twice as fast and half as fast
cancel.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kbatch.analysis.intervals import Interval, mean_interval

# From here on the sign test's interval leaves out the lowest and the highest round.
_ROUNDS_FOR_ORDER = 9


@dataclasses.dataclass(frozen=True)
class RoundEstimate:
    """The median over rounds.

    Attributes:
        value: The median, in the unit of the values.
        interval: Interval of 95 % confidence; None for fewer than three rounds.
        rounds: How many rounds there were.
    """

    value: float
    interval: Interval | None
    rounds: int


def over_rounds(values: Sequence[float]) -> RoundEstimate | None:
    """Summarises positive values of several rounds.

    With nine rounds or more the interval is that of the sign test, between order statistics: one
    disturbed round does not widen it. With fewer it is Student's, of the logarithms.

    Args:
        values: One positive value a round.

    Returns:
        The estimate, None without rounds.

    Raises:
        ValueError: If a value is not positive and finite.
    """
    if not len(values):
        return None
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError(
            f"Values of rounds must be positive and finite. Received: values={list(values)}."
        )
    median = float(np.median(values))
    return RoundEstimate(median, _interval(sorted(values)), len(values))


def ratio_over_rounds(
    numerator: Sequence[float], denominator: Sequence[float]
) -> RoundEstimate | None:
    """Summarises the ratio of two contenders, paired by round.

    Args:
        numerator: One positive value a round.
        denominator: One positive value a round, of the same rounds.

    Returns:
        The estimate, None without rounds.

    Raises:
        ValueError: If the rounds are not the same.
    """
    if len(numerator) != len(denominator):
        raise ValueError(
            "Both contenders must have been measured in the same rounds. Received: "
            f"{len(numerator)} and {len(denominator)} rounds."
        )
    return over_rounds([n / d for n, d in zip(numerator, denominator, strict=True)])


def _interval(ascending: Sequence[float]) -> Interval | None:
    rounds = len(ascending)
    if rounds >= _ROUNDS_FOR_ORDER:
        outside = _left_out(rounds)
        return Interval(float(ascending[outside]), float(ascending[-1 - outside]))
    logarithms = mean_interval([math.log(value) for value in ascending])
    return logarithms and Interval(math.exp(logarithms.low), math.exp(logarithms.high))


def _left_out(rounds: int) -> int:
    """Counts the values that may be left out at each end for 95 %, at least six rounds given."""
    outside, values = 2 / 2**rounds, 0
    while outside + 2 * math.comb(rounds, values + 1) / 2**rounds <= 0.05:
        values += 1
        outside += 2 * math.comb(rounds, values) / 2**rounds
    return values
