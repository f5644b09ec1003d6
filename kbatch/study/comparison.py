"""Several studies side by side: what differs between them, and what that changes."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbatch.analysis.intervals import Estimate, ranged_columns
from kbatch.analysis.judge import judge
from kbatch.errors import InputError
from kbatch.page.numbers import at_most, format_number, join_words, setting
from kbatch.page.result import Result
from kbatch.study.compared_trials import (
    as_compared,
    is_complete,
    is_time,
    other_hyperparameters,
    runs_of,
    training_seconds,
    value_text,
)
from kbatch.study.decision import Row, speedup
from kbatch.study.page import relative_speed, rows_of
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import OWN_COLUMNS, TrialRecord
from kbatch.training.metrics import is_accuracy, is_fraction, metric_words

if TYPE_CHECKING:
    import pandas as pd

# The studies that a figure takes: one, several, or several by their names.
Studies = Study | Sequence[Study] | Mapping[str, Study]
# Most differences that have a column; a sentence names the others.
_MOST_DIFFERENCES = 6
# Settings that a search draws, counts or measures itself.
_NOT_GIVEN = ("seed", "training_s", "executions_asked", "short_runs", "grid_because", "epochs")
_OF_POLICY = re.compile(r" \([0-9a-f]{8}\)$")
# The end of a verdict that tells the speed.
_SPEED = re.compile(r", (?=(?:[\d.,e+-]+ times )?(?:as fast|slower)$)")
# Why the noise is not known, by the obstacle of the judgement.
_NOT_KNOWN = {
    "one_execution": "too few runs",
    "pinned": "the seed changes nothing",
    "no_outcomes": "validation examples not paired",
    "heavy_tails": "few validation examples decide",
}


def studies_of(studies: Any) -> tuple[Study, ...]:
    """Return one study or several as studies that can be shown together, each with its own name."""
    found: list[Any] = [studies]
    if isinstance(studies, Iterable) and not isinstance(studies, str):
        found = [*(studies.values() if isinstance(studies, Mapping) else studies)]
    for one in found or [studies]:
        refuse_empty(one)
    if isinstance(studies, Mapping):
        named = zip(studies, found, strict=True)
        found = [dataclasses.replace(one, name=str(name)) for name, one in named]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            "Studies that are shown together need different names. Give a dict that names them, "
            f'such as `{{"adam": study, "sgd": other}}`. Received: two studies named {twice!r}.'
        )
    kinds = {
        (one.trials[0].objective, one.quality_metric or one.trials[0].objective): one.name
        for one in found
    }
    if len(kinds) > 1:
        texts = (
            f"{name!r} has {objective.name} ({objective.direction}) and measures {quality.name}"
            for (objective, quality), name in kinds.items()
        )
        raise InputError(
            "Studies that are shown together need the same objective. Search again with one "
            f"objective for all, or show each study on its own. Received: {join_words(texts)}."
        )
    return tuple(found)


def compare(*studies: Studies) -> "Comparison":
    """Compare the answers of several searches, such as those for two optimizers.

    The table has one row for each study: what differs between the studies, then the batch size and
    the learning rate that its search decided on, and what these reach. kbatch finds the differences
    in the records: optimizer, dtype policy, hyperparameters, model, data, other arguments, machine
    and versions. The first study is the base. "better by" says how much better a study is than the
    base, with an interval for other seeds and other validation examples. At 95 % confidence all
    these intervals hold at once. Runs are paired if they have the same seeds, validation examples
    if both studies have the same ones. If the interval includes 0, the table says "no difference
    beyond the noise". The values are those of the runs by which each search chose its answer, so a
    search that tried more is slightly favoured: give all searches the same number of trainings.

    Example:

    >>> adam, sgd = kbatch.load_study("results/adam"), kbatch.load_study("results/sgd")
    >>> comparison = kbatch.compare(adam, sgd)
    >>> print(comparison)
    >>> kbatch.write_report(comparison, "optimizers.html")

    Args:
        *studies: At least two studies with the same objective; or one list of studies, or one dict
            that names them.

    Returns:
        A `kbatch.Comparison`.

    Raises:
        ValueError: If there are fewer than two studies, if a study is empty, or if two of them have
            the same name or other objectives.
    """
    found = studies_of(studies[0] if len(studies) == 1 else studies)
    if len(found) < 2:
        raise InputError(
            "`compare` needs at least two studies, such as `kbatch.compare(adam, sgd)`. "
            f"Received: {len(found)}."
        )
    return Comparison(found)


@dataclasses.dataclass(frozen=True)
class Comparison(Result):
    """The answers of several searches side by side, from `kbatch.compare`.

    `print` shows the table. `plot` and a report draw the studies in common figures.
    """

    studies: tuple[Study, ...]  #: The studies. The others are compared with the first one.

    noted = ()
    environment = None  # Each study has its own.

    @property
    def title(self) -> str:
        """How many studies are compared."""
        return f"Comparison of {len(self.studies):,} studies"

    @property
    def answer(self) -> str:
        """How the other studies differ from the first one."""
        base, *rows = self._rows()
        metric = self.studies[0].trials[0].objective.name
        if len(rows) > 2:  # A sentence for each would be too long.
            kinds: dict[str, list[str]] = {}
            for row in rows:
                kind, *_ = re.split(r", | \(", row["verdict"])
                kinds.setdefault(kind, []).append(row["study"])
            found = "; ".join(f"{kind} with {join_words(names)}" for kind, names in kinds.items())
            return f"Compared with {base['study']} by {metric_words(metric)}: {found}."
        colon = ":" if len(rows) > 1 else ","
        parts = "; ".join(_sentence(row, metric) for row in rows)
        return f"Compared with {base['study']}{colon} {parts}."

    @property
    def use(self) -> str:
        """What to train for a verdict, and which differences are not in the table."""
        more, once = [*differences(self.studies)][_MOST_DIFFERENCES:], []
        for study in filter(self._trained_once, self.studies):
            found = study.decide()
            rate = f", learning rate {setting(found.learning_rate)}" if found.learning_rate else ""
            once.append(f"{study.name} (batch size {found.batch_size}{rate})")
        texts = []
        if once:
            texts.append(
                f"For a verdict, train the answer of {join_words(at_most(once))} three times, with "
                "its learning rate in `build`, and compare the new study: `BatchSizeTuner(build, "
                '..., strategy="grid", batch_sizes=[size], executions_per_trial=3)`.'
            )
        if more:
            texts.append(f"The studies also differ in {join_words(at_most(more))}.")
        return " ".join(texts)

    @property
    def settings(self) -> dict[str, str]:
        """Where and how each study was measured."""
        return {one.name: one.settings["compared"] for one in self.studies}

    def table(self) -> "pd.DataFrame":
        """Return a row for each study: what differs, its answer, and how it compares."""
        import pandas as pd

        table = pd.DataFrame(self._rows())
        digits = (self.studies[0].trials[0].objective.name, "judged (95 % interval)")
        table.attrs["digits"] = dict.fromkeys(digits, 4)
        return table

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table, with the ends of each interval as columns of their own."""
        return self.table()

    def _rows(self) -> list[Row]:
        base, rows = self.studies[0], []
        objective = base.trials[0].objective
        metric, points = objective.name, is_fraction(objective.name)
        different = [*differences(self.studies).items()][:_MOST_DIFFERENCES]
        title = f"{metric} (95 % interval)"
        kept = (metric, title, "judged (95 % interval)", "samples/s", "training time (s)", "runs")
        for number, study in enumerate(self.studies):
            found = study.decide()
            shown = rows_of(found, as_compared(study.trials), study.quality_metric)
            answer = next((row for row in shown if row["verdict"] == "take"), {})
            row: Row = {"study": study.name} | {name: each[number] for name, each in different}
            row |= {"batch size": found.batch_size, "learning rate": found.learning_rate}
            ends = {name: name.removesuffix(", low").removesuffix(", high") for name in answer}
            row |= {name: answer[name] for name, column in ends.items() if column in kept}
            gain, verdict = None, "base of the comparison"
            if found.trial is None:
                verdict = "no answer"
            elif number:
                gain, verdict = self._against(base, study)
            unit, factor = (" (points)", 100) if points else ("", 1)
            row |= ranged_columns(f"better by{unit}", gain and gain.times(factor))
            rows.append(row | {"verdict": verdict})
        return rows

    @staticmethod
    def _trained_once(study: Study) -> bool:
        """Whether the answer of a study has one complete training run, which shows no noise."""
        trial = study.decide().trial
        return bool(trial and len(trial.executions) == 1 and is_complete(trial.executions[0]))

    def _against(self, first: Study, second: Study) -> tuple[Estimate[float] | None, str]:
        """Return how much better the answer of a study is than that of the first, and a verdict."""
        base, other = first.decide().trial, second.decide().trial
        trained = all(t and is_complete(t.executions[0]) for t in (base, other))
        if base is None or other is None or not trained or base.objective.name == "multi_objective":
            return (
                None,
                f"not known ({'several objectives' if trained else 'not trained to the end'})",
            )
        gain, obstacle = _gain(base, other, comparisons=len(self.studies) - 1)
        accurate = is_accuracy(other.objective.name)
        once = [study.name for study in (first, second) if self._trained_once(study)]
        if once and obstacle == "one_execution":
            each = " each" if len(once) > 1 else ""
            has = "have" if each else "has"
            words = f"not known ({join_words(once)} {has} one training run{each})"
        elif obstacle or gain is None or gain.ends is None:
            words = f"not known ({_NOT_KNOWN[obstacle or 'no_outcomes']})"
        elif gain.ends[0] <= 0 <= gain.ends[1]:
            words = "no difference beyond the noise"
        else:
            better = ("more accurate", "less accurate") if accurate else ("better", "worse")
            words = better[gain.value < 0]
        times = base.mean(training_seconds), other.mean(training_seconds)
        if is_time(other.objective) or not all(times):
            return gain, words
        ratio = speedup(base, other)
        same = ratio is not None and ratio.ends and ratio.ends[0] <= 1 <= ratio.ends[1]
        way = "as fast" if same else relative_speed((times[0] or 0.0) / (times[1] or 1.0))
        return gain, f"{words}, {way}"


def _sentence(row: Row, metric: str) -> str:
    """Say how a study differs from the base, as its row does."""
    quality, way = [*_SPEED.split(row["verdict"]), ""][:2]  # A study's name may have a comma.
    words = metric_words(metric)
    if quality.endswith("beyond the noise"):
        said = f"{row['study']} shows no difference in {words} beyond the noise"
    elif quality in ("more accurate", "less accurate", "better", "worse"):
        by = next(v for name, v in row.items() if name in ("better by", "better by (points)"))
        units = {"samples_per_second": " samples/s", "seconds_to_target": " s"}
        unit = " points" if is_fraction(metric) else units.get(metric, "")
        said = f"{row['study']} is {quality} by {format_number(abs(by))}{unit}"
    elif quality == "no answer":
        said = f"{row['study']} has no answer"
    else:
        said = f"whether {row['study']} differs in {words} is {quality}"
        way = way and f"{row['study']} trains {way}"
        return f"{said}, and {way}" if way else said
    return f"{said} and trains {way}" if way else said


def _gain(
    base: TrialRecord, other: TrialRecord, *, comparisons: int
) -> tuple[Estimate[float] | None, str | None]:
    """Return how much better the runs of a trial are, and why the noise is not known."""
    both = [base, other]
    values = [trial.judged_value or 0.0 for trial in both]
    gain = other.objective.sign * (values[1] - values[0])
    if min(len(trial.executions) for trial in both) < 2:
        return Estimate(gain), "one_execution"
    # `judge` compares batch sizes: the number of the study takes the place of one.
    for number, trial in enumerate(both):
        runs = tuple(dataclasses.replace(run, batch_size=number) for run in trial.executions)
        both[number] = dataclasses.replace(trial, hyperparameters={}, executions=runs)
    runs, _ = runs_of(both)
    seeds = [{run.seed for run in trial.executions} for trial in both]
    if len(seeds[0] & seeds[1]) < min(map(len, seeds)):
        runs = [run._replace(seed=None) for run in runs]
    found = judge(
        runs,
        larger_is_better=other.objective.direction == "max",
        tolerance=0.0,
        # Both ends of every interval hold at once at 95 %.
        confidence=1 - 0.025 / comparisons,
        over_examples=not is_time(other.objective),
    )
    gap = found.gaps.get((1, 1.0))
    if gap is None or gap.ends is None:
        return Estimate(gain), found.obstacle
    # The gap is that of the common rounds, the gain that of all runs, which varies no more.
    half_width = (gap.ends[1] - gap.ends[0]) / 2
    return Estimate(gain, gain - half_width, gain + half_width), found.obstacle


def differences(studies: Sequence[Study]) -> dict[str, list[str | None]]:
    """Return the texts of what differs between studies, by name, the most important first."""
    described = [_described(study) for study in studies]
    recorded = [study.search.facts if study.search else {} for study in studies]
    if not all(recorded):  # What only some of them recorded is no difference.
        common = set.intersection(*map(set, described))
        described = [{n: text for n, text in each.items() if n in common} for each in described]
    policies = {each.get("dtype_policy") for each in described}
    found: dict[str, list[str | None]] = {}
    for name in dict.fromkeys(name for each in described for name in each):
        texts = [each.get(name) for each in described]
        if name.startswith("model") and len(policies) > 1:  # The digest includes the policy.
            texts = [text and _OF_POLICY.sub("", text) for text in texts]
        # If the optimizer is another one, its momentum says nothing more.
        if len(set(texts)) > 1 and not any(name.startswith(f"{known}.") for known in found):
            found[name] = texts
    found.pop("dtype_policy", None)
    return found


def _described(study: Study) -> dict[str, str]:
    """Describe what decides the results of a study, by name, the most important first."""
    trial, search = study.decide().trial, study.search
    found: dict[str, Any] = {}
    if trial is not None:
        run = trial.last
        found |= {"optimizer": run.optimizer, "dtype policy": run.dtype_policy}
        if (made := run.scaling) is not None and made.learning_rate_ratio:
            rate = made.learning_rate / made.learning_rate_ratio
            found["optimizer.learning_rate"] = setting(float(f"{rate:.3g}"))
        others = other_hyperparameters(trial.hyperparameters).items()
        found |= {name: value_text(value) for name, value in others if name not in OWN_COLUMNS}
    if search is not None:
        # These follow the batch size and the learning rate, which have columns, or the policy.
        follow: Any = search.settings.get("follow_batch_size", ())
        follow = {"learning_rate", *(follow if isinstance(follow, (list, tuple)) else ())}
        left_out = {"objective", *(f"optimizer.{name}" for name in follow)}
        facts = sorted(search.facts.items(), key=lambda fact: fact[0].startswith("hyperparameter"))
        found |= {n: text for n, text in facts if n not in left_out and "dtype" not in n}
        for name, value in search.settings.items():
            if name not in _NOT_GIVEN:
                several = isinstance(value, (list, tuple))
                found[name] = ", ".join(map(str, value)) if several else str(value)
        environment = search.environment
        found |= {"device": environment.device, "processor": environment.cpu}
        found |= environment.versions
    return {name: text for name, text in found.items() if text is not None}
