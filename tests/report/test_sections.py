"""What a report says of each kind of record, and of several in one document."""

import re
from pathlib import Path

import inference_factory
import pytest
from figure_studies import max_batch_result
from recommendation_factory import make_recommendation
from record_samples import RECORDS as SAMPLES
from records_factory import make_environment, make_execution, make_study, make_trial

from kbatch.document.section import environment_facts
from kbatch.report.content import report_content, section_of
from kbatch.report.pages import glued, markdown_files, render_html, write_report
from kbatch.study.report import MOST_CURVES

PROFILE = inference_factory.make_profile()
RECORDS = tuple(SAMPLES.values())


def test_the_largest_batch_is_marked_among_its_probes():
    result = max_batch_result()
    table = section_of(result).tables[0]
    best = [row.cells[0].sort_key for row in table.rows if row.best]
    assert set(best) == {result.max_batch_size}


def test_a_recommendation_is_told_by_its_start_its_range_and_its_limits():
    section = section_of(make_recommendation())
    assert section.headline.startswith("Start with batch size 128 ")
    assert "`batch_sizes=[32, 64, 128, 256, 512]`" in section.lead[-1]
    assert [line.split()[0] for line in section.details] == [
        *("Memory:", "Hardware", "Gradient", "Input")
    ]
    (best,) = [row for row in section.tables[0].rows if row.best]
    assert best.texts[0] == "128"
    unknown = section_of(make_recommendation(timings=()))
    assert unknown.headline.startswith("No batch size can be named, because")
    assert unknown.tables == ()


def test_several_records_make_one_document_with_their_decisions_first():
    text = render_html(list(RECORDS))
    first = text.index("</header>")
    for section in report_content(list(RECORDS)).sections:
        assert glued(section.headline.split(":")[0]) in text[:first]
    assert text.count("<article") == len(RECORDS)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    links = re.findall(r'href="#([^"]+)"', text)
    assert set(links) <= set(ids)


def test_what_all_environments_share_stands_once():
    content = report_content([make_study(), PROFILE])
    assert [section.environment for section in content.sections] == [(), ()]
    assert ("keras", "3.15.1") in content.environment


@pytest.mark.parametrize(
    ("created_at", "shown"),
    [("2025-01-02T03:04:05+00:00", "2025-01-02 03:04 UTC"), ("long ago", "long ago")],
)
def test_the_start_is_told_to_the_minute(created_at, shown):
    facts = environment_facts(make_environment(created_at=created_at))
    assert ("Started", shown) in facts


def test_markdown_of_several_records_has_a_picture_a_figure(tmp_path):
    written = write_report(list(RECORDS), tmp_path / "all.md")
    assert written[-1] == tmp_path / "all.md"
    assert sorted(tmp_path.iterdir()) == sorted(written)
    text = (tmp_path / "all.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\(([^)]+\.png)\)", text)
    assert sorted(pictures) == sorted(path.name for path in written[:-1])
    assert "\n\n\n" not in text


def test_a_note_has_the_same_mark_in_both_forms():
    study = make_study(make_trial(16, make_execution(16, workers_on_device=2)), make_trial(32))
    page = render_html(study)
    markdown = markdown_files(study, Path("r.md"))[Path("r.md")].decode()
    (mark,) = [note.mark for note in section_of(study).notes if note.label == "shared device"]
    assert f'<a href="#s1-note-{mark}" aria-label="note {mark}">' in page
    assert f"- <sup>{mark}</sup> The device was shared by 2 workers" in markdown


def test_too_many_learning_curves_are_left_out_and_said_so():
    few = make_study(*(make_trial(16 + k) for k in range(MOST_CURVES)))
    many = make_study(*(make_trial(16 + k) for k in range(MOST_CURVES + 1)))
    for study, drawn in ((few, True), (many, False)):
        section = section_of(study)
        figures = [figure.name for figure in section.figures]
        assert ("learning-curves-updates" in figures) is drawn
        assert any("are left out" in note.text for note in section.notes) is not drawn


@pytest.mark.parametrize("given", ["a study", None, 3, [make_study(), "another"]])
def test_what_is_no_record_is_refused(given, tmp_path):
    with pytest.raises(ValueError, match="A report needs a `Study`"):
        write_report(given, tmp_path / "report.html")


def test_an_empty_list_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is nothing to report"):
        write_report([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
