"""The figures of a study by name, each loaded when it is drawn."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbatch.page.result import Figure
    from kbatch.study.study import Study

# By name, as behind `plot_`, the module that draws it.
STUDY_FIGURES = {
    "trials": "trials",
    "pareto": "quality",
    "learning-curves": "quality",
    "time-to-target": "time_to_target",
    "noise-scale": "noise_scale",
    "gpu-timeline": "gpu_timeline",
}
# That of the file that `find_max_batch_size` or `kbatch max-batch --output` left is the last.
FIGURES = (*STUDY_FIGURES, "memory")
# More curves cannot be distinguished, and make a page heavy.
MOST_CURVES = 24


def study_plot(name: str) -> Callable[..., Any]:
    """Return the function that plots a figure of a study."""
    module = importlib.import_module(f"{__name__}.{STUDY_FIGURES[name]}")
    return getattr(module, f"plot_{name.replace('-', '_')}")


def study_figures(study: "Study") -> "tuple[Figure, ...]":
    """Offer the figures for which a study has the data, that of the decision first."""
    # What draws is loaded where something is drawn.
    from kbatch.page.result import Figure
    from kbatch.study.figures import gpu_timeline, noise_scale, quality, time_to_target, trials

    found: list[Figure] = []

    def offer(name: str, title: str, height_in: float, **options: Any) -> None:
        draw = functools.partial(study_plot(name), study, **options)
        found.append(Figure("-".join((name, *options.values())), title, height_in, draw))

    offer("trials", "Throughput and quality by batch size", trials.HEIGHT_IN)
    # A page leaves out what was not measured.
    with contextlib.suppress(ValueError):
        if len(quality.pareto_points(study)[1]) > 1:
            offer("pareto", "Quality against throughput", quality.PARETO_IN)
    with contextlib.suppress(ValueError):
        _, curves = quality.learning_curves(study)
        if 0 < sum(len(curve) > 1 for _, curve in curves) <= MOST_CURVES:
            for against, words in (("updates", "updates"), ("seconds", "training time")):
                title = f"Learning curves over {words}"
                offer("learning-curves", title, quality.CURVES_IN, against=against)
    with contextlib.suppress(ValueError):
        time_to_target.target_points(study, time_to_target.target_of(study, None))
        offer("time-to-target", "Time and updates to the target", time_to_target.HEIGHT_IN)
    with contextlib.suppress(ValueError):
        if len({trial.batch_size for trial in noise_scale.measured_trials(study)}) <= MOST_CURVES:
            alone = noise_scale.goodput_of(study) is None
            height_in = noise_scale.ALONE_IN if alone else noise_scale.HEIGHT_IN
            offer("noise-scale", "Gradient noise scale and goodput", height_in)
    with contextlib.suppress(ValueError):
        gpu_timeline.watched_usage(study)
        offer("gpu-timeline", "GPUs during the named trial", gpu_timeline.HEIGHT_IN)
    return tuple(found)
