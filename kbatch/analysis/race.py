"""A race of batch sizes: which execution comes next, from those that have ended.

All sizes train three times, a round with one seed for all. Then the data are judged at fixed
numbers of rounds, and what is worse than the leader by more than the tolerance leaves the race. It
ends when the fastest size that is certified to lie within the tolerance of the best is known, and
every faster one has left (Maron and Moore 1997, The racing algorithm, with paired differences).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.paired_runs import DEFAULT_CONFIDENCE, Candidate, Verdict, judge

LOOKS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)
# At so many looks in a row the validation set must be too small before the race gives up.
_LOOKS_TO_GIVE_UP = 2
# A certified size is taken unless so many times the executions show that no faster one will do.
_WORTH = 1.5


class RaceState(NamedTuple):
    """Where a race is."""

    following: tuple[int, ...]  # Candidates to execute once more, in order; empty at the end.
    verdict: Verdict | None  # Of the last look, None before the first.
    rounds: int  # Executions of each in the race at that look, 0 before the first.
    # "certain"; "certified": whether a faster size will do too would take long to find out, or for
    # ever; "examples": the validation set is too small for the tolerance; "executions": there are
    # no more of them; None while the race goes on.
    ended: str | None


def race(
    candidates: Sequence[Candidate],
    *,
    larger_is_better: bool,
    tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_executions: int | None = None,
) -> RaceState:
    """Compute the state of a race, and what it executes next, from the executions so far.

    Candidates come smallest size first, without values where none was executed yet;
    `max_executions` is of all together, None for 40 of each. See `judge` for the rest.
    """
    counts = [len(candidate.values) for candidate in candidates]
    looks = race_looks(len(candidates), max_executions)
    left_at = dict.fromkeys(range(len(candidates)), 0)
    racing, verdict, rounds, too_small = set(left_at), None, 0, 0
    for look in looks:
        if min(counts[k] for k in racing) < look:
            break
        rounds = look
        left_at |= dict.fromkeys(racing, look)
        verdict = judge(
            [first_executions(candidates[k], count) for k, count in left_at.items()],
            larger_is_better=larger_is_better,
            tolerance=tolerance,
            confidence=confidence,
            looks=len(looks),
        )
        racing -= set(verdict.worse)
        too_small = 0 if verdict.smallest_tolerance is None else too_small + 1
    upcoming = next((look for look in looks if look > rounds), 0)
    missing = sum(max(0, upcoming - counts[k]) for k in racing)
    ended = None
    if verdict is not None and verdict.certain:
        ended = "certain"
    elif (
        verdict is not None
        and verdict.certified
        and not verdict.promising
        and ((verdict.executions_needed or math.inf) > _WORTH * rounds)
    ):
        ended = "certified"
    elif too_small >= _LOOKS_TO_GIVE_UP:
        ended = "examples"
    elif not upcoming or (max_executions and sum(counts) + missing > max_executions):
        ended = "executions"
    fewest = min(counts[k] for k in racing)
    following = () if ended else tuple(k for k in sorted(racing) if counts[k] == fewest)
    return RaceState(following, verdict, rounds, ended)


def race_looks(candidates: int, max_executions: int | None) -> tuple[int, ...]:
    """Return the rounds after which a race is judged; none where not even the first fits."""
    rounds = LOOKS[-1]
    if max_executions is not None:
        # From the first look on two may be left.
        rounds = LOOKS[0] + (max_executions - LOOKS[0] * candidates) // min(2, candidates)
    return tuple(look for look in LOOKS if look <= rounds)


def first_executions(candidate: Candidate, count: int) -> Candidate:
    """Return a candidate with so many of its executions."""
    kept = None if candidate.outcomes is None else candidate.outcomes[:count]
    return candidate._replace(values=candidate.values[:count], outcomes=kept)
