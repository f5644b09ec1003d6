"""The figures of a study by name, each loaded when it is drawn."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbatch.page.result import Figure
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


def study_figures(study: "Study") -> "tuple[Figure, ...]":
    """Offer the figures for which a study has the data, that of the decision first."""
    # What draws is loaded where something is drawn.
    from kbatch.page.result import Figure
    from kbatch.study.figures import (
        gpu_timeline,
        learning_curves,
        noise_scale,
        pareto,
        time_to_target,
        trials,
    )

    first = "Throughput and quality by batch size"
    found = [
        Figure("trials", first, trials.HEIGHT_IN, functools.partial(trials.plot_trials, study))
    ]

    def offer(name: str, title: str, height_in: float, plot: Callable[..., Any], **options: Any):
        draw = functools.partial(plot, study, **options)
        found.append(Figure(name, title, height_in, draw, "small"))

    # A page leaves out what was not measured.
    with contextlib.suppress(ValueError):
        if len(pareto.pareto_points(study)[1]) > 1:
            offer("pareto", "Quality against throughput", pareto.HEIGHT_IN, pareto.plot_pareto)
    with contextlib.suppress(ValueError):
        _, curves = learning_curves.learning_curves(study)
        if 0 < sum(len(curve) > 1 for _, curve in curves) <= MOST_CURVES:
            for against, words in (("updates", "updates"), ("seconds", "training time")):
                plot, height_in = learning_curves.plot_learning_curves, learning_curves.HEIGHT_IN
                name, title = f"learning-curves-{against}", f"Learning curves over {words}"
                offer(name, title, height_in, plot, against=against)
    with contextlib.suppress(ValueError):
        time_to_target.target_points(study, time_to_target.target_of(study, None))
        plot, height_in = time_to_target.plot_time_to_target, time_to_target.HEIGHT_IN
        offer("time-to-target", "Time and updates to the target", height_in, plot)
    with contextlib.suppress(ValueError):
        sizes = {trial.batch_size for trial in noise_scale.measured_trials(study)}
        if len(sizes) <= MOST_CURVES:
            both = noise_scale.goodput_of(study)
            height_in = noise_scale.HEIGHT_IN if both else noise_scale.ALONE_IN
            title = "Gradient noise scale and goodput"
            offer("noise-scale", title, height_in, noise_scale.plot_noise_scale)
    with contextlib.suppress(ValueError):
        gpu_timeline.watched_usage(study)
        plot, height_in = gpu_timeline.plot_gpu_timeline, gpu_timeline.HEIGHT_IN
        offer("gpu-timeline", "GPUs during the named trial", height_in, plot)
    return tuple(found)
