"""What the figure of an input pipeline shows, computed before anything is drawn."""

from typing import NamedTuple

from kbatch.document.number_text import counted, percent, readable
from kbatch.document.where_measured import where_measured
from kbatch.input_pipeline.input_pipeline_record import InputPipelineProfile
from kbatch.input_pipeline.input_rates import RateRecord
from kbatch.input_pipeline.text import headline, is_clear_gain

_SECOND = 1.0
_MOST_REMEDIES = 3


class Segment(NamedTuple):
    """A stretch of the timeline.

    Attributes:
        begin_ms: Milliseconds from the start of the timeline.
        duration_ms: Milliseconds it lasts.
    """

    begin_ms: float
    duration_ms: float


class RateBar(NamedTuple):
    """One bar.

    Attributes:
        label: What was measured.
        rate: Examples per second.
        low: Lower end of its 95 % interval, None if it has none.
        high: Upper end of its 95 % interval, None if it has none.
        is_change: Whether it is training with a changed pipeline.
    """

    label: str
    rate: float
    low: float | None
    high: float | None
    is_change: bool


class InputPipelineInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: The verdict and what it means.
        waiting: Stretches in which training waits for data.
        computing: Stretches in which it computes.
        wait_share: Share of the rounds' time spent waiting, None if not measured.
        bars: Rates, the pipeline alone first.
        conditions: Device, versions, batch size and rounds in a line.
    """

    title: str
    waiting: tuple[Segment, ...]
    computing: tuple[Segment, ...]
    wait_share: float | None
    bars: tuple[RateBar, ...]
    conditions: str


def input_pipeline_info(profile: InputPipelineProfile) -> InputPipelineInfo:
    """Computes what the figure of an input pipeline shows.

    Changes to the pipeline are shown where their gain is clear, the best three of them.
    """
    spans = [span for span in profile.timeline if span.begin_s < _SECOND]
    waiting = [Segment(1e3 * span.begin_s, 1e3 * span.wait_s) for span in spans]
    computing = [
        Segment(1e3 * (span.begin_s + span.wait_s), 1e3 * span.compute_s) for span in spans
    ]
    gained = [remedy for remedy in profile.best_first if is_clear_gain(remedy)][:_MOST_REMEDIES]
    bars = [
        _bar("pipeline alone", profile.pipeline),
        _bar("train step alone", profile.step),
        _bar("both together", profile.together),
        *(_bar(f"with {r.name}", r.changed, is_change=True) for r in gained),
    ]
    return InputPipelineInfo(
        title=f"{profile.verdict}: {headline(profile)}",
        waiting=tuple(waiting),
        computing=tuple(computing),
        wait_share=profile.wait_share,
        bars=tuple(bar for bar in bars if bar is not None),
        conditions=_conditions(profile),
    )


def alt_text(info: InputPipelineInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    bars = ", ".join(f"{bar.label} {readable(bar.rate)}" for bar in info.bars)
    steps = counted(len(info.computing), "step")
    share = "" if info.wait_share is None else f", {percent(info.wait_share)} of it waiting"
    return (
        f"A timeline of {steps} of training{share}, above bars of samples per second: {bars}. "
        f"The verdict is {info.title}"
    )


def _bar(label: str, rate: RateRecord, *, is_change: bool = False) -> RateBar | None:
    estimate = rate.samples_per_second
    if estimate is None:
        return None
    interval = estimate.interval
    low, high = (interval.low, interval.high) if interval else (None, None)
    return RateBar(label, estimate.value, low, high, is_change)


def _conditions(profile: InputPipelineProfile) -> str:
    rounds = counted(len(profile.step.durations_s), "round")
    parts = [
        *where_measured(profile.environment),
        profile.dtype_policy,
        f"batch size {profile.batch_size:,}",
        f"{rounds}, bars: 95 % interval",
    ]
    return " · ".join(parts)
