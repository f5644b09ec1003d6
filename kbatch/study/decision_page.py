"""The page of a decision: what to take, how sure that is, a table, and what would settle it."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS
from kbatch.page.numbers import format_number, in_brackets, join_words, pluralize, setting
from kbatch.records.notes import Note
from kbatch.records.training_run import COST_NAMES, ExecutionRecord
from kbatch.study.caveats import failures, lagging, limit_notes, still_rising
from kbatch.study.comparison import as_compared, is_share, rate_factor
from kbatch.study.decision import Decision, Page, Row, SizeChange, plain_seconds, starting_rate
from kbatch.study.names import (
    TrialNames,
    at_most,
    budget_text,
    decay_text,
    metric_words,
    missing_text,
    outcome,
    trial_names,
)
from kbatch.study.table import COMPARED, objective_column, rows_of
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds, is_fraction

# Ratios of times by plain `fit` and in the search that differ by less are one.
MUCH_APART = 0.1
# Lines of the table, so that a page has 15 at most.
_MOST_ROWS = 7


def with_page(
    found: Decision,
    trials: Sequence[TrialRecord],
    *,
    settings: Mapping[str, Any],
    missing: int,
    epoch_s: Mapping[int, float],
) -> Decision:
    """Return a decision with its page; the settings are those of the search.

    `epoch_s` are the seconds of an epoch by plain `fit`, by batch size, where they were measured.
    """
    if not trials:
        return found
    trial, lost = found.trial, missing_text(missing)
    if trial is None:
        headline = f"No batch size can be named: {_missing_reason(trials)}."
        advice = Note.of("nothing_completed", advice=_what_to_do(trials))
        return dataclasses.replace(found, page=Page(headline, lost, advice))
    names = trial_names(trials)
    limits = (
        *limit_notes(trial, trials, names),
        *(still_rising(trial, found.tolerance) if found.tolerance is not None else ()),
        *failures(trial, trials),
        *lagging(found.trials),
    )
    page = Page(
        headline=_headline(found, trial, trials, names),
        missing=lost,
        certainty=_certainty(found, trials, settings),
        change=_change(found, trial, plain_seconds(found.trials, epoch_s)),
        rate=_rate(found, trial, settings),
        rows=_rows(found, trials, names),
        settings=_settings(found, trial.executions[-1]),
        limits=limits,
        search=_search(trials),
    )
    return dataclasses.replace(found, page=page)


def _headline(
    found: Decision, trial: TrialRecord, trials: Sequence[TrialRecord], names: TrialNames
) -> str:
    kept = trial.batch_size == found.base_batch_size and rate_factor(trial) == 1
    rate, budget = found.learning_rate, budget_text(trials)
    text = f"{'Keep' if kept else 'Take'} batch size {names.name(trial)}"
    text += f" with learning rate {setting(rate)}" if rate else ""
    return f"{text}, {'' if trial.target else 'for '}{budget}." if budget else f"{text}."


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
    more = _settled_by(found)
    if judgement.pinned == "weights":
        more += " All executions began with the same weights, so what others change is not known."
    elif judgement.pinned == "order":
        more += " All executions saw the examples in one order, so another one is not known."
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
    costs, told = judgement.costs, (*judgement.certified, *judgement.worse)
    most = costs.get(judgement.named)
    open_ = [p for p in judgement.pairs if p not in told and (most is None or costs[p] <= most)]
    sizes = sorted({size for size, _ in (*open_, *judgement.left_out)})
    return join_words([f"{size:,}" for size in sizes]) if sizes else "another size"


def _settled_by(found: Decision) -> str:
    """Say what would settle an answer, an empty text where it is settled or nothing is known."""
    judgement: Any = found.judgement
    if found.certain:
        return ""
    if judgement.executions_needed is not None:
        count = f"About {judgement.executions_needed:,} executions of each size"
        return f" {count} would settle it (a forecast)."
    if judgement.left_out and (found.tolerance or 0.0) >= (judgement.smallest_tolerance or 0.0):
        return " A search of fewer `batch_sizes` would compare those that left the race."
    if judgement.smallest_tolerance is None:
        return ""
    ways = [f"`tolerance={setting(judgement.smallest_tolerance)}`"]
    if judgement.examples_needed is not None:
        outcomes = found.trials[0].executions[0].outcomes
        has = f" ({outcomes.examples:,} now)" if outcomes and outcomes.examples else ""
        ways += [f"about {judgement.examples_needed:,} validation examples{has}"]
    return f" More executions alone would not settle it; with {' or '.join(ways)} they would."


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


def _change(found: Decision, trial: TrialRecord, plain_s: Mapping[int, float]) -> str:
    """Say what the size that is named changes against the base size."""
    base, size = found.base_batch_size, trial.batch_size
    change, parts = found.changes.get(size), []
    if change is None or base is None:
        return ""
    if (speedup := change.speedup) is not None:
        bounds = speedup
        if speedup.value < 1 and speedup.ends:
            bounds = Estimate(1 / speedup.value, 1 / speedup.ends[1], 1 / speedup.ends[0])
        parts.append(f"{_times(speedup.value)}{in_brackets(bounds, 2)}")
        if {base, size} <= plain_s.keys():
            plain = plain_s[base] / plain_s[size]
            if abs(plain / speedup.value - 1) > MUCH_APART:
                # What people get comes first.
                parts.insert(0, f"{_times(plain)} by plain `fit` after `apply`")
                parts[1] += " in the search"
    if change.difference is not None:
        words = metric_words(trial.objective.name)
        pairs = found.judgement.certified if found.judgement and found.certified else ()
        if {base, size} <= {certified for certified, _ in pairs}:
            parts.append(f"{words} as good within {tolerance_text(found)}")
        elif base in found.tied:
            # A number here would contradict that they are not told apart.
            parts.append(f"{words} not told apart within {tolerance_text(found)}")
        else:
            parts.append(f"{words} {_difference_text(trial, change)}")
    return f"{base:,} -> {size:,}: {', '.join(parts)}." if parts else ""


def _times(speedup: float) -> str:
    ratio = format_number(max(speedup, 1 / speedup), 2)
    return f"{ratio} times {'longer' if speedup < 1 else 'sooner'}"


def _difference_text(trial: TrialRecord, change: SizeChange) -> str:
    """Write the difference of the metric with its sign and interval."""
    difference: Any = change.difference
    fraction = is_fraction(trial.objective.name)

    def signed(number: float) -> str:
        if fraction:
            return f"{100 * number:+z.1f}"
        return f"{'+' if number > 0 else ''}{format_number(number, 2)}"

    between = " ({} to {})".format(*map(signed, difference.ends)) if difference.ends else ""
    return f"{signed(difference.value)}{' %' if fraction else ''}{between}"


def _rate(found: Decision, trial: TrialRecord, settings: Mapping[str, Any]) -> str:
    """Say whether the user's learning rate was too small or too large, or was not checked."""
    scaling = trial.executions[-1].scaling
    if scaling is None:
        return ""
    own, base = scaling.learning_rate / scaling.learning_rate_ratio, scaling.base_batch_size
    given = {"rate": setting(own), "size": f"{base:,}"}
    if FACTOR_NAME not in trial.hyperparameters:
        searched = trial.hyperparameters.keys() - {*OWN_COLUMNS}
        if searched or settings.get("search_learning_rate") is False:
            return ""
        more = f" It follows the {scaling.rule} rule." if scaling.rule else ""
        return Note.of("rate_unchecked", **given, more=more)
    # That of the answer itself: another size may have fared as well at its own.
    own_base = next((t for t in found.trials if t.batch_size == base), trial)
    at_base = trial if rate_factor(trial) == 1 else own_base
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
    if found.judgement is None or len(found.trials) < 2:
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


def _settings(found: Decision, run: ExecutionRecord) -> str:
    """Say what else was set, and whether cutting batches is worth anything here."""
    parts, texts = [], []
    for name, value in found.settings.items():
        values = value if isinstance(value, tuple) else (value,)
        write = decay_text if name in ("beta_2", "batch_norm_momentum", "ema_momentum") else setting
        if name == "dtype_policy":  # `apply` refuses a model under another one.
            texts = [f'`keras.config.set_dtype_policy("{value}")` comes before `build()`.']
        elif name not in ("micro_batch_size", "learning_rate"):
            words = [one if isinstance(one, str) else write(one) for one in values]
            parts.append(f"`{name}` {join_words(words)}")
    if parts:
        texts.append(f"`decision.apply(build())` also sets {join_words(parts)}.")
    fitted = (*found.trials, *(trial for trial, _ in found.left_out))
    most = max((trial.micro_batch_size or 0 for trial in fitted), default=0)
    if (run.accumulation_steps or 1) > 1:
        texts.append(f"Batches are cut into micro-batches of {run.micro_batch_size:,}.")
    elif most:
        texts.append(f"{most:,} examples fit at once: no accumulation is needed.")
    return " ".join(texts)


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


def _missing_reason(trials: Sequence[TrialRecord]) -> str:
    """Word why no trial is the best, as the end of a sentence."""
    words = Counter(map(outcome, trials))
    if "completed" in words:
        return f"no completed trial has the objective {trials[0].objective.name}"
    kinds = join_words(f"{count:,} {word}" for word, count in words.items())
    return f"none of {pluralize(len(trials), 'trial')} completed ({kinds})"


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
    advice = (
        "Read why the trials failed (`tuner.study` prints it), fix the cause, then search again."
    )
    if "out of memory" in outcomes:
        advice += " Those out of memory need a smaller `micro_batch_size`."
    return advice
