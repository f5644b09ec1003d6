"""The batch sizes that an inference profile answers."""

from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.inference.inference_record import InferenceProfile


class Answer(NamedTuple):
    """One question with its answer.

    Attributes:
        question: What was asked.
        words: What the batch size does, as the end of a sentence.
        batch_size: The size in examples, None where the measurements do not tell.
        interval: Its 95 % interval in examples, None if it has none.
        verified: Whether fresh calls kept to the target; None where there is none.
        reason: Where the answer comes from, or why there is none.
        extrapolated: Whether the size lies outside the measured ones.
    """

    question: str
    words: str
    batch_size: int | None
    interval: Interval | None
    verified: bool | None
    reason: str
    extrapolated: bool = False


_QUESTIONS = (
    ("efficient", "90 % of the peak throughput", "is the smallest with 90 % of the peak rate"),
    ("knee", "Largest throughput over latency", "has the largest throughput over latency"),
    ("fastest", "Largest measured throughput", "had the largest throughput"),
)


def answers(profile: InferenceProfile) -> tuple[Answer, ...]:
    """Asks a profile for the batch sizes it can tell, those of latency targets first."""
    first = profile.series[0]
    targets = dict.fromkeys(
        (check.latency_ms, check.quantile)
        for check in profile.checks
        if (check.call_path, check.dtype_policy) == first
    )
    return (
        *(_within(profile, latency_ms, quantile) for latency_ms, quantile in targets),
        *(_named(profile, *question) for question in _QUESTIONS),
    )


def _within(profile: InferenceProfile, latency_ms: float, quantile: float) -> Answer:
    question = f"Within {latency_ms:g} ms at the {quantile:g} quantile"
    words = f"is the largest of which {100 * quantile:g} % of the calls keep to {latency_ms:g} ms"
    try:
        found = profile.batch_for(latency_ms=latency_ms, quantile=quantile)
    except ValueError as error:
        return Answer(question, words, None, None, None, str(error))
    return Answer(
        question,
        words,
        found.batch_size,
        found.interval,
        found.verified,
        found.reason,
        found.extrapolated,
    )


def _named(profile: InferenceProfile, name: str, question: str, words: str) -> Answer:
    try:
        found = getattr(profile, name)
    except ValueError as error:
        return Answer(question, words, None, None, None, str(error))
    return Answer(
        question, words, found.batch_size, found.interval, None, found.reason, found.extrapolated
    )
