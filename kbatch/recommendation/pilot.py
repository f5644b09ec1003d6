"""Short runs of `fit`: the pilot, other sizes to its loss, and epochs beside the step alone."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.errors import InputError
from kbatch.recommendation.choice import CheckPlan
from kbatch.recommendation.pilot_record import (
    TARGET_SHARE,
    FitTime,
    PilotRecord,
    PilotStretch,
    SizeCheck,
    useful_count,
)
from kbatch.records.training_run import MOMENT_METRICS
from kbatch.timing.rounds import interleaved
from kbatch.training.accumulation import Accumulation, sum_sparse_gradients
from kbatch.training.data.forms import (
    Batches,
    FitData,
    batches_of,
    each_part,
    gives_batches,
    in_batches,
    tensors_of,
    with_held_out,
)
from kbatch.training.data.sample_rows import SampleRows, Source, batch_of, held_on_device, rows_for
from kbatch.training.learning_rate import (
    current_learning_rate,
    scale_late_layers,
    scaled_model,
    scaling_of,
)
from kbatch.training.model import can_validate, user_step
from kbatch.training.state import inner_optimizers, seed_of, seeded, updates_made
from kbatch.training.train_step import borrowed_step

_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Fewer stretches do not show whether the later half brought little.
_FEWEST_STRETCHES = 24
_VALIDATION_BATCH_SIZE = 256
# A look is taken some fifty times.
_MOST_HELD_OUT = 1024


def run_pilot(
    build: Callable[[], keras.Model],
    data: FitData,
    *,
    batch_size: int,
    budget_s: float,
    epochs: int | None = None,
    seed: int | None = None,
) -> PilotRecord:
    """Train until the later half of the updates brought little, or what is allowed is spent."""
    began_s = time.perf_counter()
    stretches: list[PilotStretch] = []

    def keep(found: PilotStretch) -> str | None:
        stretches.append(found)
        if found.loss is None:
            return "diverged"
        enough = max(_FEWEST_STRETCHES, 2 * useful_count(stretches))
        return "progress" if len(stretches) >= enough else None

    with seeded(seed):
        model = build()
        batches = held_out_batches(data, model, batch_size=batch_size, seed=seed)
        in_epoch = _updates_in_epoch(batches.dataset, batch_size, count=epochs is not None)
        half = batch_size if user_step(model) else max(1, (batch_size + 1) // 2)
        if user_step(model) is None:
            # What looks at a batch as a whole is measured in parts, and said to be.
            Accumulation(half, moments_every=1).apply(model)
        learning_rate = current_learning_rate(inner_optimizers(model)[0])
        watch = _StretchWatch(
            keep,
            stretch=min(_MOST_UPDATES, in_epoch or _MOST_UPDATES),
            ends_s=began_s + budget_s,
            least_s=budget_s / 2,  # However long building took.
            longest_s=budget_s / _STRETCHES_IN_BUDGET,
            most_updates=epochs * in_epoch if epochs and in_epoch else math.inf,
        )
        watch.fit(model, batches)
    return PilotRecord(
        batch_size,
        half,
        learning_rate,
        tuple(stretches),
        time.perf_counter() - began_s,
        "epochs" if watch.ended_by == "updates" else watch.ended_by,
        seed,
        watch.trained_s,
        watch.built_s - began_s,
        watch.look_s,
        target_share=TARGET_SHARE,
    )


def _updates_in_epoch(dataset: tf.data.Dataset, batch_size: int, *, count: bool) -> int | None:
    """Count the updates in a pass over the data, None where they do not tell and need not."""
    updates = int(dataset.cardinality())
    if updates == tf.data.UNKNOWN_CARDINALITY:
        # A pass is made where epochs are counted; else two batches are enough to know.
        updates = sum(1 for _ in (dataset if count else dataset.take(2)))
        if updates >= 2 and not count:
            return None
    if 0 <= updates < 2:
        raise InputError(
            "A pilot needs data for two updates at least: give more examples, or a smaller "
            f"`base_batch_size`. Received: {updates} batches of {batch_size} examples."
        )
    return updates if updates > 0 else None


def run_size_check(
    build: Callable[[], keras.Model], data: FitData, *, plan: CheckPlan
) -> SizeCheck:
    """Train from the start until the loss is at the target, or what the plan allows is spent."""
    ends_s = time.perf_counter() + plan.budget_s
    losses: list[float | None] = []

    def end(found: PilotStretch) -> str | None:
        loss = found.held_out_loss if plan.held_out else found.loss
        losses.append(loss)
        if loss is None:
            return "diverged"
        return "target" if loss <= plan.target else None

    own_seed = plan.seed if plan.run == 0 else seed_of(plan.seed, plan.run)
    with seeded(own_seed):
        model = build()
        batches = held_out_batches(
            data, model, batch_size=plan.batch_size, seed=plan.seed, order_seed=own_seed
        )
        sizes = {"batch_size": plan.batch_size, "base_batch_size": plan.base_batch_size}
        with scaled_model(model, **sizes, rule=plan.rule, follow_batch_size=FOLLOWERS):
            sum_sparse_gradients(model)  # As in the pilot.
            if plan.micro_batch_size < plan.batch_size:
                Accumulation(plan.micro_batch_size).apply(model)
            learning_rate = current_learning_rate(inner_optimizers(model)[0])
            watch = _StretchWatch(
                end, stretch=plan.stretch, ends_s=ends_s, most_updates=plan.most_updates
            )
            watch.fit(model, batches)
            scaling = scaling_of(model)
    return SizeCheck(
        plan.batch_size,
        plan.micro_batch_size,
        learning_rate,
        watch.updates,
        losses[-1],
        watch.trained_s,
        "lost" if watch.ended_by == "updates" else watch.ended_by,
        scaling,
    )


def held_out_batches(
    data: FitData,
    model: keras.Model,
    *,
    batch_size: int,
    seed: int | None,
    order_seed: int | None = None,
) -> Batches:
    """Put data into batches, a part of arrays without validation data held out of them."""
    batches = in_batches(
        with_held_out(data, seed=seed),
        model,
        batch_size=batch_size,
        largest_batch_size=1,  # What is too few the caller tells.
        validation_batch_size=_VALIDATION_BATCH_SIZE,
        seed=seed if order_seed is None else order_seed,
    )
    given: Any = batches.validation_data
    if given is None or not can_validate(model):
        held = []
    elif isinstance(given, tf.data.Dataset):
        held = given.take(_MOST_HELD_OUT // _VALIDATION_BATCH_SIZE)
    else:
        arrays, rows = tensors_of(FitData(*keras.utils.unpack_x_y_sample_weight(given)))
        order = np.sort(np.random.default_rng(seed).permutation(rows)[:_MOST_HELD_OUT])
        parts = np.split(order, range(_VALIDATION_BATCH_SIZE, len(order), _VALIDATION_BATCH_SIZE))
        held = (each_part(lambda leaf, part=part: tf.gather(leaf, part), arrays) for part in parts)
    return batches._replace(validation_data=[held_on_device(batch) for batch in held])


class _StretchWatch(keras.callbacks.Callback):
    """Trains until time or updates are spent, or `on_stretch` says why a stretch was enough."""

    # All of it is one epoch to Keras: starting one takes as long as tens of updates.

    def __init__(
        self,
        on_stretch: Callable[[PilotStretch], str | None],
        *,
        stretch: int,  # Updates between two looks at the held-out examples.
        ends_s: float,  # By `time.perf_counter`.
        least_s: float = 0.0,  # That follow the first update in any case.
        longest_s: float = math.inf,  # Between two looks.
        most_updates: float = math.inf,
    ):
        super().__init__()
        self._on_stretch, self._stretch, self._most_updates = on_stretch, stretch, most_updates
        self._ends_s, self._least_s, self._longest_s = ends_s, least_s, longest_s
        self.updates = 0
        self.ended_by = "budget"
        self.trained_s = self.built_s = self.look_s = math.nan
        self._held_out: list[Any] = []
        self._made = self._looked_at = self._before = 0
        self._first_s = self._looked_s = math.nan
        self._looks_s: list[float] = []

    def fit(self, model: Any, batches: Batches) -> None:
        self._held_out[:] = batches.validation_data or ()
        scale_late_layers(model, batches.dataset)
        self._before = updates_made(model)
        model.fit(
            batches.dataset.repeat(),
            steps_per_epoch=2**31,
            callbacks=[self],
            verbose=0,
            shuffle=False,
        )
        self.look_s = statistics.median(self._looks_s)
        # The first look builds a graph.
        self.built_s = self._first_s + self._looks_s[0] - self.look_s
        self.trained_s = time.perf_counter() - self._first_s

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s = time.perf_counter()
        if math.isnan(self._first_s):
            self._first_s = self._looked_s = now_s  # What came before traced and compiled.
            self._ends_s = max(self._ends_s, now_s + self._least_s)
        # One call of the train step may make several updates, and skip some that overflowed.
        model: Any = self.model
        self._made += model.steps_per_execution
        end = "updates" if self._made >= self._most_updates else None
        end = "budget" if now_s > self._ends_s else end
        long = now_s - self._looked_s >= self._longest_s
        if not (end or long or self._made - self._looked_at >= self._stretch):
            return
        logs = logs or {}
        if "loss" not in logs:
            names = sorted(logs)
            raise InputError(f"The `train_step` must return its `loss`. Received: metrics {names}.")
        began_s = time.perf_counter()
        model.reset_metrics()
        held_out: Mapping[str, Any] = {}
        if self._held_out:
            model.make_test_function()
        for batch in self._held_out:
            # A Python iterator of one batch gives one step, whatever `steps_per_execution` is.
            held_out = model.test_function(iter((batch,)))
        loss, *moments = (_finite(logs.get(name)) for name in ("loss", *MOMENT_METRICS))
        made = updates_made(model) - self._before
        found = PilotStretch(made - self.updates, loss, _finite(held_out.get("loss")), *moments)
        model.reset_metrics()
        self.updates, self._looked_at = made, self._made
        self._looked_s = time.perf_counter()
        self._looks_s.append(self._looked_s - began_s)
        # That training diverged shows at the end of a stretch, where another reason may have come.
        end = self._on_stretch(found) or end
        if end is not None:
            self.ended_by = end
            model.stop_training = True


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(np.asarray(value))
    return number if math.isfinite(number) else None


_MOST_ROUNDS = 9
_STEPS, _EPOCHS = 8, 5
# Batches of an epoch that is cut short, at the least.
_FEWEST_BATCHES = 8
# So many times as long as an epoch may last until it is cut is too long to start one again.
_SLOW_START = 3


def time_fit(
    model: Any, data: FitData, *, source: Source, sizes: tuple[int, ...], budget_s: float
) -> tuple[FitTime, ...]:
    """Time epochs of `fit` at some batch sizes, in turns with the train step alone."""
    held = {size: batch_of(source, model, size) for size in sizes}
    longest_s = budget_s / (3 * _MOST_ROUNDS * len(sizes))
    given: Any = data.x
    ends_s: dict[int, float] = {}

    def turn(size: int) -> "tuple[float, EpochWatch]":
        step.restore()
        times_s = []
        for _ in range(_STEPS):
            began_s = time.perf_counter()
            step(held[size])
            times_s.append(time.perf_counter() - began_s)
        # The first epochs start slowly: the last one counts.
        watch = epochs_of(size, None, _EPOCHS, longest_s)
        if not watch.whole:
            watch.end_s = ends_s.get(size, watch.end_s)
        return statistics.median(times_s), watch

    def epochs_of(size: int, most: int | None, epochs: int, longest_s: float) -> "EpochWatch":
        if gives_batches(given):
            dataset = batches_of(given, model, size)
            arguments = {"x": dataset.take(most) if most else dataset, "shuffle": False}
        else:
            x, y = given, data.y
            if most:
                x, y = each_part(lambda leaf: leaf[: most * size], (x, y))
            arguments = {"x": x, "y": y, "batch_size": size}
        watch = EpochWatch(longest_s, model.steps_per_execution)
        with warnings.catch_warnings():
            # Of data that do not tell their length, at the end of the first epoch.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            # Not an instance's own `fit`.
            type(model).fit(model, **arguments, epochs=epochs, verbose=0, callbacks=[watch])
        return watch

    with borrowed_step(model, held[sizes[0]]) as step:
        for size in sizes:
            _, watch = turn(size)  # Traces what is new.
            # What is cut short lacks its end, which an epoch of two batches has. Data that start
            # slowly are not started again for it.
            if not watch.whole and watch.epoch_s < _SLOW_START * longest_s:
                ends_s[size] = epochs_of(size, 2 * model.steps_per_execution, 2, math.inf).end_s
        found = interleaved(
            {str(size): lambda size=size: turn(size) for size in sizes},
            until_s=time.perf_counter() + budget_s,
            most_rounds=_MOST_ROUNDS,
        )
    known = rows_for(source, model)
    examples = known.examples if isinstance(known, SampleRows) else None
    times = []
    for size in sizes:
        steps_s, watches = zip(*found[str(size)], strict=True)
        filled = None if examples is None else -(-examples // size)
        batches = max((watch.batches for watch in watches if watch.whole), default=filled)
        if batches is not None and filled is not None:
            batches = min(batches, filled)
        between_s = tuple(watch.batch_s for watch in watches)
        epochs_s = tuple(watch.epoch_s for watch in watches)
        times.append(FitTime(size, steps_s, between_s, epochs_s, batches))
    return tuple(times)


class EpochWatch(keras.callbacks.Callback):
    """Reads the clock at every `at_once` batches, and cuts long epochs short."""

    def __init__(self, longest_s: float, at_once: int = 1):
        super().__init__()
        self.at_once = at_once
        self.whole = False
        self.end_s = 0.0
        self.times_s: list[float] = []
        self._longest_s = longest_s

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self.times_s = [time.perf_counter()]
        self.whole = True

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self.times_s.append(time.perf_counter())
        made = len(self.times_s) - 1
        if made >= _FEWEST_BATCHES and self.times_s[-1] - self.times_s[0] > self._longest_s:
            self.whole = False
            model: Any = self.model
            model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None):
        self.times_s.append(time.perf_counter())
        self.end_s = self.times_s[-1] - self.times_s[-2]

    @property
    def batches(self) -> int:
        """Batches of the last epoch; of several at once the last ones may be fewer."""
        return (len(self.times_s) - 2) * self.at_once

    @property
    def batch_s(self) -> float:
        """Seconds from batch to batch: the mean, as batches may come in bursts."""
        gaps = np.diff(self.times_s)
        return float(np.mean(gaps[1:-1] if len(gaps) > 2 else gaps[:1])) / self.at_once

    @property
    def epoch_s(self) -> float:
        """Seconds to start the epoch, and to end it."""
        gaps, first_s = np.diff(self.times_s).tolist(), self.batch_s * self.at_once
        start_s = max(0.0, gaps[0] - first_s) if len(gaps) > 2 else 0.0
        return start_s + self.end_s
