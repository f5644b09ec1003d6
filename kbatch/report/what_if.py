"""What another batch size would do: the quantities of a record at every size.

A measured size has its measured value. Other sizes have the value of the record's own fit:
between the measured sizes, and beyond them only where the measurements show that the fit holds.
Values beyond are marked as extrapolated. A record without a fit has no slider, only its table.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.analysis.line_fit import Line
from kbatch.document.numbers import format_number, memory_text
from kbatch.inference.profile import InferenceProfile
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.search import MemoryFit
from kbatch.recommendation.choice import CUT_SHORT, TARGET, Estimate, SizeOutlook
from kbatch.recommendation.record import Recommendation
from kbatch.study.figures.common import best_of_size, best_of_size_note
from kbatch.study.figures.goodput import goodput_info
from kbatch.study.figures.time_to_target import time_to_target_info
from kbatch.study.names import PlottedEstimate, outcome, spreads, throughput_estimate
from kbatch.study.study import Study
from kbatch.throughput.record import TrainingProfile

_OUT_OF_MEMORY = "ran out of memory"
WIDTH, HEIGHT, _MARGIN = 240, 72, 5


class Reading(NamedTuple):
    """A quantity at one batch size."""

    value: float | None = None
    interval: Interval | None = None  # None where it is not known.
    basis: str = ""  # Where the value comes from if it was not measured, or why there is none.
    extrapolated: bool = False


class Mark(NamedTuple):
    """A reading in the chart of its quantity, whose axis of sizes is logarithmic."""

    x: float
    y: float | None
    ends: tuple[float, float] | None  # Of its interval.
    extrapolated: bool


class Quantity(NamedTuple):
    """What a record knows of a quantity, and what that makes of it at every size."""

    name: str
    write: Callable[[float], str]  # Writes a value with its unit.
    tried: Mapping[int, Reading]  # What was found at each size that was tried.
    fit: Callable[[int], Reading] | None = None  # Its value and interval at other sizes.
    extrapolates: bool = False  # Whether the fit answers beyond the measured sizes.
    out_of_memory_at: int | None = None  # The smallest such size: beyond it the fit is silent.
    limit_bytes: int | None = None
    readings: tuple[Reading, ...] = ()  # One a size.
    marks: tuple[Mark, ...] = ()
    span: str = ""  # From the lower to the upper edge of the chart.

    def at(self, size: int) -> Reading:
        """Return what was found at a size, else what the fit predicts there."""
        found = self.tried.get(size) or self._fitted(size)
        value, interval, basis, _ = found
        if value is None or not 0 < value < math.inf:
            return found._replace(value=None, interval=None)
        if interval is not None and not 0 < interval.low < interval.high < math.inf:
            found = found._replace(interval=None)  # A size compared with itself has no width.
        if self.limit_bytes is not None and value > self.limit_bytes:
            over = f"more than the limit of {memory_text(self.limit_bytes)}"
            return found._replace(basis=f"{basis}; {over}" if basis else over)
        return found

    def _fitted(self, size: int) -> Reading:
        measured = sorted(b for b, reading in self.tried.items() if reading.value is not None)
        inside = bool(measured) and measured[0] <= size <= measured[-1]
        if self.fit is None or not measured or not (inside or self.extrapolates):
            return Reading(basis="not measured")
        failed = self.out_of_memory_at
        if failed is not None and size > failed and not inside:
            return Reading(basis=f"not measured: {failed:,} {_OUT_OF_MEMORY}")
        value, interval, *_ = self.fit(size)
        if value is None or not value > 0 or (interval is not None and not interval.low > 0):
            return Reading(basis="not measured; the fit is not certain enough here")
        basis = "from the fit, between measured sizes" if inside else _beyond("measured", measured)
        return Reading(value, interval, basis, not inside)

    def texts(self, index: int) -> tuple[str, str, str]:
        """Write value, interval and basis at a size: `"12.5 ms"`, `"12.4 to 12.6 ms"`, ..."""
        value, interval, basis, _ = self.readings[index]
        between = "" if interval is None else _between(self.write, interval.low, interval.high)
        return "n/a" if value is None else self.write(value), between, basis


class WhatIf(NamedTuple):
    """The quantities of a record over its batch sizes."""

    axis: str  # What the sizes are, such as `"Micro-batch size"`.
    sizes: tuple[int, ...]  # In examples, ascending.
    start: int  # Index of the size that the record answers, or of the nearest one.
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...]

    @property
    def positions(self) -> list[dict[str, object]]:
        """What the page shows at each size: it looks up, and computes nothing."""
        found = []
        for i, size in enumerate(self.sizes):
            texts = [quantity.texts(i) for quantity in self.quantities]
            words = [
                f"{one.name}: {value}{f' ({between})' if between else ''}, {basis or 'measured'}."
                for one, (value, between, basis) in zip(self.quantities, texts, strict=True)
            ]
            places = [quantity.marks[i][:2] for quantity in self.quantities]
            sentence = " ".join((f"{size:,}.", *words))
            found.append({"size": f"{size:,}", "words": sentence, "at": places, "texts": texts})
        return found


def _unit(name: str, factor: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{format_number(factor * value)} {name}"


_rate, _seconds, _milliseconds = _unit("samples/s"), _unit("s"), _unit("ms", 1000.0)
_updates = "{:,.0f} updates".format


def _between(write: Callable[[float], str], low: float, high: float) -> str:
    """Write a range, its unit once: `"12.4 to 12.6 ms"`."""
    first, last = write(low) if low else "0", write(high)
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def what_if(record: object) -> WhatIf | None:
    """Look up the quantities of a record at each batch size; None for a record without a fit."""
    match record:
        case TrainingProfile():
            return _of_training(record)
        case InferenceProfile():
            return _of_inference(record)
        case MaxBatchSizeResult():
            failed = {p.batch_size for p in record.probes if p.outcome == "out_of_memory"}
            memory = _memory(record.memory_bytes, record.fit, record.limit_bytes, failed)
            return _what_if("Batch size", record.max_batch_size, [memory])
        case Recommendation():
            return _of_recommendation(record)
        case Study():
            return _of_study(record)
    return None


def _of_training(profile: TrainingProfile) -> WhatIf | None:
    points, line = profile.measured, None
    # No line is fitted to steps that accumulate, as in the figure of the profile.
    if profile.has_fit and not any(point.accumulated for point in points):
        line = profile.step_time.line
    times = {
        p.micro_batch_size: (p.batch_size, p.step_time_s or math.nan, p.step_time_interval_s)
        for p in points
    }
    failed = {p.micro_batch_size for p in profile.points if p.outcome == "out_of_memory"}
    memory = _memory(profile.memory_bytes, profile.memory_fit, profile.memory_limit_bytes, failed)
    answer = profile.choice.micro_batch_size if points else 1
    known = [*_times("Time of a step", times, line, failed), memory]
    return _what_if("Micro-batch size", answer, known)


def _of_inference(profile: InferenceProfile) -> WhatIf | None:
    timings, line = profile.answering, None
    if not timings:
        return None
    with contextlib.suppress(ValueError):  # Too little was timed.
        line = profile.latency.line
    first = path, policy = profile.series[0]
    failed = {
        t.batch_size
        for t in profile.timings
        if (t.call_path, t.dtype_policy) == first and t.outcome == "out_of_memory"
    }
    times = {
        t.batch_size: (t.batch_size, t.batch_time_s or math.nan, t.batch_time_interval_s)
        for t in timings
    }
    bounds = {t.batch_size: t.latency_bound(profile.quantile).value for t in timings if not t.bulk}
    basis = "an upper bound with 95 % confidence"
    tails = {size: Reading(s, basis=basis) for size, s in bounds.items() if s is not None}
    probes = [m for m in profile.memory if m.dtype_policy == policy]
    peaks = {m.batch_size: m.peak_bytes for m in probes if m.peak_bytes is not None}
    refused = {m.batch_size for m in probes if m.outcome == "out_of_memory"}
    known = [
        *_times("Time of a batch", times, line, failed),
        Quantity(f"p{100 * profile.quantile:g} latency, at most", _milliseconds, tails),
        _memory(peaks, profile.memory_fit, profile.memory_limit_bytes, refused),
    ]
    answer = max(timings, key=lambda t: t.samples_per_second or 0.0).batch_size
    return _what_if("Batch size", answer, known, f"Calls by `{path}` under {policy}.")


def _of_recommendation(found: Recommendation) -> WhatIf | None:
    answer, rows, memory = found.batch_size, found.decision.sizes, found.memory
    reached = [row.batch_size for row in rows if row.ended_by == TARGET]
    if answer is None or not reached:
        return None

    def reading(row: SizeOutlook, field: str) -> Reading:
        estimate: Estimate = getattr(row, field)
        found = Reading(estimate.value, estimate.interval)
        if field == "samples_per_second" or row.ended_by == TARGET:
            return found
        if row.ended_by is not None:
            cut_short = row.ended_by == CUT_SHORT
            why = "was cut short before the target" if cut_short else "diverged or failed"
            return Reading(basis=f"training {why}")
        if reached[0] <= row.batch_size <= reached[-1]:
            return found._replace(basis="forecast between trained sizes; not trained")
        basis = f"{_beyond('trained', reached)}; not trained"
        return found._replace(basis=basis, extrapolated=True)

    relative = f"Time to the target, relative to batch size {answer:,}"
    known = [
        Quantity(name, write, {row.batch_size: reading(row, field) for row in rows})
        for field, name, write in (
            ("relative_time", relative, format_number),
            ("seconds", "Time to the target", _seconds),
            ("updates", "Updates to the target", _updates),
            ("samples_per_second", "Throughput", _rate),
        )
    ]
    if memory is not None:
        # A batch needs the memory of its micro-batch.
        part = _memory(memory.memory_bytes, memory.fit, memory.limit_bytes, ())
        of = {row.batch_size: part.at(row.micro_batch_size) for row in rows}
        known.append(Quantity("Peak memory of its micro-batch", memory_text, of))
    return _what_if("Batch size", answer, known, fitted=True)


def _of_study(study: Study) -> WhatIf | None:
    trials, fitted = best_of_size(study), False
    rates = {
        b: _plotted(throughput_estimate(t) if t.status == "completed" else None, outcome(t))
        for b, t in trials.items()
    }
    known = [Quantity("Throughput", _rate, rates)]
    single = not spreads(study.trials).intervals
    ranges = "quartiles of timing windows" if single else "95 % intervals over executions"
    notes = [best_of_size_note(study)]
    with contextlib.suppress(ValueError):  # It has no noise scale.
        info, fitted = goodput_info(study), True
        points = {size: Reading(basis=words) for size, words in info.incomplete_sizes}
        points |= {p.batch_size: _plotted(p.goodput) for p in info.points}
        known.append(Quantity("Goodput", _rate, points))
        base, scale = info.points[0].batch_size, format_number(info.noise_scale)
        notes.append(
            f"Goodput counts examples of batch size {base:,}, by a noise scale of {scale} "
            "examples, whose 95 % interval gives its range."
        )
    with contextlib.suppress(ValueError):  # It has no target.
        target = time_to_target_info(study)
        for field, name, write in (
            ("seconds", "Training time", _seconds),
            ("updates", "Updates", _updates),
        ):
            costs = {size: Reading(basis=words) for size, words in target.incomplete_sizes}
            for point in target.points:
                cost: PlottedEstimate = getattr(point, field)
                spent = f"not met in {write(cost.value)}"
                costs[point.batch_size] = _plotted(cost if point.met else None, spent)
            known.append(Quantity(f"{name} to {target.target_text}", write, costs))
        if target.fit is not None and target.fit.holds is not False:
            line, sure = target.fit.line, target.fit.holds is True

            def fit(size: float) -> Reading:
                return Reading(line(1 / size), line.interval_at(1 / size))

            known[-1] = known[-1]._replace(fit=fit, extrapolates=sure)
    decided = study.decide().trial
    answer = decided.batch_size if decided else min(trials)
    return _what_if("Batch size", answer, known, *notes, fitted=fitted, ranges=ranges)


def _plotted(estimate: PlottedEstimate | None, missing: str = "") -> Reading:
    if estimate is None:
        return Reading(basis=missing)
    return Reading(estimate.value, estimate.bar and Interval(*estimate.bar))


def _times(
    name: str,
    times: Mapping[int, tuple[int, float, Interval | None]],
    line: Line | None,
    failed: Collection[int],
) -> list[Quantity]:
    """Return throughput and time from the examples, the seconds and their interval at each size."""

    def rate(examples: int, time_s: float, span: Interval | None) -> Reading:
        if span is None or span.low <= 0:
            return Reading(examples / time_s if span is None else None)
        return Reading(examples / time_s, Interval(examples / span.high, examples / span.low))

    lacks = {size: Reading(basis=_OUT_OF_MEMORY) for size in failed}
    rates = lacks | {size: rate(*one) for size, one in times.items()}
    steps = lacks | {size: Reading(*one[1:]) for size, one in times.items()}
    known = [Quantity("Throughput", _rate, rates), Quantity(name, _milliseconds, steps)]
    if line is None or line.departure.holds is False or line.slope_interval.low <= 0:
        return known
    least = min(failed, default=None)
    fits = (
        lambda b: rate(b, line(b), line.interval_at(b)),
        lambda b: Reading(line(b), line.interval_at(b)),
    )
    return [
        one._replace(fit=fit, extrapolates=line.departure.holds is True, out_of_memory_at=least)
        for one, fit in zip(known, fits, strict=True)
    ]


def _memory(
    memory_bytes: Mapping[int, int],
    fit: MemoryFit | None,
    limit_bytes: int | None,
    failed: Collection[int],
) -> Quantity:
    tried = {size: Reading(basis=_OUT_OF_MEMORY) for size in failed}
    tried |= {size: Reading(peak) for size, peak in memory_bytes.items()}
    # Beyond the sizes that ran out of memory, it is worth knowing how much they lack.
    known = Quantity("Peak memory", memory_text, tried, limit_bytes=limit_bytes)
    if fit is None:
        return known
    # Two sizes do not show that memory grows as a line.
    return known._replace(
        fit=lambda size: Reading(fit.predict(size), fit.interval_at(size)),
        extrapolates=fit.degrees_of_freedom > 0,
    )


def _beyond(kind: str, sizes: Sequence[int]) -> str:
    return f"extrapolated beyond the {kind} sizes, {sizes[0]:,} to {sizes[-1]:,}"


def _what_if(
    axis: str,
    answer: int,
    known: Sequence[Quantity],
    *notes: str,
    fitted: bool = False,
    ranges: str = "95 % intervals",
) -> WhatIf | None:
    """Read every quantity at the sizes that were tried, and at powers of two beside them."""
    known = [one for one in known if any(r.value is not None for r in one.tried.values())]
    tried = sorted({size for one in known for size in one.tried})
    if len(tried) < 2 or not (fitted or any(one.fit for one in known)):
        return None
    # A fit that holds is extrapolated so far.
    most = (4 if any(one.extrapolates for one in known) else 1) * tried[-1]
    powers = [1 << k for k in range(most.bit_length()) if tried[0] <= 1 << k]
    powers = [p for p in powers if any(one.at(p).value is not None for one in known)]
    # Nobody moves through more than 40 sizes: of more, every second or third one is left out.
    sizes = sorted({*powers, *tried[:: math.ceil(len(tried) / 40)]})
    start = min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / answer)))
    quantities: list[Quantity] = []
    for one in known:
        readings = tuple(one.at(size) for size in sizes)
        if any(r.value is not None for r in readings):  # Else only at sizes that are left out.
            marks, span = _chart(sizes, readings, one.write)
            quantities.append(one._replace(readings=readings, marks=marks, span=span))
    written = tuple(filter(None, (f"Ranges are {ranges}.", *notes)))
    found = WhatIf(axis, tuple(sizes), start, tuple(quantities), written)
    return found if quantities else None


def _chart(
    sizes: Sequence[int], readings: Sequence[Reading], write: Callable[[float], str]
) -> tuple[tuple[Mark, ...], str]:
    """Place readings in a chart, and write what it spans."""
    values = [reading.value for reading in readings if reading.value is not None]
    # Intervals of what is extrapolated may be so wide that nothing else could be seen.
    spans = [r.interval for r in readings if r.interval is not None and not r.extrapolated]
    top = max([*values, *(span.high for span in spans)])
    # Values that span more get a logarithmic axis; the others start at 0.
    bottom = min(values) if top > 30 * min(values) else 0.0

    def x(size: int) -> float:
        share = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])
        return round(_MARGIN + (WIDTH - 2 * _MARGIN) * share, 1)

    def y(value: float) -> float:
        share = math.log(value / bottom) / math.log(top / bottom) if bottom else value / top
        return round(_MARGIN + (HEIGHT - 2 * _MARGIN) * (1 - min(1.0, max(0.0, share))), 1)

    marks = []
    for size, (value, interval, _, extrapolated) in zip(sizes, readings, strict=True):
        ends = None if interval is None else (y(interval.low), y(interval.high))
        marks.append(Mark(x(size), None if value is None else y(value), ends, extrapolated))
    return tuple(marks), _between(write, bottom, top)
