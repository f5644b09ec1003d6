"""What a report says, computed before it is rendered."""

from collections.abc import Sequence
from typing import NamedTuple

from kbatch.document.numbers import pluralize
from kbatch.document.section import Fact, Section
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.report import inference_section
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.input_pipeline.report import input_section
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.report import max_batch_section
from kbatch.recommendation.record import Recommendation
from kbatch.recommendation.report import recommendation_section
from kbatch.report.what_if import WhatIf, what_if
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
    """What a report says."""

    title: str
    sections: tuple[Section, ...]  # One a record.
    environment: tuple[Fact, ...]  # Machine and software that all records share.
    what_ifs: tuple[WhatIf | None, ...] = ()  # One a record, for pages that a reader can move.


def report_content(study_or_profiles: Reported | Sequence[Reported]) -> ReportContent:
    if not isinstance(study_or_profiles, Sequence):
        study_or_profiles = [study_or_profiles]
    if not study_or_profiles:
        raise ValueError(
            "There is nothing to report: give a study, a profile, or a list of them. "
            f"Received: {study_or_profiles!r}."
        )
    sections = [section_of(record) for record in study_or_profiles]
    shared = tuple(
        fact for fact in sections[0].environment if all(fact in s.environment for s in sections)
    )
    own = tuple(
        s._replace(environment=tuple(fact for fact in s.environment if fact not in shared))
        for s in sections
    )
    title = f"{sections[0].name}: which batch size?"
    if len(sections) > 1:
        title = f"Which batch size? {pluralize(len(sections), 'answer')}"
    return ReportContent(title, own, shared, tuple(map(what_if, study_or_profiles)))


def section_of(record: Reported) -> Section:
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
