"""The result of `recommend`: the limits of the batch size, and the sizes that a search should try.

Training needs S(B) = S_min (1 + B_noise / B) updates to reach a goal (McCandlish et al. 2018,
arXiv:1812.06162, equation 2.11). An update takes t(B) on the device, and at least B / p if the
input pipeline delivers p examples/s. So the time to the goal is

    T(B) = S_min max(t(B), B / p) (1 + B_noise / B)

Memory or the input pipeline is the binding limit if the time would be shorter without it.
Otherwise the limit is the smaller of two batch sizes. At saturation the device reaches 90 % of its
peak throughput. Above the noise scale more than half of a batch's examples are wasted. If
t(B) = a + b B and n_half = a / b, then T(B) has its minimum at B = sqrt(n_half B_noise), and
saturation is at 9 n_half.

The size to start with is the smallest whose T(B) is at most 1.05 times the minimum. A larger noise
scale never gives a smaller size, so a range of noise scales gives a range of sizes.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from kbatch.analysis.intervals import UNRESOLVED, Estimate, ranged_columns
from kbatch.analysis.learning_rate import Rule, learning_rate_ratio
from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.analysis.scaling_curve import efficient_batch_size, fit_rounds, without_slow_rounds
from kbatch.input_pipeline.result import InputPipelineProfile
from kbatch.memory.result import MemoryRecord
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, fit_memory
from kbatch.page.numbers import format_number, memory_text, setting
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important
from kbatch.throughput.result import TimedUpdate, fastest_ways

if TYPE_CHECKING:
    import pandas as pd

Limit = Literal["memory", "saturation", "noise", "input"]
# Printed names of the limits.
LIMIT_NAMES: Mapping[Limit, str] = {
    "memory": "memory",
    "saturation": "hardware saturation",
    "noise": "gradient noise",
    "input": "input pipeline",
}
# Seconds of an update by batch size, ascending.
UpdateTimes = Mapping[int, float]
# Times to a goal count as equal up to this ratio.
AS_SOON = 1.05
# The noise scale to use if no upper bound was measured: larger than all batch sizes.
_UNBOUNDED = 2.0**53
# With Adam, or if the learning rate is not the best one for each size, the best sizes are as if the
# noise scale were a few times larger or smaller (arXiv:2505.23971).
_NOISE_FACTOR = 4


def binding_limits(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    whole_s: UpdateTimes,  # Sizes that train without micro-batches.
    saturation: tuple[float, float] | None,
    rates: tuple[float, float] = (math.inf, math.inf),
) -> tuple[Limit, ...]:
    """Return each limit that binds for some values within the intervals of the measurements."""
    unlimited_s = dict(times_s)  # Times with unlimited memory.
    if len(whole_s) > 1:
        (before, before_s), (last, last_s) = list(whole_s.items())[-2:]
        example_s = (last_s - before_s) / (last - before)
        for size in times_s if example_s > 0 else ():
            if size > last:
                unlimited_s[size] = min(times_s[size], last_s + example_s * (size - last))

    def binding(scale: float, rate: float) -> set[Limit]:
        def least(update_times_s: UpdateTimes, rate: float) -> float:
            return min(times_to_goal(update_times_s, noise_scale=scale, rate=rate).values())

        now = least(times_s, rate)
        gains: dict[Limit, float] = {
            "memory": now / least(unlimited_s, rate),
            "input": now / least(times_s, math.inf),
        }
        limit = max(gains, key=lambda name: gains[name])
        if gains[limit] > AS_SOON:
            return {limit}
        if now / least(unlimited_s, math.inf) > AS_SOON:
            return {"memory", "input"}  # Only removing both limits makes training faster.
        if saturation is None:
            return {"saturation", "noise"}
        return {"saturation" if end < scale else "noise" for end in saturation}

    cases = itertools.product(noise_bounds(noise), rates)
    limits = set().union(*itertools.starmap(binding, cases))
    return tuple(limit for limit in LIMIT_NAMES if limit in limits)


def times_to_goal(
    times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf
) -> dict[int, float]:
    """Compute T(B) / S_min for each batch size if the data arrive at `rate` examples/s."""
    scale = min(noise_scale, _UNBOUNDED)
    waits_s = {size: max(update_s, size / rate) for size, update_s in times_s.items()}
    return {size: wait_s * (1 + scale / size) for size, wait_s in waits_s.items()}


def noise_bounds(noise: Estimate[float | None]) -> tuple[float, float]:
    """Return the least and the largest noise scale of the interval, in examples."""
    return noise.low or 0.0, _UNBOUNDED if noise.high is None else noise.high


def most_at_once(records: Sequence[MemoryRecord], limit_bytes: int) -> int | None:
    """Return the most examples that fit in memory at once, from the fitted line.

    The result is None if memory hardly grows with the batch, so that there is no limit. If the
    second size was refused, the result is the first size.
    """
    most_bytes = MEMORY_WINDOW[1] * limit_bytes
    peaks = {record.batch_size: record.peak_bytes for record in records if record.peak_bytes}
    line, ran = fit_memory(peaks), max((b for b, m in peaks.items() if m <= most_bytes), default=1)
    failed = [record.batch_size for record in records if record.outcome == "out_of_memory"]
    if line is None:
        return ran if peaks and any(record.refusal for record in records) else None
    if line.bytes_per_example <= 0 and not failed:
        return None
    # If time ended the measurement before memory did, the line is less certain.
    ended_by_memory = all(record.peak_bytes or record.refusal for record in records)
    share = MEMORY_WINDOW[1] if ended_by_memory else SURE_SHARE
    likely = max(ran, int(line.largest_within(share * limit_bytes)))
    return min([likely, *(size - 1 for size in failed)])


def known_noise(noise: Estimate[float | None]) -> float | None:
    """Return the noise scale, or its lower bound if only that is known, or None."""
    return (noise.low or None) if noise.value is None else noise.value


def starting_size(times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf) -> int:
    """Return the smallest batch size whose time to the goal is about the shortest."""
    goal = times_to_goal(times_s, noise_scale=noise_scale, rate=rate)
    return min(size for size, time in goal.items() if time <= AS_SOON * min(goal.values()))


def sizes_to_search(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    base_batch_size: int,
    rates: tuple[float, float] = (math.inf, math.inf),
) -> tuple[int, ...]:
    """Return the sizes that may train best, one more size at each end, and the base size."""
    noise_scale = known_noise(noise) or 0.0
    scales = (*noise_bounds(noise), noise_scale / _NOISE_FACTOR, noise_scale * _NOISE_FACTOR)
    cases = itertools.product(scales, rates)
    starts = [starting_size(times_s, noise_scale=scale, rate=rate) for scale, rate in cases]
    sizes = list(times_s)
    first, last = sizes.index(min(starts)), sizes.index(max(starts))
    around = sizes[max(0, first - 1) : last + 2]
    ends = [*around, *(size for size in sizes if size == base_batch_size)]
    return tuple(size for size in sizes if min(ends) <= size <= max(ends))


# Share of the loss reduction that is useful. The last tenth takes long and mostly overfits.
_USEFUL_SHARE = 0.9
# The noise scale is a mean over at least this many stretches of the pilot.
_FEWEST_READ = 6


@dataclasses.dataclass(frozen=True)
class PilotRecord:
    """A short training run at the base batch size, in stretches of a few updates."""

    batch_size: int  #: Examples in an update, in at least two micro-batches.
    updates: tuple[int, ...]  #: Number of updates in each stretch.
    losses: tuple[float, ...]  #: Mean training loss of each stretch.
    #: Mean estimate of tr(Sigma), in squared gradient units. None if it was not measured.
    gradient_variances: tuple[float | None, ...]
    gradient_squared_norms: tuple[float | None, ...]  #: Mean estimate of |G|^2, or None.
    seed: int  #: Seed of the weights and of the order of the data.


def useful_stretches(losses: Sequence[float]) -> int:
    """Count the stretches until the loss has made nine tenths of its reduction."""
    useful = min(losses) + (1 - _USEFUL_SHARE) * (losses[0] - min(losses))
    return next(i for i, loss in enumerate(losses, start=1) if loss <= useful)


@dataclasses.dataclass(frozen=True, repr=False)
class Recommendation(Result):
    """The limits of the batch size, a size to start with, and the sizes to search.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> recommendation.batch_size, recommendation.binding
    (128, ('saturation',))
    """

    model_name: str  #: Name of the model.
    optimizer: str  #: Class name of the optimizer, without a loss-scale wrapper.
    dtype_policy: str  #: Dtype policy of the model.
    base_batch_size: int  #: Batch size that the model's learning rate is made for, in examples.
    base_learning_rate: float | None  #: At the first update. None if it is not a scalar.
    scheduled: bool  #: Whether the learning rate has a schedule.
    learning_rate_rule: Rule | None  #: How it follows the batch size. None if it does not change.
    #: Times of each batch size that fits in memory, without and then with several steps per
    #: execution, or the reason why a size was not timed.
    updates: tuple[TimedUpdate, ...]
    cut: tuple[int, ...]  #: Larger sizes, which train in micro-batches of the largest timed size.
    memory: tuple[MemoryRecord, ...]  #: Memory of some batch sizes, ascending.
    memory_limit_bytes: int  #: Memory limit of the measurements.
    pilot: PilotRecord | None  #: The training run that measured the noise scale, or None.
    pipeline: InputPipelineProfile | None  #: Profile of the data at one batch size, or None.
    unknown: Mapping[Limit, Note]  #: Reasons why limits were not measured.
    time_budget_s: float  #: Time budget of the measurement, in seconds.
    noted: tuple[Note, ...]  #: Notes of the measurement.
    environment: EnvironmentRecord  #: The machine and the software.

    @property
    def title(self) -> str:
        """Heading of the printed page."""
        return f"Limits of the batch size of {self.model_name}"

    @property
    def answer(self) -> str:
        """The size to start with, and the limit that keeps it from being larger."""
        size, micro = self.batch_size, self.micro_batch_size
        if size is None:
            reason = self.unknown.get("saturation", "no update was timed")
            return f"No batch size can be recommended, because {reason}."
        parts = "" if micro == size else f" in micro-batches of {micro:,}"
        rate = f"learning rate {setting(self.learning_rate or 0.0)}"
        if self.scheduled or self.base_learning_rate is None:
            base, rule = self.base_batch_size, self.learning_rate_rule
            ratio = learning_rate_ratio(batch_size=size, base_batch_size=base, rule=rule)
            rate = "your learning rates" + ("" if ratio == 1 else f" times {setting(ratio)}")
        is_known = known_noise(self.noise_scale) is not None
        unknown = "" if is_known else " (the gradient noise is not known)"
        limits = " or ".join(LIMIT_NAMES[limit] for limit in self.binding) + " limits the size"
        return f"Start with batch size {size:,}{parts} and {rate}: {limits}{unknown}."

    def table(self) -> "pd.DataFrame":
        """Return a row for each limit, with the batch size at which it begins."""
        import pandas as pd

        column, limits = "begins at (examples)", self.limits
        table = pd.DataFrame(
            {"limit": LIMIT_NAMES[limit], **ranged_columns(column, begins), "outcome": words}
            for limit, (begins, words) in limits.items()
        )
        table.attrs["answer"] = [i for i, limit in enumerate(limits) if limit in self.binding]
        table.attrs["digits"] = {column: 2}
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        notes = list(self.noted)
        if self.batch_size is not None:
            sizes = ", ".join(map(str, self.batch_sizes))
            notes.append(Note.of("search_the_sizes", sizes=sizes))
        if self.binding == ("input",):
            notes.append(Note.of("input_binds", when="at every batch size"))
        return most_important(notes)

    @property
    def settings(self) -> dict[str, str]:
        """The conditions of the measurement."""
        rate = self.base_learning_rate
        rate_text = "n/a (not a single number)" if rate is None else setting(rate)
        return {
            "optimizer": self.optimizer,
            "learning rate of the model": "a schedule" if self.scheduled else rate_text,
            "batch size of that rate": f"{self.base_batch_size:,}",
            "learning-rate rule": self.learning_rate_rule or "none",
            "dtype policy": self.dtype_policy,
            "budget": f"{setting(self.time_budget_s)} s",
            **{
                f"batch size {update.batch_size:,}": f"not timed: {update.reason}"
                for update in self.updates
                if update.batch_size not in self._whole_s
            },
        }

    @property
    def batch_size(self) -> int | None:
        """The batch size to start with, or None without timings."""
        times_s, noise = self.times_s, known_noise(self.noise_scale)
        if not times_s:
            return None
        if noise is None:  # The base size, or the size nearest to it.
            return min(times_s, key=lambda size: (abs(size - self.base_batch_size), size))
        return starting_size(times_s, noise_scale=noise, rate=self.input_rates[1])

    @property
    def micro_batch_size(self) -> int | None:
        """The micro-batch size of that batch size."""
        return None if self.batch_size is None else min(self.batch_size, max(self._whole_s))

    @property
    def learning_rate(self) -> float | None:
        """Learning rate at the first update. None without timings, or if it is not a scalar."""
        if self.base_learning_rate is None or self.batch_size is None:
            return None
        sizes = {"batch_size": self.batch_size, "base_batch_size": self.base_batch_size}
        return self.base_learning_rate * learning_rate_ratio(**sizes, rule=self.learning_rate_rule)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that a search should compare, ascending. Empty without timings."""
        if not self.times_s:
            return ()
        base, (low, _, high) = self.base_batch_size, self.input_rates
        noise, rates = self.noise_scale, (low, high)
        likely = sizes_to_search(self.times_s, noise, base_batch_size=base, rates=rates)
        # A size between them is included even if there was no time to time it.
        sizes = {update.batch_size for update in self.updates} | {*likely}
        return tuple(size for size in sorted(sizes) if likely[0] <= size <= likely[-1])

    @property
    def binding(self) -> tuple[Limit, ...]:
        """The limit that keeps the size small, or several that may. Empty without timings."""
        if not self.times_s:
            return ()
        low, _, high = self.input_rates
        return binding_limits(
            self.times_s,
            self.noise_scale,
            whole_s=self._whole_s,
            saturation=self.saturation and self.saturation.ends,
            rates=(low, high),
        )

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of an update by batch size. For sizes in `cut`, computed from micro-batches."""
        whole_s, micro = self._whole_s, max(self._whole_s, default=None)
        return whole_s | {size: -(-size // micro) * whole_s[micro] for size in self.cut if micro}

    @functools.cached_property
    def _whole_s(self) -> dict[int, float]:
        timings = fastest_ways(self.updates)
        rounds = without_slow_rounds([timing.times_s for timing in timings])
        return {
            timing.batch_size: statistics.median(times_s or timing.times_s)
            for timing, times_s in zip(timings, rounds, strict=True)
        }

    @functools.cached_property
    def noise_scale(self) -> Estimate[float | None]:
        """The gradient noise scale, in examples.

        It is measured in the late half of the updates of the pilot that reduced the loss.
        """
        if (pilot := self.pilot) is None:
            return UNRESOLVED
        useful = max(_FEWEST_READ, useful_stretches(pilot.losses))
        weights = [max(1, updates) for updates in pilot.updates[:useful]]
        variances = np.array(pilot.gradient_variances[:useful], float)  # None is NaN.
        squared_norms = np.array(pilot.gradient_squared_norms[:useful], float)
        return noise_scale_of_runs([(variances, squared_norms, weights)])

    @functools.cached_property
    def saturation(self) -> Estimate[float | None] | None:
        """The smallest micro-batch with 90 % of the peak throughput of the device.

        It is None if it is unknown, or if too few rounds give it no interval.
        """
        timings = fastest_ways(self.updates)
        if len(timings) < 2 or sum(len(timing.times_s) for timing in timings) < 3:
            return None
        size = efficient_batch_size(fit_rounds(timings))
        return None if size.value is not None and size.ends is None else size

    @property
    def input_rates(self) -> tuple[float, float, float]:
        """The lowest, the likely and the highest rate of the data in examples/s.

        They come from the long reading if there is one. They are infinite if they are unknown.
        """
        profile, low, high = self.pipeline, math.inf, math.inf
        rate = None if profile is None else profile.pipeline.samples_per_second
        if profile is not None and profile.long_run is not None:
            low, high = profile.long_run.bounds
        elif rate is not None:
            low, high = rate.ends or (rate.value, rate.value)
        if low <= 0:
            low = high = math.inf
        # The rate of the rounds may miss pauses of the pipeline, so the bounds limit it.
        return low, low if rate is None else min(max(rate.value, low), high), high

    @property
    def limits(self) -> dict[Limit, tuple[Estimate[float | None] | None, str]]:
        """The batch size at which each limit begins, and a description.

        The batch size is an `Estimate` without a value if no size is limited. It is None if the
        limit is unknown; then the description says why.
        """
        measured = (self._memory(), self._saturation(), self._noise(), self._input())
        limits = dict(zip(LIMIT_NAMES, measured, strict=True))
        for limit, (begins, words) in limits.items():
            if begins is None:
                reason = self.unknown.get(limit, words)
                limits[limit] = None, f"cannot tell, because {reason}"
        return limits

    def _memory(self) -> tuple[Estimate[float | None] | None, str]:
        most = most_at_once(self.memory, self.memory_limit_bytes)
        if most is None:
            return None, "memory hardly grows with the batch"
        limit = memory_text(self.memory_limit_bytes)
        return Estimate(most), f"about {format_number(most, 2)} examples fit in {limit} at once"

    def _saturation(self) -> tuple[Estimate[float | None] | None, str]:
        saturation = self.saturation
        if saturation is None:
            return None, "too few sizes were timed without micro-batches, or in too few rounds"
        rate, size = max((size / time_s, size) for size, time_s in self._whole_s.items())
        fastest = f"at most {format_number(rate)} samples/s, at batch size {size:,}"
        if saturation.value is None:
            return None, f"even the largest batch took no longer than small ones: {fastest}"
        beyond = ", more than were timed" if saturation.value > max(self._whole_s) else ""
        begins = format_number(saturation.value, 2)
        return saturation, f"{fastest}; 90 % of the peak needs {begins} examples at once{beyond}"

    def _noise(self) -> tuple[Estimate[float | None] | None, str]:
        noise, size = self.noise_scale, known_noise(self.noise_scale)
        if size is None:
            return None, "the gradients vary too much to estimate their mean"
        most = "at most" if noise.value is None else "about"
        words = f"batches of {format_number(size, 2)} need {most} twice the data of small batches"
        return dataclasses.replace(noise, value=size), words

    def _input(self) -> tuple[Estimate[float | None] | None, str]:
        rate, times_s = self.input_rates[1], self.times_s
        if math.isinf(rate) or not times_s:
            return None, "data loading was not measured"
        waiting = (size for size, time_s in times_s.items() if rate * AS_SOON < size / time_s)
        words, first = f"{format_number(rate, 2)} samples/s", next(waiting, None)
        if first is None:
            return UNRESOLVED, f"{words}, enough for every size"
        return Estimate(first), f"{words}: from size {first:,} on, the device waits for data"
