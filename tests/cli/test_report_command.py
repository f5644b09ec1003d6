"""`kbatch report` and `kbatch export` on saved records, without TensorFlow."""

import inference_factory
import pytest
from records_factory import make_environment, make_trial

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
    assert text.count("<article") == 2
    assert text.count("<article") == 2
