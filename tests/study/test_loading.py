"""Loading studies from files: complete, damaged, missing and running ones."""

import dataclasses
import json
import os
import platform
import re
import shutil
import time
import types
from pathlib import Path

import psutil
import pytest
from records_factory import make_search, make_study, make_trial, write_search

import kbatch
from kbatch.cli.main import main
from kbatch.errors import RecordError
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import Progress
from kbatch.study.study import load_study


@pytest.fixture
def project(tmp_path):
    """The folder of a search with three trials, whose ids are not in the order of sizes."""
    sizes = {"0": 128, "1": 16, "2": 64}
    one_epoch = {"accuracies": (0.97,)}  # Without curves, a report is drawn fast.
    trials = (make_trial(size, trial_id=name, **one_epoch) for name, size in sizes.items())
    return write_search(tmp_path / "results" / "digits", *trials)


@pytest.mark.parametrize("give", [str, lambda p: p, lambda p: types.SimpleNamespace(project_dir=p)])
def test_load_study_from_folder_or_tuner(project, give):
    study = load_study(give(project))
    assert study.name == "digits"
    assert [trial.batch_size for trial in study.trials] == [16, 64, 128]
    assert (study.search, study.problems) == (make_search(), ())
    # A report tells how to load the study again, also from a file.
    study.save(project / "study.json")
    for again, path in ((study, project), (load_study(project / "study.json"), "study.json")):
        code = re.search(r"  decision = (.*)\n  model = decision\.apply", again.use)[1]
        assert str(path) in code and eval(code).page == study.decide().page
    assert "load_study" not in make_study().use


def test_load_study_without_records(project, tmp_path):
    (tmp_path / "empty").mkdir()
    # Files of keras-tuner alone are no study.
    (tmp_path / "other" / "trial_0").mkdir(parents=True)
    (tmp_path / "other" / "trial_0" / "trial.json").write_text('{"status": "COMPLETED"}')
    for folder in ("missing", "empty", "other"):
        with pytest.raises(FileNotFoundError, match=r"directory/project_name.*BatchSizeHyperModel"):
            load_study(tmp_path / folder)
    with pytest.raises(FileNotFoundError, match=f"The folder {project} holds a study"):
        load_study(project.parent)
    with pytest.raises(RecordError, match="record type TrialRecord, not Study"):
        load_study(project / "trial_0" / "kbatch.json")


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({}, True),
        ({"process": None}, False),
        ({"process": 2**22 + 1}, False),
        ({"process_began_at": 1.0}, False),
        ({"host": "another"}, True),
        ({"host": "another", "written_at": 1.0}, False),
    ],
    ids=str,
)
def test_load_study_of_running_or_dead_search(project, changed, runs, capsys):
    process = psutil.Process()
    here = {"host": platform.node(), "process": process.pid, "written_at": time.time()}
    here |= {"process_began_at": process.create_time(), "most_trainings": 14.0, "left_s": 1860.5}
    write_record(Progress(**here | {"search_s": 60.0} | changed), project / "kbatch-progress.json")
    write_search(project, make_trial(256, status="running", trial_id="3"))
    study = load_study(project)
    text = "Running: 3 of at most 14 complete trainings, about 31 min left."
    assert study.answer.startswith(text) is runs
    assert study.trials[-1].status == ("running" if runs else "interrupted")
    named = study.decide().page.sentences[0]
    assert named.startswith("The search is unfinished (3 of at most 14 complete") is not runs
    assert not {"to_be_certain", "sizes_not_compared"} & {n.code for n in study.decide().notes}
    ended = dataclasses.replace(study.progress, process=None, left_s=0.0)
    ended = dataclasses.replace(study, progress=ended)
    assert ended.decide().page.sentences[0].startswith("Keep batch size 16")
    cost = text if runs else "Search: 3 complete trainings in 60 s."
    assert study.decide().page.cost.startswith(cost)
    study.save(project / "study.json")  # The file is read with the current state of the process.
    assert load_study(project / "study.json").trials == study.trials
    if changed in ({}, {"process": None}):  # Drawing takes long.
        marks = [line.get_marker() for line in kbatch.plot_trials(study).lines]
        assert ("X" in marks) is not runs
        assert main(["report", str(project), "-o", str(project / "report.md")]) == 0
        assert (text in capsys.readouterr().out) is runs
        assert (text in (project / "report.md").read_text()) is runs
    for folder in project.glob("trial_*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="not begun" if runs else "has no trial"):
        kbatch.plot_trials(load_study(project))


def edited(trial, **changed):
    record = trial["record"]
    (execution,) = record["executions"]
    return json.dumps(trial | {"record": record | {"executions": [execution | changed]}})


@pytest.mark.parametrize("damage", ["nested deeply", "the id of another", "a pipe"])
def test_load_study_damaged_trial_is_left_out(project, damage):
    file = project / "trial_2" / "kbatch.json"
    other = file.read_text().replace('"trial_id": "2"', '"trial_id": "0"')
    file.unlink()
    if damage == "a pipe":
        os.mkfifo(file)  # Reading it would never end.
    else:
        file.write_text(other if damage == "the id of another" else "[" * 100_000)
    study = load_study(project)
    assert [trial.trial_id for trial in study.trials] == ["1", "0"]
    (problem,) = study.problems
    assert problem.startswith(str(file))
    assert len(problem) < 500


@pytest.mark.parametrize("state", ["[" * 100_000, '{"status": "FAILED", "message": 3}', "{}"])
def test_load_study_damaged_keras_tuner_state(project, state):
    file = project / "trial_3" / "trial.json"
    file.parent.mkdir()
    file.write_text(state)
    assert len(load_study(project).trials) == 3


def test_load_study_replaces_unprintable_text(project, tmp_path):
    file = project / "trial_2" / "kbatch.json"
    file.write_text(edited(json.loads(file.read_text()), failure="a\ud800b\x1b[2J"))
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9\n$x$"))
    project.rename(folder)
    (folder / "trial_1" / "kbatch.json").write_text("{")
    study = load_study(folder)
    assert study.name == "caf\N{REPLACEMENT CHARACTER} $x$"
    assert [trial.failure for trial in study.trials] == ["a\ufffdb\ufffd[2J", None]
    (problem,) = study.problems
    assert "caf\N{REPLACEMENT CHARACTER}".encode() in problem.encode()
    study.save(tmp_path / "study.json")
    assert load_study(tmp_path / "study.json") == study


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_missing_trial_is_noted_on_every_page(how, tmp_path, capsys):
    study = make_study(*(make_trial(size, accuracies=(0.97,)) for size in (16, 64)))
    folder = write_search(tmp_path / "search", *study.trials)
    file = folder / f"trial_{study.decide().trial.trial_id}" / "kbatch.json"
    # In keras-tuner's file the trial has ended.
    file.with_name("trial.json").write_text('{"status": "COMPLETED"}')
    file.write_text("") if how == "damaged" else file.unlink()
    study = load_study(folder)
    assert study.missing == 1
    assert "1 missing" in repr(study)
    (problem,) = study.problems
    assert str(file.parent) in problem
    report = tmp_path / "r.md"
    assert main(["report", str(folder), "-o", str(report)]) == 0
    assert f"left out: {folder}/trial_" in capsys.readouterr().err
    assert study.notes[0].code == "trials_missing"
    assert study.notes[0] in report.read_text()
    assert study.notes[0] in kbatch.plot_trials(study).get_label()
