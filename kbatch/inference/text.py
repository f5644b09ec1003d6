"""Which batch size to predict with, in words and in rows of text."""

from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN as FEWEST_VALUES
from kbatch.analysis.intervals import Interval
from kbatch.analysis.ratio import Ratio
from kbatch.analysis.scaling_curve import Latency
from kbatch.document.numbers import counted, listed, memory_text, percent, readable
from kbatch.document.section import clocks_text
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import OutputChange, TimingRecord

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def inference_rows(profile: "InferenceProfile") -> Rows:
    """Write a row a call path, policy and batch size, under titles.

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


# To this share of its median, to each side, the interval of a time shall reach.
_PRECISION = 0.05


def inference_lines(profile: InferenceProfile, latency_ms: float | None = None) -> list[str]:
    """Describe the batch sizes that a profile answers, how sure they are and their caveats."""
    path, policy = profile.series[0]
    targets = _checked_targets(profile)
    if latency_ms is not None:
        targets = [(latency_ms, profile.quantile)]
    return [
        *(_target_line(profile, *target) for target in targets),
        *(_answer_line(profile, name) for name in ("knee", "efficient", "fastest")),
        *_fit_lines(profile),
        *(_change_line(change) for change in profile.output_changes),
        *_noise_lines(profile),
        *unsettled_lines(profile),
        *left_out_lines(profile),
        *_clock_lines(profile),
        f"answers are those of {path} under {policy}",
        *(f"note: {note}" for note in profile.notes),
    ]


def inference_clocks(profile: InferenceProfile) -> str:
    """Say between which GPU clocks batches were timed, where they are far apart."""
    return clocks_text(
        (f"{t.batch_size:,} ({t.call_path}, {t.dtype_policy})", t.sm_clock_mhz)
        for t in profile.timings
        if t.measured
    )


def unsettled_lines(profile: InferenceProfile) -> list[str]:
    """Describe how many times are not known to 5 %, a line where there are such."""
    timed = [timing for timing in profile.timings if timing.measured]
    wide = [timing for timing in timed if not _settled(timing)]
    if not wide:
        return []
    fewest = min(len(timing.block_medians_s) for timing in wide)
    rounds = counted(fewest, "round")
    return [
        f"{len(wide):,} of {counted(len(timed), 'time')} may be off by more than "
        f"{percent(_PRECISION)} (the least timed has {rounds}): give more time, or fewer sizes, "
        "call paths and policies"
    ]


def left_out_lines(profile: InferenceProfile) -> list[str]:
    """Describe what was not timed, and why: a line a call path, policy and reason."""
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for timing in profile.timings:
        if not timing.measured:
            reason = (timing.call_path, timing.dtype_policy, timing.reason or timing.outcome)
            sizes.setdefault(reason, []).append(timing.batch_size)
    return [
        f"not timed: {path} under {policy} at batch size {listed(f'{s:,}' for s in of)}: {reason}"
        for (path, policy, reason), of in sizes.items()
    ]


def _clock_lines(profile: InferenceProfile) -> list[str]:
    apart = inference_clocks(profile)
    return [f"batches ran at different clocks ({apart}): times differ by that too"] if apart else []


def _settled(timing: TimingRecord) -> bool:
    interval, time_s = timing.batch_time_interval_s, timing.batch_time_s
    if interval is None or time_s is None:
        return False
    return interval.high - interval.low <= 2 * _PRECISION * time_s


def _checked_targets(profile: InferenceProfile) -> list[tuple[float, float]]:
    first = profile.series[0]
    checks = [c for c in profile.checks if (c.call_path, c.dtype_policy) == first]
    return list(dict.fromkeys((check.latency_ms, check.quantile) for check in checks))


def _target_line(profile: InferenceProfile, latency_ms: float, quantile: float) -> str:
    asked = f"within {latency_ms:g} ms at the {quantile:g} quantile"
    try:
        answer = profile.batch_for(latency_ms=latency_ms, quantile=quantile)
    except ValueError as error:
        return f"{asked}: n/a ({error})"
    words = "verified" if answer.verified else "not verified"
    return f"{asked}: batch size {answer.batch_size:,}, {words} ({answer.reason})"


def _answer_line(profile: InferenceProfile, name: str) -> str:
    try:
        answer = getattr(profile, name)
    except ValueError as error:
        return f"{name}: n/a ({error})"
    span = "" if answer.interval is None else f", 95 % interval {_span(answer.interval)}"
    unmeasured = ", not measured" if answer.extrapolated else ""
    return f"{name}: batch size {answer.batch_size:,}{unmeasured} ({answer.reason}{span})"


def _fit_lines(profile: InferenceProfile) -> list[str]:
    try:
        latency = profile.latency
    except ValueError:  # The answers say what is missing.
        return []
    lines = [f"fit: {_fit_words(latency)}"]
    if profile.disturbed_share:
        share = percent(profile.disturbed_share)
        lines.append(f"left out of the fit: {share} of the rounds, taken for disturbed")
    return lines


def _fit_words(latency: Latency) -> str:
    if latency.follows_line:
        peak, half = _ratio(latency.peak_throughput), _ratio(latency.half_peak_batch_size)
        return f"t(b) = (b + n_half) / r_inf, r_inf {peak} samples/s, n_half {half} examples"
    if latency.line.departure.holds is False:
        worst = percent(latency.line.departure.worst)
        return f"no line, the times leave it by up to {worst}: interpolated between measured sizes"
    return "no line, the time may not grow with the batch: interpolated between measured sizes"


def _change_line(change: OutputChange) -> str:
    of = f"outputs under {change.dtype_policy}, {counted(change.examples, 'example')}"
    if change.mean_relative is None or change.largest_relative is None:
        return f"{of}: not finite, or nothing but zeros in float32"
    return (
        f"{of}: {readable(100 * change.mean_relative)} % from those in float32 on average, at most "
        f"{readable(100 * change.largest_relative)} % of the largest output"
    )


def _noise_lines(profile: InferenceProfile) -> list[str]:
    if profile.twin is None:
        return []
    floor = profile.noise_floor
    if floor is not None:
        return [f"noise floor (A/A test): {percent(floor)}"]
    made = len(profile.twin.log_ratios)
    words = f"{FEWEST_VALUES} rounds show it, {made} were made: give more time"
    return [f"noise floor (A/A test): n/a ({words})"]


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None or ratio.interval is None:
        return "n/a (lost in noise)"
    return f"{readable(ratio.value)} (95 % interval {_span(ratio.interval)})"


def _span(interval: Interval) -> str:
    return f"{readable(interval.low)} to {readable(interval.high)}"
