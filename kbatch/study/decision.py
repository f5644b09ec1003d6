"""The decision that a study supports: which batch sizes are as good as the best, and which to take.

Sizes are compared at one setting of the other hyperparameters and equal budgets, execution by
execution and validation example by validation example: see `kbatch.analysis.paired_runs`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from kbatch.analysis.intervals import FEWEST_VALUES, Interval, ratio_over_rounds
from kbatch.analysis.joint_search import FACTOR_NAME, PairRun
from kbatch.analysis.paired_runs import (
    DEFAULT_CONFIDENCE,
    Candidate,
    Verdict,
    first_executions,
    judge,
    race_looks,
)
from kbatch.document.numbers import join_words, setting
from kbatch.records.training_run import COST_NAMES, ExecutionRecord
from kbatch.study.names import at_most, is_fraction, metric_words
from kbatch.study.trial import OWN_COLUMNS, Objective, TrialRecord, device_kinds

Model = TypeVar("Model")  # A `keras.Model`, which is not imported to read a study.

# Of a metric between 0 and 1 where larger is better, and the share of any other.
_DEFAULT_TOLERANCE = 0.01


class LeftOut(NamedTuple):
    """A completed trial that is not compared."""

    trial: TrialRecord
    why: Literal[
        "other settings",
        "another budget",
        "another kind of device",
        "no value of the objective",
        "another trial of its size",
        "fewer executions",
    ]


class SizeChange(NamedTuple):
    """What another batch size changes against the base size; a number that is not known is None."""

    speedup: float | None  #: Training time of the base size over that of this one.
    speedup_interval: Interval | None  #: Its interval of 95 % confidence.
    #: Objective of this size minus that of the base size, in the metric's unit. None where the
    #: objective is a time, or training ended at a target, where metrics are alike by design.
    difference: float | None
    difference_interval: Interval | None  #: Its interval of 95 % confidence.


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which batch size to take, which are as good, and how sure that is."""

    #: The size to take: the fastest that is certified to lie within the tolerance of the best; the
    #: best mean where none is. None where no trial completed.
    batch_size: int | None
    trial: TrialRecord | None  #: Its trial.
    best: TrialRecord | None  #: The trial with the best mean of those that are compared.
    #: Sizes that are not told apart from the best, the best among them, ascending; empty where the
    #: best stands alone.
    tied: tuple[int, ...] = ()
    worse: tuple[int, ...] = ()  #: Sizes worse than the best by more than the tolerance, ascending.
    #: Whether `batch_size` is certified to lie within the tolerance of the best. Never with one
    #: execution of each size: what another seed would change is not known then.
    certified: bool = False
    certain: bool = False  #: Whether it is certified and every faster size is worse.
    #: How much worse than the best each other size is, as an interval in the metric's unit. All
    #: bounds of one side hold together with `confidence`. Negative is better.
    gaps: Mapping[int, Interval] = dataclasses.field(default_factory=dict)
    #: Executions of each size that would settle it, as a forecast; None where it is settled, or
    #: where no number would.
    executions_needed: int | None = None
    #: The tolerance that the validation examples could settle, where they are too few for the one
    #: asked for.
    smallest_tolerance: float | None = None
    tolerance: float | None = None  #: What counts as equally good, in the metric's unit.
    #: Probability that a certain answer is right, above 0.5 and below 1.
    confidence: float = DEFAULT_CONFIDENCE
    executions: int = 0  #: Executions of each size that are compared, 0 where none is.
    #: Why sizes were not compared validation example by validation example; empty where they were.
    unpaired: str = ""
    #: The batch size to compare with, None where it has no comparable trial.
    base_batch_size: int | None = None
    #: What each other size changes against it, by batch size.
    changes: Mapping[int, SizeChange] = dataclasses.field(default_factory=dict)
    #: Kinds of devices that the compared trials ran on. If there are several, times are not
    #: compared, and the best mean decides.
    devices: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()  #: Completed trials that are not compared.

    @property
    def learning_rate(self) -> float | None:
        """Learning rate that the answer holds for, the highest of a schedule; None if not known."""
        run = self._run
        return run and (run.scaling.learning_rate if run.scaling else run.learning_rate)

    @property
    def settings(self) -> dict[str, Any]:
        """What the trials trained with in place of what the build function gives, by name."""
        run, found = self._run, {}
        if run is None:
            return found
        if (scaling := run.scaling) is not None:
            if scaling.learning_rate_ratio != 1:
                found["learning_rate"] = scaling.learning_rate
            names = scaling.follow_batch_size if scaling.kappa != 1 else ()
            values = {name: getattr(scaling, name, None) for name in names}
            if "batch_norm_momentum" in names:
                momenta = scaling.batch_norm_momenta
                values["batch_norm_momentum"] = momenta if momenta[1:] else (*momenta, None)[0]
            found |= {name: value for name, value in values.items() if value is not None}
        if (run.steps_per_execution or 1) > 1:
            found["steps_per_execution"] = run.steps_per_execution
        if (run.accumulation_steps or 1) > 1:
            found["micro_batch_size"] = run.micro_batch_size
        if run.dtype_policy != "float32":
            found["dtype_policy"] = run.dtype_policy
        return found

    @property
    def fit_arguments(self) -> dict[str, int]:
        """What to give `fit` for a training as long as those that were compared."""
        if self.trial is None:
            return {}
        epochs = max(len(run.epochs) for run in self.trial.executions)
        return {"batch_size": self.trial.batch_size, **({"epochs": epochs} if epochs else {})}

    def apply(self, model: Model) -> Model:
        """Make a model train with the settings of the trials, those of `settings` and all others.

        Values are set, not multiplied: twice is as once.

        Example:

        >>> decision = tuner.study.decide()
        >>> model = decision.apply(build())
        >>> model.fit(x, y, **decision.fit_arguments)

        Args:
            model: A compiled model, as the search's `build` returns it. It is changed.

        Returns:
            The same model.

        Raises:
            ValueError: If no trial completed, if the model has other optimizers or layers than
                those of the trials, or was built under another dtype policy.
        """
        from kbatch.training.applied_settings import apply_settings

        if self._run is None:
            raise ValueError(f"There are no settings to apply. {self.reason}")
        return apply_settings(model, self._run)

    @property
    def _run(self) -> ExecutionRecord | None:
        return self.trial and self.trial.executions[-1]

    @property
    def reason(self) -> str:
        """Why this size, and how sure that is, in sentences."""
        if self.trial is None or self.best is None:
            return "No trial completed with a value of the objective."
        if not self.executions:
            return (
                "The search has several objectives, so sizes are not compared: this trial has the "
                "best mean."
            )
        among = sorted({self.trial.batch_size, *self.tied, *self.worse})
        if len(among) < 2:
            if not self.left_out:
                return "It is the only trial that completed, so nothing was compared."
            why = join_words(list(dict.fromkeys(one.why for one in self.left_out)))
            return f"No other batch size can be compared with it ({why})."
        words, within = metric_words(self.best.objective.name), tolerance_text(self)
        sure = f"{100 * self.confidence:.3g} % confidence"
        tied = self.tied and sizes_text(self.tied, among)
        sentences = []
        which = "a" if len(self.devices) > 1 else "the fastest"
        others = f"other size is worse by more than {within} ({sure})."
        if self.executions == 1:
            sentences += [
                "One execution of each size is compared: what another seed would change is not "
                "known, so nothing is certain. `executions_per_trial=3` or more would show it."
            ]
            if not self.unpaired and (outcomes := self.trial.executions[0].outcomes) is not None:
                told = f"every {others}"
                if tied:
                    told = f"{tied} are not told apart within {within} ({sure})."
                sentences += [f"On the {outcomes.examples:,} validation examples, {told}"]
        elif self.certain:
            sentences += [
                f"It is {which} size whose {words} is certified to lie within {within} of the best "
                f"({sure})."
                if tied
                else f"Every {others}"
            ]
        else:
            if self.certified:
                sentences += [
                    f"It is certified to lie within {within} of the best ({sure}); whether a "
                    "faster size is too is still open."
                ]
            sentences += [f"Not told apart from the best within {within} ({sure}): {tied}."]
            if self.executions_needed is not None:
                count = f"About {self.executions_needed:,} executions of each size"
                sentences += [f"{count} would settle it (a forecast)."]
            elif self.smallest_tolerance is not None:
                sentences += [
                    "No number of executions would settle it, since there are too few validation "
                    "examples: they could settle a tolerance of "
                    f"{setting(self.smallest_tolerance)}."
                ]
        if len(self.devices) > 1:
            sentences += [f"Times are not compared, as trials ran on {join_words(self.devices)}."]
        if self.unpaired:
            spread = "executions" if self.executions > 1 else "timing windows" if self.gaps else ""
            how = f"Sizes are compared by the spread over {spread} alone"
            how = how if spread else "One execution shows no spread, so sizes are not compared"
            sentences += [f"{how}: {self.unpaired}."]
        return " ".join(sentences)


def raced_trials(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials of a race with the executions that completed, without those that failed."""
    found = []
    for trial in trials:
        kept = tuple(itertools.takewhile(lambda e: e.status == "completed", trial.executions))
        if kept and trial.status not in ("failed", "out_of_memory"):
            whole = len(kept) == len(trial.executions)
            found.append(trial if whole else dataclasses.replace(trial, executions=kept))
    return found


def comparable_trials(
    trials: Sequence[TrialRecord],
) -> tuple[tuple[TrialRecord, ...], tuple[LeftOut, ...]]:
    """Find one trial a size with settings and budget of the best mean, and what is left out."""
    completed = [trial for trial in trials if trial.status == "completed"]
    # Where an execution has no objective, it never met the target, or its metric was not finite.
    scored = [trial for trial in completed if None not in trial.objective_values]
    if not scored:
        return (), ()
    joint = any(FACTOR_NAME in trial.hyperparameters for trial in scored)
    # A joint search repeats what may be the best: any of its many single executions may be luck.
    most = max(len(trial.executions) for trial in scored) if joint else 0
    repeated = [trial for trial in scored if len(trial.executions) >= most]
    best = min(repeated, key=lambda trial: trial.rank)
    settings, budget, timed = _settings(best), _budget(best), _is_time(best.objective)
    ordered = sorted(completed, key=lambda trial: trial.rank if joint else trial.trial_id)
    ordered.sort(key=lambda trial: (trial is not best, -len(trial.executions)))
    kept: dict[int, TrialRecord] = {}
    left_out: list[LeftOut] = []
    # Of several trials of a size the one that was repeated most, whatever came out; of the rates of
    # a joint search then the best one.
    for trial in ordered:
        if _settings(trial) != settings:
            left_out.append(LeftOut(trial, "other settings"))
        elif _budget(trial) != budget:
            left_out.append(LeftOut(trial, "another budget"))
        elif trial is not best and timed and len(device_kinds([trial, best])) > 1:
            left_out.append(LeftOut(trial, "another kind of device"))
        elif None in trial.objective_values:
            left_out.append(LeftOut(trial, "no value of the objective"))
        elif trial.batch_size in kept:
            left_out.append(LeftOut(trial, "another trial of its size"))
        else:
            kept[trial.batch_size] = trial
    return tuple(kept[size] for size in sorted(kept)), tuple(left_out)


def pair_runs(trials: Iterable[TrialRecord]) -> list[PairRun]:
    """Return the executions of a joint search that ended, as its model takes them."""
    found = []
    for trial in trials:
        factor = trial.hyperparameters.get(FACTOR_NAME)
        if not isinstance(factor, (int, float)):
            continue
        pair = trial.batch_size, float(factor or 1)
        for run, value in zip(trial.executions, trial.objective_values, strict=True):
            if run.status == "completed":
                found.append(PairRun(*pair, value))
            elif run.diverged or run.status in ("failed", "out_of_memory"):
                outcome = "diverged" if run.diverged else run.status
                found.append(PairRun(*pair, None, outcome))
    return found


def other_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if name not in ("batch_size", FACTOR_NAME)}


def candidates_of(trials: Sequence[TrialRecord], executions: int) -> tuple[list[Candidate], str]:
    """Make candidates of so many executions of each; say why they are not paired by example."""
    runs = [trial.executions[:executions] for trial in trials]
    unpaired = _unpaired_reason([run for each in runs for run in each], trials[0].objective)
    timed = not any(_ends_by_time(run) for each in runs for run in each)
    timed = timed and len(device_kinds(trials)) < 2
    found = []
    windows = min(len(run.window_examples) for each in runs for run in each)
    for trial, each in zip(trials, runs, strict=True):
        seconds = [s for run in each if (s := training_seconds(run)) is not None]
        blocks = [o.values for run in each if (o := run.outcomes) and o.values is not None]
        values = [v for v in trial.objective_values[:executions] if v is not None]
        if executions == 1 and trial.objective.name == "samples_per_second" and windows > 1:
            pairs = zip(each[0].window_examples, each[0].window_durations_s, strict=True)
            values = [examples / s for examples, s in pairs][:windows]
        outcomes = None if unpaired else np.stack(blocks)
        mean_s = fmean(seconds) if timed and len(seconds) == len(each) else None
        examples = None if unpaired or not each[0].outcomes else each[0].outcomes.examples
        found.append(Candidate(values, outcomes, mean_s, examples))
    return found, unpaired


def count_race_looks(trials: Sequence[TrialRecord], max_executions: int | None) -> int:
    """Count the looks of a race of the trials with the settings of the best mean, at least 1."""
    counted = raced_trials(trials)
    raced, _ = comparable_trials(counted)
    ids = {trial.trial_id for trial in raced}
    spent = sum(len(trial.executions) for trial in counted if trial.trial_id not in ids)
    most = None if max_executions is None else max_executions - spent
    return max(1, len(race_looks(len(raced), most))) if len(raced) > 1 else 1


def decide(
    trials: Sequence[TrialRecord],
    *,
    tolerance: float | None = None,
    confidence: float,
    base_batch_size: int | None = None,
    looks: int = 0,
) -> Decision:
    """Decide as `Study.decide` does; a race may look at the data `looks` times, others 0."""
    comparable, left_out = comparable_trials(raced_trials(trials) if looks else trials)
    if not comparable:
        return Decision(None, None, None, confidence=confidence)
    best = min(comparable, key=lambda trial: trial.rank)
    objective = best.objective
    if objective.name == "multi_objective":
        return Decision(best.batch_size, best, best, confidence=confidence)
    tolerance = tolerance_in_units(comparable, tolerance)
    judged = functools.partial(
        judge,
        larger_is_better=objective.direction == "max",
        tolerance=tolerance,
        confidence=confidence,
        looks=max(1, looks),
    )
    rounds, compared, behind = _in_step(comparable, judged, raced=looks > 0)
    candidates, unpaired = candidates_of(compared, rounds)
    verdict = judged(candidates)
    sizes = [trial.batch_size for trial in compared]
    worse = tuple(sizes[k] for k in verdict.worse)
    tied = tuple(size for size in sizes if size not in worse)
    named = compared[verdict.named]
    others = [size for size in sizes if size != base_batch_size]
    base = sizes.index(base_batch_size) if base_batch_size in sizes and others else None
    return Decision(
        batch_size=named.batch_size,
        trial=named,
        best=compared[verdict.leader],
        tied=tied if len(tied) > 1 else (),
        worse=worse,
        certified=verdict.named in verdict.certified and len(sizes) > 1 and rounds > 1,
        certain=verdict.certain and len(sizes) > 1 and rounds > 1,
        gaps={
            size: gap
            for k, (size, gap) in enumerate(zip(sizes, verdict.gaps, strict=True))
            if gap is not None and k != verdict.leader
        },
        executions_needed=verdict.executions_needed if rounds > 1 else None,
        smallest_tolerance=verdict.smallest_tolerance if rounds > 1 else None,
        tolerance=tolerance,
        confidence=confidence,
        executions=rounds,
        unpaired=unpaired,
        base_batch_size=None if base is None else base_batch_size,
        changes={} if base is None else _changes(compared, candidates, base),
        devices=tuple(device_kinds(compared)),
        left_out=(*left_out, *(LeftOut(trial, "fewer executions") for trial in behind)),
    )


def tolerance_text(found: Decision) -> str:
    """Write the tolerance: in the unit of a metric between 0 and 1, else as a share of the best."""
    tolerance, best = found.tolerance or 0.0, (found.best and found.best.objective_value) or 0.0
    fraction = found.best is not None and _is_fraction(found.best.objective, best)
    return setting(tolerance) if fraction or not best else f"{100 * tolerance / abs(best):.2g} %"


def sizes_text(sizes: Sequence[int], among: Sequence[int]) -> str:
    """Name batch sizes: "16 to 64" where they are three or more neighbours among all."""
    places = [among.index(size) for size in sizes]
    if len(sizes) > 2 and places[-1] - places[0] == len(sizes) - 1:
        return f"{sizes[0]:,} to {sizes[-1]:,}"
    return join_words(at_most([f"{size:,}" for size in sizes]))


def check_tolerance(tolerance: Any, confidence: Any, metric: str = "") -> None:
    """Check what a decision is asked for, against the range of the metric where its name tells."""
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < math.inf):
        raise ValueError(
            "`tolerance` is how much worse than the best still counts as equally good, in the "
            "metric's unit: a number from 0 on, such as 0.01 for 1 % of accuracy, or None for the "
            f"default. Received: tolerance={tolerance!r}."
        )
    if is_fraction(metric) and tolerance is not None and tolerance >= 1:
        raise ValueError(
            f"`tolerance` must be smaller than the range of {metric}, which lies between 0 and 1: "
            f"0.01 for 1 %. Received: tolerance={tolerance}."
        )
    if not isinstance(confidence, (int, float)) or not 0.5 < confidence < 1:
        raise ValueError(
            "`confidence` must be a probability above 0.5 and below 1, such as 0.95. "
            f"Received: confidence={confidence!r}."
        )


def tolerance_in_units(trials: Sequence[TrialRecord], tolerance: float | None) -> float:
    """Return the tolerance in the metric's unit, the default where it is None."""
    if tolerance is not None:
        return float(tolerance)
    best = min(trials, key=lambda trial: trial.rank).objective_value or 0.0
    fraction = _is_fraction(trials[0].objective, best)
    return _DEFAULT_TOLERANCE if fraction else _DEFAULT_TOLERANCE * abs(best)


def _is_fraction(objective: Objective, best: float) -> bool:
    return objective.direction == "max" and 0 <= best <= 1


def _in_step(
    trials: Sequence[TrialRecord], judged: Callable[[list[Candidate]], Verdict], *, raced: bool
) -> tuple[int, list[TrialRecord], list[TrialRecord]]:
    """Return the executions to compare, the trials that have them, and those that are behind."""
    counts = [len(trial.executions) for trial in trials]
    rounds, behind = sorted(counts)[-2:][0], []
    for k, own in enumerate(counts):
        if own < rounds:
            then = [j for j, count in enumerate(counts) if count >= own]
            candidates, _ = candidates_of([trials[j] for j in then], own)
            if own == 1 or then.index(k) not in judged(candidates).worse:
                behind.append(k)
    # In a race some have not had their turn in the last round: all count by the rounds before.
    if raced and any(counts[k] == rounds - 1 for k in behind):
        rounds -= 1
        behind = [k for k in behind if counts[k] < rounds]
    compared = [trial for k, trial in enumerate(trials) if k not in behind]
    return rounds, compared, [trials[k] for k in behind]


def training_seconds(run: ExecutionRecord) -> float | None:
    """Return the seconds of training, without what the first steps take to compile."""
    rate = run.samples_per_second
    return run.examples_seen / rate if rate and run.examples_seen else run.train_s


def _ends_by_time(run: ExecutionRecord) -> bool:
    return run.target is None and run.budget is not None and run.budget.train_s is not None


def _is_time(objective: Objective) -> bool:
    return objective.name == "samples_per_second" or objective.name in COST_NAMES


def _settings(trial: TrialRecord) -> tuple[str, dict[str, str]]:
    """Return what two trials that are compared have in common."""
    own = (*OWN_COLUMNS, FACTOR_NAME)
    others = (n for n in trial.hyperparameters if n not in own and n[:6] != "tuner/")
    # By its text True differs from 1.
    return trial.dtype_policy, {name: repr(trial.hyperparameters[name]) for name in others}


def _budget(trial: TrialRecord) -> tuple[object, ...]:
    """Return what bounds a trial's training: keras-tuner's Hyperband gives some more epochs."""
    run, rung = trial.executions[-1], ("tuner/initial_epoch", "tuner/epochs")
    return (run.budget, run.target, *(trial.hyperparameters.get(name) for name in rung))


def _unpaired_reason(runs: Sequence[ExecutionRecord], objective: Objective) -> str:
    """Say why executions cannot be compared by validation example, an empty text if they can."""
    if _is_time(objective):
        return "a time is measured once in an execution"
    found = [run.outcomes for run in runs if run.outcomes is not None]
    reasons = [outcomes.reason for outcomes in found if outcomes.reason]
    if reasons:
        return reasons[0].rstrip(".")
    if len(found) < len(runs) or {outcomes.metric for outcomes in found} != {objective.name}:
        return f"the records hold no outcomes of validation examples for {objective.name}"
    if len({(outcomes.key, outcomes.block_examples) for outcomes in found}) > 1:
        return "trials were validated on other examples, or on the same in another order"
    return ""


def _changes(
    trials: Sequence[TrialRecord], candidates: Sequence[Candidate], base: int
) -> dict[int, SizeChange]:
    """Compare each size with the base size."""
    objective, found = trials[base].objective, {}
    larger = objective.direction == "max"
    timed = trials[base].target is not None or _is_time(objective)
    for trial, candidate in zip(trials, candidates, strict=True):
        if trial is trials[base]:
            continue
        difference = bounds = None
        if not timed:
            rounds = min(len(candidate.values), len(candidates[base].values))
            pair = [first_executions(one, rounds) for one in (candidates[base], candidate)]
            difference = fmean(pair[1].values) - fmean(pair[0].values)
            # Its bounds hold one side at a time.
            verdict = judge(pair, larger_is_better=larger, tolerance=0.0, confidence=0.975)
            bounds = verdict.gaps[1 - verdict.leader]
            if bounds is not None and (verdict.leader == 1) != larger:
                bounds = Interval(-bounds.high, -bounds.low)
        found[trial.batch_size] = SizeChange(*_speedup(trials[base], trial), difference, bounds)
    return found


def _speedup(base: TrialRecord, other: TrialRecord) -> tuple[float | None, Interval | None]:
    """Divide the base size's time by that of another size, over executions or timing windows."""
    seconds = training_seconds if base.target is None else lambda e: e.cost("seconds_to_target")
    pairs = zip(base.executions, other.executions, strict=False)
    times = [(t, s) for one, two in pairs if (t := seconds(one)) and (s := seconds(two))]
    apart = len(device_kinds([base, other])) > 1
    if apart or not times or any(map(_ends_by_time, base.executions)):
        return None, None
    numerators, denominators = zip(*times, strict=True)
    ratio = fmean(numerators) / fmean(denominators)
    if len(times) >= FEWEST_VALUES and (found := ratio_over_rounds(numerators, denominators)):
        return found.value, found.interval
    rates = [trial.executions[0].samples_per_second_interval for trial in (base, other)]
    # The windows do not show how many updates another execution needs to a target.
    if len(times) > 1 or base.target is not None or rates[0] is None or rates[1] is None:
        return ratio, None
    middle = other.throughputs[0] / base.throughputs[0]
    low, high = rates[1].low / rates[0].high, rates[1].high / rates[0].low
    return ratio, Interval(ratio * low / middle, ratio * high / middle)
