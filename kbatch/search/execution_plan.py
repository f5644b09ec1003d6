"""What an execution is asked to do: the plan, and its record before the first step."""

from typing import Any, NamedTuple

import keras

from kbatch.device.device_memory import workers_on_device
from kbatch.records.execution import ExecutionRecord
from kbatch.training.accumulation.summed_gradients import differ_in_parts, sparse_note
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.replica_meter import replica_count
from kbatch.training.scaled_model import scaling_of


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
        sparse_gradients: What the optimizer gets of sparse gradients: "summed" or "keras".
        scaling_note: What a reader must know of the noise scale that the rule used, or None.
        metrics: Metrics that each epoch must have.
        to_target: Whether the cost of a target is the objective.
        path_notes: Where callbacks write in place of the path that was given.
    """

    number: int
    seed: int | None
    batch_size: int
    micro_batch_size: int | None
    largest_batch_size: int
    validation_batch_size: int
    validation_is_chosen: bool
    learning_rate_scaling: str | None
    sparse_gradients: str
    scaling_note: str | None
    metrics: tuple[str, ...]
    to_target: bool
    path_notes: tuple[str, ...] = ()


def begun_record(model: keras.Model, plan: ExecutionPlan) -> ExecutionRecord:
    """Gives the record of an execution whose training has not begun.

    Args:
        model: The model to train.
        plan: What is asked.
    """
    optimizer: Any = model.optimizer
    rows, size = -(-plan.batch_size // replica_count(model)), plan.micro_batch_size
    in_parts = size is not None and size < rows
    sparse = sparse_note(model, plan.sparse_gradients, in_parts=in_parts)
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
        notes=(*(note for note in (plan.scaling_note, sparse) if note), *plan.path_notes),
        workers_on_device=workers_on_device(),
        replicas=replica_count(model),
        scaling=scaling_of(model),
        sparse_gradients=plan.sparse_gradients if differ_in_parts(model) else None,
    )
