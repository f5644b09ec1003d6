"""What a reader of a study's numbers must know before trusting them."""

from collections.abc import Callable, Iterable, Iterator

from kbatch.records.study import Study
from kbatch.records.trial import TrialRecord
from kbatch.reporting.conditions import STATUS_WORDS, conditions_of, epochs_text
from kbatch.reporting.number_text import listed, percent

_MUCH_DATA_WAIT = 0.2
_UNSTABLE_SPREAD = 0.2
_BUSY_LOAD_SHARE = 0.5


def caveats(study: Study) -> tuple[str, ...]:
    """Lists what limits the conclusions from a study, one sentence or two each.

    Args:
        study: A study with at least one trial.

    Returns:
        The caveats, those about missing results first.
    """
    rules = (_problems, _incomplete, _other_batch, _data_wait, _unstable, _busy_host, _budget)
    found = [text for rule in rules for text in rule(study)]
    return (*found, *_single_execution(study), *_notes(study))


def _problems(study: Study) -> Iterator[str]:
    for problem in study.problems:
        yield f"Left out, because a file could not be read: {problem}"


def _incomplete(study: Study) -> Iterator[str]:
    for trial in study.trials:
        if trial.status != "completed":
            reason = f": {one_line(trial.failure)}" if trial.failure else "."
            yield (
                f"Batch size {trial.batch_size:,} ({trial.dtype_policy}) has no result, its "
                f"status is {STATUS_WORDS[trial.status]}{reason}"
            )


def _other_batch(study: Study) -> Iterator[str]:
    for trial in study.trials:
        seen = trial.executions[-1].batch_size_seen
        if seen is not None and seen != trial.batch_size:
            yield (
                f"Batch size {trial.batch_size:,} was asked for, but the train step received at "
                f"most {seen:,} examples at once: read this trial as batch size {seen:,}."
            )


def _data_wait(study: Study) -> Iterator[str]:
    def waits(trial: TrialRecord) -> bool:
        return (trial.mean(lambda e: e.data_wait_share) or 0) > _MUCH_DATA_WAIT

    if sizes := _sizes_where(study.trials, waits):
        yield (
            f"Training waited for data more than {percent(_MUCH_DATA_WAIT)} of its time at "
            f"{sizes}: there the samples/s measure the input pipeline, not the model."
        )


def _unstable(study: Study) -> Iterator[str]:
    def unstable(trial: TrialRecord) -> bool:
        spreads = [
            (t.high - t.low) / t.median for e in trial.executions if (t := e.throughput) is not None
        ]
        return max(spreads, default=0) > _UNSTABLE_SPREAD

    if sizes := _sizes_where(study.trials, unstable):
        yield (
            f"Timing was not stable at {sizes}: the quartiles of samples/s lie more than "
            f"{percent(_UNSTABLE_SPREAD)} of the median apart. Repeat on an idle machine."
        )


def _busy_host(study: Study) -> Iterator[str]:
    environment = study.search.environment if study.search else None
    if environment is None or environment.load_average is None:
        return
    if environment.load_average > _BUSY_LOAD_SHARE * environment.cpu_count:
        yield (
            f"The machine was busy at the start (load average {environment.load_average:.1f} on "
            f"{environment.cpu_count} processors): samples/s may be too low."
        )


def _budget(study: Study) -> Iterator[str]:
    completed = [trial for trial in study.trials if trial.status == "completed"]
    epochs = conditions_of(study).epochs
    if epochs is None or len({trial.batch_size for trial in completed}) < 2:
        return
    if epochs[0] != epochs[1]:
        yield f"The budgets differ: executions had {epochs_text(epochs)}."
        return
    small, large = completed[0], completed[-1]
    yield (
        f"Equal-epochs budget: each execution trained for {epochs_text(epochs)}, so batch size "
        f"{large.batch_size:,} made {_updates(large)} updates and batch size "
        f"{small.batch_size:,} made {_updates(small)}. That favours small batches; with a budget "
        "of time or updates the order may change."
    )


def _single_execution(study: Study) -> Iterator[str]:
    if any(len(trial.executions) == 1 for trial in study.trials if trial.status == "completed"):
        yield (
            "A trial with one execution has no interval for its quality: a small difference may be "
            "chance. Repeat with executions_per_trial=3 or more to know."
        )


def _notes(study: Study) -> Iterator[str]:
    notes = dict.fromkeys(note for trial in study.trials for note in trial.notes)
    for note in notes:
        sizes = _sizes_where(study.trials, lambda trial, note=note: note in trial.notes)
        everywhere = all(note in trial.notes for trial in study.trials)
        yield one_line(note if everywhere else f"At {sizes}: {note}")


def _sizes_where(trials: Iterable[TrialRecord], holds: Callable[[TrialRecord], bool]) -> str:
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in trials if holds(trial))
    plural = "batch sizes" if len(sizes) > 1 else "batch size"
    return f"{plural} {listed(sizes)}" if sizes else ""


def _updates(trial: TrialRecord) -> str:
    return f"{trial.mean(lambda e: e.updates) or 0:,.0f}"


def one_line(text: str, most_characters: int = 300) -> str:
    """Brings a message on one line and shortens what is too long to read."""
    words = " ".join(text.split())
    return words if len(words) <= most_characters else f"{words[: most_characters - 1]}…"
