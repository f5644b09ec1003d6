"""The profile of a model's inference: what was measured, and which batch sizes it answers."""

import dataclasses
from typing import TYPE_CHECKING

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.scaling_curve import (
    Latency,
    efficient_batch_size,
    fastest_batch_size,
    knee_batch_size,
)
from kbatch.inference.answers import (
    InferenceAnswer,
    answer_of,
    answer_within,
    check_target,
    disturbed_share,
    fit_quantile,
    fit_timings,
)
from kbatch.inference.record import (
    OutputChange,
    TargetCheck,
    TimingRecord,
    TwinRecord,
    check_quantile,
)
from kbatch.memory.record import MemoryRecord
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.record import SavedRecord, ShownRecord
from kbatch.records.usage import GpuUsage

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True)
class InferenceProfile(SavedRecord, ShownRecord):
    """Latency, throughput and memory of a model's predictions by batch size.

    Questions are answered for the first call path and policy; `select` gives those of others.

    Example:

    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> profile.select(call_path="xla").batch_for(latency_ms=20, quantile=0.99).batch_size

    Attributes:
        model_name: The model's name.
        quantile: The quantile for which calls were counted, in (0, 1).
        timings: What was timed, by path, policy and batch size.
        memory: What was measured of the memory of `model.predict`, by policy and batch size; five
            batches were run of each.
        memory_limit_bytes: Memory that the probes could take, None where none were made.
        output_changes: How outputs differ from those in float32.
        twin: The A/A test, None where time did not suffice.
        checks: Checks of latency targets by fresh calls.
        notes: What a reader of the figures must know.
        environment: The machine, None if it was not recorded.
        gpus: What the timing took of each GPU, with its power cap, its clocks and what lowered
            them; empty where none is read.
    """

    model_name: str
    quantile: float
    timings: tuple[TimingRecord, ...]
    memory: tuple[MemoryRecord, ...] = ()
    memory_limit_bytes: int | None = None
    output_changes: tuple[OutputChange, ...] = ()
    twin: TwinRecord | None = None
    checks: tuple[TargetCheck, ...] = ()
    notes: tuple[str, ...] = ()
    environment: EnvironmentRecord | None = None
    gpus: tuple[GpuUsage, ...] = ()

    def __post_init__(self):
        check_quantile(self.quantile)

    def __repr__(self) -> str:
        """Sum the profile up in a line."""
        paths = ", ".join(dict.fromkeys(path for path, _ in self.series))
        sizes = sorted({timing.batch_size for timing in self.timings if timing.measured})
        between = f"batch sizes {sizes[0]} to {sizes[-1]}" if sizes else "nothing timed"
        return f"<InferenceProfile {self.model_name!r}: {between}, {paths}>"

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        """Each call path with each policy that was tried, in order."""
        return tuple(dict.fromkeys((t.call_path, t.dtype_policy) for t in self.timings))

    @property
    def answering(self) -> tuple[TimingRecord, ...]:
        """The timings that answer questions: those measured of the first path and policy."""
        first = self.series[:1]
        return tuple(
            t for t in self.timings if t.measured and (t.call_path, t.dtype_policy) in first
        )

    @property
    def noise_floor(self) -> float | None:
        """The share by which equal settings may differ here; None if it is not known."""
        return None if self.twin is None else self.twin.noise_floor

    @property
    def latency(self) -> Latency:
        """The fit of the time of a batch, for the first call path and policy.

        Blocks that a neighbour on the machine slowed are left out, where two groups of blocks can
        be told apart.

        Raises:
            ValueError: If too little was measured.
        """
        return fit_timings(self.answering)

    @property
    def disturbed_share(self) -> float:
        """Share of the blocks that the fit leaves out, for the first call path and policy."""
        return disturbed_share(self.answering)

    @property
    def knee(self) -> InferenceAnswer:
        """The batch size of the largest throughput over latency.

        Raises:
            ValueError: If too little was measured.
        """
        found = knee_batch_size(self.latency)
        return answer_of(found, "largest throughput over latency", self.answering)

    @property
    def efficient(self) -> InferenceAnswer:
        """The smallest batch size with 90 % of the peak throughput.

        Raises:
            ValueError: If too little was measured.
        """
        found = efficient_batch_size(self.latency)
        return answer_of(found, "90 % of the peak throughput", self.answering)

    @property
    def fastest(self) -> InferenceAnswer:
        """The measured batch size of the largest throughput.

        Raises:
            ValueError: If too little was measured.
        """
        found = fastest_batch_size(self.latency)
        return answer_of(found, "largest measured throughput", self.answering)

    def batch_for(self, *, latency_ms: float, quantile: float = 0.95) -> InferenceAnswer:
        """Find the largest batch size of which a share of the calls keeps to a latency.

        A target that `profile_inference` checked by fresh calls gets the size that was verified;
        any other one is read off the fit, not verified, and kept to what those calls showed.

        Args:
            latency_ms: The target, in milliseconds.
            quantile: Share of the calls that keep to it, in (0, 1).

        Returns:
            The size, at most the largest that was measured.

        Raises:
            ValueError: If the target is below the latency of the smallest batch, or too few calls
                were made for the quantile; it says what can be reached, or how many are missing.
        """
        check_target(latency_ms, quantile)
        first = self.series[:1]
        checks = [c for c in self.checks if (c.call_path, c.dtype_policy) in first]
        return answer_within(self.answering, checks, latency_ms=latency_ms, quantile=quantile)

    def latency_quantile(self, quantile: float) -> Latency:
        """Fit a quantile of the latency, for the first call path and policy.

        Only sizes with enough calls take part. Their calls are cut into groups in order of time,
        each long enough to show the quantile, and each gives one value.

        Args:
            quantile: Which quantile, in (0, 1).

        Raises:
            ValueError: If fewer than two sizes have the calls that it needs, with how many are
                missing; or the path is bulk prediction, where no batch is timed by itself.
        """
        return fit_quantile(self.answering, quantile)

    def select(
        self, *, call_path: str | None = None, dtype_policy: str | None = None
    ) -> "InferenceProfile":
        """Return the part of the profile with one call path, one policy, or both.

        The A/A test goes with the path and policy that it was made with.

        Raises:
            ValueError: If it holds none such.
        """
        wanted = {
            (path, policy)
            for path, policy in self.series
            if call_path in (None, path) and dtype_policy in (None, policy)
        }
        if not wanted:
            raise ValueError(
                f"The profile holds {', '.join(f'{p} under {d}' for p, d in self.series)}: select "
                f"one of them. Received: call_path={call_path!r}, dtype_policy={dtype_policy!r}."
            )
        policies = {policy for _, policy in wanted}
        twin = self.twin
        if twin is not None and (twin.call_path, twin.dtype_policy) not in wanted:
            twin = None
        return dataclasses.replace(
            self,
            timings=tuple(t for t in self.timings if (t.call_path, t.dtype_policy) in wanted),
            memory=tuple(m for m in self.memory if m.dtype_policy in policies),
            checks=tuple(c for c in self.checks if (c.call_path, c.dtype_policy) in wanted),
            output_changes=tuple(c for c in self.output_changes if c.dtype_policy in policies),
            twin=twin,
        )

    @property
    def memory_fit(self) -> MemoryFit | None:
        """The line through the memory of the first policy, None from fewer than two sizes."""
        policy = self.series[0][1]
        return fit_memory(
            {
                m.batch_size: float(m.peak_bytes)
                for m in self.memory
                if m.peak_bytes is not None and m.dtype_policy == policy
            }
        )

    def predict_memory_bytes(self, batch_size: int) -> float:
        """Estimate the memory of a batch from the fitted line, in bytes.

        Raises:
            ValueError: If fewer than two sizes were measured.
        """
        fit = self.memory_fit
        if fit is None:
            raise ValueError(
                "A line needs the memory of two batch sizes: profile with `measure_memory=True`. "
                f"Received: {len(self.memory)} probes of memory."
            )
        return fit.predict(check_size(batch_size, "batch_size"))

    def to_dataframe(self) -> "pandas.DataFrame":
        """Make a table, one row a call path, policy and batch size; what is unknown is missing."""
        import pandas

        return pandas.DataFrame([self._row(timing) for timing in self.timings])

    def _row(self, timing: TimingRecord) -> dict[str, object]:
        probes = {(m.dtype_policy, m.batch_size): m for m in self.memory}
        probe = probes.get((timing.dtype_policy, timing.batch_size))
        change = {c.dtype_policy: c for c in self.output_changes}.get(timing.dtype_policy)
        interval = timing.batch_time_interval_s
        known = timing.measured and not timing.bulk
        bound = timing.latency_bound(self.quantile) if known else None
        return {
            "call_path": timing.call_path,
            "dtype_policy": timing.dtype_policy,
            "batch_size": timing.batch_size,
            "outcome": timing.outcome,
            "batch_time_ms": _ms(timing.batch_time_s),
            "batch_time_low_ms": _ms(interval and interval.low),
            "batch_time_high_ms": _ms(interval and interval.high),
            "samples_per_second": timing.samples_per_second,
            "quantile": self.quantile,
            "latency_bound_ms": _ms(bound and bound.value),
            "missing_calls": bound and bound.missing_calls,
            "first_call_s": timing.first_call_s,
            "calls": timing.calls,
            "rounds": len(timing.block_medians_s),
            "copy_ms": _ms(timing.copy_s),
            "peak_memory_bytes": probe and probe.peak_bytes,
            "predicted_memory_bytes": probe and probe.predicted_bytes,
            "largest_output_change": change and change.largest,
            "mean_output_change": change and change.mean,
            "reason": timing.reason,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
