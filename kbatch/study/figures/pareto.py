"""The figure of quality against throughput, with the trials that no other one beats."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kbatch.analysis.intervals import Estimate
from kbatch.page.numbers import format_number, join_words, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.canvas import INK, MUTED, series_style, shortened
from kbatch.study.comparison import rates_of_settings, refuse_empty
from kbatch.study.figures import common
from kbatch.study.names import metric_words, trial_names
from kbatch.study.table import judged_part
from kbatch.study.trial import Objective

if TYPE_CHECKING:
    from kbatch.study.study import Study

HEIGHT_IN = 4.0
_MOST_NAMED = 14
_NAME_CHARACTERS = 30


class ParetoPoint(NamedTuple):
    """A trial in the figure."""

    name: str  # Its batch size, with the settings that differ from other trials.
    batch_size: int
    series: tuple[int, str]  # Number of its series, and what its trials have in common.
    throughput: Estimate[float]  # In examples per second.
    quality: Estimate[float]
    on_front: bool  # Whether no other trial is both faster and better.


def pareto_points(study: "Study") -> tuple[Objective, tuple[ParetoPoint, ...]]:
    """Return the metric and the trials by throughput, with those that no other one beats."""
    refuse_empty(study)
    names, quality, decided = trial_names(study.trials), study.quality_metric, study.decide()
    completed = [t for t, *_ in rates_of_settings(study.trials) if t.status == "completed"]
    series = common.trial_series(completed, names)
    of_trial = {each: (i, one.label) for i, one in enumerate(series) for each in one.trial_ids}
    measured = [
        (trial, rate, value)
        for trial in completed
        if quality is not None
        and (rate := trial.throughput) is not None
        and (value := judged_part(decided, trial).metric(quality.name)) is not None
    ]
    if quality is None or not measured:
        raise common.missing_data(study, "trials with both a throughput and a metric of quality")
    sign = 1 if quality.direction == "max" else -1
    front = pareto_front([(rate.value, sign * value.value) for _, rate, value in measured])
    points = []
    for place, (trial, rate, value) in enumerate(measured):
        # Where there are several series, the legend names the rest.
        name = names.name(trial) if len(series) == 1 else f"{trial.batch_size:,}"
        own = of_trial[trial.trial_id]
        points.append(ParetoPoint(name, trial.batch_size, own, rate, value, place in front))
    points.sort(key=lambda p: (p.throughput.value, sign * -p.quality.value))
    return quality, tuple(points)


def pareto_front(choices: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Find the choices that no other one beats: more in one quality and no less in the other."""
    front: list[int] = []
    for place in sorted(range(len(choices)), key=choices.__getitem__, reverse=True):
        choice, best = choices[place], choices[front[-1]] if front else None
        if best is None or choice == best or choice[1] > best[1]:
            front.append(place)
    return tuple(reversed(front))


def plot_pareto(study: "Study", ax: Axes | None = None) -> Axes:
    """Plot the quality of each trial against its throughput, with the Pareto front as steps.

    A filled mark stands for a trial that no other one beats in both, a hollow one for the others.
    Marks are labelled with the batch size.

    Args:
        study: A study, from `load_study`.
        ax: Axes to draw on; a new figure if None.

    Raises:
        ValueError: If there is nothing to show, with the reason.
    """
    (quality, points), incomplete = pareto_points(study), common.incomplete_text(study)
    front = [point for point in points if point.on_front]
    (panel,) = canvas.panels(ax, HEIGHT_IN)
    named = join_words(
        f"batch size {p.name} with {format_number(p.throughput.value)} samples/s and "
        f"{format_number(p.quality.value, 4)}"
        for p in front
    )
    alt_text = (
        f"A chart of {metric_words(quality.name)} against throughput, one mark for each of "
        f"{pluralize(len(points), 'trial')}. No other trial is both faster and better than "
        f"{named}. {incomplete}"
    )
    panel.set_label(alt_text.strip())
    canvas.vertical_grid(panel)
    panel.set_xlabel("Throughput (samples/s)", fontsize=canvas.TEXT_PT)
    slowest, fastest = points[0].throughput.value, points[-1].throughput.value
    if fastest > 12 * slowest:  # Small values would lie in one heap on a linear axis.
        panel.set_xscale("log")
        panel.set_xlim(slowest / 1.3, fastest * 1.5)
        plain_log_labels(panel.xaxis)
    else:  # A ratio scale: from zero, twice as far is twice as fast.
        panel.set_xlim(0, 1.12 * fastest)
        labels = int(canvas.label_room(panel) / (len(f"{fastest:,.0f}") + 1.5))
        steps = MaxNLocator(nbins=max(1, min(9, labels)), steps=(1, 2, 2.5, 5, 10))
        panel.xaxis.set_major_locator(steps)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    # Points that are alike together: hundreds of trials make few marks for a file to hold.
    for series, on_front in sorted({(p.series, p.on_front) for p in points}):
        alike = [p for p in points if (p.series, p.on_front) == (series, on_front)]
        rates, values = [p.throughput.value for p in alike], [p.quality.value for p in alike]
        color, marker = series_style(series[0])
        draw.bars(panel, rates, [p.quality.ends for p in alike], color)
        draw.bars(panel, values, [p.throughput.ends for p in alike], color, across=True)
        hollow, size, zorder = (False, 7, 3) if on_front else (True, 5.5, 2.5)
        draw.points(panel, rates, values, color, marker, size=size, hollow=hollow, zorder=zorder)
    panel.margins(y=0.14)
    panel.autoscale_view(scalex=False)
    common.quality_axis(panel, quality, [p.quality.value for p in points])
    # The border of what some trial beats, from edge to edge.
    left, (bottom, top) = panel.get_xlim()[0], panel.get_ylim()
    higher = quality.direction == "max"
    rates = [left, *(p.throughput.value for p in front), front[-1].throughput.value]
    values = [p.quality.value for p in (front[0], *front)] + [bottom if higher else top]
    panel.plot(rates, values, drawstyle="steps-pre", color=MUTED, linewidth=1.1, zorder=1)
    panel.set_ylim(bottom, top)
    for number, label in sorted({p.series for p in points}):
        draw.points(panel, [], [], *series_style(number), label=label)
    canvas.write_title(panel, study.name, columns=3)
    _label_points(panel, points, up=1 if higher else -1)
    filled = "Filled: no other trial is both faster and better. Labels: batch size."
    legend = filled if len(points) > 1 else "Label: batch size."
    legend = f"{legend} {common.bars_text(study.trials)}"
    common.write_conditions(panel, study, legend, alarm=incomplete)
    return panel


def _label_points(panel: Axes, points: Sequence[ParetoPoint], *, up: int) -> None:
    """Name the trials, those on the front first; of many trials those alone."""
    outside = ((1, up), (0, up), (-1, up), (1, 0))
    inside = ((-1, -up), (0, -up), (1, -up), (-1, 0), (1, 0), (1, up), (-1, up), (0, up))
    few = len(points) <= _MOST_NAMED
    # A narrow figure has no room for settings.
    named = few and canvas.width_share(panel) == 1
    labels = [
        draw.Label(
            (p.throughput.value, p.quality.value),
            shortened(p.name, _NAME_CHARACTERS) if named else f"{p.batch_size:,}",
            outside if p.on_front else inside,
            INK if p.on_front else MUTED,
            bold=p.on_front,
            short=f"{p.batch_size:,}",
        )
        for p in sorted(points, key=lambda p: not p.on_front)
        if few or p.on_front
    ]
    draw.place_labels(panel, labels, [(p.throughput.value, p.quality.value) for p in points])
