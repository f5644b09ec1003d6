"""The figure of goodput: throughput times what an example is worth, by batch size."""

from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.analysis.goodput import goodput
from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import format_number, in_brackets, join_words, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.palette import series_style
from kbatch.records.training_run import COST_NAMES
from kbatch.study import names
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty

HEIGHT_IN = 4.2
_GOODPUT, _THROUGHPUT = 0, 1


class GoodputPoint(NamedTuple):
    batch_size: int
    throughput: names.PlottedEstimate  # In examples per second.
    goodput: names.PlottedEstimate  # In examples of the smallest batch size per second.


class GoodputInfo(NamedTuple):
    """What the figure shows: the batch sizes that were timed, and the noise scale in examples."""

    points: tuple[GoodputPoint, ...]
    incomplete_sizes: tuple[tuple[int, str], ...]  # With the reason.
    noise_scale: float
    best: int  # The batch size of the largest goodput.
    notes: tuple[str, ...]


def goodput_info(study: Study, *, noise_scale: float | None = None) -> GoodputInfo:
    """Compute the goodput of each batch size from its throughput and the noise scale."""
    refuse_empty(study)
    scale, interval, source = (
        (noise_scale, None, "as given") if noise_scale is not None else _measured_scale(study)
    )
    trials, rates = common.best_of_size(study), {}
    for size, trial in trials.items():
        if trial.status == "completed" and (rate := names.throughput_estimate(trial)) is not None:
            rates[size] = rate
    if not rates:
        raise common.missing_data(study, "the throughput of trials that completed")

    def goodputs(scale: float) -> dict[int, float]:
        fixed = {"noise_scale": scale, "base_batch_size": min(rates)}
        return {b: goodput(b, b / rate.value, **fixed) for b, rate in rates.items()}

    curves = [goodputs(end) for end in (scale, *(draw.ends(interval) or ()))]
    bests = [max(curve, key=lambda size, curve=curve: (curve[size], -size)) for curve in curves]
    points = []
    for size, rate in rates.items():
        value, *bounds = (curve[size] for curve in curves)
        estimate = names.PlottedEstimate(value, (min(bounds), max(bounds)) if bounds else None)
        points.append(GoodputPoint(size, rate, estimate))
    low, high, bars = min(bests), max(bests), names.bars_text(study.trials)
    used = f"Noise scale {format_number(scale)} examples"
    if interval is None:
        used += f", {source}."
    else:
        largest = f"batch size {low:,}" if low == high else f"batch sizes from {low:,} to {high:,}"
        used += (
            f"{in_brackets(interval)}, {source}; bands: its 95 % interval, over which {largest} "
            "would have the largest goodput."
        )
    decided, other = study.decide(), ""
    if decided.trial is not None and decided.trial.batch_size != bests[0]:
        # Why the answer is another batch size.
        name = decided.trial.objective.name
        differ = "goodput measures how fast training advances, not how good the model is in the end"
        if name == "samples_per_second":
            differ = "goodput also counts what an example is worth"
        elif name in COST_NAMES:
            differ = "goodput predicts it from throughput and noise scale"
        had = "is the fastest within the tolerance of the best"
        had = "had the best" if decided.trial is decided.best else had
        words = names.metric_words(name)
        other = f"Batch size {decided.trial.batch_size:,} {had} {words}: {differ}."
    return GoodputInfo(
        points=tuple(points),
        incomplete_sizes=tuple((s, names.outcome(t)) for s, t in trials.items() if s not in rates),
        noise_scale=scale,
        best=bests[0],
        notes=(used, other, bars, common.best_of_size_note(study)),
    )


def _measured_scale(study: Study) -> tuple[float, Interval | None, str]:
    """Take the noise scale of the best trial that has one."""
    found = [
        (trial, scale.value, scale.interval)
        for trial in study.trials
        if (scale := trial.noise_scale) is not None and scale.value is not None
    ]
    if not found:
        raise ValueError(
            "Goodput needs a noise scale: trials measure it as they train, more closely over more "
            "epochs and in smaller micro-batches (`kbatch.BatchSizeHyperModel(..., "
            "micro_batch_size=n)`), or give `noise_scale=200`, say. Received: noise_scale=None, "
            f"and a study of {pluralize(len(study.trials), 'trial')} without a resolved one."
        )
    best = Study(study.name, tuple(trial for trial, _, _ in found)).best_trial()
    trial, value, interval = next(one for one in found if best is None or one[0] is best)
    return value, interval, f"of the late half of training at batch size {trial.batch_size:,}"


def alt_text(info: GoodputInfo) -> str:
    values = join_words(
        f"{format_number(p.goodput.value)} (throughput {format_number(p.throughput.value)}) at "
        f"batch size {p.batch_size:,}"
        for p in info.points
    )
    return (
        f"A chart of throughput and goodput over {pluralize(len(info.points), 'batch size')}, in "
        f"examples per second. Goodput is {values}. It is largest at {info.best:,}. "
        f"{' '.join(filter(None, info.notes))}"
    )


def plot_goodput(study: Study, ax: Axes | None = None, *, noise_scale: float | None = None) -> Axes:
    """Plot throughput and goodput by batch size, the batch size of the largest goodput marked.

    Goodput is throughput times statistical efficiency, (B_noise + M0) / (B_noise + B) with the
    smallest batch size M0 (Qiao et al. 2021, Pollux, OSDI): examples of that size per second.

    Args:
        study: A study, from `load_study`.
        ax: Axes to draw on; a new figure if None.
        noise_scale: B_noise in examples; if None, the one measured in the best trial that has one.

    Raises:
        ValueError: If the study is empty, or the noise scale or the throughput is not known,
            with what to do.
    """
    info = goodput_info(study, noise_scale=noise_scale)
    (panel,) = canvas.panels(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    sizes = [p.batch_size for p in info.points]
    batch_axis(panel, [*sizes, *dict(info.incomplete_sizes)], common.BATCH_LABEL)
    rates = [p.throughput.value for p in info.points]
    bars = [p.throughput.bar for p in info.points]
    draw.series(panel, _THROUGHPUT, sizes, rates, label="throughput", bounds=bars)
    values = [p.goodput.value for p in info.points]
    draw.series(panel, _GOODPUT, sizes, values, label="goodput")
    draw.band(panel, sizes, [p.goodput.bar for p in info.points], series_style(_GOODPUT).color)
    panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_ylabel(f"Throughput (samples/s), goodput\n(samples/s of batch size {sizes[0]:,})")
    draw.guide(panel, info.best)
    most = values[sizes.index(info.best)]
    draw.ring(panel, info.best, most)
    side = "left" if info.best == sizes[0] else "right" if info.best == sizes[-1] else "center"
    words = f"largest: {info.best:,}\n{format_number(most)}"
    draw.text(panel, words, (info.best, most), (0, -14), ha=side, va="top", bold=True)
    for size, words in info.incomplete_sizes:
        draw.missing(panel, size, words=words)
    canvas.write_title(panel, study.name, columns=2)
    common.write_conditions(panel, study, *info.notes)
    return panel
