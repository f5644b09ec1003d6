"""The figure of the gradient noise scale over training, with its interval."""

from typing import Any, NamedTuple

from matplotlib.axes import Axes

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import join_words, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.palette import GRID, series_style, size_color
from kbatch.study.figures import common
from kbatch.study.names import noise_scale_text
from kbatch.study.study import Study, refuse_empty

HEIGHT_IN = 4.0
# What is drawn beside the curves, as shares of their width.
_MARGIN, _LATE = 0.05, 0.18
# From the middle of the last number to the middle of the words beside it.
_LATE_CHARACTERS = 8


class NoiseCurve(NamedTuple):
    """The noise scale of one trial, in examples."""

    batch_size: int
    # For each execution its epochs, from 1, and their noise scales; without those lost in noise.
    runs: tuple[tuple[tuple[int, float], ...], ...]
    late: NoiseScale  # That of the late half.


class NoiseScaleInfo(NamedTuple):
    curves: tuple[NoiseCurve, ...]  # By batch size.
    epochs: int
    notes: tuple[str, ...]
    incomplete: str  # Empty where all trials have a result.


def noise_scale_info(study: Study) -> NoiseScaleInfo:
    """Compute the noise scale over training of the best measured trial of each batch size."""
    refuse_empty(study)
    measured = Study(study.name, tuple(t for t in study.trials if t.noise_scale is not None))
    curves = []
    for size, trial in common.best_of_size(measured).items():
        # Its axis is logarithmic, which has no place for 0.
        runs = tuple(
            tuple((point.epoch + 1, point.value) for point in run.noise_scale_curve if point.value)
            for run in trial.executions
        )
        if (late := trial.noise_scale) is not None:
            curves.append(NoiseCurve(size, runs, late))
    if not curves:
        raise ValueError(
            "No noise scale was measured: train longer, or give `micro_batch_size=n`, n a part of "
            "the batch sizes, to `kbatch.BatchSizeHyperModel`. "
            f"Received: {pluralize(len(study.trials), 'trial')} without gradient moments."
        )
    return NoiseScaleInfo(
        curves=tuple(curves),
        epochs=max((e for curve in curves for run in curve.runs for e, _ in run), default=1),
        notes=(
            "Lines: by epoch, without epochs whose gradient is lost in noise. Right: the late half "
            "of training, with its 95 % interval; an arrow stands for a lower bound, where there "
            "is no more.",
            common.best_of_size_note(measured),
        ),
        incomplete=common.incomplete_text(study),
    )


def alt_text(info: NoiseScaleInfo) -> str:
    scales = join_words(
        f"{noise_scale_text(curve.late)} at batch size {curve.batch_size:,}"
        for curve in info.curves
    )
    return (
        f"A chart of the gradient noise scale over {pluralize(info.epochs, 'epoch')}, on a "
        f"logarithmic axis. In the late half of training it is {scales}. {info.incomplete}"
    ).strip()


def plot_noise_scale(study: Study, ax: Axes | None = None) -> Axes:
    """Plot the gradient noise scale by epoch, and of the late half with its interval.

    Below the noise scale, twice the batch size nearly halves the updates that training needs;
    above it, it hardly saves any (McCandlish et al. 2018, arXiv:1812.06162).

    Args:
        study: A study, from `load_study`.
        ax: Axes to draw on; a new figure if None.

    Raises:
        ValueError: If the study is empty or no noise scale was measured, with what to do.
    """
    info = noise_scale_info(study)
    (panel,) = canvas.panels(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    panel.set_yscale("log")
    sizes, width = [curve.batch_size for curve in info.curves], max(1, info.epochs - 1)
    # More would be a thicket: then the late half alone has marks.
    marked = info.epochs <= 25 and sum(len(curve.runs) for curve in info.curves) <= 6
    look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
    if marked:
        look = {"linewidth": 1.1, "markersize": 3.5}
    for number, curve in enumerate(info.curves):
        color, marker = size_color(curve.batch_size, sizes), series_style(number).marker
        for run in filter(None, curve.runs):
            epochs, values = zip(*run, strict=True)
            panel.plot(epochs, values, color=color, marker=marker if marked else None, **look)
        share = (number + 0.5) / len(sizes)
        place = info.epochs + (1.5 * _MARGIN + _LATE * share) * width
        late, bounds = curve.late, draw.ends(curve.late.interval)
        if late.value is not None:
            bounds = bounds and (max(bounds[0], late.value / 100), bounds[1])
            draw.bars(panel, [place], [bounds], color)
            draw.points(panel, [place], [late.value], color, marker, size=6.5, zorder=3)
        elif late.at_least:
            draw.arrow(panel, (place, late.at_least), 22, color)
            panel.plot([place], [late.at_least], marker="_", color=color, markersize=7)
    common.name_sizes(panel, sizes, most=14)
    begin, end = info.epochs + _MARGIN * width, info.epochs + (2 * _MARGIN + _LATE) * width
    panel.axvspan(begin, end, color=GRID, alpha=0.35, linewidth=0, zorder=0.2)
    panel.set_xlim(1 - _MARGIN * width, end)
    # Epochs are numbered as far as there is room before the words for the late half.
    middle = info.epochs + (1.5 * _MARGIN + _LATE / 2) * width
    steps = max(1, round(info.epochs / (10 * canvas.width_share(panel))))
    room = canvas.label_room(panel) / (middle - 1)
    kept = [
        epoch
        for epoch in range(steps, info.epochs + 1, steps)
        if epoch > 1 + steps / 2 and (middle - epoch) * room > _LATE_CHARACTERS
    ]
    panel.set_xticks([1, *kept, middle], ["1", *map(str, kept), "late half"])
    panel.set_xlabel("Epoch")
    panel.set_ylabel("Gradient noise scale\n(examples)")
    plain_log_labels(panel.yaxis)
    title = f"{study.name}: noise scale by batch size"
    canvas.write_title(panel, title, columns=7, fewest=1)
    common.write_conditions(panel, study, *info.notes, alarm=info.incomplete)
    return panel
