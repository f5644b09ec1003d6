"""The notes of a decision: which limit of the batch size binds, and what may change the answer.

A study does not know the time to a goal, as `kbatch.recommend` does, so it names the limits that
its trials have met.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    ordinal,
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
)
from kbatch.study.decision import Decision
from kbatch.study.trial import OWN_COLUMNS, TrialRecord, device_kinds
from kbatch.training.metrics import is_accuracy, metric_words

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# What the seed does not change, and what other seeds would not show.
_PINNED = {
    "weights": ("began with the same weights", "initialization"),
    "order": ("saw the examples in the same order", "order"),
}
# What would make an answer certain, by the obstacle of its judgement.
_TO_BE_CERTAIN = {
    None: "{more} may make the answer certain",
    "alone": "Another batch size that completes with the same settings is compared with it",
    "one_execution": "{more} shows what another seed changes",
    "pinned": "A `build` without `set_random_seed`, or shuffled data, lets seeds differ",
    "few_examples": "More validation examples, above all of a rare class, are needed",
    "heavy_tails": "A metric whose examples count alike, such as an accuracy, can be certain",
}
# A smaller gain in samples/s, as a share, is not worth a note.
_SMALL_GAIN = 0.1
# A measured training time that differs by this factor is worth a note.
_OTHER_TIME = 1.3
# Validation so far below training is more than a model usually fits its training data too well.
_FAR_BELOW = 0.1
# After five averaging times, exp(-5) = 0.7 % of an average is still its initial value.
_AVERAGING_TIMES = 5


def notes_of(
    found: Decision,
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    *,
    missing: int,
    problems: Sequence[str],
) -> Iterator[Note]:
    """Say what the page leaves out: what limits the answer, and what may change it."""
    if missing:
        yield Note.of("trials_missing", count=missing)
    if problems:
        more = f" ({len(problems) - 1:,} more)" if problems[1:] else ""
        yield Note.of("left_out", first=f"{one_line(problems[0])}{more}")
    if why := search.get("grid_because"):
        yield Note.of("grid_because", why=why)
    if search.get("base_added"):
        yield Note.of("base_added", size=f"{search['base_batch_size']:,}")
    race = search.get("strategy") == "race"
    untrained = {*search.get("batch_sizes", ())} - {trial.batch_size for trial in trials}
    cut_off = untrained and len(found.trials) == 1 and (race or "time_budget_s" in search)
    if cut_off:
        each = zip(search.get("training_s", ()), search["batch_sizes"], strict=False)
        times = [f"{duration_text(s)} at batch size {size:,}" for s, size in each]
        took = f" By the timed steps, a training run takes {join_words(times)}." if times else ""
        limits = "`time_budget_s`" if not race else "`time_budget_s` or `max_trainings`"
        yield Note.of("sizes_not_compared", limits=limits, measured=took)
    if (best := found.trial) is not None:
        words = metric_words(best.objective.name)
        if not cut_off:
            yield from _certainty(found, race)
        yield from _rate(found, best, trials, search)
        if search.get("learning_rate_scaling") == "auto":
            yield from _without_rule(trials)
        yield from _use(found, best.last)
        yield from _binding_here(found, best, trials, words)
        if found.tolerance is not None:
            yield from _still_rising(best, found.tolerance, words)
        yield from _failures(best, trials)
        yield from (note for note in best.notes if note.code == "most_common_class")
        yield from _lagging(found.trials)
    yield from _conditions(trials)


def _certainty(found: Decision, race: bool) -> Iterator[Note]:
    """Say what would make the answer certain, and what other seeds would not show."""
    judgement, speedup = found.judgement, found.speedup
    if judgement is None:
        return
    if not found.certain and (how := _TO_BE_CERTAIN.get(judgement.obstacle)):
        more = f"A larger `{'max_trainings' if race else 'executions_per_trial'}`"
        if judgement.obstacle and not race:
            more = "`executions_per_trial=3`"
        yield Note.of("to_be_certain", how=how.format(more=more))
    costs = {t.trial_id: judgement.costs.get((t.batch_size, rate_factor(t))) for t in found.trials}
    if (named := found.trial) is not None and (cost := costs[named.trial_id]):
        better = [t for t in found.trials if t.rank[:2] <= named.rank[:2]]
        if faster := [t for t in better if AS_FAST * (costs[t.trial_id] or cost) < cost]:
            sizes = _sizes(faster).capitalize()
            yield Note.of("shown_better", sizes=sizes, named=f"{named.batch_size:,}")
        own_s, other_times = named.mean(training_seconds) or 0.0, []
        for trial in found.trials:
            shown_s = own_s * (costs[trial.trial_id] or 0.0) / cost
            measured_s = trial.mean(training_seconds) or shown_s
            if shown_s and not 1 / _OTHER_TIME < measured_s / shown_s < _OTHER_TIME:
                times = f"{duration_text(measured_s)}, not {duration_text(shown_s)}"
                other_times.append(f"batch size {trial.batch_size:,} took {times}")
        if other_times:
            yield Note.of("times_corrected", times="; ".join(other_times))
    if not found.certain and judgement.coarse:
        yield Note.of("coarse_target")
    if judgement.pinned in _PINNED:
        began, what = _PINNED[judgement.pinned]
        yield Note.of("same_start", began=began, what=what)
    if speedup and speedup.ends and speedup.ends[0] < 1 < speedup.ends[1]:
        ratio, low, high = (format_number(one, 2) for one in (speedup.value, *speedup.ends))
        if max(speedup.value, 1 / speedup.value) > AS_FAST:
            sizes = {"base": found.base_batch_size, "size": found.batch_size}
            yield Note.of("times_scatter", **sizes, ratio=ratio, low=low, high=high)


def _rate(
    found: Decision, named: TrialRecord, trials: Sequence[TrialRecord], search: Mapping[str, Any]
) -> Iterator[Note]:
    """Say that your learning rate was not checked, or how it compares at one batch size."""
    if (scaling := named.last.scaling) is None or found.rate_setters:
        return
    rate = setting(scaling.learning_rate / scaling.learning_rate_ratio)
    base, factor = scaling.base_batch_size, rate_factor(named)
    if FACTOR_NAME not in named.hyperparameters:
        searched = named.hyperparameters.keys() - {*OWN_COLUMNS}
        settled = search.get("search_learning_rate") is False or search.get("grid_because")
        if not searched and not settled:
            more = f" It follows the {scaling.rule} rule." if scaling.rule else ""
            yield Note.of("rate_unchecked", rate=rate, size=f"{base:,}", more=more)
        return
    for size in dict.fromkeys((base, named.batch_size)):
        tried = {rate_factor(t): t for t in trials if t.batch_size == size and _curves(t)}
        if factor == 1 or not {1.0, factor} <= tried.keys():
            continue
        own, other = tried[1.0], tried[factor]
        first = min(len(curve) for trial in (own, other) for curve in _curves(trial))
        mine, its = (_value_of_first_epochs(trial, first) for trial in (own, other))
        if named.objective.sign * (its - mine) <= _noise(found, own, other, trials):
            continue
        at_end = {FACTORS[0]: "smaller", FACTORS[-1]: "larger"}
        values = [
            f"{format_number(value, 4)} at {setting(trial.learning_rate or 0.0)}"
            for value, trial in ((its, other), (mine, own))
        ]
        yield Note.of(
            "rate_off",
            rate=rate,
            base=f"{base:,}",
            size=f"{size:,}",
            epochs=pluralize(first, "epoch"),
            far="small" if factor > 1 else "large",
            words=metric_words(named.objective.name),
            values=join_words(values),
            more=f" No {at_end[factor]} learning rate was tried." if factor in at_end else "",
        )
        return


def _without_rule(trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Say if no setting follows the batch size because the optimizer has no rule."""
    for trial in trials:
        scaling, factor = trial.last.scaling, rate_factor(trial)
        if scaling is None or scaling.rule or scaling.batch_size == scaling.base_batch_size:
            continue
        if math.isclose(scaling.learning_rate_ratio, factor):  # `build` follows no size itself.
            yield Note.of("no_rule", optimizer=trial.last.optimizer)
            return


def _curves(trial: TrialRecord) -> list[list[float]]:
    """Return the objective of each run at the end of its epochs."""
    curves = [[epoch.finite(trial.objective.name) for epoch in e.epochs] for e in trial.executions]
    return [known for curve in curves if (known := [v for v in curve if v is not None])]


def _value_of_first_epochs(trial: TrialRecord, epochs: int) -> float:
    """Value a trial by its first epochs: a run that looks for a learning rate may be short."""
    larger, curves = trial.objective.direction == "max", [c[:epochs] for c in _curves(trial)]
    return fmean(fmean(c[k] for k in best_epochs(c, larger_is_better=larger)) for c in curves)


def _noise(
    found: Decision, own: TrialRecord, other: TrialRecord, trials: Iterable[TrialRecord]
) -> float:
    """Return two standard errors of the difference of two trials.

    The variance of a run is pooled over all trials that ran several times. If there are none, a run
    is assumed to scatter by half of the tolerance.
    """
    values = [[v for v in t.judged_values if v is not None] for t in trials]
    squares = [((v - fmean(each)) ** 2, len(each)) for each in values if each[1:] for v in each]
    deviation = (found.tolerance or 0.0) / 2
    if squares:
        freedom = sum((count - 1) / count for _, count in squares)
        deviation = max(deviation / 4, math.sqrt(sum(one for one, _ in squares) / freedom))
    return 2 * deviation * math.sqrt(sum(1 / len(_curves(trial)) for trial in (own, other)))


def _use(found: Decision, run: ExecutionRecord) -> Iterator[Note]:
    """Say what `apply` sets beside the learning rate, and what else `fit` needs."""
    if run.plan is None:  # It was trained as a HyperModel's own `fit` is written.
        return
    if run.budget or run.target or _ended_by_callback(run):
        yield Note.of("callbacks_needed")
    given, parts = run.scaling.given if run.scaling else {}, []
    for name, value in found.settings.items():
        if name not in ("micro_batch_size", "learning_rate"):
            after = value if isinstance(value, tuple) else (value,)
            texts = [
                join_words(map(_near_one_text, one)) for one in (given.get(name), after) if one
            ]
            parts.append(f"`{name}` {' -> '.join(texts)}")
    if parts:
        steps = found.settings.get("steps_per_execution")
        more = f" Callbacks then see every {ordinal(steps)} batch only. " if steps else ""
        more += "`steps_per_execution=False` keeps your number." if steps else ""
        yield Note.of("also_set", settings=join_words(parts), more=more)
    fitted = (*found.trials, *(trial for trial, _ in found.left_out))
    whole = max((t.batch_size for t in fitted if t.last.accumulation_steps == 1), default=0)
    if (run.accumulation_steps or 1) > 1:
        size = f"{run.micro_batch_size:,}"
        yield Note.of("batches_cut", size=size)
    elif whole:
        yield Note.of("batches_whole", size=f"{whole:,}")


def _near_one_text(value: float | str) -> str:
    """Write a setting; a number near 1 by two digits of its distance: 0.9995 is not 0.999."""
    if isinstance(value, str):
        return value
    distance = 1 - value
    near = 0 < distance < 0.01
    return f"{1 - float(f'{distance:.2g}'):.10g}" if near else setting(value)


def _binding_here(
    found: Decision, best: TrialRecord, trials: Sequence[TrialRecord], words: str
) -> Iterator[Note]:
    """Compare the trial that is named with larger batch sizes of its settings."""
    # While it waits for data, its samples/s say nothing about the device.
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
    parts = -(-rows // most) if most else 1  # The fewest that fit.
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        ran_out = f"the next larger batch size, {min(trial.batch_size for trial in larger):,}, ran "
        less = "out of it, and a smaller `micro_batch_size` needs less"
        yield Note.of("memory_binds", how=f"{ran_out}{less}")
    # A batch may also be cut because less at once is faster.
    elif most and size and rows > size == -(-rows // parts):
        how = f"at most {most:,} examples fit in it at once, so batches are cut into {size:,}"
        yield Note.of("memory_binds", how=how)
    if (gain := _given_up_for_updates(found, best, trials)) is not None:
        yield Note.of("updates_bind", gain=format_number(gain, 2), words=words)


def _given_up_for_updates(
    found: Decision, best: TrialRecord, trials: Sequence[TrialRecord]
) -> float | None:
    """Return the gain in speed where every larger batch was faster and learnt less, else None."""
    made = best.mean(lambda e: e.updates)
    # A race may not have tried the right learning rate of a size that is not compared.
    larger = [trial for trial in found.trials if trial.batch_size > best.batch_size]
    budgets = {(len(run.epochs), end_text(run)) for run in trained_runs(trials)}
    same_epochs = len(budgets) == 1 and not budgets.pop()[1]
    alike = len(device_kinds([*larger, best])) < 2
    if not (larger and same_epochs and made and alike) or is_time(best.objective):
        return None
    for trial in larger:
        fewer = (trial.mean(lambda e: e.updates) or made) < made  # Not with `steps_per_epoch`.
        rates = [one.throughput and one.throughput.ends for one in (trial, best)]
        faster = rates[0] and rates[1] and rates[0][0] > rates[1][1]
        if not (fewer and faster and trial.batch_size in found.worse):
            return None
    fastest = max(trial.samples_per_second or 0.0 for trial in larger)
    gain = fastest / (best.samples_per_second or fastest)
    return gain if gain > 1 + _SMALL_GAIN else None


def _ended_by_callback(run: ExecutionRecord) -> bool:
    return run.length == "complete" and len(run.epochs) < (run.epochs_asked or 0)


def _still_rising(trial: TrialRecord, tolerance: float, words: str) -> Iterator[Note]:
    """Say whether the objective still got better in the last fifth of training."""
    name, sign = trial.objective.name, trial.objective.sign
    curves = [[epoch.finite(name) for epoch in run.epochs] for run in trial.executions]
    count = min(map(len, curves))
    if count < 3 or trial.last.target is not None:  # The first epochs always rise.
        return
    if any(run.budget is None and _ended_by_callback(run) for run in trial.executions):
        return  # `EarlyStopping` would end a longer training too.
    number = max(1, count // 5)
    pairs = [(curve[count - 1 - number], curve[count - 1]) for curve in curves]
    gains = [last - first for first, last in pairs if first is not None and last is not None]
    gain = sign * sum(gains) / len(gains) if gains else 0.0
    if gain > tolerance / 2:
        last = "epoch" if number == 1 else f"{number:,} epochs"
        yield Note.of("still_rising", words=words, gain=format_number(gain, 2), last=last)


def _failures(named: TrialRecord, trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Say what successes leave open if the named size, or a neighbour, failed at the named rate."""
    sizes = sorted({trial.batch_size for trial in trials})
    place, succeeded = sizes.index(named.batch_size), len(named.executions)
    near = sizes[max(0, place - 1) : place + 2]
    same_rate = [t for t in trials if rate_factor(t) == rate_factor(named)]
    if failed := [t for t in same_rate if t.batch_size in near and t.status == "failed"]:
        yield Note.of(
            "failure_rate",
            failed=f"{failed[-1].batch_size:,}",
            how=failed[-1].outcome,
            trainings=f"{pluralize(succeeded, 'training run')} of {named.batch_size:,}",
            rate=percent(1 - 0.05 ** (1 / succeeded)),
        )


def _conditions(trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Find what limits the conclusions from trials, whatever is decided."""
    every, trials = trials, [rates[0] for rates in rates_of_settings(trials)]
    outcomes = next((one for t in trials if (one := t.last.outcomes) and one.lacking_blocks), None)
    if outcomes is not None and outcomes.step is not None:
        given = {"lacking": outcomes.lacking_blocks, "blocks": len(outcomes.values)}
        yield Note.of("blocks_lack_a_class", **given, step=setting(outcomes.step))
    names = {name for t in trials for run in t.executions for e in run.epochs for name in e.metrics}
    if trials and f"val_{(name := trials[0].objective.name)}" in names:
        yield Note.of("objective_of_training", name=name)
    for trial in trials:
        seen = trial.last.batch_size_seen
        if seen is not None and seen != trial.batch_size:
            yield Note.of("another_batch_size", asked=trial.batch_size, seen=seen)
            break
    yield from _waiting(every)
    workers = max((e.workers_on_device or 1 for t in trials for e in t.executions), default=1)
    if workers > 1:
        yield Note.of("shared_device", workers=workers)
    if len(kinds := device_kinds(trials)) > 1:
        yield Note.of("devices_differ", devices=join_words(kinds))
    yield from _rates(every)
    # An untrained model matters only if it is the answer.
    noted = [n for trial in every for n in trial.notes if n.code != "most_common_class"]
    yield from {note.code: note for note in reversed(noted)}.values()  # The first of each kind.


def _sizes(trials: Iterable[TrialRecord]) -> str:
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in trials)
    return f"{'batch sizes' if len(sizes) > 1 else 'batch size'} {join_words(sizes)}"


def _waiting(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    if found := [trial for trial in trials if (trial.data_wait_share or 0) > MUCH_DATA_WAIT]:
        most = percent(max(trial.data_wait_share or 0 for trial in found))
        yield Note.of("input_binds", when=f"up to {most} of its time at {_sizes(found)}")


def _rates(trials: Sequence[TrialRecord]) -> Iterator[Note]:
    """Say that callbacks set learning rates of their own."""
    if names := rate_setters(trials):
        rates = {e.learning_rate for t in trials for run in t.executions for e in run.epochs}
        known = sorted(rate for rate in rates if rate)
        ends = dict.fromkeys(setting(rate) for rate in (*known[:1], *known[-1:]))
        yield Note.of("rates_by_callback", who=join_words(names), ends=" to ".join(ends))


def _lagging(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    """Say if averages lag, so that validation does not show what the model has learnt."""
    lags = [(lag, t) for t in trials for e in t.executions if (lag := _lag(e)) is not None]
    if lags:
        (_, values), trial = max(lags, key=lambda pair: pair[0][0])
        sizes = _sizes(t for _, t in lags)
        yield Note.of("lagging_statistics", sizes=sizes, at=f"{trial.batch_size:,}", **values)


def _lag(execution: ExecutionRecord) -> tuple[float, dict[str, str]] | None:
    """Return how far validation is below training where an average lags, and what to say of it."""
    scaling, updates = execution.scaling, execution.updates
    if not (execution.epochs and updates and scaling):
        return None
    slowest = max(scaling.made.get("batch_norm_momentum", ()), default=0.0)
    what, cure = "BatchNormalization's moving statistics", "the momentum of the layers"
    of_weights = scaling.made.get("ema_momentum", ()) if execution.averages_validated else ()
    if max(of_weights, default=0.0) > slowest:
        slowest = max(of_weights)
        what, cure = "the averages of the weights that were validated", "`ema_momentum`"
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
