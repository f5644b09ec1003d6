"""The learning rate of an optimizer, and a ratio applied to it."""

from typing import Any

import keras

Schedule = keras.optimizers.schedules.LearningRateSchedule

# Arguments of Keras's schedules that are learning rates, and those that count steps.
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")
_STEPS = ("decay_steps", "first_decay_steps", "warmup_steps", "boundaries")


def scale_optimizer(optimizer: Any, *, ratio: float, kappa: float) -> None:
    """Scales the learning rate of an optimizer in place.

    A schedule's rates are scaled and its steps divided by kappa: it spans as many examples as
    before.

    Args:
        optimizer: A Keras optimizer, wrapped for loss scaling or not.
        ratio: Factor of the learning rate.
        kappa: Batch size over base batch size.
    """
    if ratio == kappa == 1:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    current: Any = inner._learning_rate
    if isinstance(current, Schedule):
        inner.learning_rate = scaled_schedule(current, ratio=ratio, kappa=kappa)
    elif callable(current) and not isinstance(current, keras.Variable):
        read: Any = current
        inner.learning_rate = lambda: read() * ratio
    else:
        rate: Any = keras.ops.convert_to_numpy(current)
        inner.learning_rate = float(rate) * ratio


def scaled_schedule(schedule: Schedule, *, ratio: float, kappa: float) -> Schedule:
    """Makes a schedule of `ratio` times the rates over the same number of examples.

    One of Keras's own stays one of Keras's own, so that a saved model loads without kbatch.
    """
    if type(schedule).__module__.split(".")[0] != "keras":
        return _StretchedSchedule(schedule, ratio, kappa)
    config = schedule.get_config()
    for name in _RATES:
        config[name] = _each(config.get(name), lambda rate: rate * ratio)
    for name in _STEPS:
        config[name] = _each(config.get(name), lambda steps: max(1, round(steps / kappa)))
    return type(schedule).from_config({k: v for k, v in config.items() if v is not None})


def current_learning_rate(optimizer: Any) -> float | None:
    """Reads the learning rate at the current step, None if it is no scalar."""
    if optimizer is None:
        return None
    value: Any = keras.ops.convert_to_numpy(optimizer.learning_rate)
    return float(value) if value.size == 1 else None


class _StretchedSchedule(Schedule):
    """A user's own schedule, read `kappa` times as fast."""

    def __init__(self, schedule: Schedule, ratio: float, kappa: float):
        self.schedule = schedule
        self.ratio = ratio
        self.kappa = kappa

    def __call__(self, step: Any) -> Any:
        step = keras.ops.convert_to_tensor(step)
        whole: Any = keras.ops.cast(step, "float32")
        rate: Any = self.schedule(keras.ops.cast(whole * self.kappa, step.dtype))
        return rate * self.ratio

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "ratio": self.ratio, "kappa": self.kappa}


def _each(value: Any, change: Any) -> Any:
    if value is None:
        return None
    return [change(item) for item in value] if isinstance(value, (list, tuple)) else change(value)
