"""The figure of the gradient noise scale over training, with its interval."""

from typing import TYPE_CHECKING, NamedTuple

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import counted, listed
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.canvas import label_room, plain_axes, width_share, write_caption
from kbatch.plotting.palette import GRID, PAPER, series_style, size_color
from kbatch.plotting.series import name_panel
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import best_of_size, best_of_size_note, incomplete_text
from kbatch.study.notes import noise_scale_text
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class NoiseCurve(NamedTuple):
    """The noise scale of one trial.

    Attributes:
        batch_size: Examples of one optimizer update.
        trial_id: keras-tuner's identifier.
        runs: For each execution its epochs, from 1, and the noise scale of each, in examples;
            epochs where it is lost in noise are left out.
        late: The noise scale of the late half, in examples.
    """

    batch_size: int
    trial_id: str
    runs: tuple[tuple[tuple[int, float], ...], ...]
    late: NoiseScale


class NoiseScaleInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        curves: One a batch size, ascending.
        epochs: Most epochs of a trial.
        notes: What is shown and how far it may be trusted.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    curves: tuple[NoiseCurve, ...]
    epochs: int
    notes: tuple[str, ...]
    incomplete: str
    conditions: str


def noise_scale_info(study: Study) -> NoiseScaleInfo:
    """Compute the noise scale over training of the best measured trial of each batch size."""
    refuse_empty(study)
    measured = Study(study.name, tuple(t for t in study.trials if t.noise_scale is not None))
    curves = tuple(
        NoiseCurve(size, trial.trial_id, _runs(trial), scale)
        for size, trial in best_of_size(measured).items()
        if (scale := trial.noise_scale) is not None
    )
    if not curves:
        raise ValueError(
            "No noise scale was measured: it is where gradients are accumulated. Search with "
            "`kbatch.BatchSizeHyperModel(..., micro_batch_size=n)`, n a part of the batch sizes. "
            f"Received: {counted(len(study.trials), 'trial')} without gradient moments."
        )
    return NoiseScaleInfo(
        name=study.name,
        curves=curves,
        epochs=max(
            epoch for curve in curves for run in curve.runs for epoch, _ in run or ((1, 0),)
        ),
        notes=(
            "Lines: by epoch, without epochs whose gradient is lost in noise. Right: the late half "
            "of training, with its 95 % interval; an arrow stands for a lower bound, where there "
            "is no more.",
            *best_of_size_note(measured),
        ),
        incomplete=incomplete_text(study),
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: NoiseScaleInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    scales = listed(
        f"{noise_scale_text(curve.late)} at batch size {curve.batch_size:,}"
        for curve in info.curves
    )
    sentences = (
        f"A chart of the gradient noise scale over {counted(info.epochs, 'epoch')}, on a "
        f"logarithmic axis. In the late half of training it is {scales}. {info.incomplete}"
    )
    return sentences.strip()


def _runs(trial: TrialRecord) -> tuple[tuple[tuple[int, float], ...], ...]:
    curves = [execution.noise_scale_curve for execution in trial.executions]
    # Its axis is logarithmic, which has no place for 0.
    return tuple(
        tuple((point.epoch + 1, point.value) for point in curve if point.value) for curve in curves
    )


HEIGHT_IN = 4.0
_NAMES_IN_ROW = 7
_MOST_NAMES = 14
# More would be a thicket: then the late half alone has marks.
_MOST_MARKED = 25
_MOST_LINES = 6
# Of the width of the curves, what stands beside them.
_MARGIN = 0.05
_LATE = 0.18
_MOST_EPOCHS = 10
# From the middle of the last number to that of the words beside it.
_LATE_CHARACTERS = 8


def plot_noise_scale(study: "Study", ax: "Axes | None" = None) -> "Axes":
    """Plot the gradient noise scale by epoch, and that of the late half with its interval.

    Below the noise scale, twice the batch size nearly halves the updates that training needs;
    above it, it hardly saves any (McCandlish et al. 2018, arXiv:1812.06162).

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_noise_scale(study).figure.savefig("noise_scale.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty or no noise scale was measured, with what to run.
    """
    info = noise_scale_info(study)
    panel = plain_axes(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    panel.set_yscale("log")
    for number, curve in enumerate(info.curves):
        _draw_curve(panel, info, number, curve)
    width = max(1, info.epochs - 1)
    panel.axvspan(
        info.epochs + _MARGIN * width,
        info.epochs + (2 * _MARGIN + _LATE) * width,
        color=GRID,
        alpha=0.35,
        linewidth=0,
        zorder=0.2,
    )
    panel.set_xlim(1 - _MARGIN * width, info.epochs + (2 * _MARGIN + _LATE) * width)
    steps = max(1, round(info.epochs / (_MOST_EPOCHS * width_share(panel))))
    epochs = sorted({1, *range(steps, info.epochs + 1, steps)})
    middle = info.epochs + (1.5 * _MARGIN + _LATE / 2) * width
    room = label_room(panel) / (middle - 1)
    kept = [
        epoch
        for epoch in epochs
        if epoch == 1 or (epoch > 1 + steps / 2 and (middle - epoch) * room > _LATE_CHARACTERS)
    ]
    panel.set_xticks([*kept, middle], [*map(str, kept), "late half"])
    panel.set_xlabel("Epoch")
    panel.set_ylabel("Gradient noise scale\n(examples)")
    plain_log_labels(panel.yaxis)
    columns = min(_NAMES_IN_ROW, len(info.curves))
    name_panel(panel, f"{info.name}: noise scale by batch size", columns=columns)
    write_caption(panel, *info.notes, info.conditions, alarm=info.incomplete)
    return panel


def _draw_curve(panel: "Axes", info: NoiseScaleInfo, number: int, curve: NoiseCurve) -> None:
    color, marker = size_color(curve.batch_size, info.curves), series_style(number).marker
    marked = info.epochs <= _MOST_MARKED and sum(len(c.runs) for c in info.curves) <= _MOST_LINES
    for run in curve.runs:
        panel.plot(
            [epoch for epoch, _ in run],
            [value for _, value in run],
            color=color,
            linewidth=1.1 if marked else 0.8,
            alpha=1.0 if marked else 0.6,
            marker=marker if marked else None,
            markersize=3.5,
        )
    width = max(1, info.epochs - 1)
    share = (number + 0.5) / len(info.curves)
    place = info.epochs + (1.5 * _MARGIN + _LATE * share) * width
    _draw_late(panel, place, curve, color, marker)
    if number % -(-len(info.curves) // _MOST_NAMES) == 0:
        panel.plot([], [], color=color, marker=marker, markersize=6, label=f"{curve.batch_size:,}")


def _draw_late(
    panel: "Axes", place: float, curve: NoiseCurve, color: tuple[float, float, float], marker: str
) -> None:
    late = curve.late
    if late.value is None:
        if late.at_least:
            panel.annotate(
                "",
                (place, late.at_least),
                xytext=(0, 22),
                textcoords="offset points",
                arrowprops={"arrowstyle": "<|-", "color": color, "linewidth": 1.2, "shrinkB": 0},
            )
            panel.plot([place], [late.at_least], marker="_", color=color, markersize=7)
        return
    if late.interval is not None:
        low = max(late.interval.low, late.value / 100)
        panel.vlines(place, low, late.interval.high, color=color, linewidth=1.8, alpha=0.6)
    panel.plot(
        [place],
        [late.value],
        marker=marker,
        color=color,
        markersize=6.5,
        markeredgecolor=PAPER,
        linestyle="none",
        zorder=3,
    )
