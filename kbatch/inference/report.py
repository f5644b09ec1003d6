"""An inference profile in words: the section of a page or a terminal."""

import contextlib
import functools
from collections.abc import Iterable
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN, Estimate, calls_for_quantile
from kbatch.inference import figures
from kbatch.inference.figures import conditions_line
from kbatch.inference.profile import InferenceAnswer, InferenceProfile
from kbatch.inference.record import TimingRecord
from kbatch.page.content import Figure
from kbatch.page.numbers import (
    format_number,
    interval_text,
    join_words,
    memory_text,
    percent,
    pluralize,
)
from kbatch.page.section import Cell, Column, Fact, Note, Row, Section, Table, environment_facts

# To this share of its median, to each side, the interval of a time shall reach.
_PRECISION = 0.05
# Property of the profile, question, and what the batch size does, as the end of a sentence.
_QUESTIONS = (
    ("efficient", "90 % of the peak throughput", "is the smallest with 90 % of the peak rate"),
    ("knee", "Largest throughput over latency", "has the largest throughput over latency"),
    ("fastest", "Largest measured throughput", "had the largest throughput"),
)


def _timing_table(profile: InferenceProfile) -> Table:
    """Compute the table of the times, with that of a copy to a GPU where batches were copied."""
    copied = any(timing.copy_s is not None for timing in profile.timings)
    peaks = {(m.dtype_policy, m.batch_size): m.peak_bytes for m in profile.memory}
    rows = []
    for timing in profile.timings:
        status = "out_of_memory" if timing.outcome == "out_of_memory" else ""
        time_s, rate = timing.batch_time_s, timing.samples_per_second
        cells = [Cell(timing.call_path), Cell(timing.dtype_policy)]
        cells.append(Cell(f"{timing.batch_size:,}", timing.batch_size))
        if time_s is None or rate is None:
            cells += map(Cell, ("out of memory" if status else "not run", "", "", ""))
        else:
            tail = "n/a (bulk)"
            if not timing.bulk:
                bound = timing.latency_bound(profile.quantile)
                missing = calls_for_quantile(profile.quantile) - len(timing.latencies_s)
                tail = f"needs {missing:,} more"
                if bound is not None:
                    tail = format_number(1000 * bound)
            cells += [Cell(format_number(1000 * time_s), time_s), Cell(format_number(rate), rate)]
            cells += [Cell(tail), Cell(format_number(timing.first_call_s or 0.0))]
        peak, copy_s = peaks.get((timing.dtype_policy, timing.batch_size)), timing.copy_s
        cells.append(Cell("n/a" if peak is None else memory_text(peak)))
        cells.append(_size_effect(timing))
        if copied:
            cells.append(Cell("n/a" if copy_s is None else format_number(1000 * copy_s)))
        rows.append(Row(" ".join(cell.text for cell in cells[:3]), status, False, tuple(cells)))
    numbers = ["Batch", "ms", "Samples/s", f"p{100 * profile.quantile:g} at most (ms)"]
    numbers += ["First call (s)", "Memory", "Outputs by size", *(["Copy (ms)"] if copied else [])]
    columns = (Column("Path", False), Column("Policy", False), *(Column(n, True) for n in numbers))
    return Table("Timings", columns, tuple(rows))


def _size_effect(timing: TimingRecord) -> Cell:
    """Describe what the batch size changes in the outputs, by the largest of them."""
    if (effect := timing.size_effect) is None:
        return Cell("")
    if effect.difference is None:
        return Cell("not finite")
    text = f"{'differ by' if effect.depends else 'equal to'} {effect.difference:.1g}"
    return Cell(text, effect.difference)


class _Answer(NamedTuple):
    """A question, with the batch size that answers it or the reason why none does."""

    question: str
    words: str
    found: InferenceAnswer | None
    reason: str
    has_target: bool


def _answers(profile: InferenceProfile) -> list[_Answer]:
    """Ask a profile for the batch sizes that it knows, those of latency targets first."""
    first = profile.series[0]
    checks = [c for c in profile.checks if (c.call_path, c.dtype_policy) == first]
    asked = []
    for target_ms, quantile in dict.fromkeys((c.latency_ms, c.quantile) for c in checks):
        question = f"Within {target_ms:g} ms at the {quantile:g} quantile"
        keeps = f"is the largest with {100 * quantile:g} % of the calls within {target_ms:g} ms"
        ask = functools.partial(profile.batch_for, latency_ms=target_ms, quantile=quantile)
        asked.append((question, keeps, ask, True))
    asked += [
        (question, words, functools.partial(getattr, profile, name), False)
        for name, question, words in _QUESTIONS
    ]
    answers = []
    for question, words, ask, has_target in asked:
        try:
            found = ask()
            reason = found.reason
        except ValueError as error:
            found, reason = None, str(error)
        answers.append(_Answer(question, words, found, reason, has_target))
    return answers


def _unsettled(profile: InferenceProfile) -> list[str]:
    """Describe how many times are not known to 5 %, a line where there are such."""
    timed, rounds = 0, []
    for timing in profile.timings:
        if timing.batch_time_s is not None:
            timed, interval = timed + 1, timing.batch_time_interval_s
            ends_s = interval and interval.ends
            most_s = 2 * _PRECISION * timing.batch_time_s
            if ends_s is None or ends_s[1] - ends_s[0] > most_s:
                rounds.append(len(timing.block_medians_s))
    if not rounds:
        return []
    return [
        f"{len(rounds):,} of {pluralize(timed, 'time')} may be off by more than "
        f"{percent(_PRECISION)} (the least timed has {pluralize(min(rounds), 'round')}): give more "
        "time, or fewer sizes, call paths and policies."
    ]


def _dependence(profile: InferenceProfile) -> list[str]:
    """Describe how predictions depend on the batch size, a line where they do."""
    differing = [t for t in profile.timings if t.size_effect is not None and t.size_effect.depends]
    if not differing:
        return []
    timing, effect = differing[0], differing[0].size_effect
    found = "are not finite"
    if effect and effect.difference is not None:
        found = f"differ by {effect.difference:.1g} of the largest"
        if effect.changed_argmax:
            found += f", and {percent(effect.changed_argmax)} of the classes"
    where = f" first in layer {profile.differing_layer}" if profile.differing_layer else ""
    return [
        f"Predictions depend on the batch size: at {timing.batch_size:,} ({timing.call_path}, "
        f"{timing.dtype_policy}) outputs {found}, which is no rounding,{where}: see whether it "
        "mixes the examples of a batch, such as BatchNormalization with `training=True`, or "
        "overflows."
    ]


def _left_out(profile: InferenceProfile) -> list[str]:
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for timing in profile.timings:
        if not timing.measured:
            reason = (timing.call_path, timing.dtype_policy, timing.reason or timing.outcome)
            sizes.setdefault(reason, []).append(timing.batch_size)
    return [
        f"Not timed: {path} under {policy} at batch size {join_words(f'{s:,}' for s in of)}: "
        f"{reason}."
        for (path, policy, reason), of in sizes.items()
    ]


def _fit(profile: InferenceProfile) -> list[str]:
    try:
        latency = profile.latency
    except ValueError:  # The answers say what is missing.
        return []
    if latency.follows_line:
        peak, half = _ratio(latency.peak_throughput), _ratio(latency.half_peak_batch_size)
        words = f"t(b) = (b + n_half) / r_inf, r_inf {peak} samples/s, n_half {half} examples"
    else:
        why = "the time may not grow with the batch"
        if latency.line.departure.holds is False:
            why = f"the times deviate from it by up to {percent(latency.line.departure.worst)}"
        words = f"no line, {why}: interpolated between measured sizes"
    share = profile.disturbed_share
    left_out = f"Left out of the fit as outliers: {percent(share)} of the rounds."
    return [f"Fit: {words}.", *([left_out] if share else [])]


def _ratio(ratio: Estimate[float | None]) -> str:
    if ratio.value is None:
        return "n/a (lost in noise)"
    return f"{format_number(ratio.value)} (95 % interval {interval_text(ratio)})"


def inference_section(profile: InferenceProfile) -> Section:
    environment, answers, (path, policy) = profile.environment, _answers(profile), profile.series[0]
    known = next((answer for answer in answers if answer.found is not None), None)
    headline = f"No batch size can be named for {path} under {policy}: {answers[0].reason}"
    if known is not None and known.found is not None:
        unmeasured = ", by the fit: it was not measured" if known.found.extrapolated else ""
        named = f"Batch size {known.found.batch_size:,} {known.words}"
        headline = f"{named} ({path}, {policy}){unmeasured}."
    sizes = sorted({t.batch_size for t in profile.timings if t.measured})
    series = join_words(f"{path} under {policy}" for path, policy in profile.series)
    compared = f"Nothing could be timed of {series}."
    if sizes:
        compared = f"Measured: batch sizes from {sizes[0]:,} to {sizes[-1]:,} by {series}."
    return Section(
        kind="inference",
        name=profile.model_name,
        headline=headline,
        lead=tuple(filter(None, (_certainty(known), _memory(profile)))),
        details=(compared, *_fit(profile)),
        conditions=conditions_line(profile),
        figures=_figures(profile),
        tables=(_answer_table(answers, best=known), _timing_table(profile)),
        notes=_notes(profile),
        command=environment.command if environment else None,
        settings=(
            Fact("call paths", ", ".join(dict.fromkeys(path for path, _ in profile.series))),
            Fact("dtype policies", ", ".join(dict.fromkeys(p for _, p in profile.series))),
            Fact("quantile of the latency", f"{profile.quantile:g}"),
        ),
        environment=environment_facts(environment),
    )


def _certainty(known: _Answer | None) -> str:
    if known is None or known.found is None:
        return ""
    if known.has_target:
        return f"{'Verified by' if known.found.verified else 'Not verified:'} {known.reason}."
    if known.found.interval is None:
        return "It has no interval: it is the best of the sizes that were measured."
    return f"The 95 % interval of that size is {interval_text(known.found.interval)}."


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


def _answer_table(answers: Iterable[_Answer], *, best: _Answer | None) -> Table:
    rows = []
    for answer in answers:
        size, span, found = Cell("n/a"), Cell("n/a"), answer.found
        if found is not None:
            unmeasured = " (not measured)" if found.extrapolated else ""
            size = Cell(f"{found.batch_size:,}{unmeasured}", found.batch_size)
            if found.interval is not None:
                span = Cell(interval_text(found.interval), found.interval.low)
        cells = (Cell(answer.question), size, span, Cell(answer.reason))
        rows.append(Row(answer.question, "", answer is best, cells))
    columns = [Column("Question", False), Column("Batch size", True), Column("95 % interval", True)]
    columns.append(Column("Where it comes from", False))
    return Table("Answers", tuple(columns), tuple(rows))


def _notes(profile: InferenceProfile) -> tuple[Note, ...]:
    texts = [*_dependence(profile), *profile.notes]
    if profile.twin is not None:
        floor = profile.noise_floor
        texts.append(
            f"The noise floor (A/A test) is unknown: it takes {FEWEST_VALUES_OF_A_MEDIAN} rounds, "
            f"and there was time for {len(profile.twin.log_ratios)}. Raise `time_budget_s`."
            if floor is None
            else f"Equal settings differed by up to {percent(floor)} here (A/A test): smaller "
            "differences mean nothing."
        )
    for change in profile.output_changes:
        of = f"Outputs under {change.dtype_policy}, {pluralize(change.examples, 'example')}"
        mean, largest = change.mean_relative, change.largest_relative
        texts.append(
            f"{of}: not finite, or all zeros in float32."
            if mean is None or largest is None
            else f"{of}: {format_number(100 * mean)} % from those in float32 on average, at most "
            f"{format_number(100 * largest)} % of the largest output."
        )
    texts += [*_unsettled(profile), *_left_out(profile)]
    return tuple(Note("", "", text) for text in texts)


def _figures(profile: InferenceProfile) -> tuple[Figure, ...]:
    found = []
    for name, (title, height_in, compute) in figures.FIGURES.items():
        # The error tells a caller what to measure; a report leaves the figure out.
        with contextlib.suppress(ValueError):
            compute(profile)
            draw = functools.partial(getattr(figures, f"plot_inference_{name}"), profile)
            shape = "alone" if name == "throughput" else "small"
            file = f"inference-{name.replace('_', '-')}"
            found.append(Figure(file, title, height_in, draw, shape=shape))
    return tuple(found)
