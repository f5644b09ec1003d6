"""What a report says of an inference profile."""

from kbatch.document.content import Fact, Note, Section
from kbatch.document.environment import environment_facts
from kbatch.document.number_text import listed, memory_text, percent, readable
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.inference.figures.common import conditions_line
from kbatch.inference.inference_answers_section import Answer, answers
from kbatch.inference.inference_figures import inference_figures
from kbatch.inference.inference_record import InferenceProfile
from kbatch.inference.inference_rows import inference_rows
from kbatch.inference.inference_text import left_out_lines, unsettled_lines

# Columns of the rows that hold words.
_TEXT_COLUMNS = ("path", "policy")


def inference_section(profile: InferenceProfile) -> Section:
    """Computes what a report says of an inference profile."""
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
    """Says where memory ended the sizes, an empty text where it did not."""
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
    """Sets the keys of batch size, time and rate among those of all columns."""
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
