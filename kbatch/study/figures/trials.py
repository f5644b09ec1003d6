"""The figure of the trials: throughput and model quality by batch size."""

import math
import textwrap
from typing import TYPE_CHECKING

from kbatch.document.short_text import shortened
from kbatch.plotting.batch_axis import batch_axis
from kbatch.plotting.canvas import (
    SMALL_PT,
    TEXT_PT,
    halo,
    label_room,
    new_axes,
    stacked,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import INK, MUTED
from kbatch.plotting.series import (
    draw_series,
    legend_columns,
    mark_missing,
    name_missing,
    name_panel,
    ring,
)
from kbatch.study.conditions import caption
from kbatch.study.figures.incomplete import incomplete_text
from kbatch.study.figures.trials_info import (
    Estimate,
    TrialsInfo,
    alt_text,
    best_label,
    failure_summary,
    series_notes,
    spread_notes,
    trials_info,
)
from kbatch.study.metric_names import is_fraction, metric_axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["HEIGHT_IN", "TrialsInfo", "alt_text", "plot_trials", "trials_info"]

HEIGHT_IN = 5.4
_LABEL_CHARACTERS = 44
_LABEL_LINES = 5
_MISSING_CHARACTERS = 8


def plot_trials(study: "Study", ax: "Axes | None" = None) -> "Axes":
    """Plots samples/s and the quality of the model by batch size, one point a trial.

    The upper panel holds the throughput, the lower one the validation accuracy or whatever
    `study.quality_metric` is. Trials that failed or ran out of memory are marked at the
    bottom edge, and the trial with the best objective is labelled.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the upper panel; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    info = trials_info(study)
    upper, lower = stacked(new_axes(HEIGHT_IN) if ax is None else ax)
    upper.set_label(alt_text(info))
    for panel in (upper, lower):
        tidy(panel)
    batch_axis(lower, info.batch_sizes, "Batch size (examples per update)")
    _draw_panel(upper, info, [p.samples_per_second for p in info.points])
    _draw_panel(lower, info, [p.quality for p in info.points])
    # Words beside each other that have no room stand below.
    failed = {point.batch_size for point in info.incomplete}
    crowded = _MISSING_CHARACTERS * len(failed) > label_room(lower)
    _mark_incomplete(upper, info, labelled=False)
    _mark_incomplete(lower, info, labelled=not crowded)
    _label_panels(upper, lower, info)
    _label_best(upper, lower, info)
    alarm = incomplete_text(study) if crowded else ""
    lines = (caption(info.conditions), *spread_notes(info), *series_notes(info))
    write_caption(lower, *lines, alarm=alarm)
    return upper


def _draw_panel(panel: "Axes", info: TrialsInfo, estimates: list[Estimate | None]) -> None:
    for index, series in enumerate(info.series):
        drawn = set(series.trial_ids)
        pairs = [
            (point.place, estimate)
            for point, estimate in zip(info.points, estimates, strict=True)
            if point.trial_id in drawn and point.completed and estimate
        ]
        if pairs:
            draw_series(
                panel,
                index,
                label=series.label,
                places=[place for place, _ in pairs],
                values=[estimate.value for _, estimate in pairs],
                bounds=[_bar(estimate) for _, estimate in pairs],
                joined=series.joined,
            )
    if not info.completed:
        panel.set_yticks([])
        _say(panel, f"No trial completed: {failure_summary(info)}")
    elif not any(e for p, e in zip(info.points, estimates, strict=True) if p.completed):
        panel.set_yticks([])
        _say(panel, "n/a (not measured in any trial)")


def _bar(estimate: Estimate) -> tuple[float, float] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


def _mark_incomplete(panel: "Axes", info: TrialsInfo, *, labelled: bool) -> None:
    """Marks trials without a result at the bottom edge, one label a batch size."""
    marked: dict[int, list[str]] = {}
    for point in info.incomplete:
        words = marked.setdefault(point.batch_size, [])
        if point.outcome not in words:
            words.append(point.outcome)
        mark_missing(panel, point.place)
    for batch_size, words in marked.items() if labelled else ():
        name_missing(panel, batch_size, ",\n".join(words))


def _label_panels(upper: "Axes", lower: "Axes", info: TrialsInfo) -> None:
    columns = legend_columns((one.label for one in info.series), most=3) if info.completed else 0
    # Throughput may be unknown where quality is not, and the other way round.
    fuller = max(upper, lower, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    name_panel(upper, info.name, columns=columns, series_of=fuller)
    upper.set_ylabel("Throughput\n(samples/s)")
    quality = metric_axis_label(info.quality) if info.quality else "Quality metric"
    lower.set_ylabel(quality, parse_math=False)
    if info.completed:
        # Throughput is a ratio scale: from zero, twice as high is twice as fast.
        by_throughput = info.objective.name == "samples_per_second"
        upper.set_ylim(bottom=0, top=upper.get_ylim()[1] * (1.25 if by_throughput else 1.08))
        upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _make_room(lower, info)


def _make_room(lower: "Axes", info: TrialsInfo) -> None:
    """Widens the lower panel for the labels of the best trial and of those that failed."""
    bottom, top = lower.get_ylim()
    span = top - bottom
    lower.set_ylim(bottom - (0.25 if info.incomplete else 0.12) * span, top + 0.14 * span)
    values = [point.quality.value for point in info.completed if point.quality]
    if info.quality and is_fraction(info.quality.name) and values and max(values) <= 1:
        bottom = max(lower.get_ylim()[0], -1e-9)
        lower.set_yticks([tick for tick in lower.get_yticks() if bottom <= tick < 1 + 1e-9])


def _label_best(upper: "Axes", lower: "Axes", info: TrialsInfo) -> None:
    if info.best is None:
        return
    place = info.best.place
    for panel, estimate in ((upper, info.best.samples_per_second), (lower, info.best.quality)):
        panel.axvline(place, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        if estimate:
            ring(panel, place, estimate.value)
    by_throughput = info.objective.name == "samples_per_second"
    panel, estimate = (
        (upper, info.best.samples_per_second) if by_throughput else (lower, info.best.quality)
    )
    if estimate:
        above = by_throughput or info.objective.direction == "max"
        _label_point(panel, best_label(info), place, estimate.value, above=above)


def _label_point(panel: "Axes", text: str, place: float, value: float, *, above: bool) -> None:
    """Labels a point on the side where the panel has room."""
    x_low, x_high = panel.get_xlim()
    share = math.log(place / x_low) / math.log(x_high / x_low)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    panel.annotate(
        _label_lines(text, round(width_share(panel) * _LABEL_CHARACTERS)),
        (place, value),
        xytext=({"left": -6, "right": 6, "center": 0}[side], 11 if above else -11),
        textcoords="offset points",
        ha=side,
        va="bottom" if above else "top",
        fontsize=SMALL_PT + 0.5,
        fontweight="bold",
        color=INK,
        path_effects=halo(),
        parse_math=False,
    )


def _label_lines(text: str, characters: int) -> str:
    """Breaks a long label before its number, and shortens what would be wider than the rest."""
    if len(text) <= characters:
        return text
    words, _, number = text.rpartition(": ")
    lines = textwrap.wrap(f"{words}:", characters, break_long_words=False)
    if len(lines) > _LABEL_LINES:
        lines = [*lines[: _LABEL_LINES - 1], "…:"]
    return "\n".join((*(shortened(line, characters) for line in lines), number))


def _say(panel: "Axes", text: str) -> None:
    panel.text(
        0.5, 0.5, text, transform=panel.transAxes, ha="center", fontsize=TEXT_PT, color=MUTED
    )
