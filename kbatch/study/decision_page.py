"""The page of a decision: what to take, how sure that is, a table, and what would settle it."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.rate_search import FACTOR_NAME, FACTORS
from kbatch.page.numbers import (
    format_number,
    in_brackets,
    join_words,
    percent,
    pluralize,
    setting,
)
from kbatch.records.notes import Note
from kbatch.records.training_run import COST_NAMES, ExecutionRecord
from kbatch.study.comparison import as_compared, is_share, rate_factor
from kbatch.study.decision import Decision, Page, Row, SizeChange, starting_rate
from kbatch.study.limits import binding_limits
from kbatch.study.names import (
    Conditions,
    TrialNames,
    at_most,
    budget_text,
    decay_text,
    diverged,
    is_fraction,
    metric_words,
    missing_text,
    outcome,
    trial_names,
)
from kbatch.study.table import COMPARED, objective_column, rows_of
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds

# Ratios of times by plain `fit` and in the search that differ by less are one.
MUCH_APART = 0.1
# Lines of the table, so that a page has 15 at most.
_MOST_ROWS = 7


def with_page(
    found: Decision,
    trials: Sequence[TrialRecord],
    *,
    conditions: Conditions | None,
    settings: Mapping[str, Any],
    missing: int,
    plain_s: Mapping[int, float],
) -> Decision:
    """Return a decision with its page; the settings are those of the search.

    `plain_s` are the seconds of an epoch by plain `fit`, by batch size, where they were measured.
    """
    if not trials:
        return found
    lost = missing_text(missing)
    if found.trial is None:
        headline = f"No batch size can be named: {_missing_reason(trials)}."
        advice = Note.of("nothing_completed", advice=_what_to_do(trials))
        return dataclasses.replace(found, page=Page(headline, lost, advice))
    names = trial_names(trials)
    limits = (
        *binding_limits(found.trial, trials, names, conditions),
        *_rising(found),
        *_failures(found, trials),
    )
    page = Page(
        headline=_headline(found, names, conditions),
        missing=lost,
        certainty=_certainty(found, trials, settings),
        change=_change(found, plain_s),
        rate=_rate(found, settings),
        rows=_rows(found, trials, names),
        settings=_settings(found),
        limits=limits,
        search=_search(trials),
    )
    return dataclasses.replace(found, page=page)


def _headline(found: Decision, names: TrialNames, conditions: Conditions | None) -> str:
    trial: Any = found.trial
    kept = trial.batch_size == found.base_batch_size and rate_factor(trial) == 1
    verb, rate = "Keep" if kept else "Take", found.learning_rate
    text = f"{verb} batch size {names.name(trial)}"
    text += f" with learning rate {setting(rate)}" if rate else ""
    if conditions is None or conditions.epochs is None:
        return f"{text}."
    to_target = "" if trial.target else "for "
    return f"{text}, {to_target}{budget_text(conditions)}."


def _certainty(found: Decision, trials: Sequence[TrialRecord], search: Mapping[str, Any]) -> Note:
    judgement, best = found.judgement, found.best
    if judgement is None or best is None:
        return Note.of("several_objectives")
    words, within = metric_words(best.objective.name), tolerance_text(found)
    sure = f"{100 * found.confidence:.3g} % confidence"
    sizes = sorted({trial.batch_size for trial in trials})
    tied = sizes_text(found.tied, sizes) if found.tied else ""
    told = f"every other size that was compared is worse by more than {within} ({sure})"
    if tied:
        told = f"{tied} are not told apart within {within} ({sure})"
    best_mean = f"{found.batch_size:,} has the best mean {words}"
    if found.batch_size != best.batch_size:
        best_mean = f"{found.batch_size:,} trains fastest of those within it"
    match judgement.obstacle:
        case "alone":
            others = [why for t, why in found.left_out if t.batch_size != found.batch_size]
            return Note.of("alone", why=join_words(dict.fromkeys(others)) if others else None)
        case "one_execution":
            shown = f" On these validation examples, {told}." if judgement.gaps else ""
            race = search.get("strategy") == "race"  # Some ran at several learning rates.
            return Note.of("one_execution", race=race, shown=shown, best_mean=best_mean)
        case "no_outcomes":
            why = found.unpaired
            return Note.of("no_outcomes", why=why, told=told, best_mean=best_mean)
        case "pinned":
            return Note.of("pinned", best_mean=best_mean)
    more = "".join(f" {text}" for text in (_settled_by(found), _pinned(found)) if text)
    if found.certain and tied:
        which = "it trains fastest; of those that differ by less than 5 % it is the smallest"
        if not judgement.costs:
            kinds = device_kinds(found.trials)
            ran = f", as trials ran on {join_words(kinds)}" if len(kinds) > 1 else ""
            which = f"it has the best mean; times are not compared{ran}"
        told = f"of the sizes whose {words} lies within {within} of the best, {which}"
        return Note.of("certain", sure=f" ({sure})", told=told, more=more)
    if found.certain:
        return Note.of("certain", sure="", told=told, more=more)
    if found.certified:
        given = {"words": words, "within": within, "sure": sure, "others": _open_sizes(found)}
        return Note.of("certified", **given, more=more)
    return Note.of("not_certified", told=told, best_mean=best_mean, more=more)


def _open_sizes(found: Decision) -> str:
    """Name what may be preferred to a certified size: no slower ones, and those left out."""
    judgement: Any = found.judgement
    most = judgement.costs.get(judgement.named)
    pairs = [
        pair for pair in judgement.pairs if pair not in (*judgement.certified, *judgement.worse)
    ]
    faster = [size for size, rate in pairs if most is None or judgement.costs[size, rate] <= most]
    sizes = sorted({*faster, *(size for size, _ in judgement.left_out)})
    return join_words([f"{size:,}" for size in sizes]) if sizes else "another size"


def _settled_by(found: Decision) -> str:
    """Say what would settle an answer, an empty text where it is settled or nothing is known."""
    judgement = found.judgement
    if judgement is None or judgement.obstacle or found.certain:
        return ""
    if judgement.executions_needed is not None:
        count = f"About {judgement.executions_needed:,} executions of each size"
        return f"{count} would settle it (a forecast)."
    if judgement.left_out and (found.tolerance or 0.0) >= (judgement.smallest_tolerance or 0.0):
        return "A larger `max_executions` may settle it."
    if judgement.smallest_tolerance is None:
        return ""
    ways = [f"`tolerance={setting(judgement.smallest_tolerance)}`"]
    if judgement.examples_needed is not None:
        outcomes = found.trials[0].executions[0].outcomes
        has = f" ({outcomes.examples:,} now)" if outcomes and outcomes.examples else ""
        ways += [f"about {judgement.examples_needed:,} validation examples{has}"]
    return f"More executions alone would not settle it; with {' or '.join(ways)} they would."


def _pinned(found: Decision) -> str:
    """Say what stays although the seed changes, where something else does change."""
    match found.judgement and found.judgement.pinned:
        case "weights":
            return "All executions began with the same weights, so what others change is not known."
        case "order":
            return "All executions saw the examples in one order, so another one is not known."
    return ""


def tolerance_text(found: Decision) -> str:
    """Write the tolerance: in the unit of a metric between 0 and 1, else as a share of the best."""
    tolerance, best = found.tolerance or 0.0, (found.best and found.best.objective_value) or 0.0
    share = found.best is not None and is_share(found.best.objective, best)
    return setting(tolerance) if share or not best else f"{100 * tolerance / abs(best):.2g} %"


def sizes_text(sizes: Sequence[int], among: Sequence[int]) -> str:
    """Name batch sizes: "16 to 64" where they are three or more neighbours among all."""
    places = [among.index(size) for size in sizes]
    if len(sizes) > 2 and places[-1] - places[0] == len(sizes) - 1:
        return f"{sizes[0]:,} to {sizes[-1]:,}"
    return join_words(at_most([f"{size:,}" for size in sizes]))


def _change(found: Decision, plain_s: Mapping[int, float]) -> str:
    """Say what the size that is named changes against the base size."""
    change = found.changes.get(found.batch_size or 0)
    if change is None or found.trial is None or found.base_batch_size is None:
        return ""
    speedup, bounds, parts = change.speedup, change.speedup_interval, []
    if speedup is not None:
        if speedup < 1:
            ends = bounds and bounds.ends
            bounds = ends and Estimate(1 / speedup, 1 / ends[1], 1 / ends[0])
        parts.append(f"{_times(speedup)}{in_brackets(bounds, 2)}")
    if plain_s.keys() == {found.base_batch_size, found.batch_size} and change.speedup:
        plain = plain_s[found.base_batch_size] / plain_s[found.batch_size or 0]
        if abs(plain / change.speedup - 1) > MUCH_APART:
            # What people get comes first.
            parts.insert(0, f"{_times(plain)} by plain `fit` after `apply`")
            parts[1] += " in the search"
    if change.difference is not None:
        words = metric_words(found.trial.objective.name)
        pairs = found.judgement.certified if found.judgement and found.certified else ()
        if {found.base_batch_size, found.batch_size} <= {size for size, _ in pairs}:
            parts.append(f"{words} as good within {tolerance_text(found)}")
        elif found.base_batch_size in found.tied:
            # A number here would contradict that they are not told apart.
            parts.append(f"{words} not told apart within {tolerance_text(found)}")
        else:
            parts.append(f"{words} {difference_text(found, change)}")
    return (
        f"{found.base_batch_size:,} -> {found.batch_size:,}: {', '.join(parts)}." if parts else ""
    )


def _times(speedup: float) -> str:
    ratio = format_number(max(speedup, 1 / speedup), 2)
    return f"{ratio} times {'longer' if speedup < 1 else 'sooner'}"


def difference_text(found: Decision, change: SizeChange) -> str:
    """Write the difference of the metric with its sign and interval, empty where there is none."""
    value, bounds = change.difference, change.difference_interval
    if value is None or found.best is None:
        return ""
    fraction = is_fraction(found.best.objective.name)
    unit = " %" if fraction else ""
    between = ""
    if bounds is not None and bounds.ends is not None:
        between = " ({} to {})".format(*(_signed(end, fraction) for end in bounds.ends))
    return f"{_signed(value, fraction)}{unit}{between}".replace("-0.0 ", "0.0 ")


def _signed(number: float, fraction: bool) -> str:
    text = f"{100 * number:.1f}" if fraction else format_number(number, 2)
    return text if float(text.replace(",", "")) <= 0 else f"+{text}"


def _rate(found: Decision, settings: Mapping[str, Any]) -> str:
    """Say whether the user's learning rate was too small or too large, or was not checked."""
    trial = found.trial
    scaling = trial and trial.executions[-1].scaling
    if trial is None or scaling is None:
        return ""
    own, base = scaling.learning_rate / scaling.learning_rate_ratio, scaling.base_batch_size
    given = {"rate": setting(own), "size": f"{base:,}"}
    if FACTOR_NAME not in trial.hyperparameters:
        searched = trial.hyperparameters.keys() - {*OWN_COLUMNS}
        if searched or settings.get("search_learning_rate") is False:
            return ""
        more = f" It follows the {scaling.rule} rule." if scaling.rule else ""
        return Note.of("rate_unchecked", **given, more=more)
    at_base = next((t for t in found.trials if t.batch_size == base), trial)
    factor = rate_factor(at_base)
    if factor == 1:
        return f"Your learning rate, {setting(own)} at batch size {base:,}, is the best one tried."
    times = setting(max(factor, 1 / factor))
    times = f"at least {times}" if factor in (FACTORS[0], FACTORS[-1]) else times
    more = "" if at_base.batch_size == base else f", as found at {at_base.batch_size:,}"
    far = f"{times} times too {'small' if factor > 1 else 'large'}{more}"
    return Note.of("rate_off", **given, far=far)


def _rows(found: Decision, trials: Sequence[TrialRecord], names: TrialNames) -> tuple[Row, ...]:
    """Return a row a batch size; of many those around the answer."""
    judgement = found.judgement
    if judgement is None or len(found.trials) < 2:
        return ()
    words = objective_column(found.trials[0].objective)
    columns = ("batch size", "learning rate", words, "relative time", "runs", "outcome")
    rows = rows_of(found, as_compared(trials), names, None)
    rows.sort(key=lambda row: row["outcome"] in COMPARED)  # Of a size the last is shown.
    by_size: dict[Any, Row] = {row["batch size"]: row for row in rows}
    shown = [by_size[size] for size in sorted(by_size)]
    place = next(place for place, row in enumerate(shown) if row["outcome"] == "take")
    first = max(0, min(place - _MOST_ROWS // 2, len(shown) - _MOST_ROWS))
    return tuple(
        {name: row[name] for name in row if name in columns or name.startswith("worse by")}
        for row in shown[first : first + _MOST_ROWS]
    )


def _settings(found: Decision) -> str:
    """Say what else was set, and whether cutting batches is worth anything here."""
    run: ExecutionRecord | None = found.trial and found.trial.executions[-1]
    if run is None:
        return ""
    parts, policy = [], ""
    for name, value in found.settings.items():
        values = value if isinstance(value, tuple) else (value,)
        write = decay_text if name in ("beta_2", "batch_norm_momentum", "ema_momentum") else setting
        texts = [one if isinstance(one, str) else write(one) for one in values]
        if name == "dtype_policy":  # `apply` refuses a model under another one.
            policy = f'`keras.config.set_dtype_policy("{value}")` comes before `build()`. '
        elif name not in ("micro_batch_size", "learning_rate"):
            parts.append(f"`{name}` {join_words(texts)}")
    text = f"`decision.apply(build())` also sets {join_words(parts)}." if parts else ""
    text = f"{policy}{text}".strip()
    if (run.accumulation_steps or 1) > 1:
        return f"{text} Batches are cut into micro-batches of {run.micro_batch_size:,}.".strip()
    fitted = (*found.trials, *(trial for trial, _ in found.left_out))
    most = max((trial.micro_batch_size or 0 for trial in fitted), default=0)
    if not most:
        return text
    return f"{text} {most:,} examples fit at once: no accumulation is needed.".strip()


def _rising(found: Decision) -> Iterable[Note]:
    """Say where the objective still got better in the last fifth of training."""
    trial = found.trial
    if trial is None or found.tolerance is None or trial.target is not None:
        return
    name, larger = trial.objective.name, trial.objective.direction == "max"
    curves = [[epoch.finite(name) for epoch in run.epochs] for run in trial.executions]
    count = min(map(len, curves))
    if count < 3:  # The first epochs always rise.
        return
    before = count - 1 - max(1, count // 5)
    pairs = [(curve[before], curve[count - 1]) for curve in curves]
    gains = [last - first for first, last in pairs if first is not None and last is not None]
    gain = sum(gains) / len(gains) if gains else 0.0
    if (gain if larger else -gain) > found.tolerance / 2:
        number = count - 1 - before
        last = "epoch" if number == 1 else f"{number:,} epochs"
        words, by = metric_words(name), format_number(abs(gain), 2)
        yield Note.of("still_rising", words=words, gain=by, last=last)


def _search(trials: Sequence[TrialRecord]) -> str:
    """Say how many trainings there were, of what, and how those ended that did not complete."""
    runs = [run for trial in trials for run in trial.executions]
    ends = Counter("diverged" if run.diverged else run.status for run in runs)
    failed = [f"{n:,} {end.replace('_', ' ')}" for end, n in ends.items() if end != "completed"]
    sizes = pluralize(len({trial.batch_size for trial in trials}), "batch size")
    kinds = device_kinds(trials)
    on = f" on {join_words(kinds)}" if kinds else ""
    but = f" ({join_words(failed)})" if failed else ""
    return f"{pluralize(len(runs), 'training')} of {sizes}{on}{but}."


def _failures(found: Decision, trials: Sequence[TrialRecord]) -> Iterable[Note]:
    """Say what successes leave open where the size that is named, or a neighbour, has failed."""
    sizes = sorted({trial.batch_size for trial in trials})
    place = sizes.index(found.batch_size or 0)
    near = sizes[max(0, place - 1) : place + 2]
    failed = [t for t in trials if t.batch_size in near and (t.status == "failed" or diverged(t))]
    if failed and found.trial is not None:
        succeeded = len(found.trial.executions)
        yield Note.of(
            "failure_rate",
            failed=f"{failed[-1].batch_size:,}",
            how="diverged" if diverged(failed[-1]) else "failed",
            trainings=f"{pluralize(succeeded, 'training')} of {found.batch_size:,}",
            rate=percent(1 - 0.05 ** (1 / succeeded)),
        )


def _missing_reason(trials: Sequence[TrialRecord]) -> str:
    """Word why no trial is the best, as the end of a sentence."""
    words = [outcome(trial) for trial in trials]
    if "completed" in words:
        return f"no completed trial has the objective {trials[0].objective.name}"
    kinds = join_words(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
    return f"none of {pluralize(len(words), 'trial')} completed ({kinds})"


def _what_to_do(trials: Sequence[TrialRecord]) -> str:
    outcomes = {outcome(trial) for trial in trials}
    if "completed" in outcomes:
        objective = trials[0].objective.name
        if objective == "samples_per_second":
            return "Training was too short for its speed to be measured: train longer."
        if objective in COST_NAMES:
            return "No trial met the target in its budget: train longer, or set an easier target."
        epochs = [p for t in trials for e in t.executions for p in e.epochs]
        names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
        if objective in names:
            return f"The objective {objective} was not finite in any epoch: check the metric."
        advice = "Compile the model with that metric"
        if objective.startswith("val_") and not any(name.startswith("val_") for name in names):
            advice = "Give `validation_data`"
        return (
            f"The objective {objective} was not among the metrics: {', '.join(names) or 'none'}. "
            f"{advice}, or search for another objective."
        )
    if outcomes == {"out of memory"}:
        return "Search again with a smaller `micro_batch_size`, which needs less memory."
    if outcomes == {"diverged"}:
        rates = [rate for trial in trials if (rate := starting_rate(trial))]
        tried = f", below {setting(min(rates))}" if rates else ""
        return (
            f"Search again with a smaller learning rate{tried}, or with a model that stays finite."
        )
    if outcomes <= {"running", "interrupted"}:
        return "The search has not finished. If it no longer runs, start it again: it continues."
    advice = "Read the failures below, fix their cause, then search again."
    if "out of memory" in outcomes:
        advice += " Those out of memory need a smaller `micro_batch_size`."
    return advice
