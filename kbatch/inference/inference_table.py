"""An inference profile as a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

    from kbatch.inference.inference_record import InferenceProfile
    from kbatch.inference.record import TimingRecord


def inference_table(profile: "InferenceProfile") -> "pandas.DataFrame":
    """Makes a table, one row a call path, policy and batch size; what is unknown is missing."""
    import pandas

    return pandas.DataFrame([_row(profile, timing) for timing in profile.timings])


def _row(profile: "InferenceProfile", timing: "TimingRecord") -> dict[str, object]:
    probe = next(
        (
            m
            for m in profile.memory
            if (m.dtype_policy, m.batch_size) == (timing.dtype_policy, timing.batch_size)
        ),
        None,
    )
    change = next(
        (c for c in profile.output_changes if c.dtype_policy == timing.dtype_policy), None
    )
    interval = timing.batch_time_interval_s
    known = timing.measured and not timing.bulk
    bound = timing.latency_bound(profile.quantile) if known else None
    return {
        "call_path": timing.call_path,
        "dtype_policy": timing.dtype_policy,
        "batch_size": timing.batch_size,
        "outcome": timing.outcome,
        "batch_time_ms": _ms(timing.batch_time_s),
        "batch_time_low_ms": _ms(interval and interval.low),
        "batch_time_high_ms": _ms(interval and interval.high),
        "samples_per_second": timing.samples_per_second,
        "quantile": profile.quantile,
        "latency_bound_ms": _ms(bound and bound.value),
        "missing_calls": bound.missing_calls if bound else None,
        "first_call_s": timing.first_call_s,
        "calls": timing.calls,
        "rounds": len(timing.block_medians_s),
        "copy_ms": _ms(timing.copy_s),
        "peak_memory_bytes": probe and probe.peak_bytes,
        "predicted_memory_bytes": probe and probe.predicted_bytes,
        "largest_output_change": change and change.largest,
        "mean_output_change": change and change.mean,
        "reason": timing.reason,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
