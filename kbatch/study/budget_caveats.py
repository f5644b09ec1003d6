"""What was equal in the trials of a study, and whom that favours."""

from collections.abc import Iterator

from kbatch.records.target import Budget
from kbatch.study.caveat import Caveat, concerned
from kbatch.study.conditions import budget_text, conditions_of, end_text, epochs_text
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord

_LEARNT = ("quality", "updates")
_UNITS = {"train_s": "seconds", "updates": "updates", "examples": "examples"}
_FAVOURS = {
    "train_s": "That is fair to all where the device was the same and idle.",
    "updates": "That favours large batches, which see more examples an update.",
    "examples": "That favours small batches, which make more updates.",
}


def budget_caveats(study: Study) -> Iterator[Caveat]:
    """Tells the budget of a study that compares batch sizes, and whom it favours."""
    completed = [trial for trial in study.trials if trial.status == "completed"]
    conditions = conditions_of(study)
    counted = all(trial.mean(lambda e: e.updates) is not None for trial in completed)
    if not conditions.epochs or not counted or len({trial.batch_size for trial in completed}) < 2:
        return
    budgets = {end_text(execution) for trial in completed for execution in trial.executions}
    if len(budgets) > 1:
        text = f"The budgets differ: executions had {budget_text(conditions)}."
        yield Caveat("budgets differ", text, _LEARNT)
    elif conditions.ends:
        yield _other_budget(completed, conditions.ends[0])
    elif conditions.epochs[0] != conditions.epochs[1]:
        text = f"The budgets differ: executions had {epochs_text(conditions.epochs)}."
        yield Caveat("budgets differ", text, _LEARNT)
    else:
        yield _equal_epochs(completed, epochs_text(conditions.epochs))


def _equal_epochs(completed: list[TrialRecord], epochs: str) -> Caveat:
    small, large = completed[0], completed[-1]
    return Caveat(
        "equal-epochs budget",
        f"Equal-epochs budget: each execution trained for {epochs}, so batch size "
        f"{large.batch_size:,} made {_updates(large)} updates and batch size "
        f"{small.batch_size:,} made {_updates(small)}. That favours small batches; with a budget "
        "of time or updates the order may change.",
        _LEARNT,
    )


def _other_budget(completed: list[TrialRecord], words: str) -> Caveat:
    """Says what was equal where it was not the number of epochs, and whom it favours."""
    first, small, large = completed[0].executions[0], completed[0], completed[-1]
    if first.target is not None:
        missed = concerned(completed, lambda trial: trial.cost("updates_to_target") is None)
        never = f" {missed.sizes[0].upper()}{missed.sizes[1:]} never came there." if missed else ""
        return Caveat(
            "budget to a target",
            f"Budget to a target: each execution trained {words}. Compare what that took; the "
            f"metrics of trials that came there are alike by design.{never}",
            _LEARNT,
        )
    budget = first.budget or Budget()
    limits = [name for name, value in vars(budget).items() if value is not None]
    what = _UNITS[limits[0]] if len(limits) == 1 else "spending"
    return Caveat(
        f"equal-{what} budget",
        f"Equal-{what} budget: each execution trained for {words}, in which batch size "
        f"{large.batch_size:,} made {_updates(large)} updates on {_examples(large)} examples and "
        f"batch size {small.batch_size:,} made {_updates(small)} on {_examples(small)}."
        + (f" {_FAVOURS[limits[0]]}" if len(limits) == 1 else ""),
        _LEARNT,
    )


def _updates(trial: TrialRecord) -> str:
    return f"{trial.mean(lambda e: e.updates):,.0f}"


def _examples(trial: TrialRecord) -> str:
    examples = trial.mean(lambda e: e.examples_seen)
    return "n/a (not counted)" if examples is None else f"{examples:,.0f}"
