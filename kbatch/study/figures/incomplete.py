"""Trials without a result, in words for the figures that have no place for them."""

from collections import Counter
from collections.abc import Sequence

from kbatch.document.number_text import counted, listed
from kbatch.study.outcomes import outcome
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names

_MOST_NAMED = 4


def incomplete_text(study: Study) -> str:
    """Says which trials have no result, and why; an empty text where all have one."""
    trials = [trial for trial in study.trials if trial.status != "completed"]
    if not trials:
        return ""
    if len(trials) == len(study.trials):
        return none_completed(study)
    names = trial_names(study.trials)
    if len(trials) <= _MOST_NAMED:
        return f"\N{MULTIPLICATION X} Without a result: {_named(trials, names)}."
    sizes = sorted({trial.batch_size for trial in trials})
    between = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}"
    return (
        f"\N{MULTIPLICATION X} Without a result: {counted(len(trials), 'trial')} of batch size "
        f"{between} ({_counts(trials)})."
    )


def none_completed(study: Study) -> str:
    """Says that no trial has a result, and why."""
    return f"No trial completed: {_counts(study.trials)}"


def _named(trials: Sequence[TrialRecord], names: TrialNames) -> str:
    texts = (
        f"batch size {trial.batch_size:,} ({', '.join((*names.settings(trial), outcome(trial)))})"
        for trial in trials
    )
    return listed(texts)


def _counts(trials: Sequence[TrialRecord]) -> str:
    counts = Counter(outcome(trial) for trial in trials)
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())
