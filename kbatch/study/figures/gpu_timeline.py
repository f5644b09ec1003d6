"""The figure of the utilization, memory and power of GPUs over time."""

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from kbatch.page.numbers import format_number, join_words, memory_text, percent, pluralize
from kbatch.plotting import canvas
from kbatch.plotting.canvas import series_style
from kbatch.records.machine import GpuUsage, UsageRecord
from kbatch.study.compared_trials import missing_text
from kbatch.study.study import Study, refuse_empty

if TYPE_CHECKING:
    from kbatch.device.gpu_monitor import GpuMonitor

_GIB = 2.0**30
_PANEL_IN, _REST_IN = 1.35, 0.9
HEIGHT_IN = _REST_IN + 3 * _PANEL_IN


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
