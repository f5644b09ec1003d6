"""All results: the file, the answer, the table, the notes, the figures and the page."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints
from urllib.parse import unquote

import pandas as pd
import pytest
from html_page import Page
from matplotlib.figure import Figure
from record_samples import FORMS, RECORDS
from records_factory import make_study, make_trial

import kbatch
from kbatch.cli.main import load_result
from kbatch.errors import RecordError
from kbatch.page.document import document_files, shown_columns, table_text
from kbatch.page.result import FIGURES, Result
from kbatch.records.json_codec import write_record
from kbatch.records.notes import KINDS, Note, most_important
from kbatch.report import write_report
from kbatch.study.study import Study

of_every_form = pytest.mark.parametrize("result", FORMS.values(), ids=FORMS)


@of_every_form
def test_result_answer_title_settings_and_repr(result):
    assert result.answer.endswith(".")
    assert "\n" not in result.answer
    assert not re.search(r"\. [A-Z]", result.answer)
    assert 0 < len(result.title) < 60
    assert not result.title.endswith(".")
    assert all(isinstance(text, str) and text for text in result.settings.values())
    assert "\n" not in repr(result)
    assert len(repr(result)) < 240
    assert type(result).__name__ in repr(result)


@of_every_form
def test_result_table(result):
    table = result.table()
    assert isinstance(table, pd.DataFrame)
    assert table.columns.is_unique
    assert set(table.attrs.get("answer", ())) <= set(table.index)
    for name in table.columns:
        value, _, end = name.rpartition(", ")
        if end in ("low", "high"):
            assert {value, f"{value}, low", f"{value}, high"} <= set(table.columns)
        assert name == name[0].lower() + name[1:] or name.split()[0].isupper()
    assert table.to_csv(index=False)
    assert table.to_json(orient="records")
    assert table.to_latex(index=False, escape=True).count("&") or len(table.columns) < 2


@of_every_form
def test_result_notes(result):
    assert len(result.notes) <= 3
    assert all(isinstance(note, Note) for note in result.notes)
    order = [list(KINDS).index(note.code) for note in result.notes]
    assert order == sorted(set(order))


@of_every_form
def test_result_printed(result):
    lines = str(result).splitlines()
    assert lines[0] == result.answer
    use = result.use.splitlines() or [""]
    assert lines[1 : 1 + len(use)] == use
    assert [line for line in lines if line.startswith("Note: ")] == [
        f"Note: {note}" for note in result.notes
    ]
    head = " ".join(
        lines[1 + len(use) + bool(result.use) :][:2]
    ).split()  # A title has up to two lines.
    for column in shown_columns(result.table()):
        assert {*column.title.split()} <= {*head} or max(map(len, column.texts)) > 60
    named = [line for line in lines if line.startswith("* ")]
    assert len(named) == len(result.table().attrs.get("answer", ()))


@of_every_form
def test_result_figures(result):
    figures = result.figures()
    assert len({figure.name for figure in figures}) == len(figures)
    if not figures:
        with pytest.raises(ValueError, match="nothing to draw"):
            result.plot()
        return
    axes = Figure().subplots()
    assert result.plot(axes) is axes
    assert len(axes.get_label().split()) > 5
    for figure in figures[1:]:  # `plot` draws the first one.
        axes = Figure().subplots()
        assert figure.draw(axes) is axes


@of_every_form
def test_result_save_and_load(result, tmp_path):
    path = tmp_path / "there" / "record.json"
    result.save(path)
    assert load_result(path) == result
    if not isinstance(result, Study):
        assert type(result).load(str(path)) == result


@of_every_form
def test_result_notebook_html(result):
    page = Page(result._repr_html_())
    assert page.open == []
    assert not any(map(page.found, ("script", "style", "link", "body")))
    assert result.answer.split(":")[0].split("`")[0] in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_notebook_html_of_many_rows():
    page = Page(make_study(*(make_trial(size) for size in range(16, 116)))._repr_html_())
    assert len(page.found("tr")) == 1 + 40
    assert "60 more rows" in page.text


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"kind": "Study"}'])
def test_load_file_that_is_no_record(name, text, tmp_path):
    (path := tmp_path / "x.json").write_text(text)
    for load in (load_result, getattr(type(RECORDS[name]), "load", load_result)):
        with pytest.raises(RecordError, match=r"x\.json is damaged, or"):
            load(path)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_load_file_of_another_record(record, tmp_path):
    write_record(make_trial(16), tmp_path / "x.json")
    with pytest.raises(RecordError, match=r"x\.json has record type TrialRecord"):
        getattr(type(record), "load", load_result)(tmp_path / "x.json")
    with pytest.raises(RecordError, match="give a file of type"):
        load_result(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_batch_size": 7}, r"x\.json is damaged"),  # This size was not run.
        ({"kbatch_schema": 99}, r"x\.json has schema version 99.*install the version"),
    ],
)
def test_load_file_with_inconsistent_values_or_another_schema(tmp_path, changed, message):
    RECORDS["largest batch"].save(path := tmp_path / "x.json")
    with pytest.raises(RecordError, match=r"none\.json cannot be read: No such file"):
        type(RECORDS["largest batch"]).load(tmp_path / "none.json")
    document = json.loads(path.read_text())
    (document if "kbatch_schema" in changed else document["record"]).update(changed)
    path.write_text(json.dumps(document))
    with pytest.raises(RecordError, match=message):
        load_result(path)


def test_html_of_several_results():
    results = [RECORDS[name] for name in ("comparison", "largest batch", "recommendation")]
    text = document_files(results, HTML)[HTML].decode().replace("\N{NO-BREAK SPACE}", " ")
    first = text.index("</header>")
    for result in results:
        assert result.answer.split(":")[0] in text[:first]
    assert text.count("<article") == len(results)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_markdown_of_several_results(tmp_path):
    few = [RECORDS[name] for name in ("study", "input", "largest batch")]
    written = write_report(few, tmp_path / "all of it.md")
    assert written[-1] == tmp_path / "all of it.md"
    assert sorted(tmp_path.iterdir()) == sorted(written)
    text = (tmp_path / "all of it.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\(([^)]+\.png)\)", text)
    assert sorted(map(unquote, pictures)) == sorted(path.name for path in written[:-1])
    assert "\n\n\n" not in text


# A table with every kind of value. All renderings must write it alike.
HTML = Path("report.html")
TABLE = pd.DataFrame(
    {
        "batch size": [16, 2048],
        "samples/s": [1234.0, None],
        "samples/s, low": [1200.0, None],
        "samples/s, high": [1260.0, None],
        "steps": [3.0, None],
        "learning rate": [0.001, 0.0125],
        "val_accuracy": [0.98125, 0.97],
        "never": [None, None],
        "outcome": ["", "out of | <memory>"],
    }
)
TABLE.attrs = {"answer": [0], "digits": {"val_accuracy": 4}}
TEXTS = [
    ["16", "2,048"],
    ["1,230 (1,200 to 1,260)", "n/a"],
    ["3", "n/a"],
    ["0.001", "0.0125"],
    ["0.9812", "0.9700"],
    ["", "out of | <memory>"],
]


def test_table_text_digits_and_intervals():
    columns = shown_columns(TABLE)
    assert [column.title for column in columns] == [
        *("batch size", "samples/s", "steps", "learning rate", "val_accuracy", "outcome")
    ]
    assert [column.texts for column in columns] == TEXTS
    assert [column.numeric for column in columns] == [True] * 5 + [False]
    assert table_text(TABLE).splitlines() == [
        "  batch                                 learning",
        "   size               samples/s  steps      rate  val_accuracy  outcome",
        "*    16  1,230 (1,200 to 1,260)      3     0.001        0.9812",
        "  2,048                     n/a    n/a    0.0125        0.9700  out of | <memory>",
    ]


def test_table_text_long_texts_below():
    table = pd.DataFrame({"call path": ["compiled", "xla"], "code": ["x" * 70, ""]})
    lines = ["call path", "compiled", "xla", "", f"compiled: {'x' * 70}"]
    assert table_text(table).splitlines() == lines


def test_renderings_have_the_same_table():
    said = {"title": "Title", "answer": "Answer.", "use": "Do `it`.", "notes": (), "settings": {}}
    content = SimpleNamespace(**said, environment=None, figures=tuple, table=lambda: TABLE)
    text = document_files([content], HTML)[HTML].decode()
    assert re.search(r'<tr class="answer">\s*<th[^>]*><span class="tag">answer', text)
    page = Page(text)
    markdown = document_files([content], Path("r.md"))[Path("r.md")].decode()
    for text in (text for texts in TEXTS for text in texts if text):
        assert text in page.text
        assert text in markdown.replace("\\", "")
    assert len(page.found("span")) == 2  # The mark of the answer and the range.
    assert [row.get("class") for row in page.found("tr")] == [None, "answer", None]
    assert "| **16** | **1,230 (1,200 to 1,260)** |" in markdown
    assert r"out of \| \<memory\>" in markdown


def test_most_important_notes():
    codes = list(KINDS)
    notes = [Note.of("data_end"), Note.of("peaks_differ", refuted=4), Note.of("data_end")]
    assert [note.code for note in most_important(notes)] == ["peaks_differ", "data_end"]
    assert codes.index("peaks_differ") < codes.index("data_end")
    many = [*notes, Note.of("rows_differ", elements=3), Note.of("measured_here", why="gpu")]
    assert len(most_important(many)) == 3


def test_results_are_public_and_have_figures():
    kinds = {type(record) for record in RECORDS.values()}
    assert all(issubclass(kind, Result) and kind.__name__ in kbatch.__all__ for kind in kinds)
    assert FIGURES.keys() == {kind.__name__ for kind in kinds}


# The fields of records with free text: names, messages of a user or a library, the machine. All
# other stored texts must be codes, which are turned into sentences when they are shown.
WORDS = """
ChangeRecord.code EnvironmentRecord.command EnvironmentRecord.cpu EnvironmentRecord.created_at
EnvironmentRecord.devices EnvironmentRecord.platform EnvironmentRecord.versions EpochRecord.metrics
ExecutionRecord.data ExecutionRecord.device ExecutionRecord.dtype_policy ExecutionRecord.failure
ExecutionRecord.first_order ExecutionRecord.initial_weights ExecutionRecord.optimizer
ExecutionRecord.rate_callbacks ExecutionRecord.reported ExecutionRecord.traceback
ExecutionRecord.weight_shapes GpuUsage.name GpuUsage.pci_bus_id
GpuUsage.tensorflow_devices InferenceProfile.class_changes InferenceProfile.model_name
InferenceProfile.output_changes
InputPipelineProfile.dtype_policy LearningRateScaling.follow_batch_size LearningRateScaling.given
LearningRateScaling.made MaxBatchSizeResult.device MaxBatchSizeResult.dtype_policy
MemoryRecord.dtype_policy Objective.name Outcomes.key Outcomes.metric Plan.dtype_policy Plan.model
Progress.host Recommendation.dtype_policy Recommendation.model_name Recommendation.optimizer
SearchRecord.facts
SearchRecord.hyperparameters SearchRecord.settings Study.name Study.problems Target.metric
TimingRecord.call_path TimingRecord.dtype_policy TrainingProfile.dtype_policy
TrainingProfile.model_name TrialRecord.hyperparameters TrialRecord.trial_id UsageRecord.unavailable
"""


def types_in(hint):
    """Return a type and all its parts: members of a union, items of a tuple."""
    parts = () if get_origin(hint) is Literal else get_args(hint)
    return [hint, *(inner for part in parts for inner in types_in(part))]


def test_stored_texts_are_codes_names_or_messages():
    kinds, words, codes = list(map(type, RECORDS.values())), set(), set(KINDS)
    for kind in kinds:  # The loop adds the records that are fields of others.
        for field in dataclasses.fields(kind):
            for hint in types_in(get_type_hints(kind)[field.name]):
                words |= {f"{kind.__name__}.{field.name}"} if hint is str else set()
                codes |= {*get_args(hint)} if get_origin(hint) is Literal else set()
                if dataclasses.is_dataclass(hint) and hint not in kinds:
                    kinds.append(hint)
    assert words == {*WORDS.split()}
    assert {code for code in codes if not re.fullmatch("[a-z0-9_]+", code)} == set()
