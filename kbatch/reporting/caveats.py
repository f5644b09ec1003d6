"""What a reader of a study's numbers must know before trusting them."""

from collections.abc import Callable, Iterable, Iterator

from kbatch.records.study import Study
from kbatch.records.target import Budget
from kbatch.records.trial import TrialRecord
from kbatch.reporting.conditions import budget_text, conditions_of, end_text, epochs_text
from kbatch.reporting.noise_text import noise_caveats
from kbatch.reporting.number_text import listed, percent
from kbatch.reporting.outcomes import diverged, outcome
from kbatch.reporting.spreads import spreads
from kbatch.reporting.trial_names import trial_names

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
    rules = (
        *(_problems, _incomplete, _other_batch, _data_wait, _one_window, _unstable, _busy_host),
        *(_shared_device, _float16_on_cpu),
        *(_budget, _few_executions, noise_caveats, _notes),
    )
    return tuple(text for rule in rules for text in rule(study))


def _problems(study: Study) -> Iterator[str]:
    for problem in study.problems:
        yield f"Left out: {one_line(problem)}"


def _incomplete(study: Study) -> Iterator[str]:
    names = trial_names(study.trials)._replace(several_policies=True)
    for trial in study.trials:
        if trial.status == "completed":
            continue
        reason = one_line(trial.failure) if trial.failure else ""
        if diverged(trial):
            why = f"its training {reason}"
        else:
            why = f"its status is {outcome(trial)}{f': {reason}' if reason else '.'}"
        yield f"Batch size {names.name(trial)} has no result, {why}"


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
            f"{sizes}: there the samples/s, and a comparison of batch sizes by them, measure the "
            "input pipeline, not the model. `kbatch.profile_input_pipeline` tries what would help."
        )


def _one_window(study: Study) -> Iterator[str]:
    def short(trial: TrialRecord) -> bool:
        return trial.status == "completed" and any(
            len(execution.window_examples) == 1 for execution in trial.executions
        )

    if sizes := _sizes_where(study.trials, short):
        yield (
            f"Training was timed over one window only at {sizes}: samples/s may be off by much. "
            "Train longer for a spread."
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


def _shared_device(study: Study) -> Iterator[str]:
    def workers(trial: TrialRecord) -> int:
        return max(execution.workers_on_device or 1 for execution in trial.executions)

    sizes = _sizes_where(study.trials, lambda trial: workers(trial) > 1)
    if sizes:
        most = max(workers(trial) for trial in study.trials)
        yield (
            f"The device was shared by {most} workers at {sizes}: there the samples/s are those of "
            "a part of it, and depend on what the others ran. Repeat with one worker a device to "
            "compare them."
        )


def _float16_on_cpu(study: Study) -> Iterator[str]:
    policies = {trial.dtype_policy for trial in study.trials}
    environment = study.search.environment if study.search else None
    if policies != {"mixed_float16"} or environment is None or environment.devices != ("CPU",):
        return
    yield (
        "Every trial ran under mixed_float16 on a processor, where it is often the slower policy: "
        '`kbatch doctor` measures that, and `dtype_policy=("float32", "mixed_float16")` compares '
        "both in the search."
    )


def _budget(study: Study) -> Iterator[str]:
    completed = [trial for trial in study.trials if trial.status == "completed"]
    conditions = conditions_of(study)
    counted = all(trial.mean(lambda e: e.updates) is not None for trial in completed)
    if not conditions.epochs or not counted or len({trial.batch_size for trial in completed}) < 2:
        return
    budgets = {end_text(execution) for trial in completed for execution in trial.executions}
    if len(budgets) > 1:
        yield f"The budgets differ: executions had {budget_text(conditions)}."
        return
    if conditions.ends:
        yield from _other_budget(completed, conditions.ends[0])
        return
    if conditions.epochs[0] != conditions.epochs[1]:
        yield f"The budgets differ: executions had {epochs_text(conditions.epochs)}."
        return
    small, large = completed[0], completed[-1]
    yield (
        f"Equal-epochs budget: each execution trained for {epochs_text(conditions.epochs)}, so "
        f"batch size {large.batch_size:,} made {_updates(large)} updates and batch size "
        f"{small.batch_size:,} made {_updates(small)}. That favours small batches; with a budget "
        "of time or updates the order may change."
    )


def _other_budget(completed: list[TrialRecord], words: str) -> Iterator[str]:
    """Says what was equal where it was not the number of epochs, and whom it favours."""
    first, small, large = completed[0].executions[0], completed[0], completed[-1]
    if first.target is not None:
        missed = _sizes_where(completed, lambda trial: trial.cost("updates_to_target") is None)
        never = f" {missed[0].upper()}{missed[1:]} never came there." if missed else ""
        yield (
            f"Budget to a target: each execution trained {words}. Compare what that took; the "
            f"metrics of trials that came there are alike by design.{never}"
        )
        return
    budget = first.budget or Budget()
    limits = [name for name, value in vars(budget).items() if value is not None]
    names = {"train_s": "seconds", "updates": "updates", "examples": "examples"}
    favours = {
        "train_s": "That is fair to all where the device was the same and idle.",
        "updates": "That favours large batches, which see more examples an update.",
        "examples": "That favours small batches, which make more updates.",
    }
    what = names[limits[0]] if len(limits) == 1 else "spending"
    yield (
        f"Equal-{what} budget: each execution trained for {words}, in which batch size "
        f"{large.batch_size:,} made {_updates(large)} updates on {_examples(large)} examples and "
        f"batch size {small.batch_size:,} made {_updates(small)} on {_examples(small)}."
        + (f" {favours[limits[0]]}" if len(limits) == 1 else "")
    )


def _few_executions(study: Study) -> Iterator[str]:
    found = spreads(study.trials)
    if found.pairs:
        yield (
            "2 executions of a trial are too few for an interval: with them it would be so wide "
            "that it says nothing, so the mean stands alone. Repeat with executions_per_trial=3 or "
            "more."
        )
    if found.single:
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
    return f"{trial.mean(lambda e: e.updates):,.0f}"


def _examples(trial: TrialRecord) -> str:
    examples = trial.mean(lambda e: e.examples_seen)
    return "n/a (not counted)" if examples is None else f"{examples:,.0f}"


def one_line(text: str, most_characters: int = 300) -> str:
    """Brings a message on one line and shortens what is too long to read."""
    words = " ".join(text.split())
    return words if len(words) <= most_characters else f"{words[: most_characters - 1]}…"
