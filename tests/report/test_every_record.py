"""What holds for every record: its file, its report, its line in print, its cell in a notebook."""

import dataclasses
import json

import pytest
from html_page import Page
from record_samples import FORMS, RECORDS
from records_factory import make_study, make_trial

from kbatch.records.json_codec import RecordError, write_record
from kbatch.report.content import load_record, section_of
from kbatch.report.pages import glued, render_html
from kbatch.study.study import Study


def loaders(record):
    """Return what reads the file of a record: a study has no `load` of its own."""
    return [load_record, *([type(record).load] if hasattr(type(record), "load") else [])]


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_it_is_read_as_it_was_written(record, tmp_path):
    path = tmp_path / "there" / "record.json"
    record.save(path)
    for load in loaders(record):
        assert load(path) == load(str(path)) == record


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_printed_it_is_one_short_line(record):
    assert "\n" not in repr(record)
    assert len(repr(record)) < 160
    assert type(record).__name__ in repr(record)


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_in_a_notebook_it_is_whole_html_without_what_notebooks_take_away(record):
    page = Page(record._repr_html_())
    assert page.open == []
    assert not any(map(page.found, ("script", "style", "link", "body")))
    assert section_of(record).headline.split(":")[0] in page.text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_its_report_has_an_answer_and_whole_tables(record):
    section = section_of(record)
    assert section.headline.endswith(".")
    assert all(len(row.cells) == len(t.columns) for t in section.tables for row in t.rows)
    assert glued(section.headline.split(":")[0]) in render_html(record)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_the_report_of_a_whole_one_has_figures_and_how_it_was_measured(record):
    section = section_of(record)
    assert section.lead
    assert section.tables[0].rows
    assert section.figures
    assert ("tensorflow", "2.21.0") in section.environment
    assert section.command


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"kind": "Study"}'])
def test_a_file_that_is_no_record_is_named(name, text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    for load in loaders(RECORDS[name]):
        with pytest.raises(RecordError, match=r"x\.json is no kbatch record or is damaged"):
            load(tmp_path / "x.json")


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_the_file_of_another_record_is_named(record, tmp_path):
    write_record(make_trial(16), tmp_path / "x.json")
    for load in loaders(record):
        with pytest.raises(RecordError, match=r"x\.json holds a TrialRecord"):
            load(tmp_path / "x.json")
    with pytest.raises(RecordError, match="give the folder"):
        load_record(tmp_path / "x.json")


def test_a_file_of_another_kbatch_is_refused_with_what_to_do(tmp_path):
    document = {"kbatch_schema": 99, "kind": "Study", "record": {}}
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"x\.json has schema version 99.*use the version"):
        load_record(tmp_path / "x.json")


def test_a_folder_is_a_study_or_is_told_what_one_is(tmp_path):
    for name in ("missing.json", "missing"):
        with pytest.raises(FileNotFoundError, match=name):
            load_record(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="needs the project directory of a search"):
        load_record(tmp_path)
    write_record(make_trial(16), tmp_path / "trial_0016" / "kbatch.json")
    assert [trial.batch_size for trial in load_record(tmp_path).trials] == [16]


def test_the_lines_tell_what_matters():
    assert repr(RECORDS["study"]) == (
        "<Study 'digits': 7 trials, 6 completed, batch sizes 16 to 4096, "
        "batch size 64 with val_accuracy 0.981>"
    )
    assert repr(Study("empty", ())) == "<Study 'empty': 0 trials, 0 completed>"
    trial = RECORDS["study"].trials[0]
    assert repr(trial).startswith("<TrialRecord '0016': batch size 16, mixed_float16, completed")
    (run,) = trial.executions
    assert repr(run).startswith("<ExecutionRecord completed: batch size 16")
    long = dataclasses.replace(run, epochs=run.epochs * 500)
    assert len(repr(dataclasses.replace(trial, executions=(long,) * 5))) < 160


def test_a_study_without_trials_says_in_a_notebook_what_to_run():
    assert "kbatch demo" in Page(Study("digits", ())._repr_html_()).text


def test_of_many_rows_a_notebook_shows_the_first_and_counts_the_rest():
    page = Page(make_study(*(make_trial(size) for size in range(16, 116)))._repr_html_())
    assert len(page.found("tr")) == 1 + 40
    assert "60 more rows" in page.text


def test_a_name_is_no_markup_in_a_notebook():
    page = make_study(name="<b>digits</b>", problems=("<script>",))._repr_html_()
    assert "<b>digits" not in page
    assert "<script>" not in page
