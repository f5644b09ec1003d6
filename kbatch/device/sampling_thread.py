"""A thread that takes samples at an even pace."""

import threading
from collections.abc import Callable


class SamplingThread:
    """Calls a function every so often until it is stopped.

    Args:
        sample: Takes one sample.
        interval_s: Seconds from the end of one sample to the start of the next.
    """

    def __init__(self, sample: Callable[[], object], *, interval_s: float):
        self._sample = sample
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kbatch-sampling", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> BaseException | None:
        """Ends the thread and waits for it.

        Returns:
            What `sample` raised, which ended the sampling, None if it raised nothing.
        """
        self._stopped.set()
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._sample()
        except BaseException as error:
            self._error = error
