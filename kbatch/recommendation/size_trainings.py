"""Short trainings at the sizes that may beat the pilot's, each decided on by those before it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kbatch.analysis.next_size import forecast_updates
from kbatch.document.number_text import readable
from kbatch.recommendation.batch_decision import TrainedRuns, promising_sizes
from kbatch.recommendation.ledger import reason_of
from kbatch.recommendation.pilot_record import PilotRecord
from kbatch.recommendation.recommendation_record import trained_runs
from kbatch.recommendation.recommendation_task import Task
from kbatch.recommendation.size_check import CheckPlan, run_size_check
from kbatch.recommendation.size_check_record import SizeCheck
from kbatch.recommendation.time_in_fit import TimeInFit
from kbatch.throughput.timed_rounds import TimedRounds
from kbatch.training.kept_state import kept_state

# A run that has cost this much more than the best one has lost, as in a search by goodput.
_LOST = 1.3
_STRETCHES = 30


class Trainings(NamedTuple):
    """The trainings at other sizes.

    Attributes:
        checks: The runs.
        ended: Why they ended before the best size was found, None if they did not.
        short_s: Seconds that the budget lacked for the sizes that may be faster, by the size.
    """

    checks: tuple[SizeCheck, ...] = ()
    ended: str | None = None
    short_s: Mapping[int, float] = MappingProxyType({})


def train_sizes(
    task: Task,
    pilot: PilotRecord | None,
    *,
    timings: Sequence[TimedRounds],
    in_fit: TimeInFit | None,
    rule: str | None,
    run: Callable[..., SizeCheck] = run_size_check,
) -> Trainings:
    """Train sizes to the loss that the pilot reached, while one may be better and time is left.

    Of the sizes that can finish in the time left, the one with the largest expected gain is next.

    Args:
        task: What is to be trained.
        pilot: The first run, None without one.
        timings: The updates that were timed.
        in_fit: What an update takes in `fit`; None for the train step alone.
        rule: How the learning rate follows the batch size.
        run: Trains a size, as `run_size_check`.
    """
    checks: tuple[SizeCheck, ...] = ()
    failures: list[str] = []
    build_s = (pilot and pilot.build_s) or 0.0
    while True:
        found = trained_runs(timings, in_fit=in_fit, pilot=pilot, checks=checks)
        if pilot is None or pilot.missing is not None or not found.tried:
            return Trainings(ended="the pilot reached no loss that other sizes could be trained to")
        needed_s = {
            size: build_s + _training_s(found, pilot, size) for size in promising_sizes(found)
        }
        left_s = task.clock.left_s
        size = next((size for size, seconds in needed_s.items() if seconds <= left_s), None)
        if size is None:
            short = [
                f"batch size {size:,} would need about {readable(seconds, 2)} s and "
                f"{readable(left_s, 2)} s of `budget_s` were left"
                for size, seconds in list(needed_s.items())[:1]
            ]
            short_s = {size: seconds - left_s for size, seconds in needed_s.items()}
            return Trainings(checks, "; ".join([*failures, *short]) or None, short_s)
        plan = _plan(task, found, pilot, batch_size=size, rule=rule)
        try:
            with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
                check = run(task.build, task.data, plan=plan)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            failures.append(f"at batch size {size:,} {reason}")
            check = SizeCheck(size, plan.micro_batch_size, None, 0, None, 0.0, "failed")
        # The pilot may have been built while something else ran beside it.
        build_s = min(build_s, max(0.0, left_s - task.clock.left_s - check.trained_s))
        checks = (*checks, check)


def _training_s(found: TrainedRuns, pilot: PilotRecord, batch_size: int) -> float:
    """Estimate the seconds of a run after its first update, looks at the held-out loss included."""
    looks_s = pilot.look_s or 0.0
    # What an update of the pilot took beside its train step; a run starts no epochs.
    step_s = {way.batch_size: way.time_s for way in found.ways.values()}
    pilot_s = (pilot.trained_s or 0.0) - looks_s * len(pilot.stretches)
    base_s = step_s.get(pilot.batch_size, 0.0)
    beside_s = max(0.0, pilot_s / pilot.updates - base_s) if pilot.trained_s else 0.0
    update_s = step_s[batch_size] + beside_s
    return _updates(found, pilot, batch_size) * update_s + _STRETCHES * looks_s


def _updates(found: TrainedRuns, pilot: PilotRecord, batch_size: int) -> float:
    forecast = forecast_updates(found.costs, found.tried)
    return forecast.updates[batch_size] if forecast else pilot.updates_to_target


def _plan(
    task: Task, found: TrainedRuns, pilot: PilotRecord, *, batch_size: int, rule: str | None
) -> CheckPlan:
    update_s = found.costs.update_costs[batch_size]
    least_s = min(run.cost for run in found.tried if run.cost is not None)
    return CheckPlan(
        batch_size=batch_size,
        micro_batch_size=found.ways[batch_size].micro_batch_size,
        base_batch_size=task.base_batch_size,
        rule=rule,
        target=pilot.target or 0.0,
        held_out=pilot.has_held_out,
        stretch=max(1, round(_updates(found, pilot, batch_size) / _STRETCHES)),
        most_updates=max(1, round(_LOST * least_s / update_s)),
        budget_s=task.clock.most_s,
        seed=task.seed,
    )
