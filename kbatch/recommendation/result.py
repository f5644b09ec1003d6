"""The limits of the batch size, and the sizes that a search should try.

Updates to a goal are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). An update takes t(B) on the device, and no less than B / p where the input pipeline
delivers p examples/s:

    T(B) = S_min max(t(B), B / p) (1 + B_noise / B)

Memory or the input pipeline binds if the way to a goal would be shorter without it. Else a larger
batch gains by throughput and loses by gradient noise, and the limit that comes first on the batch
axis binds: saturation, where the device runs at 90 % of its peak, or the noise scale, from which on
more than half of a batch's examples are wasted. With t(B) = a + b B and n_half = a / b, T(B) is
least at B = sqrt(n_half B_noise), and saturation lies at 9 n_half.

The size to start with is the smallest of at most 1.05 times the least T(B). It never falls as the
noise scale grows, so a range of noise scales gives a range of sizes.
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

# The limits of the batch size, with what people read.
Limit = Literal["memory", "saturation", "noise", "input"]
LIMIT_NAMES: Mapping[Limit, str] = {
    "memory": "memory",
    "saturation": "hardware saturation",
    "noise": "gradient noise",
    "input": "input pipeline",
}
# Seconds of an update by batch size, ascending.
UpdateTimes = Mapping[int, float]
# Times to a goal whose ratio is smaller are equal, like rates of the input pipeline.
AS_SOON = 1.05
# A noise scale above all batch sizes, where nothing shows an end.
_ENDLESS = 2.0**53
# Where the learning rate is not the best one of each size, or under Adam, sizes turn out as if the
# noise scale were a few times larger or smaller (arXiv:2505.23971).
_NOISE_FACTOR = 4


def binding_limits(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    whole_s: UpdateTimes,  # Of the sizes that go through at once.
    saturation: tuple[float, float] | None,
    rates: tuple[float, float] = (math.inf, math.inf),
) -> tuple[Limit, ...]:
    """Return which limit binds, for all that the measurements allow."""
    free_s = dict(times_s)
    if len(whole_s) > 1:
        # With more memory each further example takes as long as those between the two largest.
        (before, before_s), (last, last_s) = list(whole_s.items())[-2:]
        example_s = (last_s - before_s) / (last - before)
        for size in times_s if example_s > 0 else ():
            if size > last:
                free_s[size] = min(times_s[size], last_s + example_s * (size - last))

    def binding(scale: float, rate: float) -> set[Limit]:
        def least(of: UpdateTimes, rate: float) -> float:
            return min(times_to_goal(of, noise_scale=scale, rate=rate).values())

        now = least(times_s, rate)
        gains: dict[Limit, float] = {
            "memory": now / least(free_s, rate),
            "input": now / least(times_s, math.inf),
        }
        limit = max(gains, key=lambda name: gains[name])
        if gains[limit] > AS_SOON:
            return {limit}
        if now / least(free_s, math.inf) > AS_SOON:
            return {"memory", "input"}  # Each hides what the removal of the other would give.
        if saturation is None:
            return {"saturation", "noise"}
        return {"saturation" if end < scale else "noise" for end in saturation}

    found = set().union(*itertools.starmap(binding, itertools.product(noise_bounds(noise), rates)))
    return tuple(limit for limit in LIMIT_NAMES if limit in found)


def times_to_goal(
    times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf
) -> dict[int, float]:
    """Compute T(B) / S_min of each batch size; the data arrive at `rate` examples/s."""
    scale = min(noise_scale, _ENDLESS)
    waits_s = {size: max(update_s, size / rate) for size, update_s in times_s.items()}
    return {size: wait_s * (1 + scale / size) for size, wait_s in waits_s.items()}


def noise_bounds(noise: Estimate[float | None]) -> tuple[float, float]:
    """Return the least and the largest noise scale that the measurement allows, in examples."""
    return noise.low or 0.0, _ENDLESS if noise.high is None else noise.high


def most_at_once(records: Sequence[MemoryRecord], limit_bytes: int) -> int | None:
    """Return up to how many examples fit in memory at once, by the line through those measured.

    None where memory hardly grows with the batch, so that nothing shows an end. Where one size was
    run and the next one was refused, it is that size.
    """
    most_bytes = MEMORY_WINDOW[1] * limit_bytes
    peaks = {one.batch_size: one.peak_bytes for one in records if one.peak_bytes}
    line, ran = fit_memory(peaks), max((b for b, m in peaks.items() if m <= most_bytes), default=1)
    out = [one.batch_size for one in records if one.outcome == "out_of_memory"]
    if line is None:
        return ran if peaks and any(one.refusal for one in records) else None
    if line.bytes_per_example <= 0 and not out:
        return None
    # A line is trusted up to the window only where sizes were measured until memory ended them.
    in_time = all(one.peak_bytes or one.refusal for one in records)
    share = MEMORY_WINDOW[1] if in_time else SURE_SHARE
    likely = max(ran, int(line.largest_within(share * limit_bytes)))
    return min([likely, *(size - 1 for size in out)])


def known_noise(noise: Estimate[float | None]) -> float | None:
    """Return the noise scale, or the least that it can be; None if neither is known."""
    return (noise.low or None) if noise.value is None else noise.value


def starting_size(times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf) -> int:
    """Return the smallest batch size that is about as fast to a goal as the best one."""
    goal = times_to_goal(times_s, noise_scale=noise_scale, rate=rate)
    return min(size for size, time in goal.items() if time <= AS_SOON * min(goal.values()))


def sizes_to_search(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    base_batch_size: int,
    rates: tuple[float, float] = (math.inf, math.inf),
) -> tuple[int, ...]:
    """Return the sizes that may train best, ascending: the base size and one more at each end."""
    likely = known_noise(noise) or 0.0
    scales = (*noise_bounds(noise), likely / _NOISE_FACTOR, likely * _NOISE_FACTOR)
    cases = itertools.product(scales, rates)
    starts = [starting_size(times_s, noise_scale=scale, rate=rate) for scale, rate in cases]
    sizes = list(times_s)
    first, last = sizes.index(min(starts)), sizes.index(max(starts))
    around = sizes[max(0, first - 1) : last + 2]
    ends = [*around, *(size for size in sizes if size == base_batch_size)]
    return tuple(size for size in sizes if min(ends) <= size <= max(ends))


# Of the way that the loss went: what follows takes long, and fits the training set alone.
_USEFUL_SHARE = 0.9
# The late half of fewer stretches shows too little of the noise.
_FEWEST_READ = 6


@dataclasses.dataclass(frozen=True)
class PilotRecord:
    """A short training at the base batch size, in stretches of some updates."""

    batch_size: int  #: Examples of an update, in two parts or more that show the noise.
    updates: tuple[int, ...]  #: Of each stretch.
    losses: tuple[float, ...]  #: Mean training loss over it.
    #: Mean estimate of tr(Sigma), in squared gradient units; None where it was not measured.
    gradient_variances: tuple[float | None, ...]
    gradient_squared_norms: tuple[float | None, ...]  #: Mean estimate of |G|^2, or None.
    seed: int  #: Of weights and order.


def useful_stretches(losses: Sequence[float]) -> int:
    """Count the stretches until the loss has gone nine tenths of the way that it went."""
    near = min(losses) + (1 - _USEFUL_SHARE) * (losses[0] - min(losses))
    return next(i for i, loss in enumerate(losses, start=1) if loss <= near)


@dataclasses.dataclass(frozen=True, repr=False)
class Recommendation(Result):
    """The limits of the batch size, which of them binds, and the sizes to search."""

    model_name: str  #: Name of the model.
    optimizer: str  #: Class name of the optimizer, without the loss-scale wrapper.
    dtype_policy: str  #: Policy of the model.
    base_batch_size: int  #: Batch size that the model's own learning rate suits, in examples.
    base_learning_rate: float | None  #: At the first update; None where it is no scalar.
    scheduled: bool  #: Whether a schedule gives it.
    #: `"linear"` or `"sqrt"`: how it follows the batch size; None where it stays.
    learning_rate_rule: Rule | None
    #: Of each batch size that fits at once, all in the same rounds, or why they were not timed;
    #: where it was timed, several steps an execution behind one.
    updates: tuple[TimedUpdate, ...]
    cut: tuple[int, ...]  #: Larger sizes, which go through in parts of the largest that was timed.
    memory: tuple[MemoryRecord, ...]  #: Of some batch sizes, ascending.
    memory_limit_bytes: int  #: Memory that they could take.
    pilot: PilotRecord | None  #: The training that measured the noise scale, or None.
    pipeline: InputPipelineProfile | None  #: What the data deliver at one batch size, or None.
    unknown: Mapping[Limit, Note]  #: Why a limit was not measured.
    time_budget_s: float  #: Seconds that it was given.
    noted: tuple[Note, ...]  #: What was noted while it was measured.
    environment: EnvironmentRecord  #: The machine and the software.

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Limits of the batch size of {self.model_name}"

    @property
    def answer(self) -> str:
        """The size to start with, and which limit binds."""
        size, micro = self.batch_size, self.micro_batch_size
        if size is None:
            reason = self.unknown.get("saturation", "no update was timed")
            return f"No batch size can be named, because {reason}."
        parts = "" if micro == size else f" in micro-batches of {micro:,}"
        rate = f"learning rate {setting(self.learning_rate or 0.0)}"
        if self.scheduled or self.base_learning_rate is None:
            base, rule = self.base_batch_size, self.learning_rate_rule
            ratio = learning_rate_ratio(batch_size=size, base_batch_size=base, rule=rule)
            rate = "your learning rates" + ("" if ratio == 1 else f" times {setting(ratio)}")
        known = known_noise(self.noise_scale) is not None
        unknown = "" if known else ", since the gradient noise is not known"
        binds = f"{' or '.join(LIMIT_NAMES[limit] for limit in self.binding)} binds"
        return f"Start with batch size {size:,}{parts} and {rate}{unknown}: {binds}."

    def table(self) -> "pd.DataFrame":
        """Return the four limits, and where on the batch axis each begins."""
        import pandas as pd

        place, limits = "begins at (examples)", self.limits
        table = pd.DataFrame(
            {"limit": LIMIT_NAMES[limit], **ranged_columns(place, begins), "outcome": words}
            for limit, (begins, words) in limits.items()
        )
        table.attrs["answer"] = [i for i, limit in enumerate(limits) if limit in self.binding]
        table.attrs["digits"] = {place: 2}
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        found = list(self.noted)
        if self.batch_size is not None:
            sizes = ", ".join(map(str, self.batch_sizes))
            found.append(Note.of("search_the_sizes", sizes=sizes))
        if self.binding == ("input",):
            found.append(Note.of("input_binds", when="at every batch size"))
        return most_important(found)

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with."""
        rate = self.base_learning_rate
        rate_text = "n/a (not a single number)" if rate is None else setting(rate)
        return {
            "optimizer": self.optimizer,
            "learning rate of the model": "a schedule" if self.scheduled else rate_text,
            "batch size that it suits": f"{self.base_batch_size:,}",
            "learning-rate rule": self.learning_rate_rule or "none",
            "dtype policy": self.dtype_policy,
            "budget": f"{setting(self.time_budget_s)} s",
            **{
                f"batch size {one.batch_size:,}": f"not timed: {one.reason}"
                for one in self.updates
                if one.batch_size not in self._whole_s
            },
        }

    @property
    def batch_size(self) -> int | None:
        """Examples of an update to start with; None without timings."""
        times_s, noise = self.times_s, known_noise(self.noise_scale)
        if not times_s:
            return None
        if noise is None:  # The size that the learning rate suits, or the next one.
            return min(times_s, key=lambda size: (abs(size - self.base_batch_size), size))
        return starting_size(times_s, noise_scale=noise, rate=self.input_rates[1])

    @property
    def micro_batch_size(self) -> int | None:
        """Examples of it that go through the device at once."""
        return None if self.batch_size is None else min(self.batch_size, max(self._whole_s))

    @property
    def learning_rate(self) -> float | None:
        """Learning rate at the first update; None without a size or where it is no scalar."""
        if self.base_learning_rate is None or self.batch_size is None:
            return None
        sizes = {"batch_size": self.batch_size, "base_batch_size": self.base_batch_size}
        return self.base_learning_rate * learning_rate_ratio(**sizes, rule=self.learning_rate_rule)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that a search should compare, ascending; none without timings."""
        if not self.times_s:
            return ()
        base, (low, _, high) = self.base_batch_size, self.input_rates
        found = sizes_to_search(
            self.times_s, self.noise_scale, base_batch_size=base, rates=(low, high)
        )
        # The time may have ended before one between them.
        sizes = {one.batch_size for one in self.updates} | {*found}
        return tuple(size for size in sorted(sizes) if found[0] <= size <= found[-1])

    @property
    def binding(self) -> tuple[Limit, ...]:
        """The limit that binds; several where they cannot be separated, none without timings."""
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
        """Seconds of an update by batch size, ascending; of those in parts by that of a part."""
        found, most = self._whole_s, max(self._whole_s, default=None)
        return found | {size: -(-size // most) * found[most] for size in self.cut if most}

    @functools.cached_property
    def _whole_s(self) -> dict[int, float]:
        timings = fastest_ways(self.updates)
        rounds = without_slow_rounds([one.times_s for one in timings])
        kept = ((one, own or one.times_s) for one, own in zip(timings, rounds, strict=True))
        return {one.batch_size: statistics.median(times_s) for one, times_s in kept}

    @functools.cached_property
    def noise_scale(self) -> Estimate[float | None]:
        """The gradient noise scale of the late half of the pilot's useful stretches."""
        if (pilot := self.pilot) is None:
            return UNRESOLVED
        useful = max(_FEWEST_READ, useful_stretches(pilot.losses))
        weights = [max(1, updates) for updates in pilot.updates[:useful]]
        variances = np.array(pilot.gradient_variances[:useful], float)  # None is NaN.
        squared_norms = np.array(pilot.gradient_squared_norms[:useful], float)
        return noise_scale_of_runs([(variances, squared_norms, weights)])

    @functools.cached_property
    def saturation(self) -> Estimate[float | None] | None:
        """The smallest micro-batch of 90 % of the device's peak throughput; None if unknown.

        Read off single times of each size it has no interval, and is no more than a guess.
        """
        timings = fastest_ways(self.updates)
        if len(timings) < 2 or sum(len(one.times_s) for one in timings) < 3:
            return None
        found = efficient_batch_size(fit_rounds(timings))
        return None if found.value is not None and found.ends is None else found

    @property
    def input_rates(self) -> tuple[float, float, float]:
        """The least, the likely and the highest examples per second that the data deliver.

        They come from a long reading if there is one, and are infinite if nothing is known.
        """
        profile, low, high = self.pipeline, math.inf, math.inf
        rate = None if profile is None else profile.pipeline.samples_per_second
        if profile is not None and profile.long_run is not None:
            low, high = profile.long_run.bounds
        elif rate is not None:
            low, high = rate.ends or (rate.value, rate.value)
        if low <= 0:
            low = high = math.inf
        # Short rounds may miss the pauses that a long reading has seen.
        return low, low if rate is None else min(max(rate.value, low), high), high

    @property
    def limits(self) -> dict[Limit, tuple[Estimate[float | None] | None, str]]:
        """Where each limit begins, in examples, and what was measured or why it is unknown.

        The place has no value if it limits no size, and is None if it is unknown.
        """
        found = (self._memory(), self._saturation(), self._noise(), self._input())
        limits = dict(zip(LIMIT_NAMES, found, strict=True))
        for limit, (begins, words) in limits.items():
            if begins is None:
                why = self.unknown.get(limit, words)
                limits[limit] = None, f"cannot tell, because {why}"
        return limits

    # Where a limit begins, and what was measured; or None, and why it is not known.

    def _memory(self) -> tuple[Estimate[float | None] | None, str]:
        most = most_at_once(self.memory, self.memory_limit_bytes)
        if most is None:
            return None, "it hardly grows with the batch"
        limit = memory_text(self.memory_limit_bytes)
        return Estimate(most), f"about {format_number(most, 2)} examples at once fit in {limit}"

    def _saturation(self) -> tuple[Estimate[float | None] | None, str]:
        found = self.saturation
        if found is None:
            return None, "too few sizes were timed whole, or in too few rounds"
        rate, size = max((size / time_s, size) for size, time_s in self._whole_s.items())
        fastest = f"at most {format_number(rate)} samples/s, at {size:,}"
        if found.value is None:
            return None, f"larger batches took no longer, as far as they were timed: {fastest}"
        beyond = ", more than were timed" if found.value > max(self._whole_s) else ""
        begins = format_number(found.value, 2)
        return found, f"{fastest}; 90 % of the peak takes {begins} examples at once{beyond}"

    def _noise(self) -> tuple[Estimate[float | None] | None, str]:
        noise, size = self.noise_scale, known_noise(self.noise_scale)
        if size is None:
            return None, "the mean gradient was lost in its noise"
        half = "at most half" if noise.value is None else "half"
        words = f"a batch of {format_number(size, 2)} wastes {half} of its examples"
        return dataclasses.replace(noise, value=size), words

    def _input(self) -> tuple[Estimate[float | None] | None, str]:
        rate, times_s = self.input_rates[1], self.times_s
        if math.isinf(rate) or not times_s:
            return None, "it was not measured"
        waits = (size for size, time_s in times_s.items() if rate * AS_SOON < size / time_s)
        delivered, first = f"{format_number(rate, 2)} samples/s", next(waits, None)
        if first is None:
            return UNRESOLVED, f"{delivered}, enough for every size"
        return Estimate(first), f"{delivered}: the device waits for data from {first:,} on"
