"""A trial whose record is damaged or lost may have been the best: every page says so."""

import pytest
from figure_studies import learned_study
from records_factory import make_search

import kbatch
from kbatch.cli.main import main
from kbatch.records.json_codec import write_record

TEXT = "1 trial is missing: its record is damaged or lost, and it may have been the best."


def lost(folder):
    """Damage the record of the best trial, of which keras-tuner's file says that it ended."""
    best = kbatch.load_study(folder).decide().trial
    file = folder / f"trial_{best.trial_id}" / "kbatch.json"
    file.with_name("trial.json").write_text('{"status": "COMPLETED"}')
    return file


@pytest.fixture(params=["damaged", "lost"])
def project(request, tmp_path):
    study, folder = learned_study(2, sizes=(16, 64, 256)), tmp_path / "search"
    write_record(study.search or make_search(), folder / "kbatch.json")
    for trial in study.trials:
        write_record(trial, folder / f"trial_{trial.trial_id}" / "kbatch.json")
    file = lost(folder)
    file.write_text("") if request.param == "damaged" else file.unlink()
    return folder


def test_the_study_counts_it_and_names_its_file(project):
    study = kbatch.load_study(project)
    assert study.missing == 1
    assert "1 missing" in repr(study)
    (problem,) = study.problems
    assert str(project) in problem


def test_report_and_figure_say_so_and_commands_on_the_terminal(project, tmp_path, capsys):
    report = tmp_path / "r.md"
    assert main(["report", str(project), "-o", str(report)]) == 0
    assert f"left out: {project}/trial_" in capsys.readouterr().err
    assert TEXT in report.read_text()
    assert TEXT in kbatch.plot_trials(kbatch.load_study(project)).get_label()


def test_a_project_of_keras_tuner_alone_is_no_study(tmp_path):
    (tmp_path / "trial_0").mkdir()
    (tmp_path / "trial_0" / "trial.json").write_text('{"status": "COMPLETED"}')
    with pytest.raises(FileNotFoundError):
        kbatch.load_study(tmp_path)
