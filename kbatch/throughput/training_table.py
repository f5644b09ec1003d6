"""The training profile as a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

    from kbatch.throughput.training_profile_record import TrainingPoint, TrainingProfile


def training_table(profile: "TrainingProfile") -> "pandas.DataFrame":
    """Makes a table, one row a micro-batch size; what is unknown is missing."""
    import pandas

    return pandas.DataFrame([_row(point) for point in profile.points])


def _row(point: "TrainingPoint") -> dict[str, object]:
    step, rate = point.step_time_interval_s, point.samples_per_second_interval
    return {
        "micro_batch_size": point.micro_batch_size,
        "batch_size": point.batch_size,
        "outcome": point.outcome,
        "samples_per_second": point.samples_per_second,
        "samples_per_second_low": rate and rate.low,
        "samples_per_second_high": rate and rate.high,
        "step_time_s": point.step_time_s,
        "step_time_low_s": step and step.low,
        "step_time_high_s": step and step.high,
        "rounds": len(point.rounds),
        "steps": point.steps,
        "first_step_s": point.first_step_s,
        "compile_s": point.compile_s,
        "peak_memory_bytes": point.peak_memory_bytes,
        "reason": point.reason,
    }
