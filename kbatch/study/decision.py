"""The decision that a study supports: which batch size to take, and how to train with it.

Sizes are compared at one setting of the other hyperparameters and at equal budgets:
`kbatch.analysis.judge` compares those of a grid, `kbatch.analysis.race` those of a race.
"""

import dataclasses
import html
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

# Complete trainings of a race for each batch size, if no number is given.
TRAININGS_PER_SIZE = 2
# A rate is far if it is at least this many times the rate of the answer, beside the rule.
_FAR = 8
# A row of the table, by the names of its columns.
Row = dict[str, Any]


class Page(NamedTuple):
    """A decision as people read it."""

    sentences: tuple[str, ...]  # What to take, how sure that is, what changes: at most three.
    rows: tuple[Row, ...] = ()  # One for each batch size.
    use: tuple[str, ...] = ()  # The lines that train with the answer.
    cost: str = ""  # What the search cost.
    notes: tuple[Note, ...] = ()  # Everything else, the most important first.

    def __str__(self) -> str:
        from kbatch.page.document import table_text

        table = frame_of(self.rows)
        table.attrs["answer"] = []  # The verdict marks it.
        blocks = ("\n".join(self.sentences), table_text(table), "\n".join((*self.use, self.cost)))
        return "\n\n".join(filter(None, blocks))


def frame_of(rows: Sequence[Row]) -> "pd.DataFrame":
    """Make a table of rows, in which the answer is the row to take."""
    import pandas as pd

    table = pd.DataFrame(rows)
    table.attrs["answer"] = [place for place, row in enumerate(rows) if row["verdict"] == "take"]
    # A metric under Keras's name, and the value that decides.
    metrics = [n for n in table.columns if n.isidentifier() or n.startswith("judged")]
    table.attrs["digits"] = dict.fromkeys(metrics, 4)
    return table


_NO_PAGE = Page(("There is no trial.",))


@dataclasses.dataclass(frozen=True, repr=False)
class Decision:
    """Which batch size to train with, how sure that is, and what else was found.

    `print` shows the page: at most three sentences, a row for each batch size, and the lines that
    train with the answer.
    """

    #: The size to take: of the sizes within the tolerance of the best, the smallest that trains
    #: about as fast as the fastest. For a race, a size counts as within the tolerance if its
    #: probability is at least 0.8, certified or not. For a grid, the size must be certified; if
    #: none is, the size with the best mean is named. None if no trial completed.
    batch_size: int | None
    trial: TrialRecord | None  #: Its trial, as in `trials`.
    best: TrialRecord | None  #: The trial with the best mean of those that are compared.
    #: The trials that are compared, one for each size, ascending, with their complete runs.
    trials: tuple[TrialRecord, ...] = ()
    judgement: Judgement | None = None  #: What their runs show; None if none is compared.
    tolerance: float | None = None  #: What counts as equally good, in the metric's unit.
    #: Of all searches, at most 1 - `confidence` are certain while a size that was compared is
    #: better than the one to take by more than the tolerance.
    confidence: float = DEFAULT_CONFIDENCE
    #: Why sizes were not compared validation example by validation example; None if they were.
    unpaired: Unpaired | None = None
    #: The batch size to compare with; None if it has no comparable trial.
    base_batch_size: int | None = None
    #: Training time at that size divided by the time at the one to take, as the page prints it,
    #: with an interval over runs. None if they are the same size, or if times cannot be compared.
    speedup: Estimate[float] | None = None
    #: Completed trials that are not compared, each with the reason.
    left_out: tuple[LeftOut, ...] = ()
    #: Names of callbacks that set learning rates of their own, so that no rate is named.
    rate_setters: tuple[str, ...] = ()
    page: Page = _NO_PAGE

    def __str__(self) -> str:
        return str(self.page)

    def __repr__(self) -> str:
        """Sum the decision up in a line; `print` shows the page."""
        return f"<Decision: {self.page.sentences[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def tied(self) -> tuple[int, ...]:
        """Sizes that may be as good as the best, and the best; empty if there is no other."""
        found = self.judgement
        tied = [] if found is None else [size for size, _ in found.pairs if size not in self.worse]
        return tuple(tied) if len(tied) > 1 else ()

    @property
    def worse(self) -> tuple[int, ...]:
        """Sizes worse than another by more than the tolerance, ascending."""
        return () if self.judgement is None else tuple(size for size, _ in self.judgement.worse)

    @property
    def certified(self) -> bool:
        """Whether `batch_size` is certified to be within the tolerance of the best."""
        found = self.judgement
        return found is not None and not found.obstacle and found.named in found.certified

    @property
    def certain(self) -> bool:
        """Whether it is certified, and each size that would be preferred to it is worse.

        It is about the pairs of size and learning rate that were compared, at the length trained.
        """
        return self.judgement is not None and self.judgement.certain

    def as_judged(self, trial: TrialRecord) -> TrialRecord:
        """Return a trial as it is compared, with its complete runs, or as it is if it is not."""
        return next((one for one in self.trials if one.trial_id == trial.trial_id), trial)

    @property
    def reason(self) -> str:
        """How sure the answer is, or why there is none, in a sentence."""
        return self.page.sentences[:2][-1]

    @property
    def notes(self) -> tuple[Note, ...]:
        """What else was found, and what may change the answer, the most important first."""
        return self.page.notes

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the answer, before callbacks and the highest of a schedule.

        None if it is unknown, or if callbacks set rates of their own.
        """
        return None if self.rate_setters or self.trial is None else self.trial.learning_rate

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the trials that differ from those of the build function, by name."""
        if self.trial is None:
            return {}
        run, found = self.trial.last, {}
        if (scaling := run.scaling) is not None:
            if scaling.learning_rate_ratio != 1 and self.learning_rate is not None:
                found["learning_rate"] = self.learning_rate
            for name in scaling.follow_batch_size:
                values = scaling.made.get(name, ())
                if values != scaling.given.get(name, ()):
                    found[name] = values if values[1:] else values[0]
        if (run.steps_per_execution or 1) > 1:
            found["steps_per_execution"] = run.steps_per_execution
        if any(note.code == "compiled_by_xla" for note in run.notes):
            found["jit_compile"] = True
        if (run.accumulation_steps or 1) > 1:
            found["micro_batch_size"] = run.micro_batch_size
        if run.dtype_policy != "float32":
            found["dtype_policy"] = run.dtype_policy
        return found

    @property
    def fit_arguments(self) -> dict[str, int]:
        """The `epochs` and, if it was given, the `steps_per_epoch` of the trials' call of `fit`.

        Budgets and other callbacks of the search end a training as they ended the trials: give
        `fit` the same ones.
        """
        if self.trial is None:
            return {}
        run = self.trial.last
        asked = {"epochs": run.epochs_asked, "steps_per_epoch": run.steps_per_epoch}
        return {name: value for name, value in asked.items() if value is not None}

    def apply(self, build_or_model: Any, *, steps_per_execution: bool = True) -> Any:
        """Make a model train with the settings of the trial, those of `settings` and all others.

        Values are set, not multiplied, so a second call changes nothing. If XLA compiled the train
        steps of the trial, `jit_compile` of the model becomes True.

        Example:

        >>> decision = tuner.study.decide()
        >>> model = decision.apply(build)
        >>> data = kbatch.training_dataset(x, y, decision.batch_size)
        >>> model.fit(data, **decision.fit_arguments)

        Args:
            build_or_model: The build function or the `keras_tuner.HyperModel` of the search, which
                builds a model with the hyperparameters and the dtype policy of the trial. Or a
                compiled `keras.Model` that was built under that policy: it is changed.
            steps_per_execution: Boolean. Whether Keras starts as many train steps at once as in the
                trial. If False, the model keeps its own number. Default: True.

        Returns:
            The `keras.Model`, compiled.

        Raises:
            ValueError: If no trial completed, if the model has other optimizers or layers than
                those of the trial, or was built under another dtype policy. Layers that the first
                batch builds are checked then.
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
    """Decide as `Study.decide` does, without words; `search` are the settings of the search."""
    if not trials or trials[0].objective.name == "multi_objective":
        best = min(comparable_trials(trials)[0], key=lambda trial: trial.rank, default=None)
        return Decision(best and best.batch_size, best, best, confidence=confidence)
    races = search.get("strategy") == "race" and not is_time(trials[0].objective)
    found = (_race if races else _grid)(trials, search, tolerance, confidence)
    if found is None:
        return Decision(None, None, None, confidence=confidence)
    judgement, compared, left_out, unpaired, tolerance = found
    by_size = {trial.batch_size: trial for trial in compared}
    base = by_size.get(search.get("base_batch_size", 0)) if len(compared) > 1 else None
    trial = by_size[judgement.named[0]]
    return Decision(
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
        speedup=None if base is None or base is trial else _speedup(judgement, base, trial),
        left_out=tuple(left_out),
    )


Judged = tuple[Judgement, tuple[TrialRecord, ...], Sequence[LeftOut], Unpaired | None, float]


def _grid(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    tolerance: float | None,
    confidence: float,
) -> Judged | None:
    """Judge the trials of a grid, one of each size."""
    compared, left_out = comparable_trials(trials)
    if not compared:
        return None
    objective = compared[0].objective
    tolerance = tolerance_in_units(compared, tolerance)
    runs, unpaired = runs_of(compared)
    # A grid that was extended is judged once more; one run of each size is never certain.
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
    if rounds == 1 and judgement.obstacle is None:  # By the windows of a throughput.
        judgement = dataclasses.replace(judgement, obstacle="one_execution", certain=False)
    return judgement, compared, left_out, unpaired, tolerance


def _race(
    trials: Sequence[TrialRecord],
    search: Mapping[str, Any],
    tolerance: float | None,
    confidence: float,
) -> Judged | None:
    """Judge the trials of a race, those of one setting of the other hyperparameters."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(repr(other_hyperparameters(trial.hyperparameters)), []).append(trial)
    # The setting that is raced ran most often. At first each ran once, and the best one is raced.
    raced = best = min(
        groups.values(),
        key=lambda group: (-sum(len(t.executions) for t in group), min(t.rank for t in group)),
        default=[],
    )
    task = race_task(raced, search, tolerance=tolerance, confidence=confidence)
    if not task.search_rate:  # Those at other factors trained at the rates of a callback.
        raced = [trial for trial in raced if rate_factor(trial) == 1]
    runs, unpaired = runs_of(raced) if raced else ([], None)
    if (judgement := judge_race(task, runs)) is None:
        return None
    timed = {run.pair for run in runs if run.seconds and run.epochs is None}
    if not timed >= {*judgement.pairs}:
        judgement = dataclasses.replace(judgement, costs={})
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
    apart = (trial for group in groups.values() if group is not best for trial in group)
    left_out += [
        (trial, "other_settings") for trial in filter(None, map(with_complete_runs, apart))
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
    """Return what does not change during a race, from the settings of its search."""
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


def _speedup(judgement: Judgement, base: TrialRecord, named: TrialRecord) -> Estimate[float] | None:
    """Divide the times of the judgement; the runs of both show how much the ratio scatters."""
    costs = [judgement.costs.get((t.batch_size, rate_factor(t))) for t in (base, named)]
    if not all(costs) or not named.mean(training_seconds):
        return None
    measured, ratio = speedup(base, named), (costs[0] or 0.0) / (costs[1] or 1.0)
    return Estimate(ratio) if measured is None else measured.times(ratio / measured.value)


def speedup(base: TrialRecord, other: TrialRecord) -> Estimate[float] | None:
    """Divide the training time of one trial by that of another, over executions."""
    if len(device_kinds([base, other])) > 1 or any(map(ends_by_time, base.executions)):
        return None
    seconds = training_seconds if base.last.target is None else lambda e: e.seconds_to_target
    pairs = zip(base.executions, other.executions, strict=False)
    times = [(t, s) for one, two in pairs if (t := seconds(one)) and (s := seconds(two))]
    return ratio_over_rounds(*zip(*times, strict=True)) if times else None
