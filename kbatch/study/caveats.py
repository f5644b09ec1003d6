"""What a reader of a study's numbers must know before trusting them."""

from collections.abc import Iterator

from kbatch.document.numbers import listed, percent, readable
from kbatch.document.section import one_line
from kbatch.records.training_run import Budget
from kbatch.study.conditions import budget_text, conditions_of, end_text, epochs_text, spreads
from kbatch.study.names import diverged, outcome, trial_names
from kbatch.study.notes import Caveat, concerned, goodput_caveats, lagging_caveats, noise_caveats
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

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
    """List what limits the conclusions from a study."""
    rules = (
        *(_problems, goodput_caveats, _incomplete, _other_batch, timing_caveats),
        *(budget_caveats, _few_executions, lagging_caveats, noise_caveats, _notes),
    )
    return tuple(caveat for rule in rules for caveat in rule(study))


def _problems(study: Study) -> Iterator[Caveat]:
    for problem in study.problems:
        yield Caveat("left out", f"Left out: {one_line(problem)}")


def _incomplete(study: Study) -> Iterator[Caveat]:
    """Word why trials have no result, once for those with the same reason."""
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
    """Return what a trial's note is about, and the column it concerns."""
    if note.startswith(_CUT) and "(BatchNormalization)" in note:
        return "BatchNormalization in micro-batches", "quality"
    places = ((label, column) for begin, label, column in _NOTES if note.startswith(begin))
    # It may be one of another version of kbatch.
    return next(places, ("note of the trial", "batch_size"))


_LEARNT = ("quality", "updates")
_UNITS = {"train_s": "seconds", "updates": "updates", "examples": "examples"}
_FAVOURS = {
    "train_s": "That is fair to all where the device was the same and idle.",
    "updates": "That favours large batches, which see more examples an update.",
    "examples": "That favours small batches, which make more updates.",
}


def budget_caveats(study: Study) -> Iterator[Caveat]:
    """Return the budget of a study that compares batch sizes, and whom it favours."""
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
    """Describe what was equal where it was not the number of epochs, and whom it favours."""
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


# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
_UNSTABLE_SPREAD = 0.2
_UNEVEN = 0.1
_BUSY_LOAD_SHARE = 0.5
_SPEED = ("samples_per_second",)


def timing_caveats(study: Study) -> Iterator[Caveat]:
    """List what limits the samples/s of a study with at least one trial."""
    rules = (
        _data_wait,
        _one_window,
        _unstable,
        _uneven,
        _busy_host,
        _shared_device,
        _clocks,
        _float16_on_cpu,
    )
    for rule in rules:
        yield from rule(study)


def _data_wait(study: Study) -> Iterator[Caveat]:
    def waits(trial: TrialRecord) -> bool:
        return (trial.mean(lambda e: e.data_wait_share) or 0) > MUCH_DATA_WAIT

    if found := concerned(study.trials, waits):
        yield Caveat(
            "waiting for data",
            f"Training waited for data more than {percent(MUCH_DATA_WAIT)} of its time at "
            f"{found.sizes}: there the samples/s, and a comparison of batch sizes by them, measure "
            "the input pipeline, not the model. `kbatch.profile_input_pipeline` tries what would "
            "help.",
            _SPEED,
            found.trial_ids,
        )


def _one_window(study: Study) -> Iterator[Caveat]:
    def short(trial: TrialRecord) -> bool:
        return trial.status == "completed" and any(
            len(execution.window_examples) == 1 for execution in trial.executions
        )

    if found := concerned(study.trials, short):
        yield Caveat(
            "one timing window",
            f"Training was timed over one window only at {found.sizes}: samples/s may be off by "
            "much. Train longer for a spread.",
            _SPEED,
            found.trial_ids,
        )


def _unstable(study: Study) -> Iterator[Caveat]:
    def unstable(trial: TrialRecord) -> bool:
        spreads = [
            (t.high - t.low) / t.median for e in trial.executions if (t := e.throughput) is not None
        ]
        return max(spreads, default=0) > _UNSTABLE_SPREAD

    if found := concerned(study.trials, unstable):
        yield Caveat(
            "unstable timing",
            f"Timing was not stable at {found.sizes}: the quartiles of samples/s lie more than "
            f"{percent(_UNSTABLE_SPREAD)} of the median apart. Repeat on an idle machine.",
            _SPEED,
            found.trial_ids,
        )


def _uneven(study: Study) -> Iterator[Caveat]:
    def difference(trial: TrialRecord) -> float:
        got, median = trial.samples_per_second, trial.window_samples_per_second
        return abs(got / median - 1) if got and median else 0.0

    if found := concerned(study.trials, lambda trial: difference(trial) > _UNEVEN):
        most = max(study.trials, key=difference)
        got, median = most.samples_per_second or 0.0, most.window_samples_per_second or 0.0
        where = f" at {most.batch_size:,}, the most" if len(found.trial_ids) > 1 else ""
        yield Caveat(
            "uneven steps",
            f"Some steps took far longer than most at {found.sizes}. The samples/s count all steps "
            f"and differ by more than {percent(_UNEVEN)} from the median of the timing windows: "
            f"{readable(got)} against {readable(median)}{where}.",
            _SPEED,
            found.trial_ids,
        )


def _busy_host(study: Study) -> Iterator[Caveat]:
    environment = study.search.environment if study.search else None
    if environment is None or environment.load_average is None:
        return
    if environment.load_average > _BUSY_LOAD_SHARE * environment.cpu_count:
        yield Caveat(
            "busy machine",
            f"The machine was busy at the start (load average {environment.load_average:.1f} on "
            f"{environment.cpu_count} processors): samples/s may be too low.",
            _SPEED,
        )


def _shared_device(study: Study) -> Iterator[Caveat]:
    def workers(trial: TrialRecord) -> int:
        return max(execution.workers_on_device or 1 for execution in trial.executions)

    if found := concerned(study.trials, lambda trial: workers(trial) > 1):
        most = max(workers(trial) for trial in study.trials)
        yield Caveat(
            "shared device",
            f"The device was shared by {most} workers at {found.sizes}: there the samples/s are "
            "those of a part of it, and depend on what the others ran. Repeat with one worker a "
            "device to compare them.",
            _SPEED,
            found.trial_ids,
        )


def _clocks(study: Study) -> Iterator[Caveat]:
    apart = conditions_of(study).clocks
    usages = [e.usage for trial in study.trials for e in trial.executions if e.usage is not None]
    gpus = [gpu for usage in usages for gpu in usage.gpus or ()]
    reasons = dict.fromkeys(reason for gpu in gpus for reason in gpu.throttle_reasons or ())
    if apart:
        lowered = f" What lowered it: {listed(reasons)}." if reasons else ""
        yield Caveat(
            "GPU clocks differ",
            f"Trials ran at different clocks ({apart}), and their samples/s differ by that too."
            f"{lowered} `nvidia-smi --lock-gpu-clocks` holds one clock for a comparison.",
            _SPEED,
        )


def _float16_on_cpu(study: Study) -> Iterator[Caveat]:
    policies = {trial.dtype_policy for trial in study.trials}
    environment = study.search.environment if study.search else None
    if policies != {"mixed_float16"} or environment is None or environment.devices != ("CPU",):
        return
    yield Caveat(
        "float16 on a processor",
        "Every trial ran under mixed_float16 on a processor, where it is often the slower policy: "
        '`kbatch doctor` measures that, and `dtype_policy=("float32", "mixed_float16")` compares '
        "both in the search.",
        _SPEED,
    )
