"""The decision of a study: which batch size to take, and how to train with it.

Batch sizes are compared at one setting of the other hyperparameters and at equal budgets, by
`kbatch.analysis.judge` in a grid and by `kbatch.analysis.race` in a race.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.analysis.judge import DEFAULT_CONFIDENCE, Judgement, judge
from kbatch.analysis.race import RaceTask, judge_race
from kbatch.records.notes import Note
from kbatch.study.compared_trials import (
    LeftOut,
    LeftOutReason,
    Unpaired,
    comparable_trials,
    compared_settings,
    ends_by_time,
    is_time,
    other_hyperparameters,
    rate_factor,
    rate_setters,
    runs_of,
    tolerance_in_units,
    training_seconds,
    with_complete_runs,
)
from kbatch.study.trial import TrialRecord, device_kinds

if TYPE_CHECKING:
    import pandas as pd

# Default of `max_trainings`: complete trainings for each batch size.
TRAININGS_PER_SIZE = 2
_FAR = 8  # A learning rate is far from the answer's if their factors differ by this ratio.
# The values of a table's row, by column.
Row = dict[str, Any]


class Page(NamedTuple):
    """A decision in words and as a table."""

    sentences: tuple[str, ...]  # The answer, how sure it is, and its gain: at most three.
    rows: tuple[Row, ...] = ()  # One for each batch size.
    use: tuple[str, ...] = ()  # The lines that train with the answer.
    cost: str = ""  # The cost of the search.
    notes: tuple[Note, ...] = ()  # All other facts, the most important first.

    def __str__(self) -> str:
        from kbatch.page.document import table_text

        table = frame_of(self.rows)
        table.attrs["answer"] = []  # The verdict marks it.
        blocks = ("\n".join(self.sentences), table_text(table), "\n".join((*self.use, self.cost)))
        return "\n\n".join(filter(None, blocks))


def frame_of(rows: Sequence[Row]) -> "pd.DataFrame":
    """Make a table of rows. The row with the verdict "take" is the answer."""
    import pandas as pd

    table = pd.DataFrame(rows)
    table.attrs["answer"] = [place for place, row in enumerate(rows) if row["verdict"] == "take"]
    # Columns of metrics have Keras's names or begin with "judged".
    metrics = [n for n in table.columns if n.isidentifier() or n.startswith("judged")]
    table.attrs["digits"] = dict.fromkeys(metrics, 4)
    return table


_NO_PAGE = Page(("There is no trial.",))


@dataclasses.dataclass(frozen=True, repr=False)
class Decision:
    """The batch size to train with, how sure this answer is, and how to use it.

    `print` shows the page: at most three sentences, a row for each batch size, and the lines that
    train with the answer.
    """

    #: Batch size to take: of the sizes within the tolerance of the best, the smallest one that
    #: trains within 5 % of the fastest. In a race, a size counts as within the tolerance if its
    #: probability is at least 0.8. In a grid, it must be certified; if no size is, this is the size
    #: with the best mean. None if no trial completed.
    batch_size: int | None
    trial: TrialRecord | None  #: The trial of `batch_size`, as in `trials`.
    best: TrialRecord | None  #: The compared trial with the best mean.
    #: The compared trials, one for each size in ascending order, with their complete runs.
    trials: tuple[TrialRecord, ...] = ()
    judgement: Judgement | None = None  #: Result of the comparison; None if no trial is compared.
    tolerance: float | None = None  #: Difference that counts as equally good, in the metric's unit.
    #: At most a share 1 - `confidence` of all searches report an answer as certain although a
    #: compared size is better than `batch_size` by more than the tolerance.
    confidence: float = DEFAULT_CONFIDENCE
    #: Why sizes were not compared validation example by validation example; None if they were.
    unpaired: Unpaired | None = None
    #: The batch size to compare with; None if it has no comparable trial.
    base_batch_size: int | None = None
    #: Training time at `base_batch_size` divided by the time at `batch_size`, as on the page, with
    #: its 95 % interval. None if both are the same size, or if times cannot be compared.
    speedup: Estimate[float] | None = None
    #: Completed trials that are not compared, each with the reason.
    left_out: tuple[LeftOut, ...] = ()
    #: Names of callbacks that replace learning rates. If there are any, no rate is named.
    rate_setters: tuple[str, ...] = ()
    page: Page = _NO_PAGE

    def __str__(self) -> str:
        return str(self.page)

    def __repr__(self) -> str:
        return f"<Decision: {self.page.sentences[0]}>"

    def _repr_html_(self) -> str:
        from kbatch.page.document import notebook_html

        page, table = self.page, frame_of(self.page.rows)
        return notebook_html(page.sentences, table, use=page.use, notes=(page.cost,))

    @property
    def tied(self) -> tuple[int, ...]:
        """The best size and all sizes that may be as good; empty if there is only the best."""
        pairs = () if self.judgement is None else self.judgement.pairs
        tied = tuple(size for size, _ in pairs if size not in self.worse)
        return tied if len(tied) > 1 else ()

    @property
    def worse(self) -> tuple[int, ...]:
        """Sizes that are worse than another size by more than the tolerance, ascending."""
        return () if self.judgement is None else tuple(size for size, _ in self.judgement.worse)

    @property
    def certified(self) -> bool:
        """Whether `batch_size` is certified to be within the tolerance of the best."""
        judgement = self.judgement
        return bool(judgement and not judgement.obstacle and judgement.named in judgement.certified)

    @property
    def certain(self) -> bool:
        """Whether `batch_size` is certified, and each size that kbatch would prefer is worse.

        This holds for the compared pairs of batch size and learning rate, at the length of
        training of the search.
        """
        return self.judgement is not None and self.judgement.certain

    def as_judged(self, trial: TrialRecord) -> TrialRecord:
        """Return a trial as it is in `trials`, with its complete runs only, or the trial itself."""
        return next((t for t in self.trials if t.trial_id == trial.trial_id), trial)

    @property
    def reason(self) -> str:
        """How sure the answer is, or why there is none, in a sentence."""
        return self.page.sentences[:2][-1]

    @property
    def notes(self) -> tuple[Note, ...]:
        """Facts that may change the answer or its use, the most important first."""
        return self.page.notes

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the answer: the highest of a schedule, without changes by callbacks.

        None if the rate is unknown, or if callbacks replace it.
        """
        return None if self.rate_setters or self.trial is None else self.trial.learning_rate

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the answer that differ from the build function's, by name."""
        if self.trial is None:
            return {}
        run, settings = self.trial.last, {}
        if (scaling := run.scaling) is not None:
            if scaling.learning_rate_ratio != 1 and self.learning_rate is not None:
                settings["learning_rate"] = self.learning_rate
            for name in scaling.follow_batch_size:
                values = scaling.made.get(name, ())
                if values != scaling.given.get(name, ()):
                    settings[name] = values if values[1:] else values[0]
        if (run.steps_per_execution or 1) > 1:
            settings["steps_per_execution"] = run.steps_per_execution
        if any(note.code == "compiled_by_xla" for note in run.notes):
            settings["jit_compile"] = True
        if (run.accumulation_steps or 1) > 1:
            settings["micro_batch_size"] = run.micro_batch_size
        if run.dtype_policy != "float32":
            settings["dtype_policy"] = run.dtype_policy
        return settings

    @property
    def fit_arguments(self) -> dict[str, int]:
        """The `epochs` and, if it was given, the `steps_per_epoch` of the search.

        If callbacks of the search ended its trials, give `fit` the same callbacks.
        """
        if self.trial is None:
            return {}
        run = self.trial.last
        arguments = {"epochs": run.epochs_asked, "steps_per_epoch": run.steps_per_epoch}
        return {name: value for name, value in arguments.items() if value is not None}

    def apply(self, build_or_model: Any, *, steps_per_execution: bool = True) -> Any:
        """Make a model that trains with all settings of the answer.

        Values are set, not multiplied, so a second call changes nothing. If XLA compiled the train
        steps of the trial, `jit_compile` of the model becomes True.

        Example:

        >>> decision = tuner.study.decide()
        >>> model = decision.apply(build)
        >>> data = kbatch.training_dataset(x, y, decision.batch_size)
        >>> model.fit(data, **decision.fit_arguments)

        Args:
            build_or_model: The build function or the `keras_tuner.HyperModel` of the search. It is
                called with the hyperparameters and under the dtype policy of the trial. Or a
                compiled `keras.Model` that was built under that policy, which is changed.
            steps_per_execution: Boolean. Whether Keras starts as many train steps at once as in the
                trial. If False, the model keeps its own number. Default: True.

        Returns:
            The `keras.Model`, compiled.

        Raises:
            ValueError: If no trial completed, or if the model has other optimizers, other layers
                or another dtype policy than the trial's model. Layers that are not built yet are
                checked at the first batch.
            TypeError: If `build_or_model` is none of these.
        """
        from kbatch.training.build_function import model_of
        from kbatch.training.learning_rate import apply_settings

        if self.trial is None:
            raise ValueError(f"There are no settings to apply. {self.reason}")
        run = self.trial.last
        model = model_of(build_or_model, self.trial.hyperparameters, run.dtype_policy)
        return apply_settings(model, run, steps_per_execution=steps_per_execution)


def decide(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    *,
    tolerance: float | None,
    confidence: float,
) -> Decision:
    """Decide as `Study.decide` does, without a page. `search` holds the settings of the search."""
    if not trials or trials[0].objective.name == "multi_objective":
        best = min(comparable_trials(trials)[0], key=lambda trial: trial.rank, default=None)
        return Decision(best and best.batch_size, best, best, confidence=confidence)
    is_race = search.get("strategy") == "race" and not is_time(trials[0].objective)
    judged = (_race if is_race else _grid)(trials, search, tolerance, confidence)
    if judged is None:
        return Decision(None, None, None, confidence=confidence)
    judgement, compared, left_out, unpaired, tolerance = judged
    # If training and validation data have other classes, validation does not show what is worse.
    if any(note.code == "split_by_class" for trial in compared for note in trial.notes):
        unknown: Any = {"certain": False, "certified": (), "worse": ()}
        judgement = dataclasses.replace(judgement, obstacle="split_by_class", **unknown)
    by_size = {trial.batch_size: trial for trial in compared}
    base = by_size.get(search.get("base_batch_size", 0)) if len(compared) > 1 else None
    trial = by_size[judgement.named[0]]
    decision = Decision(
        rate_setters=rate_setters(trials),
        batch_size=trial.batch_size,
        trial=trial,
        best=by_size[judgement.leader[0]],
        trials=compared,
        judgement=judgement,
        tolerance=tolerance,
        confidence=confidence,
        unpaired=unpaired,
        base_batch_size=base and base.batch_size,
        left_out=tuple(left_out),
    )
    if base is None or base is trial:
        return decision
    return dataclasses.replace(decision, speedup=speed_against(decision, trial, base))


Judged = tuple[Judgement, tuple[TrialRecord, ...], Sequence[LeftOut], Unpaired | None, float]


def _grid(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    tolerance: float | None,
    confidence: float,
) -> Judged | None:
    """Judge one trial of each batch size of a grid."""
    compared, left_out = comparable_trials(trials)
    if not compared:
        return None
    objective = compared[0].objective
    tolerance = tolerance_in_units(compared, tolerance)
    runs, unpaired = runs_of(compared)
    # Each extension of a grid is a further look. With one run of each size, nothing is certain.
    looks = sum(count > 1 for count in search.get("executions_asked", ()))
    judgement = judge(
        runs,
        tolerance=tolerance,
        confidence=confidence,
        larger_is_better=objective.direction == "max",
        looks=max(1, looks),
        over_examples=not is_time(objective),
    )
    rounds = max(len(trial.executions) for trial in compared)
    if rounds == 1 and judgement.obstacle is None:  # Timing windows of one run count as no runs.
        judgement = dataclasses.replace(judgement, obstacle="one_execution", certain=False)
    return judgement, compared, left_out, unpaired, tolerance


def _race(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    tolerance: float | None,
    confidence: float,
) -> Judged | None:
    """Judge the trials of a race that have the same other hyperparameters."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(repr(other_hyperparameters(trial.hyperparameters)), []).append(trial)
    # A race trains each setting once and continues with the best one, which has the most runs.
    raced = best = min(
        groups.values(),
        key=lambda group: (-sum(len(t.executions) for t in group), min(t.rank for t in group)),
        default=[],
    )
    task = race_task(raced, search, tolerance=tolerance, confidence=confidence)
    if not task.search_rate:  # If a callback sets the rates, other factors mean nothing.
        raced = [trial for trial in raced if rate_factor(trial) == 1]
    runs, unpaired = runs_of(raced) if raced else ([], None)
    if (judgement := judge_race(task, runs)) is None:
        return None
    compared, others, left_out = [], [], []
    for trial in raced:
        complete = with_complete_runs(trial)
        if (trial.batch_size, rate_factor(trial)) in judgement.pairs:
            compared.append(complete or trial)
        elif complete is not None:
            near = 1 / _FAR < rate_factor(trial) / judgement.named[1] < _FAR
            others.append((complete, near))
    sizes = {size for size, _ in judgement.pairs}
    near_sizes = {trial.batch_size for trial, near in others if near}
    for trial, near in others:
        another = trial.batch_size in sizes or (not near and trial.batch_size in near_sizes)
        why: LeftOutReason = "another_rate" if near else "far_rate"
        left_out.append((trial, "another_trial" if another else why))
    left_out += [
        (complete, "other_settings")
        for group in groups.values()
        for trial in group
        if group is not best and (complete := with_complete_runs(trial))
    ]
    compared.sort(key=lambda trial: trial.batch_size)
    return judgement, tuple(compared), left_out, unpaired, task.tolerance


def race_task(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    *,
    tolerance: float | None = None,
    confidence: float = DEFAULT_CONFIDENCE,
) -> RaceTask:
    """Return the task of a race, from the settings of its search."""
    sizes, searches = tuple(search["batch_sizes"]), search.get("search_learning_rate", True)
    scored = [trial for trial in trials if trial.judged_value is not None]
    runs = [run for trial in trials for run in trial.executions]
    epochs = search.get("epochs") or max((e.epochs_asked or len(e.epochs) for e in runs), default=1)
    most = search.get("max_trainings") or TRAININGS_PER_SIZE * len(sizes)
    tolerance = search.get("tolerance") if tolerance is None else tolerance
    return RaceTask(
        batch_sizes=sizes,
        base_batch_size=search.get("base_batch_size", sizes[0]),
        epochs=epochs,
        larger_is_better=bool(trials) and trials[0].objective.direction == "max",
        tolerance=tolerance_in_units(scored, tolerance) if scored else 0.0,
        confidence=confidence,
        max_trainings=most - sum(run.epochs_repeated for run in runs) / epochs,
        seconds=dict(zip(sizes, search.get("training_s", ()), strict=False)),
        search_rate=searches and not rate_setters(trials, sure=True),
        short_runs=search.get("short_runs", True),
    )


def seconds_of(decision: Decision) -> dict[str, float]:
    """Return the training time of each compared trial by its id; empty if times do not compare.

    The answer has the mean time of its own runs. Ratios of times are from the judgement, which
    allows for a machine whose speed changed. If the objective is a time, times are as measured.
    """
    judgement, answer = decision.judgement, decision.trial
    measured_s = answer and answer.mean(training_seconds)
    if answer is None or judgement is None or not measured_s or not judgement.costs:
        return {}
    if is_time(answer.objective):
        return {t.trial_id: s for t in decision.trials if (s := t.mean(training_seconds))}
    least_s = measured_s / judgement.costs[judgement.named]
    others = (trial for trial, why in decision.left_out if why in ("another_rate", "far_rate"))
    pairs = {t.trial_id: (t.batch_size, rate_factor(t)) for t in (*decision.trials, *others)}
    return {name: least_s * judgement.costs[p] for name, p in pairs.items() if p in judgement.costs}


def speed_of(decision: Decision, trial: TrialRecord) -> tuple[float | None, Estimate[float] | None]:
    """Return the shown training time and samples/s: one speed for each size and settings."""
    judged, seconds = decision.as_judged(trial), seconds_of(decision)
    rates, count = judged.throughput, judged.mean(lambda e: e.examples_seen)
    timed = (*decision.trials, *(left_out for left_out, _ in decision.left_out))
    alike = [t for t in timed if t.trial_id in seconds and t.batch_size == trial.batch_size]
    alike = [t for t in alike if compared_settings(t) == compared_settings(trial)]
    same = alike[0].mean(lambda e: e.examples_seen) if alike else None
    if not (same and count and rates) or is_time(trial.objective):
        return seconds.get(trial.trial_id) or judged.mean(training_seconds), rates
    rate = same / seconds[alike[0].trial_id]
    return count / rate, rates.times(rate / rates.value)


def speed_against(
    decision: Decision, trial: TrialRecord, than: TrialRecord
) -> Estimate[float] | None:
    """Return how many times as fast a compared trial trains as another; None if unknown."""
    seconds, judgement = seconds_of(decision), decision.judgement
    if judgement is None or not {trial.trial_id, than.trial_id} <= seconds.keys():
        return None
    ratio = seconds[than.trial_id] / seconds[trial.trial_id]
    if (sizes := (than.batch_size, trial.batch_size)) in judgement.cost_ranges:
        return Estimate(ratio, *judgement.cost_ranges[sizes])
    return speedup(than, trial, ratio)


def speedup(base: TrialRecord, other: TrialRecord, ratio: float) -> Estimate[float]:
    """Return the given ratio of two trials' training times, with an interval over runs if known."""
    if len(device_kinds([base, other])) > 1 or any(map(ends_by_time, base.executions)):
        return Estimate(ratio)
    seconds = training_seconds if base.last.target is None else lambda e: e.seconds_to_target
    pairs = zip(base.executions, other.executions, strict=False)
    times = [(t, s) for first, second in pairs if (t := seconds(first)) and (s := seconds(second))]
    measured = ratio_over_rounds(*zip(*times, strict=True)) if times else None
    return measured.times(ratio / measured.value) if measured else Estimate(ratio)
