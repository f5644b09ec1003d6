"""The figures of a study by name, each loaded when it is drawn."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kbatch.page.content import Figure

if TYPE_CHECKING:
    from kbatch.study.study import Study

# Names are those of the modules, and of the functions behind `plot_`.
STUDY_FIGURES = (
    "trials",
    "pareto",
    "learning-curves",
    "time-to-target",
    "noise-scale",
    "gpu-timeline",
)
# That of the file that `find_max_batch_size` or `kbatch max-batch --output` left is the last.
FIGURES = (*STUDY_FIGURES, "memory")
# More curves than these nobody can tell apart, and they make a page heavy.
MOST_CURVES = 24


def study_figures(study: "Study") -> tuple[Figure, ...]:
    """Offer the figures for which a study has the data, that of the decision first."""
    # What draws is loaded where something is drawn.
    from kbatch.study.figures import (
        gpu_timeline,
        learning_curves,
        noise_scale,
        pareto,
        time_to_target,
        trials,
    )

    first = "Throughput and quality by batch size"
    draw = functools.partial(trials.plot_trials, study)
    found = [Figure("trials", first, trials.HEIGHT_IN, draw)]

    def offer(
        name: str,
        title: str,
        height_in: float,
        plot: Callable[..., Any],
        shown: bool = True,
        **options: Any,
    ) -> None:
        if shown:
            draw = functools.partial(plot, study, **options)
            found.append(Figure(name, title, height_in, draw, "small"))

    # A page leaves out what was not measured.
    with contextlib.suppress(ValueError):
        shown = len(pareto.pareto_points(study)[1]) > 1
        title = "Quality against throughput"
        offer("pareto", title, pareto.HEIGHT_IN, pareto.plot_pareto, shown)
    with contextlib.suppress(ValueError):
        _, curves = learning_curves.learning_curves(study)
        shown = 0 < sum(len(curve.points) > 1 for curve in curves) <= MOST_CURVES
        for against, words in (("updates", "updates"), ("seconds", "training time")):
            plot, height_in = learning_curves.plot_learning_curves, learning_curves.HEIGHT_IN
            name, title = f"learning-curves-{against}", f"Learning curves over {words}"
            offer(name, title, height_in, plot, shown, against=against)
    with contextlib.suppress(ValueError):
        time_to_target.time_to_target_info(study)
        plot, height_in = time_to_target.plot_time_to_target, time_to_target.HEIGHT_IN
        offer("time-to-target", "Time and updates to the target", height_in, plot)
    with contextlib.suppress(ValueError):
        shown = len(noise_scale.noise_curves(study)) <= MOST_CURVES
        progress, title = noise_scale.goodput_of(study), "Gradient noise scale and goodput"
        height_in = noise_scale.HEIGHT_IN if progress else noise_scale.ALONE_IN
        offer("noise-scale", title, height_in, noise_scale.plot_noise_scale, shown)
    with contextlib.suppress(ValueError):
        gpu_timeline.gpu_timeline_info(study)
        plot, height_in = gpu_timeline.plot_gpu_timeline, gpu_timeline.HEIGHT_IN
        offer("gpu-timeline", "GPUs during the named trial", height_in, plot)
    return tuple(found)
