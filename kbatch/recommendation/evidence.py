"""The evidence for a recommendation in words: its limits, and how certain it is."""

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import counted, listed, memory_text, percent, readable, setting
from kbatch.recommendation.choice import BatchDecision, UntestedSize, fastest_of_each
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, SizeCheck
from kbatch.recommendation.record import OTHER_SIZES, Recommendation

_MEANINGS = {
    MEMORY: "with more of it more examples would fit at once, and training would be faster.",
    SATURATION: "the device is nearly as fast as it gets{doubled}",
    NOISE: (
        "the device would run faster on larger batches, but waste more of their examples{doubled}"
    ),
    INPUT: (
        "the device waits for data, and a larger batch cannot change that. `kbatch input` tells "
        "what can."
    ),
}
_EPOCHS = (
    "the data are few, and each epoch takes {epoch} to start and end, whatever the batch. A "
    "`tf.data.Dataset` with `.repeat()`, and `steps_per_epoch` in `fit`, makes epochs longer."
)


def binding_line(recommendation: Recommendation) -> list[str]:
    """Describe which limit binds and what that means; nothing where nothing was timed."""
    binding = recommendation.binding
    if not binding:
        return []
    if len(binding) == 1:
        name = binding[0]
        meaning = _meaning(recommendation, name)
        subject = f"The {name}" if name == INPUT else name.capitalize()
        return [f"{subject} binds: {meaning}"]
    return [
        f"Which limit binds cannot be told: {listed(binding)} lie too near each other for what was "
        "measured."
    ]


def _meaning(recommendation: Recommendation, name: str) -> str:
    for time in recommendation.fit_times[-1:] if name == INPUT else ():
        if time.epoch_share_s > time.wait_s:
            return _EPOCHS.format(epoch=_ms(time.epoch_s))
    return _MEANINGS[name].format(doubled=_doubled(recommendation))


def _doubled(recommendation: Recommendation) -> str:
    """Describe what twice the batch would gain and lose, where it was timed."""
    size, noise = recommendation.batch_size, recommendation.critical.value
    ways = {way.batch_size: way for way in fastest_of_each(recommendation.updates)}
    if size is None or noise is None or not {size, 2 * size} <= ways.keys():
        return "."
    faster = ways[2 * size].samples_per_second / ways[size].samples_per_second
    worth = (noise + size) / (noise + 2 * size)
    if faster * worth > 1:
        return "."  # By these two alone twice the batch would win.
    return (
        f": at {2 * size:,} it would make {readable(faster)} times the samples/s, each worth "
        f"{readable(worth)} of one at {size:,}."
    )


def limit_lines(recommendation: Recommendation) -> list[str]:
    """Describe what each limit allows, or why that cannot be told."""
    return [
        memory_line(recommendation),
        saturation_line(recommendation),
        noise_line(recommendation),
        input_line(recommendation),
    ]


def memory_line(recommendation: Recommendation) -> str:
    """Describe how many examples fit at once."""
    found = recommendation.memory
    if found is None:
        return _cannot_tell(recommendation, MEMORY)
    least = "" if recommendation.memory_ends else "at least "
    peak = f"{memory_text(found.peak_memory_bytes)} of {memory_text(found.limit_bytes)}"
    # The search's own argument is none of a recommendation's.
    reason = found.reason.replace("`max_batch_size`", "the largest batch size that was tried")
    return (
        f"Memory allows {least}{counted(found.max_batch_size, 'example')} at once, {peak} "
        f"({reason})."
    )


def saturation_line(recommendation: Recommendation) -> str:
    """Describe where the device saturates."""
    found = recommendation.saturation
    if found is None or recommendation.step_time is None:
        if recommendation.updates:
            return (
                "Hardware saturation: cannot tell, because it takes two sizes that go through "
                "whole, and three rounds of them."
            )
        return _cannot_tell(recommendation, SATURATION)
    rates = [u for u in recommendation.updates if not u.accumulated]
    fastest = max(rates, key=lambda update: update.samples_per_second)
    peak = f"{readable(fastest.samples_per_second)} samples/s at {fastest.batch_size:,}"
    if found.batch_size is None:
        return (
            "Saturation: cannot tell, because the time of a step does not grow with its examples "
            f"as far as was measured; {peak} was the fastest."
        )
    if found.extrapolated and found.batch_size > rates[-1].batch_size:
        return (
            f"The device is not saturated by {rates[-1].batch_size:,} examples at once, the most "
            f"that were timed: 90 % of its peak would need about {readable(found.batch_size, 2)}"
            f"{_within(found.interval)}. Fastest were {peak}."
        )
    return (
        f"The device saturates at {counted(found.batch_size, 'example')} at once"
        f"{_within(found.interval)}: 90 % of its peak. Fastest were {peak}."
    )


def noise_line(recommendation: Recommendation) -> str:
    """Describe from which batch size on examples are wasted."""
    noise, pilot = recommendation.noise_scale, recommendation.pilot
    if pilot is None:
        return _cannot_tell(recommendation, NOISE)
    if recommendation.decision.critical is not None:
        return _critical_line(recommendation)
    measured = (
        f"in a pilot of {counted(pilot.updates, 'update')} at batch size {pilot.batch_size:,}"
    )
    if recommendation.diverged and noise.value is None:
        return f"Gradient noise: cannot tell, because {diverged_text(pilot)}."
    if noise.value is None or noise.interval is None:
        least = f"; it is at least {readable(noise.at_least, 2)}" if noise.at_least else ""
        return (
            "Gradient noise: cannot tell, because the noise scale is unresolved: the mean gradient "
            f"was lost in its noise {measured}{least}."
        )
    line = (
        f"Beyond {readable(noise.value, 2)} examples{_within(noise.interval)}, the gradient noise "
        "scale, more than half of a batch's examples are wasted"
    )
    size = recommendation.batch_size
    if size is None:
        return f"{line}; measured {measured}."
    share = noise.value / (noise.value + size)
    return (
        f"{line}; at batch size {size:,} an example counts {percent(share)} of what it would in "
        f"the smallest batch. Measured {measured}."
    )


def diverged_text(pilot: PilotRecord) -> str:
    """Describe what to look at where the loss of a pilot became NaN."""
    return (
        f"the pilot's loss became NaN within {counted(pilot.updates, 'update')}: look for values "
        "in the data that are not finite, or give the model a smaller learning rate"
    )


def _critical_line(recommendation: Recommendation) -> str:
    """Describe it by the sizes that were trained, with the noise scale beside it."""
    critical, noise = recommendation.critical, recommendation.noise_scale
    line = (
        f"Beyond {readable(critical.value or 0.0, 2)} examples{_within(critical.interval)} more "
        "than half of a batch's examples are wasted, by the updates that the trained sizes needed"
    )
    if noise.value is None:
        return f"{line}. The gradient noise scale of the pilot is unresolved."
    return (
        f"{line}. The gradient noise scale of the pilot is {readable(noise.value, 2)}"
        f"{_within(noise.interval)}; the two agree where the learning rate is the best one at each "
        "size."
    )


def input_line(recommendation: Recommendation) -> str:
    """Describe what the input pipeline delivers, and what `fit` takes beside the train step."""
    found = recommendation.pipeline
    rate = None if found is None else found.pipeline.samples_per_second
    if found is None or rate is None:
        of_fit = [_fit_sentence(time) for time in recommendation.fit_times[-1:]]
        return of_fit[0] if of_fit else _cannot_tell(recommendation, INPUT)
    line = (
        f"The input pipeline delivers {readable(rate.value, 2)} samples/s{_within(rate.interval)} "
        f"in batches of {found.batch_size:,}"
    )
    sentences = [_fit_sentence(time) for time in recommendation.fit_times[-1:]]
    bounds = found.rate_bounds
    if bounds is not None and not found.is_even:
        span = f"{readable(bounds.low, 2)} to {readable(bounds.high, 2)}"
        sentences.insert(0, f"A long reading gave {span} samples/s, with its pauses.")
    return " ".join([f"{line}.", *sentences])


def _fit_sentence(time: FitTime) -> str:
    parts = [
        f"{_ms(time.step_s)} for the train step",
        f"{_ms(time.wait_s)} for data to come and Keras's own work",
    ]
    if time.epoch_batches:
        parts.append(
            f"{_ms(time.epoch_share_s)} as its share of starting and ending an epoch "
            f"({_ms(time.epoch_s)} for {time.epoch_batches:,} batches)"
        )
    return f"In `fit` an update of {time.batch_size:,} takes {listed(parts)}."


def _ms(seconds: float) -> str:
    return f"{readable(1000 * seconds, 2)} ms"


def _cannot_tell(recommendation: Recommendation, limit: str) -> str:
    reason = recommendation.unknown.get(limit, "it was not measured")
    return f"{limit.capitalize()}: cannot tell, because {reason}."


def _within(interval: Interval | None) -> str:
    return f" ({readable(interval.low, 2)} to {readable(interval.high, 2)})" if interval else ""


_SGD = "SGD"
_ENDS = {
    "progress": "when the later half of it had brought little",
    "budget": "with its budget, while it still came on",
    "epochs": "after the epochs that it was given",
    "diverged": "when its loss became NaN",
}


def certainty_lines(recommendation: Recommendation) -> list[str]:
    """Describe how sure the answer is, a line an aspect."""
    return [
        *_trained_lines(recommendation),
        *_untested_line(recommendation),
        *_grid_line(recommendation),
        *_learning_rate_line(recommendation),
        *_pilot_line(recommendation),
        *_dispute_line(recommendation),
        *_check_line(recommendation),
        *(f"Note: {note}" for note in recommendation.notes),
    ]


def untested_text(untested: UntestedSize, decision: BatchDecision) -> str:
    """Say how much faster a size may be that did not reach the loss, and what would settle it."""
    made = {row.batch_size: row.ended_by for row in decision.sizes}
    why = "cut short" if made.get(untested.batch_size) else "not trained"
    text = (
        f"Batch size {untested.batch_size:,} was {why} and may be up to "
        f"{readable(untested.most_speedup, 2)} times faster "
        f"({readable(untested.speedup, 2)} times expected)"
    )
    if untested.budget_s is None:
        return f"{text}."
    return f"{text}: give `budget_s={setting(untested.budget_s)}` to train it to the loss."


def _trained_lines(recommendation: Recommendation) -> list[str]:
    pilot = recommendation.pilot
    if pilot is None or recommendation.decision.missing is not None:
        return []
    why = recommendation.unknown.get(OTHER_SIZES)
    ended = f" No further one: {why}." if why else ""
    if not recommendation.checks:
        return [f"No size but the pilot's was trained.{ended}"]
    loss = "held-out" if pilot.has_held_out else "training"
    runs = {pilot.batch_size: f"{pilot.updates_to_target:,} updates at {pilot.batch_size:,}"}
    runs |= {check.batch_size: _run(check) for check in recommendation.checks}
    return [
        f"Trained from the start to the pilot's {loss} loss, {readable(pilot.target or 0.0)}: "
        f"{listed(runs[size] for size in sorted(runs))}. One run a size: another seed may need a "
        f"tenth more or less, so the table weighs each with its neighbours.{ended}"
    ]


def _run(check: SizeCheck) -> str:
    size = f"{check.batch_size:,}"
    if check.reached:
        return f"{check.updates:,} updates at {size}"
    if check.ended_by == "diverged":
        return f"not at {size}, where the loss became NaN"
    if check.ended_by == "failed":
        return f"not at {size}, which failed"
    return f"not in {check.updates:,} updates at {size}"


def _untested_line(recommendation: Recommendation) -> list[str]:
    decision = recommendation.decision
    if decision.older or decision.batch_size is None:
        return []
    if not decision.untested:
        if len(decision.sizes) == 1:
            return []
        return ["No other size that was timed is likely to be more than 5 % faster."]
    return [untested_text(untested, decision) for untested in decision.untested[1:]]


def _grid_line(recommendation: Recommendation) -> list[str]:
    sizes = [update.batch_size for update in recommendation.updates]
    size = recommendation.batch_size
    if size is None or len(set(sizes)) < 2 or size not in (min(sizes), max(sizes)):
        return []
    end = "smallest" if size == min(sizes) else "largest"
    return [f"It is the {end} size that was timed: one beyond it may be better."]


def _learning_rate_line(recommendation: Recommendation) -> list[str]:
    size, base = recommendation.batch_size, recommendation.base_batch_size
    rule = recommendation.learning_rate_rule
    if size is None:
        return []
    ratio = recommendation.decision.learning_rate_ratio or 1.0
    own = recommendation.base_learning_rate
    value = "" if own is None or recommendation.scheduled else f" {setting(own)}"
    line = f"The model's learning rate{value} is taken to suit batch size {base:,}"
    if rule is None or ratio == 1:
        return [f"{line}, and is left as it is."]
    how = {"linear": "in proportion to it", "sqrt": "with its square root"}[rule]
    words = f"{'grows' if ratio > 1 else 'shrinks'} {how}"
    return [f"{line}; for {recommendation.optimizer} it {words} ({setting(ratio)} times)."]


def _pilot_line(recommendation: Recommendation) -> list[str]:
    pilot = recommendation.pilot
    if pilot is None:
        return []
    if recommendation.diverged:
        return [f"The pilot ended {_ENDS['diverged']}: all of this is of what came before."]
    return [
        f"The pilot ended {_ENDS[pilot.ended_by]}. Its noise scale is that of the late half of the "
        f"{pilot.useful_updates:,} updates in which its loss went 98 % of its way. The noise scale "
        "grows in training: a much longer one may gain by a larger batch towards its end."
    ]


def _dispute_line(recommendation: Recommendation) -> list[str]:
    if recommendation.optimizer == _SGD or recommendation.pilot is None:
        return []
    return [
        f"The noise scale is derived for SGD. Whether it tells a useful batch size under "
        f"{recommendation.optimizer} is disputed: Merrill et al. (2025, arXiv:2505.23971) train on "
        "from one checkpoint at several batch sizes instead."
    ]


def _check_line(recommendation: Recommendation) -> list[str]:
    size = recommendation.batch_size
    sizes = sorted({update.batch_size for update in recommendation.updates} | {size or 0} - {0})
    if size is None or len(sizes) < 2:
        return []
    place = sizes.index(size)
    near = [str(near) for near in sizes[max(0, place - 1) : place + 2]]
    return [
        f"One short run a size decided. To check it, train at {listed(near)} with "
        "`kbatch.BatchSizeTuner`."
    ]
