"""What kbatch measures, in TensorBoard beside the scalars of Keras."""

from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from kbatch.device.device_memory import DeviceMemory

RUN_NAME = "kbatch"


class TensorBoardScalars(keras.callbacks.Callback):
    """Writes throughput, memory, noise scale and sizes where a TensorBoard callback writes.

    They are a run of their own below its folder: TensorBoard reads one file a run at a time, and
    takes every run below the hyperparameters of a trial for its metrics.

    Args:
        board: The TensorBoard callback.
        batch_size: Examples of one optimizer update.
    """

    def __init__(self, board: keras.callbacks.TensorBoard, *, batch_size: int):
        super().__init__()
        self._board = board
        self._batch_size = batch_size
        self._memory = DeviceMemory()
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None):
        """Opens the file, in the folder that keras-tuner gave the trial."""
        self._memory.reset()
        folder = Path(self._board.log_dir) / RUN_NAME
        self._writer = tf.summary.create_file_writer(str(folder))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Writes the scalars of the epoch."""
        with self._writer.as_default(step=epoch):
            for name, value in self._scalars(logs or {}).items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def on_train_end(self, logs: Any = None):
        """Closes the file."""
        self._writer.close()

    def _scalars(self, logs: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {
            "batch_size": self._batch_size,
            "micro_batch_size": self._micro_batch_size,
            **self._memory_scalar(),
        }
        if "samples_per_second" in logs:
            found["samples_per_second"] = logs["samples_per_second"]
        variance, norm = logs.get("gradient_variance", 0), logs.get("gradient_squared_norm", 0)
        # Means over the epoch, divided last; noise may outweigh what there is to see.
        if variance > 0 and norm > 0:
            found["noise_scale"] = float(variance) / float(norm)
        return {name: float(value) for name, value in found.items()}

    @property
    def _micro_batch_size(self) -> int:
        step = getattr(vars(self.model).get("train_step"), "__self__", None)
        return getattr(step, "micro_batch_size", None) or self._batch_size

    def _memory_scalar(self) -> dict[str, int]:
        if self._memory.device == "CPU:0":  # Its allocator counts large blocks only.
            return {"host_memory_bytes": psutil.Process().memory_info().rss}
        return {"peak_memory_bytes": self._memory.peak_bytes}
