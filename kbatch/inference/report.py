"""An inference profile in words: the lines and rows of a terminal, and the section of a page."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN, Interval
from kbatch.analysis.ratio import Ratio
from kbatch.analysis.scaling_curve import Latency
from kbatch.document.numbers import counted, listed, memory_text, percent, readable
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.inference import figures
from kbatch.inference.answers import InferenceAnswer
from kbatch.inference.figures import (
    conditions_line,
    inference_alt_text,
    inference_clocks,
    inference_info,
)
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import OutputChange, TimingRecord

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]

# To this share of its median, to each side, the interval of a time shall reach.
_PRECISION = 0.05
# Columns of the rows that hold words.
_TEXT_COLUMNS = ("path", "policy")
# Property of the profile, question, and what the batch size does, as the end of a sentence.
_QUESTIONS = (
    ("efficient", "90 % of the peak throughput", "is the smallest with 90 % of the peak rate"),
    ("knee", "Largest throughput over latency", "has the largest throughput over latency"),
    ("fastest", "Largest measured throughput", "had the largest throughput"),
)
# Name of the figure, its title, and the function of `figures` that fails without the data.
_FIGURES = (
    ("throughput", "Throughput and time of a batch", "inference_info"),
    ("operating_curve", "Throughput against the time of a batch", "inference_info"),
    ("tails", "Tails of the latency", "tail_points"),
    ("paths", "Call paths against the first one", "path_ratios"),
    ("memory", "Memory by batch size", "memory_series"),
    ("noise", "Scatter of the rounds", "noise_points"),
)


def inference_rows(profile: InferenceProfile) -> Rows:
    """Write a row a call path, policy and batch size, under titles.

    Where batches were copied to a GPU, a column has the time of a copy beside that of the call.
    """
    quantile = f"p{100 * profile.quantile:g} at most (ms)"
    titles = ("path", "policy", "batch", "ms", "samples/s", quantile, "first call (s)", "memory")
    peaks = {(m.dtype_policy, m.batch_size): m.peak_bytes for m in profile.memory}
    rows = []
    for timing in profile.timings:
        peak = peaks.get((timing.dtype_policy, timing.batch_size))
        times = ("out of memory" if timing.outcome == "out_of_memory" else "not run", "", "", "")
        if timing.batch_time_s is not None and timing.samples_per_second is not None:
            times = (
                readable(1000 * timing.batch_time_s),
                readable(timing.samples_per_second),
                _bound_text(timing, profile.quantile),
                readable(timing.first_call_s or 0.0),
            )
        head = (timing.call_path, timing.dtype_policy, f"{timing.batch_size:,}")
        rows.append((*head, *times, "n/a" if peak is None else memory_text(peak)))
    copies_s = [timing.copy_s for timing in profile.timings]
    if all(copy_s is None for copy_s in copies_s):
        return titles, rows
    copies = ["n/a" if copy_s is None else readable(1000 * copy_s) for copy_s in copies_s]
    return (*titles, "copy (ms)"), [(*row, copy) for row, copy in zip(rows, copies, strict=True)]


def _bound_text(timing: TimingRecord, quantile: float) -> str:
    if timing.bulk:
        return "n/a (bulk)"
    bound = timing.latency_bound(quantile)
    if bound.value is None:
        return f"needs {bound.missing_calls:,} more"
    return readable(1000 * bound.value)


def inference_lines(profile: InferenceProfile, latency_ms: float | None = None) -> list[str]:
    """Describe the batch sizes that a profile answers, how sure they are and their caveats."""
    path, policy = profile.series[0]
    targets = _checked_targets(profile)
    if latency_ms is not None:
        targets = [(latency_ms, profile.quantile)]
    clocks = inference_clocks(profile)
    return [
        *(_target_line(_within(profile, *target)) for target in targets),
        *(_named_line(profile, name) for name in ("knee", "efficient", "fastest")),
        *_fit_lines(profile),
        *(_change_line(change) for change in profile.output_changes),
        *_noise_lines(profile),
        *unsettled_lines(profile),
        *left_out_lines(profile),
        *([f"batches ran at different clocks ({clocks}): times differ by that too"] * bool(clocks)),
        f"answers are those of {path} under {policy}",
        *(f"note: {note}" for note in profile.notes),
    ]


def unsettled_lines(profile: InferenceProfile) -> list[str]:
    """Describe how many times are not known to 5 %, a line where there are such."""
    timed = [timing for timing in profile.timings if timing.measured]
    wide = [timing for timing in timed if not _settled(timing)]
    if not wide:
        return []
    fewest = min(len(timing.block_medians_s) for timing in wide)
    return [
        f"{len(wide):,} of {counted(len(timed), 'time')} may be off by more than "
        f"{percent(_PRECISION)} (the least timed has {counted(fewest, 'round')}): give more time, "
        "or fewer sizes, call paths and policies"
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


def _settled(timing: TimingRecord) -> bool:
    interval, time_s = timing.batch_time_interval_s, timing.batch_time_s
    if interval is None or time_s is None:
        return False
    return interval.high - interval.low <= 2 * _PRECISION * time_s


class _Answer(NamedTuple):
    """A question with its answer, or with the reason why there is none."""

    question: str
    words: str
    found: InferenceAnswer | None
    reason: str
    has_target: bool


def _answers(profile: InferenceProfile) -> list[_Answer]:
    """Ask a profile for the batch sizes that it knows, those of latency targets first."""
    return [
        *(_within(profile, *target) for target in _checked_targets(profile)),
        *(
            _answer(functools.partial(getattr, profile, name), question, words)
            for name, question, words in _QUESTIONS
        ),
    ]


def _checked_targets(profile: InferenceProfile) -> list[tuple[float, float]]:
    first = profile.series[0]
    checks = [c for c in profile.checks if (c.call_path, c.dtype_policy) == first]
    return list(dict.fromkeys((check.latency_ms, check.quantile) for check in checks))


def _within(profile: InferenceProfile, latency_ms: float, quantile: float) -> _Answer:
    return _answer(
        lambda: profile.batch_for(latency_ms=latency_ms, quantile=quantile),
        f"Within {latency_ms:g} ms at the {quantile:g} quantile",
        f"is the largest of which {100 * quantile:g} % of the calls keep to {latency_ms:g} ms",
        has_target=True,
    )


def _answer(
    ask: Callable[[], InferenceAnswer], question: str, words: str = "", *, has_target: bool = False
) -> _Answer:
    try:
        found = ask()
    except ValueError as error:
        return _Answer(question, words, None, str(error), has_target)
    return _Answer(question, words, found, found.reason, has_target)


def _target_line(answer: _Answer) -> str:
    asked = f"w{answer.question[1:]}"
    if answer.found is None:
        return f"{asked}: n/a ({answer.reason})"
    words = "verified" if answer.found.verified else "not verified"
    return f"{asked}: batch size {answer.found.batch_size:,}, {words} ({answer.reason})"


def _named_line(profile: InferenceProfile, name: str) -> str:
    answer = _answer(functools.partial(getattr, profile, name), name)
    if answer.found is None:
        return f"{name}: n/a ({answer.reason})"
    size, interval = answer.found.batch_size, answer.found.interval
    span = "" if interval is None else f", 95 % interval {_span(interval)}"
    unmeasured = ", not measured" if answer.found.extrapolated else ""
    return f"{name}: batch size {size:,}{unmeasured} ({answer.reason}{span})"


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
    why = "the time may not grow with the batch"
    if latency.line.departure.holds is False:
        why = f"the times leave it by up to {percent(latency.line.departure.worst)}"
    return f"no line, {why}: interpolated between measured sizes"


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
    floor, made = profile.noise_floor, len(profile.twin.log_ratios)
    needed = f"{FEWEST_VALUES_OF_A_MEDIAN} rounds show it, {made} were made: give more time"
    return [f"noise floor (A/A test): {f'n/a ({needed})' if floor is None else percent(floor)}"]


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None or ratio.interval is None:
        return "n/a (lost in noise)"
    return f"{readable(ratio.value)} (95 % interval {_span(ratio.interval)})"


def _span(interval: Interval) -> str:
    return f"{readable(interval.low)} to {readable(interval.high)}"


def inference_section(profile: InferenceProfile) -> Section:
    """Compute what a report says of an inference profile."""
    environment, answers = profile.environment, _answers(profile)
    known = next((answer for answer in answers if answer.found is not None), None)
    return Section(
        kind="inference",
        name=profile.model_name,
        headline=_headline(profile, known or answers[0]),
        lead=tuple(filter(None, (_certainty(known), _memory(profile)))),
        details=(_compared(profile),),
        conditions=conditions_line(profile),
        figures=_figures(profile),
        tables=(
            Table(
                "Answers",
                (
                    Column("Question", False),
                    Column("Batch size", True),
                    Column("95 % interval", True),
                    Column("Where it comes from", False),
                ),
                tuple(_answer_row(answer, best=answer is known) for answer in answers),
            ),
            _timing_table(profile),
        ),
        notes=_notes(profile),
        command=environment.command if environment else None,
        settings=(
            Fact("call paths", ", ".join(dict.fromkeys(path for path, _ in profile.series))),
            Fact("dtype policies", ", ".join(dict.fromkeys(p for _, p in profile.series))),
            Fact("quantile of the latency", f"{profile.quantile:g}"),
        ),
        environment=environment_facts(environment),
    )


def _headline(profile: InferenceProfile, answer: _Answer) -> str:
    path, policy = profile.series[0]
    if answer.found is None:
        return f"No batch size can be named for {path} under {policy}: {answer.reason}"
    unmeasured = ", by the fit: it was not measured" if answer.found.extrapolated else ""
    size = answer.found.batch_size
    return f"Batch size {size:,} {answer.words} ({path}, {policy}){unmeasured}."


def _certainty(known: _Answer | None) -> str:
    if known is None or known.found is None:
        return ""
    if known.has_target:
        return f"{'Verified by' if known.found.verified else 'Not verified:'} {known.reason}."
    if known.found.interval is None:
        return "It has no interval: it is the best of the sizes that were measured."
    return f"The 95 % interval of that size is {_span(known.found.interval)}."


def _memory(profile: InferenceProfile) -> str:
    """Describe where memory ended the sizes, an empty text where it did not."""
    tried = (*profile.timings, *profile.memory)
    failed = [one.batch_size for one in tried if one.outcome == "out_of_memory"]
    guarded = [m.batch_size for m in profile.memory if m.guarded]
    limit = profile.memory_limit_bytes
    of = "" if limit is None else f" of {memory_text(limit)}"
    if failed:
        return f"Memory{of} ran out at batch size {min(failed):,}."
    if guarded:
        return f"Batch size {min(guarded):,} was not run: it would need too much of the memory{of}."
    return ""


def _compared(profile: InferenceProfile) -> str:
    sizes = sorted({t.batch_size for t in profile.timings if t.measured})
    series = listed(f"{path} under {policy}" for path, policy in profile.series)
    if not sizes:
        return f"Nothing could be timed of {series}."
    return f"Measured: batch sizes from {sizes[0]:,} to {sizes[-1]:,} by {series}."


def _answer_row(answer: _Answer, *, best: bool) -> Row:
    size, span = Cell("n/a"), Cell("n/a")
    if answer.found is not None:
        unmeasured = " (not measured)" if answer.found.extrapolated else ""
        size = Cell(f"{answer.found.batch_size:,}{unmeasured}", answer.found.batch_size)
        if answer.found.interval is not None:
            span = Cell(_span(answer.found.interval), answer.found.interval.low)
    cells = (Cell(answer.question), size, span, Cell(answer.reason))
    return Row(answer.question, "", best, cells)


def _timing_table(profile: InferenceProfile) -> Table:
    titles, texts = inference_rows(profile)
    rows = []
    for row, timing in zip(texts, profile.timings, strict=True):
        keys = (None, None, timing.batch_size, timing.batch_time_s, timing.samples_per_second)
        cells = itertools.starmap(Cell, itertools.zip_longest(row, keys))
        status = "out_of_memory" if timing.outcome == "out_of_memory" else ""
        rows.append(Row(" ".join(row[:3]), status, False, tuple(cells)))
    columns = (Column(title[0].upper() + title[1:], title not in _TEXT_COLUMNS) for title in titles)
    return Table("Timings", tuple(columns), tuple(rows))


def _notes(profile: InferenceProfile) -> tuple[Note, ...]:
    texts = list(profile.notes)
    if profile.noise_floor is not None:
        texts.append(
            f"Equal settings differed by up to {percent(profile.noise_floor)} here (A/A test): "
            "smaller differences mean nothing."
        )
    for change in profile.output_changes:
        if change.mean_relative is not None and change.largest_relative is not None:
            texts.append(
                f"Outputs under {change.dtype_policy} differ from those in float32 by "
                f"{readable(100 * change.mean_relative)} % on average, at most by "
                f"{readable(100 * change.largest_relative)} % of the largest output "
                f"({change.examples:,} examples)."
            )
        else:
            texts.append(f"Outputs under {change.dtype_policy} are not finite, or all are zero.")
    lines = [*unsettled_lines(profile), *left_out_lines(profile)]
    texts += [f"{line[0].upper()}{line[1:]}." for line in lines]
    return tuple(Note("", "", text) for text in texts)


def _figures(profile: InferenceProfile) -> tuple[Figure, ...]:
    """Offer the figures for which a profile has the data."""
    series = listed(f"{path} under {policy}" for path, policy in profile.series)
    found = []
    for name, title, data in _FIGURES:
        try:
            getattr(figures, data)(profile)
        except ValueError:  # The error tells a caller what to measure; a report leaves it out.
            continue
        alt_text = f"A chart: {title.lower()}, for {series}. The table of timings has the numbers."
        if data == "inference_info":
            alt_text = inference_alt_text(inference_info(profile))
        found.append(
            Figure(
                name=f"inference-{name.replace('_', '-')}",
                title=title,
                height_in=figures.HEIGHTS_IN[name],
                draw=functools.partial(getattr(figures, f"plot_inference_{name}"), profile),
                alt_text=alt_text,
                shape="alone" if name == "throughput" else "small",
            )
        )
    return tuple(found)
