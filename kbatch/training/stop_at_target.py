"""The callback that ends training when a metric has come to a value."""

from typing import Any, Literal

import keras

from kbatch.records.target import Target
from kbatch.training.errors import InputError

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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Ends training if the epoch meets the target.

        Raises:
            InputError: If the epoch has no such metric.
        """
        name = self.target.metric
        if name not in (logs or {}):
            raise InputError(
                "`monitor` must be a metric of the epoch: give `validation_data` for one that "
                "starts with val_, or compile the model with it. "
                f"Received: monitor={name!r}, the epoch has {sorted(logs or {})}."
            )
        if self.target.is_met(float((logs or {})[name])):
            model: Any = self.model
            model.stop_training = True


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
