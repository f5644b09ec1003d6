"""How sure a recommendation is, in words: what was assumed, what is disputed, what to check."""

from kbatch.analysis.batch_choice import BatchChoice
from kbatch.records.recommendation import OTHER_SIZES, Recommendation
from kbatch.records.size_check import SizeCheck
from kbatch.reporting.number_text import listed, percent, readable, setting

_LITTLE = 0.02
_SGD = "SGD"
_ENDS = {
    "progress": "when the later half of it had brought little",
    "budget": "with its budget, while it still came on",
    "epochs": "after the epochs that it was given",
    "diverged": "when its loss became NaN",
}


def certainty_lines(recommendation: Recommendation) -> list[str]:
    """Says how sure the answer is, a line an aspect."""
    return [
        *_trained_lines(recommendation),
        *_interval_line(recommendation),
        *_larger_line(recommendation),
        *_grid_line(recommendation),
        *_accumulation_line(recommendation),
        *_learning_rate_line(recommendation),
        *_pilot_line(recommendation),
        *_dispute_line(recommendation),
        *_check_line(recommendation),
        *(f"Note: {note}" for note in recommendation.notes),
    ]


def _trained_lines(recommendation: Recommendation) -> list[str]:
    pilot = recommendation.pilot
    if pilot is None:
        return []
    why = recommendation.unknown.get(OTHER_SIZES)
    ended = f" No further one: {why}." if why else ""
    if not recommendation.checks:
        none = "" if ended else " None of the others was likely to be more than 5 % faster."
        return [f"No size but the pilot's was trained.{ended}{none}"]
    loss = "held-out" if pilot.has_held_out else "training"
    runs = {pilot.batch_size: f"{pilot.updates_to_target:,} updates at {pilot.batch_size:,}"}
    runs |= {check.batch_size: _run(check) for check in recommendation.checks}
    return [
        f"Trained from the start to the pilot's {loss} loss, {readable(pilot.target or 0.0)}: "
        f"{listed(runs[size] for size in sorted(runs))}. One run a size: another seed may need a "
        f"tenth more or less.{ended}"
    ]


def _run(check: SizeCheck) -> str:
    size = f"{check.batch_size:,}"
    if check.reached:
        return f"{check.updates:,} updates at {size}"
    if check.ended_by == "diverged":
        return f"not at {size}, where the loss became NaN"
    return f"not in {check.updates:,} updates at {size}"


def _interval_line(recommendation: Recommendation) -> list[str]:
    choice = recommendation.choice
    if choice is None or choice.best is None:
        return []
    if len(recommendation.fastest) == 1:
        return ["No other size was timed."]
    if choice.most_lost is None:
        return [_tie_line(choice)]
    noise = recommendation.noise_scale
    if noise.value is None:
        bound = f" above {readable(noise.at_least, 2)}" if noise.at_least else ""
        return [
            f"The noise scale is not known: whatever it is{bound}, this size takes at most "
            f"{percent(choice.most_lost)} longer than the best one."
        ]
    if choice.smallest == choice.largest:
        return ["It is the best size at every noise scale in its interval."]
    return [
        f"At the ends of the noise scale's interval {choice.smallest:,} and {choice.largest:,} "
        f"would be best; this size takes at most {percent(choice.most_lost)} longer there."
    ]


def _tie_line(choice: BatchChoice) -> str:
    if choice.smallest == choice.largest:
        return "No other size is likely to come within 5 % of it."
    return (
        f"Sizes from {choice.smallest:,} to {choice.largest:,} may come within 5 % of the best. "
        "This is the smallest of those that are forecast within 2 % of it."
    )


def _larger_line(recommendation: Recommendation) -> list[str]:
    if not recommendation.trained.faster_untrained:
        return []
    return ["Larger sizes may be faster; they were not trained."]


def _grid_line(recommendation: Recommendation) -> list[str]:
    sizes = [update.batch_size for update in recommendation.updates]
    size = recommendation.batch_size
    if size is None or len(set(sizes)) < 2 or size not in (min(sizes), max(sizes)):
        return []
    end = "smallest" if size == min(sizes) else "largest"
    return [f"It is the {end} size that was timed: one beyond it may be better."]


def _accumulation_line(recommendation: Recommendation) -> list[str]:
    gain, choice = recommendation.accumulation_gain, recommendation.choice
    if choice is None or gain is None:
        return []
    if gain >= _LITTLE and choice.best is not None and not choice.best.accumulated:
        return []  # What gains is larger than all that were trained.
    if gain >= _LITTLE:
        return [
            f"Accumulation makes the way {percent(gain)} shorter on this device, as smaller parts "
            "of a batch run faster than the whole, or an update costs much."
        ]
    return [
        "Accumulation buys nothing on one device here: it runs at no more samples/s than the "
        "largest whole batch, and makes fewer updates of them. It pays where another reason, such "
        "as a published recipe, asks for a larger batch."
    ]


def _learning_rate_line(recommendation: Recommendation) -> list[str]:
    size, base = recommendation.batch_size, recommendation.base_batch_size
    rule = recommendation.learning_rate_rule
    if size is None:
        return []
    ratio = recommendation.learning_rate_ratio(size)
    own = recommendation.base_learning_rate
    value = "" if own is None or recommendation.scheduled else f" {setting(own)}"
    line = f"The model's learning rate{value} is taken to suit batch size {base:,}"
    if rule is None or size == base:
        return [f"{line}, and is left as it is."]
    how = {"linear": "in proportion to it", "sqrt": "with its square root"}[rule]
    words = f"{'grows' if ratio > 1 else 'shrinks'} {how}"
    noise = recommendation.noise_scale
    reach = noise.at_least if noise.value is None else noise.value
    capped = recommendation.forecast is None and size > max(base, round(reach or 0))
    if ratio == 1:
        return [f"{line}, and is left as it is: it goes no further than the noise scale."]
    line = f"{line}; for {recommendation.optimizer} it {words} ({setting(ratio)} times)"
    if capped:
        return [f"{line}, and no further than the noise scale."]
    return [f"{line}."]


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
    sizes = sorted({update.batch_size for update in recommendation.updates})
    if size is None or len(sizes) < 2:
        return []
    place = sizes.index(size)
    near = [str(near) for near in sizes[max(0, place - 1) : place + 2]]
    doubt = "The page is a model's"
    if any(run.batch_size == size for run in recommendation.trained.runs):
        if recommendation.forecast is not None:
            doubt = "One short run a size decided"
    else:
        doubt += "; nothing was trained at this size"
    return [f"{doubt}. To check it, train at {listed(near)} with `kbatch.BatchSizeTuner`."]
