"""The profile of a model's inference: what was measured, and which batch sizes it answers."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Interval
from kbatch.analysis.latency import Latency, fit_latency
from kbatch.analysis.latency_batches import (
    BatchAnswer,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    knee_batch_size,
)
from kbatch.analysis.memory_fit import MemoryFit, fit_memory
from kbatch.analysis.quantile_bounds import calls_for_quantile
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.inference_measurements import (
    MemoryRecord,
    OutputChange,
    TargetCheck,
    TimingRecord,
    TwinRecord,
)
from kbatch.records.json_files import read_record, write_record

if TYPE_CHECKING:
    import pandas

# Groups of calls that each give a quantile of their own, which shows its noise.
_MOST_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class InferenceAnswer:
    """A batch size, and how sure it is.

    Attributes:
        batch_size: The size, in examples.
        interval: 95 % interval of the size before it was made whole, in examples; None if
            unknown.
        verified: Whether fresh calls of this size kept to the target.
        reason: Where the answer comes from.
        call_path: How the model was called.
        dtype_policy: Under which policy.
    """

    batch_size: int
    interval: Interval | None
    verified: bool
    reason: str
    call_path: str
    dtype_policy: str


@dataclasses.dataclass(frozen=True)
class InferenceProfile:
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

        Raises:
            ValueError: If too little was measured.
        """
        timings = self._measured()
        sizes = [t.batch_size for t in timings for _ in t.batch_times_s]
        if len(sizes) < 3 or len(timings) < 2:
            path, policy = self.series[0]
            raise ValueError(
                "A fit needs two measured batch sizes with three blocks in all: measure longer, or "
                f"fewer call paths and policies at once. Received: {len(timings)} sizes with "
                f"{len(sizes)} blocks of {path!r} under {policy}."
            )
        return fit_latency(sizes, [value for t in timings for value in t.batch_times_s])

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
        any other one is read off the fit, and not verified.

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
        timings = self._measured()
        if timings and timings[0].bulk:
            raise ValueError(
                "Bulk prediction times all batches together: the latency of one is not known. "
                'Measure another call path, such as "predict_on_batch". '
                f"Received: call path {timings[0].call_path!r}."
            )
        bounds = {t.batch_size: t.latency_bound(quantile) for t in timings}
        known = [t for t in timings if not bounds[t.batch_size].missing_calls]
        if len(known) < 2:
            missing = {size: bound.missing_calls for size, bound in bounds.items()}
            raise ValueError(
                f"The {quantile:g} quantile needs {calls_for_quantile(quantile)} calls at two "
                f"batch sizes or more: measure with `quantile={quantile:g}` and more time. "
                f"Received: missing calls by batch size {missing}."
            )
        pairs = [
            (t.batch_size, value)
            for t in known
            for value in _group_quantiles(t.latencies_s, quantile)
        ]
        # With the calls that the quantile needs there are two groups of each size or more.
        return fit_latency([size for size, _ in pairs], [value for _, value in pairs])

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

    def save(self, path: Path | str) -> None:
        """Writes the profile as JSON.

        Raises:
            OSError: If the folder cannot be written.
        """
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> "InferenceProfile":
        """Reads what `save` wrote.

        Raises:
            RecordError: If the file is damaged or holds something else.
        """
        return read_record(cls, Path(path))

    def _measured(self) -> list[TimingRecord]:
        first = self.series[:1]
        return [t for t in self.timings if t.measured and (t.call_path, t.dtype_policy) in first]

    def _fitted(self, latency_ms: float, quantile: float) -> InferenceAnswer:
        latency = self.latency_quantile(quantile)
        answer = batch_size_within(latency, latency_s=latency_ms / 1000)
        sizes = latency.curve.batch_sizes
        smallest, largest = int(sizes[0]), int(sizes[-1])
        if answer.batch_size is None or answer.batch_size < smallest:
            reachable_ms = 1000 * float(latency.curve.latencies_s[0])
            raise TargetTooLow(latency_ms, quantile, smallest, reachable_ms)
        if answer.batch_size > largest:
            reason = "the largest measured size; larger ones may keep to the target too"
            return self._answer(dataclasses.replace(answer, batch_size=largest), reason)
        return self._answer(answer, f"fit of the {quantile:g} quantile, not verified")

    def _checked(self, check: TargetCheck) -> InferenceAnswer:
        try:
            interval = self._fitted(check.latency_ms, check.quantile).interval
        except ValueError:  # The fit may say less than the calls that were made.
            interval = None
        calls = f"{len(check.latencies_s)} fresh calls, {check.exceeded} above the target"
        return InferenceAnswer(
            check.batch_size, interval, check.verified, calls, check.call_path, check.dtype_policy
        )

    def _answer(self, found: BatchAnswer, reason: str) -> InferenceAnswer:
        path, policy = self.series[0]
        if found.batch_size is None:
            raise ValueError(
                "The measurements do not tell this batch size: their noise hides how the time "
                "grows. Measure larger batch sizes, or longer. Received: interval="
                f"{found.interval}."
            )
        return InferenceAnswer(found.batch_size, found.interval, False, reason, path, policy)


class TargetTooLow(ValueError):
    """A latency target that not even the smallest batch reaches; it says what can be reached.

    Attributes:
        reachable_ms: Latency of the smallest batch, in milliseconds.
    """

    def __init__(self, latency_ms: float, quantile: float, batch_size: int, reachable_ms: float):
        super().__init__(
            f"`latency_ms` must be at least what batch size {batch_size} takes, "
            f"{reachable_ms:.3g} ms at the {quantile:g} quantile: give a higher target, or a "
            f"faster call path or model. Received: latency_ms={latency_ms:g}."
        )
        self.reachable_ms = reachable_ms


def check_target(latency_ms: float, quantile: float) -> None:
    """Checks a latency target and its quantile.

    Raises:
        ValueError: If the target is not positive or the quantile not in (0, 1).
    """
    if isinstance(latency_ms, bool) or not 0 < latency_ms < math.inf:
        raise ValueError(
            "A latency target must be positive, in milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)


def _group_quantiles(latencies_s: tuple[float, ...], quantile: float) -> list[float]:
    shortest = math.ceil(1 / min(quantile, 1 - quantile))
    groups = max(1, min(_MOST_GROUPS, len(latencies_s) // shortest))
    parts = np.array_split(np.asarray(latencies_s), groups)
    return [float(np.quantile(part, quantile)) for part in parts]
