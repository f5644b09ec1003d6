"""The figure of throughput, time and memory of training by micro-batch size."""

from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from kbatch.analysis.scaling_curve import OUT_OF_MEMORY
from kbatch.memory.figure import draw_peaks
from kbatch.page.numbers import count_range, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.draw import batch_axis, rate_and_time_axes

if TYPE_CHECKING:
    from kbatch.throughput.result import TrainingProfile

HEIGHT_IN = 7.0


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
    memory_bytes = profile.memory_bytes
    timed = [way.batch_size for way in profile.fastest_ways]
    failed = [u.batch_size for u in profile.updates if u.outcome == OUT_OF_MEMORY]
    sizes = sorted({*timed, *failed, *memory_bytes})
    panels = canvas.panels(ax, HEIGHT_IN, (1, 1, 1) if memory_bytes else (1, 1))
    upper, middle, lowest = panels[0], panels[1], panels[-1]
    batch_axis(lowest, sizes, "Micro-batch size (examples at once)")
    alone = [update for update in profile.measured if update.steps_per_execution == 1]
    several = [update for update in profile.measured if update.steps_per_execution > 1]
    # The fit is that of the fastest way of each size.
    line_s = profile.latency.drawn if profile.has_fit else []
    label = "one step an execution" if several else "training"
    draw.rates_and_times(upper, middle, 0, alone, label=label, line_s=[] if several else line_s)
    if several:
        label = "as many as a search runs"
        draw.rates_and_times(upper, middle, 1, several, label=label, line_s=line_s)
    rate_and_time_axes(upper, middle, "micro-batch")
    if memory_bytes:
        draw_peaks(lowest, {"memory": memory_bytes}, profile.memory_limit_bytes)
    for size in failed:
        draw.missing(lowest, size, words="out of memory")
    marked = [("take", profile.micro_batch_size, True)]
    if profile.has_fit and (efficient := profile.efficient.value) is not None:
        measured = timed[0] <= efficient <= timed[-1]
        marked.insert(0, ("90 % of peak", int(efficient), measured))
    draw.answers(upper, marked, sizes[0], sizes[-1])
    title = f"{profile.model_name}, {profile.dtype_policy}"
    canvas.write_title(upper, title, columns=2, fewest=2)
    parts = where_measured(profile.environment)
    parts.append("XLA" if profile.jit_compile else "without XLA")
    number = count_range((len(update.rounds) for update in profile.measured), "round")
    parts.append(f"{number} a point, bars: 95 % interval of the median")
    fit = f"Fit: t = {profile.line_text}." if profile.has_fit else ""
    canvas.write_caption(panels, " · ".join(parts), fit)
    return upper
