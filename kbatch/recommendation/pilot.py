"""The pilot: a short training that sets the target, and measures the gradient noise scale."""

import math
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.recommendation.pilot_record import PilotRecord, PilotStretch, useful_count
from kbatch.recommendation.stretches import Stretch, fit_in_stretches, held_out_batches
from kbatch.records.noise import MOMENT_METRICS
from kbatch.training.accumulation import accumulate_gradients
from kbatch.training.data.data import FitData
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.seeds import seeded

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
    """Trains until the later half of its updates brought little, or what the plan allows is spent.

    Little is 2 % of the way that the held-out loss went, or the training loss without one.

    Args:
        build: Builds the model, which is trained; keep the state of one that shall stay as it is.
        data: Arguments of `fit`; a part of arrays without validation data is held out.
        plan: How to train.

    Raises:
        InputError: If there are too few examples for two updates.
        ValueError: If the model cannot be trained in micro-batches.
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
    """Counts the updates in a pass over the data, None where they do not tell and need not.

    Raises:
        InputError: If there are too few.
    """
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
