"""The callback that ends training when a metric has come to a value."""

from typing import Any, Literal

import keras

from kbatch.errors import InputError
from kbatch.records.target import Target

_HIGHER = ("acc", "auc", "precision", "recall", "f1", "iou", "dice")
_LOWER = ("loss", "error", "perplexity")


class StopAtTarget(keras.callbacks.Callback):
    """Ends training at the end of the first epoch whose metric meets a value.

    A search records what it took: `seconds_to_target` (of training, as `TimeBudget` counts),
    `updates_to_target` and `examples_to_target`, each of which can be the objective. A trial that
    never meets it is a result as well; a budget ends it.

    Example:

    >>> tuner = keras_tuner.GridSearch(
    ...     hypermodel, keras_tuner.Objective("seconds_to_target", "min"))
    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000, callbacks=[
    ...     kbatch.StopAtTarget("val_accuracy", 0.97), kbatch.TimeBudget(60)])

    Args:
        monitor: Name of the metric, as in the logs of an epoch.
        value: The value to meet.
        mode: `"max"` where more is better, `"min"` where less is, `"auto"` to tell by the name.

    Raises:
        ValueError: If the name does not tell, or the value is no finite number.
    """

    def __init__(self, monitor: str, value: float, mode: Literal["auto", "min", "max"] = "auto"):
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise ValueError(f"`value` must be a finite number. Received: value={value!r}.")
        self.target = Target(monitor, float(value), _direction(monitor, mode))
        self._seen: set[str] = set()

    def on_train_begin(self, logs: Any = None):
        """Forgets the metrics of a training before."""
        self._seen = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Ends training if the epoch meets the target; an epoch without validation does not."""
        logs = logs or {}
        self._seen.update(logs)
        if self.target.metric in logs and self.target.is_met(float(logs[self.target.metric])):
            model: Any = self.model
            model.stop_training = True

    def on_train_end(self, logs: Any = None):
        """Checks that there was something to compare.

        Raises:
            InputError: If no epoch had the metric.
        """
        if self._seen and self.target.metric not in self._seen:
            raise InputError(
                "`monitor` must be a metric of the epochs: give `validation_data` for one that "
                "starts with val_, or compile the model with it. "
                f"Received: monitor={self.target.metric!r}, the epochs have {sorted(self._seen)}."
            )


def _direction(monitor: str, mode: str) -> str:
    if mode in ("min", "max"):
        return mode
    higher = any(word in monitor.lower() for word in _HIGHER)
    lower = any(word in monitor.lower() for word in _LOWER)
    if mode != "auto" or higher == lower:
        raise ValueError(
            "`mode` must tell whether more or less of the metric is better: give "
            '`mode="max"` or `mode="min"`. '
            f"Received: monitor={monitor!r}, mode={mode!r}."
        )
    return "max" if higher else "min"
