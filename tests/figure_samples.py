"""A sample of every public figure, and checks of the texts in a figure."""

import functools
import itertools
from pathlib import Path

import figure_studies as made
import inference_factory
import input_profile_factory
from matplotlib.text import Annotation, Text
from recommendation_factory import make_recommendation
from training_profile_factory import training_profile

import kbatch
from kbatch.plotting.canvas import draw_so_wide


def input_profile():
    make = input_profile_factory.make_change
    return input_profile_factory.make_profile(changes=(make(), make("cache_in_memory", 2.4)))


SAMPLES = {
    "gpu_timeline": made.gpu_study,
    "inference_memory": inference_factory.make_profile,
    "inference_operating_curve": inference_factory.make_profile,
    "inference_throughput": inference_factory.make_profile,
    "input_pipeline": input_profile,
    "learning_curves": lambda: made.learned_study(3),
    "learning_rates": made.rates_study,
    "limits": make_recommendation,
    "memory": made.max_batch_result,
    "noise_scale": lambda: made.learned_study(3),
    "pareto": lambda: made.learned_study(3),
    "search": lambda: made.timed(made.learned_study(3), workers=2),
    "time_to_target": lambda: made.target_study(3),
    "training_profile": training_profile,
    "trials": lambda: made.learned_study(3),
}
# Figures of several studies with long names. One of them met no target.
OF_SEVERAL = {
    "learning_curves": lambda n: made.learned_study(3, best=0.98 - 0.02 * n),
    "learning_rates": lambda _: made.rates_study(),
    "pareto": lambda n: made.learned_study(3, best=0.98 - 0.02 * n),
    "time_to_target": lambda n: made.target_study(3, missed=(2048,) if n else (8, 2048)),
    "trials": lambda n: made.learned_study(3, best=0.98 - 0.02 * n),
}


def several(name, count):
    names = ("Adam", "SGD", "RMSprop, clipped", "Adafactor with a long name", "Lion")[:count]
    return {each: OF_SEVERAL[name](number) for number, each in enumerate(names)}


SAMPLES |= {f"{name} of many studies": lambda n=name: several(n, 5) for name in OF_SEVERAL}
# Studies that differ in several hyperparameters have more and longer texts.
TUNED = ("learning_curves", "learning_rates", "noise_scale", "pareto", "trials")
SAMPLES |= {f"{name} of many": lambda: made.tuned_study(14) for name in TUNED}
DATA = Path(__file__).parent.parent / "docs" / "data"
# Its small sizes take about the same time.
SAMPLES["inference_operating_curve of many"] = lambda: kbatch.InferenceProfile.load(
    DATA / "inference.json"
)


# The data of a figure are made once.
SAMPLES = {name: functools.cache(make) for name, make in SAMPLES.items()}


def draw(name, width_in):
    """Draw a sample with this width in inches, and as high as it needs."""
    plot = getattr(kbatch, f"plot_{name.split()[0]}")
    return draw_so_wide(functools.partial(plot, SAMPLES[name]()), width_in)


def words(axes):
    """All texts of a figure and of the labels of its Axes, in one line."""
    figure = axes.get_figure(root=True)
    figure.draw_without_rendering()
    texts = [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text"))]
    texts += [str(panel.get_label()) for panel in figure.axes]
    return " ".join(" ".join(texts).replace("\N{NO-BREAK SPACE}", " ").split())


def panels(axes):
    """The panels of a figure whose axes are shown."""
    return [each for each in axes.figure.axes if each.axison]


def two_panels(upper):
    """The upper panel of a figure, and the lower one with the label of both x axes."""
    (lower,) = (each for each in upper.figure.axes if each.get_xlabel())
    return upper, lower


def shown_texts(figure):
    """The boxes of titles, legends, annotations and labels of drawn axes."""
    figure.draw_without_rendering()
    found = [*figure.texts]
    for axes in figure.axes:
        # Titles are children of the Axes that are in no list of texts.
        found += [child for child in axes.get_children() if isinstance(child, Text)]
        legend = axes.get_legend()
        found += legend.get_texts() if legend else []
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = (t for t in axis.get_major_ticks() if low <= t.get_loc() <= high)
            found += [axis.label, *(tick.label1 for tick in ticks)]
    boxes = {}
    for text in found:
        if text.get_visible() and text.get_text().strip():
            # The box of an annotation includes its arrow.
            own = Text.get_window_extent if isinstance(text, Annotation) else None
            boxes[text] = own(text) if own else text.get_window_extent()
    return boxes


def text_overlaps(boxes, slack_px=1.5):
    """Pairs of shown texts that overlap by more than the slack."""
    boxes = {text: box.padded(-slack_px) for text, box in boxes.items()}
    return [
        (first.get_text(), second.get_text())
        for first, second in itertools.combinations(boxes, 2)
        if boxes[first].overlaps(boxes[second])
    ]


def cut_texts(figure, boxes=None):
    """Shown texts that extend beyond the figure by more than a pixel, or that cover a mark."""
    boxes, whole = boxes or shown_texts(figure), figure.bbox.padded(1.0)
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() != "None"]
    marks = [mark for line in lines for mark in line.get_transform().transform(line.get_xydata())]
    return [
        text.get_text()
        for text, box in boxes.items()
        if not (whole.contains(*box.min) and whole.contains(*box.max))
        or any(box.padded(4.0).contains(*mark) for mark in marks)
    ]
