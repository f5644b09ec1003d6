"""`kbatch report` and `kbatch export` on saved records, without TensorFlow."""

import json

import inference_factory
import pandas as pd
import pytest
from records_factory import make_environment, make_study, make_trial

from kbatch.cli.main import main
from kbatch.records.json_codec import write_record
from kbatch.study.study import SearchRecord


@pytest.fixture
def project(tmp_path):
    """The project directory of a search with two trials."""
    for size in (16, 32):
        write_record(make_trial(size), tmp_path / "search" / f"trial_{size:04d}" / "kbatch.json")
    search = SearchRecord({"seed": 0}, make_environment())
    write_record(search, tmp_path / "search" / "kbatch.json")
    return tmp_path / "search"


def printed(capsys):
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_every_file_written_is_printed(project, tmp_path, capsys, suffix):
    report = tmp_path / "out" / f"report{suffix}"
    assert main(["report", str(project), "-o", str(report)]) == 0
    lines = printed(capsys)
    assert lines[-1] == str(report)
    assert sorted(lines) == sorted(str(path) for path in report.parent.iterdir())


def test_several_records_make_one_document(project, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    inference_factory.make_profile().save(profile)
    report = tmp_path / "report.html"
    assert main(["report", str(project), str(profile), "-o", str(report)]) == 0
    text = report.read_text(encoding="utf-8")
    assert "Which batch size? 2 answers" in text
    assert text.count("<article") == 2


def test_a_study_in_which_all_failed_has_a_report_that_says_so(tmp_path):
    write_record(make_trial(16, status="failed"), tmp_path / "trial_0016" / "kbatch.json")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No batch size can be named: none of 1 trial completed (1 failed)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "{empty}"], "tuner.search"),
        (["export", "{empty}", "-o", "{folder}/trials.csv"], "tuner.search"),
        (["report", "{folder}"], "There is no kbatch study in"),
        (["report", "{folder}/nothing.json"], "nothing.json"),
        (["report", "{text}"], "is no kbatch record or is damaged"),
        (["report", "{trial}"], "holds a TrialRecord"),
        (["report", "{good}", "-o", "{folder}/report.pdf"], "`.html` (one file) or `.md`"),
        (["report", "{good}", "{text}"], "is no kbatch record or is damaged"),
        (["export", "{good}", "-o", "{folder}/trials.xlsx"], ".csv or .json"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_leaves_no_file(words, message, tmp_path, capsys):
    make_study().save(tmp_path / "good.json")
    (tmp_path / "text.json").write_text("[1, 2]")
    write_record(make_trial(16), tmp_path / "trial.json")
    write_record(SearchRecord({}, make_environment()), tmp_path / "empty" / "kbatch.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    places = {name: tmp_path / f"{name}.json" for name in ("good", "text", "trial")}
    places |= {"empty": tmp_path / "empty", "folder": folder}
    out = [] if "-o" in words else ["-o", str(folder / "report.html")]
    assert main([*(word.format(**places) for word in words), *out]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["trials.csv", "new/trials.json"])
def test_the_trials_are_exported_as_a_table(project, tmp_path, capsys, name):
    path = tmp_path / name
    assert main(["export", str(project), "-o", str(path)]) == 0
    assert printed(capsys) == [str(path)]
    if name.endswith(".csv"):
        table = pd.read_csv(path)
    else:
        table = pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
    assert list(table.batch_size) == [16, 32]
    assert list(table.val_accuracy) == [0.97, 0.97]
    assert list(table.status) == ["completed", "completed"]
