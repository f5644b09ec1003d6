"""The record of a trial: one set of hyperparameters, trained once or several times."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean

from kbatch.analysis.intervals import Estimate, mean_interval
from kbatch.records.notes import Note
from kbatch.records.training_run import TIMES, ExecutionRecord, noise_scale
from kbatch.training.metrics import Direction, is_accuracy, is_fraction

# Hyperparameters that have a column of every table.
OWN_COLUMNS = ("batch_size", "dtype_policy")


def within_range(metric: str, value: Estimate[float] | None) -> Estimate[float] | None:
    """Cut the interval of a metric that is a fraction at 0 and at 1."""
    if value is None or value.ends is None or not (is_fraction(metric) and 0 <= value.value <= 1):
        return value
    low, high = value.ends
    return dataclasses.replace(value, low=max(0.0, low), high=min(1.0, high))


def mean_of(values: Sequence[float], *, positive: bool = False) -> Estimate[float] | None:
    """Return a mean. From three values on, it has a 95 % interval, of logarithms if `positive`."""
    mean = mean_interval(values) or (Estimate(fmean(values)) if values else None)
    logs = mean_interval([*map(math.log, values)]) if positive and all(values) else None
    if mean is None or logs is None or logs.ends is None:
        return mean
    low, high = (mean.value * math.exp(end - logs.value) for end in logs.ends)
    return dataclasses.replace(mean, low=low, high=high)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The metric that a search optimises."""

    name: str
    direction: Direction

    @property
    def sign(self) -> int:
        """1 if a larger value is better, else -1."""
        return 1 if self.direction == "max" else -1

    def rank(self, value: float, *, batch_size: int, trial_id: str) -> tuple[float, int, str]:
        """Return a sort key. The best is first; of equals the smaller size, then the lower id."""
        return (-self.sign * value, batch_size, trial_id)

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether a value is finite and better than `other`, which may be None."""
        return math.isfinite(value) and (other is None or self.sign * (value - other) > 0)

    def or_quality(self, names: Collection[str]) -> "Objective | None":
        """Return the objective if it is one of these metrics, else an accuracy or the loss."""
        if self.name in names and self.name != "samples_per_second":
            return self
        validated = sorted(names, key=lambda name: not name.startswith("val_"))
        if accuracies := [name for name in validated if is_accuracy(name)]:
            return Objective(accuracies[0], "max")
        loss = next((name for name in ("val_loss", "loss") if name in names), None)
        return Objective(loss, "min") if loss else None


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """One trial with all its training runs. Its numbers are means over these runs."""

    trial_id: str  #: Identifier of keras-tuner.
    hyperparameters: Mapping[str, bool | int | float | str | None]  #: Values by name.
    objective: Objective  #: The metric that the search optimises.
    executions: tuple[ExecutionRecord, ...]  #: The training runs, in order.

    def __repr__(self) -> str:
        parts = [f"batch size {self.batch_size}", self.dtype_policy, self.status]
        name = self.objective.name
        if (value := self.metrics.get(name, self.judged_value)) is not None:
            parts.append(f"{name} {value:.4g}")
        return f"<TrialRecord {self.trial_id!r}: {', '.join(parts)}>"

    # Figures and tables read these properties often, so they are computed once.
    @functools.cached_property
    def status(self) -> str:
        """The worst status among the runs."""
        statuses = {execution.status for execution in self.executions}
        worst_first = ("running", "interrupted", "out_of_memory", "failed")
        return next((status for status in worst_first if status in statuses), "completed")

    @property
    def outcome(self) -> str:
        """How the trial ended: "diverged", or its status in words."""
        diverged = self.status == "failed" and any(e.diverged for e in self.executions)
        return "diverged" if diverged else self.status.replace("_", " ")

    @property
    def failure(self) -> str | None:
        """Why the trial did not complete."""
        return next((e.failure for e in self.executions if e.failure), None)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes of all runs, each note once."""
        return tuple(dict.fromkeys(note for e in self.executions for note in e.notes))

    @property
    def last(self) -> ExecutionRecord:
        """The last run. It has all settings that the runs of a trial share."""
        return self.executions[-1]

    @property
    def batch_size(self) -> int:
        """Examples of one optimizer update."""
        return self.last.batch_size

    @property
    def dtype_policy(self) -> str:
        """The dtype policy that was active."""
        return self.last.dtype_policy

    @property
    def learning_rate(self) -> float | None:
        """Learning rate before callbacks, the highest of a schedule; None if unknown."""
        rate = self.last.scaling.learning_rate if self.last.scaling else self.last.learning_rate
        return rate and float(f"{rate:.7g}")  # Optimizers store it in single precision.

    @functools.cached_property
    def throughput(self) -> Estimate[float] | None:
        """Examples per second after the first steps, with its interval over runs or windows."""
        if len(self.executions) == 1:
            return self.executions[0].throughput
        return mean_of(self._known(lambda e: e.samples_per_second), positive=True)

    @property
    def samples_per_second(self) -> float | None:
        """Training examples per second after the first steps."""
        return self.throughput and self.throughput.value

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics of the best epoch under Keras's names."""
        names = dict.fromkeys(name for metrics in self._best_metrics for name in metrics)
        return {name: fmean(self.metric_values(name)) for name in names}

    @functools.cached_property
    def judged_values(self) -> tuple[float | None, ...]:
        """The value of the objective that decides, for each run."""
        name, direction = self.objective.name, self.objective.direction
        if name in TIMES:
            return tuple(getattr(e, name) for e in self.executions)
        return tuple(e.judged(name, direction) for e in self.executions)

    @functools.cached_property
    def judged_value(self) -> float | None:
        """The mean of `judged_values`; a time to a target is None unless all runs met it."""
        if self.objective.name == "seconds_to_target":
            return self.seconds_to_target
        known = [value for value in self.judged_values if value is not None]
        return fmean(known) if known else None

    @property
    def rank(self) -> tuple[bool, float, int, str]:
        """A sort key. The best judged value is first; of equals the smaller size, then the id."""
        value, size = self.judged_value, self.batch_size
        key = self.objective.rank(value or 0.0, batch_size=size, trial_id=self.trial_id)
        return (value is None, *key)

    def best_objective_value(self) -> float | None:
        """Return the best value of the objective in any epoch; None if no epoch has it."""
        name, direction = self.objective.name, self.objective.direction
        values = [v for e in self.executions for m in e.epochs if (v := m.finite(name)) is not None]
        return (max if direction == "max" else min)(values, default=None)

    @functools.cached_property
    def noise_scale(self) -> Estimate[float | None] | None:
        """Gradient noise scale of the late halves of all runs; None if not measured."""
        return noise_scale([e.epochs for e in self.executions])

    @functools.cached_property
    def data_wait_share(self) -> float | None:
        """Share of the training time that is spent on waiting for data."""
        return self.mean(lambda e: e.data_wait_share)

    @property
    def seconds_to_target(self) -> float | None:
        """Mean seconds of training to the target; None unless every run met it."""
        met = self._known(lambda e: e.seconds_to_target)
        return fmean(met) if len(met) == len(self.executions) else None

    def metric(self, name: str) -> Estimate[float] | None:
        """Return a metric at the best epoch, with its 95 % interval; None if no run has it.

        If there are one or two runs, the interval is over validation examples, without the seed.
        """
        return self._with_interval(name, self.metric_values(name))

    def judged(self) -> Estimate[float] | None:
        """Return the value of the objective that decides, with an interval like `metric`."""
        known = [value for value in self.judged_values if value is not None]
        return self._with_interval(self.objective.name, known)

    def _with_interval(self, name: str, values: Sequence[float]) -> Estimate[float] | None:
        mean = mean_of(values, positive=name in TIMES)
        known = [e.outcomes for e in self.executions if e.outcomes and e.outcomes.metric == name]
        blocks = [outcomes.values for outcomes in known]
        same = len(blocks) == len(self.executions) and len(set(map(len, blocks))) == 1
        if mean and mean.ends is None and same:
            over_examples = mean_interval([fmean(block) for block in zip(*blocks, strict=True)])
            if over_examples and over_examples.ends:
                low, high = (mean.value + end - over_examples.value for end in over_examples.ends)
                mean = dataclasses.replace(over_examples, value=mean.value, low=low, high=high)
        return within_range(name, mean)

    def metric_values(self, name: str) -> tuple[float, ...]:
        """Return a metric at the best epoch of each run that has it."""
        return tuple(metrics[name] for metrics in self._best_metrics if name in metrics)

    def mean(self, quantity: Callable[[ExecutionRecord], float | None]) -> float | None:
        """Average a quantity over the runs that have it."""
        values = self._known(quantity)
        return fmean(values) if values else None

    def _known(self, quantity: Callable[[ExecutionRecord], float | None]) -> tuple[float, ...]:
        return tuple(value for e in self.executions if (value := quantity(e)) is not None)

    @functools.cached_property
    def _best_metrics(self) -> list[dict[str, float]]:
        objective = self.objective
        return [e.best_metrics(objective.name, objective.direction) for e in self.executions]


def judged_column(objective: Objective) -> str | None:
    """Name the column of the value that decides; None if the objective has no such column."""
    several_or_time = (*TIMES, "multi_objective")
    return None if objective.name in several_or_time else f"{objective.name}_judged"


def quality_columns(trial: TrialRecord) -> dict[str, float]:
    """Return the metrics of the best epoch and the value that decides, by column."""
    column, value = judged_column(trial.objective), trial.judged_value
    return trial.metrics | ({column: value} if column and value is not None else {})


def single_runs(trials: Iterable[TrialRecord]) -> list[tuple[TrialRecord, int]]:
    """Return each training run as a separate trial, with its number within the trial."""
    return [
        (dataclasses.replace(trial, executions=(run,)), number)
        for trial in trials
        for number, run in enumerate(trial.executions)
    ]


def trial_row(
    trial: TrialRecord, number: int | None = None, rates: Estimate[float] | None = None
) -> dict[str, object]:
    """Make the row of a trial with these samples/s. If `number` is given, it is its only run."""
    first, scale, rates = trial.executions[0], trial.noise_scale, rates or trial.throughput
    # Counts of a single run remain integers.
    mean = trial.mean if number is None else lambda quantity: quantity(first)
    times = ("first_step_s", "data_wait_share", "train_s", "total_s")
    counts = ("examples_seen", "updates", "overflowed_updates")
    usage = ("gpu_energy_j", "gpu_power_w", "gpu_utilization")
    return {
        "trial_id": trial.trial_id,
        **({} if number is None else {"run": number, "seed": first.seed}),
        "status": trial.status,
        **({} if number is None else {"length": first.length}),
        "batch_size": trial.batch_size,
        "micro_batch_size": trial.last.micro_batch_size,
        "accumulation_steps": trial.last.accumulation_steps,
        "steps_per_execution": trial.last.steps_per_execution,
        "batch_size_seen": first.batch_size_seen,
        "dtype_policy": trial.dtype_policy,
        "optimizer": first.optimizer,
        "learning_rate": trial.learning_rate,
        "samples_per_second": rates and rates.value,
        "samples_per_second_low": rates and rates.low,
        "samples_per_second_high": rates and rates.high,
        **{name: mean(attrgetter(name)) for name in (*times, *counts)},
        "seconds_to_target": trial.seconds_to_target,
        "noise_scale": scale and scale.value,
        "noise_scale_low": scale and scale.low,
        "noise_scale_high": scale and scale.high,
        "joules_to_target": mean(lambda e: e.joules_to_target),
        "joules_per_sample": mean(lambda e: e.joules_per_sample),
        **{name: mean(lambda e, name=name: e.usage and getattr(e.usage, name)) for name in usage},
        "epochs": mean(lambda e: len(e.epochs)),
        **({"executions": len(trial.executions)} if number is None else {}),
        "failure": trial.failure,
    }


def device_kinds(trials: Iterable[TrialRecord]) -> list[str]:
    """List the kinds of devices that trials ran on. Speeds are compared on one kind only."""
    return list(dict.fromkeys(e.device for trial in trials for e in trial.executions if e.device))
