"""The result of `profile_inference`: measured latencies, and the batch sizes that follow."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate, calls_for_quantile, quantile_upper_bound
from kbatch.analysis.scaling_curve import (
    Latency,
    Timed,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    fit_rounds,
    is_saturated,
    knee_batch_size,
    timed_columns,
)
from kbatch.errors import TargetTooLow
from kbatch.inference.target_search import (
    LEAST_DRIFT,
    WELL_USED,
    InferenceAnswer,
    TargetCheck,
    check_target,
    contradictions,
    expected_drift,
    fit_quantile,
    last_undecided,
    no_size_error,
)
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import predict_memory
from kbatch.page.numbers import format_number, in_brackets, memory_text, percent, pluralize
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important

if TYPE_CHECKING:
    import pandas as pd

# Keras cuts the examples of one call into many batches, so the latency of one batch is not known.
BULK_PATH = "predict"
# Throughputs that differ by less than this share are about equal.
_SAME_RATE = 0.05
# The fit predicts sizes up to this factor beyond the measured ones.
_FAR = 2
# Each batch size that the fit may give, and the end of a sentence about it.
_ANSWERS = {
    "efficient": "is the smallest with 90 % of the peak throughput",
    "knee": "has the largest ratio of throughput to latency",
    "fastest": "has the largest throughput",
}


@dataclasses.dataclass(frozen=True)
class SizeEffect:
    """How outputs of the same examples differ between a batch size and the smallest one."""

    depends: bool  #: Whether the difference is larger than rounding can make it.
    difference: float | None  #: Largest difference over the largest output; None if not finite.
    #: Share of the predicted classes that changed by more than rounding. None without classes.
    changed_argmax: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingRecord(Timed):
    """The timed calls of one batch size on one call path under one policy."""

    call_path: str  #: How the model was called, or the name of a function.
    dtype_policy: str | None  #: Policy of the model, or `"int8"`. A function has None.
    latencies_s: tuple[float, ...] = ()  #: Seconds of single calls in order, sampled if many.
    size_effect: SizeEffect | None = None  #: None if the size is the smallest, or without floats.
    reason: Note | None = None  #: Why there are no times. If None, there are times.

    def missing_calls(self, quantile: float) -> int:
        """Return how many more calls an upper bound of the quantile needs."""
        return max(0, calls_for_quantile(quantile) - len(self.latencies_s))


@dataclasses.dataclass(frozen=True, repr=False)
class InferenceProfile(Result):
    """Latency, throughput and memory of predictions by batch size.

    The answers are for the first call path and policy. `select` gives the profile of another one.
    An answer raises `ValueError` if too little was measured, or if the noise hides it.

    Example:

    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> profile.select(call_path="xla").batch_for(latency_ms=20, quantile=0.99).batch_size
    """

    model_name: str  #: Name of the model, or names of the functions.
    quantile: float  #: Quantile of the latency for which enough calls were made, in (0, 1).
    timings: tuple[TimingRecord, ...]  #: Timed calls by path, policy and batch size.
    memory: tuple[MemoryRecord, ...] = ()  #: Memory of `model.predict`, by policy and size.
    memory_limit_bytes: int | None = None  #: Memory limit of the probes, or None without probes.
    #: Largest difference of the outputs from float32, over the largest output, by policy. None if
    #: it is not finite.
    output_changes: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    #: Share of the examples that get another class than in float32, by policy.
    class_changes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compared_examples: int = 0  #: Number of examples in that comparison.
    target_ms: float | None = None  #: Latency target in milliseconds, or None.
    checks: tuple[TargetCheck, ...] = ()  #: Fresh calls for it, on the first path and policy.
    noted: tuple[Note, ...] = ()  #: Notes of the measurement.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    @property
    def title(self) -> str:
        """Heading of the printed page."""
        return f"Inference of {self.model_name}"

    @property
    def answer(self) -> str:
        """The batch size for the latency target, or for throughput if there is no target."""
        series = series_name(self.series[0]) if self.series else "nothing"
        if self.target_ms is not None:
            goal = f"{100 * self.quantile:g} % of the calls within {self.target_ms:g} ms ({series})"
            if self.verified is not None:
                return self._verified_answer(self.verified, goal)
            if (answer := self.target_answer) is not None:
                return f"Batch size {answer.batch_size:,} is probably the largest with {goal}."
            if unsure := [check for check in self.checks if check.outcome == "unsure"]:
                largest = max(unsure, key=lambda check: check.batch_size)
                return f"Batch size {largest.batch_size:,} had {goal}, but {self.doubt(largest)}."
            return f"No batch size was found that has {goal}."
        for name, answer in self._headline():
            is_timed = answer.batch_size in {t.batch_size for t in self.answering}
            fitted = "" if is_timed else ", by the fit: this size was not measured"
            words, latency = _ANSWERS[name], self.latency
            if name == "fastest" or not latency.follows_line:
                words += f" of sizes up to {int(latency.batch_sizes[-1]):,}"
            return f"Batch size {answer.batch_size:,} {words} ({series}){fitted}."
        return f"Too few calls were timed for {series}: give a larger `time_budget_s` (--seconds)."

    def _headline(self) -> list[tuple[str, InferenceAnswer]]:
        """Return the answer to print without a target: no size beyond the measured ones."""
        inside = [named for named in self.answers.items() if not named[1].extrapolated]
        return [named for named in inside if named[0] != "knee"][:1]

    def _verified_answer(self, check: TargetCheck, goal: str) -> str:
        """Return a sentence about a verified size, which is the largest if the next is refuted."""
        size, quantile, margin = check.batch_size, self.quantile, expected_drift(self.answering)
        calls = f"{len(check.latencies_s):,} further calls"
        how = f"verified with a margin of {percent(margin)} by {calls}"
        # A size that misses the target only by the margin of a noisy machine is not refuted.
        most_ms, missed_ms = ((self.target_ms or math.inf) / (1 + m) for m in (margin, LEAST_DRIFT))
        refuted = {
            t.batch_size: not t.measured
            or 1000 * float(np.quantile(t.latencies_s or t.times_s, quantile)) > missed_ms
            for t in self._of_first_series()
            if t.measured or (t.reason and t.reason.code in ("beyond_target", "out_of_memory"))
        } | {
            c.batch_size: c.outcome == "missed" and c.quantile_ms(quantile) > missed_ms
            for c in self.checks
        }
        is_near = check.quantile_ms(quantile) >= WELL_USED * most_ms
        if (last := last_undecided(size, refuted, is_near=is_near)) > size:
            sizes = f"sizes {size + 1:,} to {last:,}" if last > size + 1 else f"size {last:,}"
            return f"Batch size {size:,} has {goal}, {how}. Batch {sizes} may also meet the target."
        largest = max(tested.batch_size for tested in (*self.answering, *self.checks))
        of = f" of sizes up to {largest:,}" if size == largest else ""
        return f"Batch size {size:,} is the largest{of} with {goal}, {how}."

    def doubt(self, check: TargetCheck) -> str:
        """Return why the further calls of a `check` met the target but did not verify it."""
        margin = expected_drift(self.answering)
        if check.quantile_ms(self.quantile) * (1 + margin) > (self.target_ms or math.inf):
            return f"without a safety margin of {percent(margin)}"
        return "in too few calls to be certain"

    @property
    def use(self) -> str:
        """Sentences about a smaller size that is as fast, and about predictions that are equal."""
        same = "Predictions do not change with the batch size." * self._has_equal_predictions()
        return " ".join(filter(None, [self._faster_answer(), same]))

    def _has_equal_predictions(self) -> bool:
        """Return whether predictions were compared and do not depend on the batch size."""
        effects = [timing.size_effect for timing in self.timings if timing.size_effect]
        return bool(effects) and not any(effect.depends for effect in effects)

    def _faster_answer(self) -> str:
        """Return a sentence about a smaller size whose throughput is near the highest, or ""."""
        most = answer.batch_size if (answer := self.target_answer) else 0
        timed = (t for t in (*self.answering, *self._fresh_calls()) if t.batch_size <= most)
        rates = {t.batch_size: t.batch_size / t.median_s for t in timed}
        least_rate = (1 - _SAME_RATE) * max(rates.values(), default=0.0)
        size = min((n for n, rate in rates.items() if rate >= least_rate), default=most)
        if size == most or most not in rates:  # The size may come from the fit.
            return ""
        share = f"within {percent(_SAME_RATE)} of the highest"
        return f"The throughput of batch size {size:,} is {share}, and its latency is lower."

    def table(self) -> "pd.DataFrame":
        """Return a row for each call path, policy and batch size."""
        import pandas as pd

        peaks = {(m.dtype_policy, m.batch_size): m.peak_bytes for m in self.memory}
        answers = [] if self.target_ms is not None else self._headline()
        named = answers[0][1] if answers else self.target_answer
        rows, answer_rows, fresh = [], [], self._fresh_calls()
        for number, timing in enumerate((*self.timings, *fresh)):
            path, policy, size = timing.call_path, timing.dtype_policy, timing.batch_size
            is_fresh, effect = number >= len(self.timings), timing.size_effect
            class_change = self.class_changes.get(policy or "")
            outcome = [fresh[timing] if is_fresh else timing.reason or timing.outcome]
            if named and (size, path, policy) == (named.batch_size, *self.series[0]):
                # A verified answer comes from its fresh calls, not from the sweep.
                answer_rows += [number] * (is_fresh or not named.verified)
            missing = timing.missing_calls(self.quantile)
            if timing.measured and missing and not is_bulk(path, policy):
                outcome.append(f"needs {missing:,} more calls for the quantile")
            if effect and effect.depends:
                outcome.append("outputs depend on the batch")
            rows.append(
                {
                    "call path": path,
                    "policy": policy,
                    "batch size": size,
                    **timed_columns(timing, "batch time"),
                    f"p{100 * self.quantile:g} at most (ms)": _times(1e3, self._bound_s(timing)),
                    "first call (s)": timing.first_call_s,
                    "peak memory (MiB)": _times(2.0**-20, peaks.get((policy or "", size))),
                    "change by size (%)": _times(100, effect and effect.difference),
                    "classes changed by size (%)": _times(100, effect and effect.changed_argmax),
                    "change from float32 (%)": _times(100, self.output_changes.get(policy or "")),
                    "classes changed from float32 (%)": _times(100, class_change),
                    "outcome": ", ".join(outcome),
                }
            )
        table = pd.DataFrame(rows)
        if not any(policy for _, policy in self.series):  # The profile is of functions.
            table = table.rename(columns={"call path": "function"}).drop(columns="policy")
        if self._has_equal_predictions():  # These columns would hold only rounding errors.
            table = table.drop(columns=["change by size (%)", "classes changed by size (%)"])
        table.attrs["answer"] = answer_rows
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        bounds_s = {t.batch_size: self._bound_s(t) or math.nan for t in self.answering}
        target_s = (self.target_ms or math.inf) / 1000
        notes = [*self.noted, *contradictions(self.checks, bounds_s, target_s)[:1]]
        with contextlib.suppress(ValueError):  # Too little was timed.
            latency = self.latency
            before, size = (int(batch_size) for batch_size in latency.batch_sizes[-2:])
            times_s = latency.latency_s(before), latency.latency_s(size)
            rates = {t.batch_size: t.rate.value for t in self.answering if t.rate}
            # Larger sizes are no advice if a target, memory or time excludes them.
            tried = (timing.batch_size for timing in self._of_first_series())
            bounded = self.target_ms is not None or size < max(tried)
            is_rising = rates[size] > rates[before] and not is_saturated((before, size), times_s)
            if not bounded and is_rising:
                gain = format_number(rates[size] / rates[before], 3)  # As in the table.
                notes.append(Note.of("rate_rises", gain=gain, before=before, size=size))
        return most_important(notes)

    @property
    def settings(self) -> dict[str, str]:
        """The conditions of the measurement, the answered sizes, and the fitted line."""
        settings = {"quantile of the latency": f"{self.quantile:g}"}
        if self.target_ms is not None:
            settings["latency target"] = f"{self.target_ms:g} ms"
            doubts = {c: f" ({self.doubt(c)})" for c in self.checks if c.outcome == "unsure"}
            checked = (f"{c.batch_size:,} {c.outcome}{doubts.get(c, '')}" for c in self.checks)
            settings["sizes checked by further calls"] = ", ".join(checked) or "none"
        if self.compared_examples:
            settings["classes compared on"] = pluralize(self.compared_examples, "example")
        if self.target_ms is None:  # With a target, these sizes answer another question.
            for name, answer in self.answers.items():
                outside = ", outside the measured sizes" if answer.extrapolated else ""
                settings[name] = f"{answer.batch_size:,}{in_brackets(answer.interval)}{outside}"
        with contextlib.suppress(ValueError):
            latency = self.latency
            rate, half = latency.line.one_over_slope, latency.line.intercept_in_x
            settings["fit of the time"] = "no line: interpolated between measured sizes"
            if latency.follows_line and rate.value is not None and half.value is not None:
                settings["fit of the time"] = (
                    "t(b) = (b + n_half) / r_inf, "
                    f"r_inf = {format_number(rate.value)}{in_brackets(rate)} samples/s, "
                    f"n_half = {format_number(half.value)}{in_brackets(half)} examples"
                )
        if self.memory_limit_bytes is not None:
            settings["memory limit"] = memory_text(self.memory_limit_bytes)
        return settings

    @property
    def series(self) -> tuple[tuple[str, str | None], ...]:
        """Each pair of call path and policy, in the order in which they were given."""
        return tuple(dict.fromkeys((t.call_path, t.dtype_policy) for t in self.timings))

    @property
    def answering(self) -> tuple[TimingRecord, ...]:
        """The measured timings of the first path and policy, on which the answers rest."""
        return tuple(timing for timing in self._of_first_series() if timing.measured)

    def _of_first_series(self) -> list[TimingRecord]:
        return [t for t in self.timings if (t.call_path, t.dtype_policy) in self.series[:1]]

    @property
    def latency(self) -> Latency:
        """The fit of the time of a batch. Raises `ValueError` if too little was measured."""
        return fit_rounds(self.answering)

    @property
    def knee(self) -> InferenceAnswer:
        """The batch size with the largest ratio of throughput to latency."""
        return self._by_fit("knee", knee_batch_size(self.latency))

    @property
    def efficient(self) -> InferenceAnswer:
        """The smallest batch size with 90 % of the peak throughput.

        The peak is that of the fit, or the measured one if the fit does not hold.
        """
        return self._by_fit("efficient", efficient_batch_size(self.latency))

    @property
    def fastest(self) -> InferenceAnswer:
        """The measured batch size with the largest throughput."""
        return self._by_fit("fastest", fastest_batch_size(self.latency))

    def _by_fit(self, name: str, batch_size: Estimate[float | None]) -> InferenceAnswer:
        if batch_size.value is None:
            raise ValueError(
                f"The measurements are too noisy to determine `{name}`: give larger `batch_sizes` "
                f"or a larger `time_budget_s`. Received: interval={batch_size.ends}."
            )
        sizes, size = [timing.batch_size for timing in self.answering], int(batch_size.value)
        if not min(sizes) / _FAR <= size <= _FAR * max(sizes):
            raise ValueError(
                f"`{name}` is far from the measured sizes, so its fit is not reliable: add sizes "
                f"near {max(1, size):,} to `batch_sizes`. Received: sizes {sizes}."
            )
        outside, reason = not min(sizes) <= size <= max(sizes), "the fit of the time of a batch"
        return InferenceAnswer(size, batch_size, reason, extrapolated=outside)

    @property
    def answers(self) -> dict[str, InferenceAnswer]:
        """`efficient`, `knee` and `fastest` by name, if the measurements determine them."""
        answers = {}
        for name in _ANSWERS:
            with contextlib.suppress(ValueError):  # It is not determined.
                answers[name] = getattr(self, name)
        return answers

    @property
    def target_answer(self) -> InferenceAnswer | None:
        """The batch size for the latency target. None without a target, or if no size meets it."""
        with contextlib.suppress(ValueError):  # Too few calls, or even the smallest size misses it.
            if self.target_ms is not None:
                return self.batch_for(latency_ms=self.target_ms, quantile=self.quantile)
        return None

    @property
    def verified(self) -> TargetCheck | None:
        """The largest size that fresh calls verified for the target."""
        verified = [check for check in self.checks if check.outcome == "verified"]
        return max(verified, key=lambda check: check.batch_size, default=None)

    def _fresh_calls(self) -> dict[TimingRecord, str]:
        """Return the fresh calls of each checked size as a row, with their outcome."""
        rows = {}
        for check in self.checks:
            if calls_s := check.latencies_s:
                path, policy = self.series[0]
                timing: dict[str, Any] = {"call_path": path, "dtype_policy": policy}
                timing |= {"batch_size": check.batch_size, "latencies_s": calls_s}
                above = sum(1000 * call_s > (self.target_ms or math.inf) for call_s in calls_s)
                row = TimingRecord(**timing, times_s=(float(np.median(calls_s)),))
                words = f"{len(calls_s):,} further calls, {above:,} above {self.target_ms:g} ms"
                doubt = f", {self.doubt(check)}" if check.outcome == "unsure" else ""
                rows[row] = f"{words}: {check.outcome}{doubt}"
        return rows

    def _bound_s(self, timing: TimingRecord) -> float | None:
        """Return an upper bound of the quantile of a row, None if it has too few calls."""
        bulk = is_bulk(timing.call_path, timing.dtype_policy)
        return None if bulk else quantile_upper_bound(timing.latencies_s, quantile=self.quantile)

    def batch_for(self, *, latency_ms: float, quantile: float = 0.95) -> InferenceAnswer:
        """Find the largest batch size that meets a latency target.

        If `profile_inference` searched for the same target, the answer is the size that its fresh
        calls verified. Any other answer comes from the fit and is not verified, but it does not
        contradict the fresh calls.

        Example:

        >>> profile.batch_for(latency_ms=20, quantile=0.99).batch_size

        Args:
            latency_ms: Float, the target in milliseconds.
            quantile: Float in (0, 1), the share of the calls that must meet the target.
                Default: 0.95.

        Returns:
            An `InferenceAnswer`.

        Raises:
            ValueError: If the target is below the latency of the smallest batch, or too few calls
                were made for the quantile. The message says which latency can be reached, or how
                many calls are missing.
        """
        check_target(latency_ms, quantile)
        verified = self.verified
        is_searched = (latency_ms, quantile) == (self.target_ms, self.quantile)
        if verified is not None and is_searched:
            above = sum(1000 * call_s > latency_ms for call_s in verified.latencies_s)
            reason = f"{len(verified.latencies_s)} further calls, {above} above the target"
            return InferenceAnswer(verified.batch_size, Estimate(None), reason, verified=True)
        if self.checks and is_searched and len(self._enough_calls(quantile)) < 2:
            raise no_size_error(self.checks, latency_ms, quantile)
        latency = self.latency_quantile(quantile)
        interval = batch_size_within(latency, latency_s=latency_ms / 1000)
        smallest, largest = (int(size) for size in latency.batch_sizes[[0, -1]])
        fitted, reason = int(interval.value or 0), f"the fit of the {quantile:g} quantile"
        if fitted >= largest:
            fitted, interval = largest, Estimate(None)
            reason = "the largest size with enough calls"
        elif fitted < smallest:
            fitted = 0
        # A looser target allows at least the verified size. A stricter one allows at most that, and
        # no size that missed the target.
        target_ms, least, bounds, missed = self.target_ms or 0.0, 0, [fitted], []
        if verified and target_ms <= latency_ms and self.quantile >= quantile:
            least = verified.batch_size
        if target_ms >= latency_ms and self.quantile <= quantile:
            missed = [c for c in self.checks if c.quantile_ms(self.quantile) > latency_ms]
            bounds += [c.batch_size - 1 for c in missed]
            bounds += [verified.batch_size] if verified else []
        size = max(min(bounds), least)
        if size < 1 or (size < smallest and size != least):
            reached_ms = [c.quantile_ms(quantile) for c in missed if c.batch_size <= smallest]
            reachable_ms = max([1000 * latency.latency_s(smallest), *reached_ms])
            raise TargetTooLow(latency_ms, quantile, smallest, reachable_ms)
        if size != fitted:
            reason, interval = "further calls for another target", Estimate(None)
        return InferenceAnswer(size, interval, reason)

    def _enough_calls(self, quantile: float) -> dict[int, tuple[float, ...]]:
        """Return the calls of each size that has enough for the quantile, in seconds."""
        enough = (timing for timing in self.answering if not timing.missing_calls(quantile))
        known = {timing.batch_size: timing.latencies_s for timing in enough}
        largest, needed = max(known, default=0), calls_for_quantile(quantile)
        fresh = {c.batch_size: c.latencies_s for c in self.checks if c.batch_size > largest}
        return known | {size: calls_s for size, calls_s in fresh.items() if len(calls_s) >= needed}

    def latency_quantile(self, quantile: float) -> Latency:
        """Fit a quantile of the latency by batch size.

        The fit uses the sizes with enough calls, and larger sizes that were tried for the target.
        kbatch cuts the calls of a size into groups in order of time, and computes the quantile of
        each group.

        Example:

        >>> profile.latency_quantile(0.95).latency_s(32)

        Args:
            quantile: Float in (0, 1), the share of the calls that take at most this long.

        Returns:
            A `Latency`, in seconds.

        Raises:
            ValueError: If fewer than two sizes have enough calls, or the call path is "predict",
                which does not time single batches.
        """
        timings, needed = self.answering, calls_for_quantile(quantile)
        if timings and is_bulk(*self.series[0]):
            raise ValueError(
                "The time of a single batch is unknown, because this call path was timed over many "
                'batches at once: measure another call path, such as "compiled". '
                f"Received: call_path={timings[0].call_path!r}."
            )
        known = self._enough_calls(quantile)
        if len(known) < 2:
            missing = {t.batch_size: t.missing_calls(quantile) for t in timings}
            raise ValueError(
                f"The {quantile:g} quantile needs {needed} timed calls at each of two batch sizes. "
                f"Profile again with `quantile={quantile:g}`, and with fewer `batch_sizes` or a "
                f"larger `time_budget_s`. Received: missing calls by batch size: {missing}."
            )
        return fit_quantile(known, quantile)

    def select(
        self, *, call_path: str | None = None, dtype_policy: str | None = None
    ) -> "InferenceProfile":
        """Return the part of the profile with one call path, one policy, or both.

        Example:

        >>> profile.select(call_path="xla", dtype_policy="mixed_float16").knee.batch_size

        Args:
            call_path: String, a call path or the name of a function. If None, all of them.
            dtype_policy: String, a policy. If None, all of them.

        Returns:
            An `InferenceProfile`.

        Raises:
            ValueError: If the profile has no such call path or policy.
        """
        timings = tuple(
            t
            for t in self.timings
            if call_path in (None, t.call_path) and dtype_policy in (None, t.dtype_policy)
        )
        if not timings:
            raise ValueError(
                f"The profile has only {', '.join(map(series_name, self.series))}: select one of "
                f"them. Received: call_path={call_path!r}, dtype_policy={dtype_policy!r}."
            )
        memory = tuple(m for m in self.memory if dtype_policy in (None, m.dtype_policy))
        selected = dataclasses.replace(self, timings=timings, memory=memory)
        if selected.series[0] == self.series[0]:
            return selected
        return dataclasses.replace(selected, target_ms=None, checks=())

    def predict_memory_bytes(self, batch_size: int) -> float:
        """Estimate the peak memory of a batch from the line that was fitted to measured sizes.

        Args:
            batch_size: Integer, examples in the batch.

        Returns:
            Float, the bytes, weights included.

        Raises:
            TypeError: If the size is not an integer.
            ValueError: If the size is not positive, or memory was measured at fewer than two sizes.
        """
        size = check_size(batch_size, "batch_size")
        return predict_memory(peaks_under(self.series[0][1], self.memory), size)


def is_bulk(call_path: str, dtype_policy: str | None) -> bool:
    """Return whether a call predicts many batches. A function may also be named "predict"."""
    return call_path == BULK_PATH and dtype_policy is not None


def series_name(series: Iterable[str | None]) -> str:
    return " under ".join(filter(None, series))


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
