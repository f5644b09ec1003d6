"""Threads or processes that make the batches of a `PyDataset`, and end when they are told to.

Keras's own queue is emptied batch by batch when it is stopped, which takes as long as making them.
"""

import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters import py_dataset_adapter
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

_POLL_S = 0.05
# Ending a pool of processes that were forked beside TensorFlow's threads may itself never end.
_END_S = 5.0


class Workers(OrderedEnqueuer):
    """Keras's workers, which drop what they have not made when they stop.

    Args:
        py_dataset: The PyDataset.
        workers: Threads or processes.
        use_multiprocessing: Whether they are processes.
        max_queue_size: Batches that may wait in the queue.
        timeout_s: Seconds that processes may take to a batch; threads may take any time.
    """

    def __init__(
        self,
        py_dataset: Any,
        *,
        workers: int,
        use_multiprocessing: bool,
        max_queue_size: int,
        timeout_s: float,
    ):
        super().__init__(
            py_dataset,
            workers=workers,
            use_multiprocessing=use_multiprocessing,
            max_queue_size=max_queue_size,
        )
        self._timeout_s = timeout_s if use_multiprocessing else float("inf")
        self._pools: list[Any] = []
        self._make_pool = self.executor_fn
        self.executor_fn = self._kept_pool

    def get(self) -> Iterator[Any]:
        """Gives the batches in their order.

        Raises:
            TimeoutError: If processes make none in time.
            Exception: What the PyDataset raised in making a batch.
        """
        while self.is_running():
            try:
                pending: Any = self.future_queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(pending, Exception):
                raise pending
            batch = self._made(pending)
            if batch is not None:
                yield batch

    def stop(self, drain_queue_and_join: bool = False) -> None:
        """Ends the workers for good; batches that wait are dropped, and the data are let go."""
        with self.start_stop_lock:
            runner: Any = self.run_thread
            self.running, self.run_thread = False, None
        # Without one they were never started: the data are let go all the same.
        while runner is not None and runner.is_alive():
            # The runner may wait for a place in the queue.
            with self.future_queue.mutex:
                self.future_queue.queue.clear()
                self.future_queue.not_full.notify_all()
            runner.join(_POLL_S)
        pools, self._pools = self._pools, []
        for pool in pools:
            ending = threading.Thread(target=pool.terminate, daemon=True)
            ending.start()
            ending.join(_END_S)
        # Keras hands the data to its workers in a table of the module, which would keep them.
        getattr(py_dataset_adapter, "_SHARED_SEQUENCES", {}).pop(self.uid, None)
        self.py_dataset = None

    def _kept_pool(self, sequences: Any) -> Any:
        self._pools.append(self._make_pool(sequences))
        return self._pools[-1]

    def _made(self, pending: Any) -> Any:
        end_s = time.monotonic() + self._timeout_s
        while self.is_running():
            try:
                return pending.get(timeout=_POLL_S)
            except multiprocessing.TimeoutError:
                if not pending.ready() and time.monotonic() > end_s:
                    raise TimeoutError(
                        f"the processes gave no batch within {self._timeout_s:.0f} s"
                    ) from None
        return None
