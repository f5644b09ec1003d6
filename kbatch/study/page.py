"""The page of a decision: what to take, how sure that is, a table, and what would settle it."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kbatch.analysis.intervals import Estimate, ranged_columns
from kbatch.analysis.judge import AS_FAST
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS
from kbatch.page.numbers import format_number, in_brackets, join_words, one_line, pluralize, setting
from kbatch.records.notes import Note
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.compare import (
    LeftOutReason,
    Unpaired,
    as_compared,
    budget_text,
    differing,
    is_time,
    missing_text,
    rate_factor,
    rates_of_settings,
    sizes_text,
    tolerance_text,
    trial_name,
    value_of,
)
from kbatch.study.decision import Decision, Page, Row
from kbatch.study.limits import MUCH_DATA_WAIT, limit_notes
from kbatch.study.trial import OWN_COLUMNS, Objective, TrialRecord, device_kinds, judged_column
from kbatch.training.metrics import is_fraction, metric_words

# The outcomes of trials that are compared.
_COMPARED = ("take", "worse", "as good", "not told apart")
# Lines of the table, so that a page has 15 at most.
_MOST_ROWS = 7
_LONGEST_REASON = 60
_TIME_COLUMNS = {"samples_per_second": "samples/s", "seconds_to_target": "time to target (s)"}
# Why a trial is left out, as the end of a sentence and in the table.
LEFT_OUT: Mapping[LeftOutReason, str] = {
    "other_settings": "other settings",
    "another_budget": "another budget",
    "another_device": "another kind of device",
    "no_value": "no value of the objective",
    "another_trial": "another trial of its size",
    "unlikely": "stopped early: unlikely to be the best size",
    "far_rate": "trained only at a learning rate far from the best one",
}
# Why validation examples are not compared, as the end of a sentence.
_UNPAIRED: Mapping[Unpaired, str] = {
    "time": "a time is measured once in an execution",
    "not_recorded": "the records hold no outcomes of validation examples for the objective",
    "other_examples": "trials were validated on other examples or in another order (let all have "
    "the same, without a shuffle, a random split or `drop_remainder`)",
    "no_validation": "no epoch was validated",
    "of_training": "the metric is one of training, not of validation",
    "several_objectives": "several objectives are no single metric",
    "several_devices": "the model was trained on several devices",
    "not_finite": "the metric was not finite in any epoch",
    "few_blocks": "there are fewer than four blocks of validation examples",
    "no_metric": "no metric of the model has this value",
    "no_sums": "the metric does not add up over batches, or keeps too many numbers",
    "unknown_length": "the validation data are many and of unknown length",
    "shuffled": "the validation data have another order or other rows in each epoch",
}

_PINNED: Mapping[str | None, str] = {
    "weights": " All executions began with the same weights, so what others change is not known.",
    "order": " All executions saw the examples in one order, so another one is not known.",
}


def with_page(
    found: Decision, trials: Sequence[TrialRecord], search: Mapping[str, Any], *, missing: int
) -> Decision:
    """Return a decision with its page; `search` are the settings of it."""
    if not trials:
        return found
    trial, lost = found.trial, missing_text(missing)
    if trial is None:
        why, advice = _nothing(trials)
        note = Note.of("nothing_completed", advice=advice)
        page = Page(f"No batch size can be named: {why}.", lost, note)
        return dataclasses.replace(found, page=page)
    # What is known comes first, and is then worded.
    words, race = metric_words(trial.objective.name), search.get("strategy") == "race"
    limits = tuple(limit_notes(found, trials))
    name, budget = trial_name(trial, differing(trials)), budget_text(trials)
    tied = sizes_text(found.tied, trials) if found.tied else ""
    within = tolerance_text(found.best, found.tolerance)
    settled = _settled_by(found, race)
    page = Page(
        headline=_headline(found, trial, name, budget, settled),
        missing=lost,
        certainty=_certainty(found, race, settled, words, within, tied),
        change=_change(found, trial, words, within),
        rate=_rate(found, trial, search),
        rows=_rows(found, trials, words),
        use=_use(found, trial.last),
        limits=limits,
        search=_search(trials),
    )
    return dataclasses.replace(found, page=page)


def _headline(found: Decision, trial: TrialRecord, name: str, budget: str, settled: str) -> str:
    kept = trial.batch_size == found.base_batch_size and rate_factor(trial) == 1
    rate = found.learning_rate
    text = f"{'Keep' if kept else 'Take'} batch size {name}"
    text += f" with learning rate {setting(rate)}" if rate else ""
    text += f", {'' if trial.last.target else 'for '}{budget}" if budget else ""
    if not found.certified:
        text += f": nothing is certified{f'; {settled}' if settled else ''}"
    return f"{text}."


def _settled_by(found: Decision, race: bool) -> str:
    """Say in a clause what would settle an answer; an empty text where it is not known."""
    judgement, unpaired = found.judgement, found.unpaired and _UNPAIRED[found.unpaired]
    if judgement is None:
        return "a search for one of the objectives would compare the sizes"
    match judgement.obstacle:
        case "alone":
            return "another size that completes would be compared with it"
        case "one_execution":
            more = "a larger `max_executions`" if race else "`executions_per_trial=3`"
            return f"{more} would show what another seed changes"
        case "pinned":
            return "a `build` without `set_random_seed`, or shuffled data, would show more"
        case "no_outcomes":
            return f"how far the examples decide is not known, since {unpaired}"
    if judgement.executions_needed is not None:
        count = f"about {judgement.executions_needed:,} executions of each size"
        return f"{count} would settle it (a forecast)"
    left, smallest = {why for _, why in found.left_out}, judgement.smallest_tolerance
    if left & {"unlikely", "far_rate"} and (found.tolerance or 0.0) >= (smallest or 0.0):
        if not found.certified:
            return "a larger `max_executions` may certify one"
        return "a search of fewer `batch_sizes` would compare those that left the race"
    if smallest is None:
        return ""
    ways = [f"`tolerance={setting(smallest)}`"]
    if judgement.examples_needed is not None:
        outcomes = found.trials[0].executions[0].outcomes
        has = f" ({outcomes.examples:,} now)" if outcomes and outcomes.examples else ""
        ways += [f"about {judgement.examples_needed:,} validation examples{has}"]
    return f"more executions would settle it only with {' or '.join(ways)}"


def _certainty(
    found: Decision, race: bool, settled: str, words: str, within: str, tied: str
) -> Note:
    judgement, best = found.judgement, found.best
    if judgement is None or best is None:
        return Note.of("several_objectives")
    sure = f"{100 * found.confidence:.3g} % confidence"
    finding = f"every other size that was compared is worse by more than {within} ({sure})"
    if tied:
        finding = f"whether {tied} differ by more than {within} is open ({sure})"
    best_mean = f"{found.batch_size:,} has the best mean {words}"
    if found.batch_size != best.batch_size:
        best_mean = f"{found.batch_size:,} trains fastest of the sizes within {within} of the best"
    match judgement.obstacle:
        case "alone":
            others = [
                LEFT_OUT[why] for t, why in found.left_out if t.batch_size != found.batch_size
            ]
            return Note.of("alone", why=join_words(dict.fromkeys(others)) if others else None)
        case "one_execution":
            shown = f" On these validation examples, {finding}." if judgement.gaps else ""
            return Note.of("one_execution", race=race, shown=shown, best_mean=best_mean)
        case "no_outcomes":
            why = found.unpaired and _UNPAIRED[found.unpaired]
            return Note.of("no_outcomes", why=why, finding=finding, best_mean=best_mean)
        case "pinned":
            return Note.of("pinned", best_mean=best_mean)
    more = _PINNED.get(judgement.pinned, "")
    if found.certified and not found.certain and settled:
        more = f" {settled[0].upper()}{settled[1:]}.{more}"
    if found.certified and not found.certain:
        given = {"words": words, "within": within, "sure": sure, "open": _open_sizes(found)}
        return Note.of("certified", **given, more=more)
    if not found.certain:
        finding = f"{finding[0].upper()}{finding[1:]}"
        return Note.of("not_certified", finding=finding, best_mean=best_mean, more=more)
    if tied:
        which, kinds = "it is the smallest that trains within 5 % of the fastest", []
        if not judgement.costs:
            kinds = device_kinds(found.trials)
            which = "it has the best mean; times are not compared"
        which += f", as trials ran on {join_words(kinds)}" if len(kinds) > 1 else ""
        finding = f"of the sizes compared whose {words} lies within {within} of the best, {which}"
    return Note.of("certain", sure=f" ({sure})" if tied else "", finding=finding, more=more)


def _open_sizes(found: Decision) -> str:
    """Say what may be preferred to a certified size, and what left the race."""
    texts = []
    for why in ("unlikely", "far_rate"):
        if sizes := [f"{trial.batch_size:,}" for trial, one in found.left_out if one == why]:
            was = "were" if sizes[1:] else "was"
            texts.append(f" {join_words(sizes)} {was} {LEFT_OUT[why]}.")
    open_ = [f"{size:,}" for size, _ in found.judgement.open] if found.judgement else []
    if open_ or not texts:
        sizes = join_words(open_ or ["another size"])
        texts.insert(0, f" It is open whether {sizes} may do as well and be the better choice.")
    return "".join(texts)


def _change(found: Decision, trial: TrialRecord, words: str, within: str) -> str:
    """Say what the named size changes against the base size, with one number a quantity."""
    base, size, parts = found.base_batch_size, trial.batch_size, []
    compared = next((other for other in found.trials if other.batch_size == base), None)
    if compared is None or base is None or base == size:
        return ""
    if (speedup := found.speedup) is not None:
        longer, ends = speedup.value < 1, speedup.ends
        low, high = ends or (speedup.value, speedup.value)
        if low > 1 / AS_FAST and high < AS_FAST:
            parts.append("as fast")
        elif low <= 1 <= high and 1 / AS_FAST < speedup.value < AS_FAST:
            parts.append(f"time not told apart{in_brackets(speedup, 2)}")
        else:
            if longer:
                speedup = Estimate(1 / speedup.value, ends and 1 / high, ends and 1 / low)
            digits = 2 if speedup.value > 1.1 else 3
            number, way = format_number(speedup.value, digits), "longer" if longer else "sooner"
            parts.append(f"{number} times {way}{in_brackets(speedup, digits)}")
    if trial.last.target is None and not is_time(trial.objective):
        pairs = found.judgement.certified if found.judgement and found.certified else ()
        if {base, size} <= {certified for certified, _ in pairs}:
            parts.append(f"{words} as good within {within}")
        elif base in found.tied:
            # A number here would contradict that they are not told apart.
            parts.append(f"{words} not told apart within {within}")
        else:
            own, before = (one.judged_value or 0.0 for one in (trial, compared))
            gained, fraction = own - before, is_fraction(trial.objective.name)
            number = f"{100 * gained:+z.1f} %" if fraction else format_number(gained, 2)
            parts.append(f"{words} {'+' if gained > 0 and not fraction else ''}{number}")
    return f"{base:,} -> {size:,}: {', '.join(parts)}." if parts else ""


def _rate(found: Decision, trial: TrialRecord, settings: Mapping[str, Any]) -> str:
    """Say whether the user's learning rate was too small or too large, or was not checked."""
    scaling = trial.last.scaling
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


def _rows(found: Decision, trials: Sequence[TrialRecord], words: str) -> tuple[Row, ...]:
    """Return a row a batch size; of many those around the answer."""
    if found.judgement is None or len(found.trials) < 2:
        return ()
    words = _TIME_COLUMNS.get(found.trials[0].objective.name, words)
    columns = ("batch size", "learning rate", "samples/s", words, f"{words}, judged")
    columns += ("runs", "outcome")
    rows = rows_of(found, as_compared(trials), None)
    # Of a size the one that is compared, else the last.
    rows.sort(key=lambda row: row["outcome"] in _COMPARED)
    by_size: dict[Any, Row] = {row["batch size"]: row for row in rows}
    shown = [by_size[size] for size in sorted(by_size)]
    place = next(place for place, row in enumerate(shown) if row["outcome"] == "take")
    first = max(0, min(place - _MOST_ROWS // 2, len(shown) - _MOST_ROWS))
    return tuple(
        {name: row[name] for name in row if name in columns or name.startswith("worse by")}
        for row in shown[first : first + _MOST_ROWS]
    )


def _use(found: Decision, run: ExecutionRecord) -> str:
    """Say how to train with the answer: what `apply` sets, and whether batches are cut."""
    if run.plan is None:  # It was trained as a HyperModel's own `fit` is written.
        return f"Train with it: call your HyperModel's `fit` with `batch_size={run.batch_size}`."
    given, parts, policy = run.scaling.given if run.scaling else {}, [], ""
    for name, value in found.settings.items():
        if name == "dtype_policy":  # `apply` refuses a model under another one.
            policy = f'`keras.config.set_dtype_policy("{value}")`, then '
        elif name not in ("micro_batch_size", "learning_rate"):
            after = value if isinstance(value, tuple) else (value,)
            changes = [
                join_words(map(_near_one_text, one)) for one in (given.get(name), after) if one
            ]
            parts.append(f"`{name}` {' -> '.join(changes)}")
    also = f", which also sets {join_words(parts)}" if parts else ""
    fit = "".join(f", {name}={value}" for name, value in found.fit_arguments.items())
    data = f"kbatch.training_dataset(x, y, {run.batch_size})"
    call = f"`model = decision.apply(build())`{also}, then `model.fit({data}{fit})`."
    texts = [f"Train with it: {policy}{call}"]
    if run.budget or run.target or len(run.epochs) < (run.epochs_asked or 0):
        texts.append("Give `fit` the callbacks of the search too: they ended the trial.")
    fitted = (*found.trials, *(trial for trial, _ in found.left_out))
    most = max((t.batch_size for t in fitted if t.last.accumulation_steps == 1), default=0)
    if (run.accumulation_steps or 1) > 1:
        texts.append(f"Batches are cut into micro-batches of {run.micro_batch_size:,}.")
    elif most:
        texts.append(f"Batches of up to {most:,} went through whole: no accumulation is needed.")
    return " ".join(texts)


def _near_one_text(value: float) -> str:
    """Write a setting; near 1 by two digits of its distance: 0.9995 is not 0.999."""
    distance = 1 - value
    near = 0 < distance < 0.01
    return f"{1 - float(f'{distance:.2g}'):.10g}" if near else setting(value)


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


def _nothing(trials: Sequence[TrialRecord]) -> tuple[str, str]:
    """Say why no trial is the best, as the end of a sentence, and what to do."""
    found, objective = Counter(trial.outcome for trial in trials), trials[0].objective.name
    if "completed" not in found:
        kinds = join_words(f"{count:,} {word}" for word, count in found.items())
        why = f"none of {pluralize(len(trials), 'trial')} completed ({kinds})"
        if all(trial.status in ("running", "interrupted") for trial in trials):
            return why, "Where the search no longer runs, start it again: it continues."
        if all(trial.status == "out_of_memory" for trial in trials):
            return why, "Search again with smaller batch sizes or a smaller `micro_batch_size`."
        if found.keys() == {"diverged"}:
            rates = [rate for trial in trials if (rate := trial.learning_rate)]
            tried = f", below {setting(min(rates))}" if rates else ""
            return why, f"Search again with a smaller learning rate{tried}."
        cause = "Read why the trials failed (`tuner.study` prints it), fix the cause,"
        return why, f"{cause} then search again."
    why = f"no completed trial has the objective {objective}"
    if objective == "samples_per_second":
        return why, "Training was too short for its speed to be measured: train longer."
    if objective == "seconds_to_target":
        return why, "No trial met the target: train longer, or set an easier target."
    epochs = [epoch for trial in trials for run in trial.executions for epoch in run.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return why, f"The objective {objective} was not finite in any epoch: check the metric."
    advice = "Compile the model with that metric"
    if objective.startswith("val_") and not any(name.startswith("val_") for name in names):
        advice = "Give `validation_data`"
    were = f"It was not among the metrics: {', '.join(names) or 'none'}."
    return why, f"{were} {advice}, or search for another objective."


def rows_of(found: Decision, trials: Sequence[TrialRecord], quality: Objective | None) -> list[Row]:
    """Write trials as rows with the same columns: of several learning rates the best."""
    rows: list[Row] = []
    names = differing(trials)
    waited = any((trial.data_wait_share or 0.0) > MUCH_DATA_WAIT for trial in trials)
    cut = any((trial.last.accumulation_steps or 1) > 1 for trial in trials)
    for trial, *others in rates_of_settings(trials):
        objective, judged = trial.objective, found.as_judged(trial)
        row: Row = {"batch size": trial.batch_size}
        row |= {
            name.replace("dtype_policy", "dtype policy"): value_of(trial, name) for name in names
        }
        row |= {"micro-batch size": trial.last.micro_batch_size} if cut else {}
        row["learning rate"] = trial.learning_rate
        if FACTOR_NAME in trial.hyperparameters:
            row["rates tried"] = 1 + len(others)
        row |= ranged_columns("samples/s", trial.throughput)
        if quality is not None and quality.name != objective.name:
            row |= ranged_columns(metric_words(quality.name), trial.metric(quality.name))
        if not is_time(objective):
            words = metric_words(objective.name)
            if judged_column(objective):
                row[words] = judged.metrics.get(objective.name)
                words = f"{words}, judged"
            row |= ranged_columns(words, judged.judged())
        if trial.last.target is not None:
            row[_TIME_COLUMNS["seconds_to_target"]] = trial.seconds_to_target
        row |= _against_best(found, trial)
        if (scale := trial.noise_scale) is not None:
            row |= ranged_columns("noise scale (examples)", scale)
        if waited and trial.data_wait_share is not None:
            row["waiting for data (%)"] = 100 * trial.data_wait_share
        if (used := trial.mean(lambda e: e.usage and e.usage.gpu_utilization)) is not None:
            row["GPU utilization (%)"] = 100 * used
        if (joules := trial.mean(lambda e: e.joules_per_sample)) is not None:
            row["energy (J/sample)"] = joules
        rows.append(row | {"runs": len(judged.executions), "outcome": _outcome(found, trial)})
    every, last = dict.fromkeys(name for row in rows for name in row), ("runs", "outcome")
    columns = [*(name for name in every if name not in last), *last]
    return [{name: row.get(name) for name in columns} for row in rows]


def _is_compared(found: Decision, trial: TrialRecord) -> bool:
    return trial.trial_id in [one.trial_id for one in found.trials]


def _against_best(found: Decision, trial: TrialRecord) -> Row:
    """Write how much worse a trial is than the best mean, and its time over the least."""
    judgement, pair = found.judgement, (trial.batch_size, rate_factor(trial))
    if judgement is None or not _is_compared(found, trial) or len(found.trials) < 2:
        return {}
    unit, factor = (" (points)", 100) if is_fraction(trial.objective.name) else ("", 1)
    gap = judgement.gaps.get(pair)
    gap = Estimate(0.0) if pair == judgement.leader else gap and gap.times(factor)
    return {**ranged_columns(f"worse by{unit}", gap), "relative time": judgement.costs.get(pair)}


def _outcome(found: Decision, trial: TrialRecord) -> str:
    """Say what is known of a trial: how it compares, why it is not compared, or how it ended."""
    if found.trial is not None and trial.trial_id == found.trial.trial_id:
        return "take"
    if found.judgement is not None and _is_compared(found, trial):
        if trial.batch_size in found.worse:
            return "worse"
        certified = () if found.judgement.obstacle else found.judgement.certified
        alike = (trial.batch_size, rate_factor(trial)) in certified
        return "as good" if alike else "not told apart"
    for one, why in found.left_out:
        if one.trial_id == trial.trial_id:
            met = trial.last.target is None or trial.seconds_to_target is not None
            return LEFT_OUT[why] if met else "never met the target"
    ended = trial.outcome
    if ended != "failed" or not trial.failure:
        return ended
    return f"{ended}: {one_line(trial.failure)[:_LONGEST_REASON]}"
