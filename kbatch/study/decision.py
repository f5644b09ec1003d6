"""The decision that a study supports: which batch size to take, and how to train with it.

Sizes are compared at one setting of the other hyperparameters and equal budgets, execution by
execution and validation example by validation example: see `kbatch.analysis.judge`.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.analysis.judge import DEFAULT_CONFIDENCE, Judgement, judge, judge_race
from kbatch.analysis.run_table import first_seed
from kbatch.records.notes import Note
from kbatch.study.compare import (
    LeftOut,
    LeftOutReason,
    Unpaired,
    comparable_trials,
    ends_by_time,
    is_time,
    rate_factor,
    rate_setters,
    runs_of,
    tolerance_in_units,
    training_seconds,
)
from kbatch.study.trial import TrialRecord, device_kinds

if TYPE_CHECKING:
    import pandas as pd

# From so many times the rate of the answer, beside the rule.
_FAR = 8
# A row of the table, by the names of its columns.
Row = dict[str, Any]


class Page(NamedTuple):
    """A decision as people read it."""

    sentences: tuple[str, ...]  # What to take, how sure that is, what changes: at most three.
    rows: tuple[Row, ...] = ()  # One a batch size.
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

    #: The size to take: the smallest of the sizes that are certified to be within the tolerance of
    #: the best and train about as fast as the fastest of them. If none is certified, the size with
    #: the best mean. None if no trial completed.
    batch_size: int | None
    trial: TrialRecord | None  #: Its trial, as in `trials`.
    best: TrialRecord | None  #: The trial with the best mean of those that are compared.
    #: All that are compared, one a size, ascending, with the executions that judge them: the first
    #: of a race chose its pairs.
    trials: tuple[TrialRecord, ...] = ()
    judgement: Judgement | None = None  #: What their executions show; None if none is compared.
    tolerance: float | None = None  #: What counts as equally good, in the metric's unit.
    #: Of all searches, at most 1 - `confidence` are certain while a size that was compared is
    #: better than the one to take by more than the tolerance.
    confidence: float = DEFAULT_CONFIDENCE
    #: Why sizes were not compared validation example by validation example; None if they were.
    unpaired: Unpaired | None = None
    #: The batch size to compare with; None if it has no comparable trial.
    base_batch_size: int | None = None
    #: Training time at that size divided by the time at the one to take, over executions. None if
    #: they are the same size, or if times cannot be compared.
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
        """Whether `batch_size` is certified to lie within the tolerance of the best."""
        found = self.judgement
        return found is not None and not found.obstacle and found.named in found.certified

    @property
    def certain(self) -> bool:
        """Whether it is certified, and each size that would be preferred to it is worse.

        It is about the pairs of size and learning rate that were compared, at the length trained.
        """
        return self.judgement is not None and self.judgement.certain

    def as_judged(self, trial: TrialRecord) -> TrialRecord:
        """Return a trial of the study with the executions that judge it, all where none does."""
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
        """What the trials trained with in place of what the build function gives, by name."""
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

        Values are set, not multiplied, so a second call changes nothing.

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
                those of the trials, or was built under another dtype policy.
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
    """Decide as `Study.decide` does, without words; of a race by its rounds.

    `search` are its settings.
    """
    raced_sizes = search.get("batch_sizes", ()) if search.get("strategy") == "race" else ()
    compared, left_out = comparable_trials(trials)
    if not compared:
        return Decision(None, None, None, confidence=confidence)
    best = min(compared, key=lambda trial: trial.rank)
    if best.objective.name == "multi_objective":
        return Decision(best.batch_size, best, best, confidence=confidence)
    tolerance, setters = tolerance_in_units(compared, tolerance), rate_setters(trials)
    runs, unpaired = runs_of(compared)
    rounds = max(len(trial.executions) for trial in compared)
    asked: Any = {"tolerance": tolerance, "confidence": confidence}
    asked["larger_is_better"] = best.objective.direction == "max"
    judgement = judge_race(runs, batch_sizes=raced_sizes, **asked) if raced_sizes else None
    if judgement is None:
        if raced_sizes:
            # The smallest seed chose the pairs, and is not judged after its rounds.
            first = first_seed(runs)
            runs = [run for run in runs if (run.seed or 0) == first]
            rounds = 1
        # A grid that was extended is judged once more; one execution of each is never certain.
        looks = sum(count > 1 for count in search.get("executions_asked", ()))
        over_examples = not is_time(best.objective)
        judgement = judge(runs, looks=max(1, looks), over_examples=over_examples, **asked)
    else:
        raced = {size for size, _ in judgement.pairs}
        for trial in compared:
            if trial.batch_size not in raced:
                rate = rate_factor(trial) / judgement.named[1]
                near = 1 / _FAR < rate < _FAR or setters
                why: LeftOutReason = "unlikely" if near else "far_rate"
                left_out.append((trial, why))
        compared = tuple(
            dataclasses.replace(trial, executions=trial.executions[1:] or trial.executions)
            for trial in compared
            if trial.batch_size in raced
        )
    if rounds == 1 and judgement.obstacle is None:  # By the windows of a throughput.
        judgement = dataclasses.replace(judgement, obstacle="one_execution", certain=False)
    by_size = {trial.batch_size: trial for trial in compared}
    base = by_size.get(search.get("base_batch_size", 0)) if len(compared) > 1 else None
    trial = by_size[judgement.named[0]]
    return Decision(
        rate_setters=setters,
        batch_size=trial.batch_size,
        trial=trial,
        best=by_size[judgement.leader[0]],
        trials=compared,
        judgement=judgement,
        tolerance=tolerance,
        confidence=confidence,
        unpaired=unpaired,
        base_batch_size=base and base.batch_size,
        speedup=None if base is None or base is trial else _speedup(base, trial),
        left_out=tuple(left_out),
    )


def _speedup(base: TrialRecord, other: TrialRecord) -> Estimate[float] | None:
    """Divide the training time of one trial by that of another, over executions."""
    if len(device_kinds([base, other])) > 1 or any(map(ends_by_time, base.executions)):
        return None
    seconds = training_seconds if base.last.target is None else lambda e: e.seconds_to_target
    pairs = zip(base.executions, other.executions, strict=False)
    times = [(t, s) for one, two in pairs if (t := seconds(one)) and (s := seconds(two))]
    return ratio_over_rounds(*zip(*times, strict=True)) if times else None
