"""The records of a search: each of its training runs, and what holds for all of them."""

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
    "It holds the settings of the search, and no result: move it elsewhere, and run the same "
    "script with the same arguments. The search keeps trials of the same epochs, sizes and seeds."
)
# What a decision or a resumed search takes from a file; other settings are shown.
_READ_SETTINGS: Mapping[str, Any] = {
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
    """What a training run may spend; it ends when one of the limits is reached."""

    train_s: float | None = None  # Seconds of training, None for no limit.
    updates: int | None = None  # Optimizer updates.


@dataclasses.dataclass(frozen=True)
class Target:
    """The value of a metric at which training ends."""

    metric: str  # As Keras names it.
    value: float
    direction: Literal["max", "min"]  # "max" is reached from below.

    def is_met(self, value: float | None) -> bool:
        """Return whether a value of the metric meets it; None does not."""
        if value is None:
            return False
        # Keras's metrics are float32: 0.95 there is 0.94999999.
        if math.isclose(value, self.value, rel_tol=2e-7):
            return True
        return value >= self.value if self.direction == "max" else value <= self.value


# Objectives that kbatch measures itself; all others are metrics of the model.
TIMES = ("samples_per_second", "seconds_to_target")


def epochs_to_target(
    target: Target, epochs: Sequence["EpochRecord"]
) -> Sequence["EpochRecord"] | None:
    """Return the epochs up to the first that meets a target; None if none does."""
    for count, epoch in enumerate(epochs, start=1):
        if target.is_met(epoch.metrics.get(target.metric)):
            return epochs[:count]
    return None


def seconds_to_target(target: Target, epochs: Sequence["EpochRecord"]) -> float | None:
    """Return the seconds of training until an epoch met a target; None if none did."""
    needed = epochs_to_target(target, epochs)
    return None if needed is None else math.fsum(epoch.train_s for epoch in needed)


def noise_scale(runs: Sequence[Sequence["EpochRecord"]]) -> Estimate[float | None] | None:
    """Estimate the noise scale of the late half of each run, all together; None without moments."""
    # Of an epoch's updates every n-th is measured, so they weigh as the measured ones do.
    measured = [[(*m, max(1, e.updates)) for e in run if (m := _moments(e))] for run in runs]
    known: list[Any] = [tuple(zip(*run, strict=True)) for run in measured if run]
    return noise_scale_of_runs(known) if known else None


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
    """A metric of validation as a value for each block of examples, the mean over the best epochs.

    Runs that were validated on the same examples in the same order are compared block by block:
    what makes an example hard is in both and cancels. The standard error of the difference is the
    spread over blocks by the root of their number. The mean of the values is the metric over all
    validation examples, averaged over the best fifth of the epochs (`best_epochs`).
    """

    metric: str | None = None  # As Keras names it; None where no metric was to be had.
    examples: int | None = None  # For validation.
    block_examples: int | None = None  # In a block; the last one may have fewer.
    key: str | None = None  # Fingerprint of the examples in order: runs with one are paired.
    values: tuple[float, ...] = ()  # Of the blocks in order; empty where there is a reason.
    reason: NoOutcomes | None = None  # None if there are values.
    # The most that one example can change the metric: 1 over the examples if each is right or
    # wrong, and 1 over those of the rarest class if the metric is no mean over examples. None if
    # there is no limit, as for a loss.
    step: float | None = None
    lacking_blocks: int = 0  # Blocks without any example of one of the classes.


class AskedRun(NamedTuple):
    """What a search asks of a training run, in plain types."""

    executions: int = 1  # Of the trial, this one included: those before it have completed.
    epochs: int | None = None  # At whose end a short run stops, from the first one on.
    place: int | None = None  # Among the runs of the search, in the order in which they begin.
    # Values of the objective, negated if less is better, that the run must have reached by the end
    # of each epoch, or it is stopped early.
    least: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What one epoch of training showed."""

    epoch: int  #: Number of the epoch, from 0.
    #: Metrics under Keras's names at the end of the epoch; None for a value that is not finite.
    metrics: Mapping[str, float | None]
    examples: int  #: Examples trained on, counted in the input pipeline.
    updates: int  #: Optimizer updates made; an update that overflowed is skipped.
    train_s: float  #: Seconds of training, validation and callbacks left out.
    #: Seconds of it that the train step waited for data, None if not measured.
    data_wait_s: float | None
    batches: int | None = None  #: Batches trained on, None if not counted.
    #: Learning rate at the end, which a callback may have set; None under a schedule.
    learning_rate: float | None = None

    def finite(self, metric: str) -> float | None:
        """Return the value of a metric, None if it is missing or not finite."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class ExecutionRecord:
    """What one training run showed."""

    status: Literal["completed", "out_of_memory", "failed", "running", "interrupted"]
    seed: int | None  #: Seed of weights and shuffling, None when none was set.
    batch_size: int  #: Examples of one optimizer update, as asked for, those of all replicas.
    #: Examples that go through a device at once; all that a replica has of a batch when the
    #: gradient was not accumulated, None before it was found.
    micro_batch_size: int | None
    dtype_policy: str  #: The policy that was active in the model, or that it was to have.
    #: Class name of the optimizer, without the loss-scale wrapper; None when the model could not be
    #: built.
    optimizer: str | None = None
    #: Whether the loss was scaled (mixed_float16), None where no model was built.
    loss_scaled: bool | None = None
    #: Learning rate after the rule and before callbacks; the highest of a schedule.
    learning_rate: float | None = None
    #: Whether XLA compiled the train step, None where no model was built.
    jit_compile: bool | None = None
    #: Largest batch that the train step received, None before the first.
    batch_size_seen: int | None = None
    #: Examples in each window of training; together the windows are all steps but the first one of
    #: each new shape.
    window_examples: tuple[int, ...] = ()
    window_durations_s: tuple[float, ...] = ()  #: Duration of each of those windows, in seconds.
    first_step_s: float | None = None  #: Seconds of the first step, tracing and compiling included.
    examples_seen: int | None = None  #: Examples trained on in all, None if they were not counted.
    batches: int | None = None  #: Batches trained on in all, None if they were not counted.
    #: Optimizer updates in all, without those that overflowed, None if not counted.
    updates: int | None = None
    #: Updates that the loss scale skipped because their gradients overflowed, None if not known.
    overflowed_updates: int | None = None
    #: Seconds of training with the first step, without validation; None if not measured.
    train_s: float | None = None
    data_wait_s: float | None = None  #: Seconds of it spent waiting for data, None if not measured.
    #: Seconds from the start to the end, validation and callbacks included, or None.
    total_s: float | None = None
    #: For each call of `fit`: when it began, its seconds of training with the first step, and all
    #: its seconds. A run that continues or repeats a short or interrupted one has those of it too.
    spans: tuple[tuple[float, ...], ...] = ()
    epochs: tuple[EpochRecord, ...] = ()  #: The epochs, in order.
    #: Metrics that keras-tuner was given: those of the best epoch, or what a `HyperModel.fit` of
    #: the user's returned.
    reported: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    failure: str | None = None  #: Why it did not complete, None if it did.
    #: What a reader of the numbers must know: texts, each with a code and values.
    notes: tuple[Note, ...] = ()
    #: Number of the plan that it trained by, None if it trained as it was written.
    plan: int | None = None
    #: What the run took of GPUs and host, None if that was not measured.
    usage: UsageRecord | None = None
    #: Workers of `executor="local"` that shared the device, this one included; None outside it.
    workers_on_device: int | None = None
    #: What it was allowed to spend, None where the number of epochs was the budget.
    budget: Budget | None = None
    target: Target | None = None  #: Where training was to end, None without one.
    replicas: int = 1  #: Devices that shared each batch.
    traceback: str | None = None  #: Python's traceback of what was raised, None where nothing was.
    #: What the rule was given and what it made of it, None where the model was not built or not
    #: scaled yet.
    scaling: LearningRateScaling | None = None
    #: Most examples that fit in memory at once, where probes or training met the end of it.
    most_in_memory: int | None = None
    #: The metric of the best epochs by blocks of validation examples, or why it is unknown; None if
    #: it was not looked for.
    outcomes: Outcomes | None = None
    #: Fingerprint of the weights before the first update; None if unknown.
    initial_weights: str | None = None
    #: Fingerprint of the shapes of the weights; None if the model did not train.
    weight_shapes: str | None = None
    #: Fingerprint of the order of the first epoch; None where it is drawn without a seed.
    first_order: str | None = None
    #: Kind of device that it ran on, the processor with its cores without a GPU; None if unknown.
    device: str | None = None
    #: Whether all validation examples had the same outputs, or some were not finite, at the end or
    #: in an epoch that is judged.
    dead: bool = False
    #: Names of the callbacks that set the learning rate, to a value or by a factor.
    rate_callbacks: tuple[str, ...] = ()
    #: Whether validation was that of moving averages of the weights (`SwapEMAWeights`).
    averages_validated: bool = False
    #: Train steps that Keras started at once, None before the training. The first step, the windows
    #: and what is counted after each are those of whole executions of so many steps.
    steps_per_execution: int | None = None
    #: Epochs that `fit` was asked for, `epochs` less `initial_epoch`, summed over its calls; None
    #: before the training. A callback may have ended it earlier.
    epochs_asked: int | None = None
    steps_per_epoch: int | None = None  #: The argument of `fit`; None if it was not given.
    #: The data of `fit`: its form ("arrays", "dataset", "PyDataset" or "function"), then the names
    #: of further arguments that were given, such as "y". Empty before the training.
    data: tuple[str, ...] = ()
    #: "short" if the search asked for fewer epochs, to look for a learning rate; "stopped_early" if
    #: the search stopped the run because it was too far behind.
    length: Literal["complete", "short", "stopped_early"] = "complete"
    #: Epochs of a short run that this run repeated. No other number includes them.
    epochs_repeated: int = 0
    #: Place among the training runs of a race, from 1, in the order in which they began.
    place: int | None = None

    def __repr__(self) -> str:
        """Sum the execution up in a line."""
        parts = [f"batch size {self.batch_size}", self.dtype_policy, f"{len(self.epochs)} epochs"]
        if self.updates is not None:
            parts.append(f"{self.updates} updates")
        return f"<ExecutionRecord {self.status}: {', '.join(parts)}>"

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches of a replica's part of a full batch; None before it is known."""
        size = self.micro_batch_size
        return None if size is None else -(-self.batch_size // self.replicas // size)

    @property
    def diverged(self) -> bool:
        """Whether the training loss became NaN or infinite, or the outputs are of no use."""
        return self.dead or any(epoch.metrics.get("loss", 0.0) is None for epoch in self.epochs)

    @property
    def seconds_to_target(self) -> float | None:
        """Seconds of training until an epoch met the target; None if there is none or none did."""
        return None if self.target is None else seconds_to_target(self.target, self.epochs)

    @property
    def joules_to_target(self) -> float | None:
        """Energy of the GPUs in joules over a run that ended when it met its target; else None."""
        if self.target is None or self.usage is None:
            return None
        needed = epochs_to_target(self.target, self.epochs)
        return self.usage.gpu_energy_j if needed and len(needed) == len(self.epochs) else None

    @functools.cached_property
    def throughput(self) -> Estimate[float] | None:
        """Examples over training time after the first step of each new shape, without a pause.

        With the first and third quartile over the timing windows, from two windows on.
        """
        return throughput_of_windows(self.window_examples, self.window_durations_s)

    @property
    def samples_per_second(self) -> float | None:
        """Examples over training time after the first step of each new shape, without a pause."""
        return self.throughput and self.throughput.value

    @property
    def data_wait_share(self) -> float | None:
        """Share of the training time spent waiting for data, from 0 to 1.

        Without the first epoch if there are others, because its tracing hides the waiting.
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
        """Gradient noise scale of each epoch that measured it, None where |G|^2 was lost."""
        measured = [(e.epoch, *m) for e in self.epochs if (m := _moments(e))]
        return {
            epoch: max(variance, 0.0) / norm if norm > 0 else None
            for epoch, variance, norm in measured
        }

    def best_metrics(self, metric: str, direction: str) -> dict[str, float]:
        """Return the finite metrics of the best epoch as Keras logged them, or as reported."""
        best = self.best_epoch(metric, direction)
        metrics = self.reported or (best.metrics if best else {})
        return {n: v for n, v in metrics.items() if v is not None and math.isfinite(v)}

    def judged(self, metric: str, direction: str) -> float | None:
        """Return the value of a metric that decides; None if it is unknown.

        It is the mean over the best fifth of the epochs (at least two), over all validation
        examples. If the `fit` of a HyperModel returned another value, that value decides.
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
        """Find the first epoch with the best value of a metric, or the last where none has it."""
        finite = [(value, e) for e in self.epochs if (value := e.finite(metric)) is not None]
        if not finite:
            return self.epochs[-1] if self.epochs else None
        sign = -1 if direction == "max" else 1
        return min(finite, key=lambda pair: sign * pair[0])[1]


def throughput_of_windows(
    examples: Sequence[int], durations_s: Sequence[float]
) -> Estimate[float] | None:
    """Return the examples/s of a training, and the quartiles of two windows or more.

    The ends are drawn out to the value.
    """
    if not len(examples):
        return None
    value = rate_of_windows(examples, durations_s)
    if len(examples) == 1:
        return Estimate(value)
    # For lists as short as these NumPy takes ten times as long.
    rates = [n / s for n, s in zip(examples, durations_s, strict=True)]
    low, _, high = statistics.quantiles(rates, method="inclusive")
    return Estimate(value, min(low, value), max(high, value))


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """What holds for all trials of a search."""

    settings: Mapping[str, object]  # Of the hypermodel, and what its tuner decides by.
    environment: EnvironmentRecord
    #: What was given and decides the results; "optimizer.epsilon" is a part of "optimizer".
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Those that the model was built with which the facts describe.
    hyperparameters: Mapping[str, bool | int | float | str | None] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        for name in _READ_SETTINGS.keys() & self.settings.keys():
            json_codec.decode(_READ_SETTINGS[name], self.settings[name])
        confidence: Any = self.settings.get("confidence", 0.95)
        if not 0.5 < confidence < 1:
            raise ValueError(
                f"`confidence` must lie above 0.5 and below 1. Received: confidence={confidence}."
            )

    def difference(
        self, settings: Mapping[str, Any], facts: Mapping[str, str] | None = None
    ) -> str | None:
        """Return how another search differs, None if it does not; more batch sizes extend this."""
        differences = []
        for name, here in settings.items():
            there: Any = self.settings.get(name)
            extends = name == "batch_sizes" and set(there or ()) <= set(here)
            if there != here and not extends:
                differences.append(f"{name}: {there} there, {here} here")
        if facts and self.facts:
            names = dict.fromkeys((*self.facts, *facts))
            differing = [name for name in names if self.facts.get(name) != facts.get(name)]
            for name in differing:
                # Another optimizer has other parts.
                if not any(name.startswith(f"{other}.") for other in differing):
                    then, now = self.facts.get(name, "none"), facts.get(name, "none")
                    differences.append(f"{name}: {then} then, {now} now")
        return "; ".join(differences) or None


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a search has come, as it was when this was written."""

    host: str
    #: Number of the process that searches, and when it began; None if no search runs.
    process: int | None
    process_began_at: float | None
    written_at: float  #: Seconds since 1970, like all times at which something began.
    search_s: float | None = None  #: Wall-clock seconds of all calls of `search` so far.
    most_trainings: float | None = None  #: Most complete trainings; None if that is unknown.
    #: Expected seconds until the end, 0 after a search that ended by itself; None if unknown.
    left_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all executions of a search have in common, as it was found before the first of them."""

    number: int  #: From 1; each change makes a further plan, and executions name theirs.
    dtype_policy: str | None  #: Policy of all trials; None where it is a hyperparameter.
    #: Most examples that go through a device at once; None for whole batches of any size.
    micro_batch_size: int | None
    #: Why it is that size: cut as "given" or "cut" to fit; whole because the largest "fits", or
    #: because the model has a train step of its own ("own_step") and cannot be cut, or takes
    #: batches of one size ("whole").
    reason: Literal["given", "cut", "fits", "own_step", "whole"]
    largest_batch_size: int  #: For which the micro-batch was found.
    model: str  #: Fingerprint of the model that it was made with.
    #: Whether cut batches were seen to train as whole ones do; None where none is cut.
    parts_equal: bool | None = None
    parts_note: Note | None = None  #: What differs there; None where nothing does.
    notes: tuple[Note, ...] = ()  #: What a reader of all executions must know of it.
    #: Seconds of a train step by itself and of each example in it; None where none was timed.
    step_s: tuple[float, float] | None = None
    began_at: float | None = None  #: When making it began.
    #: Whether XLA compiles the steps of models that leave it to Keras; None if Keras chooses.
    jit_compile: bool | None = None
    duration_s: float = 0.0  #: Seconds that making it took.
    #: Seconds that XLA is expected to compile after the plan. If None, it compiles nothing.
    compile_s: float | None = None
    #: Most examples of a validation batch, if memory ran out in training since: runs stay alike.
    validation_batch_size: int | None = None
