"""The measurements behind a recommendation: updates, gradient noise, and the data."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from kbatch.analysis.binding_limit import INPUT, NOISE, SATURATION
from kbatch.analysis.size_costs import TimedRounds
from kbatch.profiling.fit_times import time_fit
from kbatch.profiling.input_pipeline import profile_input_pipeline
from kbatch.profiling.pilot import PilotPlan, pilot_micro_batch_size, run_pilot
from kbatch.profiling.timed_updates import UpdateTimes, time_updates
from kbatch.records.fit_time import FitTime
from kbatch.records.input_pipeline import InputPipelineProfile
from kbatch.records.pilot import PilotRecord
from kbatch.training.accumulation.batch_coupling import coupled_parts, coupling_note
from kbatch.training.errors import InputError
from kbatch.training.kept_state import kept_state
from kbatch.tuning.recommendation_task import Task


class InputFound(NamedTuple):
    """What the data cost.

    Attributes:
        pipeline: What the input pipeline delivers at the largest of the sizes.
        fit_times: What `fit` takes, at each of them.
    """

    pipeline: InputPipelineProfile
    fit_times: tuple[FitTime, ...]


def measure_updates(
    task: Task, model: keras.Model, *, batch_sizes: Sequence[int], fits: int | None
) -> UpdateTimes:
    """Times updates of the batch sizes, whole up to the examples that fit."""
    return time_updates(
        model,
        task.source,
        batch_sizes=batch_sizes,
        largest_whole=fits,
        budget_s=task.part_s(SATURATION),
    )


def measure_noise(task: Task, *, timings: Sequence[TimedRounds]) -> PilotRecord:
    """Runs the pilot.

    Raises:
        InputError: If the data are too few.
    """
    size = task.base_batch_size
    if size < 2:
        raise InputError(
            "A pilot measures the noise between the micro-batches of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={size}."
        )
    near = [min(t.durations_s) / t.batch_size for t in timings if t.batch_size <= size]
    plan = PilotPlan(
        size,
        budget_s=task.part_s(NOISE),
        epochs=task.epochs,
        update_s=min(near) * size if near else None,
        seed=task.seed,
    )
    with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
        return run_pilot(task.build, task.data, plan=plan)


def measure_input(task: Task, model: keras.Model, *, batch_sizes: Sequence[int]) -> InputFound:
    """Measures what `fit` takes at some batch sizes, and what the input pipeline delivers.

    Args:
        task: What is to be trained.
        model: A compiled, built model, which stays as it is.
        batch_sizes: In examples, ascending; the pipeline is measured at the last one.

    Raises:
        InputError: If the data cannot be read again and again.
    """
    data: Any = task.data.x if task.data.y is None else (task.data.x, task.data.y)
    budget_s = task.part_s(INPUT) / 2
    profile = profile_input_pipeline(
        model, data, batch_size=batch_sizes[-1], budget_s=budget_s, remedies=False
    )
    times = time_fit(
        model, task.data, source=task.source, sizes=tuple(batch_sizes), budget_s=budget_s
    )
    return InputFound(profile, times)


def pilot_notes(task: Task, model: keras.Model) -> tuple[str, ...]:
    """Says what the pilot trains differently than a whole batch would.

    Args:
        task: What is to be trained.
        model: The model.
    """
    parts = coupled_parts(model)
    if not parts:
        return ()
    size = pilot_micro_batch_size(task.base_batch_size)
    return (f"The pilot trains in micro-batches of {size:,}. {coupling_note(parts)}",)
