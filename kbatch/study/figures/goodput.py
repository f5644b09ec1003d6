"""The figure of goodput: throughput times what an example is worth, by batch size."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kbatch.analysis.goodput import goodput
from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import counted, listed, readable
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import INK, MUTED, series_style
from kbatch.plotting.series import draw_series, mark_missing, name_missing, name_panel, ring
from kbatch.records.training_run import COST_NAMES
from kbatch.study.conditions import Estimate, bars_text, caption, conditions_of, throughput_estimate
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import best_of_size, best_of_size_note, none_completed
from kbatch.study.names import metric_words, outcome
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class GoodputPoint(NamedTuple):
    """One batch size.

    Attributes:
        batch_size: B, examples of one optimizer update.
        throughput: Examples per second.
        goodput: Examples of the smallest batch size per second, with its ends at those of the
            noise scale's interval.
    """

    batch_size: int
    throughput: Estimate
    goodput: Estimate


class GoodputInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        points: The batch sizes that were timed, ascending.
        incomplete_sizes: Batch sizes without a result, with the reason.
        noise_scale: B_noise, in examples.
        interval: Its 95 % interval, None where it was given without one.
        best: The batch size of the largest goodput.
        best_range: Smallest and largest of those it has at the ends of the interval.
        source: Where the noise scale comes from.
        notes: Which trials are shown, and where the best trial has another batch size.
        conditions: Device, versions and budget.
    """

    name: str
    points: tuple[GoodputPoint, ...]
    incomplete_sizes: tuple[tuple[int, str], ...]
    noise_scale: float
    interval: Interval | None
    best: int
    best_range: tuple[int, int]
    source: str
    notes: tuple[str, ...]
    conditions: str


def goodput_info(study: Study, *, noise_scale: float | None = None) -> GoodputInfo:
    """Compute the goodput of each batch size from its throughput and the noise scale."""
    refuse_empty(study)
    scale, interval, source = _noise_scale(study, noise_scale)
    trials = best_of_size(study)
    rates = {
        size: rate
        for size, trial in trials.items()
        if trial.status == "completed" and (rate := throughput_estimate(trial)) is not None
    }
    if not rates:
        raise ValueError(
            "Goodput needs the throughput of trials that completed. Received: "
            f"{none_completed(study)}."
        )
    ends = (scale, *((interval.low, interval.high) if interval else ()))
    curves = [_goodputs(rates, end) for end in ends]
    bests = [max(curve, key=lambda size, curve=curve: (curve[size], -size)) for curve in curves]
    return GoodputInfo(
        name=study.name,
        points=tuple(
            GoodputPoint(size, rate, _estimate([curve[size] for curve in curves]))
            for size, rate in rates.items()
        ),
        incomplete_sizes=tuple((s, outcome(t)) for s, t in trials.items() if s not in rates),
        noise_scale=scale,
        interval=interval,
        best=bests[0],
        best_range=(min(bests), max(bests)),
        source=source,
        notes=(
            *_other_best(study, bests[0]),
            *filter(None, (bars_text(study),)),
            *best_of_size_note(study),
        ),
        conditions=caption(conditions_of(study)),
    )


def noise_text(info: GoodputInfo) -> str:
    """Describe which noise scale was used, and what its interval means for the choice."""
    begun = f"Noise scale {readable(info.noise_scale)} examples"
    if info.interval is None:
        return f"{begun}, {info.source}."
    low, high = info.best_range
    largest = f"batch size {low:,}" if low == high else f"batch sizes from {low:,} to {high:,}"
    return (
        f"{begun} ({readable(info.interval.low)} to {readable(info.interval.high)}), "
        f"{info.source}; bands: its 95 % interval, over which {largest} would have the largest "
        "goodput."
    )


def alt_text(info: GoodputInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    values = listed(
        f"{readable(p.goodput.value)} (throughput {readable(p.throughput.value)}) at batch size "
        f"{p.batch_size:,}"
        for p in info.points
    )
    return (
        f"A chart of throughput and goodput over {counted(len(info.points), 'batch size')}, in "
        f"examples per second. Goodput is {values}. It is largest at {info.best:,}. "
        + " ".join((noise_text(info), *info.notes))
    )


def _other_best(study: Study, size: int) -> tuple[str, ...]:
    """Describe why the best trial has another batch size than the one of the largest goodput."""
    best = study.best_trial()
    if best is None or best.batch_size == size:
        return ()
    if best.objective.name == "samples_per_second":
        differ = "goodput also counts what an example is worth"
    elif best.objective.name in COST_NAMES:
        differ = "goodput foretells that from throughput and noise scale"
    else:
        differ = "goodput tells how fast training advances, not what it came to"
    words = metric_words(best.objective.name)
    return (f"Batch size {best.batch_size:,} had the best {words}: {differ}.",)


def _goodputs(rates: dict[int, Estimate], noise_scale: float) -> dict[int, float]:
    base = min(rates)
    return {
        size: goodput(size, size / rate.value, noise_scale=noise_scale, base_batch_size=base)
        for size, rate in rates.items()
    }


def _estimate(values: list[float]) -> Estimate:
    first, *ends = values
    return Estimate(first, min(ends), max(ends)) if ends else Estimate(first, None, None)


def _noise_scale(study: Study, given: float | None) -> tuple[float, Interval | None, str]:
    if given is not None:
        return given, None, "as given"
    resolved = [
        trial
        for trial in study.trials
        if (scale := trial.noise_scale) is not None and scale.value is not None
    ]
    trial = _best(Study(study.name, tuple(resolved)).best_trial(), resolved)
    scale = trial.noise_scale if trial else None
    if trial is None or scale is None or scale.value is None:
        raise ValueError(
            "Goodput needs a noise scale: trials measure it as they train, more closely over more "
            "epochs and in smaller micro-batches (`kbatch.BatchSizeHyperModel(..., "
            "micro_batch_size=n)`), or give `noise_scale=200`, say. Received: noise_scale=None, "
            f"and a study of {counted(len(study.trials), 'trial')} without a resolved one."
        )
    source = f"of the late half of training at batch size {trial.batch_size:,}"
    return scale.value, scale.interval, source


def _best(best: TrialRecord | None, resolved: Iterable[TrialRecord]) -> TrialRecord | None:
    return best or next(iter(resolved), None)


HEIGHT_IN = 4.2
_GOODPUT, _THROUGHPUT = 0, 1


def plot_goodput(
    study: "Study", ax: "Axes | None" = None, *, noise_scale: float | None = None
) -> "Axes":
    """Plot throughput and goodput by batch size, the batch size of the largest goodput marked.

    Goodput is throughput times statistical efficiency, (B_noise + M0) / (B_noise + B) with the
    smallest batch size M0 (Qiao et al. 2021, Pollux, OSDI): examples of that size per second.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_goodput(study).figure.savefig("goodput.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes to draw on; a new figure if None.
        noise_scale: B_noise in examples; that of the best trial that has one if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, or the noise scale or the throughput is not known,
            with what to do.
    """
    info = goodput_info(study, noise_scale=noise_scale)
    panel = plain_axes(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    sizes = [p.batch_size for p in info.points]
    missing = [size for size, _ in info.incomplete_sizes]
    batch_axis(panel, [*sizes, *missing], "Batch size (examples per update)")
    for index, label, estimates in (
        (_THROUGHPUT, "throughput", [p.throughput for p in info.points]),
        (_GOODPUT, "goodput", [p.goodput for p in info.points]),
    ):
        draw_series(
            panel,
            index,
            label=label,
            places=sizes,
            values=[e.value for e in estimates],
            bounds=[e.bar for e in estimates] if index == _THROUGHPUT else (),
        )
    _draw_band(panel, info)
    panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_ylabel(f"Throughput (samples/s), goodput\n(samples/s of batch size {sizes[0]:,})")
    _mark_best(panel, info)
    for size, words in info.incomplete_sizes:
        mark_missing(panel, size)
        name_missing(panel, size, words)
    name_panel(panel, info.name, columns=2)
    write_caption(panel, noise_text(info), *info.notes, info.conditions)
    return panel


def _draw_band(panel: "Axes", info: GoodputInfo) -> None:
    bands = [(p.batch_size, *p.goodput.bar) for p in info.points if p.goodput.bar]
    if bands:
        color = series_style(_GOODPUT).color
        sizes, lows, highs = zip(*bands, strict=True)
        panel.fill_between(sizes, lows, highs, color=color, alpha=0.18, linewidth=0)


def _mark_best(panel: "Axes", info: GoodputInfo) -> None:
    point = next(p for p in info.points if p.batch_size == info.best)
    panel.axvline(info.best, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
    ring(panel, info.best, point.goodput.value)
    sizes = [p.batch_size for p in info.points]
    side = "left" if info.best == sizes[0] else "right" if info.best == sizes[-1] else "center"
    panel.annotate(
        f"largest: {info.best:,}\n{readable(point.goodput.value)}",
        (info.best, point.goodput.value),
        xytext=(0, -14),
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=SMALL_PT + 0.5,
        fontweight="bold",
        color=INK,
        path_effects=halo(),
    )
