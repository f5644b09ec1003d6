"""The figures over time: the training runs of a search with its answers, and the use of GPUs."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from kbatch.page.numbers import (
    duration_text,
    format_number,
    join_words,
    memory_text,
    percent,
    pluralize,
    time_unit,
)
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, MUTED, series_style, size_color
from kbatch.records.machine import GpuUsage, UsageRecord
from kbatch.study.compared_trials import is_complete, missing_text
from kbatch.study.decision import Decision, decide
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from kbatch.device.gpu_monitor import GpuMonitor

SEARCH_IN = 3.8
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
    upper, lower = canvas.panels(ax, SEARCH_IN, (1, 1))
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
    answer = f"Answer: {name}. Lower panel: answer so far (thick line: certain)." if name else ""
    early = any(not is_complete(trial.last) for *_, trial in bars)
    hollow = "Hollow: ended early." if early else ""
    notes = (answer, "Light color: validation and callbacks.", hollow)
    common.write_conditions((upper, lower), [study], *notes, caption=caption and ax is None)
    return upper


_GIB = 2.0**30
_PANEL_IN, _REST_IN = 1.35, 0.9
GPUS_IN = _REST_IN + 3 * _PANEL_IN


def watched_usage(watched: "Study | UsageRecord | GpuMonitor") -> tuple[str, UsageRecord, str]:
    """Return a title, readings, and a note if the study's answer has no readings.

    In that case, the readings are of the first trial that has some.
    """
    source: Any = watched
    title, usage, reason, note = "GPUs over time", source, "", ""
    if not isinstance(source, UsageRecord) and not hasattr(source, "usage"):
        refuse_empty(source)
        best = source.decide().trial
        trials = [*([best] if best else []), *source.trials]
        usages = [(e.usage, trial) for trial in trials for e in trial.executions]
        reason = " ".join(dict.fromkeys(_why_none(usage) for usage, _ in usages))
        usage, trial = next(((u, t) for u, t in usages if u and _traces(u)), (None, None))
        title = f"GPUs during the trial of batch size {trial.batch_size:,}" if trial else ""
        if best and trial and trial.trial_id != best.trial_id:
            note = f"Batch size {best.batch_size:,} has no timeline. {_why_none(usages[0][0])}"
    elif not isinstance(source, UsageRecord):
        usage = source.usage
        reason = source.unavailable or ("" if usage else "The monitor is still running.")
    if usage is None or not _traces(usage):
        raise ValueError(
            "A timeline needs readings of an NVIDIA GPU. Run on a machine with a GPU and its "
            f"driver. Received: {reason or _why_none(usage)}"
        )
    return title, usage, note


def _why_none(usage: UsageRecord | None) -> str:
    return (usage.unavailable or "The GPU gave no readings.") if usage else "No GPU was monitored."


# A label, the top of the axis (0: it fits the data), and pairs of time and value of each GPU.
Panel = tuple[str, float, list[list[tuple[float, float]]]]


def _traces(usage: UsageRecord) -> list[Panel]:
    """Return a panel for each quantity that was read."""
    gpus, panels = usage.gpus or (), []
    # The axis of memory ends at the memory of the GPU.
    total_bytes = max((gpu.memory_total_bytes or 0 for gpu in gpus), default=0)
    for label, name, factor, top in (
        ("Utilization\n(%)", "utilization", 100.0, 105.0),
        ("Memory reserved\n(GiB)", "memory_used_bytes", 1 / _GIB, 1.05 * total_bytes / _GIB),
        ("Power\n(W)", "power_w", 1.0, 0.0),
    ):
        readings = [[(s.time_s, getattr(s, name)) for s in gpu.samples] for gpu in gpus]
        traces = [[(t, factor * v) for t, v in trace if v is not None] for trace in readings]
        if any(traces):
            panels.append((label, top, traces))
    return panels


def _name(gpu: GpuUsage) -> str:
    return f"{gpu.name or 'GPU'} ({', '.join(gpu.tensorflow_devices) or gpu.pci_bus_id})"


def _summary(gpu: GpuUsage) -> str:
    parts = [_name(gpu), *["an instance (MIG): readings are of the whole GPU"] * gpu.mig]
    busy, power_w = gpu.mean.utilization, gpu.mean.power_w
    parts += [] if busy is None else [f"mean utilization {percent(busy)}"]
    parts += [] if power_w is None else [f"mean power {format_number(power_w)} W"]
    if gpu.energy_j is not None:
        source = "driver's counter" if gpu.energy_source == "counter" else "mean power"
        parts.append(f"energy {format_number(gpu.energy_j)} J ({source})")
    answered_s = [s.time_s for s in gpu.samples if (s.utilization, s.power_w) != (None, None)]
    if answered_s and answered_s[-1] < gpu.samples[-1].time_s:
        parts.append(f"no answer after {format_number(answered_s[-1])} s")
    if gpu.memory_total_bytes:
        parts.append(f"memory {memory_text(gpu.memory_total_bytes)}")
    return f"{', '.join(parts)}."


def plot_gpu_timeline(
    watched: "Study | UsageRecord | GpuMonitor", ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot utilization, memory and power of each GPU over time.

    Utilization is the share of the time in which a kernel ran. Memory is the memory that TensorFlow
    reserved. By default it reserves most memory when it starts, and not only what it needs.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> kbatch.plot_gpu_timeline(monitor).figure.savefig("gpu.png")

    Args:
        watched: A `GpuMonitor` whose block has ended, its `usage`, or a study. Of a study, the
            trial of the answer is shown, or the first trial with readings.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If there are no readings of a GPU.
    """
    title, usage, note = watched_usage(watched)
    gpus, panels_traces = usage.gpus or (), _traces(usage)
    count = len(panels_traces)
    panels = canvas.panels(ax, _REST_IN + _PANEL_IN * count, (1,) * count)
    for panel, (label, top, traces) in zip(panels, panels_traces, strict=True):
        for number, (gpu, trace) in enumerate(zip(gpus, traces, strict=True)):
            color, marker = series_style(number)
            places, values = zip(*trace, strict=True) if trace else ((), ())
            # Marks distinguish the GPUs without colour.
            marks = {"marker": marker, "markevery": max(1, len(trace) // 25), "markersize": 3.5}
            look = {"color": color, "linewidth": 1.3, "label": _name(gpu), "clip_on": False}
            panel.plot(places, values, **look, **marks)
        highest = max(value for trace in traces for _, value in trace)
        panel.set_ylim(0, top or 1.12 * highest or 1.0)
        panel.set_ylabel(label)
        panel.yaxis.set_major_formatter("{x:,g}")
    panels[-1].set_xlim(0, usage.duration_s)
    panels[-1].xaxis.set_major_formatter("{x:,g}")
    panels[-1].set_xlabel("Time (s)")
    canvas.write_title(panels[0], title, columns=2)
    notes = note, missing_text(getattr(watched, "missing", 0)), *map(_summary, gpus)
    busy = [f"{_name(g)} was busy {percent(u)} of it" for g in gpus if (u := g.mean.utilization)]
    texts = {"of": f"the use of {title}", "result": join_words(busy or [""])}
    facts, caption = [pluralize(usage.readings, "reading")], caption and ax is None
    canvas.write_caption(panels, *notes, **texts, facts=facts, caption=caption)
    return panels[0]
