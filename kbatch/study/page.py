"""The page of a decision: at most three sentences, a table, and the lines that use the answer.

Every number in a sentence is in the table, which has a row for each batch size. The sentences say
what the verdicts of the rows say.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kbatch.analysis.intervals import Estimate, ranged_columns
from kbatch.analysis.judge import AS_FAST
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import (
    at_most,
    duration_text,
    format_number,
    join_words,
    left_text,
    one_line,
    pluralize,
    setting,
    speed_text,
)
from kbatch.records.notes import Note, by_importance
from kbatch.records.training_run import TIMES, ExecutionRecord, Progress
from kbatch.study.compared_trials import (
    LeftOutReason,
    Unpaired,
    as_compared,
    complete_trainings,
    differing,
    is_complete,
    is_time,
    rate_factor,
    rates_of_settings,
    tolerance_text,
    trained_runs,
    training_seconds,
    trial_name,
    value_of,
)
from kbatch.study.decision import Decision, Page, Row
from kbatch.study.limits import MUCH_DATA_WAIT
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.metrics import is_accuracy, is_fraction, metric_words

_LONGEST_REASON = 60
# Codes of notes on values that no lower learning rate makes finite.
_ON_VALUES = ("data_not_finite", "part_not_finite", "float16_overflows")
# Why a trial is left out, as the end of a sentence and in the table.
LEFT_OUT: Mapping[LeftOutReason, str] = {
    "other_settings": "other settings",
    "another_budget": "another budget",
    "another_device": "another kind of device",
    "no_value": "no value of the objective",
    "another_trial": "another trial of its size",
    "another_rate": "trained only at another learning rate",
    "far_rate": "trained only at a learning rate far from the best one",
}
_ENDED_EARLY = {
    "short": "only a short run of {epochs}",
    "stopped_early": "stopped early: too far behind after {epochs}",
}
# Why nothing is certain, as the end of a sentence.
_OBSTACLES = {
    "alone": "no other batch size can be compared with it",
    "one_execution": "no batch size was trained twice, so the effect of another seed is not known",
    "pinned": "the seed changes neither the initial weights nor the order of the examples, so all "
    "runs of a batch size count as one",
    "no_outcomes": "validation examples are not compared, because {why}",
    "few_examples": "a difference of the tolerance may not show in so few validation examples",
    "heavy_tails": "a few validation examples make up most of the difference in loss",
}
_UNPAIRED: Mapping[Unpaired | None, str] = {
    None: "they are not known",
    "time": "a time is measured once in a run",
    "not_recorded": "the records hold no outcomes of validation examples for the objective",
    "other_examples": "the trials were validated on different examples or in a different order "
    "(give all trials the same ones, without a shuffle, a random split or `drop_remainder`)",
    "no_validation": "no epoch was validated",
    "of_training": "the metric is one of training, not of validation",
    "several_objectives": "several objectives are no single metric",
    "several_devices": "the model was trained on several devices",
    "not_finite": "the metric was not finite in any epoch",
    "few_blocks": "there are too few blocks of validation examples",
    "no_metric": "no metric of the model has this value",
    "no_sums": "the metric does not add up over batches, or keeps too many numbers",
    "unknown_length": "the validation data are many and of unknown length",
    "shuffled": "the validation data have another order or other rows in each epoch",
}


def with_page(
    found: Decision,
    trials: Sequence[TrialRecord],
    batch_sizes: Iterable[int],
    notes: tuple[Note, ...],
    progress: Progress | None,
) -> Decision:
    """Return a decision with its page; `batch_sizes` are all that the search may train."""
    rows = _page_rows(found, as_compared(trials), batch_sizes)
    added = [note.values["size"] for note in notes if note.code == "base_added"]
    if (trial := found.trial) is None:
        sentences, use = _nothing(trials, running_text(trials, progress)), ()
    else:
        name = trial_name(trial, differing(trials))
        within = tolerance_text(found.best, found.tolerance)
        words = metric_words(trial.objective.name)
        unfinished = ""
        if progress and not progress.process and is_unfinished(trials, progress):
            unfinished = f"The search is unfinished ({_spent(trials, progress)}). So far: "
        sentences = (
            f"{unfinished}{_headline(found, trial, name, your=not added)}",
            _certainty(found, words, within),
            _change(found, words, within, your="" if added else "your "),
        )
        use = _use(found, trial)
    sentences = tuple(filter(None, sentences))
    noted = f" Notes: {len(notes):,} (decision.notes)." if notes else ""
    base = f" kbatch added batch size {added[0]}." if added else ""
    cost = f"{running_text(trials, progress) or _cost(trials, progress)}{base}{noted}"
    page = Page(sentences, rows, use, cost, notes)
    return dataclasses.replace(found, page=page)


def _headline(found: Decision, trial: TrialRecord, name: str, *, your: bool) -> str:
    kept = your and trial.batch_size == found.base_batch_size and rate_factor(trial) == 1
    rate = f" and learning rate {setting(found.learning_rate)}" if found.learning_rate else ""
    # A policy that the search did not choose, and that `name` does not have.
    policy = trial.dtype_policy
    usual = policy in ("float32", "mixed_float16") or policy in name
    under = "" if usual else f" under {policy}"
    return f"{'Keep' if kept else 'Train with'} batch size {name}{rate}{under}."


def _certainty(found: Decision, words: str, within: str) -> str:
    """Say how sure the answer is."""
    judgement, size = found.judgement, f"batch size {found.batch_size:,}"
    if judgement is None:
        return "Not certain: the search has several objectives, so batch sizes are not compared."
    if judgement.obstacle:
        why = _UNPAIRED[found.unpaired]
        return f"Not certain: {_OBSTACLES[judgement.obstacle].format(why=why)}."
    sure = f"at {100 * found.confidence:.3g} % confidence"
    near, costs = f"{size} is within {within} of the best {words}", judgement.costs
    if found.certain and judgement.left_out:  # A race may not have trained a faster size.
        return f"Certain {sure}: {near}."
    faster = [pair for pair in judgement.open if costs and costs[pair] < costs[judgement.named]]
    if found.certain and not faster:
        least = ", and no such size trains 5 % faster" if costs else ""
        return f"Certain {sure}: {near}{least}."
    if not found.certified:
        return f"Not certain: the runs do not show {sure} whether {near}."
    open_ = at_most([f"{size:,}" for size, _ in faster or judgement.open])
    others = join_words(open_) if open_ else "a size that was not trained to the end"
    if found.certain:
        return f"Certain {sure}: {near}, and {others} may be too."
    return f"Not certain: {near} {sure}, but {others} may be the better choice."


def _change(found: Decision, words: str, within: str, *, your: str) -> str:
    """Say what the named size changes against the base size, as its verdict does."""
    base = next((t for t in found.trials if t.batch_size == found.base_batch_size), None)
    if base is None or found.trial is None or base is found.trial:
        return ""
    parts, seconds = [], seconds_of(found)
    if seconds:
        parts.append(relative_speed(seconds[base.trial_id] / seconds[found.trial.trial_id]))
    behind, worse = _behind(found, base), base.batch_size in found.worse
    doubt = "" if _is_settled(found, base) else " (not certain)"
    if is_time(base.objective):
        parts[-1:] = [f"{part}{doubt}" for part in parts[-1:]]
    elif not doubt and not worse:
        parts.append(f"same {words} within {within}")
    elif behind > 0 or not worse:
        higher = (behind > 0) == (base.objective.direction == "max")
        by = f"{'higher' if higher else 'lower'} by {setting(abs(behind))}"
        parts.append(f"{words} {by if behind else 'equal'}{doubt}")
    change = ", ".join(parts)
    return f"Compared with {your}batch size {base.batch_size:,}: {change}." if parts else ""


def _use(found: Decision, trial: TrialRecord) -> tuple[str, ...]:
    """Write the lines that train with the answer."""
    size = found.batch_size
    if trial.last.plan is None:  # It was trained as a HyperModel's own `fit` is written.
        return (f"To train with it, call your HyperModel's `fit` with `batch_size={size}`.",)
    fit = "".join(f", {name}={value}" for name, value in found.fit_arguments.items())
    form, *given = trial.last.data or ("arrays", "y")
    data = "x" if form == "arrays" else "data"
    data += f", y, {size}" if "y" in given else f", batch_size={size}"
    data += ", sample_weight=sample_weight" if "sample_weight" in given else ""
    data += ", shuffle=False" if trial.last.first_order == "as given" else ""
    fit = f", class_weight=class_weight{fit}" if "class_weight" in given else fit
    return (
        "To train with these settings:",
        "  model = decision.apply(build)",
        f"  model.fit(kbatch.training_dataset({data}){fit})",
    )


def running_text(trials: Sequence[TrialRecord], progress: Progress | None) -> str:
    """Say how far a search has come that runs; an empty text if none runs."""
    if progress is None or progress.process is None or progress.search_s is None:
        return ""
    left = f", about {left_text(progress.left_s)}" if progress.left_s else ""
    return f"Running: {_spent(trials, progress)}{left}."


def _spent(trials: Sequence[TrialRecord], progress: Progress) -> str:
    most = progress.most_trainings
    of = f" of at most {setting(most)}" if most else ""
    return f"{_trainings(trials)}{of} complete trainings"


def is_unfinished(trials: Sequence[TrialRecord], progress: Progress | None) -> bool:
    """Return whether a search runs, or was interrupted and did not end by itself since then."""
    if progress is None:
        return False
    cut_off = any(trial.status == "interrupted" for trial in trials) and progress.left_s != 0
    return progress.process is not None or cut_off


def _cost(trials: Sequence[TrialRecord], progress: Progress | None) -> str:
    """Say what the search cost: its wall-clock time, or that of its training runs."""
    runs, count = [run for trial in trials for run in trial.executions], _trainings(trials)
    seconds = sum(run.total_s or run.train_s or 0.0 for run in runs)
    took = f", which took {duration_text(seconds)}" if seconds else ""
    if progress is not None and progress.search_s is not None:
        took = f" in {duration_text(progress.search_s)}"
    notes = (note for run in runs for note in run.notes if note.code == "compiled_by_xla")
    xla = next((f" Compiled by XLA: {n.values['speedup']} times as fast." for n in notes), "")
    return f"Search: {count} complete training{'' if count == '1' else 's'}{took}.{xla}"


def _trainings(trials: Sequence[TrialRecord]) -> str:
    return setting(round(complete_trainings(trials), 1))


def searched_text(trials: Sequence[TrialRecord]) -> str:
    """Say how many training runs there were, and how those ended that did not complete."""
    runs = [run for trial in trials for run in trial.executions]
    ends = Counter(map(run_end, runs))
    failed = [f"{n:,} {end}" for end, n in ends.items() if end != "complete"]
    sizes = pluralize(len({trial.batch_size for trial in trials}), "batch size")
    but = f" ({join_words(failed)})" if failed else ""
    return f"{pluralize(len(runs), 'training run')} of {sizes}{but}."


def run_end(run: ExecutionRecord) -> str:
    """Say how a training run ended, such as "complete", "stopped early" or "diverged"."""
    end = "diverged" if run.diverged else run.length if run.status == "completed" else run.status
    return end.replace("_", " ")


def _nothing(trials: Sequence[TrialRecord], running: str) -> tuple[str, str]:
    """Say why no batch size can be named, and what to do."""
    if running or any(trial.status == "running" for trial in trials):
        return "No batch size can be named yet: no training run has a result.", ""
    found, objective = Counter(trial.outcome for trial in trials), trials[0].objective.name
    if "completed" not in found:
        why = f"No batch size can be named: no trial completed ({join_words(found)})."
        if all(trial.status == "interrupted" for trial in trials):
            return why, "Run the same script again: the search continues."
        if all(trial.status == "out_of_memory" for trial in trials):
            return why, "Search again with smaller batch sizes or a smaller `micro_batch_size`."
        known = [note for trial in trials for note in trial.notes if note.code in _ON_VALUES]
        if known:
            return why, str(by_importance(known)[0])
        if found.keys() == {"diverged"}:
            return why, "Search again with a learning rate below those in the table."
        return why, "Read why the trials failed, fix the cause, then search again."
    if not trained_runs(trials):
        why = "No batch size can be named: no training run was completed."
        return why, "Search again with a larger `time_budget_s`: it continues."
    why = f"No batch size can be named: no completed trial has the objective {objective}."
    if objective == "samples_per_second":
        return why, "Training was too short for its speed to be measured: train longer."
    if objective == "seconds_to_target":
        return why, "No trial met the target: train longer, or set an easier target."
    epochs = [epoch for trial in trials for run in trial.executions for epoch in run.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return why, "It was not finite in any epoch: check the metric."
    advice = "Compile the model with that metric"
    if objective.startswith("val_") and not any(name.startswith("val_") for name in names):
        advice = "Give `validation_data`"
    were = f"The metrics were: {', '.join(names) or 'none'}"
    return why, f"{advice}, or search for another objective. {were}."


def _page_rows(
    found: Decision, trials: Sequence[TrialRecord], sizes: Iterable[int]
) -> tuple[Row, ...]:
    """Return a row for each batch size: of the trial that is compared, else of the last one."""
    # A short run looks for a learning rate: it stands for its size only if there is no other run.
    order = sorted(trials, key=lambda t: (_is_compared(found, t), t.last.length != "short"))
    last = {trial.batch_size: trial for trial in order}
    rows = [_row(found, trial, differing(trials)) for trial in last.values()]
    never = {"runs": 0, "verdict": "not trained"}
    rows += [{"batch size": size} | never for size in {*sizes} - {*last}]
    return _same_columns(sorted(rows, key=lambda row: row["batch size"]))


def rows_of(
    found: Decision, trials: Sequence[TrialRecord], quality: Objective | None
) -> tuple[Row, ...]:
    """Return all measurements, a row for each setting at the learning rate that is compared."""
    rows, names = [], differing(trials)
    waited = any((trial.data_wait_share or 0.0) > MUCH_DATA_WAIT for trial in trials)
    cut = any((trial.last.accumulation_steps or 1) > 1 for trial in trials)
    for rates in rates_of_settings(trials):
        trial = next((t for t in rates if _is_compared(found, t)), rates[0])
        row = _row(found, trial, names)
        if FACTOR_NAME in trial.hyperparameters:
            row["rates tried"] = len(rates)
        row |= {"micro-batch size": trial.last.micro_batch_size} if cut else {}
        if quality is not None and quality.name != trial.objective.name:
            row |= ranged_columns(quality.name, trial.metric(quality.name))
        row |= ranged_columns("samples/s", trial.throughput)
        row |= _against_best(found, trial)
        if (scale := trial.noise_scale) is not None:
            row |= ranged_columns("noise scale (examples)", scale)
        if waited and trial.data_wait_share is not None:
            row["waiting for data (%)"] = 100 * trial.data_wait_share
        if (used := trial.mean(lambda e: e.usage and e.usage.gpu_utilization)) is not None:
            row["GPU utilization (%)"] = 100 * used
        if (joules := trial.mean(lambda e: e.joules_per_sample)) is not None:
            row["energy (J/sample)"] = joules
        rows.append(row)
    return _same_columns(rows)


def _row(found: Decision, trial: TrialRecord, names: Iterable[str]) -> Row:
    """Write what the page shows of a trial."""
    objective, judged = trial.objective, found.as_judged(trial)
    row: Row = {"batch size": trial.batch_size}
    row |= {name.replace("dtype_policy", "dtype policy"): value_of(trial, name) for name in names}
    row["learning rate"] = None if found.rate_setters else trial.learning_rate
    title = f"{objective.name} (95 % interval)"
    complete = is_complete(judged.executions[0])
    if objective.name not in TIMES:
        row[objective.name] = judged.metrics.get(objective.name) if complete else None
        title = "judged (95 % interval)"
    row |= ranged_columns(title, judged.judged() if complete else None)
    seconds = seconds_of(found).get(trial.trial_id) or judged.mean(training_seconds)
    row["training time (s)"] = seconds if complete else None
    return row | {"runs": len(judged.executions), "verdict": _verdict(found, trial)}


def _same_columns(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Give all rows the columns of any of them, the runs and the verdict last."""
    last = ("runs", "verdict")
    every = dict.fromkeys(name for row in rows for name in row if name not in last)
    return tuple({name: row.get(name) for name in (*every, *last)} for row in rows)


def seconds_of(found: Decision) -> dict[str, float]:
    """Return the training time of each trial that is compared; nothing if times do not compare.

    The ratios are those of the judgement, which allows for a machine that was slower at times.
    """
    judgement, taken = found.judgement, found.trial
    own = taken and taken.mean(training_seconds)
    if judgement is None or not own or not judgement.costs:
        return {}
    least = own / judgement.costs[judgement.named]
    pairs = {t.trial_id: (t.batch_size, rate_factor(t)) for t in found.trials}
    return {one: least * judgement.costs[p] for one, p in pairs.items() if p in judgement.costs}


def _against_best(found: Decision, trial: TrialRecord) -> Mapping[str, object]:
    """Write how much worse a trial is than the best mean."""
    judgement, pair = found.judgement, (trial.batch_size, rate_factor(trial))
    if judgement is None or not judgement.gaps or not _is_compared(found, trial):
        return {}
    unit, factor = (" (points)", 100) if is_fraction(trial.objective.name) else ("", 1)
    gap = judgement.gaps.get(pair)
    gap = Estimate(0.0) if pair == judgement.leader else gap and gap.times(factor)
    return ranged_columns(f"behind the best{unit}", gap)


def _is_compared(found: Decision, trial: TrialRecord) -> bool:
    return trial.trial_id in [one.trial_id for one in found.trials]


def _verdict(found: Decision, trial: TrialRecord) -> str:
    """Say how a trial compares with the one to take, why it is not compared, or how it ended."""
    taken, seconds = found.trial, seconds_of(found)
    if taken is not None and trial.trial_id == taken.trial_id:
        return "take"
    if taken is not None and _is_compared(found, trial):
        way = relative_speed(seconds[taken.trial_id] / seconds[trial.trial_id]) if seconds else None
        return ", ".join(filter(None, (_quality(found, trial), way)))
    if trial.last.length != "complete" and trial.status == "completed":
        return _ENDED_EARLY[trial.last.length].format(
            epochs=pluralize(len(trial.last.epochs), "epoch")
        )
    for one, why in found.left_out:
        if one.trial_id == trial.trial_id:
            met = trial.last.target is None or trial.seconds_to_target is not None
            return LEFT_OUT[why] if met else "never met the target"
    if trial.status == "completed":
        return "not compared"
    ended = trial.outcome
    if ended != "failed" or not trial.failure:
        return ended
    return f"{ended}: {one_line(trial.failure)[:_LONGEST_REASON]}"


def relative_speed(ratio: float) -> str:
    """Say how many times as fast a trial trained as another."""
    return "as fast" if 1 / AS_FAST <= ratio <= AS_FAST else speed_text(ratio, digits=2)


def _quality(found: Decision, trial: TrialRecord) -> str:
    """Say how the judged value of a trial compares with that of the size to take."""
    accurate = is_accuracy(trial.objective.name)
    behind = _behind(found, trial)
    by = f"by {setting(abs(behind))}"
    if trial.batch_size in found.worse and behind <= 0:  # Worse than another size.
        return "less accurate than the best" if accurate else "worse than the best"
    if _is_settled(found, trial) and trial.batch_size not in found.worse:
        best = behind < 0 and behind <= min(_behind(found, t) for t in found.trials)
        return f"as {'accurate' if accurate else 'good'}{' (best value)' if best else ''}"
    doubt = "" if _is_settled(found, trial) else " (not certain)"
    if not behind:
        return f"as {'accurate' if accurate else 'good'}{doubt}"
    words = ("less accurate", "more accurate") if accurate else ("worse", "better")
    return f"{words[behind < 0]} {by}{doubt}"


def _behind(found: Decision, trial: TrialRecord) -> float:
    """Return how much worse a judged value is than that of the size to take, as it is shown."""
    values = [found.as_judged(t).judged_value or 0.0 for t in (found.trial or trial, trial)]
    behind = trial.objective.sign * (values[0] - values[1])
    # The mean of equal values may differ in the last bits.
    shown = {format_number(value, 4) for value in values}
    return 0.0 if len(shown) == 1 or math.isclose(*values, rel_tol=1e-9) else behind


def _is_settled(found: Decision, trial: TrialRecord) -> bool:
    """Return whether a trial is certainly worse than another, or as good as the one to take."""
    certified = found.judgement.certified if found.judgement and found.certified else ()
    as_good = (trial.batch_size, rate_factor(trial)) in certified
    near = abs(_behind(found, trial)) <= (found.tolerance or 0.0)
    return trial.batch_size in found.worse or (as_good and near)
