"""What a report says, computed before it is rendered, and the records that it reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from kbatch.records.json_codec import RecordError, read_json, read_record, shown
from kbatch.study.report import study_section
from kbatch.study.study import Study, load_study
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
# What makes the section of each record that is kept as a file of its own.
_SECTION_OF: dict[type[Any], Callable[[Any], Section]] = {
    InferenceProfile: inference_section,
    InputPipelineProfile: input_section,
    MaxBatchSizeResult: max_batch_section,
    Recommendation: recommendation_section,
    Study: study_section,
    TrainingProfile: training_section,
}


class ReportContent(NamedTuple):
    title: str
    sections: tuple[Section, ...]  # One a record.
    environment: tuple[Fact, ...]  # Machine and software that all records share.


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
    return ReportContent(title, own, shared)


def section_of(record: Reported) -> Section:
    if type(record) in _SECTION_OF:
        return _SECTION_OF[type(record)](record)
    raise ValueError(
        "A report needs a `Study`, a `TrainingProfile`, an `InferenceProfile`, an "
        "`InputPipelineProfile`, a `MaxBatchSizeResult` or a `Recommendation`, or a list of them. "
        f"Received: {record!r}."
    )


def load_record(path: str | Path) -> Reported:
    """Read a study from the folder of its search, or whatever record a JSON file holds."""
    path = Path(path)
    if not path.is_file():
        return load_study(path)
    try:
        name = shown(read_json(path)["kind"], str)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is no kbatch record or is damaged: {error!r}.") from error
    kinds = {kind.__name__: kind for kind in _SECTION_OF}
    if name not in kinds:
        raise RecordError(
            f"{path} holds a {name}: a file must hold one of {', '.join(kinds)}. For a study "
            "give the folder of its search (`directory/project_name`)."
        )
    return read_record(kinds[name], path)
