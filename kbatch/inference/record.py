"""Records of what was measured of a model's inference, one class a kind of measurement."""

import dataclasses
import statistics

from kbatch.analysis.intervals import (
    Interval,
    QuantileBound,
    calls_for_quantile,
    median_interval,
    quantile_upper_bound,
)
from kbatch.inference.target_search import keeps_to
from kbatch.records.record import SHORTEST_S, check_ranges
from kbatch.records.usage import median_known

TIMING_OUTCOMES = ("measured", "out_of_memory", "not_run")

# The path whose calls have all examples, cut into batches by Keras.
BULK_PATH = "predict"


@dataclasses.dataclass(frozen=True)
class TimingRecord:
    """The calls of one batch size on one call path under one policy.

    Attributes:
        call_path: How the model was called.
        dtype_policy: Under which policy, or `"int8"`.
        batch_size: Examples in a batch.
        outcome: One of `TIMING_OUTCOMES`.
        reason: Why it was not measured, None where it was.
        examples_per_call: Examples of a call: the batch, or all examples of a bulk call.
        first_call_s: Seconds of the first call, with tracing and compiling.
        warm_up_calls: Calls after it that do not count.
        calls: Calls that count.
        block_rounds: Number of the round of each block.
        block_medians_s: Median seconds of a call in each block.
        latencies_s: Seconds of single calls, in order; one of every few at random where there were
            many.
        copy_s: Median seconds of a copy of the batch to the GPU, None where nothing is copied.
        sm_clocks_mhz: Clock of the GPU at the end of each block, in MHz, None where it was not
            told; empty without a GPU that is read.
        throttle_reasons: What lowered the clock there, such as `("power cap",)`, in the same way.
    """

    call_path: str
    dtype_policy: str
    batch_size: int
    outcome: str
    reason: str | None = None
    examples_per_call: int = 0
    first_call_s: float | None = None
    warm_up_calls: int = 0
    calls: int = 0
    block_rounds: tuple[int, ...] = ()
    block_medians_s: tuple[float, ...] = ()
    latencies_s: tuple[float, ...] = ()
    copy_s: float | None = None
    sm_clocks_mhz: tuple[float | None, ...] = ()
    throttle_reasons: tuple[tuple[str, ...] | None, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in TIMING_OUTCOMES:
            raise ValueError(
                f"`outcome` must be one of {', '.join(TIMING_OUTCOMES)}. "
                f"Received: outcome={self.outcome!r}."
            )
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
    def sm_clock_mhz(self) -> float | None:
        """Median over the blocks of the GPU's clock, in MHz, None if not known."""
        return median_known(self.sm_clocks_mhz)

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
    def batch_time_interval_s(self) -> Interval | None:
        """The 95 % interval of that median, None from fewer than six blocks."""
        return median_interval(self.batch_times_s)

    @property
    def samples_per_second(self) -> float | None:
        """Examples per second at the median time of a batch."""
        return None if self.batch_time_s is None else self.batch_size / self.batch_time_s

    def latency_bound(self, quantile: float) -> QuantileBound:
        """Bound a quantile of the latency from above, in seconds, with 95 % confidence."""
        return quantile_upper_bound(self.latencies_s, quantile=quantile)


@dataclasses.dataclass(frozen=True)
class OutputChange:
    """How far outputs under a policy are from those in float32.

    Attributes:
        dtype_policy: The policy, or `"int8"`.
        examples: Examples that were compared.
        largest: Largest absolute difference; None where outputs are not finite.
        mean: Mean absolute difference.
        largest_relative: The largest difference over the largest absolute output.
        mean_relative: The mean difference over the mean absolute output.
    """

    dtype_policy: str
    examples: int
    largest: float | None
    mean: float | None
    largest_relative: float | None
    mean_relative: float | None


@dataclasses.dataclass(frozen=True)
class TwinRecord:
    """One setting that was timed as two contenders: what differs between them is noise (A/A).

    Attributes:
        call_path: How the model was called.
        dtype_policy: Under which policy.
        batch_size: Examples in a batch.
        log_ratios: Logarithm of the one block median over the other, one value a round.
    """

    call_path: str
    dtype_policy: str
    batch_size: int
    log_ratios: tuple[float, ...]

    @property
    def noise_floor(self) -> float | None:
        """The difference that equal settings may show, as a share; None from too few rounds.

        It is the farther end from 0 of the 95 % interval of the median log ratio.
        """
        interval = median_interval(self.log_ratios)
        return None if interval is None else max(abs(interval.low), abs(interval.high))


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """A batch size that was checked against a latency target by fresh calls.

    Attributes:
        call_path: How the model was called.
        dtype_policy: Under which policy.
        batch_size: Examples in a batch.
        latency_ms: The target, in milliseconds.
        quantile: Which share of the calls has to keep to it.
        latencies_s: Seconds of each fresh call; none where memory ran out.
        best: Whether this is the batch size that the search for the target returned.
        drift: By which share later calls may be slower than these: slowed by so much, their
            quantile still keeps to the target.
        confidence: That with which they have to keep to the target, in (0, 1). All looks of a
            search, at all its sizes, together verify a wrong size in 5 % at most.
        calls_a_hiccup: Calls in a row that a hiccup of the machine slowed, on average.
        missing_calls: Calls that are missing for sure knowledge of a size whose calls may yet keep
            to the target; None where it is verified or has missed the target.
        withdrawn: Whether these calls kept to the target, and calls of later sizes showed that
            hiccups of the machine are too frequent for that to hold.
    """

    call_path: str
    dtype_policy: str
    batch_size: int
    latency_ms: float
    quantile: float
    latencies_s: tuple[float, ...]
    best: bool = False
    drift: float = 0.0
    confidence: float = 0.95
    calls_a_hiccup: float = 1.0
    missing_calls: int | None = None
    withdrawn: bool = False

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
