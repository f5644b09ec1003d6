"""An inference profile as rows of text, for a terminal or a report."""

from typing import TYPE_CHECKING

from kbatch.document.number_text import memory_text, readable

if TYPE_CHECKING:
    from kbatch.inference.inference_record import InferenceProfile
    from kbatch.inference.record import TimingRecord

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def inference_rows(profile: "InferenceProfile") -> Rows:
    """Writes a row a call path, policy and batch size, under titles.

    Where batches were copied to a GPU, a column tells how long a copy takes beside the call.
    """
    quantile = f"p{100 * profile.quantile:g} at most (ms)"
    titles = ("path", "policy", "batch", "ms", "samples/s", quantile, "first call (s)", "memory")
    rows = [_row(profile, timing) for timing in profile.timings]
    if any(timing.copy_s is not None for timing in profile.timings):
        copies = [_copy(timing) for timing in profile.timings]
        return (*titles, "copy (ms)"), [
            (*row, copy) for row, copy in zip(rows, copies, strict=True)
        ]
    return titles, rows


def _row(profile: "InferenceProfile", timing: "TimingRecord") -> tuple[str, ...]:
    head = (timing.call_path, timing.dtype_policy, f"{timing.batch_size:,}")
    peaks = {(m.dtype_policy, m.batch_size): m.peak_bytes for m in profile.memory}
    peak = peaks.get((timing.dtype_policy, timing.batch_size))
    memory = "n/a" if peak is None else memory_text(peak)
    if timing.batch_time_s is None or timing.samples_per_second is None:
        words = "out of memory" if timing.outcome == "out_of_memory" else "not run"
        return (*head, words, "", "", "", memory)
    return (
        *head,
        readable(1000 * timing.batch_time_s),
        readable(timing.samples_per_second),
        _bound(profile, timing),
        readable(timing.first_call_s or 0.0),
        memory,
    )


def _copy(timing: "TimingRecord") -> str:
    return "n/a" if timing.copy_s is None else readable(1000 * timing.copy_s)


def _bound(profile: "InferenceProfile", timing: "TimingRecord") -> str:
    if timing.bulk:
        return "n/a (bulk)"
    bound = timing.latency_bound(profile.quantile)
    if bound.value is None:
        return f"needs {bound.missing_calls:,} more"
    return readable(1000 * bound.value)
