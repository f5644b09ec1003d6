"""The timeline of the GPUs: utilization, memory and power while a block of code ran."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes

from kbatch.document.numbers import counted, listed, memory_text, percent, readable
from kbatch.plotting.canvas import new_axes, piled, tidy, write_caption
from kbatch.plotting.palette import series_style
from kbatch.plotting.series import legend_columns, name_panel
from kbatch.records.usage import GpuSample, GpuUsage, UsageRecord
from kbatch.study.decision import refuse_empty
from kbatch.study.study import Study

_GIB = 2.0**30
_PANEL_IN = 1.35
_REST_IN = 1.5
# With all of its panels.
HEIGHT_IN = _REST_IN + 3 * _PANEL_IN
# Of each curve so many readings are marked, to tell the GPUs apart without colour.
_MARKS = 25


class HasUsage(Protocol):
    """A `GpuMonitor`, or what keeps a usage like one."""

    @property
    def usage(self) -> UsageRecord | None:
        """What the block took, None until it ends."""
        ...

    @property
    def unavailable(self) -> str | None:
        """Why no GPU was read, None where one was."""
        ...


class GpuTrace(NamedTuple):
    """One quantity of one GPU over time, empty where it does not tell it."""

    times_s: tuple[float, ...]  # From the start of the block.
    values: tuple[float, ...]  # In the unit of the panel.


class GpuPanel(NamedTuple):
    """One quantity of all GPUs."""

    label: str  # With the unit.
    top: float | None  # Upper end of its axis, None where it is that of the data.
    traces: tuple[GpuTrace, ...]


class GpuTimelineInfo(NamedTuple):
    """What the figure shows."""

    title: str
    gpus: tuple[str, ...]
    panels: tuple[GpuPanel, ...]  # Of utilization, memory and power, those that a GPU tells.
    duration_s: float
    notes: tuple[str, ...]


def gpu_timeline_info(watched: Study | UsageRecord | HasUsage) -> GpuTimelineInfo:
    """Compute the timeline of the GPUs of a block of code, or of a study's best trial."""
    title, usage, reason = _watched(watched)
    if usage is None or usage.gpus is None:
        raise ValueError(
            "A timeline needs readings of an NVIDIA GPU: run on a machine with one, with its "
            f"driver. Received: no GPU was read. {reason}"
        )
    gpus = usage.gpus
    # Memory is shown against what there is.
    totals = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    memory = {
        "driver": ("reserved", "by TensorFlow at its start, not what it needs"),
        "tensorflow": ("held", "by TensorFlow's tensors"),
    }
    sources = {gpu.memory_source for gpu in gpus}
    words = [memory[source] for source in memory if source in sources]
    quantities = (
        ("Utilization\n(%)", 105.0, 100.0, lambda s: s.utilization),
        (
            f"Memory {' or '.join(word for word, _ in words)}\n(GiB)",
            1.05 * max(totals) / _GIB if totals else None,
            1 / _GIB,
            lambda s: s.memory_used_bytes,
        ),
        ("Power\n(W)", None, 1.0, lambda s: s.power_w),
    )
    panels = (
        GpuPanel(label, top, tuple(_trace(gpu, factor, of) for gpu in gpus))
        for label, top, factor, of in quantities
    )
    shown = max(len(gpu.samples) for gpu in gpus)
    means = f", shown as {shown:,} means" if usage.readings > shown else ""
    meaning = (
        f"{counted(usage.readings, 'reading')}{means}. Utilization: share of time in which some "
        f"kernel ran. Memory: {'; '.join(f'{word}, {text}' for word, text in words)}."
    )
    return GpuTimelineInfo(
        title=title,
        gpus=tuple(_name(gpu) for gpu in gpus),
        panels=tuple(panel for panel in panels if any(trace.values for trace in panel.traces)),
        duration_s=usage.duration_s,
        notes=(*(_summary(gpu) for gpu in gpus), meaning),
    )


def _watched(
    watched: Study | UsageRecord | HasUsage,
) -> tuple[str, UsageRecord | None, str]:
    if isinstance(watched, UsageRecord):
        return "GPU timeline", watched, watched.unavailable or ""
    if not isinstance(watched, Study):
        return "GPU timeline", watched.usage, watched.unavailable or "The block has not ended."
    refuse_empty(watched)
    best = watched.best_trial()
    trials = [*([best] if best else []), *watched.trials]
    found = [(trial, e.usage) for trial in trials for e in trial.executions if e.usage]
    for trial, usage in found:
        if usage.gpus:
            return f"{watched.name}: batch size {trial.batch_size:,}", usage, ""
    reasons = dict.fromkeys(usage.unavailable for _, usage in found if usage.unavailable)
    return watched.name, None, " ".join(reasons) or "Its trials did not watch any."


def _trace(gpu: GpuUsage, factor: float, of: Callable[[GpuSample], float | None]) -> GpuTrace:
    pairs = [(s.time_s, value * factor) for s in gpu.samples if (value := of(s)) is not None]
    return GpuTrace(tuple(t for t, _ in pairs), tuple(v for _, v in pairs))


def _name(gpu: GpuUsage) -> str:
    return f"{gpu.name or 'GPU'} ({', '.join(gpu.tensorflow_devices) or gpu.pci_bus_id})"


def _summary(gpu: GpuUsage) -> str:
    parts = [_name(gpu)]
    if gpu.mig:
        parts.append("an instance (MIG): power and energy are the whole board's")
    if gpu.mean.utilization is not None:
        parts.append(f"mean utilization {percent(gpu.mean.utilization)}")
    if gpu.mean.power_w is not None:
        parts.append(f"mean power {readable(gpu.mean.power_w)} W")
    if gpu.energy_j is not None:
        source = "driver's counter" if gpu.energy_source == "counter" else "integral of power"
        parts.append(f"energy {readable(gpu.energy_j)} J ({source})")
    answered_s = [
        s.time_s
        for s in gpu.samples
        if (s.utilization, s.power_w, s.temperature_c, s.sm_clock_mhz) != (None,) * 4
    ]
    if answered_s and answered_s[-1] < gpu.samples[-1].time_s:
        parts.append(f"no answer after {readable(answered_s[-1])} s")
    if gpu.memory_total_bytes:
        parts.append(f"memory {memory_text(gpu.memory_total_bytes)}")
    return " · ".join(parts)


def alt_text(info: GpuTimelineInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    shown = listed(panel.label.split("\n")[0].lower() for panel in info.panels)
    return (
        f"Charts of {shown} of {listed(info.gpus)} over {readable(info.duration_s)} s: "
        f"{info.title}. {' '.join(info.notes)}"
    )


def plot_gpu_timeline(watched: Study | UsageRecord | HasUsage, ax: Axes | None = None) -> Axes:
    """Plot utilization, memory and power of each GPU over time.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> kbatch.plot_gpu_timeline(monitor).figure.savefig("gpu.png")

    Args:
        watched: A `GpuMonitor` whose block has ended, its `usage`, or a study, whose best trial
            with readings is shown.
        ax: Axes whose place the panels take; a new figure if None.

    Returns:
        The Axes of the uppermost panel; their label, `get_label()`, describes the figure in
        sentences.

    Raises:
        ValueError: If no GPU was read, with the reason and what to do.
    """
    info = gpu_timeline_info(watched)
    first = new_axes(_REST_IN + _PANEL_IN * len(info.panels)) if ax is None else ax
    panels = piled(first, len(info.panels))
    first.set_label(alt_text(info))
    for panel, quantity in zip(panels, info.panels, strict=True):
        tidy(panel)
        for number, (gpu, trace) in enumerate(zip(info.gpus, quantity.traces, strict=True)):
            style = series_style(number)
            panel.plot(
                trace.times_s,
                trace.values,
                color=style.color,
                linewidth=1.3,
                marker=style.marker,
                markevery=max(1, len(trace.times_s) // _MARKS),
                markersize=3.5,
                label=gpu,
            )
        highest = max(value for trace in quantity.traces for value in trace.values)
        panel.set_ylim(0, quantity.top or 1.12 * highest or 1.0)
        panel.set_ylabel(quantity.label)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panels[-1].set_xlim(0, info.duration_s)
    panels[-1].set_xlabel("Time (s)")
    name_panel(first, info.title, columns=legend_columns(info.gpus, most=2))
    write_caption(panels[-1], *info.notes)
    return first
