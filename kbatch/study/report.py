"""What a report says of a study."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from kbatch.document.numbers import count_range, pluralize
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.study.answer import answer
from kbatch.study.caveats import caveats
from kbatch.study.conditions import caption
from kbatch.study.figures import (
    goodput,
    gpu_timeline,
    learning_curves,
    noise_scale,
    pareto,
    ranking,
    time_to_target,
    trials,
)
from kbatch.study.figures.goodput import goodput_info
from kbatch.study.figures.gpu_timeline import gpu_timeline_info
from kbatch.study.figures.learning_curves import learning_curves_info
from kbatch.study.figures.noise_scale import noise_scale_info
from kbatch.study.figures.pareto import pareto_info
from kbatch.study.figures.time_to_target import time_to_target_info
from kbatch.study.learning_rates import learning_rate_table
from kbatch.study.study import Study, refuse_empty
from kbatch.study.table import lettered, marked_table, trial_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def study_section(study: Study) -> Section:
    """Compute what a report says of a study."""
    refuse_empty(study)
    environment = study.search.environment if study.search else None
    words, table = answer(study), trial_table(study)
    notes = lettered(caveats(study), table)
    # Batch sizes that were trained for several epochs.
    curves = sum(len(curve.points) > 1 for curve in learning_curves_info(study).curves)
    return Section(
        kind="study",
        name=study.name,
        headline=words.headline,
        lead=tuple(filter(None, (words.certainty, words.baseline, words.speed, words.limit))),
        details=(words.compared,),
        conditions=caption(study.conditions),
        figures=_figures(study, notes, curves),
        tables=tuple(filter(None, (marked_table(table, notes), learning_rate_table(study)))),
        notes=(*notes, *_left_out(curves)),
        command=environment.command if environment else None,
        settings=_settings(study),
        environment=environment_facts(environment),
    )


def _settings(study: Study) -> tuple[Fact, ...]:
    settings = study.search.settings if study.search else {}
    executions = [e for trial in study.trials for e in trial.executions]
    examples = study.conditions.examples
    seen = count_range(examples or (0,), "example")
    seeds = dict.fromkeys("none" if e.seed is None else str(e.seed) for e in executions)

    def different(values: Iterable[object]) -> str:
        known = dict.fromkeys(str(value) for value in values if value is not None)
        return ", ".join(known) or "n/a (no model was built)"

    return (
        *(Fact(name, json.dumps(value, ensure_ascii=False)) for name, value in settings.items()),
        Fact("training data", f"{seen} an epoch" if examples else "n/a (no trial completed)"),
        Fact("optimizer", different(e.optimizer for e in executions)),
        Fact("jit_compile", different(e.jit_compile for e in executions)),
        Fact("seeds of the executions", ", ".join(seeds)),
    )


# More curves than these nobody can tell apart, and they make a page heavy.
MOST_CURVES = 24


class _Offer(NamedTuple):
    """A figure that a study may have."""

    name: str  # For the name of its file.
    title: str
    plot: "Callable[..., Axes]"
    height_in: Callable[[int], float]  # For a number of trials.
    columns: tuple[str, ...]  # Columns of the table whose numbers it shows.
    # Whether a study with so many curves has the data; a `ValueError` says that it has not.
    shown: Callable[[Study, int], object]
    shape: Literal["alone", "small", "wide"] = "small"


# That of the decision first.
_OFFERS = (
    _Offer(
        "trials",
        "Throughput and quality by batch size",
        trials.plot_trials,
        lambda rows: trials.HEIGHT_IN,
        ("batch_size", "samples_per_second", "quality"),
        lambda study, curves: True,
        "alone",
    ),
    _Offer(
        "pareto",
        "Quality against throughput",
        pareto.plot_pareto,
        lambda rows: pareto.HEIGHT_IN,
        ("samples_per_second", "quality"),
        lambda study, curves: len(pareto_info(study).points) > 1,
    ),
    _Offer(
        "learning-curves-updates",
        "Learning curves over updates",
        functools.partial(learning_curves.plot_learning_curves, against="updates"),
        lambda rows: learning_curves.HEIGHT_IN,
        ("quality", "updates"),
        lambda study, curves: 0 < curves <= MOST_CURVES,
    ),
    _Offer(
        "learning-curves-seconds",
        "Learning curves over training time",
        functools.partial(learning_curves.plot_learning_curves, against="seconds"),
        lambda rows: learning_curves.HEIGHT_IN,
        ("quality", "samples_per_second"),
        lambda study, curves: 0 < curves <= MOST_CURVES,
    ),
    _Offer(
        "time-to-target",
        "Time and updates to the target",
        time_to_target.plot_time_to_target,
        lambda rows: time_to_target.HEIGHT_IN,
        ("updates", "samples_per_second"),
        lambda study, curves: time_to_target_info(study).points,
    ),
    _Offer(
        "goodput",
        "Goodput: throughput times statistical efficiency",
        goodput.plot_goodput,
        lambda rows: goodput.HEIGHT_IN,
        ("samples_per_second", "noise_scale"),
        lambda study, curves: goodput_info(study),
    ),
    _Offer(
        "noise-scale",
        "Gradient noise scale over training",
        noise_scale.plot_noise_scale,
        lambda rows: noise_scale.HEIGHT_IN,
        ("noise_scale",),
        lambda study, curves: len(noise_scale_info(study).curves) <= MOST_CURVES,
    ),
    _Offer(
        "gpu-timeline",
        "GPUs during the named trial",
        gpu_timeline.plot_gpu_timeline,
        lambda rows: gpu_timeline.HEIGHT_IN,
        ("gpu",),
        lambda study, curves: gpu_timeline_info(study),
    ),
    _Offer(
        "ranking",
        "Trials by their objective",
        ranking.plot_ranking,
        lambda rows: ranking.height_in(min(rows, ranking.MOST_ROWS)),
        ("quality",),
        lambda study, curves: sum(trial.status == "completed" for trial in study.trials) > 1,
        "wide",
    ),
)


def _figures(study: Study, notes: Sequence[Note], curves: int) -> tuple[Figure, ...]:
    """Offer the figures for which a study has the data."""

    def shown(offer: _Offer) -> bool:
        try:
            return bool(offer.shown(study, curves))
        except ValueError:  # It says what to measure for the figure, which the report leaves out.
            return False

    return tuple(
        Figure(
            name=offer.name,
            title=offer.title,
            height_in=offer.height_in(len(study.trials)),
            draw=functools.partial(offer.plot, study),
            notes=tuple(n for n in notes if n.mark and set(n.columns) & set(offer.columns)),
            shape=offer.shape,
        )
        for offer in _OFFERS
        if shown(offer)
    )


def _left_out(curves: int) -> tuple[Note, ...]:
    """Describe which figures are left out although the study has the data."""
    if curves <= MOST_CURVES:
        return ()
    return (
        Note(
            "",
            "left out",
            f"Learning curves and noise scales of {pluralize(curves, 'batch size')} are left out, "
            "too many to be told apart here: `kbatch plot DIR --figure learning-curves` and "
            "`--figure noise-scale` draw them.",
        ),
    )
