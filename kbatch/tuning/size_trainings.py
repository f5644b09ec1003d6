"""Short trainings at the sizes that may beat the pilot's, each decided on by those before it."""

import contextlib
import dataclasses

from kbatch.analysis.goodput_search import forecast_updates, next_size
from kbatch.profiling.size_check import CheckPlan, run_size_check
from kbatch.records.pilot import PilotRecord
from kbatch.records.recommendation import Recommendation
from kbatch.records.size_check import SizeCheck
from kbatch.reporting.number_text import readable
from kbatch.training.kept_state import kept_state
from kbatch.tuning.ledger import reason_of
from kbatch.tuning.recommendation_task import Task

# A run that has cost this much more than the best one has lost, as in a search by goodput.
_LOST = 1.3
_STRETCHES = 30


def train_sizes(
    task: Task, found: Recommendation, *, budget_s: float
) -> tuple[tuple[SizeCheck, ...], str | None]:
    """Trains sizes to the loss that the pilot came to, while one may be better and time is left.

    Args:
        task: What is to be trained.
        found: What was measured; its pilot is the first run.
        budget_s: Seconds to spend, building train steps not counted.

    Returns:
        The runs, and why they ended before the best size was found, None if they did not.
    """
    pilot = found.pilot
    if found.diverged:
        return (), "the pilot's loss became NaN"
    if pilot is None or pilot.target is None or not found.trained.runs:
        return (), "the pilot came to no loss that others could be trained to"
    spent_s = 0.0
    while (size := next_size(found.trained.costs, found.trained.runs).batch_size) is not None:
        plan, needed_s = _planned(task, found, pilot, size)
        left_s = budget_s - spent_s
        if needed_s > left_s:
            return found.checks, (
                f"batch size {size:,} would need about {readable(needed_s, 2)} s and "
                f"{readable(max(0.0, left_s), 2)} s of `budget_s` were left"
            )
        try:
            with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
                check = run_size_check(task.build, task.data, plan=plan._replace(budget_s=left_s))
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            return found.checks, f"at batch size {size:,} {reason}"
        spent_s += check.trained_s
        found = dataclasses.replace(found, checks=(*found.checks, check))
    return found.checks, None


def _planned(
    task: Task, found: Recommendation, pilot: PilotRecord, batch_size: int
) -> tuple[CheckPlan, float]:
    """Plans a run, and tells the seconds that it is expected to take."""
    costs, runs = found.trained.costs, found.trained.runs
    update_s = costs.update_costs[batch_size]
    forecast = forecast_updates(costs, runs)
    updates = forecast.updates[batch_size] if forecast else pilot.useful_updates
    least_s = min(run.cost for run in runs if run.cost is not None)
    micro = {way.batch_size: way.micro_batch_size for way in found.fastest}
    look_s = _look_s(pilot, (runs[0].cost or 0.0) / max(1, pilot.updates_to_target))
    plan = CheckPlan(
        batch_size=batch_size,
        micro_batch_size=micro[batch_size],
        base_batch_size=task.base_batch_size,
        rate_ratio=found.trained_rate_ratio(batch_size),
        target=pilot.target or 0.0,
        held_out=pilot.has_held_out,
        stretch=max(1, round(updates / _STRETCHES)),
        most_updates=max(1, round(_LOST * least_s / update_s)),
        budget_s=0.0,
        seed=task.seed,
    )
    return plan, updates * update_s + _STRETCHES * look_s


def _look_s(pilot: PilotRecord, update_s: float) -> float:
    """Gives the seconds of a look at the held-out loss, from those that the pilot took."""
    trained_s = pilot.duration_s if pilot.trained_s is None else pilot.trained_s
    return max(0.0, trained_s - pilot.updates * update_s) / max(1, len(pilot.stretches))
