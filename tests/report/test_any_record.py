"""Records that are read without being told what they are."""

import json

import inference_factory
import input_profile_factory
import pytest
from figure_studies import max_batch_result
from recommendation_factory import make_recommendation
from records_factory import make_study, make_trial
from training_profile_factory import training_profile

from kbatch.records.json_codec import RecordError, write_record
from kbatch.report.content import load_record

RECORDS = (
    make_study(),
    inference_factory.make_profile(),
    input_profile_factory.make_profile(),
    max_batch_result(),
    training_profile(),
    make_recommendation(),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_file_is_read_as_what_it_holds(record, tmp_path):
    record.save(tmp_path / "record.json")
    assert load_record(tmp_path / "record.json") == record
    assert load_record(str(tmp_path / "record.json")) == record


def test_a_folder_is_a_study(tmp_path):
    write_record(make_trial(16), tmp_path / "trial_0016" / "kbatch.json")
    assert [trial.batch_size for trial in load_record(tmp_path).trials] == [16]


def test_a_record_that_is_part_of_a_study_names_the_folder_to_give(tmp_path):
    write_record(make_trial(16), tmp_path / "kbatch.json")
    with pytest.raises(RecordError, match=r"kbatch\.json holds a TrialRecord: .*folder"):
        load_record(tmp_path / "kbatch.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"kind": "Study"}'])
def test_a_file_that_is_no_record_is_named(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RecordError, match=r"x\.json is no kbatch record or is damaged"):
        load_record(tmp_path / "x.json")


def test_a_file_of_another_kbatch_is_refused_with_what_to_do(tmp_path):
    document = {"kbatch_schema": 99, "kind": "Study", "record": {}}
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"x\.json has schema version 99.*use the version"):
        load_record(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["missing.json", "missing"])
def test_what_does_not_exist_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=name):
        load_record(tmp_path / name)


def test_a_folder_without_a_study_says_what_a_study_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="needs the project directory of a search"):
        load_record(tmp_path)
