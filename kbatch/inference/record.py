"""Records of what was measured of a model's inference, one class a kind of measurement."""

import dataclasses
import statistics

from kbatch.analysis.intervals import (
    Estimate,
    calls_for_quantile,
    median_interval,
    quantile_upper_bound,
)
from kbatch.inference.target_search import keeps_to
from kbatch.records.record import SHORTEST_S, check_choice, check_ranges

TIMING_OUTCOMES = ("measured", "out_of_memory", "not_run")

# The path whose calls have all examples, cut into batches by Keras.
BULK_PATH = "predict"


@dataclasses.dataclass(frozen=True)
class SizeEffect:
    """What a batch size changes in the outputs of the same examples, against the smallest one."""

    depends: bool  #: Whether it is more than rounding.
    difference: float | None  #: Largest, as a share of the largest output; None if not finite.
    changed_argmax: float | None  #: Share of those beyond rounding; None if there are none.


@dataclasses.dataclass(frozen=True)
class TimingRecord:
    """The calls of one batch size on one call path under one policy."""

    call_path: str  #: How the model was called.
    dtype_policy: str  #: Under which policy, or `"int8"`.
    batch_size: int  #: Examples in a batch.
    outcome: str  #: One of `TIMING_OUTCOMES`.
    reason: str | None = None  #: Why it was not measured, None where it was.
    examples_per_call: int = 0  #: Examples of a call: the batch, or all examples of a bulk call.
    first_call_s: float | None = None  #: Seconds of the first call, with tracing and compiling.
    warm_up_calls: int = 0  #: Calls after it that do not count.
    calls: int = 0  #: Calls that count.
    block_rounds: tuple[int, ...] = ()  #: Number of the round of each block.
    block_medians_s: tuple[float, ...] = ()  #: Median seconds of a call in each block.
    latencies_s: tuple[float, ...] = ()  #: Of single calls, in order; of many calls one in k.
    #: Seconds of a call that copy its batch to a GPU; None without one.
    copy_s: float | None = None
    size_effect: SizeEffect | None = None  #: None for the smallest size, and without floats.

    def __post_init__(self) -> None:
        check_choice(TIMING_OUTCOMES, outcome=self.outcome)
        if (self.outcome == "measured") != bool(self.block_medians_s):
            raise ValueError(
                "A timing has blocks if, and only if, it was measured. Received: "
                f"outcome={self.outcome!r}, {len(self.block_medians_s)} blocks."
            )
        check_ranges(1, batch_size=self.batch_size)
        check_ranges(0, examples_per_call=self.examples_per_call, first_call_s=self.first_call_s)
        check_ranges(SHORTEST_S, block_medians_s=self.block_medians_s, latencies_s=self.latencies_s)

    @property
    def measured(self) -> bool:
        """Whether there are times."""
        return self.outcome == "measured"

    @property
    def bulk(self) -> bool:
        """Whether a call has many batches, so that the latency of one is not seen."""
        return self.call_path == BULK_PATH

    @property
    def batch_times_s(self) -> tuple[float, ...]:
        """Seconds of a batch, one value a block; a share of the call where it has many."""
        share = self.batch_size / self.examples_per_call if self.examples_per_call else 1.0
        return tuple(share * median for median in self.block_medians_s)

    @property
    def batch_time_s(self) -> float | None:
        """Median over the blocks of the seconds of a batch."""
        return statistics.median(self.batch_times_s) if self.measured else None

    @property
    def batch_time_interval_s(self) -> Estimate[float] | None:
        """The 95 % interval of that median, None from fewer than six blocks."""
        return median_interval(self.batch_times_s)

    @property
    def samples_per_second(self) -> float | None:
        """Examples per second at the median time of a batch."""
        return None if self.batch_time_s is None else self.batch_size / self.batch_time_s

    def latency_bound(self, quantile: float) -> float | None:
        """Bound a quantile of the latency with 95 % confidence, in s; None for too few calls."""
        return quantile_upper_bound(self.latencies_s, quantile=quantile)


@dataclasses.dataclass(frozen=True)
class OutputChange:
    """How far outputs under a policy are from those in float32."""

    dtype_policy: str  #: The policy, or `"int8"`.
    examples: int  #: Examples that were compared.
    largest: float | None  #: Largest absolute difference; None where outputs are not finite.
    mean: float | None  #: Mean absolute difference.
    largest_relative: float | None  #: The largest difference over the largest absolute output.
    mean_relative: float | None  #: The mean difference over the mean absolute output.


@dataclasses.dataclass(frozen=True)
class TwinRecord:
    """One setting that was timed as two contenders: what differs between them is noise (A/A)."""

    call_path: str  #: How the model was called.
    dtype_policy: str  #: Under which policy.
    batch_size: int  #: Examples in a batch.
    log_ratios: tuple[float, ...]  #: Log of the one block median over the other, one a round.

    @property
    def noise_floor(self) -> float | None:
        """The difference that equal settings may show, as a share; None from too few rounds."""
        interval = median_interval(self.log_ratios)
        return interval and interval.ends and max(map(abs, interval.ends))


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """A batch size that was checked against a latency target by fresh calls."""

    call_path: str  #: How the model was called.
    dtype_policy: str  #: Under which policy.
    batch_size: int  #: Examples in a batch.
    latency_ms: float  #: The target, in milliseconds.
    quantile: float  #: Which share of the calls has to keep to it.
    latencies_s: tuple[float, ...]  #: Seconds of each fresh call; none where memory ran out.
    best: bool = False  #: Whether this is the batch size that the search for the target returned.
    drift: float = 0.0  #: Slowed by this share, their quantile still keeps to the target.
    #: That with which they have to keep to the target, in (0, 1). All looks of a search, at all its
    #: sizes, together verify a wrong size in 5 % at most.
    confidence: float = 0.95
    calls_a_hiccup: float = 1.0  #: Calls in a row that a hiccup of the machine slowed, on average.
    #: Calls that would be needed to be sure of a size that may yet keep to the target; or None.
    missing_calls: int | None = None
    withdrawn: bool = False  #: It kept to the target, and later calls showed too many hiccups.

    def __post_init__(self) -> None:
        calls_for_quantile(self.quantile)  # Raises where it is none.
        check_ranges(1, batch_size=self.batch_size)
        check_ranges(SHORTEST_S, latency_ms=self.latency_ms, latencies_s=self.latencies_s)

    @property
    def verified(self) -> bool:
        """Whether they keep to the target with that confidence, and with that room."""
        unsure = self.withdrawn or self.missing_calls is not None
        return not unsure and keeps_to(
            self.latencies_s,
            self.latency_ms / 1000,
            quantile=self.quantile,
            drift=self.drift,
            confidence=self.confidence,
            calls_a_hiccup=self.calls_a_hiccup,
        )

    @property
    def exceeded(self) -> int:
        """How many calls took longer than the target."""
        return sum(latency_s > self.latency_ms / 1000 for latency_s in self.latencies_s)
