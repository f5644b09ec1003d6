"""Energy in joules, from a counter or from readings of power."""

from typing import NamedTuple


class PowerIntegral(NamedTuple):
    """The energy between the first and the last reading of a power.

    E = sum over i of (P_i + P_(i+1)) / 2 (t_(i+1) - t_i), the trapezoid rule: exact for a power
    that is linear between its readings.

    Example:

    >>> PowerIntegral().add(0.0, 100.0).add(2.0, 200.0).energy_j
    300.0

    Attributes:
        energy_j: The energy so far, in joules; 0 before the second reading.
        first_s: Time of the first reading in seconds, None before it.
        last_s: Time of the last reading in seconds, None before the first.
        last_w: The last reading, in watts.
    """

    energy_j: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    last_w: float = 0.0

    def add(self, time_s: float, power_w: float | None) -> "PowerIntegral":
        """Takes one more reading.

        Args:
            time_s: When it was read, in seconds; not before the last one.
            power_w: The power in watts, None where it could not be read: the next reading
                bridges the gap with a straight line.

        Returns:
            The integral with it.
        """
        if power_w is None:
            return self
        if self.last_s is None:
            return PowerIntegral(0.0, time_s, time_s, power_w)
        added_j = (self.last_w + power_w) / 2 * (time_s - self.last_s)
        return PowerIntegral(self.energy_j + added_j, self.first_s, time_s, power_w)

    def between(self, start_s: float, end_s: float) -> float | None:
        """Gives the energy from `start_s` to `end_s` in joules, None if readings miss an end."""
        if self.first_s is None or self.last_s is None or start_s == end_s:
            return None
        covered = self.first_s <= start_s and end_s <= self.last_s
        return self.energy_j if covered else None


def counted_energy_j(first_mj: int | None, last_mj: int | None) -> float | None:
    """Gives the energy between two readings of a counter that only rises.

    Args:
        first_mj: The counter at the start in millijoules, None where it could not be read.
        last_mj: The counter at the end, likewise.

    Returns:
        The energy in joules; None without both readings, and where the counter fell, as it does
        when the driver is loaded again.
    """
    if first_mj is None or last_mj is None or last_mj < first_mj:
        return None
    return (last_mj - first_mj) / 1e3
