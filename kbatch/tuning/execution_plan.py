"""What an execution is asked to do: the plan, and its record before the first step."""

from typing import Any, NamedTuple

import keras

from kbatch.instruments.worker_devices import workers_on_device
from kbatch.records.execution import ExecutionRecord
from kbatch.training.accumulation.batch_coupling import coupled_parts, coupling_note
from kbatch.training.accumulation.halving import uncut_note, uncut_part
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.learning_rate import current_learning_rate, scaling_of
from kbatch.training.replica_meter import replica_count


class ExecutionPlan(NamedTuple):
    """What an execution is asked to do.

    Attributes:
        number: Number of the execution in its trial, from 0.
        seed: Seed of weights and shuffling, or None.
        batch_size: Examples of one optimizer update.
        micro_batch_size: Examples that go through the device at once; None where they are found.
        largest_batch_size: Largest batch size of the search.
        validation_batch_size: Examples in a validation batch.
        validation_is_chosen: Whether a person chose that size.
        learning_rate_scaling: Rule that was applied, or None.
        scaling_note: What a reader must know of the noise scale that the rule used, or None.
        metrics: Metrics that each epoch must have.
        to_target: Whether the cost of a target is the objective.
    """

    number: int
    seed: int | None
    batch_size: int
    micro_batch_size: int | None
    largest_batch_size: int
    validation_batch_size: int
    validation_is_chosen: bool
    learning_rate_scaling: str | None
    scaling_note: str | None
    metrics: tuple[str, ...]
    to_target: bool


def begun_record(model: keras.Model, plan: ExecutionPlan) -> ExecutionRecord:
    """Gives the record of an execution whose training has not begun.

    Args:
        model: The model to train.
        plan: What is asked.
    """
    optimizer: Any = model.optimizer
    return ExecutionRecord(
        status="running",
        seed=plan.seed,
        batch_size=plan.batch_size,
        micro_batch_size=plan.micro_batch_size,
        dtype_policy=model.dtype_policy.name,
        optimizer=type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
        loss_scaled=loss_scaled(model),
        learning_rate=current_learning_rate(optimizer),
        learning_rate_scaling=plan.learning_rate_scaling,
        jit_compile=bool(model.jit_compile),
        notes=plan_notes(model, plan, plan.micro_batch_size),
        workers_on_device=workers_on_device(),
        replicas=replica_count(model),
        scaling=scaling_of(model),
    )


def plan_notes(
    model: keras.Model, plan: ExecutionPlan, micro_batch_size: int | None
) -> tuple[str, ...]:
    """Gives what a reader must know of an execution before it trains.

    Args:
        model: The model to train.
        plan: What is asked.
        micro_batch_size: Examples that go through the device at once, None where it is not known.
    """
    cut = _cut_note(model, -(-plan.batch_size // replica_count(model)), micro_batch_size)
    return tuple(note for note in (plan.scaling_note, cut) if note is not None)


def _cut_note(model: keras.Model, rows: int, micro_batch_size: int | None) -> str | None:
    if micro_batch_size is None:
        return None
    if micro_batch_size < rows:
        parts = coupled_parts(model)
        return coupling_note(parts) if parts else None
    uncut = uncut_part(model)
    return uncut_note(uncut) if uncut else None
