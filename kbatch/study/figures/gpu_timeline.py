"""The timeline of the GPUs: utilization, memory and power while a block of code ran."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kbatch.document.numbers import counted, listed, memory_text, percent, readable
from kbatch.plotting.canvas import new_axes, piled, tidy, write_caption
from kbatch.plotting.palette import series_style
from kbatch.plotting.series import legend_columns, name_panel
from kbatch.records.usage import GpuSample, GpuUsage, UsageRecord
from kbatch.study.decision import refuse_empty
from kbatch.study.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_GIB = 2.0**30


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
    """One quantity of one GPU over time.

    Attributes:
        times_s: Seconds from the start of the block.
        values: The quantity, in the unit of its panel.
    """

    times_s: tuple[float, ...]
    values: tuple[float, ...]


class GpuPanel(NamedTuple):
    """One quantity.

    Attributes:
        label: Its name with the unit.
        top: Upper end of its axis, None where it is that of the data.
        traces: One a GPU, empty where a GPU does not tell it.
    """

    label: str
    top: float | None
    traces: tuple[GpuTrace, ...]

    @property
    def known(self) -> bool:
        """Whether any GPU tells it."""
        return any(trace.times_s for trace in self.traces)


class GpuTimelineInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: What was watched.
        gpus: Names of the GPUs.
        panels: Utilization, memory and power.
        duration_s: Seconds of the block.
        notes: Energy, means, and what the quantities are.
    """

    title: str
    gpus: tuple[str, ...]
    panels: tuple[GpuPanel, ...]
    duration_s: float
    notes: tuple[str, ...]


def gpu_timeline_info(watched: "Study | UsageRecord | HasUsage") -> GpuTimelineInfo:
    """Compute the timeline of the GPUs of a block of code, or of a study's best trial."""
    title, usage, reason = _watched(watched)
    if usage is None or usage.gpus is None:
        raise ValueError(
            "A timeline needs readings of an NVIDIA GPU: run on a machine with one, with its "
            f"driver. Received: no GPU was read. {reason}"
        )
    gpus = usage.gpus
    names = tuple(_name(gpu) for gpu in gpus)
    # Memory is shown against what there is.
    totals = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    return GpuTimelineInfo(
        title=title,
        gpus=names,
        panels=(
            _panel("Utilization\n(%)", 105.0, gpus, lambda s: _times(s.utilization, 100.0)),
            _panel(
                f"Memory {' or '.join(_memory_words(gpus))}\n(GiB)",
                1.05 * max(totals) / _GIB if totals else None,
                gpus,
                lambda s: _times(s.memory_used_bytes, 1 / _GIB),
            ),
            _panel("Power\n(W)", None, gpus, lambda s: s.power_w),
        ),
        duration_s=usage.duration_s,
        notes=(*(_summary(gpu) for gpu in gpus), _meaning(usage)),
    )


def alt_text(info: GpuTimelineInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    shown = [panel.label.split("\n")[0].lower() for panel in info.panels if panel.known]
    return (
        f"Charts of {listed(shown)} of {listed(info.gpus)} over {readable(info.duration_s)} s: "
        f"{info.title}. {' '.join(info.notes)}"
    )


def _watched(
    watched: "Study | UsageRecord | HasUsage",
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


def _panel(
    label: str,
    top: float | None,
    gpus: tuple[GpuUsage, ...],
    of: Callable[[GpuSample], float | None],
) -> GpuPanel:
    traces = []
    for gpu in gpus:
        pairs = [(s.time_s, value) for s in gpu.samples if (value := of(s)) is not None]
        traces.append(GpuTrace(tuple(t for t, _ in pairs), tuple(v for _, v in pairs)))
    return GpuPanel(label, top, tuple(traces))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


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
    answered_s = [s.time_s for s in gpu.samples if any(v is not None for v in _driver_values(s))]
    if answered_s and answered_s[-1] < gpu.samples[-1].time_s:
        parts.append(f"no answer after {readable(answered_s[-1])} s")
    if gpu.memory_total_bytes:
        parts.append(f"memory {memory_text(gpu.memory_total_bytes)}")
    return " · ".join(parts)


def _driver_values(sample: GpuSample) -> tuple[float | None, ...]:
    return sample.utilization, sample.power_w, sample.temperature_c, sample.sm_clock_mhz


def _meaning(usage: UsageRecord) -> str:
    samples = max(len(gpu.samples) for gpu in usage.gpus or ())
    means = f", shown as {samples:,} means" if usage.readings > samples else ""
    memory = "; ".join(f"{word}, {text}" for word, text in _memory_words(usage.gpus or ()).items())
    return (
        f"{counted(usage.readings, 'reading')}{means}. Utilization: share of time in which some "
        f"kernel ran. Memory: {memory}."
    )


def _memory_words(gpus: tuple[GpuUsage, ...]) -> dict[str, str]:
    sources = {gpu.memory_source for gpu in gpus}
    words = {}
    if "driver" in sources:
        words["reserved"] = "by TensorFlow at its start, not what it needs"
    if "tensorflow" in sources:
        words["held"] = "by TensorFlow's tensors"
    return words


_PANEL_IN = 1.35
_REST_IN = 1.5
# With all of its panels.
HEIGHT_IN = _REST_IN + 3 * _PANEL_IN
# Of each curve so many readings are marked, to tell the GPUs apart without colour.
_MARKS = 25


def plot_gpu_timeline(
    watched: "Study | UsageRecord | HasUsage", ax: "Axes | None" = None
) -> "Axes":
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
    shown = [panel for panel in info.panels if panel.known]
    first = new_axes(_REST_IN + _PANEL_IN * len(shown)) if ax is None else ax
    panels = piled(first, len(shown))
    first.set_label(alt_text(info))
    for panel, quantity in zip(panels, shown, strict=True):
        tidy(panel)
        _draw(panel, info, quantity)
    panels[-1].set_xlim(0, info.duration_s)
    panels[-1].set_xlabel("Time (s)")
    name_panel(first, info.title, columns=legend_columns(info.gpus, most=2))
    write_caption(panels[-1], *info.notes)
    return first


def _draw(panel: "Axes", info: GpuTimelineInfo, quantity: GpuPanel) -> None:
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
