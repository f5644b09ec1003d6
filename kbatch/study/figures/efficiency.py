"""The figures of how many updates larger batches save, and of what they cost.

One shows noise scale and goodput, the other one time and updates to a target.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.goodput import StepsToTarget, fit_steps_to_target, goodput
from kbatch.analysis.intervals import FEWEST_VALUES, Estimate
from kbatch.page.numbers import at_most, format_number, in_brackets, join_words, pluralize, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import GRID, MUTED, series_style, size_color
from kbatch.plotting.draw import batch_axis, plain_log_labels
from kbatch.records.training_run import EpochRecord, Target, epochs_to_target
from kbatch.study.comparison import Studies, studies_of
from kbatch.study.decision import speed_of
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import TrialRecord, mean_of
from kbatch.training.metrics import metric_words

# Heights of both panels, and of the noise scale without goodput.
GOODPUT_IN, NOISE_SCALE_IN = 5.2, 3.2
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
        f"Goodput: samples/s times progress per example, relative to batch size {min(rates):,}. "
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
    height_in, heights = (GOODPUT_IN, (1, 1)) if progress else (NOISE_SCALE_IN, (1,))
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


TARGET_IN = 4.8


# Whether all runs of a trial met the target, and the epochs that each run needed. If a run missed
# the target, only the epochs of the longest run.
Spent = tuple[bool, Sequence[Sequence[EpochRecord]]]


def target_of(study: Study, value: float | None) -> Target:
    """Return the study's target. If `value` is given, return this value of the quality metric."""
    if value is not None:
        metric = study.quality_metric
        if metric is None:
            raise ValueError(
                "`target` needs a study with a metric such as val_accuracy: search again with "
                f"such a metric. Received: target={value}."
            )
        return Target(metric.name, value, metric.direction)
    targets = dict.fromkeys(filter(None, (trial.last.target for trial in study.trials)))
    if len(targets) == 1:
        return next(iter(targets))
    received = "several targets" if targets else "no target"
    raise ValueError(
        "This figure needs one target: give a value such as `target=0.95` (in a terminal "
        "`--target 0.95`), or search with `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
        f"Received: target=None, and a study with {received}."
    )


def target_points(study: Study, target: Target) -> dict[int, Spent]:
    """Return the epochs that each batch size with a result needed to reach a target."""
    trials = reversed(study.trials)
    points = [(trial.batch_size, spent) for trial in trials if (spent := _spent(trial, target))]
    if not points:
        raise common.missing_data(study, "completed trials with epochs")
    # `dict` keeps the last trial of each size: the one with the fewest updates.
    points.sort(key=lambda point: (point[1][0], -fmean(map(_updates, point[1][1]))))
    return dict(sorted(dict(points).items()))


def _spent(trial: TrialRecord, target: Target) -> Spent | None:
    """Return the epochs of a trial until the target; None if it has no result."""
    if trial.status != "completed" or not all(run.epochs for run in trial.executions):
        return None
    needed = [epochs_to_target(target, run.epochs) for run in trial.executions]
    spent = [epochs for epochs in needed if epochs is not None]
    met = len(spent) == len(needed)
    if not met:
        # The target takes more updates than the longest run made.
        spent = [max((run.epochs for run in trial.executions), key=_updates)]
    if not all(_seconds(epochs) and _updates(epochs) for epochs in spent):
        return None  # A logarithmic axis cannot show 0.
    return met, spent


def _seconds(epochs: Sequence[EpochRecord]) -> float:
    return sum(epoch.train_s for epoch in epochs)


def _updates(epochs: Sequence[EpochRecord]) -> int:
    return sum(epoch.updates for epoch in epochs)


def fitted(points: Mapping[int, Spent]) -> tuple[StepsToTarget | None, str]:
    """Fit the updates of all runs if three sizes met the target, and describe the fit."""
    met = {size: spent for size, (met, spent) in points.items() if met}
    runs = [(size, _updates(epochs)) for size, spent in met.items() for epochs in spent]
    if len(met) < 3:
        return None, f"No fitted curve: three sizes must meet the target, but only {len(met)} did."
    fit = fit_steps_to_target(*zip(*runs, strict=True))
    critical, text = fit.critical_batch_size, "Fitted updates: S_min (1 + B_crit / B)"
    if critical.value is None:
        bound = f", above {format_number(critical.low)}" if critical.low else ""
        return fit, f"{text}; B_crit is larger than these batch sizes can show{bound}."
    deviates = " Trials deviate from the curve by more than noise." if fit.holds is False else ""
    return fit, (
        f"{text}. S_min, fewest updates to the target: {format_number(fit.fewest_steps)}. B_crit, "
        f"critical batch size: {format_number(critical.value)}{in_brackets(critical)}.{deviates}"
    )


def plot_time_to_target(
    studies: Studies, ax: Axes | None = None, *, target: float | None = None, caption: bool = True
) -> Axes:
    """Plot the training time and the updates to a target by batch size, on logarithmic axes.

    The dashed line is perfect scaling from the smallest batch size that met the target: twice the
    batch needs half the updates (Shallue et al. 2019, arXiv:1811.03600). The curve through the
    updates is S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv:1812.06162). Each batch size is
    shown by its trial with the fewest updates. The ring is the answer of `study.decide()`.

    A target counts as met at the end of an epoch. Training time includes tracing, but no
    validation. If all batch sizes have the same learning rate, large ones may need more updates for
    this reason alone. If there are several studies, each has a line, without the curve and without
    perfect scaling.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_time_to_target(study).figure.savefig("time-to-target.png")

    Args:
        studies: A `kbatch.Study`, or several with one objective as a list or as a dict of names.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        target: Float. Value of `study.quality_metric` to reach. Default: the value of
            `StopAtTarget`.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If there is no target or nothing to show, or if the studies do not fit together.
    """
    shown = studies_of(studies)
    several, goal = len(shown) > 1, target_of(shown[0], target)
    if any(target_of(study, target) != goal for study in shown):
        raise ValueError(
            "These studies have different targets: give one target, such as `target=0.95` (in a "
            f"terminal `--target 0.95`). Received: target=None, and {len(shown)} studies."
        )
    points_of_studies = [target_points(study, goal) for study in shown]
    fit, fit_text = (None, "") if several else fitted(points_of_studies[0])
    failed = [
        (trial.batch_size, "no updates" if trial.status == "completed" else trial.outcome)
        for study, points in zip(shown, points_of_studies, strict=True)
        for trial in study.trials
        if trial.batch_size not in points
    ]
    upper, lower = canvas.panels(ax, TARGET_IN, (1, 1))
    sizes = [size for points in points_of_studies for size in points]
    missed = any(not met for points in points_of_studies for met, _ in points.values())
    batch_axis(lower, [*sizes, *(size for size, _ in failed)], common.BATCH_LABEL)
    has_bars = ringed = False
    for panel, cost_of in ((upper, _seconds), (lower, _updates)):
        costs = [
            {
                size: (met, mean_of([*map(cost_of, spent)], positive=True) or Estimate(0.0))
                for size, (met, spent) in points.items()
            }
            for points in points_of_studies
        ]
        for number, (study, by_size) in enumerate(zip(shown, costs, strict=True)):
            _draw_costs(panel, number, by_size, fit if panel is lower else None, alone=not several)
            answer = study.decide().batch_size
            if answer is not None and answer in by_size:
                ringed = True
                draw.ring(panel, answer, by_size[answer][1].value)
        drawn = [cost for by_size in costs for cost in by_size.values()]
        _end_axis(panel, drawn, below=bool(failed))
        has_bars = any(cost.ends for _, cost in drawn)
    labelled = draw.mark_failed((upper, lower), failed)
    names = join_words(at_most([f"{size:,} ({why})" for size, why in failed]) or [""])
    alarm = f"\N{MULTIPLICATION X} Without a result: batch size {names}."
    upper.set_ylabel("Training time to target\n(s)")
    lower.set_ylabel("Updates to target")
    sign = "≥" if goal.direction == "max" else "≤"
    title = f"{metric_words(goal.metric)} {sign} {setting(goal.value)}"
    common.write_title(upper, f"Training time and updates to {title}", shown)
    hollow = "Hollow: target not met." if several and missed else ""
    ring = common.RINGS if ringed else ""
    if ringed and not several:
        decision = shown[0].decide()
        ring = f"Ring: the answer, batch size {decision.batch_size:,}{common.doubt(decision)}."
    notes = ring, fit_text, hollow, f"{common.BARS}." if has_bars else ""
    alarm = None if failed and several else alarm if failed and not labelled else ""
    caption = caption and ax is None
    common.write_conditions((upper, lower), shown, *notes, alarm=alarm, caption=caption)
    return upper


def _draw_costs(
    panel: Axes,
    number: int,
    costs: Mapping[int, tuple[bool, Estimate[float]]],
    fit: StepsToTarget | None,
    *,
    alone: bool,
) -> None:
    """Draw one cost of a study. If the study is alone, also draw perfect scaling."""
    panel.set_yscale("log")
    sizes, (color, marker) = list(costs), series_style(number)
    met = [(size, cost) for size, (was_met, cost) in costs.items() if was_met]
    missed = [(size, cost.value) for size, (was_met, cost) in costs.items() if not was_met]
    if met:
        curve = draw.sampled(fit.steps, sizes[0], sizes[-1]) if fit else ()
        draw.series(panel, number, met, label="target met" if alone else "", line=curve)
        first, cost = met[0]
        if first < sizes[-1] and alone:
            ends = np.array([first, sizes[-1]])
            line = {"linewidth": 1.0, "linestyle": "--", "label": "perfect scaling"}
            panel.plot(ends, cost.value * first / ends, color=MUTED, zorder=1, **line)
    # An arrow shows that the target takes more than this.
    for place in missed:
        draw.points(panel, place[:1], place[1:], color, marker, hollow=True)
        draw.arrow(panel, place, 20, color)
        if alone:
            draw.text(panel, "not met", place, (0, 21), va="bottom")
    if fit is not None:
        critical, ends = fit.critical_batch_size.value, fit.critical_batch_size.ends
        if critical is not None and sizes[0] <= critical <= sizes[-1]:
            if ends is not None:
                low, high = np.clip(ends, sizes[0], sizes[-1])
                panel.axvspan(low, high, color=GRID, alpha=0.5, linewidth=0, zorder=0.2)
            draw.guide(panel, critical)
            words, top = f"B_crit {critical:,.0f}", panel.get_xaxis_transform()
            draw.text(panel, words, (critical, 1), (4, -3), ha="left", va="top", xycoords=top)


def _end_axis(panel: Axes, costs: Sequence[tuple[bool, Estimate[float]]], *, below: bool) -> None:
    """End the axis around the measurements, with room `below` for sizes without a result.

    The line of perfect scaling may leave the panel.
    """
    low = min(cost.low or cost.value for _, cost in costs)
    high = max(cost.high or cost.value for _, cost in costs)
    stretch = max(1.15, (high / low) ** 0.1)
    bottom = low / stretch ** (5 if below else 1.5)
    panel.set_ylim(bottom, high * stretch ** (1 if all(met for met, _ in costs) else 3))
    plain_log_labels(panel.yaxis)
