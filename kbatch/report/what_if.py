"""What another batch size would do: the quantities of a record at every size.

A measured size has its measured value. Other sizes have the value of the record's own fit:
between the measured sizes, and beyond them only where the measurements show that the fit holds.
Values beyond are marked as extrapolated. A record without a fit has no slider, only its table.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.analysis.line_fit import Line
from kbatch.document.numbers import format_number, memory_text
from kbatch.inference.profile import InferenceProfile
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.search import MemoryFit
from kbatch.recommendation.choice import CUT_SHORT, DIVERGED, TARGET
from kbatch.recommendation.record import Recommendation
from kbatch.study.conditions import PlottedEstimate, spreads, throughput_estimate
from kbatch.study.figures.common import best_of_size, best_of_size_note
from kbatch.study.figures.goodput import goodput_info
from kbatch.study.figures.time_to_target import time_to_target_info
from kbatch.study.names import outcome
from kbatch.study.study import Study
from kbatch.throughput.record import TrainingProfile

MEASURED, OUT_OF_MEMORY = "measured", "ran out of memory"
# A fit that holds is extrapolated up to this many times the largest size.
_BEYOND = 4
# Nobody moves through more sizes than these: of more, every second or third one is left out.
_MOST_SIZES = 40
WIDTH, HEIGHT, _MARGIN = 240, 72, 5
# Values that span more than this factor get a logarithmic axis; the others start at 0.
_WIDE = 30


def _unit(name: str, factor: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{format_number(factor * value)} {name}"


_rate, _seconds, _milliseconds = _unit("samples/s"), _unit("s"), _unit("ms", 1000.0)
_updates = "{:,.0f} updates".format


def _between(write: Callable[[float], str], low: float, high: float) -> str:
    """Write a range, its unit once: `"12.4 to 12.6 ms"`."""
    first, last = write(low) if low else "0", write(high)
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


class Reading(NamedTuple):
    """A quantity at one batch size."""

    value: float | None
    interval: Interval | None  # None where it is not known.
    basis: str  # Where the value comes from, or why there is none.
    extrapolated: bool = False


class Quantity(NamedTuple):
    """A quantity at every size."""

    name: str
    write: Callable[[float], str]  # Writes a value with its unit.
    readings: tuple[Reading, ...]  # One a size.

    def texts(self, index: int) -> tuple[str, str, str]:
        """Write value, interval and basis at a size: `"12.5 ms"`, `"12.4 to 12.6 ms"`, ..."""
        value, interval, basis, _ = self.readings[index]
        between = "" if interval is None else _between(self.write, interval.low, interval.high)
        return "n/a" if value is None else self.write(value), between, basis


class Mark(NamedTuple):
    """A reading in a chart."""

    x: float
    y: float | None
    ends: tuple[float, float] | None  # Of its interval.
    extrapolated: bool


class WhatIf(NamedTuple):
    """The quantities of a record over its batch sizes."""

    axis: str  # What the sizes are, such as `"Micro-batch size"`.
    sizes: tuple[int, ...]  # In examples, ascending.
    start: int  # Index of the size that the record answers, or of the nearest one.
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...]

    @property
    def charts(self) -> tuple["Chart", ...]:
        """The picture of each quantity."""
        return tuple(_chart(self.sizes, quantity) for quantity in self.quantities)

    @property
    def positions(self) -> list[dict[str, object]]:
        """What the page shows at each size: it looks up, and computes nothing."""
        found, charts = [], self.charts
        for i, size in enumerate(self.sizes):
            texts = [quantity.texts(i) for quantity in self.quantities]
            words = [
                f"{one.name}: {value}{f' ({between})' if between else ''}, {basis}."
                for one, (value, between, basis) in zip(self.quantities, texts, strict=True)
            ]
            places = [chart.marks[i][:2] for chart in charts]
            sentence = " ".join((f"{size:,}.", *words))
            found.append({"size": f"{size:,}", "words": sentence, "at": places, "texts": texts})
        return found


class _Evidence(NamedTuple):
    """What a record knows of a quantity."""

    name: str
    write: Callable[[float], str]
    tried: Mapping[int, Reading]  # What was found at each size that was tried.
    # The value and its interval at other sizes.
    fit: Callable[[int], tuple[float, Interval | None]] | None = None
    extrapolates: bool = False  # Whether the fit answers beyond the measured sizes.
    limit_bytes: int | None = None


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
            return _assemble("Batch size", record.max_batch_size, [memory])
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
    evidence = [*_times("Time of a step", times, line, failed), memory]
    return _assemble("Micro-batch size", answer, evidence)


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
    tails = {size: Reading(s, None, basis) for size, s in bounds.items() if s is not None}
    probes = [m for m in profile.memory if m.dtype_policy == policy]
    known = {m.batch_size: m.peak_bytes for m in probes if m.peak_bytes is not None}
    refused = {m.batch_size for m in probes if m.outcome == "out_of_memory"}
    evidence = [
        *_times("Time of a batch", times, line, failed),
        _Evidence(f"p{100 * profile.quantile:g} latency, at most", _milliseconds, tails),
        _memory(known, profile.memory_fit, profile.memory_limit_bytes, refused),
    ]
    answer = max(timings, key=lambda t: t.samples_per_second or 0.0).batch_size
    return _assemble("Batch size", answer, evidence, f"Calls by `{path}` under {policy}.")


def _of_recommendation(found: Recommendation) -> WhatIf | None:
    answer, rows, memory = found.batch_size, found.decision.sizes, found.memory
    reached = [row.batch_size for row in rows if row.ended_by == TARGET]
    if answer is None or not reached:
        return None
    lacks = {
        CUT_SHORT: "training was cut short before the target",
        DIVERGED: "training diverged or failed",
    }
    forecast = "forecast between trained sizes; not trained"
    evidence = []
    for field, name, write in (
        ("relative_time", f"Time to the target, relative to batch size {answer:,}", format_number),
        ("seconds", "Time to the target", _seconds),
        ("updates", "Updates to the target", _updates),
        ("samples_per_second", "Throughput", _rate),
    ):
        readings = {}
        for row in rows:
            size, one = row.batch_size, getattr(row, field)
            if field == "samples_per_second" or row.ended_by == TARGET:
                readings[size] = Reading(one.value, one.interval, MEASURED)
            elif row.ended_by in lacks:
                readings[size] = Reading(None, None, lacks[row.ended_by])
            else:
                beyond = not reached[0] <= size <= reached[-1]
                basis = f"{_beyond('trained', reached)}; not trained" if beyond else forecast
                readings[size] = Reading(one.value, one.interval, basis, beyond)
        evidence.append(_Evidence(name, write, readings))
    if memory is not None:
        # A batch needs the memory of its micro-batch.
        part = _memory(memory.memory_bytes, memory.fit, memory.limit_bytes, ())
        of = {row.batch_size: _read(part, row.micro_batch_size) for row in rows}
        evidence.append(_Evidence("Peak memory of its micro-batch", memory_text, of))
    return _assemble("Batch size", answer, evidence, fitted=True)


def _of_study(study: Study) -> WhatIf | None:
    trials, fitted = best_of_size(study), False
    known = {
        b: throughput_estimate(t) if t.status == "completed" else None for b, t in trials.items()
    }
    rates = {b: _of_plotted(one, outcome(trials[b])) for b, one in known.items()}
    evidence = [_Evidence("Throughput", _rate, rates)]
    single = not spreads(study.trials).intervals
    ranges = "quartiles of timing windows" if single else "95 % intervals over executions"
    notes = [best_of_size_note(study)]
    with contextlib.suppress(ValueError):  # It has no noise scale.
        info, fitted = goodput_info(study), True
        points = {size: Reading(None, None, words) for size, words in info.incomplete_sizes}
        points |= {p.batch_size: _of_plotted(p.goodput) for p in info.points}
        evidence.append(_Evidence("Goodput", _rate, points))
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
            costs = {size: Reading(None, None, words) for size, words in target.incomplete_sizes}
            for point in target.points:
                cost = getattr(point, field)
                costs[point.batch_size] = (
                    _of_plotted(cost)
                    if point.met
                    else Reading(None, None, f"not met in {write(cost.value)}")
                )
            evidence.append(_Evidence(f"{name} to {target.target_text}", write, costs))
        if target.fit is not None and target.fit.holds is not False:
            line, sure = target.fit.line, target.fit.holds is True
            evidence[-1] = evidence[-1]._replace(
                fit=lambda size: (line(1 / size), line.interval_at(1 / size)), extrapolates=sure
            )
    decided = study.decide().trial
    answer = decided.batch_size if decided else min(trials)
    return _assemble("Batch size", answer, evidence, *notes, fitted=fitted, ranges=ranges)


def _assemble(
    axis: str,
    answer: int,
    evidence: Sequence[_Evidence],
    *notes: str,
    fitted: bool = False,
    ranges: str = "95 % intervals",
) -> WhatIf | None:
    """Read every quantity at the sizes that were tried, and at powers of two beside them."""
    evidence = [one for one in evidence if any(r.value is not None for r in one.tried.values())]
    tried = sorted({size for one in evidence for size in one.tried})
    if not (fitted or any(one.fit for one in evidence)) or len(tried) < 2:
        return None
    most = (_BEYOND if any(one.extrapolates for one in evidence) else 1) * tried[-1]
    powers = [1 << k for k in range(most.bit_length()) if tried[0] <= 1 << k]
    known = {p for p in powers if any(_read(one, p).value is not None for one in evidence)}
    sizes = sorted(known.union(tried[:: math.ceil(len(tried) / _MOST_SIZES)]))
    if len(sizes) < 2:
        return None
    start = min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / answer)))
    quantities = [
        Quantity(one.name, one.write, tuple(_read(one, size) for size in sizes)) for one in evidence
    ]
    # It may be known at sizes alone that are left out.
    quantities = [one for one in quantities if any(r.value is not None for r in one.readings)]
    if not quantities:
        return None
    written = filter(None, (f"Ranges are {ranges}.", *notes))
    return WhatIf(axis, tuple(sizes), start, tuple(quantities), tuple(written))


def _read(known: _Evidence, size: int) -> Reading:
    """Return what was found at a size, else what the fit has there."""
    found, limit = known.tried.get(size) or _read_fit(known, size), known.limit_bytes
    value, interval, basis, _ = found
    if value is None or not 0 < value < math.inf:
        return found._replace(value=None, interval=None)
    if interval is not None and not 0 < interval.low < interval.high < math.inf:
        found = found._replace(interval=None)  # That of a size compared with itself has no width.
    if limit is not None and value > limit:
        return found._replace(basis=f"{basis}; more than the limit of {memory_text(limit)}")
    return found


def _read_fit(known: _Evidence, size: int) -> Reading:
    measured = sorted(b for b, reading in known.tried.items() if reading.value is not None)
    inside = bool(measured) and measured[0] <= size <= measured[-1]
    if known.fit is None or not measured or not (inside or known.extrapolates):
        return Reading(None, None, "not measured")
    failed = [b for b, reading in known.tried.items() if reading.basis == OUT_OF_MEMORY]
    # Memory itself is worth knowing beyond them.
    if failed and size > min(failed) and not inside and known.write is not memory_text:
        return Reading(None, None, f"not measured: {min(failed):,} {OUT_OF_MEMORY}")
    value, interval = known.fit(size)
    if not value > 0 or (interval is not None and not interval.low > 0):
        return Reading(None, None, "not measured; the fit is not certain enough here")
    basis = "from the fit, between measured sizes" if inside else _beyond("measured", measured)
    return Reading(value, interval, basis, not inside)


def _times(
    name: str,
    times: Mapping[int, tuple[int, float, Interval | None]],
    line: Line | None,
    failed: Iterable[int],
) -> list[_Evidence]:
    """Return throughput and time, with the line as their fit unless the data depart from it."""

    def as_rate(
        examples: int, time_s: float, span: Interval | None
    ) -> tuple[float, Interval | None]:
        if span is None or span.low <= 0:
            return (examples / time_s if span is None else math.nan), None
        return examples / time_s, Interval(examples / span.high, examples / span.low)

    lacks = {size: Reading(None, None, OUT_OF_MEMORY) for size in failed}
    rates = lacks | {size: Reading(*as_rate(*one), MEASURED) for size, one in times.items()}
    of = lacks | {size: Reading(*one[1:], MEASURED) for size, one in times.items()}
    found = [_Evidence("Throughput", _rate, rates), _Evidence(name, _milliseconds, of)]
    if line is None or line.departure.holds is False or line.slope_interval.low <= 0:
        return found
    fits = (
        lambda size: as_rate(size, line(size), line.interval_at(size)),
        lambda size: (line(size), line.interval_at(size)),
    )
    sure = line.departure.holds is True
    return [o._replace(fit=fit, extrapolates=sure) for o, fit in zip(found, fits, strict=True)]


def _memory(
    memory_bytes: Mapping[int, int],
    fit: MemoryFit | None,
    limit_bytes: int | None,
    failed: Collection[int],
) -> _Evidence:
    tried = {size: Reading(None, None, OUT_OF_MEMORY) for size in failed}
    tried |= {size: Reading(peak, None, MEASURED) for size, peak in memory_bytes.items()}
    known = _Evidence("Peak memory", memory_text, tried, limit_bytes=limit_bytes)
    if fit is None:
        return known
    # Two sizes do not show that memory grows as a line.
    return known._replace(
        fit=lambda size: (fit.predict(size), fit.interval_at(size)),
        extrapolates=fit.degrees_of_freedom > 0,
    )


def _of_plotted(estimate: PlottedEstimate | None, missing: str = "") -> Reading:
    if estimate is None:
        return Reading(None, None, missing)
    return Reading(estimate.value, estimate.bar and Interval(*estimate.bar), MEASURED)


def _beyond(kind: str, sizes: Sequence[int]) -> str:
    return f"extrapolated beyond the {kind} sizes, {sizes[0]:,} to {sizes[-1]:,}"


class Chart(NamedTuple):
    """A quantity over the batch size in a picture whose axis of sizes is logarithmic."""

    marks: tuple[Mark, ...]  # One a size.
    span: str  # From its lower to its upper edge.


def _chart(sizes: Sequence[int], quantity: Quantity) -> Chart:
    octaves = math.log2(sizes[-1] / sizes[0])
    known = [reading for reading in quantity.readings if reading.value is not None]
    values = [reading.value or 0.0 for reading in known]
    # Intervals of what is extrapolated may be so wide that nothing else could be seen.
    spans = [r.interval for r in known if r.interval is not None and not r.extrapolated]
    top = max([*values, *(span.high for span in spans)])
    bottom = min(values) if top > _WIDE * min(values) else 0.0

    def y(value: float) -> float:
        share = math.log(value / bottom) / math.log(top / bottom) if bottom else value / top
        return round(_MARGIN + (HEIGHT - 2 * _MARGIN) * (1 - min(1.0, max(0.0, share))), 1)

    marks = []
    for size, (value, interval, _, extrapolated) in zip(sizes, quantity.readings, strict=True):
        x = _MARGIN + (WIDTH - 2 * _MARGIN) * math.log2(size / sizes[0]) / octaves
        ends = None if interval is None else (y(interval.low), y(interval.high))
        marks.append(Mark(round(x, 1), None if value is None else y(value), ends, extrapolated))
    return Chart(tuple(marks), _between(quantity.write, bottom, top))
