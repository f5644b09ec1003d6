"""The figure of what limits the batch size."""

import functools
import math

from matplotlib.axes import Axes

from kbatch.analysis.goodput import statistical_efficiency
from kbatch.analysis.intervals import Estimate
from kbatch.page.document import Figure
from kbatch.page.numbers import format_number, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import INK, MUTED
from kbatch.plotting.draw import batch_axis
from kbatch.recommendation.result import LIMIT_NAMES, Recommendation, noise_bounds, times_to_goal

_HEIGHT_IN = 3.6
_SHORTEST_OCTAVES = 2
# Limits above this multiple of the largest timed size are named at the edge of the figure.
_WIDEST = 4


def plot_limits(
    recommendation: Recommendation, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot throughput, progress per example and per second by batch size, and the limits.

    Progress per example is how much one example advances training, compared with an example in a
    batch of the smallest size. Progress per second is this number times the examples/s that device
    and data allow.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        recommendation: A `Recommendation`.
        ax: Matplotlib axes to draw on. Their label then describes the figure in sentences. If
            None, a new figure.
        caption: Boolean, whether to write a caption below a new figure. Default: True.

    Returns:
        The axes.

    Raises:
        ValueError: If `ax` has no figure.
    """
    (panel,) = canvas.panels(ax, _HEIGHT_IN)
    begins = [
        (begins.value, f"{LIMIT_NAMES[limit]}: {format_number(begins.value, 2)}")
        for limit, (begins, _) in recommendation.limits.items()
        if begins and begins.value
    ]
    # The ticks are the timed sizes, and the next power of two for each limit.
    sizes = set(recommendation.times_s) or {1}
    within = [limit for limit, _ in begins if 1 <= limit <= _WIDEST * max(sizes)]
    sizes |= {2 ** (math.ceil(limit) - 1).bit_length() for limit in within}
    if len(sizes) == 1:
        sizes.add(min(sizes) * 2**_SHORTEST_OCTAVES)
    batch_axis(panel, sorted(sizes), "Batch size (examples)")
    for index, (label, curve) in enumerate(curves_of(recommendation).items()):
        draw.series(panel, index, [*curve.items()], label=label, shaded=True)
    panel.set_ylim(0, 1)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    panel.set_ylabel("Share of the largest")
    for limit in within:
        draw.guide(panel, limit)
    draw.names_above(panel, begins, panel.get_xlim())
    title = "Batch size not known"
    if (size := recommendation.batch_size) is not None:
        names = " or ".join(LIMIT_NAMES[limit] for limit in recommendation.binding)
        title = f"Start with batch size {size:,}, limited by {names}"
        ends = recommendation.batch_sizes[0], recommendation.batch_sizes[-1]
        panel.axvspan(*ends, color=MUTED, alpha=0.12, linewidth=0, zorder=0.5)
        panel.axvline(size, color=INK, linewidth=1.2, linestyle="--", zorder=1.5)
    canvas.write_title(panel, title, columns=3, fewest=1)
    facts = [recommendation.model_name, recommendation.optimizer, recommendation.dtype_policy]
    facts += where_measured(recommendation.environment)
    if (pilot := recommendation.pilot) is not None:
        facts.append(f"noise of {sum(pilot.updates):,} updates at batch size {pilot.batch_size:,}")
    notes = "Bands: 95 % intervals of the curves. Grey: batch sizes to try in a search."
    of, caption = "throughput and progress by batch size", caption and ax is None
    canvas.write_caption([panel], notes, of=of, facts=facts, caption=caption)
    return panel


def curves_of(recommendation: Recommendation) -> dict[str, dict[int, Estimate[float]]]:
    """Return throughput and progress by batch size, as shares of the largest."""
    times_s, noise = recommendation.times_s, recommendation.noise_scale
    if not times_s:
        return {}
    curves = {"samples/s": {size: Estimate(size / s) for size, s in times_s.items()}}
    if noise.value is not None:
        scales = (noise.value, *noise_bounds(noise))
        efficiency = functools.partial(statistical_efficiency, base_batch_size=min(times_s))
        progress = curves.setdefault("progress per example", {})
        for size in times_s:
            value, low, high = (efficiency(size, noise_scale=n) for n in scales)
            progress[size] = Estimate(value, low, high)
        goal = times_to_goal(times_s, noise_scale=noise.value, rate=recommendation.input_rates[1])
        curves["progress per second"] = {size: Estimate(1 / time) for size, time in goal.items()}
    for name, curve in curves.items():
        largest = max(estimate.value for estimate in curve.values())
        curves[name] = {size: estimate.times(1 / largest) for size, estimate in curve.items()}
    return curves


def figures_of(recommendation: Recommendation) -> tuple[Figure, ...]:
    title = "The limits of the batch size"
    return (Figure.of(plot_limits, recommendation, title, _HEIGHT_IN),)
