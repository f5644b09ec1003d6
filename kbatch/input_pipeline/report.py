"""What limits training, in words and tables, and the figure of a second of training and rates."""

import functools
import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.input_pipeline.rates import CLOSEST_RATIO
from kbatch.input_pipeline.record import InputPipelineProfile, RateRecord
from kbatch.page.content import Figure
from kbatch.page.environment import where_measured
from kbatch.page.numbers import (
    format_number,
    in_brackets,
    join_words,
    percent,
    pluralize,
)
from kbatch.page.section import Cell, Column, Fact, Note, Row, Section, Table, environment_facts
from kbatch.plotting import canvas, draw
from kbatch.plotting.palette import ALARM, INK, MUTED, series_style

_MUCH_WAITING = 0.2
# Training this much slower than one after the other: both sides hold each other up.
_CONTENDED = 0.9
# Both sides keep this share of the cores busy, so that they must share them.
_BUSY_SHARE = 0.8
# Extrapolated this far beyond the batch sizes that were measured, a crossing is named as such.
_FAR = 4


def input_section(profile: InputPipelineProfile) -> Section:
    info = input_pipeline_info(profile)
    title = "A second of training, and the rates behind the verdict"
    draw = functools.partial(plot_input_pipeline, profile)
    rows = []
    for remedy in profile.best_first:
        times = span = Cell("n/a (not measured)")
        if gain := remedy.gain:
            slower = gain.high is not None and gain.high < 1 / CLOSEST_RATIO
            sure = "" if remedy.is_clear_gain else " (slower)" if slower else " (no clear gain)"
            times = Cell(f"{format_number(gain.value)}{sure}", gain.value)
            span = Cell("n/a (too few rounds)")
            span = Cell(_span(gain.ends), gain.low) if gain.ends else span
        cells = (Cell(remedy.name), times, span, Cell(remedy.code), Cell(remedy.condition or ""))
        rows.append(Row(remedy.name, "", not rows and remedy.is_clear_gain, cells))
    changes = Table(
        "Changes that were tried, one at a time",
        (
            Column("Change", False),
            Column("Times as fast", True),
            Column("95 % interval", True),
            Column("Code", False),
            Column("Note", False),
        ),
        tuple(rows),
        footnote="Training speed over that of the pipeline as it is, in the same rounds.",
        best_means="largest clear gain",
    )
    untried = Table(
        "Changes that were not tried",
        (Column("Change", False), Column("Code", False), Column("Why not", False)),
        tuple(
            Row(u.name, "", False, (Cell(u.name), Cell(u.code), Cell(u.reason)))
            for u in profile.untried
        ),
    )
    return Section(
        kind="input pipeline",
        name=profile.source,
        headline=f"{profile.verdict[0].upper()}{profile.verdict[1:]}: {headline(profile)}",
        lead=(_certainty(profile),),
        details=tuple(_evidence(profile)),
        conditions=info.conditions,
        figures=(Figure("input-pipeline", title, HEIGHT_IN, draw),),
        tables=tuple(table for table in (changes, untried) if table.rows),
        notes=tuple(Note("", "", note) for note in profile.notes),
        command=profile.environment.command,
        settings=(
            Fact("batch size", f"{profile.batch_size:,}"),
            Fact("dtype policy", profile.dtype_policy),
            Fact("time to measure", f"{format_number(profile.budget_s)} s"),
        ),
        environment=environment_facts(profile.environment),
    )


def _certainty(profile: InputPipelineProfile) -> str:
    if profile.disturbed:
        return "The ratio of the rates is not known: what was timed alone was disturbed."
    ratio, long_run = profile.ratio, profile.long_run_ratio
    if long_run and not profile.is_even:
        return (
            f"Over one long reading the pipeline alone is {_span(long_run)} times as fast as the "
            "train step alone; the shorter rounds saw another rate."
        )
    if ratio is None or ratio.ends is None:
        return "The ratio of the rates has no interval, so the verdict is not sure."
    return (
        f"The pipeline alone is {format_number(ratio.value)} times as fast as the train step alone "
        f"(95 % interval {_span(ratio.ends)})."
    )


def headline(profile: InputPipelineProfile) -> str:
    """Describe in a sentence what the verdict means for the choice of a batch size."""
    if profile.verdict == "input-bound":
        return (
            "training waits for data; a larger batch helps only as far as the pipeline makes "
            "larger ones faster, and comparing batch sizes measures the pipeline."
        )
    if profile.verdict == "compute-bound":
        waits = (profile.wait_share or 0) > _MUCH_WAITING
        tail = ", though it does not overlap with the step: see the waiting below" if waits else ""
        return f"the pipeline keeps up with the train step{tail}."
    if profile.disturbed:
        alone = {
            "pipeline": f"the pipeline alone ({_median(profile.pipeline)})",
            "step": f"the train step alone ({_median(profile.step)})",
        }
        return (
            f"both together ran at {_median(profile.together)} samples/s, faster than "
            f"{join_words(alone[name] for name in profile.disturbed)}. That cannot be: something "
            "else slowed what was timed alone. Measure again on an idle machine, or with a larger "
            "`budget_s`."
        )
    if not profile.is_even:
        return (
            "the batches come unevenly, and too little was read to know the long-run rate: give a "
            "larger `budget_s`."
        )
    ratio, long_run = profile.ratio, profile.long_run_ratio
    if ratio is None or ratio.ends is None:
        return "too few rounds for an interval: give a larger `budget_s`."
    low, high = ratio.ends
    if low >= 1 / CLOSEST_RATIO and high <= CLOSEST_RATIO:
        return "pipeline and train step are equally fast within 5 %."
    found = f"the rates' ratio is {format_number(ratio.value)}{in_brackets(ratio)}"
    more = "give a larger `budget_s`, or an idle machine."
    if long_run is not None and (low > CLOSEST_RATIO or high < 1 / CLOSEST_RATIO):
        over = f"{_span(long_run)} over one long reading, on the other side of 1"
        return f"{found} in the rounds and {over}: {more}"
    return f"{found}, which does not tell them apart: {more}"


def _evidence(profile: InputPipelineProfile) -> list[str]:
    """Return what was measured of the pipeline as it is, a line each."""
    waits = ""
    if (waiting := profile.wait_share) is not None:
        waits = f"; {percent(waiting)} of each step is spent waiting for data"
    lines = [
        f"Pipeline alone: {_rate(profile.pipeline)}.",
        f"Train step alone, batch size {profile.batch_size:,}: {_rate(profile.step)}.",
        f"Both together: {_rate(profile.together)}{waits}.",
    ]
    if profile.long_run and not profile.is_even:
        lines.append(_long_run(profile))
    together = profile.together.samples_per_second
    most = together and together.high
    cores = profile.environment.cpu_count
    if most and profile.serial and most < _CONTENDED * profile.serial:
        wanted = (profile.pipeline.busy_cores or 0) + (profile.step.busy_cores or 0)
        why = (
            "want the same cores."
            if wanted >= _BUSY_SHARE * cores
            else "hold each other up, and not for want of cores: Python code runs in one thread at "
            "a time, and the batches of the rounds may differ."
        )
        both = "Together they are slower than one after the other would be: pipeline and train step"
        lines.append(f"{both} {why}")
    elif together and profile.serial and profile.overlapped:
        lines.append(
            f"With all work side by side it would be {format_number(profile.overlapped)}, one "
            f"after the other {format_number(profile.serial)} samples/s."
        )
    lines += _crossing(profile)
    rates = {"pipeline": profile.pipeline, "step": profile.step, "together": profile.together}
    busy = [f"{name} {format_number(r.busy_cores, 2)}" for name, r in rates.items() if r.busy_cores]
    if busy:
        lines.append(f"Cores kept busy by this process, of {cores:,}: {join_words(busy)}.")
    shares = [(name, r.gpu_busy_share) for name, r in rates.items()]
    if gpus := [f"{name} {percent(share)}" for name, share in shares if share is not None]:
        lines.append(f"GPU busy: {join_words(gpus)}.")
    for cost in profile.costs:
        if (batch_s := cost.batch_s) is not None:
            batch_ms = batch_s.times(1e3)
            name = f"{cost.name[0].upper()}{cost.name[1:]}"
            lines.append(
                f"{name}: {format_number(batch_ms.value)} ms a batch{in_brackets(batch_ms)}."
            )
    return lines


def _long_run(profile: InputPipelineProfile) -> str:
    record, ratio = profile.long_run, profile.long_run_ratio
    assert record is not None
    what = {
        "whole epochs": "whole epochs with their starts",
        "whole chunks": "whole chunks with the pauses between them",
        "part of the data": (
            f"a first batch after {format_number(record.first_batch_s)} s, and whether such a "
            "pause comes again was not seen"
        ),
    }[record.counted.basis]
    over = "" if ratio is None else f", {_span(ratio)} times the rate of the train step"
    return (
        f"Note that one reading of {format_number(record.counted.duration_s)} s gave "
        f"{_span(record.counted.bounds)} samples/s{over} ({what}). The rounds are "
        "shorter and saw another rate, so the verdict and the waiting are those of the long "
        "reading."
    )


def _crossing(profile: InputPipelineProfile) -> list[str]:
    found = profile.crossing
    if found is None:
        return []
    value, ends = found.batch_size.value, found.batch_size.ends
    if found.never:
        line = "The pipeline keeps up at every batch size: it needs less time an example."
    elif value is None or ends is None:
        at_least = found.batch_size.low or 0
        above = f" above batch size {at_least:,.0f}" if at_least >= 1 else ""
        line = (
            f"Whether and where{above} the pipeline becomes the slower one cannot be told from "
            "these rounds."
        )
    elif ends[1] < 1:
        line = "The pipeline is the slower one at every batch size."
    else:
        smallest, largest = profile.smaller_steps[-1].batch_size, profile.batch_size
        condition = ", if the pipeline takes the same time per example at other sizes"
        if not smallest / _FAR <= value <= largest * _FAR:
            condition = f" (far from the sizes {smallest:,} to {largest:,} that were measured)"
        line = (
            f"Up to about batch size {round(value):,} ({ends[0]:,.0f} to "
            f"{ends[1]:,.0f}) the step is slower, above it the pipeline{condition}."
        )
    departure = found.step.departure
    if departure.holds is False:
        line += (
            " Note that the step time is not linear in the batch size: it is off the line by up to "
            f"{percent(departure.worst)}."
        )
    return [line]


def _rate(rate: RateRecord) -> str:
    estimate = rate.samples_per_second
    if estimate is None:
        return "n/a (not measured)"
    return f"{format_number(estimate.value)} samples/s{in_brackets(estimate)}"


def _median(rate: RateRecord) -> str:
    estimate = rate.samples_per_second
    return "n/a" if estimate is None else format_number(estimate.value)


def _span(ends: tuple[float, float]) -> str:
    return " to ".join(map(format_number, dict.fromkeys(ends)))


HEIGHT_IN = 4.2
_SECOND = 1.0
_MOST_REMEDIES = 3
# In a narrow figure names of bars take two lines.
_NAME_CHARACTERS, _NARROW_NAME_CHARACTERS = 80, 14
_COMPUTING, _PIPELINE, _CHANGED = (series_style(i).color for i in range(3))


class RateBar(NamedTuple):
    """One bar, in examples per second."""

    label: str  # What was measured.
    rate: float
    bounds: tuple[float, float] | None  # Its 95 % interval.
    color: str


class InputPipelineInfo(NamedTuple):
    title: str  # The verdict and what it means.
    waiting: tuple[tuple[float, float], ...]  # Training waits: begin and duration in ms.
    computing: tuple[tuple[float, float], ...]
    wait_share: float | None  # Of the rounds' time, None if not measured.
    bars: tuple[RateBar, ...]
    conditions: str


def input_pipeline_info(profile: InputPipelineProfile) -> InputPipelineInfo:
    """Compute what the figure shows: of changes to the pipeline the best three clear gains."""
    spans = [span for span in profile.timeline if span.begin_s < _SECOND]
    gained = [remedy for remedy in profile.best_first if remedy.is_clear_gain][:_MOST_REMEDIES]
    rates = [
        ("pipeline alone", profile.pipeline, _PIPELINE),
        ("train step alone", profile.step, _COMPUTING),
        ("both together", profile.together, MUTED),
        *((f"with {remedy.name}", remedy.changed, _CHANGED) for remedy in gained),
    ]
    conditions = (
        *where_measured(profile.environment),
        profile.dtype_policy,
        f"batch size {profile.batch_size:,}",
        f"{pluralize(len(profile.step.durations_s), 'round')}, bars: 95 % interval",
    )
    return InputPipelineInfo(
        title=f"{profile.verdict}: {headline(profile)}",
        waiting=tuple((1e3 * s.begin_s, 1e3 * s.wait_s) for s in spans),
        computing=tuple((1e3 * (s.begin_s + s.wait_s), 1e3 * s.compute_s) for s in spans),
        wait_share=profile.wait_share,
        bars=tuple(
            RateBar(label, rate.value, rate.ends, color)
            for label, record, color in rates
            if (rate := record.samples_per_second) is not None
        ),
        conditions=" · ".join(conditions),
    )


def alt_text(info: InputPipelineInfo) -> str:
    bars = ", ".join(f"{bar.label} {format_number(bar.rate)}" for bar in info.bars)
    steps = pluralize(len(info.computing), "step")
    share = "" if info.wait_share is None else f", {percent(info.wait_share)} of it waiting"
    return (
        f"A timeline of {steps} of training{share}, above bars of samples per second: {bars}. "
        f"The verdict is {info.title}"
    )


def plot_input_pipeline(profile: InputPipelineProfile, ax: Axes | None = None) -> Axes:
    """Plot a second of training, waiting and computing, and the rates with their intervals.

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> kbatch.plot_input_pipeline(profile).figure.savefig("input.png")

    Args:
        profile: What was measured.
        ax: Axes whose place the two panels take; a new figure if None.
    """
    info = input_pipeline_info(profile)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 3), share_x=False)
    upper.set_label(alt_text(info))
    for panel in (upper, lower):
        panel.grid(visible=False, axis="y")
        canvas.vertical_grid(panel)
    title, rest, narrow = info.title, "", canvas.width_share(upper) < 1
    if narrow:
        # A long title would take the place of the panels.
        title, _, rest = title.partition("; ")
        rest = rest and f"{rest[:1].upper()}{rest[1:].rstrip('.')}."
    canvas.write_title(upper, title, rows_below=1, characters=len(title))
    share = "" if info.wait_share is None else f" ({percent(info.wait_share)})"
    waiting = f"■ waiting{'' if narrow else ' for data'}{share}"
    size, where = canvas.TEXT_PT, upper.transAxes
    for words, x, side, color in (
        (waiting, 0, "left", ALARM),
        ("■ computing", 1, "right", _COMPUTING),
    ):
        draw.text(upper, words, (x, 1), (0, 7), ha=side, color=color, size=size, xycoords=where)
    upper.broken_barh(info.computing, (0, 1), color=_COMPUTING, linewidth=0)
    upper.broken_barh(info.waiting, (0, 1), color=ALARM, linewidth=0)
    upper.set_xlim(0, max((begin + duration for begin, duration in info.computing), default=1.0))
    upper.set_ylim(0, 1)
    upper.set_yticks([])
    upper.set_xlabel("Time (ms)")
    _draw_bars(lower, info, _NARROW_NAME_CHARACTERS if narrow else _NAME_CHARACTERS)
    canvas.write_caption(lower, rest, info.conditions)
    return upper


def _draw_bars(panel: Axes, info: InputPipelineInfo, characters: int) -> None:
    places, rates = range(len(info.bars)), [bar.rate for bar in info.bars]
    panel.barh(places, rates, height=0.62, color=[bar.color for bar in info.bars])
    tops = [bar.bounds[1] if bar.bounds else bar.rate for bar in info.bars]
    for place, bar, top in zip(places, info.bars, tops, strict=True):
        if bar.bounds:
            panel.hlines(place, *bar.bounds, color=INK, linewidth=1.4)
        draw.text(
            panel, format_number(bar.rate), (top, place), (4, 0), ha="left", size=canvas.TEXT_PT
        )
    names = [textwrap.fill(bar.label, characters, break_long_words=False) for bar in info.bars]
    panel.set_yticks(list(places), names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.14 * max(tops, default=1.0))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("Throughput (samples/s)")
