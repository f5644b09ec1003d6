"""The profile of a model's inference: what was measured, and which batch sizes it answers."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate, calls_for_quantile
from kbatch.analysis.line_fit import fit_line, without_slow_rounds
from kbatch.analysis.scaling_curve import (
    Latency,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    knee_batch_size,
)
from kbatch.inference.record import OutputChange, TargetCheck, TimingRecord, TwinRecord
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.page.section import SavedRecord
from kbatch.records.record import EnvironmentRecord

if TYPE_CHECKING:
    import pandas

# Groups of calls that each give a quantile of their own, which shows its noise.
_MOST_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class InferenceAnswer:
    """A batch size, and how sure it is."""

    batch_size: int  #: The size, in examples.
    interval: Estimate[float] | None  #: 95 % interval of it, not made whole, in examples; or None.
    #: Whether fresh calls kept to the target, with 95 % confidence over the whole search.
    verified: bool
    reason: str  #: Where the answer comes from.
    call_path: str  #: How the model was called.
    dtype_policy: str  #: Under which policy.
    extrapolated: bool = False  #: Whether it lies outside the measured sizes; see `reason`.


class TargetTooLow(ValueError):
    """A latency target that not even the smallest batch reaches; it says what can be reached.

    Attributes:
        reachable_ms: Latency of the smallest batch, in milliseconds.
    """

    def __init__(self, latency_ms: float, quantile: float, batch_size: int, reachable_ms: float):
        smaller = "" if batch_size == 1 else "measure smaller batch sizes, "
        super().__init__(
            f"`latency_ms` must be at least what batch size {batch_size} takes, "
            f"{reachable_ms:.3g} ms at the {quantile:g} quantile: {smaller}give a higher target, "
            f"or a faster call path or model. Received: latency_ms={latency_ms:g}."
        )
        self.reachable_ms = reachable_ms


@dataclasses.dataclass(frozen=True)
class InferenceProfile(SavedRecord):
    """Latency, throughput and memory of a model's predictions by batch size.

    Questions are answered for the first call path and policy; `select` gives those of others. They
    raise `ValueError` where too little was measured, or the noise hides the answer.

    Example:

    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> profile.select(call_path="xla").batch_for(latency_ms=20, quantile=0.99).batch_size
    """

    model_name: str  #: The model's name.
    quantile: float  #: The quantile for which calls were counted, in (0, 1).
    timings: tuple[TimingRecord, ...]  #: What was timed, by path, policy and batch size.
    memory: tuple[MemoryRecord, ...] = ()  #: That of `model.predict`, by policy and size.
    memory_limit_bytes: int | None = None  #: That the probes could take, None without probes.
    output_changes: tuple[OutputChange, ...] = ()  #: How outputs differ from those in float32.
    #: The first layer whose outputs depend on the batch size; None if none was seen to.
    differing_layer: str | None = None
    twin: TwinRecord | None = None  #: The A/A test, None where time did not suffice.
    checks: tuple[TargetCheck, ...] = ()  #: Checks of latency targets by fresh calls.
    notes: tuple[str, ...] = ()  #: What a reader of the figures must know.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    def __post_init__(self):
        calls_for_quantile(self.quantile)  # Raises where it is none.

    def __repr__(self) -> str:
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
        """The fit of the time of a batch, without blocks that a neighbour on the machine slowed.

        Raises:
            ValueError: If too little was measured.
        """
        timings = self.answering
        kept = zip(timings, self._calm, strict=True)
        calm = [(t.batch_size, time_s) for t, times_s in kept for time_s in times_s]
        if len(calm) < 3 or len(timings) < 2:
            raise ValueError(
                "A fit needs two measured batch sizes with three blocks in all: measure longer, or "
                f"fewer call paths and policies at once. Received: {len(timings)} sizes with "
                f"{len(calm)} blocks."
            )
        return fit_latency([size for size, _ in calm], [time_s for _, time_s in calm])

    @property
    def disturbed_share(self) -> float:
        """Share of the blocks that the fit leaves out."""
        blocks = sum(len(t.batch_times_s) for t in self.answering)
        return 1 - sum(map(len, self._calm)) / blocks if blocks else 0.0

    @property
    def _calm(self) -> Sequence[Sequence[float]]:
        return without_slow_rounds([t.batch_times_s for t in self.answering])

    @property
    def knee(self) -> InferenceAnswer:
        """The batch size of the largest throughput over latency."""
        return self._answer(knee_batch_size(self.latency), "largest throughput over latency")

    @property
    def efficient(self) -> InferenceAnswer:
        """The smallest batch size with 90 % of the peak throughput."""
        return self._answer(efficient_batch_size(self.latency), "90 % of the peak throughput")

    @property
    def fastest(self) -> InferenceAnswer:
        """The measured batch size of the largest throughput."""
        return self._answer(fastest_batch_size(self.latency), "largest measured throughput")

    def batch_for(self, *, latency_ms: float, quantile: float = 0.95) -> InferenceAnswer:
        """Find the largest measured batch size of which a share of the calls keeps to a latency.

        A target that `profile_inference` checked by fresh calls gets the size that was verified;
        any other one is read off the fit, not verified, and kept to what those calls showed.

        Args:
            latency_ms: The target, in milliseconds.
            quantile: Share of the calls that keep to it, in (0, 1).

        Raises:
            ValueError: If the target is below the latency of the smallest batch, or too few calls
                were made for the quantile; it says what can be reached, or how many are missing.
        """
        check_target(latency_ms, quantile)
        first, asked = self.series[:1], (latency_ms, quantile)
        checks = [c for c in self.checks if (c.call_path, c.dtype_policy) in first]
        check = next((c for c in checks if c.best and (c.latency_ms, c.quantile) == asked), None)
        if check is None:
            return self._fitted(checks, latency_ms, quantile)
        try:
            interval = self._fitted(checks, latency_ms, quantile).interval
        except ValueError:  # The fit may say less than the calls that were made.
            interval = None
        reason = f"{len(check.latencies_s)} fresh calls, {check.exceeded} above the target"
        if check.drift:
            reason += f", with room for calls {100 * check.drift:.0f} % slower"
        smallest = min((t.batch_size for t in self.answering), default=1)
        if check.batch_size < smallest:
            reason += f"; below the smallest size of the sweep, {smallest}"
        return InferenceAnswer(check.batch_size, interval, check.verified, reason, *first[0])

    def _fitted(
        self, checks: Sequence[TargetCheck], latency_ms: float, quantile: float
    ) -> InferenceAnswer:
        """Read the size off the fit, kept to what fresh calls for other targets showed."""
        latency = _fit_quantile(self.answering, quantile, checks)
        answer = batch_size_within(latency, latency_s=latency_ms / 1000)
        smallest, largest = (int(size) for size in latency.curve.batch_sizes[[0, -1]])
        sizes = [t.batch_size for t in self.answering]
        least, most = _bounds_by_checks(checks, latency_ms, quantile)
        size, reason = int(answer.value or 0), f"fit of the {quantile:g} quantile"
        if size < smallest and not least:
            if min(sizes) < smallest:
                raise ValueError(
                    f"Sizes below {smallest} have too few calls for the {quantile:g} quantile to "
                    f"show that they keep to the target: measure with `quantile={quantile:g}` "
                    f"and more time. Received: latency_ms={latency_ms:g}."
                )
            raise TargetTooLow(latency_ms, quantile, smallest, 1000 * latency.latency_s(smallest))
        if size >= largest:
            size = largest
            reason = "the largest measured size; larger ones may keep to the target too"
            if max(sizes) > largest:
                reason = (
                    f"the largest size with the calls that the {quantile:g} quantile needs; larger "
                    "ones were measured with fewer, and may keep to the target too"
                )
        if size < max(least, smallest):
            size, reason = least, "fresh calls of it kept to a target as strict"
        if most is not None and size > most:
            if most < 1:
                raise ValueError(
                    "Fresh calls of batch size 1 did not keep to this target or to a looser one: "
                    "give a higher target, or a faster call path or model. "
                    f"Received: latency_ms={latency_ms:g}."
                )
            size, reason = most, "fresh calls for this target or a looser one leave no larger size"
        low, high = answer.ends or (None, None)
        if low is not None and high is not None and size != answer.value:
            low, high = min(low, size), max(high, size)
        return self._answer(Estimate(size, low, high), reason)

    def _answer(self, found: Estimate[float | None], reason: str) -> InferenceAnswer:
        if found.value is None:
            raise ValueError(
                "This batch size cannot be determined: the noise of the measurements hides how "
                "the time grows. Measure larger batch sizes, or longer. "
                f"Received: interval={found.ends}."
            )
        size, sizes = int(found.value), [t.batch_size for t in self.answering]
        if size > max(sizes):
            reason += f"; beyond the largest measured size, {max(sizes)}"
        elif size < min(sizes):
            reason += f"; below the smallest measured size, {min(sizes)}"
        measured = min(sizes) <= size <= max(sizes)
        interval = Estimate(found.value, *found.ends) if found.ends else None
        return InferenceAnswer(size, interval, False, reason, *self.series[0], not measured)

    def latency_quantile(self, quantile: float) -> Latency:
        """Fit a quantile of the latency, in (0, 1).

        Only sizes with enough calls take part. Their calls are cut into groups in order of time,
        each long enough to show the quantile, and each gives one value.

        Raises:
            ValueError: If fewer than two sizes have the calls that it needs, or the path is bulk
                prediction, where no batch is timed by itself.
        """
        return _fit_quantile(self.answering, quantile, ())

    def select(
        self, *, call_path: str | None = None, dtype_policy: str | None = None
    ) -> "InferenceProfile":
        """Return the part of the profile with one call path, one policy, or both.

        Raises:
            ValueError: If the profile holds none such.
        """

        def wanted(one: TimingRecord | TargetCheck | TwinRecord) -> bool:
            return call_path in (None, one.call_path) and dtype_policy in (None, one.dtype_policy)

        timings = tuple(filter(wanted, self.timings))
        if not timings:
            raise ValueError(
                f"The profile holds {', '.join(f'{p} under {d}' for p, d in self.series)}: select "
                f"one of them. Received: call_path={call_path!r}, dtype_policy={dtype_policy!r}."
            )
        policies = {timing.dtype_policy for timing in timings}
        return dataclasses.replace(
            self,
            timings=timings,
            memory=tuple(m for m in self.memory if m.dtype_policy in policies),
            checks=tuple(filter(wanted, self.checks)),
            output_changes=tuple(c for c in self.output_changes if c.dtype_policy in policies),
            twin=self.twin if self.twin is not None and wanted(self.twin) else None,
        )

    @property
    def memory_fit(self) -> MemoryFit | None:
        """The line through the memory of the first policy, None from fewer than two sizes."""
        return fit_memory(peaks_under(self.series[0][1], self.memory))

    def predict_memory_bytes(self, batch_size: int) -> float:
        """Estimate the bytes of a batch from the line through two measured sizes or more."""
        if (fit := self.memory_fit) is None:
            raise ValueError(
                "A line needs the memory of two batch sizes: profile with `measure_memory=True`. "
                f"Received: {len(self.memory)} probes of memory."
            )
        return fit.predict(check_size(batch_size, "batch_size"))

    def to_dataframe(self) -> "pandas.DataFrame":
        """Make a table, one row a call path, policy and batch size; what is unknown is missing."""
        import pandas

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else 1000 * seconds

        probes = {(m.dtype_policy, m.batch_size): m for m in self.memory}
        changes = {c.dtype_policy: c for c in self.output_changes}
        rows, needed = [], calls_for_quantile(self.quantile)
        for timing in self.timings:
            probe = probes.get((timing.dtype_policy, timing.batch_size))
            change = changes.get(timing.dtype_policy)
            interval, effect = timing.batch_time_interval_s, timing.size_effect
            known = timing.measured and not timing.bulk
            bound = timing.latency_bound(self.quantile) if known else None
            row = {
                "call_path": timing.call_path,
                "dtype_policy": timing.dtype_policy,
                "batch_size": timing.batch_size,
                "outcome": timing.outcome,
                "batch_time_ms": ms(timing.batch_time_s),
                "batch_time_low_ms": ms(interval and interval.low),
                "batch_time_high_ms": ms(interval and interval.high),
                "samples_per_second": timing.samples_per_second,
                "quantile": self.quantile,
                "latency_bound_ms": ms(bound),
                "missing_calls": max(0, needed - len(timing.latencies_s)) if known else None,
                "first_call_s": timing.first_call_s,
                "calls": timing.calls,
                "rounds": len(timing.block_medians_s),
                "copy_ms": ms(timing.copy_s),
                "peak_memory_bytes": probe and probe.peak_bytes,
                "predicted_memory_bytes": probe and probe.predicted_bytes,
                "size_change": effect and effect.difference,
                "size_changed_argmax": effect and effect.changed_argmax,
                "depends_on_size": effect and effect.depends,
                "largest_output_change": change and change.largest,
                "mean_output_change": change and change.mean,
                "reason": timing.reason,
            }
            rows.append(row)
        return pandas.DataFrame(rows)


def check_target(latency_ms: float, quantile: float) -> None:
    known = isinstance(latency_ms, numbers.Real) and not isinstance(latency_ms, bool)
    if not known or not 0 < latency_ms < math.inf:
        raise ValueError(
            "A latency target must be a positive number, in milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)


def round_noise(timings: Sequence[TimingRecord]) -> float | None:
    """Return how far blocks of one size scatter, disturbed ones included."""
    pairs = [(t.batch_size, value) for t in timings for value in t.batch_times_s]
    if len(pairs) < 3 or len(timings) < 2:
        return None
    return fit_line([size for size, _ in pairs], [value for _, value in pairs]).departure.noise


def _fit_quantile(
    timings: Sequence[TimingRecord], quantile: float, checks: Sequence[TargetCheck]
) -> Latency:
    """Fit a quantile of the latency, to fresh calls of larger sizes as well."""
    if timings and timings[0].bulk:
        raise ValueError(
            "Bulk prediction times all batches together: the latency of one is not known. "
            'Measure another call path, such as "predict_on_batch". '
            f"Received: call path {timings[0].call_path!r}."
        )
    needed = calls_for_quantile(quantile)
    missing = {t.batch_size: max(0, needed - len(t.latencies_s)) for t in timings}
    known = {t.batch_size: t.latencies_s for t in timings if not missing[t.batch_size]}
    largest = max(known, default=0)
    known |= {
        check.batch_size: check.latencies_s
        for check in checks
        if check.batch_size > largest and len(check.latencies_s) >= needed
    }
    if len(known) < 2:
        raise ValueError(
            f"The {quantile:g} quantile needs {needed} calls at two "
            f"batch sizes or more: measure with `quantile={quantile:g}` and more time. "
            f"Received: missing calls by batch size {missing}."
        )
    shortest = math.ceil(1 / min(quantile, 1 - quantile))
    pairs = []
    for size, latencies_s in known.items():
        groups = max(1, min(_MOST_GROUPS, len(latencies_s) // shortest))
        parts = np.array_split(np.asarray(latencies_s), groups)
        pairs += [(size, float(np.quantile(part, quantile))) for part in parts]
    # With the calls that the quantile needs there are two groups of each size or more.
    return fit_latency([size for size, _ in pairs], [value for _, value in pairs])


def _bounds_by_checks(
    checks: Sequence[TargetCheck], latency_ms: float, quantile: float
) -> tuple[int, int | None]:
    """Return the sizes between which fresh calls leave the answer: 0 and None where they do not."""
    # A stricter target has no larger size than the one that was found for a looser one, and none
    # from the smallest size on that missed it. A check without enough calls says nothing.
    stricter = [c for c in checks if c.latency_ms <= latency_ms and c.quantile >= quantile]
    looser = [c for c in checks if c.latency_ms >= latency_ms and c.quantile <= quantile]
    unsure = [c for c in looser if c.withdrawn or c.missing_calls is not None]
    missed = [c for c in looser if not (c.best or c.verified or c in unsure)]
    most = [*(c.batch_size for c in looser if c.best), *(c.batch_size - 1 for c in missed)]
    return max((c.batch_size for c in stricter if c.verified), default=0), min(most, default=None)
