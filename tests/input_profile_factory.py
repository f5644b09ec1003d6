"""Profiles of input pipelines for tests."""

from records_factory import make_study

from kbatch.input_pipeline import result as result
from kbatch.records.notes import Note

SPREAD = (1.0, 1.01, 0.99, 1.02, 0.98)


def make_rate(rate, *, examples=640, wait_share=None, rounds=5):
    durations = tuple(examples / rate / SPREAD[i % 5] for i in range(rounds))
    return result.RateRecord(
        examples=(examples,) * rounds,
        durations_s=durations,
        wait_s=() if wait_share is None else tuple(wait_share * s for s in durations),
    )


def make_change(name="parallel_map", gain=1.9, *, condition=None):
    """Return a change that makes training `gain` times as fast. If None, it was not tried."""
    if gain is None:
        return result.ChangeRecord(
            name, f"code of {name}", reason=Note.of("no_time_for_changes", needed="9")
        )
    return result.ChangeRecord(
        name=name,
        code=f"code of {name}",
        condition=condition,
        original=make_rate(780, wait_share=0.6),
        changed=make_rate(780 * gain, wait_share=0.2),
    )


def make_long_run(low, high=None, *, waiting=None):
    """Return a reading of three seconds with these bounds in examples/s."""
    counted = ("whole_chunks", round(3 * low), 3.0, 0, 0.0)
    if high is not None:
        counted = ("part_of_the_data", round(3 * low), 3.0, round(2 * high), 2.0)
    return result.LongRun(*counted, 1.0, waiting)


def make_profile(*, pipeline=800, step=2400, together=780, wait_share=0.66, **changed):
    fields = {
        "batch_size": 64,
        "pipeline": make_rate(pipeline),
        "step": make_rate(step),
        "together": make_rate(together, wait_share=wait_share),
        "timeline": tuple(result.StepSpan(0.08 * i, 0.05, 0.03) for i in range(13)),
        "changes": (
            make_change(),
            make_change("prefetch", 1.0),
            make_change("cache_in_memory", 2.5),
            make_change("more_workers", None),
        ),
        "noted": (Note.of("input_cache_unfilled", reason="2 s were not enough"),),
        "dtype_policy": "float32",
        "time_budget_s": 20.0,
        "environment": make_study().search.environment,
    }
    return result.InputPipelineProfile(**(fields | changed))
