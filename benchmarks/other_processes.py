"""What other processes take of the processors while something is measured."""

import time

import psutil

# Cores in use by others at which a machine counts as calm.
CALM_CORES = 0.15
_WINDOW_S = 1.0


class OtherProcesses:
    """Counts the processor time of all but this process since it was made."""

    def __init__(self):
        self._began = self._seconds()

    def cores(self) -> float:
        """Returns how many cores others have used since then, on average."""
        (now_s, others_now_s), (then_s, others_then_s) = self._seconds(), self._began
        return max(0.0, (others_now_s - others_then_s) / (now_s - then_s))

    @staticmethod
    def _seconds() -> tuple[float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return time.perf_counter(), sum(times) - idle - time.process_time()


def wait_for_calm(most_s: float) -> None:
    """Waits until others leave the processors alone for a second, at most so long."""
    end_s = time.perf_counter() + most_s
    while time.perf_counter() < end_s:
        others = OtherProcesses()
        time.sleep(_WINDOW_S)
        if others.cores() < CALM_CORES:
            return
