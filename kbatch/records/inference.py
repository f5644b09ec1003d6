"""The profile of a model's inference: what was measured, and which batch sizes it answers."""

import dataclasses
from typing import TYPE_CHECKING

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Interval
from kbatch.analysis.latency import Latency
from kbatch.analysis.latency_batches import (
    BatchAnswer,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    knee_batch_size,
)
from kbatch.analysis.memory_fit import MemoryFit, fit_memory
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.inference_answers import InferenceAnswer, TargetTooLow, check_target
from kbatch.records.inference_fits import disturbed_share, fit_quantile, fit_timings
from kbatch.records.inference_limits import least_by_checks, most_by_checks
from kbatch.records.inference_measurements import (
    MemoryRecord,
    OutputChange,
    TargetCheck,
    TimingRecord,
    TwinRecord,
)
from kbatch.records.saved_record import SavedRecord
from kbatch.records.shown_record import ShownRecord

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

    def __repr__(self) -> str:
        """Sums the profile up in a line."""
        paths = ", ".join(dict.fromkeys(path for path, _ in self.series))
        sizes = sorted({timing.batch_size for timing in self.timings if timing.measured})
        between = f"batch sizes {sizes[0]} to {sizes[-1]}" if sizes else "nothing timed"
        return f"<InferenceProfile {self.model_name!r}: {between}, {paths}>"

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        """Each call path with each policy that was tried, in order."""
        return tuple(dict.fromkeys((t.call_path, t.dtype_policy) for t in self.timings))

    @property
    def noise_floor(self) -> float | None:
        """The share by which equal settings may differ here; None if it is not known."""
        return None if self.twin is None else self.twin.noise_floor

    @property
    def latency(self) -> Latency:
        """The fit of the time of a batch, for the first call path and policy.

        Blocks that a gap sets apart from the faster ones of their size, wider than 10 % and than
        their scatter explains, are taken for disturbed and left out.

        Raises:
            ValueError: If too little was measured.
        """
        return fit_timings(self._measured())

    @property
    def disturbed_share(self) -> float:
        """Share of the blocks that the fit leaves out, for the first call path and policy."""
        return disturbed_share(self._measured())

    @property
    def knee(self) -> InferenceAnswer:
        """The batch size of the largest throughput over latency.

        Raises:
            ValueError: If too little was measured.
        """
        return self._answer(knee_batch_size(self.latency), "largest throughput over latency")

    @property
    def efficient(self) -> InferenceAnswer:
        """The smallest batch size with 90 % of the peak throughput.

        Raises:
            ValueError: If too little was measured.
        """
        return self._answer(efficient_batch_size(self.latency), "90 % of the peak throughput")

    @property
    def fastest(self) -> InferenceAnswer:
        """The measured batch size of the largest throughput.

        Raises:
            ValueError: If too little was measured.
        """
        return self._answer(fastest_batch_size(self.latency), "largest measured throughput")

    def batch_for(self, *, latency_ms: float, quantile: float = 0.95) -> InferenceAnswer:
        """Finds the largest batch size of which a share of the calls keeps to a latency.

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
        path, policy = self.series[0]
        for check in self.checks:
            asked = (check.call_path, check.dtype_policy, check.latency_ms, check.quantile)
            if check.best and asked == (path, policy, latency_ms, quantile):
                return self._checked(check)
        return self._fitted(latency_ms, quantile)

    def latency_quantile(self, quantile: float) -> Latency:
        """Fits a quantile of the latency, for the first call path and policy.

        Only sizes with enough calls take part. Their calls are cut into groups in order of time,
        each long enough to show the quantile, and each gives one value.

        Args:
            quantile: Which quantile, in (0, 1).

        Raises:
            ValueError: If fewer than two sizes have the calls that it needs, with how many are
                missing; or the path is bulk prediction, where no batch is timed by itself.
        """
        return fit_quantile(self._measured(), quantile)

    def select(
        self, *, call_path: str | None = None, dtype_policy: str | None = None
    ) -> "InferenceProfile":
        """Gives the part of the profile with one call path, one policy, or both.

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
        return dataclasses.replace(
            self,
            timings=tuple(t for t in self.timings if (t.call_path, t.dtype_policy) in wanted),
            memory=tuple(m for m in self.memory if m.dtype_policy in policies),
            checks=tuple(c for c in self.checks if (c.call_path, c.dtype_policy) in wanted),
            output_changes=tuple(c for c in self.output_changes if c.dtype_policy in policies),
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
        """Estimates the memory of a batch from the fitted line, in bytes.

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
        """Makes a table, one row a call path, policy and batch size."""
        from kbatch.records.inference_table import inference_table

        return inference_table(self)

    def _measured(self) -> list[TimingRecord]:
        first = self.series[:1]
        return [t for t in self.timings if t.measured and (t.call_path, t.dtype_policy) in first]

    def _fitted(self, latency_ms: float, quantile: float) -> InferenceAnswer:
        latency = self.latency_quantile(quantile)
        answer = batch_size_within(latency, latency_s=latency_ms / 1000)
        sizes = latency.curve.batch_sizes
        smallest, largest = int(sizes[0]), int(sizes[-1])
        size, reason = answer.batch_size, f"fit of the {quantile:g} quantile"
        if size is None or size < smallest:
            if min(t.batch_size for t in self._measured()) < smallest:
                raise ValueError(
                    f"Sizes below {smallest} have too few calls for the {quantile:g} quantile to "
                    f"tell whether they keep to the target: measure with `quantile={quantile:g}` "
                    f"and more time. Received: latency_ms={latency_ms:g}."
                )
            reachable_ms = 1000 * float(latency.curve.latencies_s[0])
            raise TargetTooLow(latency_ms, quantile, smallest, reachable_ms)
        if size >= largest:
            size = largest
            reason = "the largest measured size; larger ones may keep to the target too"
        return self._answer(*self._within_checks(answer, size, reason, latency_ms, quantile))

    def _within_checks(
        self, answer: BatchAnswer, size: int, reason: str, latency_ms: float, quantile: float
    ) -> tuple[BatchAnswer, str]:
        """Keeps the size of a fit to what fresh calls showed, and the interval around it."""
        checks = [c for c in self.checks if (c.call_path, c.dtype_policy) == self.series[0]]
        least = least_by_checks(checks, latency_ms, quantile)
        most = most_by_checks(checks, latency_ms, quantile)
        if size < least:
            size, reason = least, "fresh calls of it kept to a target as strict"
        if most is not None and size > most:
            if most < 1:
                raise ValueError(
                    "Fresh calls of batch size 1 did not keep to this target or to a looser one: "
                    "give a higher target, or a faster call path or model. "
                    f"Received: latency_ms={latency_ms:g}."
                )
            size, reason = most, "fresh calls for this target or a looser one leave no larger size"
        interval = answer.interval
        if interval is not None and size != answer.batch_size:
            interval = Interval(min(interval.low, size), max(interval.high, size))
        return BatchAnswer(size, interval, False), reason

    def _checked(self, check: TargetCheck) -> InferenceAnswer:
        try:
            interval = self._fitted(check.latency_ms, check.quantile).interval
        except ValueError:  # The fit may say less than the calls that were made.
            interval = None
        reason = f"{len(check.latencies_s)} fresh calls, {check.exceeded} above the target"
        if check.drift:
            reason += f", their bound {100 * check.drift:.0f} % below it for slower times"
        return InferenceAnswer(
            check.batch_size, interval, check.verified, reason, check.call_path, check.dtype_policy
        )

    def _answer(self, found: BatchAnswer, reason: str) -> InferenceAnswer:
        path, policy = self.series[0]
        if found.batch_size is None:
            raise ValueError(
                "The measurements do not tell this batch size: their noise hides how the time "
                "grows. Measure larger batch sizes, or longer. Received: interval="
                f"{found.interval}."
            )
        if found.extrapolated:
            sizes = [t.batch_size for t in self._measured()]
            beyond = found.batch_size > max(sizes)
            end = f"beyond the largest measured size, {max(sizes)}"
            reason += f"; {end if beyond else f'below the smallest measured size, {min(sizes)}'}"
        return InferenceAnswer(
            found.batch_size, found.interval, False, reason, path, policy, found.extrapolated
        )
