"""The figure of goodput: throughput times what an example is worth, by batch size."""

from typing import TYPE_CHECKING

from kbatch.document.number_text import readable
from kbatch.plotting.batch_axis import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import INK, MUTED, series_style
from kbatch.plotting.series import draw_series, mark_missing, name_missing, name_panel, ring
from kbatch.study.figures.goodput_info import GoodputInfo, alt_text, goodput_info, noise_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["GoodputInfo", "alt_text", "goodput_info", "plot_goodput"]

HEIGHT_IN = 4.2
_GOODPUT, _THROUGHPUT = 0, 1


def plot_goodput(
    study: "Study", ax: "Axes | None" = None, *, noise_scale: float | None = None
) -> "Axes":
    """Plots throughput and goodput by batch size, the batch size of the largest goodput marked.

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
