"""The figures of a study by name, each loaded when it is drawn."""

import contextlib
import functools
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

    def offer(name: str, title: str, module: Any, **options: Any) -> Figure:
        plot = getattr(module, f"plot_{name.split('/')[0].replace('-', '_')}")
        draw, height_in = functools.partial(plot, study, **options), module.HEIGHT_IN
        return Figure(name.replace("/", "-"), title, height_in, draw)

    found = [offer("trials", "Throughput and quality by batch size", trials)]
    # A page leaves out what was not measured.
    with contextlib.suppress(ValueError):
        if len(pareto.pareto_points(study)[1]) > 1:
            found.append(offer("pareto", "Quality against throughput", pareto))
    with contextlib.suppress(ValueError):
        _, curves = learning_curves.learning_curves(study)
        if 0 < sum(len(curve) > 1 for _, curve in curves) <= MOST_CURVES:
            for against, words in (("updates", "updates"), ("seconds", "training time")):
                name, title = f"learning-curves/{against}", f"Learning curves over {words}"
                found.append(offer(name, title, learning_curves, against=against))
    with contextlib.suppress(ValueError):
        time_to_target.target_points(study, time_to_target.target_of(study, None))
        title = "Time and updates to the target"
        found.append(offer("time-to-target", title, time_to_target))
    with contextlib.suppress(ValueError):
        if len({trial.batch_size for trial in noise_scale.measured_trials(study)}) <= MOST_CURVES:
            one = offer("noise-scale", "Gradient noise scale and goodput", noise_scale)
            alone = noise_scale.goodput_of(study) is None
            found.append(one._replace(height_in=noise_scale.ALONE_IN) if alone else one)
    with contextlib.suppress(ValueError):
        gpu_timeline.watched_usage(study)
        found.append(offer("gpu-timeline", "GPUs during the named trial", gpu_timeline))
    return tuple(found)
