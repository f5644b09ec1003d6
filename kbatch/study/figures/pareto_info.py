"""What the figure of quality against throughput shows, computed before anything is drawn."""

from typing import NamedTuple

from kbatch.document.number_text import counted, listed, readable
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.estimates import Estimate, bars_text, metric_estimate, throughput_estimate
from kbatch.study.figures.incomplete import incomplete_text, none_completed
from kbatch.study.figures.pareto_analysis import pareto_front
from kbatch.study.figures.series import trial_series
from kbatch.study.metric_names import metric_words
from kbatch.study.study_record import Study
from kbatch.study.trial import Objective, TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names


class ParetoPoint(NamedTuple):
    """One trial.

    Attributes:
        trial_id: keras-tuner's identifier.
        name: Its batch size, with what else tells it from the others.
        batch_size: Examples of one optimizer update.
        series: Number of its series.
        throughput: In examples per second.
        quality: The quality metric.
        on_front: Whether no other trial is both faster and better.
    """

    trial_id: str
    name: str
    batch_size: int
    series: int
    throughput: Estimate
    quality: Estimate
    on_front: bool


class ParetoInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        points: The trials that have both numbers, by throughput.
        series: What the trials of each series have in common.
        quality: The metric of the y axis, None if no trial has one.
        bars: What the bars are, an empty text where there are none.
        nothing: Why there is no point, an empty text where there is one.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    points: tuple[ParetoPoint, ...]
    series: tuple[str, ...]
    quality: Objective | None
    bars: str
    nothing: str
    incomplete: str
    conditions: str

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The trials that no other one beats, the slowest first."""
        return tuple(point for point in self.points if point.on_front)


def pareto_info(study: Study) -> ParetoInfo:
    """Computes which trials are faster or better than every other one.

    Args:
        study: A study with at least one trial.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    refuse_empty(study)
    names, quality = trial_names(study.trials), study.quality_metric
    completed = [trial for trial in study.trials if trial.status == "completed"]
    series = trial_series(completed, names) if completed else ()
    number = {trial_id: i for i, one in enumerate(series) for trial_id in one.trial_ids}
    pairs = [
        (trial, rate, value)
        for trial in completed
        if quality is not None
        and (rate := throughput_estimate(trial)) is not None
        and (value := metric_estimate(trial, quality.name)) is not None
    ]
    sign = 1 if quality is None or quality.direction == "max" else -1
    front = pareto_front([r.value for _, r, _ in pairs], [sign * v.value for _, _, v in pairs])
    points = [
        ParetoPoint(
            trial.trial_id,
            _name(trial, names, named=len(series) == 1),
            trial.batch_size,
            number[trial.trial_id],
            rate,
            value,
            place in front,
        )
        for place, (trial, rate, value) in enumerate(pairs)
    ]
    return ParetoInfo(
        name=study.name,
        points=tuple(sorted(points, key=lambda p: (p.throughput.value, sign * -p.quality.value))),
        series=tuple(one.label for one in series),
        quality=quality,
        bars=bars_text(study),
        nothing="" if points else _nothing(study, completed),
        incomplete=incomplete_text(study) if completed else "",
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: ParetoInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    if not info.points or info.quality is None:
        return f"An empty chart of quality against throughput. {info.nothing}."
    words = metric_words(info.quality.name)
    front = listed(
        f"batch size {p.name} with {readable(p.throughput.value)} samples/s and "
        f"{readable(p.quality.value, 4)}"
        for p in info.front
    )
    sentences = [
        f"A chart of {words} against throughput, one mark for each of "
        f"{counted(len(info.points), 'trial')}.",
        f"No other trial is both faster and better than {front}.",
    ]
    return " ".join([*sentences, *([info.incomplete] if info.incomplete else [])])


def _name(trial: TrialRecord, names: TrialNames, *, named: bool) -> str:
    """Names a trial by its size alone where the legend tells the rest."""
    return names.name(trial) if named else f"{trial.batch_size:,}"


def _nothing(study: Study, completed: list[TrialRecord]) -> str:
    if not completed:
        return none_completed(study)
    return "n/a (no trial has both a throughput and a metric of quality)"
