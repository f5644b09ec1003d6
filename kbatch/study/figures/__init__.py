"""The figures of a study."""

import contextlib
from collections.abc import Callable
from typing import Any

from kbatch.page.document import Figure
from kbatch.study.comparison import Comparison
from kbatch.study.study import Study, refuse_empty

# More curves cannot be distinguished, and make a large file.
_MOST_CURVES = 24


def figures_of(result: Study | Comparison) -> tuple[Figure, ...]:
    """Return the figures for which the studies have data. The figure of the trials is first."""
    # Figures are imported late, because a search draws only the figure of the trials.
    from kbatch.study.figures import efficiency, quality, timelines, trials

    studies: tuple[Study, ...] = (result,) if isinstance(result, Study) else result.studies
    for study in studies:
        refuse_empty(study)
    figures: list[Figure] = []

    def offer(plot: Callable[..., Any], title: str, height_in: float, **options: Any) -> None:
        shown = studies if isinstance(result, Comparison) else result
        figures.append(Figure.of(plot, shown, title, height_in, **options))

    offer(trials.plot_trials, "Throughput and quality by batch size", trials.HEIGHT_IN)
    # The data of a figure raise a `ValueError` if nothing was measured.
    with contextlib.suppress(ValueError):
        lines = [line for study in studies for line in quality.rate_lines(study)[1].values()]
        if any(len({rate for rate, *_ in line}) > 1 for line in lines):
            offer(quality.plot_learning_rates, "Quality by learning rate", quality.RATES_IN)
    with contextlib.suppress(ValueError):
        if len(quality.pareto_points(*studies)[1]) > 1:
            offer(quality.plot_pareto, "Quality against throughput", quality.PARETO_IN)
    with contextlib.suppress(ValueError):
        curves = [curve for _, curve in quality.learning_curves(*studies)[1]]
        if 0 < sum(len(curve) > 1 for curve in curves) <= _MOST_CURVES:
            for against, words in (("updates", "updates"), ("seconds", "training time")):
                place, title = quality.BUDGETS.index(against), f"Learning curves over {words}"
                if any(spent[place] for curve in curves for spent, _ in curve):
                    offer(quality.plot_learning_curves, title, quality.CURVES_IN, against=against)
    with contextlib.suppress(ValueError):
        for study in studies:
            efficiency.target_points(study, efficiency.target_of(study, None))
        title = "Time and updates to the target"
        offer(efficiency.plot_time_to_target, title, efficiency.TARGET_IN)
    if isinstance(result, Comparison):
        return tuple(figures)
    with contextlib.suppress(ValueError):
        if len({trial.batch_size for trial in efficiency.measured_trials(result)}) <= _MOST_CURVES:
            alone = efficiency.goodput_of(result) is None
            height_in = efficiency.NOISE_SCALE_IN if alone else efficiency.GOODPUT_IN
            title = "Gradient noise scale" if alone else "Gradient noise scale and goodput"
            offer(efficiency.plot_noise_scale, title, height_in)
    with contextlib.suppress(ValueError):
        timelines.watched_usage(result)
        title = "GPUs during the trial of the answer"
        offer(timelines.plot_gpu_timeline, title, timelines.GPUS_IN)
    with contextlib.suppress(ValueError):
        timelines.search_bars(study)
        offer(timelines.plot_search, "The search over time", timelines.SEARCH_IN)
    return tuple(figures)
