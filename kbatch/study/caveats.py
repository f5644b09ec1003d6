"""What a study's numbers do not say for themselves, and that changes what to do next."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kbatch.page.numbers import format_number, join_words, one_line, percent, pluralize, setting
from kbatch.records.notes import Note
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.comparison import rates_of_settings
from kbatch.study.limits import MUCH_DATA_WAIT
from kbatch.study.trial import TrialRecord, device_kinds

if TYPE_CHECKING:
    from kbatch.study.study import Study

# A last batch below this share of a whole one counts where an epoch has fewer updates than these.
_SMALL_SHARE, _FEW_UPDATES = 0.1, 20
# Rates that callbacks changed by factors that differ by less follow the rule.
_RATES_APART = 0.1
# Validation so far below training is more than a model usually fits its training data too well.
_FAR_BELOW = 0.1
# Before so many averaging times an average still holds some of what it began with: exp(-5) = 0.7 %.
_AVERAGING_TIMES = 5


def caveats(study: "Study") -> Iterator[Note]:
    """Find what limits the conclusions from a study."""
    trials = [rates[0] for rates in rates_of_settings(study.trials)]
    if study.problems:
        more = len(study.problems) - 1
        first = f"{one_line(study.problems[0])}{f' ({more:,} more)' if more else ''}"
        yield Note.of("left_out", first=first)
    for trial in trials:
        seen = trial.executions[-1].batch_size_seen
        if seen is not None and seen != trial.batch_size:
            yield Note.of("another_batch_size", asked=trial.batch_size, seen=seen)
            break
    if found := [trial for trial in trials if (trial.data_wait_share or 0) > MUCH_DATA_WAIT]:
        yield Note.of("waiting_for_data", share=percent(MUCH_DATA_WAIT), sizes=_sizes(found))
    workers = max((e.workers_on_device or 1 for t in trials for e in t.executions), default=1)
    if workers > 1:
        yield Note.of("shared_device", workers=workers)
    if len(kinds := device_kinds(trials)) > 1:
        yield Note.of("devices_differ", devices=join_words(kinds))
    yield from _small_last_batch(trials)
    yield from _rates(trials)
    yield from _lagging(trials)
    noted = [note for trial in study.trials for note in trial.notes]
    yield from {note.code: note for note in reversed(noted)}.values()  # The first of each kind.


def _sizes(trials: Iterable[TrialRecord]) -> str:
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in trials)
    return f"{'batch sizes' if len(sizes) > 1 else 'batch size'} {join_words(sizes)}"


def _small_last_batch(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    """Say where the last batch of an epoch has few examples and makes one of few updates."""
    found: list[tuple[int, TrialRecord]] = []
    for trial in trials:
        size, epochs = trial.batch_size, trial.executions[-1].epochs
        examples = epochs[0].examples if epochs else 0
        few = size < examples < _FEW_UPDATES * size
        if few and 0 < examples % size < _SMALL_SHARE * size:
            found.append((examples % size, trial))
    if found:
        fewest = pluralize(min(rest for rest, _ in found), "example")
        yield Note.of("small_last_batch", sizes=_sizes(t for _, t in found), examples=fewest)


def _rates(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    """Say where callbacks changed learning rates by other factors than those of the rule."""
    changes = []
    for trial in trials:
        last = trial.executions[-1]
        given, rate = last.learning_rate, last.last_learning_rate
        if trial.status == "completed" and last.scaling and last.scaling.rule and given and rate:
            changes.append((rate / given, trial.batch_size, given, rate))
    if changes and max(changes)[0] > (1 + _RATES_APART) * min(changes)[0]:
        went = [
            f"from {setting(given)} to {setting(rate)} at {size:,}"
            for _, size, given, rate in sorted((min(changes), max(changes)), key=lambda c: c[1])
        ]
        yield Note.of("rates_by_callback", went=join_words(went))


def _lagging(trials: Iterable[TrialRecord]) -> Iterator[Note]:
    """Say where validation shows averages that lag, and not what the model has learnt."""
    lags = [(lag, t) for t in trials for e in t.executions if (lag := _lag(e)) is not None]
    if lags:
        (_, values), trial = max(lags, key=lambda pair: pair[0][0])
        sizes = _sizes(t for _, t in lags)
        yield Note.of("lagging_statistics", sizes=sizes, at=f"{trial.batch_size:,}", **values)


def _lag(execution: ExecutionRecord) -> tuple[float, dict[str, str]] | None:
    """Return how far validation is below training where an average lags, and what to say of it."""
    scaling, updates = execution.scaling, execution.updates
    norms = ("BatchNormalization's moving statistics", "the momentum of the layers")
    slowest, what = max(
        ((m, norms) for m in (scaling and scaling.batch_norm_momenta) or ()), default=(0.0, norms)
    )
    if execution.averages_validated and scaling and (scaling.ema_momentum or 0) > slowest:
        slowest = scaling.ema_momentum or 0.0
        what = "the averages of the weights that were validated", "`ema_momentum`"
    if not (execution.epochs and updates and 0 < slowest < 1):
        return None
    memory, last = 1 / (1 - slowest), execution.epochs[-1]
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
    if training - validation <= _FAR_BELOW:
        return None
    return training - validation, {
        "training": format_number(training),
        "validation": format_number(validation),
        "updates": pluralize(updates, "update"),
        "memory": format_number(memory),
        "what": what[0],
        "cure": what[1],
    }
