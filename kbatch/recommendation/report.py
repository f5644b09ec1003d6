"""A recommendation as one page: the answer, why, what another size costs, how sure it is."""

import functools
import textwrap

from kbatch.document.numbers import (
    format_number,
    in_brackets,
    interval_text,
    join_words,
    memory_text,
    percent,
    pluralize,
    setting,
)
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.memory.search import REACHED_MOST
from kbatch.recommendation.choice import (
    CUT_SHORT,
    DIVERGED,
    BatchDecision,
    Estimate,
    SizeOutlook,
    UntestedSize,
)
from kbatch.recommendation.figure import HEIGHT_IN, plot_limits
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION
from kbatch.recommendation.pilot_record import PILOT_DIVERGED
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
_ENDS = {
    "progress": "when its second half had brought little progress",
    "budget": "when its budget was spent, while its loss was still falling",
    "epochs": "after the epochs that it was given",
    "diverged": "when its loss became NaN",
}
_MEANINGS = {
    MEMORY: "with more of it more examples would fit at once, and training would be faster.",
    SATURATION: "the device is nearly as fast as it gets{doubled}",
    NOISE: (
        "the device would run faster on larger batches, but waste more of their examples{doubled}"
    ),
    INPUT: (
        "the device waits for data, and a larger batch cannot change that. `kbatch input` shows "
        "what can."
    ),
}
_EPOCHS = (
    "the data set is small, and each epoch takes {epoch} to start and end, whatever the batch. A "
    "`tf.data.Dataset` with `.repeat()`, and `steps_per_epoch` in `fit`, makes epochs longer."
)
# The columns of the table, on a page of text and in a report.
_COLUMNS = {
    "batch": "Batch size",
    "micro-batch": "Micro-batch size",
    "samples/s": "Samples/s",
    "updates": "Updates",
    "seconds": "Seconds",
    "relative": "Relative time",
}
_LEARNING_RATE_COST = (
    "Learning rate: not measured. If it is the best one, halving it needs 1.33 times the "
    "updates, and doubling it makes no progress (McCandlish et al. 2018, section 2.2, for SGD)."
)


def recommendation_text(recommendation: Recommendation) -> str:
    found, rows, lines = recommendation, _cost_rows(recommendation), []
    if rows:
        table = [tuple(_COLUMNS), *(texts for _, texts in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            + (" <" if row[0] == f"{found.batch_size:,}" else "")
            for row in table
        ]
        lines.append(_LEARNING_RATE_COST)
    parts = [f"{name} {seconds:.0f} s" for name, seconds in found.durations_s.items()]
    took = [f"Measured in {found.duration_s:.0f} s: {join_words(parts)}."] if parts else []
    answer = [answer_line(found), *settings_line(found), *binding_line(found)]
    titled = {"Why": limit_lines(found), _cost_title(found): lines}
    titled["How sure"] = certainty_lines(found)
    blocks = [[title, *(f"  {line}" for line in of)] for title, of in titled.items() if of]
    texts = ["\n".join(map(_wrapped, block)) for block in (answer, *blocks, took) if block]
    return "\n\n".join(texts)


def _wrapped(line: str) -> str:
    if len(line) <= _WIDTH or "   " in line.strip():
        return line  # A row of the table stays whole.
    later = "    " if line.startswith(" ") else ""
    return textwrap.fill(line, _WIDTH, subsequent_indent=later, break_on_hyphens=False)


def recommendation_section(recommendation: Recommendation) -> Section:
    found, environment, rows = recommendation, recommendation.environment, []
    for i, (row, texts) in enumerate(_cost_rows(found)):
        estimates = (row.samples_per_second, row.updates, row.seconds, row.relative_time)
        keys = (row.batch_size, row.micro_batch_size, *(one.value for one in estimates))
        cells = tuple(Cell(text, key) for text, key in zip(texts, keys, strict=True))
        rows.append(Row(str(i), "", row.batch_size == found.batch_size, cells))
    columns = tuple(Column(title, True) for title in _COLUMNS.values())
    table = Table(_cost_title(found), columns, tuple(rows), best_means="the recommendation")
    rate = found.base_learning_rate
    rate_text = "n/a (not a single number)" if rate is None else setting(rate)
    draw = functools.partial(plot_limits, found)
    notes = [*([_LEARNING_RATE_COST] if rows else []), *certainty_lines(found)]
    return Section(
        kind="recommendation",
        name=found.model_name,
        headline=answer_line(found),
        lead=(*settings_line(found), *binding_line(found)),
        details=tuple(limit_lines(found)),
        conditions="",
        figures=(Figure("limits", "The limits of the batch size", HEIGHT_IN, draw),),
        tables=(table,) if rows else (),
        notes=tuple(Note("", "", line) for line in notes),
        command=environment.command if environment else None,
        settings=(
            Fact("optimizer", found.optimizer),
            Fact("learning rate of the model", "a schedule" if found.scheduled else rate_text),
            Fact("batch size that it suits", f"{found.base_batch_size:,}"),
            Fact("learning-rate rule", found.learning_rate_rule or "none"),
            Fact("dtype policy", found.dtype_policy),
            Fact("budget", f"{setting(found.budget_s)} s"),
        ),
        environment=environment_facts(environment),
    )


def answer_line(found: Recommendation) -> str:
    size, micro, decision = found.batch_size, found.micro_batch_size, found.decision
    if micro is None:
        reason = found.unknown.get(SATURATION, "no train step was timed")
        return f"No size can be recommended, because {reason}."
    older = ["The version of kbatch that wrote this file answered:"] if decision.older else []
    if size is None:
        fastest = f"the device is fastest with {pluralize(micro, 'example')} at once."
        if not found.diverged:
            fastest = (
                f"Until it is known, keep batch size {found.base_batch_size:,}, which the learning "
                f"rate suits; {fastest}"
            )
        end = ";" if found.diverged else "."
        start = " ".join([*older, "No batch size can be named yet, because"])
        return f"{start} {_missing_text(found)}{end} {fastest}"
    parts = "the whole batch at once" if micro == size else f"{-(-size // micro):,} to an update"
    verb = "Keep" if size == found.base_batch_size else "Use"
    ratio, base = decision.learning_rate_ratio or 1.0, found.base_learning_rate
    if found.scheduled:
        rate = (
            f"the learning-rate schedule with its rates times {setting(ratio)} and its steps "
            f"divided by {setting(size / found.base_batch_size)}"
        )
    elif base is None:
        rate = f"{setting(ratio)} times the learning rate"
    else:
        rate = f"learning rate {setting(base * ratio)}"
    sizes = f"batch size {size:,}, micro-batch size {micro:,} ({parts})"
    sentences = [*older, f"{verb} {sizes} and {rate}."]
    if as_good := [f"{other:,}" for other in decision.as_good]:
        sentences.append(f"{join_words(as_good)} may be as good.")
    if len(decision.sizes) == 1:
        sentences.append("No other size was timed.")
    if decision.untested:
        sentences.append(_untested_text(decision.untested[0], decision))
    return " ".join(sentences)


def _missing_text(found: Recommendation) -> str:
    pilot = found.pilot
    if pilot is None:
        return found.unknown.get(NOISE, "there was no pilot")
    more, made = _LONGER.get(pilot.ended_by, ""), pluralize(pilot.updates, "update")
    match PILOT_DIVERGED if found.diverged else found.decision.missing:
        case "pilot diverged":
            return (
                f"the pilot's loss became NaN within {made}: look for values in the data that are "
                "not finite, or give the model a smaller learning rate"
            )
        case "few updates":
            reached = f"reached its loss after {pilot.updates_to_target:,} of its {made}"
            return f"the pilot {reached}, too few to compare sizes{more}"
        case "no progress":
            return f"the pilot's loss fell by no more than its scatter in {made}{more}"
        case _:
            return "neither the gradient noise nor the trained sizes showed it"


def settings_line(found: Recommendation) -> list[str]:
    """Say what to set besides the learning rate, nothing where the size was trained without."""
    size = found.batch_size
    for scaling in [c.scaling for c in found.checks if c.batch_size == size and c.scaling]:
        values = {name: followed_value(scaling, name) for name in scaling.follow_batch_size or ()}
        parts = [f"{SETTING_NAMES[name]} to {value}" for name, value in values.items() if value]
        if parts:
            return [f"Set {join_words(parts)} as well: batch size {size:,} was trained like this."]
    return []


def binding_line(found: Recommendation) -> list[str]:
    if len(found.binding) != 1:
        names = join_words(found.binding) if found.binding else ""
        line = f"Which limit binds is not clear: {names} are too close to separate with what was"
        return [f"{line} measured."] if names else []
    (name,) = found.binding
    subject = f"The {name}" if name == INPUT else name.capitalize()
    time = found.fit_times[-1] if name == INPUT and found.fit_times else None
    if time and time.epoch_share_s > time.wait_s:
        return [f"{subject} binds: {_EPOCHS.format(epoch=_ms(time.epoch_s))}"]
    doubled, size, noise = ".", found.batch_size, found.critical.value
    ways = {way.batch_size: way for way in found.fastest}
    if size is not None and noise is not None and {size, 2 * size} <= ways.keys():
        faster = ways[2 * size].samples_per_second / ways[size].samples_per_second
        worth = (noise + size) / (noise + 2 * size)
        if faster * worth <= 1:  # Else twice the batch would win by these two alone.
            doubled = (
                f": at {2 * size:,} it would make {format_number(faster)} times the samples/s, "
                f"each worth {format_number(worth)} of one at {size:,}."
            )
    return [f"{subject} binds: {_MEANINGS[name].format(doubled=doubled)}"]


def limit_lines(found: Recommendation) -> list[str]:
    return [_memory_line(found), _saturation_line(found), _noise_line(found), _input_line(found)]


def _memory_line(found: Recommendation) -> str:
    memory, least = found.memory, "" if found.memory_ends else "at least "
    if memory is None:
        return _cannot_tell(found, MEMORY)
    peak = f"{memory_text(memory.peak_memory_bytes)} of {memory_text(memory.limit_bytes)}"
    # The search's own argument is none of a recommendation's.
    reached_most = memory.reason == REACHED_MOST
    reason = "reached the largest batch size that was tried" if reached_most else memory.reason
    examples = pluralize(memory.max_batch_size, "example")
    return f"Memory allows {least}{examples} at once, {peak} ({reason})."


def _saturation_line(found: Recommendation) -> str:
    saturation = found.saturation
    if saturation is None:
        if not found.updates:
            return _cannot_tell(found, SATURATION)
        return (
            "Hardware saturation: cannot tell, because it takes two sizes that go through whole, "
            "timed in several rounds."
        )
    whole = [update for update in found.updates if not update.accumulated]
    fastest = max(whole, key=lambda update: update.samples_per_second)
    peak = f"{format_number(fastest.samples_per_second)} samples/s at {fastest.batch_size:,}"
    size, largest = saturation.batch_size, whole[-1].batch_size
    if size is None:
        return (
            "Saturation: cannot tell, because the time of a step does not grow with its examples "
            f"as far as was measured; {peak} was the fastest."
        )
    between = in_brackets(saturation.interval, 2)
    line = (
        f"The device saturates at {pluralize(size, 'example')} at once{between}: 90 % of its peak"
    )
    if saturation.extrapolated and size > largest:
        line = (
            f"The device is not saturated by {largest:,} examples at once, the most that were "
            f"timed: 90 % of its peak would need about {format_number(size, 2)}{between}"
        )
    return f"{line}. The fastest was {peak}."


def _noise_line(found: Recommendation) -> str:
    """Describe from which batch size on examples are wasted."""
    noise, critical = found.noise_scale, found.decision.critical
    pilot, size = found.pilot, found.batch_size
    if pilot is None:
        return _cannot_tell(found, NOISE)
    if critical is not None:
        value = "unresolved"
        if noise.value is not None:
            value = (
                f"{format_number(noise.value, 2)}{in_brackets(noise.interval, 2)}; the two agree "
                "where the learning rate is the best one at each size"
            )
        return (
            f"Beyond {format_number(critical.value or 0.0, 2)} "
            f"examples{in_brackets(critical.interval, 2)} more than half of a batch's examples are "
            "wasted, judging by the updates that the trained sizes needed. The gradient "
            f"noise scale of the pilot is {value}."
        )
    measured = (
        f"in a pilot of {pluralize(pilot.updates, 'update')} at batch size {pilot.batch_size:,}"
    )
    if noise.value is None:
        if found.diverged:
            return f"Gradient noise: cannot tell, because {_missing_text(found)}."
        least = f"; it is at least {format_number(noise.at_least, 2)}" if noise.at_least else ""
        return (
            "Gradient noise: cannot tell, because the noise scale is unresolved: the mean gradient "
            f"was lost in its noise {measured}{least}."
        )
    how = f"measured {measured}"
    if size is not None:
        share = percent(noise.value / (noise.value + size))
        how = (
            f"at batch size {size:,} an example counts {share} of what it would in the smallest "
            f"batch. Measured {measured}"
        )
    return (
        f"Beyond {format_number(noise.value, 2)} examples{in_brackets(noise.interval, 2)}, the "
        f"gradient noise scale, more than half of a batch's examples are wasted; {how}."
    )


def _input_line(found: Recommendation) -> str:
    """Describe what the input pipeline delivers, and what `fit` takes beside the train step."""
    sentences, profile = [], found.pipeline
    rate = profile and profile.pipeline.samples_per_second
    if profile is not None and rate is not None:
        sentences.append(
            f"The input pipeline delivers {format_number(rate.value, 2)} samples/s"
            f"{in_brackets(rate.interval, 2)} in batches of {profile.batch_size:,}."
        )
        bounds = profile.rate_bounds
        if bounds is not None and not profile.is_even:
            span = interval_text(bounds, 2)
            sentences.append(f"A long reading gave {span} samples/s, with its pauses.")
    for time in found.fit_times[-1:]:
        parts = [f"{_ms(time.step_s)} for the train step"]
        parts.append(f"{_ms(time.wait_s)} waiting for data and in Keras itself")
        if time.epoch_batches:
            parts.append(
                f"{_ms(time.epoch_share_s)} as its share of the start and end of an epoch "
                f"({_ms(time.epoch_s)} for {time.epoch_batches:,} batches)"
            )
        sentences.append(f"In `fit` an update of {time.batch_size:,} takes {join_words(parts)}.")
    return " ".join(sentences) or _cannot_tell(found, INPUT)


def _ms(seconds: float) -> str:
    return f"{format_number(1000 * seconds, 2)} ms"


def _cannot_tell(found: Recommendation, limit: str) -> str:
    reason = found.unknown.get(limit, "it was not measured")
    return f"{limit.capitalize()}: cannot tell, because {reason}."


def certainty_lines(found: Recommendation) -> list[str]:
    pilot, decision, size = found.pilot, found.decision, found.batch_size
    lines, sizes = [], sorted({update.batch_size for update in found.updates} | {size or 0} - {0})
    if pilot is not None and decision.missing is None:
        lines.append(_trained_line(found))
    if size is not None and not decision.older and len(decision.sizes) > 1:
        lines += [_untested_text(untested, decision) for untested in decision.untested[1:]]
        if not decision.untested:
            lines.append("No other size that was timed is likely to be more than 5 % faster.")
    timed = [update.batch_size for update in found.updates]
    if len(set(timed)) > 1 and size in (min(timed), max(timed)):
        end = "smallest" if size == min(timed) else "largest"
        lines.append(f"It is the {end} size that was timed: one beyond it may be better.")
    if size is not None:
        lines.append(_learning_rate_line(found))
    if pilot is not None and found.diverged:
        lines.append(f"The pilot ended {_ENDS['diverged']}: everything here is from before that.")
    elif pilot is not None:
        lines.append(
            f"The pilot ended {_ENDS[pilot.ended_by]}. Its noise scale is that of the late half of "
            f"the {pilot.useful_updates:,} updates in which its loss made "
            f"{percent(pilot.target_share)} of its progress, where the target lies. The noise "
            "scale grows during training: a much longer training may gain from a larger batch "
            "towards its end."
        )
    if pilot is not None and found.optimizer != "SGD":
        lines.append(
            "The noise scale is derived for SGD. Whether it gives a useful batch size under "
            f"{found.optimizer} is disputed: Merrill et al. (2025, arXiv:2505.23971) train on from "
            "one checkpoint at several batch sizes instead."
        )
    if size is not None and len(sizes) > 1:
        place = sizes.index(size)
        near = join_words(str(one) for one in sizes[max(0, place - 1) : place + 2])
        lines.append(
            f"This rests on few short runs of each size. To check it, train at {near} with "
            "`kbatch.BatchSizeTuner`."
        )
    return [*lines, *(f"Note: {note}" for note in found.notes)]


def _untested_text(untested: UntestedSize, decision: BatchDecision) -> str:
    """Say how much faster a size may be that did not reach the loss, and what would settle it."""
    made = {row.batch_size: row.ended_by for row in decision.sizes}
    why = "cut short" if made.get(untested.batch_size) else "not trained"
    text = (
        f"Batch size {untested.batch_size:,} was {why} and may be up to "
        f"{format_number(untested.most_speedup, 2)} times faster "
        f"({format_number(untested.speedup, 2)} times expected)"
    )
    if untested.budget_s is None:
        return f"{text}."
    return f"{text}: give `budget_s={setting(untested.budget_s)}` to train it to the loss."


_BROKEN = {"diverged": "where the loss became NaN", "failed": "which failed"}


def _trained_line(found: Recommendation) -> str:
    pilot, why = found.pilot, found.unknown.get(OTHER_SIZES)
    ended = f" No further one: {why}." if why else ""
    if pilot is None or not found.checks:
        return f"No size but the pilot's was trained.{ended}"
    reached, short, broken = {pilot.batch_size: [pilot.updates_to_target]}, {}, {}
    for check in found.checks:
        if check.ended_by in _BROKEN:
            broken[check.batch_size] = _BROKEN[check.ended_by]
        else:
            counts = reached if check.reached else short
            counts.setdefault(check.batch_size, []).append(check.updates)
    runs = []
    for size in sorted({*reached, *short, *broken}):
        for counts, word in ((reached, ""), (short, "not in ")):
            if size in counts:
                made = join_words(f"{updates:,}" for updates in counts[size])
                runs.append(f"{word}{made} updates at {size:,}")
        if size in broken:
            runs.append(f"not at {size:,}, {broken[size]}")
    loss = "held-out" if pilot.has_held_out else "training"
    return (
        f"Trained from the start to the pilot's {loss} loss, {format_number(pilot.target or 0.0)}: "
        f"{join_words(runs)}. Another seed may need 10 % more or fewer updates, so the table "
        f"averages the runs of a size and those of its neighbours.{ended}"
    )


def _learning_rate_line(found: Recommendation) -> str:
    ratio, own = found.decision.learning_rate_ratio or 1.0, found.base_learning_rate
    value = "" if own is None or found.scheduled else f" {setting(own)}"
    base = f"{found.base_batch_size:,}"
    line = f"The model's learning rate{value} is assumed to suit batch size {base}"
    rule = found.learning_rate_rule
    if rule is None or ratio == 1:
        return f"{line}, and is left as it is."
    how = {"linear": "in proportion to it", "sqrt": "with its square root"}[rule]
    words = f"{'grows' if ratio > 1 else 'shrinks'} {how}"
    return f"{line}; for {found.optimizer} it {words} ({setting(ratio)} times)."


def _cost_rows(found: Recommendation) -> list[tuple[SizeOutlook, tuple[str, ...]]]:
    rows = []
    for row in [row for row in found.decision.sizes if row.ended_by is not None]:
        costs = (row.updates, row.seconds, row.relative_time)
        if row.ended_by == DIVERGED:
            cells = ["failed", "", ""]
        elif row.ended_by == CUT_SHORT:
            cells = [f"> {format_number(cost.value or 0.0, 2)}" for cost in costs]
        else:
            cells = [_spread(cost) for cost in costs]
        rate = format_number(row.samples_per_second.value or 0.0)
        rows.append((row, (f"{row.batch_size:,}", f"{row.micro_batch_size:,}", rate, *cells)))
    return rows


def _cost_title(found: Recommendation) -> str:
    pilot, target = found.pilot, "the end of the pilot"
    if pilot is not None and pilot.target is not None:
        loss = "held-out" if pilot.has_held_out else "training"
        target = f"{loss} loss {format_number(pilot.target)}"
    return f"What the trained sizes cost, to {target}"


def _spread(estimate: Estimate) -> str:
    interval, value = estimate.interval, estimate.value
    if interval is None:
        return "n/a" if value is None else format_number(value)
    if interval.low == interval.high == value == 1:
        return "1"  # The size that the others are compared with.
    # Wide ones need no third digit.
    digits = 2 if interval.high > _WIDE * interval.low else 3
    span = interval_text(interval, digits)
    return span if value is None else f"{format_number(value)} ({span})"
