"""The search for the largest batch, with real probes in place of predictions."""

from kbatch.device.memory import FreeMemory
from kbatch.errors import InputError, WorkerDied
from kbatch.memory.probe import Probes, Reading, no_example_fits
from kbatch.memory.search import REACHED_DATA, REACHED_MOST, MaxBatchAnswer, MaxBatchSearch


class MaxBatchExperiment:
    """The experiment: a workload, all probes of it so far, and what follows from them."""

    def __init__(
        self, probes: Probes, memory_window: tuple[float, float], max_batch_size: int | None
    ):
        self.facts = facts = probes.facts
        if facts.examples == 1:
            raise InputError(
                "The data have one example, and a second size must be tried: give more rows, or "
                "`longest_example=(x, y)`. Received: 1 example."
            )
        self._probes = probes
        self._window = memory_window
        self._most = memory_window[1] * facts.limit_bytes
        caps = [cap for cap in (max_batch_size, facts.examples) if cap is not None]
        self._cap = min(caps, default=None)
        self._cap_reason = REACHED_MOST
        if self._cap is not None and self._cap == facts.examples:
            self._cap_reason = REACHED_DATA
        self._search = MaxBatchSearch(
            limit_bytes=facts.limit_bytes,
            memory_window=memory_window,
            max_batch_size=self._cap,
            cap_reason=self._cap_reason,
        )
        self._memory = self._search.memory_bytes
        # Of each run: size, peak bytes, outcome, seconds and purpose.
        self.runs: list[tuple[int, int | None, str, float, str]] = []
        self.free: FreeMemory | None = None
        self._died: WorkerDied | None = None

    def search(self) -> MaxBatchAnswer:
        """Search with what is known, and measure what is not."""
        while (size := self._search.ask()) is not None:
            self._measure(size, "search")
        assert self._search.answer is not None
        return self._search.answer

    def largest(self) -> MaxBatchAnswer | None:
        """Measure the largest size; None where that does not fit, or nothing bounds the sizes."""
        size = self._cap
        if size is None or not self._probes.isolated:
            return None
        try:
            reading = self._measure(size, "search")
        except InputError:
            raise
        except Exception:  # If it is not want of memory, smaller batches raise it too.
            self._probes.renew()
            return None
        if reading.rows < size or self._outcome(self._memory[size]) != "fits":
            return None
        return MaxBatchAnswer(size, self._cap_reason, self.in_window(size))

    def confirmed(self, size: int) -> bool:
        """Run the answer in a fresh process, and again after another size."""
        if self._probes.renew():
            self._measure(size, "fresh process")
        if self._outcome(self._memory[size]) == "fits":
            if size > 1:
                larger = [b for b, m in self._memory.items() if m is not None and b > size]
                self._measure(larger[0] if larger else size // 2, "mixed sizes")
            self._measure(size, "mixed sizes")
        return self._outcome(self._memory[size]) == "fits"

    def size_of(self, answer: MaxBatchAnswer) -> int:
        """Return the size that was found; raise the want of memory where not one example fits."""
        if answer.batch_size is None:
            raise no_example_fits(self.facts, self._window, self._memory[1], self._died)
        return answer.batch_size

    def is_bound(self, size: int) -> bool:
        """Return whether memory set the size, and not the end of the data or of the search."""
        return self.in_window(size) or any(outcome != "fits" for _, _, outcome, _, _ in self.runs)

    def in_window(self, size: int) -> bool:
        memory, low = self._memory[size], self._window[0] * self.facts.limit_bytes
        return memory is not None and low <= memory <= self._most

    def _measure(self, size: int, purpose: str) -> Reading:
        reading = self._probes.read(size)
        peak, rows = reading.bytes_below(self.facts.limit_bytes), reading.rows
        self._search.tell(rows, peak)
        if rows < size:
            self._search.end_at(rows, REACHED_DATA)
        self.free = reading.free or self.free
        self._died = reading.died or self._died
        self.runs.append((rows, peak, self._outcome(peak), reading.duration_s, purpose))
        return reading

    def _outcome(self, peak: float | None) -> str:
        if peak is None:
            return "out_of_memory"
        return "fits" if peak <= self._most else "above_window"
