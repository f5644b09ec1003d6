"""The comparison of several studies: their differences, and the effect on quality and speed."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbatch.analysis.intervals import Estimate, ranged_columns
from kbatch.analysis.judge import judge
from kbatch.errors import InputError
from kbatch.page.numbers import at_most, format_number, join_words, setting
from kbatch.page.result import Result
from kbatch.records.notes import Note
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
from kbatch.study.page import SPEED_NOT_KNOWN, relative_speed, rows_of
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import OWN_COLUMNS, TrialRecord
from kbatch.training.metrics import is_accuracy, is_fraction, metric_words

if TYPE_CHECKING:
    import pandas as pd

# The studies of a figure: one, several, or several with names.
Studies = Study | Sequence[Study] | Mapping[str, Study]
# Most differences that have a column. A sentence names the others.
_MOST_DIFFERENCES = 6
# Settings that a search draws, counts or measures itself, or that follow from its batch sizes.
_NOT_GIVEN = ("seed", "training_s", "executions_asked", "short_runs", "grid_because", "epochs")
_NOT_GIVEN += ("validation_batch_size", "base_added")
# Notes on how a study chose its batch size, on how fast others are, and on usual settings.
_ABOUT_SIZES = ("to_be_certain", "sizes_not_compared", "shown_better", "rate_off", "base_added")
_ABOUT_SIZES += ("times_scatter", "times_corrected", "memory_binds", "updates_bind", "noise_binds")
_ABOUT_SIZES += ("also_set", "batches_cut", "batches_whole")
# The digest of a model, which includes its dtype policy.
_DIGEST = re.compile(r" \([0-9a-f]{8}\)$")
# The gain of a study's answer over the base's, and its quality and speed in words.
Verdict = tuple[Estimate[float] | None, str, str]
# Why the noise is unknown, by the obstacle of the judgement.
_NOT_KNOWN = {"one_execution": "too few runs", "pinned": "the seed changes nothing"}
_NOT_KNOWN |= {"no_outcomes": "validation examples not compared"}
_NOT_KNOWN |= {"heavy_tails": "a few validation examples decide"}


def studies_of(studies: Any) -> tuple[Study, ...]:
    """Check that studies can be shown together, and return them with their names."""
    shown: list[Any] = [studies]
    if isinstance(studies, Iterable) and not isinstance(studies, str):
        shown = [*(studies.values() if isinstance(studies, Mapping) else studies)]
    for study in shown or [studies]:
        refuse_empty(study)
    if isinstance(studies, Mapping):
        named = zip(studies, shown, strict=True)
        shown = [dataclasses.replace(study, name=str(name)) for name, study in named]
    names = [study.name for study in shown]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            "Studies that are shown together need different names. Give a dict that names them, "
            f'such as `{{"adam": study, "sgd": other}}`. Received: two studies named {twice!r}.'
        )
    kinds = {
        (study.trials[0].objective, study.quality_metric or study.trials[0].objective): study.name
        for study in shown
    }
    if len(kinds) > 1:
        texts = (
            f"{name!r} has {objective.name} ({objective.direction}) and measures {quality.name}"
            for (objective, quality), name in kinds.items()
        )
        raise InputError(
            "Studies that are shown together need the same objective. Search again with one "
            f"objective for all, or show each study separately. Received: {join_words(texts)}."
        )
    return tuple(shown)


def compare(*studies: Studies) -> "Comparison":
    """Compare the answers of several searches, such as those for two optimizers.

    The table has one row for each study. Its columns are the differences between the studies, then
    the batch size and the learning rate of its answer, and the quality and speed of this answer.
    kbatch finds the differences in the records: optimizer, dtype policy, hyperparameters, model,
    data, other arguments, machine and versions.

    The first study is the base. "better by" is the gain of a study over the base, with an interval
    over seeds and validation examples. At 95 % confidence all these intervals hold at once. If an
    interval includes 0, the table says "no difference beyond the noise". Runs are paired if they
    have the same seeds, and validation examples are paired if they are the same.

    The same runs chose the answer of a search and are compared here. This slightly favours a search
    that tried more, so give all searches the same number of trainings.

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
            the same name or different objectives.
    """
    compared = studies_of(studies[0] if len(studies) == 1 else studies)
    if len(compared) < 2:
        raise InputError(
            "`compare` needs at least two studies, such as `kbatch.compare(adam, sgd)`. "
            f"Received: {len(compared)}."
        )
    return Comparison(compared)


@dataclasses.dataclass(frozen=True)
class Comparison(Result):
    """The answers of several searches side by side, from `kbatch.compare`.

    `print` shows the table. `plot` and a report draw the studies in common figures.

    Example:

    >>> comparison = kbatch.compare({"adam": adam, "sgd": sgd})
    >>> comparison.answer
    >>> comparison.plot().figure.savefig("optimizers.png")
    """

    studies: tuple[Study, ...]  #: The studies. The first one is the base.

    environment = None  # Each study has its own.

    @property
    def title(self) -> str:
        """The number of studies."""
        return f"Comparison of {len(self.studies):,} studies"

    @property
    def answer(self) -> str:
        """The differences of the other studies from the first one."""
        base, *others = self.studies
        metric = base.trials[0].objective.name
        if len(others) > 2:  # A sentence for each study would be too long.
            kinds: dict[str, list[str]] = {}
            for study in others:
                _, quality, _ = self._verdict(study)
                kinds.setdefault(quality.partition(" (")[0], []).append(study.name)
            parts = "; ".join(f"{kind} with {join_words(names)}" for kind, names in kinds.items())
            return f"Compared with {base.name} by {metric_words(metric)}: {parts}."
        colon = ":" if len(others) > 1 else ","
        parts = "; ".join(_sentence(study.name, metric, *self._verdict(study)) for study in others)
        return f"Compared with {base.name}{colon} {parts}."

    @property
    def use(self) -> str:
        """The training runs that a verdict needs, and the differences that the table leaves out."""
        more, once = [*differences(self.studies)][_MOST_DIFFERENCES:], []
        for study in filter(self._trained_once, self.studies):
            decision = study.decide()
            rate = decision.learning_rate
            rate_text = f", learning rate {setting(rate)}" if rate else ""
            once.append(f"{study.name} (batch size {decision.batch_size}{rate_text})")
        texts = []
        if once:
            texts.append(
                "The recommended batch size was trained only once in "
                f"{join_words(at_most(once))}. Set the recommended learning rate in `build`, train "
                "that size three times with `BatchSizeTuner(BatchSizeHyperModel(build, [size], "
                'seed=0), ..., strategy="grid", executions_per_trial=3)`, and compare again.'
            )
        if more:
            texts.append(f"The studies also differ in {join_words(at_most(more))}.")
        return " ".join(texts)

    @property
    def settings(self) -> dict[str, str]:
        """The conditions of each study."""
        return {study.name: study.settings["compared"] for study in self.studies}

    @property
    def noted(self) -> tuple[Note, ...]:
        """The notes of the studies that matter to a comparison, each note once."""
        names: dict[Note, list[str]] = {}
        for study in self.studies:
            for note in study.notes:
                names.setdefault(note, []).append(study.name)
        named = [(Note(f"{join_words(at_most(of))}: {note}"), note) for note, of in names.items()]
        for copy, note in named:
            copy.code, copy.values = note.code, note.values
        return tuple(copy for copy, _ in named if copy.code not in _ABOUT_SIZES)

    def table(self) -> "pd.DataFrame":
        """Return a row for each study, with the differences, its answer and a verdict."""
        import pandas as pd

        table = pd.DataFrame(self._rows())
        digits = (self.studies[0].trials[0].objective.name, "judged (95 % interval)")
        table.attrs["digits"] = dict.fromkeys(digits, 4)
        return table

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table, with separate columns for the ends of each interval."""
        return self.table()

    def _rows(self) -> list[Row]:
        base, rows = self.studies[0], []
        metric = base.trials[0].objective.name
        unit, factor = (" (points)", 100) if is_fraction(metric) else ("", 1)
        different = [*differences(self.studies).items()][:_MOST_DIFFERENCES]
        title = f"{metric} (95 % interval)"
        shown = (metric, title, "judged (95 % interval)", "samples/s", "training time (s)", "runs")
        for number, study in enumerate(self.studies):
            decision = study.decide()
            table = rows_of(decision, as_compared(study.trials), study.quality_metric)
            answer = next((row for row in table if row["verdict"] == "take"), {})
            row: Row = {"study": study.name} | {name: texts[number] for name, texts in different}
            row |= {"batch size": decision.batch_size, "learning rate": decision.learning_rate}
            row |= {n: value for n, value in answer.items() if n.partition(", ")[0] in shown}
            gain, quality, speed = self._verdict(study)
            row |= ranged_columns(f"better by{unit}", gain and gain.times(factor))
            rows.append(row | {"verdict": f"{quality}, {speed}" if speed else quality})
        return rows

    @staticmethod
    def _trained_once(study: Study) -> bool:
        """Return whether the answer of a study has only one complete run, which shows no noise."""
        trial = study.decide().trial
        return bool(trial and len(trial.executions) == 1 and is_complete(trial.executions[0]))

    def _verdict(self, study: Study) -> Verdict:
        """Compare the answer of a study with the answer of the first one."""
        base, other = self.studies[0].decide().trial, study.decide().trial
        if other is None:
            return None, "no answer", ""
        if study is self.studies[0]:
            return None, "base of the comparison", ""
        if base is None or not all(is_complete(trial.executions[0]) for trial in (base, other)):
            return None, "not known (not trained to the end)", ""
        if base.objective.name == "multi_objective":
            return None, "not known (several objectives)", ""
        gain, obstacle = _gain(base, other, comparisons=len(self.studies) - 1)
        once = [s.name for s in (self.studies[0], study) if self._trained_once(s)]
        if once and obstacle == "one_execution":
            runs = "have one training run each" if len(once) > 1 else "has one training run"
            words = f"not known ({join_words(once)} {runs})"
        elif obstacle or gain.ends is None:
            words = f"not known ({_NOT_KNOWN[obstacle or 'no_outcomes']})"
        elif gain.ends[0] <= 0 <= gain.ends[1]:
            words = "no difference beyond the noise"
        elif is_accuracy(other.objective.name):
            words = "less accurate" if gain.value < 0 else "more accurate"
        else:
            words = "worse" if gain.value < 0 else "better"
        base_s, other_s = base.mean(training_seconds), other.mean(training_seconds)
        if is_time(other.objective) or not base_s or not other_s:
            return gain, words, ""
        speed = speedup(base, other, base_s / other_s)
        if speed.ends is None:  # All runs must agree if they are too few for an interval.
            b, o = ([training_seconds(e) or base_s for e in t.executions] for t in (base, other))
            speed = Estimate(speed.value, min(b) / max(o), max(b) / min(o), speed.n)
        return gain, words, relative_speed(speed, say_runs=True)


def _sentence(
    name: str, metric: str, gain: Estimate[float] | None, quality: str, speed: str
) -> str:
    """Write the verdict of a study as a sentence."""
    unknown = ", and the difference in speed is not known" if speed == SPEED_NOT_KNOWN else ""
    if quality == "no answer":
        return f"{name} has no answer"
    if quality.startswith("not known"):
        text = f"the difference in {metric_words(metric)} to {name} is {quality}"
        return text + (unknown or f", and {name} trains {speed}") if speed else text
    text = f"{name} shows no difference in {metric_words(metric)} beyond the noise"
    if gain is not None and not quality.endswith("beyond the noise"):
        units = {"samples_per_second": " samples/s", "seconds_to_target": " s"}
        factor, unit = (100, " points") if is_fraction(metric) else (1, units.get(metric, ""))
        text = f"{name} is {quality} by {format_number(factor * abs(gain.value))}{unit}"
    return text + (unknown or f" and trains {speed}") if speed else text


def _gain(
    base: TrialRecord, other: TrialRecord, *, comparisons: int
) -> tuple[Estimate[float], str | None]:
    """Return how much better the runs of the other trial are, and the obstacle of the judge."""
    both = [base, other]
    values = [trial.judged_value or 0.0 for trial in both]
    gain = other.objective.sign * (values[1] - values[0])
    if min(len(trial.executions) for trial in both) < 2:
        return Estimate(gain), "one_execution"
    # `judge` compares batch sizes, so each study gets its number as one.
    for number, trial in enumerate(both):
        runs = tuple(dataclasses.replace(run, batch_size=number) for run in trial.executions)
        both[number] = dataclasses.replace(trial, hyperparameters={}, executions=runs)
    runs, _ = runs_of(both)
    seeds = [{run.seed for run in trial.executions} for trial in both]
    if len(seeds[0] & seeds[1]) < min(map(len, seeds)):
        runs = [run._replace(seed=None) for run in runs]
    judgement = judge(
        runs,
        larger_is_better=other.objective.direction == "max",
        tolerance=0.0,
        # Both ends of every interval hold at once at 95 %.
        confidence=1 - 0.025 / comparisons,
        over_examples=not is_time(other.objective),
    )
    gap = judgement.gaps.get((1, 1.0))
    if gap is None or gap.ends is None:
        return Estimate(gain), judgement.obstacle
    # The gain is a mean over all runs, and the gap is a mean over common rounds. So the interval of
    # the gap is at least as wide as an interval of the gain.
    half_width = (gap.ends[1] - gap.ends[0]) / 2
    return Estimate(gain, gain - half_width, gain + half_width), judgement.obstacle


def differences(studies: Sequence[Study]) -> dict[str, list[str | None]]:
    """Return a text for each study by the name of a difference, the most important first."""
    described = [_described(study) for study in studies]
    if not all(study.search and study.search.facts for study in studies):
        # A fact is unknown, and no difference, if only some studies recorded it.
        common = set.intersection(*map(set, described))
        described = [{n: text for n, text in texts.items() if n in common} for texts in described]
    policies = {texts.get("dtype_policy") for texts in described}
    different: dict[str, list[str | None]] = {}
    first = ("optimizer", "optimizer.momentum")
    for name in dict.fromkeys((*first, *(name for texts in described for name in texts))):
        texts = [description.get(name) for description in described]
        if name.startswith("model") and len(policies) > 1:
            texts = [text and _DIGEST.sub("", text) for text in texts]
        # If the optimizer differs, its parts are not listed, except for the momentum.
        is_part = any(name.startswith(f"{whole}.") for whole in different)
        if len(set(texts)) > 1 and (not is_part or name == "optimizer.momentum"):
            different[name] = texts
    different.pop("dtype_policy", None)
    if sizes := different.get("batch_sizes"):
        different.pop("base_batch_size", None)  # It is one of the sizes.
        if not any(text and "," in text for text in sizes):  # The answers show single sizes.
            del different["batch_sizes"]
    return different


def _described(study: Study) -> dict[str, str]:
    """Describe the settings that decide the results of a study, the most important first."""
    trial, search = study.decide().trial, study.search
    texts: dict[str, Any] = {}
    if trial is not None:
        run = trial.last
        texts |= {"optimizer": run.optimizer, "dtype policy": run.dtype_policy}
        if (scaling := run.scaling) is not None and scaling.learning_rate_ratio:
            rate = scaling.learning_rate / scaling.learning_rate_ratio
            texts["optimizer.learning_rate"] = setting(float(f"{rate:.3g}"))
        others = other_hyperparameters(trial.hyperparameters).items()
        texts |= {name: value_text(value) for name, value in others if name not in OWN_COLUMNS}
    if search is not None:
        # These follow the batch size and the learning rate, which have columns.
        follow: Any = search.settings.get("follow_batch_size", ())
        follow = {"learning_rate", *(follow if isinstance(follow, (list, tuple)) else ())}
        left_out = {"objective", *(f"optimizer.{name}" for name in follow)}
        facts = sorted(search.facts.items(), key=lambda fact: fact[0].startswith("hyperparameter"))
        texts |= {n: text for n, text in facts if n not in left_out and "dtype" not in n}
        for name, value in search.settings.items():
            if name not in _NOT_GIVEN:
                several = isinstance(value, (list, tuple))
                texts[name] = ", ".join(map(str, value)) if several else str(value)
        environment = search.environment
        texts |= {"device": environment.device, "processor": environment.cpu}
        texts |= environment.versions
    return {name: text for name, text in texts.items() if text is not None}
