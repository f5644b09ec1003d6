"""The figure of a search over time: its training runs, and the answer after each run."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kbatch.page.numbers import duration_text, time_unit
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, MUTED, size_color
from kbatch.study.compared_trials import is_complete
from kbatch.study.decision import Decision, decide
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import TrialRecord

HEIGHT_IN = 3.8
# The time axis leaves out a pause that is longer than `_LONGEST_PAUSE_S` and longer than the share
# `_LONGEST_PAUSE` of the time of all training runs.
_LONGEST_PAUSE_S, _LONGEST_PAUSE = 5.0, 0.05
# Largest number of moments for which the answer is computed.
_MOST_ANSWERS = 60
_MOST_NAMES = 8

# One call of `fit`: its row among the calls at the same time, from 0; when it began; its seconds of
# training; its other seconds; and the trial with this training run only.
Bar = tuple[int, float, float, float, TrialRecord]


def search_bars(study: Study) -> tuple[list[Bar], list[tuple[float, float]]]:
    """Return the bars of all training runs in the order of time, and the pauses that are cut out.

    Times are seconds since the search began, without the pauses. A pause is a time and a duration.
    """
    refuse_empty(study)
    runs: list[Any] = [
        (*span, dataclasses.replace(trial, executions=(run,)))
        for trial in study.trials
        for run in trial.executions
        for span in run.spans
    ]
    if not runs:
        raise common.missing_data(study, "start times of training runs")
    runs.sort(key=lambda run: run[:3])
    origin = end_at = runs[0][0]
    if study.plan is not None and (planned_at := study.plan.began_at) is not None:
        origin, end_at = planned_at, planned_at + study.plan.duration_s
    longest_s = max(_LONGEST_PAUSE_S, _LONGEST_PAUSE * sum(all_s for _, _, all_s, _ in runs))
    bars: list[Bar] = []
    pauses: list[tuple[float, float]] = []
    lanes: list[float] = []  # When the last run of each row ends.
    cut_s = 0.0
    for began_at, train_s, all_s, trial in runs:
        if (pause_s := began_at - end_at) > longest_s:
            pauses.append((end_at - origin - cut_s, pause_s))
            cut_s += pause_s
        end_at = max(end_at, began_at + all_s)
        lane = next((n for n, until in enumerate(lanes) if until <= began_at), len(lanes))
        lanes[lane : lane + 1] = [began_at + all_s]
        bars.append((lane, began_at - origin - cut_s, train_s, all_s - train_s, trial))
    return bars, pauses


def search_answers(study: Study, bars: Sequence[Bar]) -> list[tuple[float, Decision]]:
    """Return when each training run ended, and the decision from the runs that had ended then."""
    ends = {id(trial.last): began + train_s + rest_s for _, began, train_s, rest_s, trial in bars}
    moments = sorted({*ends.values()})
    final, settings = study.decide(), study.search.settings if study.search else {}
    answers = []
    for moment in moments[: -1 : -(-len(moments) // _MOST_ANSWERS)]:
        trials = [
            dataclasses.replace(trial, executions=runs)
            for trial in study.trials
            if (runs := tuple(run for run in trial.executions if ends.get(id(run), 0.0) <= moment))
        ]
        decision = decide(trials, settings, tolerance=final.tolerance, confidence=final.confidence)
        answers.append((moment, decision))
    return [*answers, (moments[-1], final)]


def plot_search(study: Study, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the training runs of a search over wall-clock time, and the answer after each run.

    Each bar is a training run in the colour of its batch size. It shows training first, then
    validation and callbacks in a lighter colour. If the search ended the run early, the bar is
    hollow. If the run failed, it ends with a cross. There is a row for each worker. The grey bar is
    the plan. The lower panel shows the batch size that `study.decide()` would have named at that
    time. The line is thick if the answer was certain. A pause, such as between two calls of
    `search`, is cut out and marked.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_search(study).figure.savefig("search.png")

    Args:
        study: A `kbatch.Study`, such as from `load_study`.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If the study is empty, or if its records have no start times of training runs.
    """
    bars, pauses = search_bars(study)
    lanes = 1 + max(lane for lane, *_ in bars)
    sizes = sorted({trial.batch_size for *_, trial in bars})
    total_s = max(began + train_s + rest_s for _, began, train_s, rest_s, _ in bars)
    unit_s, unit = time_unit(total_s)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    for size, filled in itertools.product(sizes, (True, False)):
        group = [b for b in bars if b[4].batch_size == size and is_complete(b[4].last) == filled]
        lane, began, train, rest = np.array([bar[:4] for bar in group] or np.empty((0, 4))).T
        look: dict[str, Any] = {"edgecolor": size_color(size, sizes), "linewidth": 0.6}
        look |= {"height": 0.6, "color": size_color(size, sizes)}
        upper.barh(lane, train / unit_s, left=began / unit_s, **look, fill=filled)
        upper.barh(lane, rest / unit_s, left=(began + train) / unit_s, **look, alpha=0.35)
    failed = [b for b in bars if b[4].status in ("failed", "out_of_memory")]
    ends, rows = [sum(bar[1:4]) / unit_s for bar in failed], [bar[0] for bar in failed]
    draw.points(upper, ends, rows, ALARM, "X", size=7, zorder=4)
    planned = study.plan is not None and study.plan.began_at is not None
    if study.plan is not None and planned:
        upper.barh(lanes, study.plan.duration_s / unit_s, 0.6, color=MUTED)
    names = [*(f"worker {n + 1}" if lanes > 1 else "training" for n in range(lanes)), "plan"]
    upper.set_yticks(range(lanes + planned), names[: lanes + planned])
    upper.set_ylim(lanes + planned - 0.4, -0.6)
    answers = search_answers(study, bars)
    ends = [moment for moment, _ in answers[1:]] + [total_s]
    for (moment, decision), end in zip(answers, ends, strict=True):
        if (size := decision.batch_size) is not None:
            color, width = size_color(size, sizes), 7.0 if decision.certain else 1.6
            span = [moment / unit_s, max(end, moment + 0.01 * total_s) / unit_s]
            lower.plot(span, [size, size], color=color, linewidth=width, solid_capstyle="butt")
    lower.set_yscale("log", base=2)
    lower.set_ylim(sizes[0] / 1.6, sizes[-1] * 1.6)
    ticks = draw.batch_ticks(sizes, 6)
    lower.set_yticks(ticks, [f"{size:,}" for size in ticks])
    lower.minorticks_off()
    for panel in (upper, lower):
        canvas.vertical_grid(panel)
        for moment, _ in pauses:
            draw.guide(panel, moment / unit_s)
    for moment, pause_s in pauses:
        words, place = f"pause of {duration_text(pause_s)}", (moment / unit_s, 1.0)
        top = upper.get_xaxis_transform()
        draw.text(upper, words, place, (3, -2), ha="left", va="top", xycoords=top)
    lower.set_xlim(0, 1.03 * total_s / unit_s)
    lower.set_xlabel(f"Time since the search began ({unit})")
    lower.set_ylabel("Answer: batch size\n(examples)")
    for size in sizes[:: -(-len(sizes) // _MOST_NAMES)]:
        upper.plot([], [], "s", color=size_color(size, sizes), label=f"{size:,}")
    title = "Training runs of the search, by batch size"
    canvas.write_title(upper, title, columns=_MOST_NAMES, fewest=1)
    name = common.answer_text(answers[-1][1])
    answer = f"Answer: {name}. Lower panel: the answer so far, thick if certain." if name else ""
    early = any(not is_complete(trial.last) for *_, trial in bars)
    hollow = "Hollow: ended early." if early else ""
    notes = (answer, "Light color: validation and callbacks.", hollow)
    common.write_conditions((upper, lower), [study], *notes, caption=caption and ax is None)
    return upper
