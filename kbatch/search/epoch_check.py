"""The check, after each epoch, that training is what was asked for."""

from typing import Any

import keras

from kbatch.errors import InputError
from kbatch.training.input_meter import InputMeter
from kbatch.training.replica_meter import ReplicaMeter


def batch_metrics(model: Any) -> set[str]:
    """Names the metrics that are means over the micro-batches, since their function needs all rows.

    Args:
        model: A model that has been trained; the set is empty unless its batches were cut.
    """
    step = getattr(vars(model).get("train_step"), "__self__", None)
    return getattr(step, "batch_metrics", set())


class EpochCheck(keras.callbacks.Callback):
    """Ends training when an epoch shows that it is not what was asked for.

    Args:
        batch_size: Examples that the largest batch must have.
        metrics: Metrics that the epoch must have.
        meter: Counts what reaches the train step.
    """

    def __init__(self, batch_size: int, metrics: tuple[str, ...], meter: InputMeter | ReplicaMeter):
        super().__init__()
        self._batch_size = batch_size
        self._metrics = metrics
        self._meter = meter

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Compares the batches that arrived and the metrics with those expected."""
        seen = self._meter.read().largest_batch
        if seen != self._batch_size:
            raise InputError(
                f"The largest batch of an epoch had {seen} examples: leave the sizes above the "
                "training set out of `batch_sizes`, and let a data function batch by the size it "
                f"is called with. Received: batch_size={self._batch_size}."
            )
        coupled = sorted(set(self._metrics) & batch_metrics(self.model))
        if coupled:
            raise InputError(
                f"The objective {coupled[0]!r} is a function of all rows of a batch together, and "
                "this batch was cut: its value would be a mean over micro-batches. Choose "
                f"'val_{coupled[0]}', which nothing cuts, give `micro_batch_size=None`, or write "
                "the metric as a `keras.metrics.Metric` that sums over rows. "
                f"Received: objective={coupled[0]!r}."
            )
        missing = [name for name in self._metrics if name not in (logs or {})]
        if missing:
            raise InputError(
                f"The objective {missing[0]!r} is not among the metrics: give `validation_data` "
                "or `validation_split` for one that starts with val_, compile the model with it, "
                f"or choose another objective. Received: metrics {sorted(logs or {})}."
            )
