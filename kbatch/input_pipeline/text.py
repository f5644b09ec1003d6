"""What limits training, in words."""

from kbatch.analysis.intervals import Interval, RoundEstimate
from kbatch.document.numbers import counted, listed, percent, readable
from kbatch.input_pipeline.rates import CLOSEST_RATIO, Crossing
from kbatch.input_pipeline.record import (
    InputPipelineProfile,
    LongRunRecord,
    RateRecord,
    RemedyRecord,
)

_MUCH_WAITING = 0.2
# Training this much slower than one after the other: both sides hold each other up.
_CONTENDED = 0.9
# Both sides keep this share of the cores busy, so that they must share them.
_BUSY_SHARE = 0.8
# Extrapolated this far beyond the batch sizes that were measured, a crossing is named as such.
_FAR = 4


def input_lines(profile: InputPipelineProfile) -> tuple[str, ...]:
    """Return the verdict, its evidence and what the remedies gave, a line each."""
    return (
        f"{profile.verdict}: {headline(profile)}",
        *evidence_lines(profile),
        *_remedies(profile),
        *_untried(profile),
        *(f"Note: {note}" for note in profile.notes),
    )


def evidence_lines(profile: InputPipelineProfile) -> tuple[str, ...]:
    """Return what was measured of the pipeline as it is, a line each."""
    return (
        *_evidence(profile),
        *_crossing(profile),
        *_utilisation(profile),
        *_costs(profile),
    )


def headline(profile: InputPipelineProfile) -> str:
    """Describe in a sentence what the verdict means for the choice of a batch size."""
    if profile.verdict == "input-bound":
        return (
            "training waits for data; a larger batch helps only as far as the pipeline makes "
            "larger ones faster, and comparing batch sizes measures the pipeline."
        )
    if profile.verdict == "compute-bound":
        waits = (profile.wait_share or 0) > _MUCH_WAITING
        tail = ", though it is not done beside the step: see the waiting below" if waits else ""
        return f"the pipeline keeps up with the train step{tail}."
    ratio = profile.ratio
    if profile.disturbed:
        return _disturbed(profile)
    if not profile.is_even:
        return (
            "the batches come unevenly, and what was read does not tell their rate in the long "
            "run: give a larger `budget_s`."
        )
    if ratio is None or ratio.interval is None:
        return "too few rounds for an interval: give a larger `budget_s`."
    if ratio.interval.low >= 1 / CLOSEST_RATIO and ratio.interval.high <= CLOSEST_RATIO:
        return "pipeline and train step are as fast as each other within 5 %."
    long_run = profile.long_run_ratio
    apart = ratio.interval.low > CLOSEST_RATIO or ratio.interval.high < 1 / CLOSEST_RATIO
    if apart and long_run is not None:
        return (
            f"the rates' ratio is {readable(ratio.value)}{_between(ratio.interval)} in the rounds "
            f"and {_bounds(long_run)} over one long reading, on the other side of 1: give a larger "
            "`budget_s`, or an idle machine."
        )
    return (
        f"the rates' ratio is {readable(ratio.value)}{_between(ratio.interval)}, which does "
        "not tell them apart: give a larger `budget_s`, or an idle machine."
    )


def rate_text(rate: RateRecord) -> str:
    """Write samples/s with their interval."""
    estimate = rate.samples_per_second
    if estimate is None:
        return "n/a (not measured)"
    return f"{readable(estimate.value)} samples/s{_between(estimate.interval)}"


def remedy_text(remedy: RemedyRecord) -> str:
    """Write what a change gave."""
    return f"{_times(remedy.gain)}  {remedy.code}"


def is_clear_gain(remedy: RemedyRecord) -> bool:
    """Return whether the whole interval of a gain lies above 5 %, the closest that counts."""
    gain = remedy.gain
    return gain is not None and gain.interval is not None and gain.interval.low > CLOSEST_RATIO


def _disturbed(profile: InputPipelineProfile) -> str:
    alone = {
        "pipeline": f"the pipeline alone ({_median(profile.pipeline)})",
        "step": f"the train step alone ({_median(profile.step)})",
    }
    return (
        f"both together ran at {_median(profile.together)} samples/s, faster than "
        f"{listed(alone[name] for name in profile.disturbed)}. That cannot be: something else "
        "slowed what was timed alone. Measure again on an idle machine, or with a larger "
        "`budget_s`."
    )


def _median(rate: RateRecord) -> str:
    estimate = rate.samples_per_second
    return "n/a" if estimate is None else readable(estimate.value)


def _evidence(profile: InputPipelineProfile) -> list[str]:
    size = f"batch size {profile.batch_size:,}"
    lines = [
        f"Pipeline alone: {rate_text(profile.pipeline)}.",
        f"Train step alone, {size}: {rate_text(profile.step)}.",
        f"Both together: {rate_text(profile.together)}"
        + (
            f"; {percent(profile.wait_share)} of each step is spent waiting for data."
            if profile.wait_share is not None
            else "."
        ),
    ]
    if profile.long_run and not profile.is_even:
        lines.append(_long_run(profile, profile.long_run))
    together = profile.together.samples_per_second
    most = together and together.interval and together.interval.high
    if most and profile.serial and most < _CONTENDED * profile.serial:
        lines.append(
            "Together they are slower than one after the other would be: pipeline and train step "
            f"{_contention(profile)}."
        )
    elif together and profile.serial and profile.overlapped:
        lines.append(
            f"With all work side by side it would be {readable(profile.overlapped)}, one after the "
            f"other {readable(profile.serial)} samples/s."
        )
    return lines


def _contention(profile: InputPipelineProfile) -> str:
    """Describe what both sides want, as far as the processor time of each alone tells it."""
    wanted = (profile.pipeline.busy_cores or 0) + (profile.step.busy_cores or 0)
    if wanted >= _BUSY_SHARE * profile.environment.cpu_count:
        return "want the same cores"
    return (
        "hold each other up, and not for want of cores: Python code runs in one thread at a time, "
        "and the batches of the rounds may differ"
    )


def _long_run(profile: InputPipelineProfile, record: LongRunRecord) -> str:
    read = record.counted
    low, high = read.bounds
    rate = readable(low) if low == high else f"{readable(low)} to {readable(high)}"
    what = {
        "whole epochs": "whole epochs with their starts",
        "whole chunks": "whole chunks with the pauses between them",
        "part of the data": (
            f"a first batch after {readable(record.first_batch_s)} s, and whether such a pause "
            "comes again was not seen"
        ),
    }[read.basis]
    ratio = profile.long_run_ratio
    over = "" if ratio is None else f", {_bounds(ratio)} times the rate of the train step"
    return (
        f"Mind: one reading of {readable(read.duration_s)} s gave {rate} samples/s{over} "
        f"({what}). The rounds are shorter and saw another rate, so the verdict and the waiting "
        "are those of the long reading."
    )


def _bounds(interval: Interval) -> str:
    if interval.low == interval.high:
        return readable(interval.low)
    return f"{readable(interval.low)} to {readable(interval.high)}"


def _crossing(profile: InputPipelineProfile) -> list[str]:
    found = profile.crossing
    if found is None:
        return []
    departure = found.step.line.departure
    misfit = (
        f" Mind: the step's time over the batch size is no line, it is off by up to "
        f"{percent(departure.worst)}."
        if departure.holds is False
        else ""
    )
    return [f"{_crossing_sentence(profile, found)}{misfit}"]


def _crossing_sentence(profile: InputPipelineProfile, found: Crossing) -> str:
    if found.never:
        return "The pipeline keeps up at every batch size: it needs less time an example."
    value, interval = found.batch_size.value, found.batch_size.interval
    if value is None or interval is None:
        at_least = found.batch_size.at_least or 0
        above = f" above batch size {at_least:,.0f}" if at_least >= 1 else ""
        return (
            f"Whether and where{above} the pipeline becomes the slower one cannot be told from "
            "these rounds."
        )
    if interval.high < 1:
        return "The pipeline is the slower one at every batch size."
    line = (
        f"Up to about batch size {round(value):,} ({interval.low:,.0f} to {interval.high:,.0f}) "
        "the step is the slower, above it the pipeline"
    )
    smallest, largest = profile.smaller_steps[-1].batch_size, profile.batch_size
    if not smallest / _FAR <= value <= largest * _FAR:
        return f"{line} (far from the sizes {smallest:,} to {largest:,} that were measured)."
    return f"{line}, if the pipeline takes as long an example at other sizes."


def _utilisation(profile: InputPipelineProfile) -> list[str]:
    contenders = (
        ("pipeline", profile.pipeline),
        ("step", profile.step),
        ("together", profile.together),
    )
    busy = [f"{name} {readable(r.busy_cores, 2)}" for name, r in contenders if r.busy_cores]
    lines = []
    if busy:
        cores = counted(profile.environment.cpu_count, "core")
        lines.append(f"Kept busy by this process, of {cores}: {listed(busy)}.")
    gpus = [
        f"{name} {percent(r.gpu_busy_share)}"
        for name, r in contenders
        if r.gpu_busy_share is not None
    ]
    return [*lines, f"GPU busy: {listed(gpus)}."] if gpus else lines


def _costs(profile: InputPipelineProfile) -> list[str]:
    costs = [(cost.name, cost.batch_s) for cost in profile.costs]
    return [
        f"{name[0].upper()}{name[1:]}: {readable(1e3 * s.value)} ms a batch"
        f"{_between(s.interval and Interval(1e3 * s.interval.low, 1e3 * s.interval.high))}."
        for name, s in costs
        if s is not None
    ]


def _remedies(profile: InputPipelineProfile) -> list[str]:
    if not profile.remedies:
        return []
    lines = ["Tried one at a time, training speed over that of the pipeline as it is:"]
    for remedy in profile.best_first:
        lines.append(f"  {remedy_text(remedy)}{_certainty(remedy)}")
        if remedy.condition and is_clear_gain(remedy):
            lines.append(f"      mind: {remedy.condition}")
    return lines


def _certainty(remedy: RemedyRecord) -> str:
    if is_clear_gain(remedy):
        return ""
    interval = remedy.gain and remedy.gain.interval
    slower = interval is not None and interval.high < 1 / CLOSEST_RATIO
    return "  (slower)" if slower else "  (no clear gain)"


def _untried(profile: InputPipelineProfile) -> list[str]:
    if not profile.untried:
        return []
    return ["Not measured:", *(f"  {u.code or u.name}  ({u.reason})" for u in profile.untried)]


def _times(gain: RoundEstimate | None) -> str:
    if gain is None:
        return "n/a"
    return f"{readable(gain.value)}x{_between(gain.interval)}"


def _between(interval: Interval | None) -> str:
    return f" ({readable(interval.low)} to {readable(interval.high)})" if interval else ""
