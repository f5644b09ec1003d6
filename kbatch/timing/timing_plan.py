"""When what is timed in rounds has been timed enough."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.median_interval import FEWEST_VALUES, median_interval


@dataclasses.dataclass(frozen=True)
class TimingPlan:
    """When a contender has been timed enough.

    Attributes:
        time_budget_s: Seconds after which no block is begun, once each contender had one.
        needed_calls: Calls that the asked quantile needs.
        block_s: Least seconds that a contender runs in a round.
        precision: Share of the median over the rounds to which its 95 % interval shall reach, to
            each side.
        rounds_beyond: Most rounds after the needed calls were made.
        first_calls_count: Whether first calls, which trace and compile, are charged to the budget.
    """

    time_budget_s: float = 60.0
    needed_calls: int = 59
    block_s: float = 0.05
    precision: float = 0.05
    rounds_beyond: int = 30
    first_calls_count: bool = True


class Block(NamedTuple):
    """One turn of a contender.

    Attributes:
        round: Number of the round, from 0.
        durations_s: Seconds of each call.
        sm_clock_mhz: Clock of the GPU's multiprocessors at its end, in MHz, None if not read.
    """

    round: int
    durations_s: tuple[float, ...]
    sm_clock_mhz: float | None = None


def block_clocks(blocks: Sequence[Block]) -> tuple[float | None, ...]:
    """Return the clock of each block; none where no clock was read."""
    clocks = tuple(block.sm_clock_mhz for block in blocks)
    return () if all(clock is None for clock in clocks) else clocks


def timed_enough(blocks: list[Block], plan: TimingPlan) -> bool:
    """Tells whether a contender may leave.

    It may with the needed calls and the precision, or many rounds after the needed calls.
    """
    with_calls = rounds_with_calls(blocks, plan.needed_calls)
    if with_calls is None or len(blocks) < FEWEST_VALUES:
        return False
    if len(blocks) >= with_calls + plan.rounds_beyond:
        return True
    medians_s = [statistics.median(block.durations_s) for block in blocks]
    interval = median_interval(medians_s)
    if interval is None:
        return False
    return interval.high - interval.low <= 2 * plan.precision * statistics.median(medians_s)


def rounds_with_calls(blocks: list[Block], calls: int) -> int | None:
    """Counts the rounds until as many calls were made, None where they were not."""
    made = 0
    for count, block in enumerate(blocks, start=1):
        made += len(block.durations_s)
        if made >= calls:
            return count
    return None
