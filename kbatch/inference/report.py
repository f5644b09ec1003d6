"""What a report says of an inference profile: its answers and its figures."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import listed, memory_text, percent, readable
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.inference.figures.common import conditions_line, inference_alt_text, inference_info
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.text import inference_rows, left_out_lines, unsettled_lines


class Answer(NamedTuple):
    """One question with its answer.

    Attributes:
        question: What was asked.
        words: What the batch size does, as the end of a sentence.
        batch_size: The size in examples, None where the measurements do not tell.
        interval: Its 95 % interval in examples, None if it has none.
        verified: Whether fresh calls kept to the target; None where there is none.
        reason: Where the answer comes from, or why there is none.
        extrapolated: Whether the size lies outside the measured ones.
    """

    question: str
    words: str
    batch_size: int | None
    interval: Interval | None
    verified: bool | None
    reason: str
    extrapolated: bool = False


_QUESTIONS = (
    ("efficient", "90 % of the peak throughput", "is the smallest with 90 % of the peak rate"),
    ("knee", "Largest throughput over latency", "has the largest throughput over latency"),
    ("fastest", "Largest measured throughput", "had the largest throughput"),
)


def answers(profile: InferenceProfile) -> tuple[Answer, ...]:
    """Ask a profile for the batch sizes it can tell, those of latency targets first."""
    first = profile.series[0]
    targets = dict.fromkeys(
        (check.latency_ms, check.quantile)
        for check in profile.checks
        if (check.call_path, check.dtype_policy) == first
    )
    return (
        *(_within(profile, latency_ms, quantile) for latency_ms, quantile in targets),
        *(_named(profile, *question) for question in _QUESTIONS),
    )


def _within(profile: InferenceProfile, latency_ms: float, quantile: float) -> Answer:
    question = f"Within {latency_ms:g} ms at the {quantile:g} quantile"
    words = f"is the largest of which {100 * quantile:g} % of the calls keep to {latency_ms:g} ms"
    try:
        found = profile.batch_for(latency_ms=latency_ms, quantile=quantile)
    except ValueError as error:
        return Answer(question, words, None, None, None, str(error))
    return Answer(
        question,
        words,
        found.batch_size,
        found.interval,
        found.verified,
        found.reason,
        found.extrapolated,
    )


def _named(profile: InferenceProfile, name: str, question: str, words: str) -> Answer:
    try:
        found = getattr(profile, name)
    except ValueError as error:
        return Answer(question, words, None, None, None, str(error))
    return Answer(
        question, words, found.batch_size, found.interval, None, found.reason, found.extrapolated
    )


# Columns of the rows that hold words.
_TEXT_COLUMNS = ("path", "policy")


def inference_section(profile: InferenceProfile) -> Section:
    """Compute what a report says of an inference profile."""
    environment, found = profile.environment, answers(profile)
    return Section(
        kind="inference",
        name=profile.model_name,
        headline=_headline(profile, found),
        lead=tuple(filter(None, (_certainty(found), _memory(profile)))),
        details=(_compared(profile),),
        conditions=conditions_line(profile),
        figures=inference_figures(profile),
        tables=(_answer_table(found), _timing_table(profile)),
        notes=_notes(profile),
        command=environment.command if environment else None,
        settings=(
            Fact("call paths", ", ".join(dict.fromkeys(path for path, _ in profile.series))),
            Fact("dtype policies", ", ".join(dict.fromkeys(p for _, p in profile.series))),
            Fact("quantile of the latency", f"{profile.quantile:g}"),
        ),
        environment=environment_facts(environment),
    )


def _headline(profile: InferenceProfile, found: tuple[Answer, ...]) -> str:
    path, policy = profile.series[0]
    known = next((answer for answer in found if answer.batch_size is not None), None)
    if known is None or known.batch_size is None:
        return f"No batch size can be named for {path} under {policy}: {found[0].reason}"
    unmeasured = ", by the fit: it was not measured" if known.extrapolated else ""
    return f"Batch size {known.batch_size:,} {known.words} ({path}, {policy}){unmeasured}."


def _certainty(found: tuple[Answer, ...]) -> str:
    known = next((answer for answer in found if answer.batch_size is not None), None)
    if known is None:
        return ""
    if known.verified is not None:
        verified = "Verified by" if known.verified else "Not verified:"
        return f"{verified} {known.reason}."
    if known.interval is None:
        return "It has no interval: it is the best of the sizes that were measured."
    return (
        f"The 95 % interval of that size is {readable(known.interval.low)} to "
        f"{readable(known.interval.high)}."
    )


def _memory(profile: InferenceProfile) -> str:
    """Describe where memory ended the sizes, an empty text where it did not."""
    failed = [t.batch_size for t in profile.timings if t.outcome == "out_of_memory"]
    failed += [m.batch_size for m in profile.memory if m.outcome == "out_of_memory"]
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


def _answer_table(found: tuple[Answer, ...]) -> Table:
    first = next((answer for answer in found if answer.batch_size is not None), None)
    columns = (
        Column("Question", False),
        Column("Batch size", True),
        Column("95 % interval", True),
        Column("Where it comes from", False),
    )
    return Table("Answers", columns, tuple(_answer_row(a, a is first) for a in found))


def _answer_row(answer: Answer, best: bool) -> Row:
    size, interval = answer.batch_size, answer.interval
    span = f"{readable(interval.low)} to {readable(interval.high)}" if interval else "n/a"
    unmeasured = " (not measured)" if answer.extrapolated else ""
    return Row(
        answer.question,
        "",
        best,
        (
            Cell(answer.question),
            Cell("n/a") if size is None else Cell(f"{size:,}{unmeasured}", size),
            Cell(span, interval.low if interval else None),
            Cell(answer.reason),
        ),
    )


def _timing_table(profile: InferenceProfile) -> Table:
    titles, rows = inference_rows(profile)
    columns = tuple(
        Column(title[0].upper() + title[1:], title not in _TEXT_COLUMNS) for title in titles
    )
    keys = [(t.batch_size, t.batch_time_s, t.samples_per_second) for t in profile.timings]
    return Table(
        "Timings",
        columns,
        tuple(
            Row(
                " ".join(row[:3]),
                "out_of_memory" if timing.outcome == "out_of_memory" else "",
                False,
                tuple(
                    Cell(text, sort_key)
                    for text, sort_key in zip(row, _padded(key, len(row)), strict=True)
                ),
            )
            for row, key, timing in zip(rows, keys, profile.timings, strict=True)
        ),
    )


def _padded(keys: tuple[float | None, ...], length: int) -> tuple[float | None, ...]:
    """Set the keys of batch size, time and rate among those of all columns."""
    return (None, None, *keys, *(None,) * (length - 2 - len(keys)))


def _notes(profile: InferenceProfile) -> tuple[Note, ...]:
    floor = profile.noise_floor
    texts = list(profile.notes)
    if floor is not None:
        texts.append(
            f"Equal settings differed by up to {percent(floor)} here (A/A test): smaller "
            "differences mean nothing."
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


class _Offer(NamedTuple):
    """A figure that a profile may have.

    Attributes:
        name: Name of its module, and of its function, after `inference_`.
        title: What it shows.
        data: The function of its module that fails without the data.
    """

    name: str
    title: str
    data: str


_OFFERS = (
    _Offer("throughput", "Throughput and time of a batch", "inference_info"),
    _Offer("operating_curve", "Throughput against the time of a batch", "inference_info"),
    _Offer("tails", "Tails of the latency", "tail_points"),
    _Offer("paths", "Call paths against the first one", "path_ratios"),
    _Offer("memory", "Memory by batch size", "memory_series"),
    _Offer("noise", "Scatter of the rounds", "noise_points"),
)


def inference_figures(profile: InferenceProfile) -> tuple[Figure, ...]:
    """Offer the figures for which a profile has the data."""
    figures = []
    for offer in _OFFERS:
        module = importlib.import_module(f"kbatch.inference.figures.{offer.name}")
        if _has_data(getattr(module, offer.data), profile):
            figures.append(_figure(offer, module, profile))
    return tuple(figures)


def _has_data(data: Callable[[InferenceProfile], object], profile: InferenceProfile) -> bool:
    try:
        data(profile)
    except ValueError:  # The error tells a caller what to measure; a report leaves it out.
        return False
    return True


def _figure(offer: _Offer, module: Any, profile: InferenceProfile) -> Figure:
    return Figure(
        name=f"inference-{offer.name.replace('_', '-')}",
        title=offer.title,
        height_in=module.HEIGHT_IN,
        draw=functools.partial(getattr(module, f"plot_inference_{offer.name}"), profile),
        alt_text=_alt_text(offer, profile),
        shape="alone" if offer is _OFFERS[0] else "small",
    )


def _alt_text(offer: _Offer, profile: InferenceProfile) -> str:
    if offer.data == "inference_info":
        return inference_alt_text(inference_info(profile))
    series = listed(f"{path} under {policy}" for path, policy in profile.series)
    return f"A chart: {offer.title.lower()}, for {series}. The table of timings has the numbers."
