"""The figure of throughput, time and memory of training by micro-batch size."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from kbatch.page.environment import where_measured
from kbatch.page.numbers import count_range, format_number, memory_text
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, rate_and_time_axes

if TYPE_CHECKING:
    from kbatch.throughput.result import TrainingProfile

HEIGHT_IN = 7.0
# A line looks curved on a logarithmic axis.
_LINE_POINTS = 60
# A limit that lies so many times above everything would press the curve to the floor.
_FAR = 16


def plot_training_profile(profile: "TrainingProfile", ax: Axes | None = None) -> Axes:
    """Plot samples/s, the time of a micro-batch and the peak memory of training by its size.

    One series for one step an execution, another for as many as a search would run. The line is
    the fit t = a + b B where it holds; elsewhere lines join the points. The size from which 90 % of
    the peak throughput is reached and the one to take are marked, sizes that ran out of memory
    stand at the bottom edge. The uppermost Axes are returned, whose label describes it.

    >>> profile = kbatch.profile_training(build, x, y)
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        profile: A profile, from `profile_training`.
        ax: Axes whose place the panels take; a new figure if None.

    Raises:
        ValueError: If nothing was timed.
    """
    if not profile.measured:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller micro-batches "
            f"or longer. Received: {len(profile.updates)} updates, none measured."
        )
    memory_bytes, ways = profile.memory_bytes, profile.fastest_ways
    timed = [way.micro_batch_size for way in ways]
    sizes = sorted({*timed, *profile.out_of_memory, *memory_bytes})
    panels = canvas.panels(ax, HEIGHT_IN, (1, 1, 1) if memory_bytes else (1, 1))
    upper, middle, lowest = panels[0], panels[1], panels[-1]
    batch_axis(lowest, sizes, "Micro-batch size (examples at once)")
    several = any(update.steps_per_execution > 1 for update in profile.measured)
    names = ("one step an execution", "as many as a search runs") if several else ("training", "")
    line_s, words = (), ""
    if profile.has_fit:
        fit, words = profile.step_time, f"Fit: t = {profile.line_text}."
        if fit.holds is not False and fit.intercept >= 0:
            places = np.geomspace(timed[0], timed[-1], _LINE_POINTS)
            line_s = tuple((float(size), fit(size)) for size in places)
    for index, name in enumerate(names):
        rows = [u.row for u in profile.measured if (u.steps_per_execution > 1) == bool(index)]
        if rows:
            # The fit is that of the fastest way of each size.
            line = line_s if index or not several else ()
            draw.rates_and_times(upper, middle, index, rows, label=name, line_s=line)
    rate_and_time_axes(upper, middle, "micro-batch")
    if memory_bytes:
        _draw_memory(lowest, profile)
    for size in profile.out_of_memory:
        draw.missing(lowest, size, words="out of memory")
    marked = [("take", profile.micro_batch_size, True)]
    if profile.has_fit and (efficient := profile.efficient.value) is not None:
        measured = timed[0] <= efficient <= timed[-1]
        marked.insert(0, ("90 % of peak", int(efficient), measured))
    draw.answers(upper, marked, sizes[0], sizes[-1])
    title = f"{profile.model_name}, {profile.dtype_policy}"
    canvas.write_title(upper, title, columns=2, fewest=2)
    parts = where_measured(profile.environment)
    if batches := sorted({u.batch_size for u in profile.measured if u.accumulated}):
        parts.append(f"steps accumulate {', '.join(f'{size:,}' for size in batches)} examples")
    number = count_range((len(update.rounds) for update in profile.measured), "round")
    parts.append(f"{number} a point, bars: 95 % interval of the median")
    parts.append("XLA" if profile.jit_compile else "without XLA")
    canvas.write_caption(lowest, " · ".join(parts), words)
    upper.set_label(" ".join(_described(profile, sizes, marked)))
    return upper


def _described(
    profile: "TrainingProfile", sizes: list[int], marked: list[tuple[str, int, bool]]
) -> list[str]:
    best = max(profile.fastest_ways, key=lambda way: way.samples_per_second)
    found = [
        f"Charts over the micro-batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic axis, "
        f"for {profile.model_name}, {profile.dtype_policy}: throughput, time and peak memory.",
        f"At most {format_number(best.samples_per_second)} samples/s, at "
        f"{best.micro_batch_size:,}.",
    ]
    if profile.memory_bytes:
        largest = max(profile.memory_bytes)
        found.append(f"{largest:,} need {memory_text(profile.memory_bytes[largest])}.")
    found += [f"{size:,} ran out of memory." for size in profile.out_of_memory]
    for name, size, measured in marked:
        found.append(f"Marked as {name}{'' if measured else ', not measured'}: {size:,}.")
    return found


def _draw_memory(panel: Axes, profile: "TrainingProfile") -> None:
    sizes, peaks = zip(*profile.memory_bytes.items(), strict=True)
    draw.series(panel, 0, sizes, peaks, label="memory")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory\n(weights included)")
    limit_bytes = profile.memory_limit_bytes
    if limit_bytes is not None and (limit_bytes < _FAR * max(peaks) or profile.out_of_memory):
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}", below=True)
