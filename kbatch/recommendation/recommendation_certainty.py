"""How sure a recommendation is, in words: what was assumed, what is disputed, what to check."""

from kbatch.document.number_text import listed, readable, setting
from kbatch.recommendation.batch_decision import BatchDecision, UntestedSize
from kbatch.recommendation.recommendation_record import OTHER_SIZES, Recommendation
from kbatch.recommendation.size_check_record import SizeCheck

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
