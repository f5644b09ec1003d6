"""Callbacks that end training: when a budget is spent, or a metric has reached a value."""

import time
from collections.abc import Callable
from typing import Any, Literal

import keras

from kbatch.analysis.batch_sizes import check_size
from kbatch.errors import InputError
from kbatch.records.training_run import Budget, Target
from kbatch.training.clock import TrainingClock, numbers_of
from kbatch.training.state import updates_made


class BudgetCallback(keras.callbacks.Callback):
    """Ends training once a budget is spent, counted by a search's clock or by itself."""

    unit: str  # Of `Budget` and of `TrainingClock`.
    _spent: Callable[[], float]  # What training has spent, where no search counts it.

    def __init__(self, most: Any):
        super().__init__()
        self.budget = Budget(**{self.unit: most})  # What training may spend.
        self._most = most
        self._clock: TrainingClock | None = None

    def count_by(self, clock: TrainingClock) -> None:
        """Read what a search counts over all `fit` calls of a trial, instead of its own count."""
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None):
        """End training once the budget is spent."""
        spent = self._spent() if self._clock is None else getattr(self._clock, self.unit)
        if spent >= self._most:
            model: Any = self.model
            model.stop_training = True


class TimeBudget(BudgetCallback):
    """Ends training after so many seconds of train steps.

    What counts is what a record calls `train_s`: train steps with the wait for their data, the
    first one with its tracing and compiling; validation, checkpoints and other callbacks do not
    count. It ends after the step that spends the budget, or the execution of several steps, in the
    middle of an epoch too, and the epoch is validated as any other. Give `epochs` large enough that
    the budget ends first.

    Example:

    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000,
    ...              callbacks=[kbatch.TimeBudget(60)])

    Args:
        seconds: The budget, in seconds.

    Raises:
        ValueError: If it is not positive.
    """

    unit = "train_s"

    def __init__(self, seconds: float):
        if not _is_number(seconds) or not 0 < seconds < 1e12:
            raise ValueError(f"`seconds` must be a positive number. Received: seconds={seconds!r}.")
        super().__init__(float(seconds))
        self._now: Callable[[], float] = time.perf_counter
        self._spent_s = 0.0
        self._begun_s = 0.0

    def on_train_begin(self, logs: Any = None):
        """Start the budget, where no search counts."""
        self._spent_s = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        """Start a step."""
        self._begun_s = self._now()

    def _spent(self) -> float:
        self._spent_s += self._now() - self._begun_s
        return self._spent_s


class UpdateBudget(BudgetCallback):
    """Ends training after so many optimizer updates, those that overflowed not counted.

    Args:
        updates: The budget.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is not positive.
    """

    unit = "updates"

    def __init__(self, updates: int):
        super().__init__(check_size(updates, "updates", unit=""))
        self._before = 0

    def on_train_begin(self, logs: Any = None):
        """Start the budget, where no search counts."""
        self._before = updates_made(self.model)

    def _spent(self) -> float:
        return updates_made(self.model) - self._before


class ExampleBudget(BudgetCallback):
    """Ends training after so many examples; in a search, which counts them in its input pipeline.

    Args:
        examples: The budget. The last batch may pass it.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is not positive.
    """

    unit = "examples"

    def __init__(self, examples: int):
        super().__init__(check_size(examples, "examples", unit=""))

    def _spent(self) -> float:
        raise InputError(
            "Examples are counted in a search only: give `ExampleBudget` to `tuner.search`, or use "
            f"`UpdateBudget(examples // batch_size)` here. Received: examples={self._most}."
        )


def joint_budget(callbacks: list[BudgetCallback]) -> Budget | None:
    """Return what a run with these callbacks may spend, None without any."""
    kinds = [type(callback).__name__ for callback in callbacks]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InputError(
                f"There must be one `{kind}`: leave out the others. "
                f"Received: {kinds.count(kind)} of them."
            )
    limits = {one.unit: getattr(one.budget, one.unit) for one in callbacks}
    return Budget(**limits) if limits else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
        mode: `"max"` where more is better, `"min"` where less is, `"auto"` to decide by the name.

    Raises:
        ValueError: If the name does not decide it, or the value is no finite number.
    """

    def __init__(self, monitor: str, value: float, mode: Literal["auto", "min", "max"] = "auto"):
        super().__init__()
        if not _is_number(value) or not abs(value) < 1e300:
            raise ValueError(f"`value` must be a finite number. Received: value={value!r}.")
        if mode not in ("min", "max"):
            higher = any(word in monitor.lower() for word in _HIGHER)
            lower = any(word in monitor.lower() for word in _LOWER)
            if mode != "auto" or higher == lower:
                raise ValueError(
                    "`mode` must say whether more or less of the metric is better: give "
                    '`mode="max"` or `mode="min"`. '
                    f"Received: monitor={monitor!r}, mode={mode!r}."
                )
            mode = "max" if higher else "min"
        self.target = Target(monitor, float(value), mode)
        self._seen: set[str] = set()

    def on_train_begin(self, logs: Any = None):
        """Forget the metrics of a training before."""
        self._seen = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """End training if the epoch meets the target; an epoch without validation does not."""
        numbers = numbers_of(logs)
        self._seen.update(numbers)
        value = numbers.get(self.target.metric)
        if value is not None and self.target.is_met(value):
            model: Any = self.model
            model.stop_training = True

    def on_train_end(self, logs: Any = None):
        """Check that there was something to compare."""
        if self._seen and self.target.metric not in self._seen:
            raise InputError(
                "`monitor` must be a metric of the epochs that is one number: give "
                "`validation_data` for one that starts with val_, or compile the model with it. "
                f"Received: monitor={self.target.metric!r}, the epochs have {sorted(self._seen)}."
            )
