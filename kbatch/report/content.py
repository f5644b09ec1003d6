"""What a report says, computed before it is rendered."""

from collections.abc import Sequence
from typing import NamedTuple

from kbatch.document.numbers import counted
from kbatch.document.section import Fact, Section
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.report import inference_section
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.input_pipeline.report import input_section
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.report import max_batch_section
from kbatch.recommendation.record import Recommendation
from kbatch.recommendation.report import recommendation_section
from kbatch.study.report import study_section
from kbatch.study.study import Study
from kbatch.throughput.record import TrainingProfile
from kbatch.throughput.report import training_section

Reported = (
    Study
    | TrainingProfile
    | InferenceProfile
    | InputPipelineProfile
    | MaxBatchSizeResult
    | Recommendation
)


class ReportContent(NamedTuple):
    """What a report says.

    Attributes:
        title: Title of the document.
        sections: What each record says.
        environment: Machine and software that all records share.
    """

    title: str
    sections: tuple[Section, ...]
    environment: tuple[Fact, ...]


def report_content(study_or_profiles: Reported | Sequence[Reported]) -> ReportContent:
    """Compute what a report says of one record or of several."""
    records = _listed(study_or_profiles)
    sections = [section_of(record) for record in records]
    shared = tuple(
        fact for fact in sections[0].environment if all(fact in s.environment for s in sections)
    )
    own = (s._replace(environment=_without(s.environment, shared)) for s in sections)
    single = len(sections) == 1
    title = f"{sections[0].name}: which batch size?" if single else _title(sections)
    return ReportContent(title, tuple(own), shared)


def section_of(record: Reported) -> Section:
    """Compute what a report says of one record."""
    match record:
        case Study():
            return study_section(record)
        case TrainingProfile():
            return training_section(record)
        case InferenceProfile():
            return inference_section(record)
        case InputPipelineProfile():
            return input_section(record)
        case MaxBatchSizeResult():
            return max_batch_section(record)
        case Recommendation():
            return recommendation_section(record)
    raise ValueError(
        "A report needs a `Study`, a `TrainingProfile`, an `InferenceProfile`, an "
        "`InputPipelineProfile`, a `MaxBatchSizeResult` or a `Recommendation`, or a list of them. "
        f"Received: {record!r}."
    )


def _listed(study_or_profiles: Reported | Sequence[Reported]) -> list[Reported]:
    if not isinstance(study_or_profiles, Sequence):
        return [study_or_profiles]
    if not study_or_profiles:
        raise ValueError(
            "There is nothing to report: give a study, a profile, or a list of them. "
            f"Received: {study_or_profiles!r}."
        )
    return list(study_or_profiles)


def _title(sections: Sequence[Section]) -> str:
    return f"Which batch size? {counted(len(sections), 'answer')}"


def _without(facts: Sequence[Fact], others: Sequence[Fact]) -> tuple[Fact, ...]:
    return tuple(fact for fact in facts if fact not in others)
