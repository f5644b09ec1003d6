"""The timeline of the GPUs: utilization, memory and power while a block of code ran."""

from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes

from kbatch.page.numbers import format_number, join_words, memory_text, percent, pluralize
from kbatch.plotting import canvas
from kbatch.plotting.palette import series_style
from kbatch.records.usage import GpuUsage, UsageRecord
from kbatch.study.comparison import refuse_empty
from kbatch.study.names import missing_text

if TYPE_CHECKING:
    from kbatch.device.gpu_monitor import GpuMonitor
    from kbatch.study.study import Study

_GIB = 2.0**30
_PANEL_IN, _REST_IN = 1.35, 1.5
HEIGHT_IN = _REST_IN + 3 * _PANEL_IN


class GpuPanel(NamedTuple):
    """One quantity of all GPUs."""

    label: str  # With the unit.
    top: float | None  # Upper end of its axis, None where the data decide.
    # Of each GPU seconds from the start of the block with values, none where it does not report it.
    traces: tuple[tuple[tuple[float, float], ...], ...]


class GpuTimelineInfo(NamedTuple):
    title: str
    gpus: tuple[str, ...]
    panels: tuple[GpuPanel, ...]  # Of utilization, memory and power, those that a GPU reports.
    duration_s: float
    notes: tuple[str, ...]


def gpu_timeline_info(watched: "Study | UsageRecord | GpuMonitor") -> GpuTimelineInfo:
    """Compute the timeline of the GPUs of a block of code, or of a study's decided trial."""
    title, usage, reason = _watched(watched)
    if usage is None or usage.gpus is None:
        raise ValueError(
            "A timeline needs readings of an NVIDIA GPU: run on a machine with one, with its "
            f"driver. Received: no GPU was read. {reason}"
        )
    gpus = usage.gpus
    memory = {
        "driver": ("reserved", "by TensorFlow at its start, not what it needs"),
        "tensorflow": ("held", "by TensorFlow's tensors"),
    }
    sources = {gpu.memory_source for gpu in gpus}
    words = [memory[source] for source in memory if source in sources]
    # Memory is shown against what there is.
    totals = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    most_gib = 1.05 * max(totals) / _GIB if totals else None
    memory_label = f"Memory {' or '.join(word for word, _ in words)}\n(GiB)"
    panels = []
    for label, top, name, factor in (
        ("Utilization\n(%)", 105.0, "utilization", 100.0),
        (memory_label, most_gib, "memory_used_bytes", 1 / _GIB),
        ("Power\n(W)", None, "power_w", 1.0),
    ):
        pairs = ([(s.time_s, getattr(s, name)) for s in gpu.samples] for gpu in gpus)
        traces = tuple(
            tuple((time_s, factor * value) for time_s, value in known if value is not None)
            for known in pairs
        )
        if any(traces):
            panels.append(GpuPanel(label, top, traces))
    shown = max(len(gpu.samples) for gpu in gpus)
    means = f", shown as {shown:,} means" if usage.readings > shown else ""
    meaning = (
        f"{pluralize(usage.readings, 'reading')}{means}. Utilization: share of time in which some "
        f"kernel ran. Memory: {'; '.join(f'{word}, {text}' for word, text in words)}."
    )
    notes = (*map(_summary, gpus), meaning)
    return GpuTimelineInfo(title, tuple(map(_name, gpus)), tuple(panels), usage.duration_s, notes)


def _watched(watched: Any) -> tuple[str, UsageRecord | None, str]:
    if isinstance(watched, UsageRecord):
        return "GPU timeline", watched, watched.unavailable or ""
    if not hasattr(watched, "trials"):
        return "GPU timeline", watched.usage, watched.unavailable or "The block has not ended."
    refuse_empty(watched)
    best = watched.decide().trial
    trials = [*([best] if best else []), *watched.trials]
    found = [(trial, e.usage) for trial in trials for e in trial.executions if e.usage]
    for trial, usage in found:
        if usage.gpus:
            return f"{watched.name}: batch size {trial.batch_size:,}", usage, ""
    reasons = dict.fromkeys(usage.unavailable for _, usage in found if usage.unavailable)
    return watched.name, None, " ".join(reasons) or "Its trials did not watch any."


def _name(gpu: GpuUsage) -> str:
    return f"{gpu.name or 'GPU'} ({', '.join(gpu.tensorflow_devices) or gpu.pci_bus_id})"


def _summary(gpu: GpuUsage) -> str:
    parts = [_name(gpu)]
    if gpu.mig:
        parts.append("an instance (MIG): power and energy are the whole board's")
    if gpu.mean.utilization is not None:
        parts.append(f"mean utilization {percent(gpu.mean.utilization)}")
    if gpu.mean.power_w is not None:
        parts.append(f"mean power {format_number(gpu.mean.power_w)} W")
    if gpu.energy_j is not None:
        source = "driver's counter" if gpu.energy_source == "counter" else "integral of power"
        parts.append(f"energy {format_number(gpu.energy_j)} J ({source})")
    answered_s = [s.time_s for s in gpu.samples if (s.utilization, s.power_w) != (None, None)]
    if answered_s and answered_s[-1] < gpu.samples[-1].time_s:
        parts.append(f"no answer after {format_number(answered_s[-1])} s")
    if gpu.memory_total_bytes:
        parts.append(f"memory {memory_text(gpu.memory_total_bytes)}")
    return " · ".join(parts)


def alt_text(info: GpuTimelineInfo) -> str:
    shown = join_words(panel.label.split("\n")[0].lower() for panel in info.panels)
    return (
        f"Charts of {shown} of {join_words(info.gpus)} over {format_number(info.duration_s)} s: "
        f"{info.title}. {' '.join(info.notes)}"
    )


def plot_gpu_timeline(watched: "Study | UsageRecord | GpuMonitor", ax: Axes | None = None) -> Axes:
    """Plot utilization, memory and power of each GPU over time.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> kbatch.plot_gpu_timeline(monitor).figure.savefig("gpu.png")

    Args:
        watched: A `GpuMonitor` whose block has ended, its `usage`, or a study: its decided trial is
            shown, or the first one with readings.
        ax: Axes whose place the panels take; a new figure if None.

    Raises:
        ValueError: If no GPU was read, with the reason and what to do.
    """
    info = gpu_timeline_info(watched)
    count = len(info.panels)
    panels = canvas.panels(ax, _REST_IN + _PANEL_IN * count, (1,) * count)
    panels[0].set_label(alt_text(info))
    for panel, quantity in zip(panels, info.panels, strict=True):
        for number, (gpu, trace) in enumerate(zip(info.gpus, quantity.traces, strict=True)):
            color, marker = series_style(number)
            places, values = zip(*trace, strict=True) if trace else ((), ())
            # Some readings are marked, to tell the GPUs apart without colour.
            marks = {"marker": marker, "markevery": max(1, len(trace) // 25), "markersize": 3.5}
            panel.plot(places, values, color=color, linewidth=1.3, label=gpu, **marks)
        highest = max(value for trace in quantity.traces for _, value in trace)
        panel.set_ylim(0, quantity.top or 1.12 * highest or 1.0)
        panel.set_ylabel(quantity.label)
        panel.yaxis.set_major_formatter("{x:,g}")
    panels[-1].set_xlim(0, info.duration_s)
    panels[-1].set_xlabel("Time (s)")
    canvas.write_title(panels[0], info.title, columns=2)
    alarm = missing_text(getattr(watched, "missing", 0))
    canvas.write_caption(panels[-1], *info.notes, alarm=alarm)
    return panels[0]
