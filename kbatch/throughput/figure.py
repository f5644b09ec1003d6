"""The figure of throughput, step time and memory of training by micro-batch size."""

import textwrap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import counted, memory_text, readable
from kbatch.document.section import where_measured
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import SMALL_PT, halo, new_axes, piled, tidy, width_share, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, series_style
from kbatch.plotting.series import draw_series, mark_missing, name_panel
from kbatch.throughput.record import TrainingPoint, TrainingProfile
from kbatch.throughput.text import training_clocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """Compute what the figure of a profile shows."""
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
    """Describe the figure in sentences, for those who do not see it."""
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
    """Write sizes in ascending order."""
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


HEIGHT_IN = 7.0
_LABEL = "Micro-batch size (examples at once)"
# Share of the limit above which nothing is timed.
_WINDOW_END = 0.90
_LIMIT_CHARACTERS = 80


def plot_training_profile(profile: "TrainingProfile", ax: "Axes | None" = None) -> "Axes":
    """Plot samples/s, the time of a step and the peak memory of training by micro-batch size.

    The line is the fit t = a + b B where it holds; elsewhere lines join the points. The size from
    which 90 % of the peak throughput are reached and the fastest one are marked, sizes that ran out
    of memory stand at the bottom edge.

    Example:

    >>> profile = kbatch.profile_training(build, x, y)
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        profile: A profile, as `profile_training` gives it.
        ax: Axes whose place the panels take; a new figure if None.

    Returns:
        The Axes of the uppermost panel.

    Raises:
        ValueError: If nothing was timed.
    """
    info = training_profile_info(profile)
    has_memory = bool(info.memory_bytes)
    panels = piled(new_axes(HEIGHT_IN) if ax is None else ax, 3 if has_memory else 2)
    for panel in panels:
        tidy(panel)
    batch_axis(panels[-1], info.sizes, _LABEL)
    _draw_times(panels[0], panels[1], info)
    if has_memory:
        _draw_memory(panels[2], info)
    for size in info.failed:
        mark_missing(panels[-1], size, "out of memory")
    _mark_answers(panels[0], info)
    name_panel(panels[0], info.name)
    write_caption(panels[-1], *filter(None, (info.conditions, info.fit)))
    return panels[0]


def _draw_times(upper: "Axes", lower: "Axes", info: TrainingProfileInfo) -> None:
    places = [p.micro_batch_size for p in info.points]
    joined = not info.line_s
    draw_series(
        upper,
        0,
        label="throughput",
        places=places,
        values=[p.samples_per_second or 0.0 for p in info.points],
        bounds=[_ends(p.samples_per_second_interval) for p in info.points],
        joined=joined,
    )
    draw_series(
        lower,
        0,
        label="step time",
        places=places,
        values=[1e3 * (p.step_time_s or 0.0) for p in info.points],
        bounds=[_ends(p.step_time_interval_s, 1e3) for p in info.points],
        joined=joined,
    )
    if info.line_s:
        sizes, seconds = zip(*info.line_s, strict=True)
        rates = [size / step_s for size, step_s in info.line_s]
        for panel, values in ((upper, rates), (lower, [1e3 * s for s in seconds])):
            panel.plot(sizes, values, color=series_style(0).color, linewidth=1.2)
    upper.set_ylim(bottom=0, top=1.12 * upper.get_ylim()[1])
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    lower.set_ylabel("Time of a step\n(ms)")


def _draw_memory(panel: "Axes", info: TrainingProfileInfo) -> None:
    draw_series(
        panel,
        0,
        label="memory",
        places=list(info.memory_bytes),
        values=[float(peak) for peak in info.memory_bytes.values()],
    )
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory\n(weights included)")
    largest = max(info.memory_bytes.values())
    if info.limit_bytes is None:
        return
    text = textwrap.fill(
        f"limit {memory_text(info.limit_bytes)}, nothing above 90 % of it is timed",
        int(_LIMIT_CHARACTERS * width_share(panel)),
    )
    place, coordinates, below_pt = 0.97, "axes fraction", 0
    # A limit far above everything would press the curve to the floor.
    if info.limit_bytes < 16 * largest or info.failed:
        end = _WINDOW_END * info.limit_bytes
        panel.axhline(info.limit_bytes, color=ALARM, linewidth=1.0, linestyle="--")
        panel.axhline(end, color=MUTED, linewidth=1.0, linestyle="--")
        place, coordinates, below_pt = end, panel.get_yaxis_transform(), -3
    panel.annotate(
        text,
        (0.01, place),
        xycoords=coordinates,
        xytext=(0, below_pt),
        textcoords="offset points",
        va="top",
        fontsize=SMALL_PT,
        color=ALARM_TEXT,
        path_effects=halo(),
    )


def _mark_answers(panel: "Axes", info: TrainingProfileInfo) -> None:
    by_size: dict[int, list[str]] = {}
    smallest, largest = info.sizes[0], info.sizes[-1]
    for name, size in info.answers:
        by_size.setdefault(size, []).append(name)
    for row, (size, names) in enumerate(sorted(by_size.items())):
        left = size**2 > smallest * largest
        if smallest <= size <= largest:
            panel.axvline(size, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        panel.annotate(
            f"{', '.join(names)}: {size:,}",
            # A size beyond the axis stands at its end.
            (min(max(size, smallest), largest), 0.02 + 0.11 * row),
            xycoords=panel.get_xaxis_transform(),
            xytext=(-4 if left else 4, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=SMALL_PT,
            color=INK,
            path_effects=halo(),
        )


def _ends(interval: Interval | None, factor: float = 1.0) -> tuple[float, float] | None:
    return None if interval is None else (factor * interval.low, factor * interval.high)
