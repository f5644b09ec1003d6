"""The profile of a model's inference: what was measured, and which batch sizes it answers."""

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate, calls_for_quantile, quantile_upper_bound
from kbatch.analysis.scaling_curve import (
    Latency,
    Timed,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    fit_rounds,
    is_saturated,
    knee_batch_size,
    timed_columns,
)
from kbatch.errors import TargetTooLow
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import predict_memory
from kbatch.page.numbers import format_number, in_brackets, memory_text, percent, pluralize
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important

if TYPE_CHECKING:
    import pandas as pd

# The path whose calls have all examples, cut into batches by Keras: the latency of one batch is not
# known.
BULK_PATH = "predict"
# Groups of calls that each give a quantile of their own, which shows its noise.
_MOST_GROUPS = 8
# What the batch size of a property does, as the end of a sentence, the first known one first.
_ANSWERS = {
    "efficient": "is the smallest with 90 % of the peak throughput",
    "knee": "has the largest throughput over latency",
    "fastest": "has the largest throughput",
}


@dataclasses.dataclass(frozen=True)
class SizeEffect:
    """What a batch size changes in the outputs of the same examples, against the smallest one."""

    depends: bool  #: Whether it is more than rounding.
    difference: float | None  #: Largest, as a share of the largest output; None if not finite.
    changed_argmax: float | None  #: Share of those beyond rounding; None if there are none.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingRecord(Timed):
    """The calls of one batch size on one call path under one policy."""

    call_path: str  #: How the model was called, or the name of a function.
    dtype_policy: str | None  #: Under which policy, or `"int8"`; None of a function.
    latencies_s: tuple[float, ...] = ()  #: Of single calls, in order; of many calls one in k.
    size_effect: SizeEffect | None = None  #: None for the smallest size, and without floats.
    reason: Note | None = None  #: Why they have no times. If None, they have.

    def missing_calls(self, quantile: float) -> int:
        """Return how many calls an upper bound of a quantile lacks."""
        return max(0, calls_for_quantile(quantile) - len(self.latencies_s))


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """A batch size that was called afresh to see whether it keeps to a latency target."""

    batch_size: int  #: Examples in a batch.
    latencies_s: tuple[float, ...]  #: Seconds of each call; none where memory ran out.
    #: "unsure" if hiccups of the machine were too many for its calls.
    outcome: Literal["verified", "missed", "unsure"]

    def quantile_ms(self, quantile: float) -> float:
        """Return a quantile of the calls in milliseconds, infinite where memory ran out."""
        calls_s = self.latencies_s
        return 1000 * float(np.quantile(calls_s, quantile)) if calls_s else math.inf


@dataclasses.dataclass(frozen=True)
class InferenceAnswer:
    """A batch size, and how sure it is."""

    batch_size: int  #: The size, in examples.
    #: Its 95 % interval, whose ends are not made whole; they are None where they are not known, and
    #: where what was measured bounds the size.
    interval: Estimate[float | None]
    reason: str  #: Where the answer comes from.
    #: Whether fresh calls kept to the target, with 95 % confidence over the whole search.
    verified: bool = False
    extrapolated: bool = False  #: Whether it lies outside the measured sizes.

    def __str__(self) -> str:
        how = ", verified by fresh calls" if self.verified else ""
        # Of whole examples, of which a batch has one at least.
        ends = [f"{max(1, int(end)):,}" for end in self.interval.ends or ()]
        within = f" ({' to '.join(ends)})" if ends else ""
        return f"batch size {self.batch_size:,}{within}{how}: {self.reason}"


@dataclasses.dataclass(frozen=True, repr=False)
class InferenceProfile(Result):
    """Latency, throughput and memory of a model's predictions, or of functions, by batch size.

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
    #: Largest difference of the outputs from float32, over the largest output, by policy; None
    #: where it is not finite.
    output_changes: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    #: Share of the examples whose class differs from that of float32, by policy, on the data given.
    class_changes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compared_examples: int = 0  #: Examples of the data that were compared for it.
    target_ms: float | None = None  #: The latency target that was looked for, or None.
    checks: tuple[TargetCheck, ...] = ()  #: Fresh calls for it, on the first path and policy.
    noted: tuple[Note, ...] = ()  #: What was noted while it was measured.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Inference of {self.model_name}"

    @property
    def answer(self) -> str:
        """The batch size for the latency target, or else for the throughput."""
        series = series_name(self.series[0]) if self.series else "nothing"
        if self.target_ms is not None:
            within = (
                f"{100 * self.quantile:g} % of the calls within {self.target_ms:g} ms ({series})"
            )
            if (check := self.verified) is None:
                found = self.target_answer
                if found is None:
                    return f"No batch size can be named to have {within}."
                return f"Batch size {found.batch_size:,} is probably the largest with {within}."
            largest = max(one.batch_size for one in (*self.answering, *self.checks))
            of = f" of sizes up to {largest:,}" if check.batch_size == largest else ""
            return (
                f"Batch size {check.batch_size:,} is the largest{of} with {within}, verified by "
                f"{len(check.latencies_s):,} fresh calls."
            )
        for name, found in self.answers.items():
            fitted = ", by the fit: it is outside the measured sizes" if found.extrapolated else ""
            words, latency = _ANSWERS[name], self.latency
            if name == "fastest" or not latency.follows_line:
                words += f" of sizes up to {int(latency.batch_sizes[-1]):,}"
            return f"Batch size {found.batch_size:,} {words} ({series}){fitted}."
        return f"No batch size can be named for {series}: too little of it was timed."

    @property
    def use(self) -> str:
        """Whether predictions depend on the batch size, if they do not and it was measured."""
        effects = [timing.size_effect for timing in self.timings if timing.size_effect]
        same = effects and not any(effect.depends for effect in effects)
        return "Predictions do not change with the batch size." if same else ""

    def table(self) -> "pd.DataFrame":
        """Return a row for each call path, policy and batch size."""
        import pandas as pd

        peaks = {(m.dtype_policy, m.batch_size): m.peak_bytes for m in self.memory}
        named = self.target_answer
        if self.target_ms is None:
            named = next(iter(self.answers.values()), None)
        rows, answer = [], []
        fresh = self._fresh_calls()
        for place, timing in enumerate((*self.timings, *fresh)):
            path, policy, size = timing.call_path, timing.dtype_policy, timing.batch_size
            checked = place >= len(self.timings)
            effect = timing.size_effect
            outcome = [fresh[timing] if checked else timing.reason or timing.outcome]
            if named and (size, path, policy) == (named.batch_size, *self.series[0]):
                # Fresh calls verify an answer, the sweep does not.
                answer += [place] * (checked or not named.verified)
            bound_s, missing = self._bound_s(timing), timing.missing_calls(self.quantile)
            if timing.measured and missing and not is_bulk(path, policy):
                outcome.append(f"{missing:,} calls too few for the quantile")
            if effect and effect.depends:
                outcome.append("outputs depend on the batch")
            rows.append(
                {
                    "call path": path,
                    "policy": policy,
                    "batch size": size,
                    **timed_columns(timing, "batch time"),
                    f"p{100 * self.quantile:g} at most (ms)": _times(1e3, bound_s),
                    "first call (s)": timing.first_call_s,
                    "peak memory (MiB)": _times(2.0**-20, peaks.get((policy or "", size))),
                    "change by size (%)": _times(100, effect and effect.difference),
                    "classes changed by size (%)": _times(100, effect and effect.changed_argmax),
                    "change from float32 (%)": _times(100, self.output_changes.get(policy or "")),
                    "classes changed from float32 (%)": _times(
                        100, self.class_changes.get(policy or "")
                    ),
                    "outcome": ", ".join(outcome),
                }
            )
        table = pd.DataFrame(rows)
        if not any(policy for _, policy in self.series):  # Of functions.
            table = table.rename(columns={"call path": "function"}).drop(columns="policy")
        if self.use:  # Two columns of rounding errors would say the same.
            table = table.drop(columns=["change by size (%)", "classes changed by size (%)"])
        table.attrs["answer"] = answer
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        noted, first = [*self.noted, *self._disagreement()], self.series[:1]
        with contextlib.suppress(ValueError):  # Too little was timed.
            latency = self.latency
            before, size = (int(each) for each in latency.batch_sizes[-2:])
            times_s = latency.latency_s(before), latency.latency_s(size)
            tried = (t.batch_size for t in self.timings if (t.call_path, t.dtype_policy) in first)
            # Where a target, or what left a larger size out, bounds the sizes, the advice is none.
            bounded = self.target_ms is not None or size < max(tried)
            if not bounded and not is_saturated((before, size), times_s):
                gain = percent(size * times_s[0] / (before * times_s[1]) - 1)
                noted.append(Note.of("rate_rises", gain=gain, before=before, size=size))
        return most_important(noted)

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with, the sizes that it answers, and the fitted line."""
        found = {"quantile of the latency": f"{self.quantile:g}"}
        if self.target_ms is not None:
            found["latency target"] = f"{self.target_ms:g} ms"
            looked_at = (f"{c.batch_size:,} {self._outcome(c)}" for c in self.checks)
            found["sizes called afresh"] = ", ".join(looked_at) or "none"
        if self.compared_examples:
            found["classes compared on"] = pluralize(self.compared_examples, "example")
        # With a target these answer another question.
        for name, answer in () if self.target_ms is not None else self.answers.items():
            outside = ", outside the measured sizes" if answer.extrapolated else ""
            found[name] = f"{answer.batch_size:,}{in_brackets(answer.interval)}{outside}"
        with contextlib.suppress(ValueError):
            latency = self.latency
            rate, half = latency.line.one_over_slope, latency.line.intercept_in_x
            found["fit of the time"] = "no line: interpolated between measured sizes"
            if latency.follows_line and rate.value is not None and half.value is not None:
                found["fit of the time"] = (
                    "t(b) = (b + n_half) / r_inf, "
                    f"r_inf = {format_number(rate.value)}{in_brackets(rate)} samples/s, "
                    f"n_half = {format_number(half.value)}{in_brackets(half)} examples"
                )
        if self.memory_limit_bytes is not None:
            found["memory limit"] = memory_text(self.memory_limit_bytes)
        return found

    @property
    def series(self) -> tuple[tuple[str, str | None], ...]:
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
    def latency(self) -> Latency:
        """The fit of the time of a batch, without rounds that a neighbour on the machine slowed.

        Raises:
            ValueError: If too little was measured.
        """
        return fit_rounds(self.answering)

    @property
    def knee(self) -> InferenceAnswer:
        """The batch size of the largest throughput over latency."""
        return self._by_fit(knee_batch_size(self.latency))

    @property
    def efficient(self) -> InferenceAnswer:
        """The smallest batch size with 90 % of the peak throughput.

        The peak is that of an unboundedly large batch where a line fits, else the largest measured.
        """
        return self._by_fit(efficient_batch_size(self.latency))

    @property
    def fastest(self) -> InferenceAnswer:
        """The measured batch size of the largest throughput."""
        return self._by_fit(fastest_batch_size(self.latency))

    def _by_fit(self, found: Estimate[float | None]) -> InferenceAnswer:
        if found.value is None:
            raise ValueError(
                "This batch size cannot be determined: the noise of the measurements hides how "
                "the time grows. Measure larger batch sizes, or longer. "
                f"Received: interval={found.ends}."
            )
        sizes = [timing.batch_size for timing in self.answering]
        outside = not min(sizes) <= found.value <= max(sizes)
        reason = "the fit of the time of a batch"
        return InferenceAnswer(int(found.value), found, reason, extrapolated=outside)

    @property
    def answers(self) -> dict[str, InferenceAnswer]:
        """The sizes above by name, those that the measurements determine."""
        answers = {}
        for name in _ANSWERS:
            with contextlib.suppress(ValueError):  # It is not determined.
                answers[name] = getattr(self, name)
        return answers

    @property
    def target_answer(self) -> InferenceAnswer | None:
        """The batch size for the latency target, None without a target or a size that keeps to it.

        The answer, the table and the figures of a profile all show this one.
        """
        with contextlib.suppress(ValueError):  # Too few calls, or even the smallest size misses it.
            if self.target_ms is not None:
                return self.batch_for(latency_ms=self.target_ms, quantile=self.quantile)
        return None

    @property
    def verified(self) -> TargetCheck | None:
        """The largest size that fresh calls verified for the target."""
        kept = [check for check in self.checks if check.outcome == "verified"]
        return max(kept, key=lambda check: check.batch_size, default=None)

    def _outcome(self, check: TargetCheck) -> str:
        """Return "missed" only if the quantile of the calls is above the target."""
        if check.quantile_ms(self.quantile) > (self.target_ms or math.inf):
            return "missed"
        return "unsure" if check.outcome == "missed" else check.outcome

    def _fresh_calls(self) -> dict[TimingRecord, str]:
        """Return the fresh calls of each checked size as a row, with their outcome."""
        rows = {}
        for check in self.checks:
            if calls_s := check.latencies_s:
                path, policy = self.series[0]
                above = sum(1000 * call_s > (self.target_ms or math.inf) for call_s in calls_s)
                row = TimingRecord(
                    batch_size=check.batch_size,
                    call_path=path,
                    dtype_policy=policy,
                    times_s=(float(np.median(calls_s)),),
                    latencies_s=calls_s,
                )
                words = f"{len(calls_s):,} fresh calls, {above:,} above {self.target_ms:g} ms"
                rows[row] = f"{words}: {self._outcome(check)}"
        return rows

    def _bound_s(self, timing: TimingRecord) -> float | None:
        """Return an upper bound of the quantile of a row, None if it has too few calls."""
        if is_bulk(timing.call_path, timing.dtype_policy):
            return None
        return quantile_upper_bound(timing.latencies_s, quantile=self.quantile)

    def _disagreement(self) -> Iterable[Note]:
        """Return a note if rows of the sweep and fresh calls say opposite things of the target."""
        target_s = (self.target_ms or math.inf) / 1000
        bounds = {t.batch_size: self._bound_s(t) or math.nan for t in self.answering}
        for check in self.checks:
            size, outcome = check.batch_size, self._outcome(check)
            slow = [one for one, bound_s in bounds.items() if one <= size and bound_s > target_s]
            fast = [one for one, bound_s in bounds.items() if one >= size and bound_s <= target_s]
            if (outcome == "verified" and slow) or (outcome == "missed" and fast):
                when = "during the sweep" if outcome == "verified" else "during the fresh calls"
                yield Note.of("busy_while_timed", size=size, when=when)
                return

    def batch_for(self, *, latency_ms: float, quantile: float = 0.95) -> InferenceAnswer:
        """Find the largest measured batch size of which a share of the calls keeps to a latency.

        A target that `profile_inference` looked for gets the size that was verified by fresh calls;
        any other one is read off the fit, not verified, and kept to what those calls showed.

        Args:
            latency_ms: The target, in milliseconds.
            quantile: Share of the calls that keep to it, in (0, 1).

        Raises:
            ValueError: If the target is below the latency of the smallest batch, or too few calls
                were made for the quantile; it says what can be reached, or how many are missing.
        """
        check_target(latency_ms, quantile)
        verified = self.verified
        if verified is not None and (latency_ms, quantile) == (self.target_ms, self.quantile):
            above = sum(1000 * call_s > latency_ms for call_s in verified.latencies_s)
            reason = f"{len(verified.latencies_s)} fresh calls, {above} above the target"
            return InferenceAnswer(verified.batch_size, Estimate(None), reason, verified=True)
        latency = self.latency_quantile(quantile)
        found = batch_size_within(latency, latency_s=latency_ms / 1000)
        smallest, largest = (int(size) for size in latency.batch_sizes[[0, -1]])
        size, reason = int(found.value or 0), f"the fit of the {quantile:g} quantile"
        if size >= largest:  # The interval of the fit may lie beyond it.
            size, found = largest, Estimate(None)
            reason = f"the largest of sizes up to {largest:,} with calls enough"
        elif size < smallest:
            size = 0
        # A stricter target has no larger size than the one that was verified for a looser one, and
        # none from the smallest size on that missed it.
        target_ms, least, bounds, missed = self.target_ms or 0.0, 0, [size], []
        if verified and target_ms <= latency_ms and self.quantile >= quantile:
            least = verified.batch_size
        if target_ms >= latency_ms and self.quantile <= quantile:
            missed = [c for c in self.checks if c.quantile_ms(self.quantile) > latency_ms]
            bounds += [c.batch_size - 1 for c in missed]
            bounds += [verified.batch_size] if verified else []
        kept = max(min(bounds), least)
        if kept < 1 or (kept < smallest and kept != least):
            reached_ms = [c.quantile_ms(quantile) for c in missed if c.batch_size <= smallest]
            reachable_ms = max([1000 * latency.latency_s(smallest), *reached_ms])
            raise TargetTooLow(latency_ms, quantile, smallest, reachable_ms)
        if kept != size:
            reason, found = "fresh calls for another target", Estimate(None)
        return InferenceAnswer(kept, found, reason)

    def latency_quantile(self, quantile: float) -> Latency:
        """Fit a quantile of the latency, in (0, 1), to fresh calls of larger sizes as well.

        Only sizes with enough calls take part. Their calls are cut into groups in order of time,
        each long enough to show the quantile, and each gives one value.

        Raises:
            ValueError: If fewer than two sizes have the calls that it needs, or the path is bulk
                prediction, where no batch is timed by itself.
        """
        timings, needed = self.answering, calls_for_quantile(quantile)
        if timings and is_bulk(*self.series[0]):
            raise ValueError(
                "Bulk prediction times all batches together: the latency of one is not known. "
                'Measure another call path, such as "compiled". '
                f"Received: call path {timings[0].call_path!r}."
            )
        known = {t.batch_size: t.latencies_s for t in timings if not t.missing_calls(quantile)}
        largest = max(known, default=0)
        known |= {
            check.batch_size: check.latencies_s
            for check in self.checks
            if check.batch_size > largest and len(check.latencies_s) >= needed
        }
        if len(known) < 2:
            missing = {t.batch_size: t.missing_calls(quantile) for t in timings}
            raise ValueError(
                f"The {quantile:g} quantile needs {needed} calls at two "
                f"batch sizes or more: measure with `quantile={quantile:g}` and more time. "
                f"Received: missing calls by batch size {missing}."
            )
        shortest = calls_to_show(quantile)
        pairs = []
        for size, latencies_s in known.items():
            groups = max(1, min(_MOST_GROUPS, len(latencies_s) // shortest))
            parts = np.array_split(np.asarray(latencies_s), groups)
            pairs += [(size, float(np.quantile(part, quantile))) for part in parts]
        # With the calls that the quantile needs there are two groups of each size or more.
        return fit_latency([size for size, _ in pairs], [value for _, value in pairs])

    def select(
        self, *, call_path: str | None = None, dtype_policy: str | None = None
    ) -> "InferenceProfile":
        """Return the part of the profile with one call path, one policy, or both.

        Raises:
            ValueError: If the profile holds none such.
        """
        timings = tuple(
            t
            for t in self.timings
            if call_path in (None, t.call_path) and dtype_policy in (None, t.dtype_policy)
        )
        if not timings:
            raise ValueError(
                f"The profile holds {', '.join(map(series_name, self.series))}: select "
                f"one of them. Received: call_path={call_path!r}, dtype_policy={dtype_policy!r}."
            )
        found = dataclasses.replace(
            self,
            timings=timings,
            memory=tuple(m for m in self.memory if dtype_policy in (None, m.dtype_policy)),
        )
        if found.series[0] == self.series[0]:
            return found
        return dataclasses.replace(found, target_ms=None, checks=())

    def predict_memory_bytes(self, batch_size: int) -> float:
        """Estimate the bytes of a batch from the line through two measured sizes or more."""
        size = check_size(batch_size, "batch_size")
        return predict_memory(peaks_under(self.series[0][1], self.memory), size)


def is_bulk(call_path: str, dtype_policy: str | None) -> bool:
    """Return whether calls have all examples; a function may be named as that call path is."""
    return call_path == BULK_PATH and dtype_policy is not None


def series_name(series: Iterable[str | None]) -> str:
    """Name a call path under its policy, or a function."""
    return " under ".join(filter(None, series))


def calls_to_show(quantile: float) -> int:
    """Return how many calls show a quantile, of which one lies beyond it."""
    return math.ceil(1 / min(quantile, 1 - quantile))


def check_target(latency_ms: float, quantile: float) -> None:
    known = isinstance(latency_ms, numbers.Real) and not isinstance(latency_ms, bool)
    if not known or not 0 < latency_ms < math.inf:
        raise ValueError(
            "A latency target must be a positive number, in milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
