"""What the figure of the memory of a search for the largest batch shows."""

from typing import NamedTuple

from kbatch.document.number_text import counted, memory_text, percent
from kbatch.document.where_measured import where_measured
from kbatch.memory.max_batch_record import MaxBatchSizeResult


class MemoryProbe(NamedTuple):
    """One batch size that was run.

    Attributes:
        batch_size: Examples in the batch.
        peak_bytes: Most bytes held at once, None where memory ran out.
        above_window: Whether that is more than the window allows.
        confirms: Whether the run confirmed the answer, in a fresh process say.
    """

    batch_size: int
    peak_bytes: int | None
    above_window: bool
    confirms: bool


class MemoryInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: Task and answer.
        probes: All runs, in order.
        answer: The largest batch size, in examples.
        answer_bytes: Most bytes seen there.
        limit_bytes: Memory that there was.
        window_bytes: Lower and upper end of the window.
        window_text: The window in words.
        fit: Fixed bytes and bytes per example, None from fewer than two sizes.
        reason: Why it is this size.
        conditions: Device, policy, versions and number of runs.
    """

    title: str
    probes: tuple[MemoryProbe, ...]
    answer: int
    answer_bytes: int
    limit_bytes: int
    window_bytes: tuple[float, float]
    window_text: str
    fit: tuple[float, float] | None
    reason: str
    conditions: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending."""
        return tuple(sorted({probe.batch_size for probe in self.probes}))


def memory_info(result: MaxBatchSizeResult) -> MemoryInfo:
    """Computes what the figure of a search for the largest batch shows."""
    low, high = result.memory_window
    task = "training" if result.training else "inference"
    fit = result.fit
    return MemoryInfo(
        title=f"Largest batch for {task}: {counted(result.max_batch_size, 'example')}",
        probes=tuple(
            MemoryProbe(
                probe.batch_size,
                probe.peak_memory_bytes,
                probe.outcome == "above_window",
                probe.purpose != "search",
            )
            for probe in result.probes
        ),
        answer=result.max_batch_size,
        answer_bytes=result.peak_memory_bytes,
        limit_bytes=result.limit_bytes,
        window_bytes=(low * result.limit_bytes, high * result.limit_bytes),
        window_text=f"window {percent(low)} to {percent(high)}",
        fit=(fit.fixed_bytes, fit.bytes_per_example) if fit else None,
        reason=f"Why this size: {result.reason}.",
        conditions=_conditions(result),
    )


def fit_text(info: MemoryInfo) -> str:
    """Says what the fitted line is, an empty text where there is none."""
    if info.fit is None:
        return ""
    fixed, each = info.fit
    return (
        f"Dotted: fitted line, {memory_text(max(fixed, 0.0))} and {memory_text(max(each, 0.0))} "
        "per example."
    )


def alt_text(info: MemoryInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    sizes = info.batch_sizes
    failed = sorted({p.batch_size for p in info.probes if p.peak_bytes is None})
    sentences = [
        f"A chart of peak memory over batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic "
        f"axis, with the limit of {memory_text(info.limit_bytes)} and a {info.window_text}.",
        f"Batch size {info.answer:,} is marked, with {memory_text(info.answer_bytes)}, "
        f"{percent(info.answer_bytes / info.limit_bytes)} of the limit.",
    ]
    if failed:
        sentences.append(f"Out of memory: {', '.join(f'{size:,}' for size in failed)}.")
    return " ".join([*sentences, fit_text(info)]).strip()


def _conditions(result: MaxBatchSizeResult) -> str:
    environment = result.environment
    parts = where_measured(environment) if environment else [result.device]
    parts += [result.dtype_policy, counted(len(result.probes), "run")]
    return " · ".join(parts)
