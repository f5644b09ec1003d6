"""What the figure of a training profile shows, computed before anything is drawn."""

from typing import NamedTuple

import numpy as np

from kbatch.document.number_text import counted, memory_text, readable
from kbatch.document.where_measured import where_measured
from kbatch.throughput.text import training_clocks
from kbatch.throughput.training_profile_record import TrainingPoint, TrainingProfile

# A line looks curved on a logarithmic axis.
_LINE_POINTS = 60


class TrainingProfileInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: The model's name, with its policy.
        points: The sizes that were timed.
        failed: Sizes that ran out of memory.
        line_s: Fitted seconds of a micro-batch at sizes along the axis; empty where no line holds
            or steps accumulate.
        memory_bytes: Peak memory by size.
        limit_bytes: Memory that may be taken, None where it was not measured.
        answers: Sizes that are marked, by name.
        conditions: Device, versions and counts, in one line.
        fit: What the fit says, in one line, empty where there is none.
    """

    name: str
    points: tuple[TrainingPoint, ...]
    failed: tuple[int, ...]
    line_s: tuple[tuple[float, float], ...]
    memory_bytes: dict[int, int]
    limit_bytes: int | None
    answers: tuple[tuple[str, int], ...]
    conditions: str
    fit: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size once, ascending, those without a time included."""
        timed = {point.micro_batch_size for point in self.points}
        return tuple(sorted(timed.union(self.failed, self.memory_bytes)))


def training_profile_info(profile: TrainingProfile) -> TrainingProfileInfo:
    """Computes what the figure of a profile shows.

    Raises:
        ValueError: If nothing was timed.
    """
    if not profile.measured:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller micro-batches "
            f"or longer. Received: {len(profile.points)} sizes, none measured."
        )
    return TrainingProfileInfo(
        name=f"{profile.model_name}, {profile.dtype_policy}",
        points=profile.measured,
        failed=tuple(p.micro_batch_size for p in profile.points if p.outcome == "out_of_memory"),
        line_s=_line(profile),
        memory_bytes=profile.memory_bytes,
        limit_bytes=profile.memory_limit_bytes,
        answers=_answers(profile),
        conditions=_conditions(profile),
        fit=_fit(profile),
    )


def training_profile_alt_text(info: TrainingProfileInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    sizes = info.sizes
    best = max(info.points, key=lambda point: point.samples_per_second or 0.0)
    sentences = [
        f"Charts over the micro-batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic axis, "
        f"for {info.name}: throughput, time of a step and peak memory.",
        f"At most {readable(best.samples_per_second or 0.0)} samples/s, at "
        f"{best.micro_batch_size:,}.",
    ]
    if info.memory_bytes:
        largest = max(info.memory_bytes)
        sentences.append(f"{largest:,} need {memory_text(info.memory_bytes[largest])}.")
    sentences += [f"{size:,} ran out of memory." for size in info.failed]
    sentences += [f"Marked as {name}: {size:,}." for name, size in info.answers]
    return " ".join(sentences)


def _line(profile: TrainingProfile) -> tuple[tuple[float, float], ...]:
    points = profile.measured
    if not profile.has_fit or any(point.accumulated for point in points):
        return ()
    fit = profile.step_time
    if fit.holds is False or fit.overhead_s < 0:
        return ()
    places = np.geomspace(points[0].micro_batch_size, points[-1].micro_batch_size, _LINE_POINTS)
    return tuple((float(size), fit.step_time_s(size)) for size in places)


def _answers(profile: TrainingProfile) -> tuple[tuple[str, int], ...]:
    if not profile.has_fit:
        return ()
    found = (("90 % of peak", profile.efficient), ("fastest", profile.fastest))
    return tuple(
        (f"{name}, not measured" if a.extrapolated else name, a.batch_size)
        for name, a in found
        if a.batch_size is not None
    )


def _conditions(profile: TrainingProfile) -> str:
    parts = where_measured(profile.environment)
    batches = {p.batch_size for p in profile.measured if p.accumulated}
    parts += [f"steps accumulate {_listed(batches)} examples"] if batches else []
    rounds = [len(point.rounds) for point in profile.measured]
    low, high = min(rounds), max(rounds)
    number = counted(low, "round") if low == high else f"{low:,} to {counted(high, 'round')}"
    parts.append(f"{number} a point, bars: 95 % interval of the median")
    parts.append("XLA" if profile.jit_compile else "without XLA")
    return " · ".join(filter(None, (*parts, training_clocks(profile))))


def _listed(sizes: set[int]) -> str:
    """Writes sizes in ascending order."""
    return ", ".join(f"{size:,}" for size in sorted(sizes))


def _fit(profile: TrainingProfile) -> str:
    if not profile.has_fit:
        return ""
    fit = profile.step_time
    line = (
        f"t = {readable(1e3 * max(fit.overhead_s, 0.0))} ms + "
        f"{readable(1e3 * max(fit.per_example_s, 0.0))} ms x B"
    )
    if fit.holds is False:
        return f"No line holds ({line} is off by up to {100 * fit.line.departure.worst:.0f} %)"
    return f"Fit: {line}"
