"""What a reader of a study's numbers must know before trusting them."""

from collections.abc import Iterable, Iterator

from kbatch.page.numbers import (
    count_range,
    format_number,
    join_words,
    one_line,
    percent,
    pluralize,
    setting,
)
from kbatch.page.section import Note
from kbatch.records.training_run import Budget, ExecutionRecord
from kbatch.study.limits import MUCH_DATA_WAIT
from kbatch.study.names import at_most, budget_text, diverged, end_text, outcome, trial_names
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord, device_kinds

_SPEED = ("samples_per_second",)
_LEARNT = ("quality", "updates")


def caveats(study: Study) -> tuple[Note, ...]:
    """List what limits the conclusions from a study with at least one trial."""
    rules = (_missing, _other_batch, _small_last_batch, _speed, _budget)
    rules += (_rates, _lagging, _noise, _of_trials)
    return tuple(note for rule in rules for note in rule(study))


def _note(
    label: str, text: str, columns: tuple[str, ...] = (), trials: Iterable[TrialRecord] = ()
) -> Note:
    """Make a note about the numbers of trials in columns of their table; of all trials as none."""
    return Note("", label, text, columns, tuple(trial.trial_id for trial in trials))


def _sizes(trials: Iterable[TrialRecord]) -> str:
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in trials)
    return f"{'batch sizes' if len(sizes) > 1 else 'batch size'} {join_words(sizes)}"


def _missing(study: Study) -> Iterator[Note]:
    for problem in study.problems:
        yield _note("left out", f"Left out: {one_line(problem)}")
    names = trial_names(study.trials)._replace(several_policies=True)
    alike: dict[tuple[str, str], list[TrialRecord]] = {}
    for trial in study.trials:
        if trial.status != "completed":
            reason = one_line(trial.failure) if trial.failure else ""
            if not diverged(trial):
                reason = f"{outcome(trial)}{f': {reason}' if reason else '.'}"
            alike.setdefault((outcome(trial), reason), []).append(trial)
    for (label, reason), trials in alike.items():
        sizes, have = ("Batch sizes", "have") if len(trials) > 1 else ("Batch size", "has")
        named = join_words(at_most([names.name(trial) for trial in trials]))
        yield _note(label, f"{sizes} {named} {have} no result: {reason}", ("status",), trials)


def _other_batch(study: Study) -> Iterator[Note]:
    for trial in study.trials:
        seen = trial.executions[-1].batch_size_seen
        if seen is not None and seen != trial.batch_size:
            text = (
                f"Batch size {trial.batch_size:,} was asked for, but the train step received at "
                f"most {seen:,} examples at once: read this trial as batch size {seen:,}."
            )
            yield _note("another batch size", text, ("batch_size",), [trial])


# A last batch below this share of a whole one counts where an epoch has fewer updates than these.
_SMALL_SHARE, _FEW_UPDATES = 0.1, 20


def _small_last_batch(study: Study) -> Iterator[Note]:
    """Say where the last batch of an epoch has few examples and makes one of few updates."""
    found: list[tuple[int, TrialRecord]] = []
    for trial in study.trials:
        size, epochs = trial.batch_size, trial.executions[-1].epochs
        examples = epochs[0].examples if epochs else 0
        few = size < examples < _FEW_UPDATES * size
        if few and 0 < examples % size < _SMALL_SHARE * size:
            found.append((examples % size, trial))
    if found:
        trials = [trial for _, trial in found]
        rest, fewest = min(found, key=lambda one: one[0])
        where = f" at {fewest.batch_size:,}, the fewest" if len(found) > 1 else ""
        text = (
            f"The last batch of an epoch is small at {_sizes(trials)} ({pluralize(rest, 'example')}"
            f"{where}): it makes a full update from a far noisier gradient, and an epoch has few "
            "updates. To compare these sizes, train on a number of examples that they divide."
        )
        yield _note("small last batch", text, _LEARNT, trials)


_UNSTABLE_SPREAD, _UNEVEN = 0.2, 0.1


def _unevenness(trial: TrialRecord) -> float:
    got, median = trial.samples_per_second, trial.window_samples_per_second
    return abs(got / median - 1) if got and median else 0.0


def _is_unstable(execution: ExecutionRecord) -> bool:
    rate = execution.throughput
    return rate is not None and (rate.high - rate.low) / rate.median > _UNSTABLE_SPREAD


def _workers(trial: TrialRecord) -> int:
    return max(execution.workers_on_device or 1 for execution in trial.executions)


def _speed(study: Study) -> Iterator[Note]:
    trials = study.trials
    if found := [trial for trial in trials if (trial.data_wait_share or 0) > MUCH_DATA_WAIT]:
        text = (
            f"Training waited for data more than {percent(MUCH_DATA_WAIT)} of its time at "
            f"{_sizes(found)}: there the samples/s, and a comparison of batch sizes by them, "
            "measure the input pipeline, not the model. `kbatch.profile_input_pipeline` tries what "
            "would help."
        )
        yield _note("waiting for data", text, _SPEED, found)
    if found := [t for t in trials if any(map(_is_unstable, t.executions))]:
        text = (
            f"Timing was not stable at {_sizes(found)}: the quartiles of samples/s lie more than "
            f"{percent(_UNSTABLE_SPREAD)} of the median apart. Repeat on an idle machine."
        )
        yield _note("unstable timing", text, _SPEED, found)
    if found := [trial for trial in trials if _unevenness(trial) > _UNEVEN]:
        most = max(found, key=_unevenness)
        where = f" at {most.batch_size:,}, the most" if len(found) > 1 else ""
        text = (
            f"Some steps took far longer than most at {_sizes(found)}. The samples/s count all "
            f"steps and differ by more than {percent(_UNEVEN)} from the median of the timing "
            f"windows: {format_number(most.samples_per_second or 0.0)} against "
            f"{format_number(most.window_samples_per_second or 0.0)}{where}."
        )
        yield _note("uneven steps", text, _SPEED, found)
    if found := [trial for trial in trials if _workers(trial) > 1]:
        text = (
            f"The device was shared by {max(map(_workers, found))} workers at {_sizes(found)}: "
            "there the samples/s are those of a part of it, and depend on what the others ran. "
            "Repeat with one worker a device to compare them."
        )
        yield _note("shared device", text, _SPEED, found)
    if len(kinds := device_kinds(trials)) > 1:
        on = (
            f"{_sizes([t for t in trials if kind in device_kinds([t])])} on {kind}"
            for kind in kinds
        )
        text = (
            f"Trials ran on different devices: {'; '.join(on)}. Compare samples/s and seconds "
            "within one device only."
        )
        yield _note("devices differ", text, _SPEED)
    environment = study.search.environment if study.search else None
    if environment and (environment.load_average or 0) > 0.5 * environment.cpu_count:
        text = (
            f"The machine was busy at the start (load average {environment.load_average:.1f} on "
            f"{environment.cpu_count} processors): samples/s may be too low."
        )
        yield _note("busy machine", text, _SPEED)


_LIMITS = {"train_s": "seconds", "updates": "updates", "examples": "examples"}
# Counts that differ by less are those of one budget: a last batch has fewer examples.
_AS_MANY = 0.1


def _budget(study: Study) -> Iterator[Note]:
    """Describe the budget of a study that compares batch sizes, and whom it favours."""
    completed = [trial for trial in study.trials if trial.status == "completed"]
    conditions = study.conditions
    counted_all = all(trial.mean(lambda e: e.updates) is not None for trial in completed)
    if not conditions.epochs or not counted_all or len({t.batch_size for t in completed}) < 2:
        return
    first, small, large = completed[0].executions[0], completed[0], completed[-1]
    budgets = {end_text(execution) for trial in completed for execution in trial.executions}
    epochs = count_range(conditions.epochs, "epoch")
    if len(budgets) > 1 or (not conditions.ends and len(set(conditions.epochs)) > 1):
        had = budget_text(conditions) if len(budgets) > 1 else epochs
        yield _note("budgets differ", f"The budgets differ: executions had {had}.", _LEARNT)
    elif not conditions.ends:
        text = (
            f"Equal-epochs budget: each execution trained for {epochs}, in which "
            f"{_made(small, large)}.{_favours(small, large)} With a budget of time the order may "
            "change."
        )
        yield _note("equal-epochs budget", text, _LEARNT)
    elif first.target is not None:
        missed = [trial for trial in completed if trial.cost("updates_to_target") is None]
        never = f" B{_sizes(missed)[1:]} never reached it." if missed else ""
        text = (
            f"Budget to a target: each execution trained {conditions.ends[0]}. Compare the "
            "time and the updates it took: trials that reached it have similar metrics by design."
            f"{never}"
        )
        yield _note("budget to a target", text, _LEARNT)
    else:
        budget = first.budget or Budget()
        limits = [name for name, value in vars(budget).items() if value is not None]
        what = _LIMITS[limits[0]] if len(limits) == 1 else "spending"
        favours = _favours(small, large)
        if what == "seconds":
            favours = " That is fair to all where the device was the same and idle."
        text = (
            f"Equal-{what} budget: each execution trained for {conditions.ends[0]}, in which "
            f"{_made(small, large)}.{favours}"
        )
        yield _note(f"equal-{what} budget", text, _LEARNT)


def _counts(trial: TrialRecord) -> tuple[float, float]:
    """Return the updates that a trial made, and the examples that they were made of."""
    return trial.mean(lambda e: e.updates) or 0.0, trial.mean(lambda e: e.examples_seen) or 0.0


def _made(small: TrialRecord, large: TrialRecord) -> str:
    updates, examples = zip(_counts(large), _counts(small), strict=True)
    return (
        f"batch size {large.batch_size:,} made {updates[0]:,.0f} updates on {examples[0]:,.0f} "
        f"examples and batch size {small.batch_size:,} made {updates[1]:,.0f} on {examples[1]:,.0f}"
    )


def _favours(small: TrialRecord, large: TrialRecord) -> str:
    """Say whom a budget favoured by what was spent of it; nothing where both counts differ."""
    counts = zip(_counts(small), _counts(large), strict=True)
    same_updates, same_examples = (max(c) <= (1 + _AS_MANY) * min(c) for c in counts)
    if same_updates == same_examples:
        return ""
    if same_updates:
        return " That favours large batches, which see more examples an update."
    return " That favours small batches, which make more updates."


_RATES_APART = 0.1


def _rates(study: Study) -> Iterator[Note]:
    """Say where callbacks changed learning rates by other factors than those of the rule."""
    changes = []
    for trial in study.trials:
        last = trial.executions[-1]
        given, rate = last.learning_rate, last.last_learning_rate
        if trial.status == "completed" and last.scaling and last.scaling.rule and given and rate:
            changes.append((rate / given, given, rate, trial))
    if not changes:
        return
    low, high = (choose(changes, key=lambda one: one[0]) for choose in (min, max))
    if high[0] > (1 + _RATES_APART) * low[0]:
        went = (
            f"from {setting(given)} to {setting(rate)} at {trial.batch_size:,}"
            for _, given, rate, trial in sorted((low, high), key=lambda one: one[3].batch_size)
        )
        text = (
            f"A callback set learning rates in training: {join_words(went)}. So at the end they "
            "did not follow the rule, and sizes were compared at other rates than it gives. Give "
            "`build` a schedule, which the rule scales for each size, not a callback."
        )
        yield _note("learning rates set by a callback", text, ("learning_rate",))


# Validation so far below training is more than a model usually fits its training data too well.
_FAR_BELOW = 0.1
# Before so many averaging times an average still holds some of what it began with: exp(-5) = 0.7 %.
_AVERAGING_TIMES = 5


def _lagging(study: Study) -> Iterator[Note]:
    """List the trials whose validation accuracy shows lagging averages, not their training."""
    lags = [
        (max(of_trial), trial)
        for trial in study.trials
        if (of_trial := [lag for e in trial.executions if (lag := _lag(e)) is not None])
    ]
    if not lags:
        return
    trials = [trial for _, trial in lags]
    most, trial = max(lags, key=lambda pair: pair[0][0])
    _, training, validation, updates, memory, (what, cure) = most
    where = f" at {trial.batch_size:,}" if len(lags) > 1 else ""
    text = (
        f"Training accuracy is far above validation accuracy at {_sizes(trials)} "
        f"({format_number(training)} and {format_number(validation)}{where}), and {what} lag: "
        f"there were {pluralize(updates, 'update')}, and they average over the last "
        f"{format_number(memory)}, 1 / (1 - momentum). Before you compare these sizes, train for "
        f"more updates or lower {cure}."
    )
    yield _note("lagging statistics", text, ("quality",), trials)


_LAGGING = (
    ("BatchNormalization's moving statistics", "the momentum of the layers"),
    ("the averages of the weights that were validated", "`ema_momentum`"),
)


def _lag(
    execution: ExecutionRecord,
) -> tuple[float, float, float, int, float, tuple[str, str]] | None:
    """Return how far validation is below training, both, the updates, how many and what lags."""
    scaling, updates = execution.scaling, execution.updates
    slowest, what = max((m, _LAGGING[0]) for m in (scaling and scaling.batch_norm_momenta) or (0,))
    if execution.averages_validated and scaling and scaling.ema_momentum:
        slowest, what = max((slowest, what), (scaling.ema_momentum, _LAGGING[1]))
    if not (execution.epochs and updates and 0 < slowest < 1):
        return None
    memory = 1 / (1 - slowest)
    last = execution.epochs[-1]
    pairs = [
        (training, validation)
        for name in last.metrics
        if "acc" in name
        and (training := last.finite(name)) is not None
        and (validation := last.finite(f"val_{name}")) is not None
    ]
    if not pairs or updates >= _AVERAGING_TIMES * memory:
        return None
    training, validation = max(pairs, key=lambda pair: pair[0] - pair[1])
    below = training - validation
    return (below, training, validation, updates, memory, what) if below > _FAR_BELOW else None


def _noise(study: Study) -> Iterator[Note]:
    """Say how far the noise scale may be trusted, where one was measured."""
    measured = [trial for trial in study.trials if trial.noise_scale is not None]
    if measured:
        text = (
            "The noise scale is that of each trial's final weights, and grows while a model "
            "learns: it gives the order of magnitude of a useful batch size, not a bound."
        )
        yield _note("noise scale", text, ("noise_scale",))
    optimizers = dict.fromkeys(e.optimizer for trial in measured for e in trial.executions)
    if others := [name for name in optimizers if name not in (None, "SGD")]:
        names = join_words(map(str, others))
        text = (
            "The noise scale is derived for SGD. Whether it gives a useful batch size under "
            f"{names} is disputed: Merrill et al. (2025, arXiv:2505.23971) train on from one "
            "checkpoint at several batch sizes instead. Trials of several sizes to one target "
            "compare them directly."
        )
        yield _note(f"noise scale under {names}", text, ("noise_scale",))


def _of_trials(study: Study) -> Iterator[Note]:
    """Repeat the notes of the trials, each once."""
    noted: dict[tuple[str, str, str], list[TrialRecord]] = {}
    for trial in study.trials:
        for note in trial.notes:
            noted.setdefault((str(note), note.label, note.column), []).append(trial)
    for (text, label, column), found in noted.items():
        where = "" if len(found) == len(study.trials) else f"At {_sizes(found)}: "
        yield _note(label, one_line(f"{where}{text}"), (column,), found)
