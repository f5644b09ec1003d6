"""What a reader of a study's numbers must know before trusting them."""

from collections.abc import Iterator

from kbatch.document.number_text import listed
from kbatch.document.one_line import one_line
from kbatch.study.budget_caveats import budget_caveats
from kbatch.study.caveat import Caveat, concerned
from kbatch.study.goodput_text import goodput_caveats
from kbatch.study.lagging_statistics import lagging_caveats
from kbatch.study.noise_text import noise_caveats
from kbatch.study.outcomes import diverged, outcome
from kbatch.study.spreads import spreads
from kbatch.study.study_record import Study
from kbatch.study.timing_caveats import timing_caveats
from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import trial_names

_MOST_NAMED = 5
_CUT = "Not equal to the whole batch"
# How a trial's own notes begin, with what they are about and the column they stand in.
_NOTES = (
    (_CUT, "batch cut in micro-batches", "quality"),
    ("Not known to be equal to the whole batch", "batch cut in micro-batches", "quality"),
    ("Up to ", "micro-batch size", "micro_batch_size"),
    ("Micro-batches ", "micro-batch size", "micro_batch_size"),
    ("The batch goes through whole", "micro-batch size", "micro_batch_size"),
    ("Memory ran out in training", "micro-batch size", "micro_batch_size"),
    ("The first update used the learning rate", "learning rate", "learning_rate"),
    ("It went on from epoch", "rest of a training", "updates"),
    ("The noise scale was not measured", "noise scale", "noise_scale"),
    ("The learning rate follows the noise scale", "learning rate", "learning_rate"),
    ("The noise scale of trial", "learning rate", "learning_rate"),
    ("The gradient of an embedding was added up", "embeddings", "quality"),
    ("This batch was cut into micro-batches, which adds up", "embeddings", "quality"),
    ("A mean over micro-batches, not over batches", "metrics in micro-batches", "quality"),
    ("Training did not go through `model.fit`", "nothing timed", "samples_per_second"),
)


def caveats(study: Study) -> tuple[Caveat, ...]:
    """Lists what limits the conclusions from a study.

    Args:
        study: A study with at least one trial.

    Returns:
        The caveats, those about missing results first.
    """
    rules = (
        *(_problems, goodput_caveats, _incomplete, _other_batch, timing_caveats),
        *(budget_caveats, _few_executions, lagging_caveats, noise_caveats, _notes),
    )
    return tuple(caveat for rule in rules for caveat in rule(study))


def _problems(study: Study) -> Iterator[Caveat]:
    for problem in study.problems:
        yield Caveat("left out", f"Left out: {one_line(problem)}")


def _incomplete(study: Study) -> Iterator[Caveat]:
    """Words why trials have no result, once for those with the same reason."""
    names = trial_names(study.trials)._replace(several_policies=True)
    alike: dict[tuple[str, str], list[TrialRecord]] = {}
    for trial in study.trials:
        if trial.status != "completed":
            alike.setdefault((outcome(trial), _reason(trial)), []).append(trial)
    for (label, reason), trials in alike.items():
        named = [names.name(trial) for trial in trials]
        more = len(named) - _MOST_NAMED
        named = [*named[:_MOST_NAMED], f"{more:,} more"] if more > 0 else named
        sizes, have = ("Batch sizes", "have") if len(trials) > 1 else ("Batch size", "has")
        yield Caveat(
            label,
            f"{sizes} {listed(named)} {have} no result, {reason}",
            ("status",),
            tuple(trial.trial_id for trial in trials),
        )


def _reason(trial: TrialRecord) -> str:
    reason = one_line(trial.failure) if trial.failure else ""
    if diverged(trial):
        return f"its training {reason}"
    return f"its status is {outcome(trial)}{f': {reason}' if reason else '.'}"


def _other_batch(study: Study) -> Iterator[Caveat]:
    for trial in study.trials:
        seen = trial.executions[-1].batch_size_seen
        if seen is not None and seen != trial.batch_size:
            yield Caveat(
                "another batch size",
                f"Batch size {trial.batch_size:,} was asked for, but the train step received at "
                f"most {seen:,} examples at once: read this trial as batch size {seen:,}.",
                ("batch_size",),
                (trial.trial_id,),
            )


def _few_executions(study: Study) -> Iterator[Caveat]:
    found = spreads(study.trials)
    completed = [trial for trial in study.trials if trial.status == "completed"]
    pairs = concerned(completed, lambda trial: len(trial.executions) == 2)
    single = concerned(completed, lambda trial: len(trial.executions) == 1)
    if found.pairs and pairs:
        yield Caveat(
            "two executions",
            "2 executions of a trial are too few for an interval: with them it would be so wide "
            "that it says nothing, so the mean stands alone. Repeat with executions_per_trial=3 or "
            "more.",
            ("samples_per_second", "quality"),
            pairs.trial_ids,
        )
    if found.single and single:
        yield Caveat(
            "one execution",
            "A trial with one execution has no interval for its quality: a small difference may be "
            "chance. Repeat with executions_per_trial=3 or more to know.",
            ("quality",),
            single.trial_ids,
        )


def _notes(study: Study) -> Iterator[Caveat]:
    notes = dict.fromkeys(note for trial in study.trials for note in trial.notes)
    for note in notes:
        found = concerned(study.trials, lambda trial, note=note: note in trial.notes)
        if found is None:
            continue
        everywhere = len(found.trial_ids) == len(study.trials)
        label, column = _place(note)
        yield Caveat(
            label,
            one_line(note if everywhere else f"At {found.sizes}: {note}"),
            (column,),
            found.trial_ids,
        )


def _place(note: str) -> tuple[str, str]:
    """Tells what a trial's note is about, and the column it concerns."""
    if note.startswith(_CUT) and "(BatchNormalization)" in note:
        return "BatchNormalization in micro-batches", "quality"
    places = ((label, column) for begin, label, column in _NOTES if note.startswith(begin))
    # It may be one of another version of kbatch.
    return next(places, ("note of the trial", "batch_size"))
