"""A recommendation as one page: the answer, why, what another size costs, how sure it is."""

import textwrap

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import counted, listed, readable, setting
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.recommendation.choice import CUT_SHORT, DIVERGED, PILOT_DIVERGED, Estimate, SizeOutlook
from kbatch.recommendation.evidence import (
    binding_line,
    certainty_lines,
    diverged_text,
    limit_lines,
    untested_text,
)
from kbatch.recommendation.figure import HEIGHT_IN, alt_text, limits_info, plot_limits
from kbatch.recommendation.record import Recommendation
from kbatch.study.names import SETTING_NAMES, followed_value

_WIDTH = 88
_WIDE = 1.1
# What makes a pilot longer, by what ended it.
_LONGER = {
    "budget": ": a larger `budget_s` gives a longer pilot",
    "epochs": ": more `epochs` give a longer pilot",
    "progress": ", though the pilot went on until its loss no longer fell",
}
COST_TITLES = ("batch", "micro-batch", "samples/s", "updates", "seconds", "relative")
LEARNING_RATE_COST = (
    "Learning rate: not measured. Were it the best one, half of it would need 1.33 times the "
    "updates, and twice of it make no progress (McCandlish et al. 2018, section 2.2, for SGD)."
)


def recommendation_text(recommendation: Recommendation) -> str:
    """Write a recommendation as a page of plain text.

    >>> print(recommendation_text(kbatch.recommend(build, x, y)))
    """
    blocks = [
        [
            answer_line(recommendation),
            *settings_line(recommendation),
            *binding_line(recommendation),
        ],
        ["Why", *_indented(limit_lines(recommendation))],
        _costs(recommendation),
        _certainty(recommendation),
        [_took(recommendation)],
    ]
    lines = [[part for line in block for part in _wrapped(line)] for block in blocks if block]
    return "\n\n".join("\n".join(block) for block in lines)


def _certainty(recommendation: Recommendation) -> list[str]:
    lines = certainty_lines(recommendation)
    return ["How sure", *_indented(lines)] if lines else []


def answer_line(recommendation: Recommendation) -> str:
    """Say in a few sentences which sizes to use, or why none can be named."""
    size, micro = recommendation.batch_size, recommendation.micro_batch_size
    if micro is None:
        return f"No size can be recommended, because {_reason(recommendation)}."
    if size is None:
        return _unknown_size(recommendation, micro)
    parts = "the whole batch at once" if micro == size else f"{-(-size // micro):,} to an update"
    verb = "Keep" if size == recommendation.base_batch_size else "Use"
    rate = learning_rate_text(recommendation, size)
    sentences = [
        *_older(recommendation),
        f"{verb} batch size {size:,}, micro-batch size {micro:,} ({parts}) and {rate}.",
    ]
    decision = recommendation.decision
    if decision.as_good:
        sentences.append(f"{listed(f'{other:,}' for other in decision.as_good)} may be as good.")
    if len(decision.sizes) == 1:
        sentences.append("No other size was timed.")
    if decision.untested:
        sentences.append(untested_text(decision.untested[0], decision))
    return " ".join(sentences)


def learning_rate_text(recommendation: Recommendation, batch_size: int) -> str:
    """Write the learning rate of the recommended batch size."""
    ratio = recommendation.decision.learning_rate_ratio or 1.0
    if recommendation.scheduled:
        kappa = batch_size / recommendation.base_batch_size
        return (
            f"the learning-rate schedule with its rates times {setting(ratio)} and its steps "
            f"divided by {setting(kappa)}"
        )
    base = recommendation.base_learning_rate
    if base is None:
        return f"{setting(ratio)} times the learning rate"
    return f"learning rate {setting(base * ratio)}"


def _older(recommendation: Recommendation) -> list[str]:
    if not recommendation.decision.older:
        return []
    return ["The version of kbatch that wrote this file answered:"]


def _unknown_size(recommendation: Recommendation, micro: int) -> str:
    older, missing = _older(recommendation), recommendation.decision.missing
    start = " ".join([*older, "The batch size cannot be told, because"])
    fastest = f"the device is fastest with {counted(micro, 'example')} at once."
    reason = _missing_text(recommendation)
    if missing == PILOT_DIVERGED or recommendation.diverged:
        return f"{start} {reason}; {fastest}"
    return (
        f"{start} {reason}. Until it is known, keep batch size "
        f"{recommendation.base_batch_size:,}, which the learning rate suits; {fastest}"
    )


def _missing_text(recommendation: Recommendation) -> str:
    pilot = recommendation.pilot
    if pilot is None:
        return recommendation.unknown.get("gradient noise", "there was no pilot")
    if recommendation.diverged:
        return diverged_text(pilot)
    more = _LONGER.get(pilot.ended_by, "")
    match recommendation.decision.missing:
        case "few updates":
            made = counted(pilot.updates, "update")
            found = f"reached its loss after {pilot.updates_to_target:,} of its {made}"
            return f"the pilot {found}, too few to compare sizes by{more}"
        case "no progress":
            return (
                f"the pilot's loss fell by no more than its scatter in "
                f"{counted(pilot.updates, 'update')}{more}"
            )
        case _:
            return "neither the gradient noise nor the trained sizes showed it"


def _reason(recommendation: Recommendation) -> str:
    return recommendation.unknown.get("hardware saturation", "no train step was timed")


def cost_rows(recommendation: Recommendation) -> list[tuple[str, ...]]:
    """Write what the sizes cost that were trained, a row each under `COST_TITLES`."""
    return [_row(row) for row in trained_sizes(recommendation)]


def trained_sizes(recommendation: Recommendation) -> list[SizeOutlook]:
    """List the sizes that were trained, ascending."""
    return [row for row in recommendation.decision.sizes if row.ended_by is not None]


def cost_title(recommendation: Recommendation) -> str:
    """Say what the rows compare."""
    return f"What the trained sizes cost, to {_target(recommendation)}"


def _costs(recommendation: Recommendation) -> list[str]:
    """Write the table; nothing without a batch size."""
    found = cost_rows(recommendation)
    if not found:
        return []
    rows = [COST_TITLES, *found]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COST_TITLES))]
    best = f"{recommendation.batch_size:,}"
    table = [
        "  "
        + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        + (" <" if row[0] == best else "")
        for row in rows
    ]
    return [cost_title(recommendation), *table, f"  {LEARNING_RATE_COST}"]


def _row(row: SizeOutlook) -> tuple[str, ...]:
    costs = (row.updates, row.seconds, row.relative_time)
    if row.ended_by == DIVERGED:
        cells = ["failed", "", ""]
    elif row.ended_by == CUT_SHORT:
        cells = [f"> {readable(cost.value or 0.0, 2)}" for cost in costs]
    else:
        cells = [_spread(cost) for cost in costs]
    return (
        f"{row.batch_size:,}",
        f"{row.micro_batch_size:,}",
        readable(row.samples_per_second.value or 0.0),
        *cells,
    )


def _target(recommendation: Recommendation) -> str:
    """Name the loss that the pilot came to."""
    pilot = recommendation.pilot
    if pilot is None or pilot.target is None:
        return "the end of the pilot"
    return f"{'held-out' if pilot.has_held_out else 'training'} loss {readable(pilot.target)}"


def _spread(estimate: Estimate) -> str:
    interval = estimate.interval
    if interval is not None and interval.low == interval.high == estimate.value == 1:
        return "1"  # The size that the others are compared with.
    span = _ends(interval) if interval else ""
    if estimate.value is None:
        return span or "n/a"
    return f"{readable(estimate.value)} ({span})" if span else readable(estimate.value)


def _ends(interval: Interval) -> str:
    # Wide ones need no third digit.
    digits = 2 if interval.high > _WIDE * interval.low else 3
    return f"{readable(interval.low, digits)} to {readable(interval.high, digits)}"


def _took(recommendation: Recommendation) -> str:
    parts = [f"{name} {seconds:.0f} s" for name, seconds in recommendation.durations_s.items()]
    return f"Measured in {recommendation.duration_s:.0f} s: {listed(parts)}." if parts else ""


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _wrapped(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= _WIDTH or "   " in line.strip():
        return [line]  # A row of the table stays whole.
    later = f"{indent}  " if indent else ""
    return textwrap.wrap(line, _WIDTH, subsequent_indent=later, break_on_hyphens=False)


_COLUMNS = (
    Column("Batch size", True),
    Column("Micro-batch size", True),
    Column("Samples/s", True),
    Column("Updates", True),
    Column("Seconds", True),
    Column("Relative time", True),
)


def recommendation_section(recommendation: Recommendation) -> Section:
    """Compute what a report says of a recommendation."""
    environment = recommendation.environment
    return Section(
        kind="recommendation",
        name=recommendation.model_name,
        headline=answer_line(recommendation),
        lead=(*settings_line(recommendation), *binding_line(recommendation)),
        details=tuple(limit_lines(recommendation)),
        conditions="",
        figures=(_figure(recommendation),),
        tables=_tables(recommendation),
        notes=tuple(Note("", "", line) for line in _notes(recommendation)),
        command=environment.command if environment else None,
        settings=_settings(recommendation),
        environment=environment_facts(environment),
    )


def _figure(recommendation: Recommendation) -> Figure:
    return Figure(
        "limits",
        "The limits of the batch size",
        HEIGHT_IN,
        lambda ax: plot_limits(recommendation, ax),
        alt_text(limits_info(recommendation)),
    )


def _tables(recommendation: Recommendation) -> tuple[Table, ...]:
    texts = cost_rows(recommendation)
    if not texts:
        return ()
    rows = []
    for i, (row, cost) in enumerate(zip(texts, trained_sizes(recommendation), strict=True)):
        keys = (
            cost.batch_size,
            cost.micro_batch_size,
            cost.samples_per_second.value,
            cost.updates.value,
            cost.seconds.value,
            cost.relative_time.value,
        )
        cells = tuple(Cell(text, key) for text, key in zip(row, keys, strict=True))
        rows.append(Row(str(i), "", cost.batch_size == recommendation.batch_size, cells))
    title = cost_title(recommendation)
    return (Table(title, _COLUMNS, tuple(rows), best_means="the recommendation"),)


def _notes(recommendation: Recommendation) -> list[str]:
    choices = [LEARNING_RATE_COST] if trained_sizes(recommendation) else []
    return [*choices, *certainty_lines(recommendation)]


def _settings(recommendation: Recommendation) -> tuple[Fact, ...]:
    return (
        Fact("optimizer", recommendation.optimizer),
        Fact("learning rate of the model", _rate(recommendation)),
        Fact("batch size that it suits", f"{recommendation.base_batch_size:,}"),
        Fact("learning-rate rule", recommendation.learning_rate_rule or "none"),
        Fact("dtype policy", recommendation.dtype_policy),
        Fact("budget", f"{setting(recommendation.budget_s)} s"),
    )


def _rate(recommendation: Recommendation) -> str:
    rate = recommendation.base_learning_rate
    if recommendation.scheduled:
        return "a schedule"
    return "n/a (not a single number)" if rate is None else setting(rate)


def settings_line(recommendation: Recommendation) -> list[str]:
    """Say what to set besides the learning rate, nothing where the size was trained without."""
    size = recommendation.batch_size
    for check in recommendation.checks:
        scaling = check.scaling
        if check.batch_size != size or scaling is None:
            continue
        found = {name: followed_value(scaling, name) for name in scaling.follow_batch_size or ()}
        parts = [f"{SETTING_NAMES[name]} to {value}" for name, value in found.items() if value]
        if parts:
            return [f"Set {listed(parts)} as well: batch size {size:,} was trained like this."]
    return []
