"""The records of a search: its training runs, its settings, its plan and its progress."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kbatch.analysis.intervals import Estimate, rate_of_windows
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.analysis.noise_scale import MOMENT_METRICS, noise_scale_of_runs
from kbatch.analysis.run_table import best_epochs
from kbatch.records import json_codec
from kbatch.records.machine import EnvironmentRecord, UsageRecord
from kbatch.records.notes import GridReason, Note

RECORD_NAME = "kbatch.json"
PLAN_NAME = "kbatch-plan.json"
PROGRESS_NAME = "kbatch-progress.json"
SETTINGS_REMEDY = (
    "The file holds no results, only the settings of the search. Move it to another folder, and "
    "run the same script with the same arguments. The search then writes a new file, and keeps the "
    "trials whose epochs, batch sizes and seeds match the script."
)
# Types of the settings that a decision or a resumed search reads. Other settings are for display.
_SETTING_TYPES: Mapping[str, Any] = {
    "batch_sizes": tuple[int, ...],
    "base_batch_size": int,
    "base_added": bool,
    "validation_batch_size": int,
    "max_trainings": float,
    "time_budget_s": float,
    "epochs": int,
    "short_runs": bool,
    "training_s": tuple[float, ...],
    "executions_asked": tuple[int, ...],
    "tolerance": float,
    "confidence": float,
    "strategy": str,
    "grid_because": GridReason,
    "search_learning_rate": bool,
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of a training run, which ends when it reaches one of them. None means no limit."""

    train_s: float | None = None  # Seconds of training.
    updates: int | None = None  # Optimizer updates.


@dataclasses.dataclass(frozen=True)
class Target:
    """The value of a metric at which training ends."""

    metric: str  # As Keras names it.
    value: float
    direction: Literal["max", "min"]  # "max" is reached from below.

    def is_met(self, value: float | None) -> bool:
        """Return whether a value of the metric meets the target."""
        if value is None:
            return False
        # Metrics of Keras are float32, in which 0.95 is 0.94999999.
        if math.isclose(value, self.value, rel_tol=2e-7):
            return True
        return value >= self.value if self.direction == "max" else value <= self.value


# Objectives about speed, which kbatch measures itself. All others are metrics of the model.
TIMES = ("samples_per_second", "seconds_to_target")


def epochs_to_target(
    target: Target, epochs: Sequence["EpochRecord"]
) -> Sequence["EpochRecord"] | None:
    """Return the epochs up to the first one that meets a target; None if no epoch does."""
    for count, epoch in enumerate(epochs, start=1):
        if target.is_met(epoch.metrics.get(target.metric)):
            return epochs[:count]
    return None


def seconds_to_target(target: Target, epochs: Sequence["EpochRecord"]) -> float | None:
    """Return the seconds of training until an epoch met a target; None if no epoch did."""
    needed = epochs_to_target(target, epochs)
    return None if needed is None else math.fsum(epoch.train_s for epoch in needed)


def noise_scale(runs: Sequence[Sequence["EpochRecord"]]) -> Estimate[float | None] | None:
    """Estimate a noise scale from the late halves of all runs; None without gradient moments."""
    # The moments are means over every n-th update, so epochs are weighted by their updates.
    measured = [[(*m, max(1, e.updates)) for e in run if (m := _moments(e))] for run in runs]
    columns: list[Any] = [tuple(zip(*run, strict=True)) for run in measured if run]
    return noise_scale_of_runs(columns) if columns else None


def _moments(epoch: "EpochRecord") -> tuple[float, float] | None:
    variance, norm = map(epoch.metrics.get, MOMENT_METRICS)
    return None if variance is None or norm is None else (variance, norm)


# Why the values of validation blocks are unknown.
NoOutcomes = Literal[
    "no_validation",
    "of_training",
    "several_objectives",
    "several_devices",
    "not_finite",
    "few_blocks",
    "no_metric",
    "no_sums",
    "unknown_length",
    "shuffled",
]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """A validation metric of one run, with one value for each block of validation examples.

    Values are means over the best fifth of the epochs (`best_epochs`). Their mean is the metric
    over all validation examples. Runs with the same examples in the same order are compared block
    by block, because the difficulty of an example cancels in the difference of two runs. The
    standard error of the difference is the deviation over blocks, divided by the root of their
    number.
    """

    metric: str | None = None  # Keras's name; None if the metric is unknown.
    examples: int | None = None  # Number of validation examples.
    block_examples: int | None = None  # Examples of a block; the last block may have fewer.
    key: str | None = None  # Fingerprint of the examples in order. Equal keys are paired.
    values: tuple[float, ...] = ()  # One for each block, in order; empty if `reason` is set.
    reason: NoOutcomes | None = None  # None if there are values.
    # Largest change of the metric if one example changes: 1 / examples for an accuracy, and
    # 1 / examples of the rarest class for a metric that is not a mean, such as recall. None if
    # there is no limit, as for a loss.
    step: float | None = None
    lacking_blocks: int = 0  # Blocks without any example of one of the classes.


class AskedRun(NamedTuple):
    """The training run that a search requests, in plain types."""

    executions: int = 1  # Runs of the trial up to this one. The earlier ones completed.
    epochs: int | None = None  # Epochs of a short run; None if it is complete.
    place: int | None = None  # Number in the order in which the runs of the search begin.
    # For each epoch: the objective (negated if smaller is better) that the run must have reached by
    # the end of this epoch. A run that has not reached it is stopped early.
    least: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """The measurements of one epoch."""

    epoch: int  #: Number of the epoch, from 0.
    #: Metrics under Keras's names at the end of the epoch. A value that is not finite is None.
    metrics: Mapping[str, float | None]
    examples: int  #: Training examples, counted in the input pipeline.
    updates: int  #: Optimizer updates, without updates that were skipped after an overflow.
    train_s: float  #: Seconds of training, without validation and callbacks.
    #: Seconds of training in which the train step waited for data; None if not measured.
    data_wait_s: float | None
    batches: int | None = None  #: Training batches; None if not counted.
    #: Learning rate at the end, which a callback may have set; None under a schedule.
    learning_rate: float | None = None

    def finite(self, metric: str) -> float | None:
        """Return the value of a metric; None if it is missing or not finite."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class ExecutionRecord:
    """The settings and measurements of one training run."""

    status: Literal["completed", "out_of_memory", "failed", "running", "interrupted"]
    seed: int | None  #: Seed of weights and shuffling; None if no seed was set.
    batch_size: int  #: Examples of one optimizer update over all replicas, as requested.
    #: Examples that go through a device at once. Without gradient accumulation these are all
    #: examples of a replica. None before it is known.
    micro_batch_size: int | None
    dtype_policy: str  #: The policy of the model. If no model was built, the requested policy.
    #: Class name of the optimizer, without the loss-scale wrapper; None if no model was built.
    optimizer: str | None = None
    #: Whether the loss was scaled (mixed_float16); None if no model was built.
    loss_scaled: bool | None = None
    #: Learning rate after the rule and before callbacks; the highest one of a schedule.
    learning_rate: float | None = None
    #: Whether XLA compiled the train step; None if no model was built.
    jit_compile: bool | None = None
    #: Largest batch that the train step received; None before the first batch.
    batch_size_seen: int | None = None
    #: Examples of each timing window. The windows hold all steps except the first one of each new
    #: shape.
    window_examples: tuple[int, ...] = ()
    window_durations_s: tuple[float, ...] = ()  #: Seconds of each timing window.
    first_step_s: float | None = None  #: Seconds of the first step, with tracing and compiling.
    examples_seen: int | None = None  #: Training examples; None if not counted.
    batches: int | None = None  #: Training batches; None if not counted.
    #: Optimizer updates, without updates that overflowed; None if not counted.
    updates: int | None = None
    #: Updates that the loss scale skipped because gradients overflowed; None if unknown.
    overflowed_updates: int | None = None
    #: Seconds of training with the first step, without validation; None if not measured.
    train_s: float | None = None
    data_wait_s: float | None = None  #: Seconds of waiting for data; None if not measured.
    #: Seconds from start to end, with validation and callbacks; None if not measured.
    total_s: float | None = None
    #: For each call of `fit`: when it began, its seconds of training with the first step, and its
    #: seconds in all. If the run continues or repeats another run, it includes that run's calls.
    spans: tuple[tuple[float, ...], ...] = ()
    epochs: tuple[EpochRecord, ...] = ()  #: The epochs, in order.
    #: Metrics that keras-tuner received: of the best epoch, or the result of a custom
    #: `HyperModel.fit`.
    reported: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    failure: str | None = None  #: Why the run did not complete; None if it did.
    #: Facts that may change how to read the numbers.
    notes: tuple[Note, ...] = ()
    #: Number of the plan of the run; None if a custom `HyperModel.fit` trained without a plan.
    plan: int | None = None
    #: The use of GPUs by the run; None if it was not measured.
    usage: UsageRecord | None = None
    #: Workers of `executor="local"` that shared the device, with this one; None if there were none.
    workers_on_device: int | None = None
    #: Limits of the run; None if only the number of epochs limited it.
    budget: Budget | None = None
    target: Target | None = None  #: Value at which training ends; None if there is no target.
    replicas: int = 1  #: Devices that shared each batch.
    traceback: str | None = None  #: Python's traceback of an error; None if there was no error.
    #: Inputs and results of the learning-rate rule; None if the model was not built or not scaled.
    scaling: LearningRateScaling | None = None
    #: Most examples that fit in memory at once; None if memory did not run out.
    most_in_memory: int | None = None
    #: The metric by blocks of validation examples, or why it is unknown; None before validation.
    outcomes: Outcomes | None = None
    #: Fingerprint of the weights before the first update; None if unknown.
    initial_weights: str | None = None
    #: Fingerprint of the shapes of the weights; None if the model did not train.
    weight_shapes: str | None = None
    #: Fingerprint of the order of the first epoch; None if the order is drawn without a seed.
    first_order: str | None = None
    #: Kind of device: the GPUs, or the processor with its cores. None if unknown.
    device: str | None = None
    #: Whether the model had collapsed at the end or in an epoch that decides: all validation
    #: examples had the same outputs, or some outputs were not finite.
    dead: bool = False
    #: Names of the callbacks that set the learning rate, to a value or by a factor.
    rate_callbacks: tuple[str, ...] = ()
    #: Whether moving averages of the weights were validated (`SwapEMAWeights`).
    averages_validated: bool = False
    #: Train steps that Keras started at once; None before training. The first step and the timing
    #: windows consist of complete executions of this many steps.
    steps_per_execution: int | None = None
    #: Epochs requested of `fit` (`epochs` less `initial_epoch`), summed over its calls; None before
    #: training. A callback may have ended training earlier.
    epochs_asked: int | None = None
    steps_per_epoch: int | None = None  #: The argument of `fit`; None if it was not given.
    #: Form of the data ("arrays", "dataset", "PyDataset" or "function"), then the names of other
    #: data arguments of `fit`, such as "y". Empty before training.
    data: tuple[str, ...] = ()
    #: "short" if the search requested fewer epochs to find a learning rate; "stopped_early" if the
    #: search stopped the run because it was too far behind.
    length: Literal["complete", "short", "stopped_early"] = "complete"
    #: Epochs of a short run that this run repeated. No other number includes them.
    epochs_repeated: int = 0
    #: Place among the training runs of a race, from 1, in the order in which they began.
    place: int | None = None

    def __repr__(self) -> str:
        parts = [f"batch size {self.batch_size}", self.dtype_policy, f"{len(self.epochs)} epochs"]
        if self.updates is not None:
            parts.append(f"{self.updates} updates")
        return f"<ExecutionRecord {self.status}: {', '.join(parts)}>"

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches of a replica's part of a full batch; None before they are known."""
        size = self.micro_batch_size
        return None if size is None else -(-self.batch_size // self.replicas // size)

    @property
    def diverged(self) -> bool:
        """Whether the training loss or outputs were not finite, or all outputs were the same."""
        return self.dead or any(epoch.metrics.get("loss", 0.0) is None for epoch in self.epochs)

    @property
    def seconds_to_target(self) -> float | None:
        """Seconds of training until an epoch met the target; None if no epoch did."""
        return None if self.target is None else seconds_to_target(self.target, self.epochs)

    @property
    def joules_to_target(self) -> float | None:
        """Energy of the GPUs in joules, if the run ended when it met its target; else None."""
        if self.target is None or self.usage is None:
            return None
        needed = epochs_to_target(self.target, self.epochs)
        return self.usage.gpu_energy_j if needed and len(needed) == len(self.epochs) else None

    @functools.cached_property
    def throughput(self) -> Estimate[float] | None:
        """Training examples per second after the first step of each new shape, without pauses.

        If there are two timing windows or more, the interval is between their quartiles.
        """
        return throughput_of_windows(self.window_examples, self.window_durations_s)

    @property
    def samples_per_second(self) -> float | None:
        """Training examples per second after the first step of each new shape, without pauses."""
        return self.throughput and self.throughput.value

    @property
    def data_wait_share(self) -> float | None:
        """Share of the training time that is spent on waiting for data, from 0 to 1.

        If there are several epochs, the first one does not count, because tracing hides its waits.
        """
        later_s = [(epoch.data_wait_s, epoch.train_s) for epoch in self.epochs[1:]]
        waits = later_s or [(self.data_wait_s, self.train_s)]
        waited_s = [wait_s for wait_s, _ in waits if wait_s is not None]
        trained_s = sum(train_s or 0.0 for _, train_s in waits)
        if len(waited_s) < len(waits) or not trained_s:
            return None
        return sum(waited_s) / trained_s

    @property
    def joules_per_sample(self) -> float | None:
        """Energy of the GPUs in joules, validation included, over the examples trained on."""
        return self.usage and self.usage.joules_per_sample(self.examples_seen)

    @property
    def noise_scale_curve(self) -> dict[int, float | None]:
        """Gradient noise scale by epoch; None if noise hid the squared norm of the gradient."""
        measured = [(e.epoch, *m) for e in self.epochs if (m := _moments(e))]
        return {
            epoch: max(variance, 0.0) / norm if norm > 0 else None
            for epoch, variance, norm in measured
        }

    def best_metrics(self, metric: str, direction: str) -> dict[str, float]:
        """Return the finite metrics that keras-tuner received, or the metrics of the best epoch."""
        best = self.best_epoch(metric, direction)
        metrics = self.reported or (best.metrics if best else {})
        return {n: v for n, v in metrics.items() if v is not None and math.isfinite(v)}

    def judged(self, metric: str, direction: str) -> float | None:
        """Return the value of a metric that decides: the mean over the best fifth of the epochs.

        It is a mean of at least two epochs. If a custom `HyperModel.fit` returned another value,
        return that value.
        """
        if self.outcomes and self.outcomes.metric == metric and self.outcomes.values:
            return math.fsum(self.outcomes.values) / len(self.outcomes.values)
        values = [epoch.finite(metric) for epoch in self.epochs]
        if self.reported:
            reported = self.reported.get(metric)
            if reported is None or not math.isfinite(reported):
                return None
            if not any(v is not None and math.isclose(v, reported, rel_tol=1e-4) for v in values):
                return reported
        best = [values[k] or 0.0 for k in best_epochs(values, larger_is_better=direction == "max")]
        return statistics.fmean(best) if best else None

    def best_epoch(self, metric: str, direction: str) -> EpochRecord | None:
        """Find the first epoch with the best value of a metric. If no epoch has it, take the last.

        Return None if there are no epochs.
        """
        finite = [(value, e) for e in self.epochs if (value := e.finite(metric)) is not None]
        if not finite:
            return self.epochs[-1] if self.epochs else None
        sign = -1 if direction == "max" else 1
        return min(finite, key=lambda pair: sign * pair[0])[1]


def throughput_of_windows(
    examples: Sequence[int], durations_s: Sequence[float]
) -> Estimate[float] | None:
    """Return the examples/s over all windows, with the quartiles of two windows or more.

    The value is a median over parts. If it is outside the quartiles, the range is widened.
    """
    if not len(examples):
        return None
    value = rate_of_windows(examples, durations_s)
    if len(examples) == 1:
        return Estimate(value)
    # NumPy takes ten times as long for short lists.
    rates = [n / s for n, s in zip(examples, durations_s, strict=True)]
    low, _, high = statistics.quantiles(rates, method="inclusive")
    return Estimate(value, min(low, value), max(high, value))


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """The settings, arguments and machine of all trials of a search."""

    settings: Mapping[str, object]  # Of the hypermodel and of the tuner.
    environment: EnvironmentRecord
    #: Arguments that decide the results, as texts. "optimizer.epsilon" is a part of "optimizer".
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Hyperparameters of the model that the facts describe.
    hyperparameters: Mapping[str, bool | int | float | str | None] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        for name in _SETTING_TYPES.keys() & self.settings.keys():
            json_codec.decode(_SETTING_TYPES[name], self.settings[name])
        confidence: Any = self.settings.get("confidence", 0.95)
        if not 0.5 < confidence < 1:
            raise ValueError(
                f"`confidence` must be above 0.5 and below 1. Received: {confidence=}."
            )

    def difference(
        self, settings: Mapping[str, Any], facts: Mapping[str, str] | None = None
    ) -> str | None:
        """Describe how the settings or facts of another search differ; None if they do not.

        Additional batch sizes are no difference, because they extend this search.
        """
        differences = []
        for name, now in settings.items():
            then: Any = self.settings.get(name)
            extends = name == "batch_sizes" and set(then or ()) <= set(now)
            if then != now and not extends:
                differences.append(f"{name}: {then} then, {now} now")
        if facts and self.facts:
            names = dict.fromkeys((*self.facts, *facts))
            differing = [name for name in names if self.facts.get(name) != facts.get(name)]
            differences += [
                f"{name}: {self.facts.get(name, 'none')} then, {facts.get(name, 'none')} now"
                for name in differing
                # If the optimizer differs, its parts are not listed.
                if not any(name.startswith(f"{whole}.") for whole in differing)
            ]
        return "; ".join(differences) or None


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a search when the file was written."""

    host: str
    process: int | None  #: Process id of the search; None if no search runs.
    process_began_at: float | None
    written_at: float  #: Seconds since 1970, like all times named `..._at`.
    search_s: float | None = None  #: Wall-clock seconds of all calls of `search` so far.
    most_trainings: float | None = None  #: Most complete trainings; None if unknown.
    #: Expected seconds until the end; 0 if the search ended by itself; None if unknown.
    left_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of all training runs of a search, chosen before the first one."""

    number: int  #: From 1. A change makes a new plan, and each run names its plan.
    dtype_policy: str | None  #: Policy of all trials; None if it is a hyperparameter.
    #: Most examples that go through a device at once; None if batches of any size are not cut.
    micro_batch_size: int | None
    #: Reason for `micro_batch_size`. Batches are cut: "given" (the user gave the size) or "cut" (to
    #: fit in memory). Batches are not cut: "fits" (the largest batch fits), "own_step" (the model
    #: has its own train step) or "whole" (the model takes batches of one size).
    reason: Literal["given", "cut", "fits", "own_step", "whole"]
    largest_batch_size: int  #: Largest batch size of the search when the plan was made.
    model: str  #: Fingerprint of the model that the plan was made with.
    #: Whether a check showed that cut batches train as whole ones do; None if no batch is cut.
    parts_equal: bool | None = None
    parts_note: Note | None = None  #: How cut batches differ from whole ones; None if they do not.
    notes: tuple[Note, ...] = ()  #: Facts about all training runs.
    #: Seconds of a train step without examples, and of each example; None if no step was timed.
    step_s: tuple[float, float] | None = None
    began_at: float | None = None  #: When the plan was begun.
    #: Whether XLA compiles the steps of models that leave it to Keras; None if Keras chooses.
    jit_compile: bool | None = None
    duration_s: float = 0.0  #: Seconds that the plan took.
    #: Seconds that XLA is expected to compile after the plan. If None, it compiles nothing.
    compile_s: float | None = None
    #: Most examples of a validation batch after memory ran out in training; None before. All runs
    #: keep the same one.
    validation_batch_size: int | None = None
