"""A short training at another batch size, to the loss that a pilot came to."""

import math
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras

from kbatch.analysis.timescales import FOLLOWERS
from kbatch.recommendation.size_check_record import SizeCheck
from kbatch.recommendation.stretches import Stretch, fit_in_stretches, held_out_batches
from kbatch.training.accumulation import accumulate_gradients, sum_sparse_gradients
from kbatch.training.data.data import FitData
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.scaled_model import scaled_model, scaling_of
from kbatch.training.seeds import seeded


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
    """Trains from the start until the loss is at the target, or what the plan allows is spent.

    Args:
        build: Builds the model, which is trained; keep the state of one that shall stay as it is.
        data: Arguments of `fit`, those of the pilot.
        plan: How to train.
    """
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
