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
    from kbatch.study.figures import gpu_timeline, noise_scale, quality, search, trials

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
        from kbatch.study.figures import time_to_target

        for study in studies:
            time_to_target.target_points(study, time_to_target.target_of(study, None))
        title = "Time and updates to the target"
        offer(time_to_target.plot_time_to_target, title, time_to_target.HEIGHT_IN)
    if isinstance(result, Comparison):
        return tuple(figures)
    with contextlib.suppress(ValueError):
        if len({trial.batch_size for trial in noise_scale.measured_trials(result)}) <= _MOST_CURVES:
            alone = noise_scale.goodput_of(result) is None
            height_in = noise_scale.ALONE_IN if alone else noise_scale.HEIGHT_IN
            title = "Gradient noise scale" if alone else "Gradient noise scale and goodput"
            offer(noise_scale.plot_noise_scale, title, height_in)
    with contextlib.suppress(ValueError):
        gpu_timeline.watched_usage(result)
        title = "GPUs during the trial of the answer"
        offer(gpu_timeline.plot_gpu_timeline, title, gpu_timeline.HEIGHT_IN)
    with contextlib.suppress(ValueError):
        search.search_bars(study)
        offer(search.plot_search, "The search over time", search.HEIGHT_IN)
    return tuple(figures)
