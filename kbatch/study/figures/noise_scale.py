"""The figure of the gradient noise scale over training, and of the goodput that follows from it."""

from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from kbatch.analysis.goodput import goodput
from kbatch.analysis.intervals import FEWEST_VALUES, Estimate
from kbatch.page.numbers import format_number, in_brackets, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import GRID, series_style, size_color
from kbatch.plotting.draw import batch_axis, plain_log_labels
from kbatch.study.decision import speed_of
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import TrialRecord

# Heights of both panels, and of the noise scale without goodput.
HEIGHT_IN, ALONE_IN = 5.2, 3.2
# Width of the late halves, as a share of the width of the curves.
_LATE = 0.2


# Throughput and goodput by batch size, both in samples/s; the batch size of the largest goodput;
# and a note. Goodput is in samples of the smallest size.
Goodput = tuple[dict[int, Estimate[float]], dict[int, Estimate[float]], int, str]


def measured_trials(study: Study) -> list[TrialRecord]:
    """Return the trials with a noise scale of the late half, or of at least three epochs."""
    refuse_empty(study)
    measured = []
    for trial in study.trials:
        epochs = [sum(map(bool, e.noise_scale_curve.values())) for e in trial.executions]
        scale = trial.noise_scale
        if scale and (scale.value or scale.low or max(epochs) >= FEWEST_VALUES):
            measured.append(trial)
    if not measured:
        raise ValueError(
            "No noise scale was measured: train for at least three epochs, and set "
            "`micro_batch_size` of `kbatch.BatchSizeHyperModel` below the batch sizes. "
            f"Received: {pluralize(len(study.trials), 'trial')} without a noise scale."
        )
    return measured


def goodput_of(study: Study) -> Goodput | None:
    """Compute the goodput of each batch size with the noise scale of the best trial that has it."""
    resolved = [t for t in study.trials if t.noise_scale and t.noise_scale.value is not None]
    completed = [trial for trial in study.trials if trial.status == "completed"]
    chosen = common.one_of_each_size(study, completed)
    rates = {n: r for n, t in chosen.items() if (r := speed_of(study.decide(), t)[1])}
    if not resolved or len(rates) < 2:
        return None
    trial = min(resolved, key=lambda trial: (trial.status != "completed", trial.rank))
    scale: Any = trial.noise_scale
    curves = [
        {
            size: goodput(size, size / rate.value, noise_scale=end, base_batch_size=min(rates))
            for size, rate in rates.items()
        }
        for end in (scale.value, *(scale.ends or ()))
    ]
    bests = [max(curve, key=lambda size, curve=curve: (curve[size], -size)) for curve in curves]
    values = {}
    for size in rates:
        value, *bounds = (curve[size] for curve in curves)
        values[size] = Estimate(value, min(bounds, default=None), max(bounds, default=None))
    note = (
        f"Goodput: samples/s times progress per sample, relative to batch size {min(rates):,}. "
        f"Noise scale at batch size {trial.batch_size:,}: "
        f"{format_number(scale.value)}{in_brackets(scale)}."
    )
    return rates, values, bests[0], note


def plot_noise_scale(study: Study, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the gradient noise scale by epoch, and the goodput by batch size.

    Below the noise scale, twice the batch size nearly halves the updates that training needs. Above
    it, a larger batch hardly saves updates (McCandlish et al. 2018, arXiv:1812.06162). Goodput is
    throughput times statistical efficiency, (B_noise + M0) / (B_noise + B) with the smallest batch
    size M0 (Qiao et al. 2021, Pollux, OSDI). Its unit is samples of size M0 per second. Goodput
    predicts how fast training advances, not how good the model is in the end. It needs a known
    noise scale and the throughput of two batch sizes.

    Each batch size is shown by its trial that `study.decide()` compares, or by its best one.
    Thick lines are means over training runs, and thin lines are single runs. Epochs in which noise
    hides the gradient have no point. The marks at the right are the noise scales of the late
    half of training, with 95 % intervals. If only a lower bound is known, an arrow starts there.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_noise_scale(study).figure.savefig("noise-scale.png")

    Args:
        study: A `kbatch.Study`, such as from `load_study`.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If the study is empty, or if no noise scale was measured.
    """
    measured, progress = measured_trials(study), goodput_of(study)
    trials = common.one_of_each_size(study, measured)
    # A logarithmic axis cannot show 0.
    runs = {
        size: [
            curve
            for run in trial.executions
            if (curve := [(e + 1, scale) for e, scale in run.noise_scale_curve.items() if scale])
        ]
        for size, trial in trials.items()
    }
    epochs = max((e for curves in runs.values() for run in curves for e, _ in run), default=1)
    height_in, heights = (HEIGHT_IN, (1, 1)) if progress else (ALONE_IN, (1,))
    panel, *below = canvas.panels(ax, height_in, heights, share_x=False)
    panel.set_yscale("log")
    sizes, late_width = list(trials), _LATE * max(1, epochs - 1) / canvas.width_share(panel)
    for number, (size, trial) in enumerate(trials.items()):
        color, marker = size_color(size, sizes), series_style(number)[1]
        values: dict[int, list[float]] = {}
        for run in runs[size]:
            for epoch, scale in run:
                values.setdefault(epoch, []).append(scale)
            if len(runs[size]) > 1:
                panel.plot(*zip(*run, strict=True), color=color, linewidth=0.5, alpha=0.4)
        means = [fmean(values[epoch]) for epoch in sorted(values)]
        panel.plot(sorted(values), means, color=color, linewidth=1.2)
        place = epochs + late_width * (number + 1) / len(sizes)
        late: Any = trial.noise_scale
        if late.value is not None:
            bounds = late.ends and (max(late.low, late.value / 100), late.high)
            draw.bars(panel, [place], [bounds], color)
            draw.points(panel, [place], [late.value], color, marker, size=6.5, zorder=3)
        elif late.low:
            draw.arrow(panel, (place, late.low), 22, color)
            panel.plot([place], [late.low], marker="_", color=color, markersize=7)
    panel.axvline(epochs + late_width / (2 * len(sizes)), color=GRID, linewidth=1)
    steps = max(1, round(epochs / (8 * canvas.width_share(panel))))
    panel.set_xticks([*range(steps, epochs + 1, steps)])
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("Epoch (right of the line: the late half)")
    panel.set_ylabel("Gradient noise scale\n(examples)")
    plain_log_labels(panel.yaxis)
    common.write_title(panel, "Gradient noise scale by batch size", [study], sizes)
    if progress:
        _draw_goodput(below[0], progress)
    notes = (progress[-1], common.bars_text([*trials.values()], None)) if progress else ()
    largest = f"The goodput is largest at batch size {progress[2]:,}." if progress else ""
    texts = {"result": largest} if largest else {}
    caption = caption and ax is None
    common.write_conditions([panel, *below], [study], *notes, caption=caption, **texts)
    return panel


def _draw_goodput(panel: Axes, progress: Goodput) -> None:
    throughput, values, best, _ = progress
    sizes, most = list(values), values[best].value
    batch_axis(panel, sizes, common.BATCH_LABEL)
    draw.series(panel, 1, [*throughput.items()], label="throughput")
    draw.series(panel, 0, [*values.items()], label="goodput", shaded=True)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_ylabel("Goodput, throughput\n(samples/s)")
    draw.ring(panel, best, most)
    draw.name_answers(panel, [("largest goodput", best, True)], sizes[0], sizes[-1])
    canvas.write_title(panel, "Goodput: throughput times statistical efficiency", columns=2)
