"""Short trainings: the pilot, whose micro-batches show the noise scale, and other sizes."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.errors import InputError
from kbatch.recommendation.pilot_record import PilotRecord, PilotStretch, SizeCheck, useful_count
from kbatch.records.training_run import MOMENT_METRICS
from kbatch.training.accumulation import accumulate_gradients, sum_sparse_gradients
from kbatch.training.data.forms import Batches, FitData, in_batches, tensors_of, with_held_out
from kbatch.training.learning_rate import (
    current_learning_rate,
    scale_late_layers,
    scaled_model,
    scaling_of,
)
from kbatch.training.state import seeded
from kbatch.training.train_step import held_on_device, updates_made

_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Of fewer stretches it is not told whether the later half brought little.
_FEWEST_STRETCHES = 24


class PilotPlan(NamedTuple):
    """How a pilot trains.

    Attributes:
        batch_size: Examples of an update; the learning rate suits them.
        budget_s: Seconds that it may take, building included; half of them follow the first update
            in any case.
        epochs: Most passes over the data.
        seed: Seed of weights and order.
    """

    batch_size: int
    budget_s: float
    epochs: int | None = None
    seed: int | None = None


def run_pilot(build: Callable[[], keras.Model], data: FitData, *, plan: PilotPlan) -> PilotRecord:
    """Train until the later half of its updates brought little, or what the plan allows is spent.

    Little is 2 % of the way that the held-out loss went, or the training loss without one.
    """
    began_s = time.perf_counter()
    stretches: list[PilotStretch] = []

    def keep(found: Stretch) -> str | None:
        metrics = found.metrics
        moments = (metrics.get(name) for name in MOMENT_METRICS)
        loss = metrics.get("loss")
        stretches.append(PilotStretch(found.updates, loss, found.held_out_loss, *moments))
        if loss is None:
            return "diverged"
        enough = max(_FEWEST_STRETCHES, 2 * useful_count(stretches))
        return "progress" if len(stretches) >= enough else None

    with seeded(plan.seed):
        model = build()
        batches = held_out_batches(data, model, batch_size=plan.batch_size, seed=plan.seed)
        in_epoch = _updates_in_epoch(batches.dataset, plan)
        half = max(1, (plan.batch_size + 1) // 2)
        with warnings.catch_warnings():
            # What looks at a batch as a whole is measured in parts, and said to be.
            warnings.simplefilter("ignore")
            accumulate_gradients(model, half, moments_every=1)
        learning_rate = current_learning_rate(model.optimizer)
        course = fit_in_stretches(
            model,
            batches,
            stretch=min(_MOST_UPDATES, in_epoch or _MOST_UPDATES),
            ends_s=began_s + plan.budget_s,
            least_s=plan.budget_s / 2,
            longest_s=plan.budget_s / _STRETCHES_IN_BUDGET,
            most_updates=plan.epochs * in_epoch if plan.epochs and in_epoch else math.inf,
            on_stretch=keep,
        )
    return PilotRecord(
        plan.batch_size,
        half,
        learning_rate,
        tuple(stretches),
        time.perf_counter() - began_s,
        "epochs" if course.ended_by == "updates" else course.ended_by,
        plan.seed,
        course.trained_s,
        course.built_s - began_s,
        course.look_s,
    )


def _updates_in_epoch(dataset: tf.data.Dataset, plan: PilotPlan) -> int | None:
    """Count the updates in a pass over the data, None where they do not tell and need not."""
    updates = int(dataset.cardinality())
    if updates == tf.data.UNKNOWN_CARDINALITY:
        # A pass is made where epochs are counted; else two batches are enough to know.
        updates = sum(1 for _ in (dataset if plan.epochs else dataset.take(2)))
        if updates >= 2 and not plan.epochs:
            return None
    if 0 <= updates < 2:
        raise InputError(
            "A pilot needs data for two updates at least: give more examples, or a smaller "
            f"`base_batch_size`. Received: {updates} batches of {plan.batch_size} examples."
        )
    return updates if updates > 0 else None


class CheckPlan(NamedTuple):
    """How a size is trained.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        base_batch_size: Batch size that the model's settings suit, in examples.
        rule: How the learning rate follows the batch size, or None.
        target: Loss to come to.
        held_out: Whether it is that of the examples held out, or that of training.
        stretch: Updates between two looks at it.
        most_updates: Updates after which another size has won.
        budget_s: Seconds that it may take, building included.
        seed: Seed of weights, order and held-out examples, as of the pilot.
    """

    batch_size: int
    micro_batch_size: int
    base_batch_size: int
    rule: str | None
    target: float
    held_out: bool
    stretch: int
    most_updates: int
    budget_s: float
    seed: int | None


def run_size_check(
    build: Callable[[], keras.Model], data: FitData, *, plan: CheckPlan
) -> SizeCheck:
    """Train from the start until the loss is at the target, or what the plan allows is spent."""
    ends_s, losses = time.perf_counter() + plan.budget_s, [math.nan]

    def end(found: Stretch) -> str | None:
        loss = found.held_out_loss if plan.held_out else found.metrics.get("loss")
        losses.append(math.nan if loss is None else loss)
        if loss is None:
            return "diverged"
        return "target" if loss <= plan.target else None

    with seeded(plan.seed):
        model = build()
        batches = held_out_batches(data, model, batch_size=plan.batch_size, seed=plan.seed)
        sizes = {"batch_size": plan.batch_size, "base_batch_size": plan.base_batch_size}
        with scaled_model(model, **sizes, rule=plan.rule, follow_batch_size=FOLLOWERS):
            sum_sparse_gradients(model)  # As in the pilot.
            if plan.micro_batch_size < plan.batch_size:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # As in the pilot.
                    accumulate_gradients(model, plan.micro_batch_size)
            learning_rate = current_learning_rate(model.optimizer)
            course = fit_in_stretches(
                model,
                batches,
                stretch=plan.stretch,
                ends_s=ends_s,
                most_updates=plan.most_updates,
                on_stretch=end,
            )
            scaling = scaling_of(model)
    return SizeCheck(
        plan.batch_size,
        plan.micro_batch_size,
        learning_rate,
        course.updates,
        losses[-1] if math.isfinite(losses[-1]) else None,
        course.trained_s,
        "lost" if course.ended_by == "updates" else course.ended_by,
        scaling,
    )


_VALIDATION_BATCH_SIZE = 256
# A look is taken some fifty times.
_MOST_HELD_OUT = 1024


class Stretch(NamedTuple):
    """Some updates in a row.

    Attributes:
        updates: How many.
        metrics: What training reported over them, by name; None where it is not finite.
        held_out_loss: Loss on the examples held out after them, None without any or not finite.
    """

    updates: int
    metrics: Mapping[str, float | None]
    held_out_loss: float | None


class Course(NamedTuple):
    """What a training in stretches took.

    Attributes:
        updates: Updates in all.
        ended_by: `"updates"` or `"budget"`, or what was answered to a stretch.
        trained_s: Seconds since the first update, looks included.
        built_s: When its first update was made, by `time.perf_counter`; what the first look took
            beyond others is added.
        look_s: Seconds of a look at the held-out loss, the median.
    """

    updates: int
    ended_by: str
    trained_s: float
    built_s: float
    look_s: float


def held_out_batches(
    data: FitData, model: keras.Model, *, batch_size: int, seed: int | None
) -> Batches:
    """Put data into batches, a part of arrays without validation data held out of them.

    Of validation data that are given, 1,024 examples are looked at, in a list of batches.
    """
    batches = in_batches(
        with_held_out(data, seed=seed),
        model,
        batch_size=batch_size,
        largest_batch_size=1,  # What is too few the caller tells.
        validation_batch_size=_VALIDATION_BATCH_SIZE,
        seed=seed,
    )
    given: Any = batches.validation_data
    if isinstance(given, tf.data.Dataset):
        held = list(given.take(_MOST_HELD_OUT // _VALIDATION_BATCH_SIZE))
    else:
        held = [] if given is None else _cut(given, seed)
    return batches._replace(validation_data=[held_on_device(batch) for batch in held])


def _cut(given: Any, seed: int | None) -> list[Any]:
    arrays, rows = tensors_of(FitData(*keras.utils.unpack_x_y_sample_weight(given)))
    order = np.sort(np.random.default_rng(seed).permutation(rows)[:_MOST_HELD_OUT])
    starts = range(0, len(order), _VALIDATION_BATCH_SIZE)
    return [
        keras.tree.map_structure(
            lambda leaf, kept=order[start : start + _VALIDATION_BATCH_SIZE]: (
                None if leaf is None else tf.gather(leaf, kept)
            ),
            arrays,
        )
        for start in starts
    ]


def fit_in_stretches(
    model: keras.Model,
    batches: Batches,
    *,
    stretch: int,
    ends_s: float,
    on_stretch: Callable[[Stretch], str | None],
    least_s: float = 0.0,
    longest_s: float = math.inf,
    most_updates: float = math.inf,
) -> Course:
    """Train until time or updates are spent, or a stretch was enough.

    All of it is one epoch to Keras: starting one takes as long as tens of updates of a small model.
    """
    scale_late_layers(model, batches.dataset)
    watch = _Watch(batches.validation_data, on_stretch)
    watch.stretch, watch.longest_s, watch.most_updates = stretch, longest_s, most_updates
    watch.ends_s, watch.least_s = ends_s, least_s
    trained: Any = model
    trained.fit(
        batches.dataset.repeat(),
        steps_per_epoch=2**31,
        callbacks=[watch],
        verbose=0,
        shuffle=False,
    )
    look_s = statistics.median(watch.looks_s)
    built_s = watch.first_s + watch.looks_s[0] - look_s
    trained_s = time.perf_counter() - watch.first_s
    return Course(watch.updates, watch.ended_by, trained_s, built_s, look_s)


class _Watch(keras.callbacks.Callback):
    """Counts updates, looks at the held-out examples, and ends training."""

    stretch: int
    longest_s: float
    most_updates: float
    ends_s: float
    least_s: float

    def __init__(self, held_out: list[Any], on_stretch: Callable[[Stretch], str | None]):
        super().__init__()
        self.updates = 0
        self.ended_by = "budget"
        self.first_s = math.nan
        self.looks_s: list[float] = []
        self._held_out = held_out
        self._on_stretch = on_stretch
        self._made = self._looked_at = self._before = 0
        self._looked_s = math.nan

    def on_train_begin(self, logs: Any = None):
        self._before = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s = time.perf_counter()
        if math.isnan(self.first_s):
            self.first_s = self._looked_s = now_s  # What came before traced and compiled.
            self.ends_s = max(self.ends_s, now_s + self.least_s)
        # One call of the train step may make several updates, and skip some that overflowed.
        self._made += steps_at_once(self.model)
        end = "updates" if self._made >= self.most_updates else None
        end = "budget" if now_s > self.ends_s else end
        long = now_s - self._looked_s >= self.longest_s
        if end or long or self._made - self._looked_at >= self.stretch:
            self._look(logs or {}, end)

    def _look(self, logs: Mapping[str, Any], end: str | None) -> None:
        began_s, model = time.perf_counter(), self.model
        target: Any = model
        target.reset_metrics()
        held_out: Mapping[str, Any] = {}
        if self._held_out:
            target.make_test_function()
        for batch in self._held_out:
            # A Python iterator of one batch gives one step, whatever `steps_per_execution` is.
            held_out = target.test_function(iter((batch,)))
        metrics = {name: _finite(value) for name, value in logs.items()}
        made = updates_made(model) - self._before
        found = Stretch(made - self.updates, metrics, _finite(held_out.get("loss")))
        target.reset_metrics()
        self.updates, self._looked_at = made, self._made
        self._looked_s = time.perf_counter()
        self.looks_s.append(self._looked_s - began_s)
        # That training diverged shows at the end of a stretch, where another reason may have come.
        end = self._on_stretch(found) or end
        if end is not None:
            self.ended_by = end
            target.stop_training = True


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(np.asarray(value))
    return number if math.isfinite(number) else None


def steps_at_once(model: Any) -> int:
    """Return the updates that one call of a model's train function makes."""
    return max(1, int(getattr(model, "steps_per_execution", 1)))
