"""The notes of a decision: limits of the batch size, and facts that may change the answer."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kbatch.analysis.judge import AS_FAST
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS
from kbatch.analysis.run_table import best_epochs
from kbatch.page.numbers import (
    duration_text,
    format_number,
    join_words,
    one_line,
    percent,
    pluralize,
    setting,
)
from kbatch.records.notes import Note
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.compared_trials import (
    compared_settings,
    end_text,
    is_time,
    rate_factor,
    rate_setters,
    rates_of_settings,
    trained_runs,
    training_seconds,
    with_complete_runs,
)
from kbatch.study.decision import Decision, seconds_of, speed_against
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds
from kbatch.training.metrics import is_accuracy, metric_words

# If training waits for data for more than this share of its time, data limit the samples/s.
MUCH_DATA_WAIT = 0.2
# Parts of training that the seed does not change: what all runs did, and the effect not tested.
_PINNED = {
    "weights": ("began with the same weights", "initialization"),
    "order": ("saw the examples in the same order", "order"),
}
# Advice that makes an answer certain, by the obstacle of its judgement.
_TO_BE_CERTAIN = {
    None: "{more} may make the answer certain",
    "alone": "To be certain, train another batch size with the same settings",
    "one_execution": "{more} shows how much the seed changes",
    "pinned": "To make seeds differ, shuffle the data, or leave `set_random_seed` out of `build`",
    "few_examples": "To be certain, use more validation examples, especially of rare classes",
    "heavy_tails": "To be certain, use a metric that weighs examples equally, such as accuracy",
}
_FEWEST_BATCHES = 8  # The data limit the size if an epoch of twice the size has fewer batches.
_SMALL_GAIN = 0.1  # If larger batches gain more of the samples/s, a note compares updates.
_FAR_BELOW = 0.1  # Training accuracy is far above validation accuracy if it is this much higher.
_AVERAGING_TIMES = 5  # After these, a moving average keeps exp(-5) = 0.7 % of its initial value.


def notes_of(
    decision: Decision,
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    *,
    missing: int,
    problems: Sequence[str],
) -> Iterator[Note]:
    """Yield the notes of a decision and of its trials."""
    if missing:
        yield Note.of("trials_missing", count=missing)
    if problems:
        more = f" ({len(problems) - 1:,} more)" if problems[1:] else ""
        yield Note.of("left_out", first=f"{one_line(problems[0])}{more}")
    if why := search.get("grid_because"):
        yield Note.of("grid_because", why=why)
    if search.get("base_added"):
        yield Note.of("base_added", size=f"{search['base_batch_size']:,}")
    is_race = search.get("strategy") == "race"
    untrained = {*search.get("batch_sizes", ())} - {trial.batch_size for trial in trials}
    is_cut_off = untrained and len(decision.trials) == 1 and (is_race or "time_budget_s" in search)
    if is_cut_off:
        timed = zip(search.get("training_s", ()), search["batch_sizes"], strict=False)
        times = [f"{duration_text(s)} at batch size {size:,}" for s, size in timed]
        took = f" A training run was forecast to take {join_words(times)}." if times else ""
        limits = "`time_budget_s` or `max_trainings`" if is_race else "`time_budget_s`"
        yield Note.of("sizes_not_compared", limits=limits, measured=took)
    if (best := decision.trial) is not None:
        words = metric_words(best.objective.name)
        if not is_cut_off:
            yield from _certainty(decision, is_race)
        yield from _rate(decision, best, trials, search)
        if search.get("learning_rate_scaling") == "auto":
            yield from _without_rule(trials)
        yield from _use(decision, best.last)
        yield from (limits := [*_binding_here(decision, best, trials, words)])
        sizes = {*search.get("batch_sizes", ()), *(trial.batch_size for trial in trials)}
        yield from _end_of_range(decision, best, sizes, is_limited=bool(limits))
        if decision.tolerance is not None:
            yield from _still_rising(best, decision.tolerance, words)
        yield from _failures(best, trials)
        yield from (note for note in best.notes if note.code == "most_common_class")
        yield from _lagging(decision.trials)
    yield from _conditions(trials)


def _certainty(decision: Decision, is_race: bool) -> Iterator[Note]:
    """Yield notes on how the answer can become certain, and on doubts about values and times."""
    judgement, speedup = decision.judgement, decision.speedup
    if judgement is None:
        return
    if not decision.certain and (how := _TO_BE_CERTAIN.get(judgement.obstacle)):
        more = f"A larger `{'max_trainings' if is_race else 'executions_per_trial'}`"
        if judgement.obstacle and not is_race:
            more = "`executions_per_trial=3`"
        yield Note.of("to_be_certain", how=how.format(more=more))
    seconds, answer = seconds_of(decision), decision.trial
    if seconds and answer is not None:
        better = [trial for trial in decision.trials if trial.rank[:2] <= answer.rank[:2]]
        answer_s = seconds[answer.trial_id]
        if faster := [t for t in better if AS_FAST * seconds.get(t.trial_id, answer_s) < answer_s]:
            yield Note.of("shown_better", sizes=_sizes(faster), named=f"{answer.batch_size:,}")
        pairs = [(t, t.mean(training_seconds), seconds.get(t.trial_id)) for t in decision.trials]
        if times := [
            f"batch size {t.batch_size:,} took {duration_text(s)} (not {duration_text(shown_s)})"
            for t, s, shown_s in pairs
            if s and shown_s and abs(math.log(s / shown_s)) > 0.25
        ]:
            yield Note.of("times_corrected", times=join_words(times))
    if not decision.certain and judgement.coarse:
        yield Note.of("coarse_target")
    if judgement.pinned in _PINNED:
        began, what = _PINNED[judgement.pinned]
        yield Note.of("same_start", began=began, what=what)
    if speedup and speedup.ends and speedup.ends[0] < 1 < speedup.ends[1]:
        ratio, low, high = (format_number(x, 2) for x in (speedup.value, *speedup.ends))
        if max(speedup.value, 1 / speedup.value) > AS_FAST:
            sizes = {"base": decision.base_batch_size, "size": decision.batch_size}
            yield Note.of("times_scatter", **sizes, ratio=ratio, low=low, high=high)


def _rate(
    decision: Decision, named: TrialRecord, trials: Sequence[TrialRecord], search: Mapping[str, Any]
) -> Iterator[Note]:
    """Yield a note if the user's learning rate was not checked, or if another one is better.

    Rates are compared at one batch size and over equal numbers of epochs, because a run that looks
    for a learning rate may be short.
    """
    if (scaling := named.last.scaling) is None or decision.rate_setters:
        return
    rate = setting(scaling.learning_rate / scaling.learning_rate_ratio)
    base, factor = scaling.base_batch_size, rate_factor(named)
    if FACTOR_NAME not in named.hyperparameters:
        searched = named.hyperparameters.keys() - {*OWN_COLUMNS}
        settled = search.get("search_learning_rate") is False or search.get("grid_because")
        if not searched and not settled:
            more = f" Rates of other sizes follow the {scaling.rule} rule." if scaling.rule else ""
            yield Note.of("rate_unchecked", rate=rate, size=f"{base:,}", more=more)
        return
    for size in dict.fromkeys((base, named.batch_size)):
        tried = {rate_factor(t): t for t in trials if t.batch_size == size and _curves(t)}
        if factor == 1 or not {1.0, factor} <= tried.keys():
            continue
        pair = tried[factor], tried[1.0]
        epochs = min(len(curve) for trial in pair for curve in _curves(trial))
        values = []
        for trial in pair:
            curves = [curve[:epochs] for curve in _curves(trial)]
            larger = trial.objective.direction == "max"
            best = [[c[k] for k in best_epochs(c, larger_is_better=larger)] for c in curves]
            values.append(fmean(map(fmean, best)))
        if named.objective.sign * (values[0] - values[1]) <= _noise(decision, pair, trials):
            continue
        at_end = {FACTORS[0]: "smaller", FACTORS[-1]: "larger"}
        more = f" No {at_end[factor]} learning rate was tried." if factor in at_end else ""
        rates = [setting(trial.learning_rate or 0.0) for trial in pair]
        texts = [f"{format_number(values[i], 4)} at learning rate {rates[i]}" for i in (0, 1)]
        seems, when = ("may be", "In short runs of")
        if all(map(with_complete_runs, pair)):
            seems, when = "is", "After"
        how = {"seems": seems, "when": when, "epochs": pluralize(epochs, "epoch"), "more": more}
        sizes = {"rate": rate, "base": f"{base:,}", "size": f"{size:,}"}
        far, words = "small" if factor > 1 else "large", metric_words(named.objective.name)
        yield Note.of("rate_off", **sizes, **how, far=far, words=words, values=join_words(texts))
        return


def _without_rule(trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Yield a note if no setting follows the batch size, because the optimizer has no rule."""
    for trial in trials:
        scaling, factor = trial.last.scaling, rate_factor(trial)
        if scaling is None or scaling.rule or scaling.batch_size == scaling.base_batch_size:
            continue
        if math.isclose(scaling.learning_rate_ratio, factor):  # `build` does not scale it either.
            yield Note.of("no_rule", optimizer=trial.last.optimizer)
            return


def _curves(trial: TrialRecord) -> list[list[float]]:
    """Return the known values of the objective by epoch, for each run that has any."""
    curves = [[epoch.finite(trial.objective.name) for epoch in e.epochs] for e in trial.executions]
    return [known for curve in curves if (known := [v for v in curve if v is not None])]


def _noise(decision: Decision, pair: Sequence[TrialRecord], trials: Iterable[TrialRecord]) -> float:
    """Return two standard errors of the difference of two trials.

    The variance of a run is pooled over all trials with several runs. If there are none, the
    standard deviation is assumed to be half of the tolerance.
    """
    values = [[v for v in t.judged_values if v is not None] for t in trials]
    squares = [((v - fmean(row)) ** 2, len(row)) for row in values if row[1:] for v in row]
    deviation = (decision.tolerance or 0.0) / 2
    if squares:
        freedom = sum((count - 1) / count for _, count in squares)
        deviation = max(deviation / 4, math.sqrt(sum(square for square, _ in squares) / freedom))
    return 2 * deviation * math.sqrt(sum(1 / len(_curves(trial)) for trial in pair))


def _use(decision: Decision, run: ExecutionRecord) -> Iterator[Note]:
    """Yield notes on the settings that `apply` sets besides the rate, and on callbacks of `fit`."""
    if run.plan is None:  # A custom `HyperModel.fit` trained.
        return
    if run.budget or run.target or _ended_by_callback(run):
        yield Note.of("callbacks_needed")
    built, parts = run.scaling.given if run.scaling else {}, []
    for name, value in decision.settings.items():
        if name not in ("micro_batch_size", "learning_rate"):
            values = built.get(name), value if isinstance(value, tuple) else (value,)
            texts = [join_words(map(_setting_text, part)) for part in values if part]
            parts.append(f"`{name}` {'from' if texts[1:] else 'to'} {' to '.join(texts)}")
    if parts:
        steps, more = decision.settings.get("steps_per_execution"), ""
        if steps:
            more = f" Callbacks then see only one batch in {steps}. To keep the model's "
            more += "`steps_per_execution`, call `apply(..., steps_per_execution=False)`."
        yield Note.of("also_set", settings=join_words(parts), more=more)
    trained = (*decision.trials, *(trial for trial, _ in decision.left_out))
    whole = max((t.batch_size for t in trained if t.last.accumulation_steps == 1), default=0)
    if (run.accumulation_steps or 1) > 1:
        yield Note.of("batches_cut", size=f"{run.micro_batch_size:,}")
    elif whole:
        yield Note.of("batches_whole", size=f"{whole:,}")


def _setting_text(value: float | str) -> str:
    """Format a setting. If a number is just below 1, write two digits of 1 - x, as in 0.9995."""
    if isinstance(value, str):
        return value
    distance = 1 - value
    return f"{1 - float(f'{distance:.2g}'):.10g}" if 0 < distance < 0.01 else setting(value)


def _binding_here(
    decision: Decision, best: TrialRecord, trials: Sequence[TrialRecord], words: str
) -> Iterator[Note]:
    """Yield notes on the limit that keeps the batch size of the answer from being larger."""
    # While training waits for data, its samples/s do not show the speed of the device.
    if (best.data_wait_share or 0) > MUCH_DATA_WAIT:
        yield from _waiting(trials)
        return
    larger = [
        trial
        for trial in trials
        if trial.batch_size > best.batch_size
        and compared_settings(trial) == compared_settings(best)
        and len(device_kinds([trial, best])) < 2
    ]
    scale = best.noise_scale
    if scale and scale.ends is not None and best.batch_size > scale.ends[1]:
        yield Note.of("noise_binds", scale=format_number(scale.value or 0.0, 2))
    run, size = best.last, best.last.micro_batch_size
    rows, most = -(-run.batch_size // run.replicas), run.most_in_memory
    parts = -(-rows // most) if most else 1  # The smallest number of parts that fit.
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        next_size = min(trial.batch_size for trial in larger)
        how = f"the next larger batch size, {next_size:,}, ran out of memory"
        yield Note.of("memory_binds", how=f"{how}. A smaller `micro_batch_size` needs less")
    # If there are more parts, a batch was cut because smaller parts are faster.
    elif most and size and rows > size == -(-rows // parts):
        how = f"{most:,} examples fit at once, so batches are cut into micro-batches of {size:,}"
        yield Note.of("memory_binds", how=how)
    if (gain := _given_up_for_updates(decision, best, trials)) is not None:
        yield Note.of("updates_bind", gain=format_number(gain, 2), words=words)


def _end_of_range(
    decision: Decision, best: TrialRecord, sizes: Collection[int], *, is_limited: bool
) -> Iterator[Note]:
    """Note that the answer is the largest or the smallest size, if one beyond may be better."""
    size, run, is_largest = best.batch_size, best.last, best.batch_size == max(sizes)
    others = [trial for trial in decision.trials if trial is not best]
    if not others or size not in (min(sizes), max(sizes)) or size == 1:
        return
    by_memory = 2 * size > run.replicas * (run.most_in_memory or math.inf)
    by_data = not run.epochs or run.epochs[0].examples < _FEWEST_BATCHES * 2 * size
    if is_largest and (is_limited or by_memory or by_data):
        return
    near = others[-1 if is_largest else 0]
    than, speed = f"batch size {near.batch_size:,}", speed_against(decision, best, near)
    # The share of the time that depends on the number of updates. Twice the size halves it.
    share = (speed.value - 1) / (size / near.batch_size - 1) if speed else 0.0
    values = [trial.judged_value or 0.0 for trial in (best, near)]
    if best.objective.sign * (values[0] - values[1]) > (decision.tolerance or 0.0):
        why, may = f"{than} reached a worse {metric_words(best.objective.name)}", "better"
    elif is_largest and speed and min(speed.ends or [speed.value]) > 1 > AS_FAST * (1 - share / 2):
        why, may = f"it trains {format_number(speed.value, 2)} times as fast as {than}", "faster"
    else:
        return
    ends = ("largest", "larger", 2 * size) if is_largest else ("smallest", "smaller", size // 2)
    end = dict(zip(("end", "other", "next"), ends, strict=True))
    yield Note.of("end_of_range", size=f"{size:,}", why=why, may=may, **end)


def _given_up_for_updates(
    decision: Decision, best: TrialRecord, trials: Sequence[TrialRecord]
) -> float | None:
    """Return the gain in speed if every larger batch was faster and less accurate, else None."""
    updates = best.mean(lambda e: e.updates)
    # A size that is not compared may have trained only at a wrong learning rate.
    larger = [trial for trial in decision.trials if trial.batch_size > best.batch_size]
    budgets = {(len(run.epochs), end_text(run)) for run in trained_runs(trials)}
    same_epochs = len(budgets) == 1 and not budgets.pop()[1]
    if not (larger and same_epochs and updates) or is_time(best.objective):
        return None
    gains = []
    for trial in larger:
        # With `steps_per_epoch` all sizes make the same number of updates.
        fewer = (trial.mean(lambda e: e.updates) or updates) < updates
        speed = speed_against(decision, trial, best)
        faster = speed and min(speed.ends or [speed.value]) > 1
        if not (fewer and speed and faster and trial.batch_size in decision.worse):
            return None
        gains.append(speed.value)
    return max(gains) if max(gains) > 1 + _SMALL_GAIN else None


def _ended_by_callback(run: ExecutionRecord) -> bool:
    return run.length == "complete" and len(run.epochs) < (run.epochs_asked or 0)


def _still_rising(trial: TrialRecord, tolerance: float, words: str) -> Iterator[Note]:
    """Yield a note if the objective still improved in the last fifth of training."""
    name, sign = trial.objective.name, trial.objective.sign
    curves = [[epoch.finite(name) for epoch in run.epochs] for run in trial.executions]
    count = min(map(len, curves))
    if count < 3 or trial.last.target is not None:  # Metrics always improve in the first epochs.
        return
    if any(run.budget is None and _ended_by_callback(run) for run in trial.executions):
        return  # `EarlyStopping` would also end a longer training.
    number = max(1, count // 5)
    pairs = [(curve[count - 1 - number], curve[count - 1]) for curve in curves]
    gains = [last - first for first, last in pairs if first is not None and last is not None]
    gain = sign * sum(gains) / len(gains) if gains else 0.0
    if gain > tolerance / 2:
        last = "epoch" if number == 1 else f"{number:,} epochs"
        yield Note.of("still_rising", words=words, gain=format_number(gain, 2), last=last)


def _failures(named: TrialRecord, trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Yield a note on how often runs may fail, if one failed at this rate and a similar size."""
    sizes = sorted({trial.batch_size for trial in trials})
    place, succeeded = sizes.index(named.batch_size), len(named.executions)
    near = sizes[max(0, place - 1) : place + 2]
    same_rate = [t for t in trials if rate_factor(t) == rate_factor(named)]
    if failed := [t for t in same_rate if t.batch_size in near and t.status == "failed"]:
        runs = f"{pluralize(succeeded, 'run')} with batch size {named.batch_size:,}"
        how = {"failed": f"{failed[-1].batch_size:,}", "how": failed[-1].outcome}
        rate = percent(1 - 0.05 ** (1 / succeeded))
        yield Note.of("failure_rate", **how, trainings=runs, rate=rate)


def _conditions(trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Yield the notes that do not depend on the decision."""
    all_trials, trials = trials, [rates[0] for rates in rates_of_settings(trials)]
    lacking = (o for t in trials if (o := t.last.outcomes) and o.lacking_blocks)
    if (outcomes := next(lacking, None)) is not None and outcomes.step is not None:
        counts = {"lacking": outcomes.lacking_blocks, "blocks": len(outcomes.values)}
        yield Note.of("blocks_lack_a_class", **counts, step=setting(outcomes.step))
    names = {name for t in trials for run in t.executions for e in run.epochs for name in e.metrics}
    if trials and f"val_{(name := trials[0].objective.name)}" in names:
        yield Note.of("objective_of_training", name=name)
    seen = [(t.batch_size, t.last.batch_size_seen) for t in trials]
    if others := [(size, most) for size, most in seen if most not in (None, size)]:
        yield Note.of("another_batch_size", asked=others[0][0], seen=others[0][1])
    yield from _waiting(all_trials)
    workers = max((e.workers_on_device or 1 for t in trials for e in t.executions), default=1)
    if workers > 1:
        yield Note.of("shared_device", workers=workers)
    if len(kinds := device_kinds(trials)) > 1:
        yield Note.of("devices_differ", devices=join_words(kinds))
    if names := rate_setters(all_trials):
        rates = {e.learning_rate for t in all_trials for run in t.executions for e in run.epochs}
        known = sorted(rate for rate in rates if rate)
        ends = dict.fromkeys(setting(rate) for rate in (*known[:1], *known[-1:]))
        yield Note.of("rates_by_callback", who=join_words(names), ends=" to ".join(ends))
    # A model that predicts one class matters only if it is the answer.
    notes = [n for trial in all_trials for n in trial.notes if n.code != "most_common_class"]
    yield from {note.code: note for note in reversed(notes)}.values()  # The first of each code.


def _sizes(trials: Iterable[TrialRecord]) -> str:
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in trials)
    return f"{'batch sizes' if len(sizes) > 1 else 'batch size'} {join_words(sizes)}"


def _waiting(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    if waiting := [trial for trial in trials if (trial.data_wait_share or 0) > MUCH_DATA_WAIT]:
        most = percent(max(trial.data_wait_share or 0 for trial in waiting))
        yield Note.of("input_binds", when=f"up to {most} of its time at {_sizes(waiting)}")


def _lagging(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    """Yield a note if moving averages lag, so that validation is worse than the model."""
    lags = [(lag, t) for t in trials for e in t.executions if (lag := _lag(e)) is not None]
    if lags:
        (_, values), trial = max(lags, key=lambda pair: pair[0][0])
        sizes = _sizes(t for _, t in lags)
        yield Note.of("lagging_statistics", sizes=sizes, at=f"{trial.batch_size:,}", **values)


def _lag(execution: ExecutionRecord) -> tuple[float, dict[str, str]] | None:
    """Return how far validation is below training, with values of the note; None without a lag."""
    scaling, updates = execution.scaling, execution.updates
    if not (execution.epochs and updates and scaling):
        return None
    slowest = max(scaling.made.get("batch_norm_momentum", ()), default=0.0)
    what, cure = "BatchNormalization's moving statistics", "the momentum of the layers"
    momenta = scaling.made.get("ema_momentum", ()) if execution.averages_validated else ()
    if max(momenta, default=0.0) > slowest:
        slowest = max(momenta)
        what, cure = "the validated averages of the weights", "`ema_momentum`"
    last = execution.epochs[-1]
    gaps = [
        (training - validation, training, validation)
        for name in last.metrics
        if is_accuracy(name)
        and (training := last.finite(name)) is not None
        and (validation := last.finite(f"val_{name}")) is not None
    ]
    gap, training, validation = max(gaps, default=(0.0, 0.0, 0.0))
    lags = 0 < slowest < 1 and updates < _AVERAGING_TIMES / (1 - slowest)
    if not lags or gap <= _FAR_BELOW:
        return None
    return gap, {
        "training": format_number(training),
        "validation": format_number(validation),
        "updates": pluralize(updates, "update"),
        "memory": format_number(1 / (1 - slowest)),
        "what": what,
        "cure": cure,
    }
