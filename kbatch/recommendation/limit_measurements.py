"""The measurements behind a recommendation: updates, gradient noise, and the data."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from kbatch.document.number_text import readable
from kbatch.errors import InputError
from kbatch.input_pipeline.input_pipeline_record import InputPipelineProfile
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.recommendation.fit_overhead import time_fit
from kbatch.recommendation.fit_time import FitTime
from kbatch.recommendation.limits import INPUT, NOISE, SATURATION
from kbatch.recommendation.pilot import PilotPlan, run_pilot
from kbatch.recommendation.pilot_record import PilotRecord
from kbatch.recommendation.recommendation_task import Task
from kbatch.throughput.timed_rounds import TimedRounds
from kbatch.throughput.timed_updates import UpdateTimes, time_updates
from kbatch.training.accumulation.whole_batch_moments import uncut_part
from kbatch.training.data.sample_rows import SampleRows
from kbatch.training.kept_state import kept_state

# `fit` is timed at the base size or above, and at this part of it.
_APART = 8
# Steps that measuring the data and `fit` makes, however short its time.
_FEWEST_STEPS, _MUCH_LONGER = 100, 1.5


class InputFound(NamedTuple):
    """What the data cost.

    Attributes:
        pipeline: What the input pipeline delivers at the largest of the sizes; None for arrays,
            of which `fit` shows it.
        fit_times: What `fit` takes, at each of them.
    """

    pipeline: InputPipelineProfile | None
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
        budget_s=task.clock.part_s(SATURATION),
        first=task.base_batch_size,
        checks=task.checks,
    )


def measure_noise(task: Task) -> PilotRecord:
    """Run the pilot.

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
    plan = PilotPlan(
        size,
        budget_s=task.clock.part_s(NOISE),
        epochs=task.epochs,
        seed=task.seed,
    )
    with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
        return run_pilot(task.build, task.data, plan=plan)


def pilot_notes(task: Task, model: keras.Model, pilot: PilotRecord) -> tuple[str, ...]:
    """Say what the pilot trains differently than a whole batch would.

    Layers and losses of Keras are known, the user's own are compared on the data.

    Args:
        task: What is to be trained.
        model: The model.
        pilot: Its pilot.
    """
    layers: Any = model._flatten_layers()
    own = any(not type(layer).__module__.startswith("keras.") for layer in layers)
    if not own and uncut_part(model) is None:
        return ()
    difference = task.checks.difference(model, task.source)
    size = pilot.micro_batch_size
    return () if difference is None else (f"The pilot trains in parts of {size:,}. {difference}",)


def measure_input(task: Task, model: keras.Model, *, timings: Sequence[TimedRounds]) -> InputFound:
    """Measure what `fit` takes at some batch sizes, and what the input pipeline delivers.

    Args:
        task: What is to be trained.
        model: A compiled, built model, which stays as it is.
        timings: The updates that were timed; those of whole batches tell the sizes.

    Raises:
        InputError: If the data cannot be read again and again, or updates take too long.
    """
    sizes = sizes_to_time(timings, task.base_batch_size)
    part_s = task.clock.part_s(INPUT)
    least_s = _FEWEST_STEPS * max(t.median_s for t in timings if t.batch_size in sizes)
    if least_s > _MUCH_LONGER * part_s:
        raise InputError(
            f"measuring `fit` takes {readable(least_s, 2)} s at least, and its part of `budget_s` "
            f"was {readable(part_s, 2)} s"
        )
    profile = None
    if not isinstance(task.source, SampleRows):
        part_s /= 2
        profile = profile_input_pipeline(
            model, task.data.x, batch_size=sizes[-1], budget_s=part_s, remedies=False
        )
    times = time_fit(model, task.data, source=task.source, sizes=sizes, budget_s=part_s)
    return InputFound(profile, times)


def sizes_to_time(timings: Sequence[TimedRounds], base_batch_size: int) -> tuple[int, ...]:
    """Choose two batch sizes to time `fit` at.

    Args:
        timings: The updates that were timed: `fit` runs no larger batch whole than they did.
        base_batch_size: In examples.
    """
    whole = sorted(t.batch_size for t in timings if t.micro_batch_size == t.batch_size)
    near = [size for size in whole if size <= _APART * base_batch_size]
    largest = max(near, default=base_batch_size)
    return (largest // _APART, largest) if largest >= _APART else (largest,)
