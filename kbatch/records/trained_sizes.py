"""What the pilot and the short trainings at other sizes tell of all sizes."""

import dataclasses
import functools

from kbatch.analysis.batch_choice import BatchChoice, TimedUpdate
from kbatch.analysis.goodput_search import SizeCosts, Tried, UpdatesForecast, forecast_updates
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.time_in_fit import TimeInFit
from kbatch.analysis.trained_choice import (
    choose_by_forecast,
    costs_of_updates,
    critical_batch_size,
    faster_untrained,
    update_cost_at,
)
from kbatch.records.pilot import PilotRecord
from kbatch.records.size_check import SizeCheck


@dataclasses.dataclass(frozen=True)
class TrainedSizes:
    """The sizes that were trained to one loss, and the forecast for the others.

    Attributes:
        updates: The timed updates of all sizes.
        in_fit: What an update takes in `fit` at the least; None for the train step alone.
        pilot: The training that set the loss, None without one.
        checks: The trainings at other sizes.
    """

    updates: tuple[TimedUpdate, ...]
    in_fit: TimeInFit | None
    pilot: PilotRecord | None
    checks: tuple[SizeCheck, ...]

    @property
    def costs(self) -> SizeCosts:
        """Seconds of an update of each size, with the wait for the input pipeline."""
        return costs_of_updates(self.updates, in_fit=self.in_fit)

    @functools.cached_property
    def runs(self) -> tuple[Tried, ...]:
        """The sizes that were trained, the pilot's first; none without timings or a pilot."""
        if self.pilot is None or not self.updates:
            return ()
        costs, noise, needed = self.costs, self.pilot.noise_scale, self.pilot.updates_to_target
        cost = needed * update_cost_at(costs, self.pilot.batch_size)
        pilot = Tried(self.pilot.batch_size, cost, needed, noise.value, noise.at_least)
        others = (check.as_tried(costs.update_costs[check.batch_size]) for check in self.checks)
        return (pilot, *others)

    @functools.cached_property
    def forecast(self) -> UpdatesForecast | None:
        """What sizes need to the loss that the pilot came to; None where no other was trained."""
        if not self.checks or not self.runs:
            return None
        return forecast_updates(self.costs, self.runs, largest=self._largest_reached)

    @property
    def faster_untrained(self) -> tuple[int, ...]:
        """Sizes larger than all that were trained, and forecast to be faster than those."""
        if self.forecast is None:
            return ()
        return faster_untrained(self.costs, self.forecast, runs=self.runs)

    @property
    def critical(self) -> NoiseScale | None:
        """B_crit by the sizes that were trained; None where it was the pilot alone."""
        if self.forecast is None:
            return None
        return critical_batch_size(self.forecast, runs=len(self.runs))

    @property
    def choice(self) -> BatchChoice | None:
        """The choice by the forecast; None where no other size was trained."""
        if self.forecast is None:
            return None
        return choose_by_forecast(
            self.updates,
            self.forecast,
            largest=self._largest_reached,
            in_fit=self.in_fit,
        )

    @property
    def _largest_reached(self) -> int:
        return max(run.batch_size for run in self.runs if run.cost is not None)
