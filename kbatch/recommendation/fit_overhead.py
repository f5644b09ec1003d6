"""What `fit` takes beside the train step, from short epochs in turns with the step alone."""

import functools
import statistics
import time
import warnings
from typing import Any

import keras

from kbatch.recommendation.pilot import steps_at_once
from kbatch.recommendation.pilot_record import FitTime
from kbatch.timing.rounds import interleaved
from kbatch.training.data.forms import FitData, called_for, is_dataset, rebatched
from kbatch.training.data.sample_rows import SampleElements, SampleRows, Source, batch_of
from kbatch.training.train_step import BorrowedStep, borrowed_step

_MOST_ROUNDS = 9
_STEPS, _EPOCHS = 8, 5
# Batches of an epoch that is cut short, at the least.
_FEWEST_BATCHES = 8


def time_fit(
    model: keras.Model, data: FitData, *, source: Source, sizes: tuple[int, ...], budget_s: float
) -> tuple[FitTime, ...]:
    """Time epochs of `fit` at some batch sizes."""
    held = {size: batch_of(source, model, size) for size in sizes}
    longest_s = budget_s / (3 * _MOST_ROUNDS * len(sizes))
    with borrowed_step(model, held[sizes[0]]) as step:
        contenders = {
            str(size): functools.partial(_turn, model, data, step, held[size], size, longest_s)
            for size in sizes
        }
        for turn in contenders.values():
            turn()  # Traces what is new.
        found = interleaved(
            contenders, until_s=time.perf_counter() + budget_s, most_rounds=_MOST_ROUNDS
        )
    if isinstance(source, SampleElements):
        source = source.rows(model)
    examples = source.examples if isinstance(source, SampleRows) else None
    return tuple(_joined(size, found[str(size)], examples) for size in sizes)


def _turn(
    model: Any,
    data: FitData,
    step: BorrowedStep,
    batch: Any,
    size: int,
    longest_s: float,
) -> "tuple[float, EpochWatch]":
    step.restore()
    times_s = []
    for _ in range(_STEPS):
        began_s = time.perf_counter()
        step(batch)
        times_s.append(time.perf_counter() - began_s)
    watch = EpochWatch(longest_s, steps_at_once(model))
    # The first epochs start slowly: the last one counts. Not an instance's own `fit`.
    arguments = _fit_arguments(model, data, size)
    with warnings.catch_warnings():
        # Of data that do not tell their length, at the end of the first epoch.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        type(model).fit(model, **arguments, epochs=_EPOCHS, verbose=0, callbacks=[watch])
    return statistics.median(times_s), watch


def _fit_arguments(model: Any, data: FitData, size: int) -> dict[str, Any]:
    given: Any = data.x
    if is_dataset(given):
        return {"x": rebatched(given, model, size), "shuffle": False}
    if callable(given):
        return {"x": called_for(given, model, size), "shuffle": False}
    return {"x": given, "y": data.y, "batch_size": size}


class EpochWatch(keras.callbacks.Callback):
    """Reads the clock at every batch, and cuts long epochs short.

    Args:
        longest_s: Seconds after which an epoch is cut short.
        at_once: Batches between two calls, `steps_per_execution`.
    """

    def __init__(self, longest_s: float, at_once: int = 1):
        super().__init__()
        self.at_once = at_once
        self.whole = False
        self.times_s: list[float] = []
        self._longest_s = longest_s

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Start the clock."""
        self.times_s = [time.perf_counter()]
        self.whole = True

    def on_train_batch_end(self, batch: int, logs: Any = None):
        """Read the clock."""
        self.times_s.append(time.perf_counter())
        made = len(self.times_s) - 1
        if made >= _FEWEST_BATCHES and self.times_s[-1] - self.times_s[0] > self._longest_s:
            self.whole = False
            model: Any = self.model
            model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Read the clock a last time."""
        self.times_s.append(time.perf_counter())

    @property
    def batches(self) -> int:
        """Batches of the last epoch; of several at once the last ones may be fewer."""
        return (len(self.times_s) - 2) * self.at_once

    @property
    def batch_s(self) -> float:
        """Seconds from batch to batch: the mean, as batches may come in bursts."""
        steady = self._gaps[1:-1] or self._gaps[:1]
        return statistics.fmean(steady) / self.at_once

    @property
    def epoch_s(self) -> float:
        """Seconds to start the epoch, and to end it if it was whole."""
        first_s = self.batch_s * self.at_once
        start_s = max(0.0, self._gaps[0] - first_s) if len(self._gaps) > 2 else 0.0
        return start_s + (self._gaps[-1] if self.whole else 0.0)

    @property
    def _gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def _joined(size: int, turns: "list[tuple[float, EpochWatch]]", examples: int | None) -> FitTime:
    whole = [watch.batches for _, watch in turns if watch.whole]
    known = None if examples is None else -(-examples // size)
    batches = max(whole, default=known)
    if batches is not None and known is not None:
        batches = min(batches, known)
    return FitTime(
        size,
        tuple(step_s for step_s, _ in turns),
        tuple(watch.batch_s for _, watch in turns),
        tuple(watch.epoch_s for _, watch in turns),
        batches,
    )
