"""An update that was timed in rounds."""

import dataclasses
import statistics

from kbatch.records.ranges import SHORTEST_S, check_ranges


@dataclasses.dataclass(frozen=True)
class TimedRounds:
    """An update that was timed in rounds.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        rounds: Number of each round that it was timed in.
        durations_s: Seconds of the update in each of them.
    """

    batch_size: int
    micro_batch_size: int
    rounds: tuple[int, ...]
    durations_s: tuple[float, ...]

    def __post_init__(self):
        if not self.rounds or len(self.rounds) != len(self.durations_s):
            raise ValueError(
                "A timed update has a duration in each of its rounds, one at least. Received: "
                f"{len(self.rounds)} rounds, {len(self.durations_s)} durations."
            )
        check_ranges(1, micro_batch_size=self.micro_batch_size)
        check_ranges(self.micro_batch_size, batch_size=self.batch_size)
        check_ranges(SHORTEST_S, durations_s=self.durations_s)

    @property
    def median_s(self) -> float:
        """Seconds of the update, the median over the rounds."""
        return statistics.median(self.durations_s)
