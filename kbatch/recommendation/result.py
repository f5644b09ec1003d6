"""The limits of the batch size: what was measured, which binds, and a size to start with."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kbatch.analysis.intervals import UNRESOLVED, Estimate, ranged_columns
from kbatch.analysis.learning_rate import learning_rate_ratio
from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.analysis.scaling_curve import efficient_batch_size, fit_latency
from kbatch.input_pipeline.result import CLOSEST_RATIO, InputPipelineProfile
from kbatch.memory.result import MemoryRecord
from kbatch.page.numbers import format_number, memory_text, setting
from kbatch.page.result import Figure, Result
from kbatch.recommendation.limits import (
    INPUT,
    LIMITS,
    SATURATION,
    binding_limits,
    most_at_once,
    sizes_to_search,
    starting_size,
    times_to_goal,
    with_more_memory,
)
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important
from kbatch.throughput.result import TimedUpdate

if TYPE_CHECKING:
    import pandas as pd

# Of the way that the loss went: what follows takes long, and fits the training set alone.
_USEFUL_SHARE = 0.9
# Of fewer stretches the late half says too little.
_FEWEST_STRETCHES = 6


@dataclasses.dataclass(frozen=True)
class PilotRecord:
    """A short training at the base batch size, in stretches of some updates."""

    batch_size: int  #: Examples of an update; half of them make each gradient that was measured.
    updates: tuple[int, ...]  #: Of each stretch.
    losses: tuple[float, ...]  #: Mean training loss over it.
    #: Mean estimate of tr(Sigma), in squared gradient units; None where it was not measured.
    gradient_variances: tuple[float | None, ...]
    gradient_squared_norms: tuple[float | None, ...]  #: Mean estimate of |G|^2, or None.
    seed: int  #: Of weights and order.

    @property
    def noise_scale(self) -> Estimate[float | None]:
        """The gradient noise scale of the late half of the stretches that brought progress."""
        useful = max(_FEWEST_STRETCHES, useful_stretches(self.losses))
        weights = [max(1, updates) for updates in self.updates[:useful]]
        variances = np.array(self.gradient_variances[:useful], float)  # None is NaN.
        squared_norms = np.array(self.gradient_squared_norms[:useful], float)
        return noise_scale_of_runs([(variances, squared_norms, weights)])


def useful_stretches(losses: Sequence[float]) -> int:
    """Count the stretches until the loss has gone nine tenths of the way that it went."""
    near = min(losses) + (1 - _USEFUL_SHARE) * (losses[0] - min(losses))
    return next(i for i, loss in enumerate(losses, start=1) if loss <= near)


class Limit(NamedTuple):
    """What one of the four limits says."""

    name: str  # One of `kbatch.recommendation.limits.LIMITS`.
    # Where it begins, in examples, without a value where it limits no size; None where unknown.
    begins: Estimate[float | None] | None
    words: str  # What was measured, or why it is unknown.


@dataclasses.dataclass(frozen=True)
class Recommendation(Result):
    """The limits of the batch size, which of them binds, and the sizes to search."""

    model_name: str  #: Name of the model.
    optimizer: str  #: Class name of the optimizer, without the loss-scale wrapper.
    dtype_policy: str  #: Policy of the model.
    base_batch_size: int  #: Batch size that the model's own learning rate suits, in examples.
    base_learning_rate: float | None  #: At the first update; None where it is no scalar.
    scheduled: bool  #: Whether a schedule gives it.
    learning_rate_rule: str  #: `"linear"` or `"sqrt"`: how it follows the batch size.
    #: Of each batch size, all in the same rounds, or why they were not timed. Those in parts follow
    #: from the time of the largest that went through at once.
    updates: tuple[TimedUpdate, ...]
    memory: tuple[MemoryRecord, ...]  #: Of some batch sizes, ascending.
    memory_limit_bytes: int  #: Memory that they could take.
    pilot: PilotRecord | None  #: The training that measured the noise scale, or None.
    pipeline: InputPipelineProfile | None  #: What the data deliver at one batch size, or None.
    unknown: Mapping[str, str]  #: Why a limit was not measured, by its name.
    budget_s: float  #: Seconds that it was given.
    noted: tuple[Note, ...]  #: What was noted while it was measured.
    environment: EnvironmentRecord  #: The machine and the software.

    def __repr__(self) -> str:
        if self.batch_size is None:
            return f"<Recommendation: no batch size, {len(self.unknown)} limits unknown>"
        first, last = self.batch_sizes[0], self.batch_sizes[-1]
        return (
            f"<Recommendation: start with batch size {self.batch_size}, search {first} to {last}; "
            f"{' or '.join(self.binding)} binds>"
        )

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Limits of the batch size of {self.model_name}"

    @property
    def answer(self) -> str:
        """The size to start with, and which limit binds."""
        size, micro = self.batch_size, self.micro_batch_size
        if size is None:
            reason = self.unknown.get(SATURATION, "no update was timed")
            return f"No batch size can be named, because {reason}."
        parts = "" if micro == size else f" in micro-batches of {micro:,}"
        ratio = self._learning_rate_ratio
        rate = f"learning rate {setting(self.learning_rate or 0.0)}"
        if self.scheduled or self.base_learning_rate is None:
            rate = "your learning rates" + ("" if ratio == 1 else f" times {setting(ratio)}")
        unknown = ""
        if self._known_noise is None:
            unknown = ", since how many examples are wasted in larger ones is not known"
        binds = f"{' or '.join(self.binding)} binds"
        return f"Start with batch size {size:,}{parts} and {rate}{unknown}: {binds}."

    def table(self) -> "pd.DataFrame":
        """Return the four limits, and where on the batch axis each begins."""
        import pandas as pd

        begins, limits = "begins at (examples)", self.limits
        table = pd.DataFrame(
            {"limit": one.name, **ranged_columns(begins, one.begins), "outcome": one.words}
            for one in limits
        )
        table.attrs["answer"] = [i for i, one in enumerate(limits) if one.name in self.binding]
        table.attrs["digits"] = {begins: 2}
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        found = list(self.noted)
        if self.batch_size is not None:
            sizes = ", ".join(map(str, self.batch_sizes))
            found.append(Note.of("search_the_sizes", sizes=sizes))
        if self.binding == (INPUT,):
            found.append(Note.of("input_binds", when="at every batch size"))
        return most_important(found)

    def figures(self) -> tuple[Figure, ...]:
        """Return the figure of the limits."""
        from kbatch.recommendation.figure import HEIGHT_IN, plot_limits

        draw = functools.partial(plot_limits, self)
        return (Figure("limits", "The limits of the batch size", HEIGHT_IN, draw),)

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with."""
        rate = self.base_learning_rate
        rate_text = "n/a (not a single number)" if rate is None else setting(rate)
        return {
            "optimizer": self.optimizer,
            "learning rate of the model": "a schedule" if self.scheduled else rate_text,
            "batch size that it suits": f"{self.base_batch_size:,}",
            "learning-rate rule": self.learning_rate_rule,
            "dtype policy": self.dtype_policy,
            "budget": f"{setting(self.budget_s)} s",
            **{
                f"batch size {one.batch_size:,}": f"not timed: {one.outcome}"
                for one in self.updates
                if not one.measured
            },
        }

    @property
    def batch_size(self) -> int | None:
        """Examples of an update to start with; None without timings."""
        times_s, noise = self.times_s, self._known_noise
        if not times_s:
            return None
        if noise is None:  # The size that the learning rate suits, or the next one.
            return min(times_s, key=lambda size: (abs(size - self.base_batch_size), size))
        return starting_size(times_s, noise_scale=noise, rate=self.input_rate)

    @property
    def micro_batch_size(self) -> int | None:
        """Examples of it that go through the device at once."""
        sizes = {timed.batch_size: timed.micro_batch_size for timed in self.timings}
        return None if self.batch_size is None else sizes[self.batch_size]

    @property
    def learning_rate(self) -> float | None:
        """Learning rate at the first update; None without a size or where it is no scalar."""
        if self.base_learning_rate is None or self.batch_size is None:
            return None
        return self.base_learning_rate * self._learning_rate_ratio

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that a search should compare, ascending; none without timings."""
        if not self.timings:
            return ()
        base, rates = self.base_batch_size, self._rate_bounds or (math.inf,)
        return sizes_to_search(self.times_s, self.noise_scale, base_batch_size=base, rates=rates)

    @property
    def binding(self) -> tuple[str, ...]:
        """The limit that binds; several where they cannot be separated, none without timings."""
        times_s = self.times_s
        if not times_s:
            return ()
        most, largest = self._most_at_once, max(times_s)
        ends = most is not None and most < largest  # Memory, not the data or the sizes.
        whole_s = {timed.batch_size: timed.median_s for timed in self._whole}
        return binding_limits(
            times_s,
            self.noise_scale,
            saturation=self.saturation and self.saturation.ends,
            rates=self._rate_bounds or (math.inf,),
            without_memory_limit=with_more_memory(
                whole_s, largest_batch_size=largest if ends else 0
            ),
        )

    @property
    def timings(self) -> tuple[TimedUpdate, ...]:
        """The updates that have times."""
        return tuple(update for update in self.updates if update.measured)

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of an update by batch size, ascending."""
        return {timed.batch_size: timed.median_s for timed in self.timings}

    @property
    def _whole(self) -> list[TimedUpdate]:
        return [timed for timed in self.timings if not timed.accumulated]

    @property
    def relative_times(self) -> dict[int, float]:
        """Expected time to a goal of each size over the least; empty without a noise scale."""
        noise = self.noise_scale.value
        if noise is None or not self.timings:
            return {}
        times = times_to_goal(self.times_s, noise_scale=noise, rate=self.input_rate)
        return {size: time / min(times.values()) for size, time in times.items()}

    @functools.cached_property
    def noise_scale(self) -> Estimate[float | None]:
        """The gradient noise scale; unresolved without a pilot."""
        return UNRESOLVED if self.pilot is None else self.pilot.noise_scale

    @property
    def _known_noise(self) -> float | None:
        """The noise scale, or the least that it can be."""
        noise = self.noise_scale
        return (noise.low or None) if noise.value is None else noise.value

    @functools.cached_property
    def saturation(self) -> Estimate[float | None] | None:
        """The smallest micro-batch of 90 % of the device's peak throughput; None if unknown.

        Read off single times of each size it has no interval, and is no more than a guess.
        """
        pairs = [(timed.batch_size, s) for timed in self._whole for s in timed.durations_s]
        if len(self._whole) < 2 or len(pairs) < 3:
            return None
        found = efficient_batch_size(fit_latency(*zip(*pairs, strict=True)))
        return None if found.value is not None and found.ends is None else found

    @property
    def input_rate(self) -> float:
        """Examples per second that the data deliver; infinite where that is not known."""
        bounds = self._rate_bounds
        if self.pipeline is None or not bounds:
            return math.inf
        # Short rounds may miss the pauses that a long reading has seen.
        (low, high), rate = bounds, self.pipeline.pipeline.samples_per_second
        return low if rate is None else min(max(rate.value, low), high)

    @property
    def _rate_bounds(self) -> tuple[float, float] | tuple[()]:
        bounds = self.pipeline and self.pipeline.rate_bounds
        return bounds if bounds is not None and bounds[0] > 0 else ()

    @property
    def _learning_rate_ratio(self) -> float:
        return learning_rate_ratio(
            batch_size=self.batch_size or self.base_batch_size,
            base_batch_size=self.base_batch_size,
            rule=self.learning_rate_rule,
        )

    @property
    def _most_at_once(self) -> int | None:
        return most_at_once(self.memory, self.memory_limit_bytes)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The four limits, from memory to the input pipeline."""
        found = (self._memory(), self._saturation(), self._noise(), self._input())
        return tuple(
            Limit(name, begins, words)
            if begins is not None
            else Limit(name, None, f"cannot tell, because {self.unknown.get(name, words)}")
            for name, (begins, words) in zip(LIMITS, found, strict=True)
        )

    # Where a limit begins, and what was measured; or None, and why it is not known.

    def _memory(self) -> tuple[Estimate[float | None] | None, str]:
        most = self._most_at_once
        if most is None:
            return None, "it hardly grows with the batch"
        limit = memory_text(self.memory_limit_bytes)
        return Estimate(most), f"about {format_number(most, 2)} examples at once fit in {limit}"

    def _saturation(self) -> tuple[Estimate[float | None] | None, str]:
        found = self.saturation
        if found is None:
            return None, "that takes two sizes that were timed whole"
        best = max(self._whole, key=lambda timed: timed.samples_per_second)
        fastest = f"{format_number(best.samples_per_second)} samples/s at {best.batch_size:,}"
        if found.value is None:
            longer = "a larger batch took no longer as far as was timed"
            return None, f"{longer}; the fastest was {fastest}"
        beyond = " (not timed)" if found.value > self._whole[-1].batch_size else ""
        size = format_number(found.value, 2)
        return found, f"{fastest}; 90 % of the peak rate takes {size} at once{beyond}"

    def _noise(self) -> tuple[Estimate[float | None] | None, str]:
        noise, size = self.noise_scale, self._known_noise
        if size is None:
            return None, "the mean gradient was lost in its noise"
        more = " or more" if noise.value is None else ""
        words = f"a batch of {format_number(size, 2)}{more} wastes half of its examples"
        return dataclasses.replace(noise, value=size), words

    def _input(self) -> tuple[Estimate[float | None] | None, str]:
        rate, times_s = self.input_rate, self.times_s
        if not self._rate_bounds or not times_s:
            return None, "it was not measured"
        waits = (size for size, time_s in times_s.items() if rate * CLOSEST_RATIO < size / time_s)
        delivered, first = f"{format_number(rate, 2)} samples/s", next(waits, None)
        if first is None:
            return UNRESOLVED, f"{delivered}, enough for every size"
        return Estimate(first), f"{delivered}: the device waits from {first:,} on"
