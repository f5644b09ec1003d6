"""The timeline of the GPUs: utilization, memory and power while a block of code ran."""

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from kbatch.page.numbers import format_number, memory_text, percent, pluralize
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
    """Return a title, readings, of a study those of its named trial, and why they are others."""
    given: Any = watched
    title, usage, reason, why = "GPUs over time", given, "", ""
    if not isinstance(given, UsageRecord) and not hasattr(given, "usage"):
        refuse_empty(given)
        best = given.decide().trial
        trials = [*([best] if best else []), *given.trials]
        found = [(e.usage, trial) for trial in trials for e in trial.executions]
        reason = " ".join(dict.fromkeys(_why_none(one) for one, _ in found))
        usage, trial = next(((u, t) for u, t in found if u and _shown(u)), (None, None))
        title = f"GPUs during the trial of batch size {trial.batch_size:,}" if trial else ""
        if best and trial and trial.trial_id != best.trial_id:
            why = f"Batch size {best.batch_size:,} has no timeline. {_why_none(found[0][0])}"
    elif not isinstance(given, UsageRecord):
        usage = given.usage
        reason = given.unavailable or ("" if usage else "The block has not ended.")
    if usage is None or not _shown(usage):
        raise ValueError(
            "A timeline needs readings of an NVIDIA GPU: run on a machine with one, with its "
            f"driver. Received: no GPU was read. {reason or _why_none(usage)}"
        )
    return title, usage, why


def _why_none(usage: UsageRecord | None) -> str:
    return (usage.unavailable or "It gave no readings.") if usage else "No GPU was watched."


# A label, the top of its axis (0 for that of the data), and times and values of each GPU.
Panel = tuple[str, float, list[list[tuple[float, float]]]]


def _shown(usage: UsageRecord) -> list[Panel]:
    """Return what was read of the GPUs, a panel each."""
    gpus, shown = usage.gpus or (), []
    # Memory is shown against what there is.
    total_bytes = max((gpu.memory_total_bytes or 0 for gpu in gpus), default=0)
    for label, name, factor, top in (
        ("Utilization\n(%)", "utilization", 100.0, 105.0),
        ("Memory reserved\n(GiB)", "memory_used_bytes", 1 / _GIB, 1.05 * total_bytes / _GIB),
        ("Power\n(W)", "power_w", 1.0, 0.0),
    ):
        readings = [[(s.time_s, getattr(s, name)) for s in gpu.samples] for gpu in gpus]
        traces = [[(t, factor * v) for t, v in one if v is not None] for one in readings]
        if any(traces):
            shown.append((label, top, traces))
    return shown


def _name(gpu: GpuUsage) -> str:
    return f"{gpu.name or 'GPU'} ({', '.join(gpu.tensorflow_devices) or gpu.pci_bus_id})"


def _summary(gpu: GpuUsage) -> str:
    parts = [_name(gpu)]
    if gpu.mig:
        parts.append("an instance (MIG): readings are the whole board's")
    if gpu.mean.utilization is not None:
        parts.append(f"mean utilization {percent(gpu.mean.utilization)}")
    if gpu.mean.power_w is not None:
        parts.append(f"mean power {format_number(gpu.mean.power_w)} W")
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

    Utilization is the share of the time in which a kernel ran. The memory is what TensorFlow
    reserved, by default most of it at its start, and not what it needs.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> kbatch.plot_gpu_timeline(monitor).figure.savefig("gpu.png")

    Args:
        watched: A `GpuMonitor` whose block has ended, its `usage`, or a study: its decided trial is
            shown, or the first one with readings.
        ax: Axes whose place the panels take. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If no GPU was read, with the reason and what to do.
    """
    title, usage, why = watched_usage(watched)
    gpus, shown = usage.gpus or (), _shown(usage)
    panels = canvas.panels(ax, _REST_IN + _PANEL_IN * len(shown), (1,) * len(shown))
    for panel, (label, top, traces) in zip(panels, shown, strict=True):
        for number, (gpu, trace) in enumerate(zip(gpus, traces, strict=True)):
            color, marker = series_style(number)
            places, values = zip(*trace, strict=True) if trace else ((), ())
            # Some readings are marked, to distinguish the GPUs without colour.
            marks = {"marker": marker, "markevery": max(1, len(trace) // 25), "markersize": 3.5}
            look = {"color": color, "linewidth": 1.3, "label": _name(gpu), **marks}
            panel.plot(places, values, **look)
        highest = max(value for trace in traces for _, value in trace)
        panel.set_ylim(0, top or 1.12 * highest or 1.0)
        panel.set_ylabel(label)
        panel.yaxis.set_major_formatter("{x:,g}")
    panels[-1].set_xlim(0, usage.duration_s)
    panels[-1].xaxis.set_major_formatter("{x:,g}")
    panels[-1].set_xlabel("Time (s)")
    canvas.write_title(panels[0], title, columns=2)
    notes = why, missing_text(getattr(watched, "missing", 0)), *map(_summary, gpus)
    facts = [pluralize(usage.readings, "reading")]
    canvas.write_caption(panels, *notes, facts=facts, caption=caption and ax is None)
    return panels[0]
