"""The page of a decision: at most three sentences, a table, and the lines that use the answer.

The table has a row for each batch size. Every number in a sentence is also in the table, and no
sentence contradicts a verdict of the table.
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
    percent,
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
    trial_name,
    value_of,
)
from kbatch.study.decision import Decision, Page, Row, speed_against, speed_of
from kbatch.study.limits import MUCH_DATA_WAIT
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.metrics import is_accuracy, is_fraction, metric_words

_LONGEST_REASON = 60
SPEED_NOT_KNOWN = "difference in speed not known"
_NEARLY = 1.25  # If two speeds may be equal, and differ at most by this, they are "as fast within".
# Notes about values that a lower learning rate does not make finite.
_NOT_FINITE = ("data_not_finite", "part_not_finite", "float16_overflows")
# Why a trial is left out: the end of a sentence, and a verdict of the table.
LEFT_OUT: Mapping[LeftOutReason, str] = {
    "other_settings": "other settings",
    "another_budget": "another budget",
    "another_device": "another kind of device",
    "no_value": "no value of the objective",
    "another_trial": "another trial of its size",
    "another_rate": "trained only at another learning rate",
    "far_rate": "trained only at a learning rate far from the best one",
}
_ENDED_EARLY = {"short": "only a short run", "stopped_early": "stopped early"}
# Why nothing is certain, as the end of a sentence.
_OBSTACLES = {
    "alone": "no other batch size can be compared with it",
    "one_execution": "no batch size was trained twice, so the effect of another seed is not known",
    "pinned": "the seed changes neither the initial weights nor the order of the examples, so all "
    "runs of a batch size count as one",
    "no_outcomes": "validation examples are not compared, because {why}",
    "few_examples": "validation examples are too few to show differences as small as the tolerance",
    "heavy_tails": "a few validation examples make up most of the difference in loss",
    "split_by_class": "the labels are sorted by class, so the validation examples are not "
    "representative",
}
_UNPAIRED: Mapping[Unpaired | None, str] = {
    None: "their results are not known",
    "time": "a training time has no values for single examples",
    "not_recorded": "the search stored no results of single validation examples",
    "other_examples": "the trials were validated on different examples or in a different order "
    "(give all trials the same ones, without a shuffle, a random split or `drop_remainder`)",
    "other_blocks": "the model takes whole batches only, so the compared blocks differ by size",
    "no_validation": "no epoch was validated",
    "of_training": "the metric is measured on the training data",
    "several_objectives": "there are several objectives",
    "several_devices": "the model was trained on several devices",
    "not_finite": "the metric was not finite in any epoch",
    "few_blocks": "there are too few blocks of validation examples",
    "no_metric": "the value of the objective does not come from a metric of the model",
    "no_sums": "the metric does not add up over batches, or stores too many numbers",
    "unknown_length": "the validation data are large and of unknown length",
    "shuffled": "the validation data have another order or other rows in each epoch",
}


def with_page(
    decision: Decision,
    trials: Sequence[TrialRecord],
    batch_sizes: Iterable[int],
    notes: tuple[Note, ...],
    progress: Progress | None,
) -> Decision:
    """Return a decision with its page, which has a row for each of the search's `batch_sizes`."""
    rows = _page_rows(decision, as_compared(trials), batch_sizes)
    added = [note.values["size"] for note in notes if note.code == "base_added"]
    if (trial := decision.trial) is None:
        sentences, use = _nothing(trials, running_text(trials, progress)), ()
    else:
        name = trial_name(trial, differing(trials))
        within = tolerance_text(decision.best, decision.tolerance)
        words = metric_words(trial.objective.name)
        unfinished = ""
        if progress and not progress.process and is_unfinished(trials, progress):
            unfinished = f"The search is unfinished ({_spent(trials, progress)}). So far: "
        sentences = (
            f"{unfinished}{_headline(decision, trial, name, your=not added)}",
            _certainty(decision, words, within, len(rows)),
            _change(decision, words, within),
        )
        use = _use(decision, trial)
    sentences = tuple(filter(None, sentences))
    count = f" Notes: {len(notes):,} (decision.notes)." if notes else ""
    base = f" kbatch added batch size {added[0]} to the search." if added else ""
    cost = f"{running_text(trials, progress) or _cost(trials, progress)}{base}{count}"
    page = Page(sentences, rows, use, cost, notes)
    return dataclasses.replace(decision, page=page)


def _headline(decision: Decision, trial: TrialRecord, name: str, *, your: bool) -> str:
    """Name the answer. `your` says whether the user, and not kbatch, chose the base size."""
    keep = your and trial.batch_size == decision.base_batch_size and rate_factor(trial) == 1
    rate = f" and learning rate {setting(decision.learning_rate)}" if decision.learning_rate else ""
    # Name an unusual policy, unless it is a part of `name`.
    policy = trial.dtype_policy
    usual = policy in ("float32", "mixed_float16") or policy in name
    under = "" if usual else f" under {policy}"
    return f"{'Keep' if keep else 'Train with'} batch size {name}{rate}{under}."


def _certainty(decision: Decision, words: str, within: str, sizes: int) -> str:
    """Say how sure the answer is, if the search had this number of batch sizes."""
    judgement, size = decision.judgement, f"batch size {decision.batch_size:,}"
    if judgement is None:
        return "Not certain: the search has several objectives, so batch sizes are not compared."
    if judgement.obstacle == "alone" and sizes == 1 and not decision.left_out:
        return "The search had no other batch size to compare with."
    if judgement.obstacle:
        why = _UNPAIRED[decision.unpaired]
        return f"Not certain: {_OBSTACLES[judgement.obstacle].format(why=why)}."
    confidence = f"at {100 * decision.confidence:.3g} % confidence"
    sure = f"Certain {confidence}"
    if decision.trial and decision.trial.objective.name != "samples_per_second":
        sure += ", for the learning rates that were tried"
    is_near, costs = f"{size} is within {within} of the best {words}", judgement.costs
    if decision.certain and judgement.left_out:  # A race may not have trained a faster size.
        return f"{sure}: {is_near}."
    faster = [pair for pair in judgement.open if costs and costs[pair] < costs[judgement.named]]
    if decision.certain and not faster:
        fastest = ", and no such size trains 5 % faster" if _is_fastest(decision) else ""
        return f"{sure}: {is_near}{fastest}."
    if not decision.certified:
        return f"Not certain: the runs do not show {confidence} whether {is_near}."
    open_sizes = at_most([f"{size:,}" for size, _ in faster or judgement.open])
    others = join_words(open_sizes) if open_sizes else "a size that was not trained to the end"
    if decision.certain:
        return f"{sure}: {is_near}. Faster sizes may be as good ({others})."
    return f"Not certain: {is_near} {confidence}, but {others} may be the better choice."


def _is_fastest(decision: Decision) -> bool:
    """Return whether the runs show that no size that may be as good trains 5 % faster."""
    answer = decision.trial
    as_good = [t for t in decision.trials if t.batch_size not in decision.worse and t is not answer]
    speeds = [answer and speed_against(decision, trial, answer) for trial in as_good]
    return all(speed and speed.ends and speed.ends[1] <= AS_FAST for speed in speeds)


def _change(decision: Decision, words: str, within: str) -> str:
    """Compare the answer with the base size. The sentence must agree with the table's verdict."""
    base = next((t for t in decision.trials if t.batch_size == decision.base_batch_size), None)
    if base is None or decision.trial is None or base is decision.trial:
        return ""
    times = relative_speed(decision.speedup, say_runs=True) if decision.speedup else ""
    of_steps = not is_time(base.objective) and times != SPEED_NOT_KNOWN
    parts = [f"training steps run {times}" if of_steps else times] if times else []
    behind, worse = _behind(decision, base), base.batch_size in decision.worse
    doubt = "" if _is_settled(decision, base) else " (not certain)"
    if is_time(base.objective):
        parts[-1:] = [f"{part}{doubt}" for part in parts[-1:]]
    elif not doubt and not worse:
        parts.append(f"same {words} within {within}")
    elif behind > 0 or not worse:
        higher = (behind > 0) == (base.objective.direction == "max")
        by = f"{'higher' if higher else 'lower'} by {setting(abs(behind))}"
        parts.append(f"{words} {by if behind else 'equal'}{doubt}")
    sizes = f"Compared with batch size {base.batch_size:,} in this search"
    return f"{sizes}: {', '.join(parts)}." if parts else ""


def _use(decision: Decision, trial: TrialRecord) -> tuple[str, ...]:
    """Write the lines that train with the answer."""
    size = decision.batch_size
    if trial.last.plan is None:  # A custom `HyperModel.fit` trained.
        return (f"To train, call your HyperModel's `fit` with `batch_size={size}`.",)
    form, *arguments = trial.last.data or ("arrays", "y")
    data = "x" if form == "arrays" else "data"
    data += f", y, {size}" if "y" in arguments else f", batch_size={size}"
    data += ", sample_weight=sample_weight" if "sample_weight" in arguments else ""
    data += ", shuffle=False" if trial.last.first_order == "as given" else ""
    fit = ", class_weight=class_weight" if "class_weight" in arguments else ""
    fit += "".join(f", {name}={value}" for name, value in decision.fit_arguments.items())
    return (
        "To train with these settings:",
        "  model = decision.apply(build)",
        f"  model.fit(kbatch.training_dataset({data}){fit})",
    )


def running_text(trials: Sequence[TrialRecord], progress: Progress | None) -> str:
    """Describe the progress of a search that runs; empty if it does not run."""
    if progress is None or progress.process is None or progress.search_s is None:
        return ""
    left = f", about {left_text(progress.left_s)}" if progress.left_s else ""
    return f"Running: {_spent(trials, progress)}{left}."


def _spent(trials: Sequence[TrialRecord], progress: Progress) -> str:
    most = progress.most_trainings
    of = f" of at most {setting(most)}" if most else ""
    return f"{_trainings(trials)}{of} complete trainings"


def is_unfinished(trials: Sequence[TrialRecord], progress: Progress | None) -> bool:
    """Return whether a search runs, or was interrupted and has not ended by itself since."""
    if progress is None:
        return False
    interrupted = any(trial.status == "interrupted" for trial in trials) and progress.left_s != 0
    return progress.process is not None or interrupted


def _cost(trials: Sequence[TrialRecord], progress: Progress | None) -> str:
    """Write the cost of a search: its trainings, and its wall-clock time or the sum over runs."""
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


def runs_text(trials: Sequence[TrialRecord]) -> str:
    """Count the training runs, and say how incomplete ones ended."""
    runs = [run for trial in trials for run in trial.executions]
    ends = Counter(map(run_end, runs))
    others = join_words([f"{n:,} {end}" for end, n in ends.items() if end != "complete"] or [""])
    sizes = pluralize(len({trial.batch_size for trial in trials}), "batch size")
    count = pluralize(len(runs), "training run")
    return f"{count} of {sizes}{f' ({others})' if others else ''}."


def run_end(run: ExecutionRecord) -> str:
    """Return how a training run ended, such as "complete", "stopped early" or "diverged"."""
    end = "diverged" if run.diverged else run.length if run.status == "completed" else run.status
    return end.replace("_", " ")


def _nothing(trials: Sequence[TrialRecord], running: str) -> tuple[str, str]:
    """Return why no batch size can be recommended, and advice."""
    if running or any(trial.status == "running" for trial in trials):
        return "No batch size can be recommended yet: no training run has a result.", ""
    outcomes, objective = Counter(trial.outcome for trial in trials), trials[0].objective.name
    if "completed" not in outcomes:
        why = f"No batch size can be recommended: no trial completed ({join_words(outcomes)})."
        if all(trial.status == "interrupted" for trial in trials):
            return why, "Run the same script again: the search continues."
        if all(trial.status == "out_of_memory" for trial in trials):
            return why, "Search again with smaller batch sizes or a smaller `micro_batch_size`."
        causes = [note for trial in trials for note in trial.notes if note.code in _NOT_FINITE]
        if causes:
            return why, str(by_importance(causes)[0])
        if outcomes.keys() == {"diverged"}:
            return why, "Search again with a learning rate below the rates in the table."
        return why, "Read why the trials failed, fix the cause, then search again."
    if not trained_runs(trials):
        why = "No batch size can be recommended: no training run was completed."
        return why, "Run the same script with a larger `time_budget_s`: the search continues."
    why = f"No batch size can be recommended: no completed trial has the objective {objective}."
    if objective == "samples_per_second":
        return why, "Training was too short for its speed to be measured: train longer."
    if objective == "seconds_to_target":
        return why, "No trial met the target: train longer, or set an easier target."
    epochs = [epoch for trial in trials for run in trial.executions for epoch in run.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return why, "This objective was not finite in any epoch: check the metric."
    advice = "Compile the model with that metric"
    if objective.startswith("val_") and not any(name.startswith("val_") for name in names):
        advice = "Give `validation_data`"
    were = f"The metrics were: {', '.join(names) or 'none'}"
    return why, f"{advice}, or search for another objective. {were}."


def _page_rows(
    decision: Decision, trials: Sequence[TrialRecord], sizes: Iterable[int]
) -> tuple[Row, ...]:
    """Return a row for each batch size, from its compared trial or its last one."""
    # A short run is shown only if there is no other run of its size.
    order = sorted(trials, key=lambda t: (_is_compared(decision, t), t.last.length != "short"))
    last = {trial.batch_size: trial for trial in order}
    names, tried = differing(trials), _rates_tried(trials)
    rows = [_row(decision, trial, names, tried) for trial in last.values()]
    blank = dict.fromkeys(rows[0]) | {"runs": 0, "verdict": "not trained"}
    rows += [blank | {"batch size": size} for size in {*sizes} - {*last}]
    return tuple(sorted(rows, key=lambda row: row["batch size"]))


def rows_of(
    decision: Decision, trials: Sequence[TrialRecord], quality: Objective | None
) -> tuple[Row, ...]:
    """Return a row with all measurements of each setting, at its compared or best rate."""
    rows, names, tried = [], differing(trials), _rates_tried(trials)
    waited = any((trial.data_wait_share or 0.0) > MUCH_DATA_WAIT for trial in trials)
    cut = any((trial.last.accumulation_steps or 1) > 1 for trial in trials)
    for rates in rates_of_settings(trials):
        trial = next((t for t in rates if _is_compared(decision, t)), rates[0])
        row = _row(decision, trial, names, tried)
        if FACTOR_NAME in trial.hyperparameters:
            row["rates tried"] = len(rates)
        row |= {"micro-batch size": trial.last.micro_batch_size} if cut else {}
        if quality is not None and quality.name != trial.objective.name:
            row |= ranged_columns(quality.name, trial.metric(quality.name))
        row |= ranged_columns("samples/s", speed_of(decision, trial)[1])
        judgement, pair = decision.judgement, (trial.batch_size, rate_factor(trial))
        if judgement is not None and judgement.gaps and _is_compared(decision, trial):
            gap = Estimate(0.0) if pair == judgement.leader else judgement.gaps.get(pair)
            unit, factor = (" (points)", 100) if is_fraction(trial.objective.name) else ("", 1)
            row |= ranged_columns(f"behind the best{unit}", gap and gap.times(factor))
        if (scale := trial.noise_scale) is not None:
            row |= ranged_columns("noise scale (examples)", scale)
        if waited and trial.data_wait_share is not None:
            row["waiting for data (%)"] = 100 * trial.data_wait_share
        if (used := trial.mean(lambda e: e.usage and e.usage.gpu_utilization)) is not None:
            row["GPU utilization (%)"] = 100 * used
        if (joules := trial.mean(lambda e: e.joules_per_sample)) is not None:
            row["energy (J/sample)"] = joules
        rows.append(row)
    # All rows have the same columns, with the runs and the verdict last.
    every = {name: None for row in rows for name in row if name not in ("runs", "verdict")}
    return tuple(every | {n: row.pop(n) for n in every if n in row} | row for row in rows)


def _rates_tried(trials: Iterable[TrialRecord]) -> Counter[int]:
    """Count the learning rates that were tried at each batch size."""
    return Counter(size for size, _ in {(t.batch_size, t.learning_rate) for t in trials})


def _row(
    decision: Decision, trial: TrialRecord, names: Iterable[str], tried: Mapping[int, int]
) -> Row:
    """Return the columns of the printed table."""
    objective, judged = trial.objective, decision.as_judged(trial)
    row: Row = {"batch size": trial.batch_size}
    row |= {name.replace("dtype_policy", "dtype policy"): value_of(trial, name) for name in names}
    row["learning rate"] = None if decision.rate_setters else trial.learning_rate
    title = f"{objective.name} (95 % interval)"
    complete = is_complete(judged.executions[0])
    if objective.name not in TIMES:
        row[objective.name] = judged.metrics.get(objective.name) if complete else None
        title = "judged (95 % interval)"
    row |= ranged_columns(title, judged.judged() if complete else None)
    row["training time (s)"] = speed_of(decision, trial)[0] if complete else None
    # A size may be worse only because its one rate does not suit it.
    named = tried[trial.batch_size] == 1 and objective.name != "samples_per_second"
    at = f" at learning rate {setting(rate)}" if named and (rate := row["learning rate"]) else ""
    return row | {"runs": len(judged.executions), "verdict": _verdict(decision, trial, at)}


def _is_compared(decision: Decision, trial: TrialRecord) -> bool:
    return trial.trial_id in [compared.trial_id for compared in decision.trials]


def _verdict(decision: Decision, trial: TrialRecord, at: str) -> str:
    """Compare a trial with the answer, or say why not. `at` names the only rate of its size."""
    answer = decision.trial
    if answer is not None and trial.trial_id == answer.trial_id:
        return "take"
    if answer is not None and _is_compared(decision, trial):
        quality, speed = _quality(decision, trial, at), speed_against(decision, trial, answer)
        return f"{quality}, {relative_speed(speed)}" if speed else quality
    if trial.last.length != "complete" and trial.status == "completed":
        return f"{_ENDED_EARLY[trial.last.length]} ({pluralize(len(trial.last.epochs), 'epoch')})"
    for left_out, why in decision.left_out:
        if left_out.trial_id == trial.trial_id:
            met = trial.last.target is None or trial.seconds_to_target is not None
            return LEFT_OUT[why] if met else "never met the target"
    if trial.status == "completed":
        return "not compared"
    if trial.outcome != "failed" or not trial.failure:
        return f"{trial.outcome}{at if trial.outcome == 'diverged' else ''}"
    return f"{trial.outcome}: {one_line(trial.failure)[:_LONGEST_REASON]}"


def relative_speed(speed: Estimate[float], *, say_runs: bool = False) -> str:
    """Write the ratio of two speeds. If `say_runs`, add its range, or how few the runs are."""
    low, high = speed.ends or (speed.value, speed.value)
    most = max(1 / low, high) if low <= 1 <= high else 1.0
    if most > AS_FAST:
        return SPEED_NOT_KNOWN if most > _NEARLY else f"as fast within {percent(most - 1)}"
    runs = {1: " (one run)", 2: " (two runs)"}.get(speed.n or 0, "") if say_runs else ""
    as_fast = 1 / AS_FAST <= speed.value <= AS_FAST
    ratio = speed if say_runs and high > 1.1 * low else speed.value
    return ("as fast" if as_fast else speed_text(ratio, digits=2)) + runs


def _quality(decision: Decision, trial: TrialRecord, at: str) -> str:
    """Compare the judged value of a trial with the answer's."""
    accurate, behind = is_accuracy(trial.objective.name), _behind(decision, trial)
    as_good = f"as {'accurate' if accurate else 'good'}"
    worse, better = ("less accurate", "more accurate") if accurate else ("worse", "better")
    if trial.batch_size in decision.worse and behind <= 0:  # Another size is better than both.
        return f"{worse} than the best{at}"
    if _is_settled(decision, trial) and trial.batch_size not in decision.worse:
        best = behind < 0 and behind <= min(_behind(decision, t) for t in decision.trials)
        return f"{as_good}{' (best value)' if best else ''}"
    doubt = "" if _is_settled(decision, trial) else " (not certain)"
    if not behind:
        return f"{as_good}{doubt}"
    by = setting(abs(behind))
    return f"{better} by {by}{doubt}" if behind < 0 else f"{worse} by {by}{at}{doubt}"


def _behind(decision: Decision, trial: TrialRecord) -> float:
    """Return how much worse a judged value is than the answer's; 0 if both are printed alike."""
    values = [decision.as_judged(t).judged_value or 0.0 for t in (decision.trial or trial, trial)]
    behind = trial.objective.sign * (values[0] - values[1])
    # The mean of equal values may differ in the last bits.
    shown = {format_number(value, 4) for value in values}
    return 0.0 if len(shown) == 1 or math.isclose(*values, rel_tol=1e-9) else behind


def _is_settled(decision: Decision, trial: TrialRecord) -> bool:
    """Return whether a trial is certainly worse than another one, or certainly as good."""
    certified = decision.judgement.certified if decision.judgement and decision.certified else ()
    as_good = (trial.batch_size, rate_factor(trial)) in certified
    near = abs(_behind(decision, trial)) <= (decision.tolerance or 0.0)
    return trial.batch_size in decision.worse or (as_good and near)
